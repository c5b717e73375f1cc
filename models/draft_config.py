"""Typed configuration of a DFlash drafter, from z-lab's layout or the `speculators` layout.

Reads the raw JSON. In z-lab's layout every field may stand in `dflash_config` or at the top level;
the first wins. Knows no weights. No value that belongs to the checkpoint has a default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .dflash2_config import ConvConfig, SelectorConfig, parse_conv, parse_selector
from .draft_layers import DraftLayer, speculators_layers, zlab_layers
from .errors import ExportError
from .fields import Fields
from .rope_config import RopeConfig, rope_fields
from .text_config import attention_heads

# Architecture -> kind; a speculators file also states the kind itself.
SUPPORTED_DRAFTS = {
    "DFlashDraftModel": "dflash",
    "DFlashSpeculator": "dflash",
    "DFlash2DraftModel": "dflash2",
}


# Whether a drafter was trained on media rows, as a user says it.
MEDIA_ANSWERS: dict[str, bool | None] = {"yes": True, "no": False, "unknown": None}

# Variants that change the numbers and that this version has not: key, and what is harmless.
# `draft_window_size` and `runtime_block_size` are not among them: they tell mlx-vlm how to run a
# drafter (its cache, its block) and change neither the weights nor what they mean, so they are
# ignored. `use_sliding_window` and `max_window_layers` are in `draft_layers`.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "rope_is_neox_style": (True,),
    "is_neox_style": (True,),
    "use_gemma_norm": (False,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1,),
    "sample_from_anchor": (False,),
    # Domino's head; 1 is its neutral prefix, which a plain drafter may state.
    "projector_type": (),
    "shift_label": (False,),
    "pure_draft_prefix_len": (1,),
    "gru_hidden_dim": (),
    "emb_dim": (),
}


@dataclass(frozen=True)
class DraftConfig:
    """A DFlash drafter; `draft_vocab_size` is set when it has a reduced head of its own.

    `conv` and `selector` are set for DFlash2 and None for v1.
    """

    kind: str
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
    output_multiplier: float
    logit_softcap: float | None
    trained_on_media: bool | None
    conv: ConvConfig | None
    selector: SelectorConfig | None


def parse_draft(raw: dict[str, Any], where: str) -> DraftConfig:
    """Parse config.json of a drafter; `ExportError` names what is missing or not supported."""
    names = raw.get("architectures") or [None]
    name = names[0] if isinstance(names, list) else names
    speculators = raw.get("speculators_model_type")
    kind = SUPPORTED_DRAFTS.get(name) if isinstance(name, str) else None
    if kind is None or speculators not in (None, *SUPPORTED_DRAFTS.values()):
        raise ExportError(
            f"{where}: drafters of kind {(name if kind is None else speculators)!r} are not "
            f"supported yet (supported: {', '.join(SUPPORTED_DRAFTS)})."
        )
    if speculators not in (None, kind):
        raise ExportError(
            f"{where}: speculators_model_type is {speculators!r}, but architectures is {name!r}; "
            "one of them is wrong."
        )
    return _speculators(raw, where, kind) if speculators else _zlab(raw, where, kind)


def _zlab(raw: dict[str, Any], where: str, kind: str) -> DraftConfig:
    top = Fields(where, raw)
    nested = Fields(f"{where}, dflash_config", top.optional_section("dflash_config"))
    own = nested.otherwise(top)
    return _config(
        own,
        own,
        kind=kind,
        layout="z-lab",
        taps=own.integers("target_layer_ids"),
        layers=zlab_layers(own),
        draft_vocab=None,
    )


def _speculators(raw: dict[str, Any], where: str, kind: str) -> DraftConfig:
    body = Fields(where, raw).section("transformer_layer_config")
    own = Fields(where, raw)
    aux = own.integers("aux_hidden_state_layer_ids")
    vocab, reduced = body.integer("vocab_size"), own.integer("draft_vocab_size")
    return _config(
        own,
        body,
        kind=kind,
        layout="speculators",
        # Speculators counts the embedding output as 0, so its ids are one above the layer's.
        taps=tuple(i - 1 for i in aux),
        layers=speculators_layers(own, body, kind),
        draft_vocab=reduced if reduced != vocab else None,
    )


def _config(
    own: Fields,
    body: Fields,
    *,
    kind: str,
    layout: str,
    taps: tuple[int, ...],
    layers: tuple[DraftLayer, ...],
    draft_vocab: int | None,
) -> DraftConfig:
    _refuse_unsupported(own, body)
    second = kind == "dflash2"
    if second and draft_vocab is not None:
        raise own.bad("draft_vocab_size", "the full vocabulary for DFlash2", draft_vocab)
    vocab_size = body.integer("vocab_size")
    num_target_layers = own.optional_integer("num_target_layers")
    _check_taps(own, taps, num_target_layers)
    return DraftConfig(
        kind=kind,
        layout=layout,
        block_size=own.integer("block_size", 2),
        mask_token_id=_mask_id(own, vocab_size),
        target_layer_ids=taps,
        num_target_layers=num_target_layers,
        target_hidden_size=own.optional_integer("target_hidden_size"),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab,
        layers=layers,
        input_embedding_scale=_factor(own, "input_embedding_scale"),
        output_multiplier=_factor(own, "output_multiplier"),
        logit_softcap=_softcap(own),
        trained_on_media=own.flag("trained_on_media"),
        conv=parse_conv(own, body) if second else None,
        selector=parse_selector(own, vocab_size) if second else None,
        **_shape(body),
    )


def _shape(body: Fields) -> dict[str, Any]:
    """Sizes of the transformer body, and its rope."""
    head_dim = body.integer("head_dim")
    num_heads, num_kv_heads = attention_heads(body)
    return {
        "hidden_size": body.integer("hidden_size"),
        "intermediate_size": body.integer("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": body.number("rms_norm_eps"),
        # The draft's rope is one-dimensional; sections copied from an M-RoPE target mean nothing.
        "rope": RopeConfig(rope_fields(body).number("rope_theta", above=0.0), head_dim, None),
    }


def _factor(own: Fields, key: str) -> float:
    """A positive factor; absent means that nothing is multiplied."""
    return 1.0 if own.get(key) is None else own.number(key, above=0.0)


def _softcap(own: Fields) -> float | None:
    """Absent, null, zero and negative all switch the cap off."""
    key = "final_logit_softcapping"
    cap = None if own.get(key) is None else own.number(key)
    return cap if cap is not None and cap > 0 else None


def _refuse_unsupported(own: Fields, body: Fields) -> None:
    for fields in (own, body):
        fields.refuse_quantized()
        for key, harmless in UNSUPPORTED.items():
            fields.refuse(key, *harmless)
        # Refuses scaled and partial ropes.
        rope_fields(fields)


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
