"""Whether a manifest makes sense: its numbers, ids, tables, drafters and graphs fit each other.

Called at load, before any file but the manifest is opened. Knows keys and sizes, no files; that
every key is there and of its type is `read_manifest`'s business.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .check_graphs import check_graphs
from .config import SUPPORTED_TARGETS, RopeConfig
from .draft_config import SUPPORTED_DRAFTS
from .errors import ManifestError
from .manifest import DraftSpec, Manifest, TableSpec
from .requirements import Place

FAMILIES = ("qwen3_vl",)
PRECISIONS = ("fp32", "fp16")
SIDECARS = ("tokenizer.json", "chat_template.jinja")
WEIGHT_BYTES = {"float32": 4, "float16": 2}
INDEX_BYTES = {"int64": 8}


def check_manifest(manifest: Manifest, where: str) -> None:
    """Raise `ManifestError` for the first value that does not fit the others."""
    place = Place(where)
    place.one_of("family", manifest.family, FAMILIES)
    place.one_of("precision", manifest.precision, PRECISIONS)
    place.one_of("target.architecture", manifest.target.architecture, SUPPORTED_TARGETS)
    before = manifest.tap_before_deepstack
    place.require(before, "tap_before_deepstack", "true in this version", before)
    place.equal("the keys of sidecars", sorted(manifest.sidecars), sorted(SIDECARS), "all of them")
    _check_text(place, manifest)
    _check_vision(place, manifest)
    _check_ids(place, manifest)
    text = manifest.target.text
    size = (text.vocab_size, text.hidden_size)
    place.equal("embedding.shape", manifest.embedding.shape, size, "vocabulary and hidden size")
    _check_table(place, manifest, "embedding", manifest.embedding, WEIGHT_BYTES)
    for name, draft in manifest.drafts.items():
        _check_draft(place, manifest, f"drafts.{name}", draft)
    check_graphs(place, manifest)


def _check_sizes(place: Place, key: str, config: Any) -> None:
    """Every number of a configuration is above zero."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if type(value) in (int, float):
            place.positive(f"{key}.{field.name}", value)


def _check_text(place: Place, manifest: Manifest) -> None:
    text, key = manifest.target.text, "target.text"
    _check_sizes(place, key, text)
    shared = text.num_heads % text.num_kv_heads == 0
    expected = f"a multiple of num_kv_heads={text.num_kv_heads}"
    place.require(shared, f"{key}.num_heads", expected, text.num_heads)
    _check_rope(place, f"{key}.rope", text.rope, text.head_dim)
    section = text.rope.mrope_section
    fits = section is not None and len(section) == 3 and min(section) >= 0
    fits = fits and 2 * sum(section or ()) == text.rope.rotary_dim
    expected = f"three numbers that add up to {text.rope.rotary_dim // 2}"
    place.require(fits, f"{key}.rope.mrope_section", expected, section)
    place.layers("tap_layers", manifest.tap_layers, text.num_layers)
    place.positive("num_top", manifest.num_top)
    place.positive("tokenizer_size", manifest.tokenizer_size)
    for name, value in (("num_top", manifest.num_top), ("tokenizer_size", manifest.tokenizer_size)):
        expected = f"at most the vocabulary's {text.vocab_size}"
        place.require(value <= text.vocab_size, name, expected, value)


def _check_rope(place: Place, key: str, rope: RopeConfig, head_dim: int) -> None:
    _check_sizes(place, key, rope)
    width = rope.rotary_dim
    fits = width % 2 == 0 and width <= head_dim
    place.require(fits, f"{key}.rotary_dim", f"even and at most head_dim={head_dim}", width)


def _check_vision(place: Place, manifest: Manifest) -> None:
    vision, image, key = manifest.target.vision, manifest.image, "target.vision"
    _check_sizes(place, key, vision)
    _check_sizes(place, "image", image)
    width = manifest.target.text.hidden_size
    place.equal(f"{key}.out_hidden_size", vision.out_hidden_size, width, "target.text.hidden_size")
    expected = f"a divisor of hidden_size={vision.hidden_size} that leaves a multiple of 4"
    fits = vision.hidden_size % (4 * vision.num_heads) == 0
    place.require(fits, f"{key}.num_heads", expected, vision.num_heads)
    square = vision.table_side**2 == vision.num_positions
    place.require(square, f"{key}.num_positions", "a square number", vision.num_positions)
    layers = vision.deepstack_layers
    place.layers(f"{key}.deepstack_layers", layers, vision.depth)
    fits = list(layers) == sorted(layers) and len(layers) <= manifest.target.text.num_layers
    expected = "increasing and no more than the target has layers"
    place.require(fits, f"{key}.deepstack_layers", expected, list(layers))
    for name in ("patch_size", "merge_size", "temporal_patch_size"):
        place.equal(f"image.{name}", getattr(image, name), getattr(vision, name), f"{key}.{name}")
    limits = [image.min_pixels, image.max_pixels]
    place.require(limits[0] <= limits[1], "image.min_pixels, max_pixels", "in this order", limits)
    place.require(min(image.std) > 0, "image.std", "three numbers above 0", list(image.std))


def _check_ids(place: Place, manifest: Manifest) -> None:
    vocab_size, banned = manifest.target.text.vocab_size, set(manifest.banned_ids)
    for key, ids in (("stop_ids", manifest.stop_ids), ("banned_ids", manifest.banned_ids)):
        place.below(key, ids, vocab_size)
    for key, i in dataclasses.asdict(manifest.target.special).items():
        place.below(f"target.special.{key}", [i], vocab_size)
        place.require(i in banned, f"target.special.{key}", "a banned id: it stands for pixels", i)
    stop = list(manifest.stop_ids)
    place.require(bool(stop), "stop_ids", "at least one id, or no answer would end", stop)
    place.require(not banned & set(stop), "stop_ids", "ids that are not banned", stop)
    count = len(banned)
    place.require(count < vocab_size, "banned_ids", "fewer than the vocabulary", count)


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
    _check_rope(place, f"{key}.rope", draft.rope, draft.head_dim)
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
        fits = 0 < selector.top_k <= vocab_size
        place.require(fits, f"{key}.selector.top_k", f"in 1..{vocab_size}", selector.top_k)
        size = (vocab_size, selector.predecessor.shape[-1] if selector.predecessor.shape else 0)
        for name in ("predecessor", "successor"):
            table, path = getattr(selector, name), f"{key}.selector.{name}"
            _check_table(place, manifest, path, table, WEIGHT_BYTES)
            place.equal(f"{path}.shape", table.shape, size, "vocabulary and rank")
