"""Manifests of hybrid and text-only bundles whose values do not fit each other.

Knows the keys that these targets add; those that every bundle has are in test_manifest.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support_checkpoint import REMOVED, edit_json, read

from dflash_onnx.models.check_manifest import check_manifest
from dflash_onnx.models.errors import ManifestError
from dflash_onnx.models.manifest import Manifest
from dflash_onnx.models.strict_json import from_json
from dflash_onnx.runtime.cli import main

VISION: dict[str, Any] = {"architecture": "Qwen3_5ForConditionalGeneration", "mtp": True}
TARGETS: dict[str, dict[str, Any]] = {
    "vision": VISION,
    "hybrid text": {"architecture": "Qwen3_5ForCausalLM", "mtp": True},
    "text": {"architecture": "Qwen3ForCausalLM"},
}
Key = tuple[str | int, ...]
LAYERS, LINEAR, ROPE = (("target", "text", key) for key in ("linear_layers", "linear", "rope"))


@pytest.fixture(scope="module")
def raws(make_bundle: Any) -> dict[str, Any]:
    """bundle.json of each kind of target, without drafters."""
    return {
        name: read(make_bundle(target=target, drafts=[]) / "bundle.json")
        for name, target in TARGETS.items()
    }


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


@pytest.mark.parametrize("kind", TARGETS)
def test_an_exported_manifest_fits(raws: dict[str, Any], kind: str) -> None:
    """What export writes passes, and says what the target has."""
    check(raws[kind])
    assert (raws[kind]["image"] is None) is (kind != "vision")
    assert raws[kind]["mtp"] is raws[kind]["target"]["mtp"] is (kind != "text")
    assert ("target.portable" in raws[kind]["graphs"]) is (kind != "text")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("mtp",), False, ("mtp must be", "graph of that name")),
        (("mtp",), 1, ("mtp", "expected bool")),
        (("mtp",), REMOVED, ("missing key 'mtp'",)),
        (("target", "mtp"), False, ("mtp must be", "target.mtp")),
        (("target", "mtp"), None, ("target.mtp", "expected bool")),
        (LAYERS, [], ("target.text.linear is there", "target.text.linear_layers")),
        (LAYERS, [0, 1], ("graphs.target.inputs", "past_key_values.2.key")),
        (LAYERS, [0, 1, 3], ("graphs.target.inputs", "state.3")),
        (LAYERS, [0, 1, 2, 3], ("linear_layers", "not all")),
        (LAYERS, [0, 1, 4], ("linear_layers", "0..3", "4")),
        (LAYERS, [0, 1, 1], ("linear_layers", "distinct")),
        (LAYERS, [0, 1, -1], ("linear_layers", "-1")),
        (LAYERS, [0, 1, "2"], ("linear_layers[2]", "expected int")),
        (LAYERS, None, ("linear_layers", "a list")),
        (LINEAR, None, ("target.text.linear is there", "linear_layers")),
        (LINEAR, REMOVED, ("missing key 'linear'",)),
        ((*LINEAR, "num_key_heads"), 3, ("linear.num_value_heads", "num_key_heads=3")),
        ((*LINEAR, "num_key_heads"), 0, ("linear.num_key_heads", "above 0")),
        ((*LINEAR, "num_key_heads"), 1, ("graphs.target.inputs, 'conv_window.0'",)),
        ((*LINEAR, "num_value_heads"), 8, ("graphs.target.inputs, 'conv_window.0'",)),
        ((*LINEAR, "key_dim"), 16, ("graphs.target.inputs, 'conv_window.0'",)),
        ((*LINEAR, "value_dim"), -16, ("linear.value_dim", "above 0")),
        ((*LINEAR, "value_dim"), 10**30, ("linear.value_dim", "2^31")),
        ((*LINEAR, "conv_kernel"), 1, ("linear.conv_kernel", "2 or more")),
        ((*LINEAR, "conv_kernel"), 3, ("graphs.target.inputs, 'conv_window.0'",)),
        ((*LINEAR, "conv_kernel"), 4.0, ("linear.conv_kernel", "expected int")),
        (("target", "text", "output_gate"), False, ("output_gate", "target.architecture")),
        (("target", "text", "zero_centred_norms"), False, ("zero_centred_norms",)),
        ((*ROPE, "rotary_dim"), 16, ("rope.mrope_section", "add up to 8")),
        ((*ROPE, "rotary_dim"), 7, ("rope.rotary_dim", "even")),
        ((*ROPE, "mrope_section"), None, ("rope has sections", "target.architecture")),
        ((*ROPE, "mrope_section"), [5, -1, 0], ("rope.mrope_section", "add up to 4")),
        (("image",), None, ("image is there", "target.architecture")),
        (("target", "vision"), None, ("target.vision is there", "target.architecture")),
        (("target", "special"), None, ("target.special is there", "target.architecture")),
        (("target", "architecture"), "Qwen3_5ForCausalLM", ("family", "target.architecture")),
        (("target", "architecture"), "Qwen3_5MoeForCausalLM", ("target.architecture", "one of")),
        (("family",), "qwen3_vl", ("family", "'qwen3_5'")),
        (("graphs", "target.portable"), REMOVED, ("graphs must be", "'target.portable'")),
        (("graphs", "mtp"), REMOVED, ("graphs must be", "'mtp'")),
        (("graphs", "mtp", "inputs", 0, "shape", 2), 32, ("graphs.mtp.inputs",)),
        (("graphs", "target.portable", "outputs", 0, "dtype"), "float16", ("target.portable",)),
        (("target", "vision", "deepstack_layers"), [0], ("graphs.target.inputs", "deepstack.0")),
    ],
)
def test_what_does_not_fit_is_named(
    raws: dict[str, Any], path: Key, value: Any, words: tuple[str, ...]
) -> None:
    """One value of a good hybrid manifest is changed, as by a bad copy or an edit by hand.
    The message names the file, the key and what was expected."""
    with pytest.raises(ManifestError) as caught:
        check(edited(raws["vision"], path, value))
    for word in ("box/bundle.json", *words):
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (("image",), "image is there must be False"),
        (("target", "vision"), "target.vision is there must be False"),
        (("target", "special"), "target.special is there must be False"),
        (("target", "mtp"), "target.mtp must be false"),
        (("mtp",), "mtp must be false without target.mtp"),
        (LINEAR, "target.text.linear is there must be False"),
        (LAYERS, "target.text.linear is there must be True"),
        (ROPE, "target.text.rope has sections must be False"),
        (("target", "text", "output_gate"), "target.text.output_gate must be False"),
        (("target", "text", "zero_centred_norms"), "target.text.zero_centred_norms must be False"),
    ],
)
def test_a_text_manifest_has_no_parts_of_another(
    raws: dict[str, Any], path: Key, words: str
) -> None:
    """A part of the hybrid bundle's manifest is put into a plain text target's.
    The message names it."""
    part = raws["vision"]
    for key in path:
        part = part[key]
    with pytest.raises(ManifestError, match=words):
        check(edited(raws["text"], path, part))


def places(value: Any, path: Key = ()) -> Iterator[Key]:
    """Every place of a manifest but its tables of files and graphs; of a list only the first."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = list(enumerate(value))[:1]
    for key, item in items:
        if key not in ("graphs", "data_files", "sidecars"):
            yield (*path, key)
            yield from places(item, (*path, key))


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("value", [None, 10**400], ids=["null", "huge"])
def test_no_value_anywhere_gives_another_error(raws: dict[str, Any], kind: str, value: Any) -> None:
    """Every value in turn is replaced: a manifest is refused with one line, or fits."""
    for path in places(raws[kind]):
        try:
            check(edited(raws[kind], path, value))
        except ManifestError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"target.text.linear.key_dim": 16}, "conv_window.0"),
        ({"image": None}, "image is there"),
        ({"mtp": False}, "mtp must be"),
    ],
)
@pytest.mark.parametrize("command", ["run", "info"])
def test_commands_say_it_in_one_line(
    make_bundle: Any, tmp_path: Path, capsys: Any, command: str, changes: dict[str, Any], word: str
) -> None:
    """A damaged manifest stops every command before a graph is opened."""
    raw = (make_bundle(target=VISION, drafts=[]) / "bundle.json").read_text(encoding="utf-8")
    (tmp_path / "bundle.json").write_text(raw, encoding="utf-8")
    edit_json(tmp_path / "bundle.json", changes)
    assert main([command, str(tmp_path), *(["hi"] if command == "run" else [])]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and word in err
