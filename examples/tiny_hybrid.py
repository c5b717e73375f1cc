"""What sets the other architectures of the tiny target apart from Qwen3-VL: config and tensors.

Gated DeltaNet layers, gated attention and the MTP head of the Qwen3.5 family; text-only targets.
"""

from __future__ import annotations

from typing import Any, Protocol

from tiny_weights import LayerSpec, Shapes, Tensors, decoder_layer

HYBRID = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
TEXT_ONLY = ("Qwen3_5ForCausalLM", "Qwen3ForCausalLM")
MODEL_TYPES = {
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3ForCausalLM": "qwen3",
}
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, CONV = 2, 4, 8, 16, 4
PARTIAL_ROTARY = 0.5


class HybridSpec(LayerSpec, Protocol):
    """What the functions here read of a target's arguments."""

    @property
    def architecture(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def interval(self) -> int: ...
    @property
    def mtp(self) -> bool: ...


def is_hybrid(spec: HybridSpec) -> bool:
    """Whether the target has Gated DeltaNet layers."""
    return spec.architecture in HYBRID


def layer_types(spec: HybridSpec) -> list[str]:
    """Every `interval`-th layer attends."""
    attends = [not is_hybrid(spec) or not (i + 1) % spec.interval for i in range(spec.layers)]
    return ["full_attention" if attend else "linear_attention" for attend in attends]


def text_config(spec: HybridSpec) -> dict[str, Any]:
    """Keys of the text decoder that Qwen3-VL does not have."""
    if not is_hybrid(spec):
        return {}
    return {
        "attn_output_gate": True,
        "layer_types": layer_types(spec),
        "linear_conv_kernel_dim": CONV,
        "linear_key_head_dim": KEY_DIM,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_value_head_dim": VALUE_DIM,
        "mtp_num_hidden_layers": int(spec.mtp),
        "mtp_use_dedicated_embeddings": False,
    }


def rope_config(spec: HybridSpec, section: tuple[int, ...]) -> dict[str, Any]:
    """Keys of the rope beside its base."""
    if spec.architecture == "Qwen3ForCausalLM":
        return {}
    rope: dict[str, Any] = {"mrope_interleaved": True, "mrope_section": list(section)}
    return rope | ({"partial_rotary_factor": PARTIAL_ROTARY} if is_hybrid(spec) else {})


def text_layer(name: str, spec: HybridSpec, kind: str) -> Shapes:
    """Shapes of one decoder layer."""
    shapes = decoder_layer(name, spec, spec.hidden)
    if is_hybrid(spec):
        query = f"{name}.self_attn.q_proj.weight"
        shapes[query] = (2 * shapes[query][0], spec.hidden)
    if kind == "full_attention":
        return shapes
    kept = {key: shape for key, shape in shapes.items() if ".self_attn." not in key}
    return kept | _linear_attention(f"{name}.linear_attn", spec.hidden)


def _linear_attention(name: str, hidden: int) -> Shapes:
    values, channels = VALUE_HEADS * VALUE_DIM, 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    return {
        f"{name}.in_proj_qkv.weight": (channels, hidden),
        f"{name}.in_proj_z.weight": (values, hidden),
        f"{name}.in_proj_b.weight": (VALUE_HEADS, hidden),
        f"{name}.in_proj_a.weight": (VALUE_HEADS, hidden),
        f"{name}.conv1d.weight": (channels, 1, CONV),
        f"{name}.A_log": (VALUE_HEADS,),
        f"{name}.dt_bias": (VALUE_HEADS,),
        f"{name}.norm.weight": (VALUE_DIM,),
        f"{name}.out_proj.weight": (hidden, values),
    }


def mtp_shapes(spec: HybridSpec) -> Shapes:
    """Shapes of the MTP head."""
    hidden = spec.hidden
    shapes: Shapes = {"mtp.fc.weight": (hidden, 2 * hidden)}
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        shapes[f"mtp.{name}.weight"] = (hidden,)
    return shapes | text_layer("mtp.layers.0", spec, "full_attention")


def centre_norms(tensors: Tensors) -> None:
    """Store the norms of the Qwen3.5 family as what they add to one, in place."""
    for name, value in tensors.items():
        plain = ".linear_attn." in name or ".visual." in name
        if value.ndim == 1 and name.endswith(".weight") and not plain:
            value -= 1
