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


def rope_fields(fields: Fields, partial: bool = False) -> Fields:
    """The places of rope values: `rope_parameters`, then `rope_scaling`, then the fields' own.

    A scaled rope in any of them is refused, and unless `partial` one over a part of the head,
    also where another place would win: transformers 4 reads one section, transformers 5 the other.
    """
    sections = [s for key in ("rope_parameters", "rope_scaling") for s in fields.sections(key)]
    for place in (*sections, fields) if not partial else ():
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


def parse_rope(text: Fields, head_dim: int) -> RopeConfig:
    """A text-only target's rope: one axis, over the whole head."""
    theta = rope_fields(text).number("rope_theta", above=0.0)
    return RopeConfig(theta, head_dim, None)


def parse_mrope(text: Fields, head_dim: int, partial: bool) -> RopeConfig:
    """A target's interleaved M-RoPE, over the whole head or the stated part of it."""
    rope = rope_fields(text, partial)
    section = rope.integers("mrope_section")
    if rope.flag("mrope_interleaved") is not True:
        raise ExportError(
            f"{rope.place_of('mrope_interleaved')}: only interleaved M-RoPE is supported; "
            "'mrope_interleaved' must be true."
        )
    width = _rotary_dim(rope, head_dim) if partial else head_dim
    if len(section) != 3 or min(section) < 0 or 2 * sum(section) != width:
        raise rope.bad("mrope_section", f"three numbers that add up to {width // 2}", section)
    return RopeConfig(rope.number("rope_theta", above=0.0), width, section)


def _rotary_dim(rope: Fields, head_dim: int) -> int:
    """The rotated width of a head, from the checkpoint's own factor."""
    factor = rope.number("partial_rotary_factor", above=0.0)
    width = int(head_dim * min(factor, 1.0))
    if factor > 1 or width < 2 or width % 2:
        expected = f"at most 1 and to leave an even part of head_dim={head_dim}"
        raise rope.bad("partial_rotary_factor", expected, factor)
    return width
