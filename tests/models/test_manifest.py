"""A manifest whose keys are all there and whose values do not fit each other.

Knows the manifest's keys; files and graphs as they lie in a bundle are in tests/runtime.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support_checkpoint import REMOVED, read

from dflash_onnx.models.check_manifest import check_manifest
from dflash_onnx.models.errors import ManifestError
from dflash_onnx.models.manifest import Manifest, read_manifest
from dflash_onnx.models.strict_json import from_json

DRAFTS: list[dict[str, Any]] = [
    {},
    {"layout": "speculators", "draft_vocab": 96},
    {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 12, "selector_top_k": 6},
]
Key = tuple[str | int, ...]


@pytest.fixture(scope="module")
def raw(make_bundle: Any) -> Any:
    """bundle.json of a bundle with a plain drafter, a reduced one and a DFlash2 one."""
    return read(make_bundle(drafts=DRAFTS) / "bundle.json")


def edited(raw: Any, path: Key, value: Any) -> Any:
    """A copy with one value set, or deleted by `REMOVED`."""
    result = json.loads(json.dumps(raw))
    place = result
    for key in path[:-1]:
        place = place[key]
    if value is REMOVED:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return result


def check(raw: Any) -> None:
    """Read and check, as loading a bundle does."""
    check_manifest(from_json(Manifest, raw, "box/bundle.json"), "box/bundle.json")


def shape(graph: str, kind: str, tensor: int, dimension: int) -> Key:
    """Where a dimension of a graph's tensor is."""
    return ("graphs", graph, kind, tensor, "shape", dimension)


def test_an_exported_manifest_fits(raw: Any) -> None:
    """What export writes passes, for every kind of drafter."""
    check(raw)
    assert list(raw["drafts"]) == ["dflash", "dflash-2", "dflash2"]


DRAFT, SECOND, SELECTOR = ("drafts", "dflash"), ("drafts", "dflash-2"), ("drafts", "dflash2")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("family",), "llava", ("family", "qwen3_vl", "'llava'")),
        (("precision", "head"), "int3", ("precision.head", "fp32, fp16, int4")),
        (("precision",), "int4", ("precision", "an object")),
        (("target", "architecture"), "LlavaModel", ("target.architecture",)),
        (("tap_before_deepstack",), False, ("tap_before_deepstack", "true")),
        (("num_top",), 0, ("num_top", "above 0")),
        (("num_top",), 65, ("graphs.head.outputs", "'top_values'")),
        (("tokenizer_size",), 513, ("tokenizer_size", "512")),
        (("stop_ids",), [], ("stop_ids", "at least one")),
        (("stop_ids",), [512], ("stop_ids", "0..511", "512")),
        (("stop_ids",), [500], ("stop_ids", "not banned")),
        (("banned_ids",), [-1], ("banned_ids", "-1")),
        (("banned_ids",), [], ("target.special.image", "banned")),
        (("target", "special", "image"), 512, ("special.image", "512")),
        (("target", "text", "num_layers"), 3, ("num_layers", "4", "target graph")),
        (("target", "text", "num_layers"), 2**30, ("num_layers", "4")),
        (("target", "text", "num_kv_heads"), 4, ("graphs.target.inputs", "past_key_values.0.key")),
        (("target", "text", "vocab_size"), 10**30, ("vocab_size", "2^31")),
        (("target", "text", "rope", "rotary_dim"), 64, ("rotary_dim", "head_dim")),
        (("target", "text", "rope", "mrope_section"), [1, 1, 1], ("mrope_section", "add up to 8")),
        (("target", "vision", "num_heads"), 0, ("vision.num_heads", "above 0")),
        (("target", "vision", "deepstack_layers"), [], ("graphs.target.inputs", "deepstack.0")),
        (("image", "patch_size"), 8, ("image.patch_size", "target.vision.patch_size")),
        (("image", "max_pixels"), 1, ("image.min_pixels, max_pixels",)),
        (("image", "std"), [0.5, 0.0, 0.5], ("image.std",)),
        (("image", "rescale_factor"), float("nan"), ("image.rescale_factor", "finite")),
        (("tap_layers",), [1, 2, 4], ("tap_layers", "0..3")),
        (("tap_layers",), [1, 1, 2], ("tap_layers", "distinct")),
        (("tap_layers",), [1, 2, 3], ("graphs.target.outputs", "tap.3")),
        (("embedding", "file"), "other.data", ("embedding.file", "embedding.data")),
        (("embedding", "dtype"), "object", ("embedding.dtype", "float32, float16")),
        (("embedding", "offset"), 4096, ("embedding.offset", "embedding.data")),
        (("embedding", "offset"), -4, ("embedding.offset",)),
        (("embedding", "shape"), [256, 256], ("embedding.shape", "512")),
        (("embedding", "shape"), [], ("embedding.shape",)),
        (("sidecars", "tokenizer.json"), REMOVED, ("sidecars", "tokenizer.json")),
        (("graphs", "vision"), REMOVED, ("graphs", "'vision'")),
        (("graphs", "dflash.append"), REMOVED, ("graphs", "'dflash.append'")),
        (("graphs", "dflash-2.head"), REMOVED, ("graphs", "'dflash-2.head'")),
        (
            ("graphs", "dflash2.block", "outputs", 1),
            REMOVED,
            ("dflash2.block.outputs", "projected"),
        ),
        (("graphs", "head", "inputs", 1, "dtype"), "int32", ("graphs.head.inputs", "'rows'")),
        (shape("dflash.inject", "outputs", 0, 1), 2, ("dflash.inject.outputs", "'key.0'")),
        (shape("dflash.block", "inputs", 0, 0), 8, ("dflash.block.inputs", "'embeds'")),
        ((*DRAFT, "kind"), "eagle", ("dflash.kind", "dflash, dflash2")),
        ((*DRAFT, "kind"), "dflash2", ("dflash.selector",)),
        ((*DRAFT, "target_digest"), "0" * 64, ("Export them together",)),
        ((*DRAFT, "block_size"), 1, ("block_size", "2 or more")),
        ((*DRAFT, "mask_token_id"), 512, ("mask_token_id", "512")),
        ((*DRAFT, "target_layer_ids"), [1, 3], ("target_layer_ids", "[1, 2]")),
        ((*DRAFT, "target_layer_ids"), [], ("target_layer_ids",)),
        ((*DRAFT, "layers"), [], ("dflash.layers",)),
        ((*DRAFT, "layers", 0, "window"), 0, ("dflash.layers", "above 0")),
        ((*DRAFT, "layers", 0, "window"), 4, ("dflash.block.inputs", "mask.1")),
        ((*DRAFT, "head_dim"), 64, ("graphs.dflash.inject.outputs",)),
        ((*SECOND, "own_head"), False, ("dflash-2.d2t",)),
        ((*SECOND, "d2t", "dtype"), "int32", ("d2t.dtype", "int64")),
        ((*SECOND, "d2t", "shape"), [95], ("graphs.dflash-2.head.inputs", "'bias'")),
        ((*SELECTOR, "selector", "top_k"), 513, ("selector.top_k", "1..64")),
        ((*SELECTOR, "selector", "output_multiplier"), 0.0, ("output_multiplier", "above 0")),
        ((*SELECTOR, "selector", "logit_softcap"), -1.0, ("logit_softcap", "above 0")),
        ((*SELECTOR, "selector", "successor", "shape"), [512, 11], ("successor.shape",)),
        ((*SELECTOR, "selector", "successor", "offset"), 2**60, ("successor.offset",)),
    ],
)
def test_what_does_not_fit_is_named(
    raw: Any, path: Key, value: Any, words: tuple[str, ...]
) -> None:
    """One value of a good manifest is changed, as by a bad copy or an edit by hand.
    The message names the file, the key and what was expected."""
    with pytest.raises(ManifestError) as caught:
        check(edited(raw, path, value))
    for word in ("box/bundle.json", *words):
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def places(value: Any, path: Key = ()) -> Iterator[Key]:
    """Every place of a manifest; of a list, and of the graphs, only the first."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value[:1])
    for key, item in list(items)[:1] if path == ("graphs",) else items:
        yield (*path, key)
        yield from places(item, (*path, key))


@pytest.mark.parametrize("value", [-1, 10**400, "x", []], ids=["negative", "huge", "text", "list"])
def test_no_value_anywhere_gives_another_error(raw: Any, value: Any) -> None:
    """Every value in turn is replaced: a manifest is refused with `ManifestError` or fits.
    A raw error here would be one more way to lose a user."""
    for path in places(raw):
        try:
            check(edited(raw, path, value))
        except ManifestError:
            continue


def test_unused_taps_may_stay(raw: Any) -> None:
    """A target graph may give taps that no drafter reads; they are never fetched."""
    outputs = [*raw["graphs"]["target"]["outputs"]]
    outputs.insert(0, {"name": "tap.3", "dtype": "float32", "shape": ["rows", 64]})
    check(edited(raw, ("graphs", "target", "outputs"), outputs))


def test_names_of_symbolic_dimensions_are_free(raw: Any) -> None:
    """Only fixed sizes are a contract."""
    check(edited(raw, shape("head", "inputs", 0, 0), "anything"))


def test_endless_json(tmp_path: Path) -> None:
    """JSON nested without end is a damaged file like any other."""
    (tmp_path / "bundle.json").write_text("[" * 100_000)
    with pytest.raises(ManifestError, match=r"bundle\.json cannot be read as JSON"):
        read_manifest(tmp_path)
