"""The rotary embedding of a configuration, wherever its file keeps it; scaled ropes are refused.

Knows the section names of all transformers versions; makes no tables.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ExportError
from .fields import Fields


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, rotated width and, for M-RoPE, interleaved (t, h, w) sections."""

    theta: float
    rotary_dim: int
    mrope_section: tuple[int, ...] | None


def rope_fields(fields: Fields) -> Fields:
    """The places of rope values: `rope_parameters`, then `rope_scaling`, then the fields' own.

    A scaled or partial rope in any of them is refused, also where another place would win:
    transformers 4 reads one of the sections and transformers 5 the other.
    """
    sections = [s for key in ("rope_parameters", "rope_scaling") for s in fields.sections(key)]
    for place in (*sections, fields):
        place.refuse("partial_rotary_factor", 1)
    for section in sections:
        section.refuse("rope_type", "default", "mrope")
        section.refuse("type", "default", "mrope")
        section.refuse("factor", 1)
        # Ropes that differ by layer kind.
        section.refuse("full_attention")
        section.refuse("sliding_attention")
    places = (*sections, fields)
    return places[0].otherwise(*places[1:])


def parse_mrope(text: Fields, head_dim: int) -> RopeConfig:
    """A target's rope, which must be interleaved M-RoPE over the whole head."""
    rope = rope_fields(text)
    section = rope.integers("mrope_section")
    if rope.flag("mrope_interleaved") is not True:
        raise ExportError(
            f"{rope.place_of('mrope_interleaved')}: only interleaved M-RoPE is supported; "
            "'mrope_interleaved' must be true."
        )
    if len(section) != 3 or 2 * sum(section) != head_dim:
        raise rope.bad("mrope_section", f"three numbers that add up to {head_dim // 2}", section)
    return RopeConfig(rope.number("rope_theta", above=0.0), head_dim, section)
