"""Which tensors of a checkpoint make up each network, by name and shape.

Maps HF names to the names the graphs use, and refuses anything missing, misshapen or left over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..models.config import TextConfig, VisionConfig
from ..models.draft_config import DraftConfig
from ..models.errors import ExportError
from .checkpoint import Checkpoint, TensorInfo

Shape = tuple[int, ...]

TABLE, HEAD = "embed_tokens.weight", "lm_head.weight"
PREDECESSOR = "candidate_selector.predecessor_codebook"
SUCCESSOR = "candidate_selector.successor_codebook"
SELECTOR_PROJECTION = "candidate_selector.hidden_projection.weight"
TEXT_PREFIXES = ("model.language_model.", "language_model.")
VISION_PREFIXES = ("model.visual.", "visual.")
HEAD_PREFIXES = ("",)


@dataclass(frozen=True)
class Wanted:
    """One stored tensor: its name, the source tensors joined into it, each with its shape."""

    name: str
    parts: tuple[tuple[str, Shape], ...]
    shape: Shape | None = None


def one(name: str, *shape: int) -> Wanted:
    """A tensor stored under its own name."""
    return Wanted(name, ((name, shape),))


def decoder_layer(
    name: str, hidden: int, mlp: int, q_size: int, kv_size: int, head_dim: int, fuse_query: bool
) -> list[Wanted]:
    """One Qwen3 layer; projections that read the same rows are stored as one matrix."""
    attention = f"{name}.self_attn"
    query = (f"{attention}.q_proj.weight", (q_size, hidden))
    key_value = tuple((f"{attention}.{k}_proj.weight", (kv_size, hidden)) for k in "kv")
    fused = (
        [Wanted(f"{attention}.qkv", (query, *key_value))]
        if fuse_query
        else [Wanted(query[0], (query,)), Wanted(f"{attention}.kv", key_value)]
    )
    gate_up = tuple((f"{name}.mlp.{k}_proj.weight", (mlp, hidden)) for k in ("gate", "up"))
    return [
        *fused,
        one(f"{attention}.o_proj.weight", hidden, q_size),
        one(f"{attention}.q_norm.weight", head_dim),
        one(f"{attention}.k_norm.weight", head_dim),
        Wanted(f"{name}.mlp.gate_up", gate_up),
        one(f"{name}.mlp.down_proj.weight", hidden, mlp),
        one(f"{name}.input_layernorm.weight", hidden),
        one(f"{name}.post_attention_layernorm.weight", hidden),
    ]


def text_weights(text: TextConfig) -> list[Wanted]:
    """The decoder's weights, without embedding and head."""
    q_size, kv_size = text.num_heads * text.head_dim, text.num_kv_heads * text.head_dim
    wanted = [one("norm.weight", text.hidden_size)]
    for i in range(text.num_layers):
        wanted += decoder_layer(
            f"layers.{i}", text.hidden_size, text.intermediate_size,
            q_size, kv_size, text.head_dim, fuse_query=True,
        )  # fmt: skip
    return wanted


def vision_weights(vision: VisionConfig) -> list[Wanted]:
    """The vision tower's weights; the patch convolution becomes a matrix."""
    width, merged = vision.hidden_size, vision.hidden_size * vision.merge_size**2
    kernel = (
        width, vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size
    )  # fmt: skip
    patch = "patch_embed.proj.weight"
    wanted = [
        Wanted(patch, ((patch, kernel),), (width, vision.patch_dim)),
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
    return [one(f"{name}.weight", *shape), one(f"{name}.bias", shape[0])]


def draft_weights(draft: DraftConfig, tap_width: int) -> list[Wanted]:
    """The drafter's weights; embedding and head are the target's unless its own head is reduced."""
    q_size, kv_size = draft.num_heads * draft.head_dim, draft.num_kv_heads * draft.head_dim
    hidden = draft.hidden_size
    wanted = [
        one("fc.weight", hidden, len(draft.target_layer_ids) * tap_width),
        one("hidden_norm.weight", hidden),
        one("norm.weight", hidden),
    ]
    for i in range(len(draft.layers)):
        wanted += decoder_layer(
            f"layers.{i}", hidden, draft.intermediate_size,
            q_size, kv_size, draft.head_dim, fuse_query=False,
        )  # fmt: skip
    if draft.draft_vocab_size is not None:
        wanted.append(one(HEAD, draft.draft_vocab_size, hidden))
    return wanted + _conv_weights(draft) + _selector_weights(draft)


def _conv_weights(draft: DraftConfig) -> list[Wanted]:
    if draft.conv is None:
        return []
    size, hidden = draft.conv.kernel_size, draft.hidden_size
    groups = hidden // draft.conv.group_size
    names = [f"layers.{i}.{c}_conv" for i in range(len(draft.layers)) for c in ("attention", "mlp")]
    return [
        want
        for name in names
        for want in (
            one(f"{name}.base_kernel", 2, size, hidden),
            one(f"{name}.kernel_projection.weight", 2 * size * groups, hidden),
        )
    ]


def _selector_weights(draft: DraftConfig) -> list[Wanted]:
    if draft.selector is None:
        return []
    rank = draft.selector.rank
    return [
        one(PREDECESSOR, draft.vocab_size, rank),
        one(SUCCESSOR, draft.vocab_size, rank),
        one(SELECTOR_PROJECTION, rank, draft.hidden_size),
    ]


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
