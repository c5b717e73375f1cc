"""What each graph of a bundle takes and gives, worked out from the manifest's numbers alone.

The runtime feeds and fetches by these names and sizes, so a graph that states others is refused
before it is opened. Knows no ONNX; symbolic dimensions are strings whose names mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .manifest import DraftSpec, Manifest, TensorSpec
from .text_config import LinearConfig, TextConfig
from .vision_config import VisionConfig

Specs = tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Interface:
    """Inputs, fed by name, and outputs, in the order in which they are fetched."""

    inputs: Specs
    outputs: Specs


def interfaces(manifest: Manifest) -> dict[str, Interface]:
    """Every graph that the bundle must have."""
    text = manifest.target.text
    graphs = {
        "target": _target(manifest),
        "head": _head(text.hidden_size, text.vocab_size, manifest.num_top),
    }
    if text.linear is not None:
        graphs["target.portable"] = graphs["target"]
    if manifest.target.vision is not None:
        graphs["vision"] = _vision(manifest.target.vision)
    if manifest.mtp:
        graphs["mtp"] = _mtp(text)
    for name, draft in manifest.drafts.items():
        for part, interface in _draft(manifest, draft):
            graphs[f"{name}.{part}"] = interface
    return graphs


def shapes_fit(expected: Sequence[int | str], found: Sequence[int | str | None]) -> bool:
    """Same rank, same fixed sizes, and symbolic dimensions (whatever their names) alike."""
    # Not equality of types alone: ONNX Runtime gives None for a dimension without a name.
    return len(expected) == len(found) and all(
        a == b if isinstance(a, int) else not isinstance(b, int)
        for a, b in zip(expected, found, strict=True)
    )


def _floats(name: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name, "float32", shape)


def _ids(name: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name, "int64", shape)


def _tables(rows: str, width: int) -> Specs:
    return _floats("cos", rows, width), _floats("sin", rows, width)


def _caches(prefix: str, layers: Iterable[int], heads: int, head_dim: int) -> Specs:
    return tuple(
        _floats(f"{prefix}.{i}.{part}", 1, heads, "rows", head_dim)
        for i in layers
        for part in ("key", "value")
    )


def _target(manifest: Manifest) -> Interface:
    text = manifest.target.text
    outputs: list[TensorSpec] = []
    inputs = [
        *_rows(text),
        *(
            _floats(f"deepstack.{k}", "rows", text.hidden_size)
            for k in range(manifest.target.num_deepstack)
        ),
    ]
    if text.linear is not None:
        inputs.append(_floats("replay_mask", "replay"))
    for i in range(text.num_layers):
        if text.linear is not None and i in text.linear_layers:
            inputs += _linear_inputs(text.linear, i)
            outputs += _linear_outputs(text.linear, i)
        else:
            inputs += _caches("past_key_values", [i], text.num_kv_heads, text.head_dim)
            outputs += _caches("present", [i], text.num_kv_heads, text.head_dim)
        if i in manifest.tap_layers:
            outputs.append(_floats(f"tap.{i}", "rows", text.hidden_size))
    return Interface(tuple(inputs), (*outputs, _floats("hidden", "rows", text.hidden_size)))


def _rows(text: TextConfig) -> Specs:
    """What every network over cached rows takes for its new rows."""
    return (
        _floats("inputs_embeds", 1, "rows", text.hidden_size),
        *_tables("rows", text.rope.rotary_dim // 2),
        TensorSpec("past_rows", "int32", (1,)),
    )


def _state(name: str, linear: LinearConfig) -> TensorSpec:
    return _floats(name, 1, linear.num_value_heads, linear.key_dim, linear.value_dim)


def _linear_inputs(linear: LinearConfig, i: int) -> Specs:
    return (
        _floats(f"conv_window.{i}", linear.conv_kernel - 1, linear.conv_width),
        _floats(f"replay.{i}", "replay", linear.replay_width),
        _state(f"state.{i}", linear),
    )


def _linear_outputs(linear: LinearConfig, i: int) -> Specs:
    return (
        _floats(f"conv_rows.{i}", "window_and_rows", linear.conv_width),
        _floats(f"conv_last.{i}", linear.conv_kernel - 1, linear.conv_width),
        _state(f"state_committed.{i}", linear),
        _state(f"state_all.{i}", linear),
        _floats(f"replay_rows.{i}", "rows", linear.replay_width),
    )


def _mtp(text: TextConfig) -> Interface:
    cache = ([0], text.num_kv_heads, text.head_dim)
    hidden = _floats("hidden", "rows", text.hidden_size)
    before = _floats("past_hidden", "rows", text.hidden_size)
    inputs = (*_rows(text), before, *_caches("past_key_values", *cache))
    return Interface(inputs, (*_caches("present", *cache), hidden))


def _vision(vision: VisionConfig) -> Interface:
    inputs = (
        _floats("patches", "patches", vision.patch_dim),
        _ids("table_indices", "patches", 4),
        _floats("table_weights", "patches", 4),
        *_tables("patches", vision.head_dim // 2),
    )
    names = ("image_embeds", *(f"deepstack.{k}" for k in range(len(vision.deepstack_layers))))
    return Interface(inputs, tuple(_floats(n, "rows", vision.out_hidden_size) for n in names))


def _head(width: int, vocab_size: int, num_top: int) -> Interface:
    inputs = (_floats("hidden", "rows", width), _ids("rows", "chosen"), _floats("bias", vocab_size))
    outputs = (
        _floats("top_values", "chosen", num_top),
        _ids("top_ids", "chosen", num_top),
        _floats("logits", "chosen", vocab_size),
    )
    return Interface(inputs, outputs)


def _draft(manifest: Manifest, draft: DraftSpec) -> Iterator[tuple[str, Interface]]:
    width, num_top = manifest.target.text.hidden_size, manifest.num_top
    yield "inject", _inject(draft, width)
    yield "block", _block(draft, width)
    yield "append", _append(draft)
    if draft.d2t is not None:
        vocab_size = draft.d2t.shape[0]
        yield "head", _head(width, vocab_size, min(num_top, vocab_size))


def _inject(draft: DraftSpec, width: int) -> Interface:
    taps = (_floats(f"tap.{i}", "rows", width) for i in draft.target_layer_ids)
    outputs = tuple(
        _floats(f"{part}.{i}", 1, draft.num_kv_heads, "rows", draft.head_dim)
        for i in range(len(draft.layers))
        for part in ("key", "value")
    )
    return Interface((*taps, *_tables("rows", draft.rope.rotary_dim // 2)), outputs)


def _block(draft: DraftSpec, width: int) -> Interface:
    masks = (_floats(f"mask.{i}", "block", "rows") for i in range(len(draft.mask_kinds)))
    layers = range(len(draft.layers))
    inputs = (
        _floats("embeds", "block", width),
        *_tables("block", draft.rope.rotary_dim // 2),
        *masks,
        *_caches("past_key_values", layers, draft.num_kv_heads, draft.head_dim),
    )
    outputs = [_floats("hidden", "block", width)]
    if draft.selector is not None:
        outputs.append(_floats("projected", "block", draft.selector.predecessor.shape[-1]))
    return Interface(inputs, tuple(outputs))


def _append(draft: DraftSpec) -> Interface:
    names = ("cache", "new", "present")
    shapes = [_floats(n, 1, draft.num_kv_heads, "rows", draft.head_dim) for n in names]
    return Interface((*shapes[:2], _ids("row_numbers", "rows")), (shapes[2],))
