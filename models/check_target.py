"""Whether a manifest's target makes sense: decoder, vision tower, image rules and token ids.

Knows keys and sizes, no files; tables, drafters and graphs are `check_manifest`'s business.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .config import ARCHITECTURES, RopeConfig, TextConfig
from .manifest import Manifest
from .requirements import Place


def check_target(place: Place, manifest: Manifest) -> None:
    """Raise `ManifestError` for the first value of the target that does not fit the others."""
    _check_parts(place, manifest)
    _check_text(place, manifest)
    _check_linear(place, manifest.target.text)
    if manifest.target.vision is not None:
        _check_vision(place, manifest)
    _check_ids(place, manifest)


def _check_parts(place: Place, manifest: Manifest) -> None:
    """A vision-language target has all three of its image parts, a text target none."""
    target = manifest.target
    kind = ARCHITECTURES[target.architecture]
    parts = {"vision": target.vision, "special": target.special}
    named = {f"target.{key}": value for key, value in parts.items()} | {"image": manifest.image}
    for key, value in named.items():
        place.equal(f"{key} is there", value is not None, kind.vision, "target.architecture")
    for key in ("output_gate", "zero_centred_norms"):
        got = getattr(target.text, key)
        place.equal(f"target.text.{key}", got, kind.hybrid, "target.architecture")
    place.require(kind.hybrid or not target.mtp, "target.mtp", "false here", target.mtp)
    place.equal("target.text.qk_norm", target.text.qk_norm, kind.qk_norm, "target.architecture")
    axes = target.text.rope.mrope_section is not None
    place.equal("target.text.rope has sections", axes, kind.mrope, "target.architecture")


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
    check_rope(place, f"{key}.rope", text.rope, text.head_dim)
    section = text.rope.mrope_section
    whole = section is not None and len(section) == 3 and min(section) >= 0
    fits = section is None or (whole and 2 * sum(section) == text.rope.rotary_dim)
    expected = f"three numbers that add up to {text.rope.rotary_dim // 2}"
    place.require(fits, f"{key}.rope.mrope_section", expected, section)
    place.layers("tap_layers", manifest.tap_layers, text.num_layers)
    place.positive("num_top", manifest.num_top)
    place.positive("tokenizer_size", manifest.tokenizer_size)
    for name, value in (("num_top", manifest.num_top), ("tokenizer_size", manifest.tokenizer_size)):
        expected = f"at most the vocabulary's {text.vocab_size}"
        place.require(value <= text.vocab_size, name, expected, value)


def _check_linear(place: Place, text: TextConfig) -> None:
    key, layers, linear = "target.text.linear", text.linear_layers, text.linear
    place.layers("target.text.linear_layers", layers, text.num_layers)
    place.equal(f"{key} is there", linear is not None, bool(layers), "target.text.linear_layers")
    place.require(
        len(layers) < text.num_layers, "target.text.linear_layers", "not all", list(layers)
    )
    if linear is not None:
        _check_sizes(place, key, linear)
        grouped = linear.num_value_heads % linear.num_key_heads == 0
        expected = f"a multiple of num_key_heads={linear.num_key_heads}"
        place.require(grouped, f"{key}.num_value_heads", expected, linear.num_value_heads)
        taps = linear.conv_kernel
        place.require(taps >= 2, f"{key}.conv_kernel", "2 or more", taps)


def check_rope(place: Place, key: str, rope: RopeConfig, head_dim: int) -> None:
    """The rotated width is even and lies within a head."""
    _check_sizes(place, key, rope)
    width = rope.rotary_dim
    fits = width % 2 == 0 and width <= head_dim
    place.require(fits, f"{key}.rotary_dim", f"even and at most head_dim={head_dim}", width)


def _check_vision(place: Place, manifest: Manifest) -> None:
    vision, image, key = manifest.target.vision, manifest.image, "target.vision"
    assert vision is not None and image is not None
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
    special = manifest.target.special
    for key, i in dataclasses.asdict(special).items() if special else ():
        place.below(f"target.special.{key}", [i], vocab_size)
        place.require(i in banned, f"target.special.{key}", "a banned id: it stands for pixels", i)
    stop = list(manifest.stop_ids)
    place.require(bool(stop), "stop_ids", "at least one id, or no answer would end", stop)
    place.require(not banned & set(stop), "stop_ids", "ids that are not banned", stop)
    count = len(banned)
    place.require(count < vocab_size, "banned_ids", "fewer than the vocabulary", count)
