"""Typed configuration of a Qwen3-VL target, read from its raw config.json.

Knows which fields the networks need and which variants are refused; reads no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import ExportError
from .fields import Fields
from .rope_config import RopeConfig, parse_mrope

SUPPORTED_TARGETS = ("Qwen3VLForConditionalGeneration",)

# What only mixture-of-experts decoders have; a dense file may state zero experts.
EXPERT_KEYS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
# Written in the released modelling code, not in config.json, for checkpoints before transformers 5.
VISION_ROPE_THETA = 10000.0


@dataclass(frozen=True)
class TextConfig:
    """The text decoder of a target."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tied_head: bool
    context_limit: int


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower of a target; `deepstack_layers` are the blocks whose output is injected."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    out_hidden_size: int
    num_positions: int
    deepstack_layers: tuple[int, ...]
    rope_theta: float

    @property
    def patch_dim(self) -> int:
        """Values in one flattened patch, C*t*p*p."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def table_side(self) -> int:
        """Side of the square learned position table."""
        return int(self.num_positions**0.5)


@dataclass(frozen=True)
class SpecialIds:
    """Token ids of the vision placeholders."""

    image: int
    video: int
    vision_start: int
    vision_end: int


@dataclass(frozen=True)
class TargetConfig:
    """A vision-language target."""

    architecture: str
    text: TextConfig
    vision: VisionConfig
    special: SpecialIds


def parse_target(raw: dict[str, Any], where: str) -> TargetConfig:
    """Parse config.json of a target; `ExportError` names what is missing or not supported."""
    architecture = _architecture(raw, where)
    fields = Fields(where, raw)
    fields.refuse_quantized()
    text = _text(fields.section("text_config"), fields)
    vision = _vision(fields.section("vision_config"))
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
    special = SpecialIds(
        image=_special_id(fields, "image_token_id", text.vocab_size),
        video=_special_id(fields, "video_token_id", text.vocab_size),
        vision_start=_special_id(fields, "vision_start_token_id", text.vocab_size),
        vision_end=_special_id(fields, "vision_end_token_id", text.vocab_size),
    )
    return TargetConfig(architecture, text, vision, special)


def _special_id(fields: Fields, key: str, vocab_size: int) -> int:
    token = fields.integer(key, 0)
    if token >= vocab_size:
        raise fields.bad(key, f"a token id below vocab_size={vocab_size}", token)
    return token


def _architecture(raw: dict[str, Any], where: str) -> str:
    names = raw.get("architectures") or [raw.get("model_type")]
    name = names[0] if isinstance(names, list) else names
    if name not in SUPPORTED_TARGETS:
        raise ExportError(
            f"{where}: targets of architecture {name!r} are not supported "
            f"(supported: {', '.join(SUPPORTED_TARGETS)})."
        )
    return str(name)


def _text(text: Fields, top: Fields) -> TextConfig:
    text.refuse("hidden_act", "silu")
    text.refuse("attention_bias", False)
    text.refuse("sliding_window")
    text.refuse_quantized()
    for key in EXPERT_KEYS:
        text.refuse(key, 0)
    head_dim = text.integer("head_dim")
    num_heads, num_kv_heads = attention_heads(text)
    tied = top.flag("tie_word_embeddings")
    tied = text.flag("tie_word_embeddings") if tied is None else tied
    if tied is None:
        raise ExportError(f"{top.where} has no 'tie_word_embeddings'; restore config.json.")
    return TextConfig(
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        intermediate_size=text.integer("intermediate_size"),
        num_layers=text.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=text.number("rms_norm_eps"),
        rope=parse_mrope(text, head_dim),
        tied_head=tied,
        context_limit=text.integer("max_position_embeddings"),
    )


def attention_heads(fields: Fields) -> tuple[int, int]:
    """Query and K/V heads; every K/V head serves the same number of query heads."""
    heads, shared = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    if heads % shared:
        expected = f"a multiple of num_key_value_heads={shared}"
        raise fields.bad("num_attention_heads", expected, heads)
    return heads, shared


def _vision(vision: Fields) -> VisionConfig:
    vision.refuse("hidden_act", "gelu_pytorch_tanh")
    rope = Fields(vision.where, vision.optional_section("rope_parameters"))
    theta = rope.get("rope_theta")
    config = VisionConfig(
        depth=vision.integer("depth"),
        hidden_size=vision.integer("hidden_size"),
        intermediate_size=vision.integer("intermediate_size"),
        num_heads=vision.integer("num_heads"),
        in_channels=vision.integer("in_channels"),
        patch_size=vision.integer("patch_size"),
        merge_size=vision.integer("spatial_merge_size"),
        temporal_patch_size=vision.integer("temporal_patch_size"),
        out_hidden_size=vision.integer("out_hidden_size"),
        num_positions=vision.integer("num_position_embeddings"),
        deepstack_layers=vision.integers("deepstack_visual_indexes"),
        rope_theta=VISION_ROPE_THETA if theta is None else rope.number("rope_theta"),
    )
    if config.table_side**2 != config.num_positions:
        raise vision.bad("num_position_embeddings", "a square number", config.num_positions)
    if config.hidden_size % (4 * config.num_heads):
        # Each head's width is halved for rows and columns, and each half again for rotation.
        expected = f"a divisor of hidden_size={config.hidden_size} that leaves a multiple of 4"
        raise vision.bad("num_heads", expected, config.num_heads)
    layers = config.deepstack_layers
    if list(layers) != sorted(set(layers) & set(range(config.depth))):
        # In another order transformers pairs mergers and decoder layers in a way of its own.
        expected = f"increasing block numbers below {config.depth}"
        raise vision.bad("deepstack_visual_indexes", expected, list(layers))
    return config
