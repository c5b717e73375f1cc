"""Which tensors of a checkpoint make up each network, by name and shape.

Maps HF names to the names the graphs use, and refuses anything missing, misshapen or left over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..models.config import LinearConfig, TargetConfig, TextConfig, VisionConfig
from ..models.errors import ExportError
from .checkpoint import Checkpoint, TensorInfo

Shape = tuple[int, ...]

TABLE, HEAD = "embed_tokens.weight", "lm_head.weight"
VISION_TEXT_PREFIXES = ("model.language_model.", "language_model.")
TEXT_PREFIXES = ("model.", "")
MTP_PREFIXES = ("", "model.")
VISION_PREFIXES = ("model.visual.", "visual.")
HEAD_PREFIXES = ("",)


@dataclass(frozen=True)
class Wanted:
    """One stored tensor: its name, the source tensors joined into it, each with its shape.

    A `matrix` is one that rows are multiplied with; it may be quantised.
    """

    name: str
    parts: tuple[tuple[str, Shape], ...]
    shape: Shape | None = None
    matrix: bool = False


def text_prefixes(target: TargetConfig) -> tuple[str, ...]:
    """Where a checkpoint keeps its text decoder."""
    return TEXT_PREFIXES if target.vision is None else VISION_TEXT_PREFIXES


def one(name: str, *shape: int) -> Wanted:
    """A tensor stored under its own name."""
    return Wanted(name, ((name, shape),))


def matrix(name: str, rows: int, columns: int) -> Wanted:
    """A matrix [out, in] stored under its own name."""
    return joined(name, ((name, (rows, columns)),))


def joined(name: str, parts: tuple[tuple[str, Shape], ...]) -> Wanted:
    """Matrices that multiply the same rows, stored as one."""
    return Wanted(name, parts, matrix=True)


def attention_layer(
    name: str,
    hidden: int,
    mlp: int,
    q_size: int,
    kv_size: int,
    head_dim: int,
    fuse_query: bool,
    gated: bool = False,
    qk_norm: bool = True,
) -> list[Wanted]:
    """One Qwen3 layer; projections that read the same rows are stored as one matrix."""
    attention = f"{name}.self_attn"
    query = (f"{attention}.q_proj.weight", ((1 + gated) * q_size, hidden))
    key_value = tuple((f"{attention}.{k}_proj.weight", (kv_size, hidden)) for k in "kv")
    fused = (
        [joined(f"{attention}.qkv", (query, *key_value))]
        if fuse_query
        else [joined(query[0], (query,)), joined(f"{attention}.kv", key_value)]
    )
    return [
        *fused,
        matrix(f"{attention}.o_proj.weight", hidden, q_size),
        *(one(f"{attention}.{k}_norm.weight", head_dim) for k in "qk" if qk_norm),
        *_mlp(name, hidden, mlp),
    ]


def _mlp(name: str, hidden: int, mlp: int) -> list[Wanted]:
    """The feed-forward half of a layer, and both of the layer's norms."""
    gate_up = tuple((f"{name}.mlp.{k}_proj.weight", (mlp, hidden)) for k in ("gate", "up"))
    return [
        joined(f"{name}.mlp.gate_up", gate_up),
        matrix(f"{name}.mlp.down_proj.weight", hidden, mlp),
        one(f"{name}.input_layernorm.weight", hidden),
        one(f"{name}.post_attention_layernorm.weight", hidden),
    ]


def text_weights(text: TextConfig) -> list[Wanted]:
    """The decoder's weights, without embedding and head."""
    wanted = [one("norm.weight", text.hidden_size)]
    for i in range(text.num_layers):
        name = f"layers.{i}"
        if text.linear is not None and i in text.linear_layers:
            wanted += _linear_attention(f"{name}.linear_attn", text.hidden_size, text.linear)
            wanted += _mlp(name, text.hidden_size, text.intermediate_size)
        else:
            wanted += _target_layer(name, text)
    return wanted


def _target_layer(name: str, text: TextConfig) -> list[Wanted]:
    return attention_layer(
        name, text.hidden_size, text.intermediate_size,
        text.num_heads * text.head_dim, text.num_kv_heads * text.head_dim, text.head_dim,
        fuse_query=True, gated=text.output_gate, qk_norm=text.qk_norm,
    )  # fmt: skip


def _linear_attention(name: str, hidden: int, linear: LinearConfig) -> list[Wanted]:
    """A Gated DeltaNet's own weights; the four projections of a row are stored as one matrix."""
    heads, kernel = linear.num_value_heads, linear.conv_kernel
    sizes = {"qkv": linear.conv_width, "z": linear.value_width, "b": heads, "a": heads}
    parts = tuple((f"{name}.in_proj_{k}.weight", (size, hidden)) for k, size in sizes.items())
    conv = f"{name}.conv1d.weight"
    return [
        joined(f"{name}.in_proj", parts),
        Wanted(conv, ((conv, (linear.conv_width, 1, kernel)),), (linear.conv_width, kernel)),
        one(f"{name}.A_log", heads),
        one(f"{name}.dt_bias", heads),
        one(f"{name}.norm.weight", linear.value_dim),
        matrix(f"{name}.out_proj.weight", hidden, linear.value_width),
    ]


def mtp_weights(text: TextConfig) -> list[Wanted]:
    """The MTP head's weights; transformers leaves them out when it loads or saves a checkpoint."""
    hidden = text.hidden_size
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return [
        matrix("mtp.fc.weight", hidden, 2 * hidden),
        *(one(f"mtp.{name}.weight", hidden) for name in norms),
        *_target_layer("mtp.layers.0", text),
    ]


def vision_weights(vision: VisionConfig) -> list[Wanted]:
    """The vision tower's weights; the patch convolution becomes a matrix."""
    width, merged = vision.hidden_size, vision.hidden_size * vision.merge_size**2
    kernel = (
        width, vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size
    )  # fmt: skip
    patch = "patch_embed.proj.weight"
    wanted = [
        Wanted(patch, ((patch, kernel),), (width, vision.patch_dim), matrix=True),
        one("patch_embed.proj.bias", width),
        one("pos_embed.weight", vision.num_positions, width),
    ]
    for i in range(vision.depth):
        wanted += _vision_block(f"blocks.{i}", vision)
    wanted += _merger("merger", width, merged, vision.out_hidden_size)
    for k in range(len(vision.deepstack_layers)):
        wanted += _merger(f"deepstack_merger_list.{k}", merged, merged, vision.out_hidden_size)
    return wanted


def _vision_block(name: str, vision: VisionConfig) -> list[Wanted]:
    width = vision.hidden_size
    return [
        *_affine(f"{name}.attn.qkv", 3 * width, width),
        *_affine(f"{name}.attn.proj", width, width),
        *_affine(f"{name}.mlp.linear_fc1", vision.intermediate_size, width),
        *_affine(f"{name}.mlp.linear_fc2", width, vision.intermediate_size),
        *_affine(f"{name}.norm1", width),
        *_affine(f"{name}.norm2", width),
    ]


def _merger(name: str, norm: int, merged: int, out: int) -> list[Wanted]:
    return [
        *_affine(f"{name}.norm", norm),
        *_affine(f"{name}.linear_fc1", merged, merged),
        *_affine(f"{name}.linear_fc2", out, merged),
    ]


def _affine(name: str, *shape: int) -> list[Wanted]:
    weight = matrix(f"{name}.weight", *shape) if len(shape) == 2 else one(f"{name}.weight", *shape)
    return [weight, one(f"{name}.bias", shape[0])]


def resolve(
    wanted: Iterable[Wanted], checkpoint: Checkpoint, prefixes: Sequence[str]
) -> list[tuple[Wanted, list[TensorInfo]]]:
    """Find every wanted tensor under the first prefix that has it, and check its shape."""
    return [
        (want, [find(checkpoint, name, shape, prefixes) for name, shape in want.parts])
        for want in wanted
    ]


def find(checkpoint: Checkpoint, name: str, shape: Shape, prefixes: Sequence[str]) -> TensorInfo:
    """One tensor of the checkpoint; `ExportError` names it when missing or misshapen."""
    info = next((t for p in prefixes if (t := checkpoint.tensors.get(p + name))), None)
    if info is None:
        raise ExportError(
            f"{checkpoint.folder} has no tensor '{prefixes[0]}{name}'; "
            "the checkpoint is incomplete or of another architecture."
        )
    if info.shape != shape:
        raise ExportError(
            f"{info.file.name}: {info.name} has shape {list(info.shape)}, "
            f"config.json asks for {list(shape)}."
        )
    return info


def refuse_leftovers(
    checkpoint: Checkpoint, used: Iterable[TensorInfo], ignored: Mapping[str, str]
) -> None:
    """Every tensor must be used or ignored for a reason; `ExportError` names the first other."""
    known = {info.name for info in used}
    for name in sorted(checkpoint.tensors.keys() - known):
        if not any(name.startswith(prefix) for prefix in ignored):
            raise ExportError(
                f"{checkpoint.folder}: tensor '{name}' matches nothing in the network that "
                "config.json describes; leaving it out would change the model."
            )
