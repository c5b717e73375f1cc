"""Window and causality of every layer of a drafter, in either layout (dflash.md, 1.3).

Only the raw file counts: configuration classes of other libraries drop windows behind gates.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ExportError
from .fields import Fields

KINDS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class DraftLayer:
    """Attention of one draft layer: sliding window (None = full) and causality inside the block."""

    window: int | None
    causal: bool


def zlab_layers(own: Fields) -> tuple[DraftLayer, ...]:
    """`is_causal` if set, else `causal`, else sliding layers are causal and full ones are not."""
    if own.flag("use_swa") and own.get("layer_types") is None:
        # MiMo's way: all layers slide, none is causal.
        key = "sliding_window" if own.get("swa_window_size") is None else "swa_window_size"
        return (DraftLayer(own.integer(key), False),) * own.integer("num_hidden_layers")
    _refuse_unstated_windows(own)
    explicit = own.flag("is_causal")
    explicit = own.flag("causal") if explicit is None else explicit
    if explicit is None:
        return _layers(own, causal_sliding=True, causal_full=False)
    return _layers(own, causal_sliding=explicit, causal_full=explicit)


def speculators_layers(own: Fields, body: Fields, kind: str) -> tuple[DraftLayer, ...]:
    """`sliding_window_non_causal` speaks of sliding layers; full layers are never causal."""
    _refuse_unstated_windows(body)
    non_causal = own.flag("sliding_window_non_causal")
    # The format's own defaults: sliding layers are causal in v1 and not in DFlash2.
    causal = kind == "dflash" if non_causal is None else not non_causal
    return _layers(body, causal_sliding=causal, causal_full=False)


def _refuse_unstated_windows(body: Fields) -> None:
    """Refuse a file whose windows the reference implementations read differently.

    Where `layer_types` is given it decides, and `use_sliding_window` and `max_window_layers` are
    not read. Where it is absent, all layers are full; but transformers then makes the layers from
    `max_window_layers` on slide if `use_sliding_window` is true, and z-lab's MLX code does not.
    """
    if body.get("layer_types") is not None or not body.flag("use_sliding_window"):
        return
    count = body.integer("num_hidden_layers")
    first = body.optional_integer("max_window_layers", 0)
    if body.get("sliding_window") is not None and (first is None or first < count):
        raise ExportError(
            f"{body.place_of('use_sliding_window')} sets use_sliding_window without 'layer_types', "
            "so which layers slide is not certain; add layer_types with one "
            f"full_attention or sliding_attention for each of the {count} layers."
        )


def _layers(body: Fields, *, causal_sliding: bool, causal_full: bool) -> tuple[DraftLayer, ...]:
    count = body.integer("num_hidden_layers")
    if body.get("layer_types") is None:
        return (DraftLayer(None, causal_full),) * count
    types = body.strings("layer_types")
    if len(types) != count or set(types) - KINDS:
        expected = f"{count} of full_attention / sliding_attention"
        raise body.bad("layer_types", expected, list(types))
    return tuple(
        DraftLayer(body.integer("sliding_window"), causal_sliding)
        if kind == "sliding_attention"
        else DraftLayer(None, causal_full)
        for kind in types
    )
