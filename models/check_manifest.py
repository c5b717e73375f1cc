"""Whether a manifest makes sense: its numbers, ids, tables, drafters and graphs fit each other.

Called at load, before any file but the manifest is opened. Knows keys and sizes, no files; that
every key is there and of its type is `read_manifest`'s business.
"""

from __future__ import annotations

import dataclasses
import math

from .check_graphs import check_graphs
from .check_target import check_rope, check_target
from .config import SUPPORTED_TARGETS
from .draft_config import SUPPORTED_DRAFTS
from .errors import ManifestError
from .manifest import DraftSpec, Manifest, TableSpec
from .precision import PRECISIONS
from .requirements import Place

SIDECARS = ("tokenizer.json", "chat_template.jinja")
WEIGHT_BYTES = {"float32": 4, "float16": 2}
INDEX_BYTES = {"int64": 8}


def check_manifest(manifest: Manifest, where: str) -> None:
    """Raise `ManifestError` for the first value that does not fit the others."""
    place = Place(where)
    place.one_of("target.architecture", manifest.target.architecture, SUPPORTED_TARGETS)
    place.equal("family", manifest.family, manifest.target.family, "target.architecture")
    for part, precision in dataclasses.asdict(manifest.precision).items():
        place.one_of(f"precision.{part}", precision, PRECISIONS)
    place.require(not manifest.mtp or manifest.target.mtp, "mtp", "false without target.mtp", True)
    unused = not manifest.mtp and "mtp" in manifest.graphs
    place.require(not unused, "mtp", "true beside a graph of that name", manifest.mtp)
    before = manifest.tap_before_deepstack
    place.require(before, "tap_before_deepstack", "true in this version", before)
    place.equal("the keys of sidecars", sorted(manifest.sidecars), sorted(SIDECARS), "all of them")
    check_target(place, manifest)
    text = manifest.target.text
    size = (text.vocab_size, text.hidden_size)
    place.equal("embedding.shape", manifest.embedding.shape, size, "vocabulary and hidden size")
    _check_table(place, manifest, "embedding", manifest.embedding, WEIGHT_BYTES)
    for name, draft in manifest.drafts.items():
        _check_draft(place, manifest, f"drafts.{name}", draft)
    check_graphs(place, manifest)


def _check_table(
    place: Place, manifest: Manifest, key: str, table: TableSpec, widths: dict[str, int]
) -> None:
    """The table lies inside a data file of the bundle."""
    place.one_of(f"{key}.dtype", table.dtype, widths)
    place.one_of(f"{key}.file", table.file, manifest.data_files)
    shape = list(table.shape)
    place.require(bool(shape) and min(shape) > 0, f"{key}.shape", "sizes above 0", shape)
    size, width = manifest.data_files[table.file].num_bytes, widths[table.dtype]
    fits = 0 <= table.offset <= size - math.prod(shape) * width and table.offset % width == 0
    expected = f"a place inside the {size} bytes of {table.file}, and a multiple of {width}"
    place.require(fits, f"{key}.offset", expected, table.offset)


def _check_draft(place: Place, manifest: Manifest, key: str, draft: DraftSpec) -> None:
    place.one_of(f"{key}.kind", draft.kind, tuple(dict.fromkeys(SUPPORTED_DRAFTS.values())))
    if draft.target_digest != manifest.target_digest:
        raise ManifestError(
            f"{place.where}: {key} was exported for target {draft.target_digest[:12]}, this "
            f"bundle's target is {manifest.target_digest[:12]}. Export them together."
        )
    for name in ("num_kv_heads", "head_dim", "block_size", "input_embedding_scale"):
        place.positive(f"{key}.{name}", getattr(draft, name))
    place.require(draft.block_size >= 2, f"{key}.block_size", "2 or more", draft.block_size)
    check_rope(place, f"{key}.rope", draft.rope, draft.head_dim)
    section = draft.rope.mrope_section
    place.require(section is None, f"{key}.rope.mrope_section", "null for a drafter", section)
    windows = [layer.window for layer in draft.layers]
    fits = bool(windows) and all(w is None or w > 0 for w in windows)
    place.require(fits, f"{key}.layers", "one or more, with windows above 0", windows)
    place.below(f"{key}.mask_token_id", [draft.mask_token_id], manifest.target.text.vocab_size)
    taps = draft.target_layer_ids
    place.layers(f"{key}.target_layer_ids", taps, manifest.target.text.num_layers)
    fits = bool(taps) and set(taps) <= set(manifest.tap_layers)
    expected = f"some of tap_layers {list(manifest.tap_layers)}"
    place.require(fits, f"{key}.target_layer_ids", expected, list(taps))
    _check_draft_head(place, manifest, key, draft)


def _check_draft_head(place: Place, manifest: Manifest, key: str, draft: DraftSpec) -> None:
    vocab_size, selector = manifest.target.text.vocab_size, draft.selector
    place.equal(f"{key}.selector", selector is not None, draft.kind == "dflash2", f"{key}.kind")
    place.equal(f"{key}.d2t", draft.d2t is not None, draft.own_head, f"{key}.own_head")
    if draft.d2t is not None:
        place.require(selector is None, f"{key}.d2t", "null beside a selector", draft.d2t.file)
        _check_table(place, manifest, f"{key}.d2t", draft.d2t, INDEX_BYTES)
        shape = list(draft.d2t.shape)
        fits = len(shape) == 1 and shape[0] <= vocab_size
        place.require(fits, f"{key}.d2t.shape", f"one size up to {vocab_size}", shape)
    if selector is not None:
        most = manifest.num_top
        fits = 0 < selector.top_k <= most
        place.require(fits, f"{key}.selector.top_k", f"in 1..{most} (num_top)", selector.top_k)
        place.positive(f"{key}.selector.output_multiplier", selector.output_multiplier)
        if selector.logit_softcap is not None:
            place.positive(f"{key}.selector.logit_softcap", selector.logit_softcap)
        size = (vocab_size, selector.predecessor.shape[-1] if selector.predecessor.shape else 0)
        for name in ("predecessor", "successor"):
            table, path = getattr(selector, name), f"{key}.selector.{name}"
            _check_table(place, manifest, path, table, WEIGHT_BYTES)
            place.equal(f"{path}.shape", table.shape, size, "vocabulary and rank")
