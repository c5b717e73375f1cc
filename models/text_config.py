"""Typed configuration of a target's text decoder: attention layers and Gated DeltaNet layers.

Knows which fields the networks need and which variants are refused; reads no weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ExportError
from .fields import Fields
from .rope_config import RopeConfig, parse_mrope, parse_rope

# What only mixture-of-experts decoders have; a dense file may state zero experts.
EXPERT_KEYS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
ATTENTION, LINEAR = "full_attention", "linear_attention"
# Rows that one call of the portable recurrence takes: its matrix products are cubic in rows.
PORTABLE_ROWS = 64


@dataclass(frozen=True)
class LinearConfig:
    """Gated DeltaNet layers: heads and their widths, and the taps of the causal convolution."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def key_width(self) -> int:
        """Values in one row of keys."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Values in one row of values."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def replay_width(self) -> int:
        """Values in one replay row: key, value, log-decay and beta."""
        return self.key_width + self.value_width + 2 * self.num_value_heads


@dataclass(frozen=True)
class TextConfig:
    """The text decoder of a target.

    `linear_layers` are the numbers of the recurrent layers, the others attend. `qk_norm`: queries
    and keys are normalised per head; `output_gate`: attention heads are gated;
    `zero_centred_norms`: a norm multiplies by 1 + weight.
    """

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
    linear_layers: tuple[int, ...]
    linear: LinearConfig | None
    qk_norm: bool
    output_gate: bool
    zero_centred_norms: bool

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that keep keys and values."""
        return tuple(i for i in range(self.num_layers) if i not in self.linear_layers)


def parse_text(text: Fields, top: Fields, hybrid: bool, mrope: bool, qk_norm: bool) -> TextConfig:
    """The text decoder's section; `hybrid` is the Qwen3.5 family, `mrope` has three axes."""
    _refuse_variants(text, hybrid)
    head_dim = text.integer("head_dim") if qk_norm else _llama_head_dim(text)
    num_heads, num_kv_heads = attention_heads(text)
    linear_layers = _linear_layers(text) if hybrid else ()
    return TextConfig(
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        intermediate_size=text.integer("intermediate_size"),
        num_layers=text.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=text.number("rms_norm_eps"),
        rope=parse_mrope(text, head_dim, partial=hybrid) if mrope else parse_rope(text, head_dim),
        tied_head=_tied_head(text, top),
        context_limit=text.integer("max_position_embeddings"),
        linear_layers=linear_layers,
        linear=_linear(text) if linear_layers else None,
        qk_norm=qk_norm,
        output_gate=hybrid,
        zero_centred_norms=hybrid,
    )


def _refuse_variants(text: Fields, hybrid: bool) -> None:
    text.refuse("hidden_act", "silu")
    text.refuse("attention_bias", False)
    text.refuse("mlp_bias", False)
    text.refuse("use_sliding_window", False)
    if text.flag("use_sliding_window") is None:
        # Where the switch is there and off, the window's width means nothing.
        text.refuse("sliding_window")
    text.refuse_quantized()
    for key in EXPERT_KEYS:
        text.refuse(key, 0)
    if hybrid:
        text.refuse("attn_output_gate", True)
    elif text.get("layer_types") is not None:
        _layer_types(text, (ATTENTION,))


def _llama_head_dim(text: Fields) -> int:
    """Where Llama's file does not state it, it is by definition an equal part of the width."""
    hidden, heads = text.integer("hidden_size"), text.integer("num_attention_heads")
    stated = text.optional_integer("head_dim")
    if stated is None and hidden % heads:
        raise text.bad("num_attention_heads", f"a divisor of hidden_size={hidden}", heads)
    return hidden // heads if stated is None else stated


def _tied_head(text: Fields, top: Fields) -> bool:
    tied = top.flag("tie_word_embeddings")
    tied = text.flag("tie_word_embeddings") if tied is None else tied
    if tied is None:
        raise ExportError(f"{top.where} has no 'tie_word_embeddings'; restore config.json.")
    return tied


def _layer_types(text: Fields, supported: tuple[str, ...]) -> tuple[str, ...]:
    kinds = text.strings("layer_types")
    if len(kinds) != text.integer("num_hidden_layers"):
        expected = f"one name for each of the {text.integer('num_hidden_layers')} layers"
        raise text.bad("layer_types", expected, len(kinds))
    for kind in kinds:
        if kind not in supported:
            raise text.bad("layer_types", f"made of {' and '.join(supported)}", kind)
    return kinds


def _linear_layers(text: Fields) -> tuple[int, ...]:
    """Which layers are recurrent: as listed, or all but every `full_attention_interval`-th."""
    count = text.integer("num_hidden_layers")
    key = "layer_types" if text.get("layer_types") is not None else "full_attention_interval"
    if key == "layer_types":
        kinds = _layer_types(text, (ATTENTION, LINEAR))
        layers = tuple(i for i, kind in enumerate(kinds) if kind == LINEAR)
    else:
        interval = text.integer(key)
        layers = tuple(i for i in range(count) if (i + 1) % interval)
    if len(layers) == count:
        raise text.bad(key, f"such that one of the {count} layers attends", text.get(key))
    return layers


def _linear(text: Fields) -> LinearConfig:
    config = LinearConfig(
        num_key_heads=text.integer("linear_num_key_heads"),
        num_value_heads=text.integer("linear_num_value_heads"),
        key_dim=text.integer("linear_key_head_dim"),
        value_dim=text.integer("linear_value_head_dim"),
        conv_kernel=text.integer("linear_conv_kernel_dim", 2),
    )
    if config.num_value_heads % config.num_key_heads:
        expected = f"a multiple of linear_num_key_heads={config.num_key_heads}"
        raise text.bad("linear_num_value_heads", expected, config.num_value_heads)
    return config


def attention_heads(fields: Fields) -> tuple[int, int]:
    """Query and K/V heads; every K/V head serves the same number of query heads."""
    heads, shared = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    if heads % shared:
        expected = f"a multiple of num_key_value_heads={shared}"
        raise fields.bad("num_attention_heads", expected, heads)
    return heads, shared
