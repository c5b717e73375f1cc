"""Typed configuration of a target, read from its raw config.json.

Knows the supported architectures and how their parts fit together; reads no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import ExportError
from .fields import Fields
from .rope_config import RopeConfig
from .text_config import LinearConfig, TextConfig, parse_text
from .vision_config import VisionConfig, parse_vision


@dataclass(frozen=True)
class Architecture:
    """What sets an architecture apart; `hybrid` decoders have Gated DeltaNet layers, `qk_norm`
    ones normalise queries and keys per head."""

    family: str
    hybrid: bool
    vision: bool
    qk_norm: bool = True

    @property
    def mrope(self) -> bool:
        """Whether positions have three axes."""
        return self.hybrid or self.vision


ARCHITECTURES = {
    "Qwen3VLForConditionalGeneration": Architecture("qwen3_vl", hybrid=False, vision=True),
    "Qwen3_5ForConditionalGeneration": Architecture("qwen3_5", hybrid=True, vision=True),
    "Qwen3_5ForCausalLM": Architecture("qwen3_5_text", hybrid=True, vision=False),
    "Qwen3ForCausalLM": Architecture("qwen3", hybrid=False, vision=False),
    "LlamaForCausalLM": Architecture("llama", hybrid=False, vision=False, qk_norm=False),
}
SUPPORTED_TARGETS = tuple(ARCHITECTURES)


@dataclass(frozen=True)
class SpecialIds:
    """Token ids of the vision placeholders."""

    image: int
    video: int
    vision_start: int
    vision_end: int


@dataclass(frozen=True)
class TargetConfig:
    """A target; text-only ones have no vision tower and no placeholders.

    `mtp`: the checkpoint's configuration has a built-in head that predicts one token more.
    """

    architecture: str
    text: TextConfig
    vision: VisionConfig | None
    special: SpecialIds | None
    mtp: bool

    @property
    def family(self) -> str:
        """The model family, e.g. qwen3_vl."""
        return ARCHITECTURES[self.architecture].family

    @property
    def num_deepstack(self) -> int:
        """How many of the first decoder layers take rows from the vision tower."""
        return len(self.vision.deepstack_layers) if self.vision else 0


def parse_target(raw: dict[str, Any], where: str) -> TargetConfig:
    """Parse config.json of a target; `ExportError` names what is missing or not supported."""
    name = _architecture(raw, where)
    kind, fields = ARCHITECTURES[name], Fields(where, raw)
    fields.refuse_quantized()
    section = fields.section("text_config") if kind.vision else fields
    text = parse_text(section, fields, kind.hybrid, kind.mrope, kind.qk_norm)
    mtp = kind.hybrid and _has_mtp(section)
    if not kind.vision:
        return TargetConfig(name, text, None, None, mtp)
    vision = parse_vision(fields.section("vision_config"), deepstack=not kind.hybrid)
    _check_pair(text, vision, where)
    special = SpecialIds(
        image=_special_id(fields, "image_token_id", text.vocab_size),
        video=_special_id(fields, "video_token_id", text.vocab_size),
        vision_start=_special_id(fields, "vision_start_token_id", text.vocab_size),
        vision_end=_special_id(fields, "vision_end_token_id", text.vocab_size),
    )
    return TargetConfig(name, text, vision, special, mtp)


def _check_pair(text: TextConfig, vision: VisionConfig, where: str) -> None:
    if vision.out_hidden_size != text.hidden_size:
        raise ExportError(
            f"{where}: vision_config.out_hidden_size is {vision.out_hidden_size} but "
            f"text_config.hidden_size is {text.hidden_size}; they must be equal."
        )
    if len(vision.deepstack_layers) > text.num_layers:
        raise ExportError(
            f"{where}: vision_config.deepstack_visual_indexes has {len(vision.deepstack_layers)} "
            f"entries, one for each of the first decoder layers, but "
            f"text_config.num_hidden_layers is {text.num_layers}; restore config.json."
        )


def _has_mtp(text: Fields) -> bool:
    """One MTP layer at most, which shares the target's embedding table."""
    text.refuse("mtp_num_hidden_layers", 0, 1)
    text.refuse("mtp_use_dedicated_embeddings", False)
    return text.get("mtp_num_hidden_layers") == 1


def _special_id(fields: Fields, key: str, vocab_size: int) -> int:
    token = fields.integer(key, 0)
    if token >= vocab_size:
        raise fields.bad(key, f"a token id below vocab_size={vocab_size}", token)
    return token


def _architecture(raw: dict[str, Any], where: str) -> str:
    names = raw.get("architectures") or [raw.get("model_type")]
    name = names[0] if isinstance(names, list) else names
    # A damaged file may have a list or an object here, which no dictionary can look up.
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ExportError(
            f"{where}: targets of architecture {name!r} are not supported "
            f"(supported: {', '.join(SUPPORTED_TARGETS)})."
        )
    return name


__all__ = [
    "ARCHITECTURES",
    "SUPPORTED_TARGETS",
    "Architecture",
    "LinearConfig",
    "RopeConfig",
    "SpecialIds",
    "TargetConfig",
    "TextConfig",
    "VisionConfig",
    "parse_target",
]
