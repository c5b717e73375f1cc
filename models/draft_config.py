"""Typed configuration of a DFlash drafter, from z-lab's layout or the `speculators` layout.

Reads the raw JSON (config classes of other libraries drop windows); resolves each layer's window
and causality. Knows no weights. No value that belongs to the checkpoint has a default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .config import RopeConfig, attention_heads, rope_fields
from .errors import ExportError
from .fields import Fields

SUPPORTED_DRAFTS = ("DFlashDraftModel", "DFlashSpeculator")


@dataclass(frozen=True)
class DraftLayer:
    """Attention of one draft layer: sliding window (None = full) and causality inside the block."""

    window: int | None
    causal: bool


@dataclass(frozen=True)
class DraftConfig:
    """A DFlash v1 drafter; `draft_vocab_size` is set when it has a reduced head of its own."""

    layout: str
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    hidden_size: int
    target_hidden_size: int | None
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int | None
    rope: RopeConfig
    layers: tuple[DraftLayer, ...]
    input_embedding_scale: float
    trained_on_media: bool | None


def parse_draft(raw: dict[str, Any], where: str) -> DraftConfig:
    """Parse config.json of a drafter; `ExportError` names what is missing or not supported."""
    names = raw.get("architectures") or [None]
    name = names[0] if isinstance(names, list) else names
    speculators = raw.get("speculators_model_type")
    if speculators not in (None, "dflash") or name not in SUPPORTED_DRAFTS:
        kind = speculators if speculators not in (None, "dflash") else name
        raise ExportError(
            f"{where}: drafters of kind {kind!r} are not supported yet "
            f"(supported: {', '.join(SUPPORTED_DRAFTS)})."
        )
    return _speculators(raw, where) if speculators else _zlab(raw, where)


def _zlab(raw: dict[str, Any], where: str) -> DraftConfig:
    body = Fields(where, raw)
    own = Fields(f"{where}, dflash_config", body.optional_section("dflash_config"), raw)
    return _config(
        own,
        body,
        layout="z-lab",
        taps=own.integers("target_layer_ids"),
        layers=_zlab_layers(own, body),
        draft_vocab=None,
    )


def _speculators(raw: dict[str, Any], where: str) -> DraftConfig:
    body = Fields(where, raw).section("transformer_layer_config")
    own = Fields(where, raw)
    aux = own.integers("aux_hidden_state_layer_ids")
    causal = not bool(own.flag("sliding_window_non_causal"))
    vocab, reduced = body.integer("vocab_size"), own.integer("draft_vocab_size")
    return _config(
        own,
        body,
        layout="speculators",
        # Speculators counts the embedding output as 0, so its ids are one above the layer's.
        taps=tuple(i - 1 for i in aux),
        layers=_layers(body, causal_sliding=causal, causal_full=False),
        draft_vocab=reduced if reduced != vocab else None,
    )


def _config(
    own: Fields,
    body: Fields,
    *,
    layout: str,
    taps: tuple[int, ...],
    layers: tuple[DraftLayer, ...],
    draft_vocab: int | None,
) -> DraftConfig:
    _refuse_unsupported(own, body)
    head_dim = body.integer("head_dim")
    num_heads, num_kv_heads = attention_heads(body)
    vocab_size = body.integer("vocab_size")
    num_target_layers = own.optional_integer("num_target_layers")
    _check_taps(own, taps, num_target_layers)
    scale = own.get("input_embedding_scale")
    return DraftConfig(
        layout=layout,
        block_size=own.integer("block_size", 2),
        mask_token_id=_mask_id(own, vocab_size),
        target_layer_ids=taps,
        num_target_layers=num_target_layers,
        hidden_size=body.integer("hidden_size"),
        target_hidden_size=own.optional_integer("target_hidden_size"),
        intermediate_size=body.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=body.number("rms_norm_eps"),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab,
        # The draft's rope is one-dimensional; sections copied from an M-RoPE target mean nothing.
        rope=RopeConfig(rope_fields(body).number("rope_theta"), head_dim, None),
        layers=layers,
        input_embedding_scale=1.0 if scale is None else own.number("input_embedding_scale"),
        trained_on_media=own.flag("trained_on_media"),
    )


def _refuse_unsupported(own: Fields, body: Fields) -> None:
    body.refuse("hidden_act", "silu")
    body.refuse("attention_bias", False)
    for fields in (own, body):
        fields.refuse("rope_is_neox_style", True)
        fields.refuse("is_neox_style", True)
        fields.refuse("use_gemma_norm", False)
        fields.refuse("attention_sink_bias", False)
        fields.refuse("attention_value_scale", 1, 1.0)
        fields.refuse("partial_rotary_factor", 1, 1.0)
        fields.refuse("sample_from_anchor", False)
        fields.refuse("projector_type")
        fields.refuse("shift_label", False)
    rope_fields(body).refuse("partial_rotary_factor", 1, 1.0)
    multiplier = own.get("output_multiplier")
    if multiplier is not None and own.number("output_multiplier") <= 0:
        # A positive multiplier and a softcap are monotone: greedy proposals do not change.
        raise own.bad("output_multiplier", "positive", multiplier)


def _mask_id(own: Fields, vocab_size: int) -> int:
    mask_id = own.integer("mask_token_id", 0)
    if mask_id >= vocab_size:
        raise own.bad("mask_token_id", f"a token id below vocab_size={vocab_size}", mask_id)
    return mask_id


def _check_taps(own: Fields, taps: tuple[int, ...], num_target_layers: int | None) -> None:
    if not taps or len(set(taps)) != len(taps) or min(taps) < 0:
        raise own.bad("target_layer_ids", "distinct layer numbers of the target", list(taps))
    if num_target_layers is not None and max(taps) >= num_target_layers:
        raise own.bad(
            "target_layer_ids", f"below num_target_layers={num_target_layers}", list(taps)
        )


def _zlab_layers(own: Fields, body: Fields) -> tuple[DraftLayer, ...]:
    if own.flag("use_swa") and body.get("layer_types") is None:
        window = own.integer("swa_window_size" if own.get("swa_window_size") else "sliding_window")
        return (DraftLayer(window, False),) * body.integer("num_hidden_layers")
    explicit = body.flag("is_causal")
    explicit = own.flag("causal") if explicit is None else explicit
    if explicit is None:
        return _layers(body, causal_sliding=True, causal_full=False)
    return _layers(body, causal_sliding=explicit, causal_full=explicit)


def _layers(body: Fields, *, causal_sliding: bool, causal_full: bool) -> tuple[DraftLayer, ...]:
    count = body.integer("num_hidden_layers")
    types = body.get("layer_types") or ["full_attention"] * count
    if len(types) != count or set(types) - {"full_attention", "sliding_attention"}:
        raise body.bad("layer_types", f"{count} of full_attention / sliding_attention", types)
    return tuple(
        DraftLayer(body.integer("sliding_window"), causal_sliding)
        if kind == "sliding_attention"
        else DraftLayer(None, causal_full)
        for kind in types
    )
