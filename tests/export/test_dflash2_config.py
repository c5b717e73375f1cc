"""A DFlash2 drafter's config.json: both layouts, what is required and what is refused.

Opens no weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support_checkpoint import REMOVED, changed, read
from tiny_checkpoint import make_draft

from dflash_onnx.models.draft_config import DraftConfig, DraftLayer, parse_draft
from dflash_onnx.models.errors import ExportError

WHERE = "draft/config.json"
SIZES = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 12,
    "selector_top_k": 6,
}
SCALES = {"input_embedding_scale": 1.5, "output_multiplier": 0.7, "final_logit_softcapping": 30.0}
SLIDES = {"sliding_window": 16, "is_causal": False}
LAYOUTS = ("zlab", "speculators")


@pytest.fixture(scope="module")
def configs(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One drafter's config.json in both layouts."""
    folder, made = tmp_path_factory.mktemp("dflash2"), {}
    for layout in LAYOUTS:
        options = {**SIZES, **SCALES, **SLIDES, "layout": layout}
        make_draft(folder / layout, pristine / "target", **options)
        made[layout] = read(folder / layout / "config.json")
    return made


def parsed(raw: dict[str, Any], changes: dict[str, Any]) -> DraftConfig:
    return parse_draft(changed(raw, changes), WHERE)


def config_refused(raw: dict[str, Any], changes: dict[str, Any], *words: str) -> None:
    with pytest.raises(ExportError) as caught:
        parsed(raw, changes)
    for word in (WHERE, *words):
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def places(layout: str, key: str, value: Any) -> dict[str, Any]:
    """The change that gives a field one value wherever this layout may have it."""
    return {key: value} | ({f"dflash_config.{key}": value} if layout == "zlab" else {})


def test_both_layouts_say_the_same(configs: dict[str, dict[str, Any]]) -> None:
    """Released files nest the fields in dflash_config, speculators keeps them at the top.
    All sizes, scales, windows and causality come out equal."""
    first, second = (parsed(configs[layout], {}) for layout in LAYOUTS)
    assert first.kind == second.kind == "dflash2"
    assert first.conv is not None and first.selector is not None
    assert vars(first.conv) == {"kernel_size": 2, "group_size": 16}
    assert vars(first.selector) == {"rank": 12, "top_k": 6}
    scales = first.input_embedding_scale, first.output_multiplier, first.logit_softcap
    assert scales == (1.5, 0.7, 30.0)
    assert first.layers == (DraftLayer(16, False),) * 2
    same = {"layout": "z-lab", "num_target_layers": 4, "target_hidden_size": None}
    assert DraftConfig(**(vars(second) | same)) == first


def test_v1_has_neither_part(zlab: dict[str, Any]) -> None:
    """A v1 drafter's fields of that name mean nothing; its architecture decides.
    Neither a convolution nor a selector is built for it."""
    config = parsed(zlab, {f"dflash_config.{key}": value for key, value in SIZES.items()})
    assert (config.kind, config.conv, config.selector) == ("dflash", None, None)


@pytest.mark.parametrize("key", SIZES)
def test_nested_field_wins_over_the_top_level(configs: dict[str, dict[str, Any]], key: str) -> None:
    """In z-lab's layout a field may stand inside dflash_config or beside it.
    The nested one wins; the other is found when it is alone or the nested one is null."""
    at_the_top = SIZES[key] // 2
    same = parsed(configs["zlab"], {})
    assert parsed(configs["zlab"], {key: at_the_top}) == same
    for absent in (REMOVED, None):
        moved = {key: at_the_top, f"dflash_config.{key}": absent}
        assert parsed(configs["zlab"], moved) != same


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("key", SIZES)
def test_missing_size_has_no_default(
    configs: dict[str, dict[str, Any]], key: str, layout: str
) -> None:
    """Other programs fall back to 2, 16, 256 and 16 here; the checkpoint's tensors need not.
    A missing value is an error with file and key; null counts as missing."""
    for value in (REMOVED, None):
        config_refused(configs[layout], places(layout, key, value), f"'{key}'", "no default")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        *((key, bad, ("integer of at least 1",)) for key in SIZES for bad in (0, -2, 1.5, True)),
        ("conv_group_size", 24, ("divisor of hidden_size=64", "24")),
        ("conv_group_size", 128, ("divisor of hidden_size=64", "128")),
        ("conv_kernel_size", 9, ("at most block_size=8", "9")),
        ("selector_top_k", 513, ("at most vocab_size=512", "513")),
        ("selector_rank", "12", ("integer", "'12'")),
        ("output_multiplier", 0, ("above 0",)),
        ("output_multiplier", -0.5, ("above 0",)),
        ("input_embedding_scale", "1", ("a number",)),
        ("final_logit_softcapping", "30", ("a number",)),
    ],
)
def test_value_out_of_range(
    configs: dict[str, dict[str, Any]], layout: str, key: str, value: Any, words: tuple[str, ...]
) -> None:
    """Groups that do not fit the width, more taps than rows, more candidates than tokens.
    Each is refused with its key, in either layout."""
    config_refused(configs[layout], places(layout, key, value), f"'{key}'", *words)


@pytest.mark.parametrize(
    ("key", "value"),
    [("conv_kernel_size", 8), ("conv_kernel_size", 1), ("conv_group_size", 64),
     ("conv_group_size", 1), ("selector_top_k", 512), ("selector_top_k", 1)],
)  # fmt: skip
def test_limits_themselves_are_allowed(
    configs: dict[str, dict[str, Any]], key: str, value: int
) -> None:
    """As many taps as rows, one group or one a channel, every token or one a candidate.
    Odd, but what they mean is clear."""
    config = parsed(configs["zlab"], places("zlab", key, value))
    assert value in (*vars(config.conv).values(), *vars(config.selector).values())


@pytest.mark.parametrize("value", [None, 0, -1, REMOVED])
def test_softcap_that_is_off(configs: dict[str, dict[str, Any]], value: Any) -> None:
    """Null, zero and negative values switch the softcap off, as in the reference.
    The multiplier stays."""
    config = parsed(configs["zlab"], places("zlab", "final_logit_softcapping", value))
    assert (config.logit_softcap, config.output_multiplier) == (None, 0.7)


@pytest.mark.parametrize(("value", "causal"), [(REMOVED, False), (True, False), (False, True)])
def test_speculators_sliding_layers(
    configs: dict[str, dict[str, Any]], value: Any, causal: bool
) -> None:
    """For DFlash2 the flag's absence means not causal, the other way round than for v1.
    A file that states it is believed."""
    config = parsed(configs["speculators"], {"sliding_window_non_causal": value})
    assert config.layers == (DraftLayer(16, causal),) * 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculators_model_type": "dflash"}, ("DFlash2DraftModel",)),
        ({"architectures": ["DFlashSpeculator"]}, ("DFlashSpeculator",)),
        ({"architectures": ["DFlash3DraftModel"]}, ("DFlash3DraftModel", "supported")),
        ({"sample_from_anchor": True}, ("sample_from_anchor",)),
    ],
)
def test_names_that_contradict_each_other(
    configs: dict[str, dict[str, Any]], changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    """A speculators file states its kind twice; one of the two is wrong then.
    Neither is believed."""
    config_refused(configs["speculators"], changes, *words)
