"""The info command: what is in a bundle, from its manifest, and whether its files are whole.

Reads every weight file to its end, which loading a bundle does not; opens no graph.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from ..models.config import LinearConfig, TextConfig
from ..models.manifest import DraftSpec, Manifest
from ..models.strict_json import to_json
from .bundle_files import open_bundle, verify_weights
from .drafters.policy import default_policy


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = commands.add_parser("info", help="say what is in a bundle, and verify it")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--json", action="store_true", help="print the manifest")
    return parser


def execute(options: argparse.Namespace) -> None:
    """Print the bundle's facts once all its files have the digests that the manifest states."""
    manifest = open_bundle(options.bundle)
    verify_weights(options.bundle, manifest)
    if options.json:
        print(json.dumps(to_json(manifest) | {"weights": "verified"}, ensure_ascii=False))
    else:
        print("\n".join((*describe(manifest), "weights    verified")))


def describe(manifest: Manifest) -> Iterator[str]:
    """The lines that a person wants to read."""
    text = manifest.target.text
    data = sum(f.num_bytes for f in manifest.data_files.values())
    row_bytes = 2 * 4 * len(text.attention_layers) * text.num_kv_heads * text.head_dim
    yield f"family     {manifest.family} ({manifest.target.architecture}), {manifest.precision}"
    files = {name.removesuffix(".data"): f.num_bytes for name, f in manifest.data_files.items()}
    parts = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in files.items())
    yield f"size       {data / 1e6:.1f} MB of weights: {parts}"
    yield (
        f"target     {text.num_layers} layers x {text.hidden_size}, {text.num_heads} heads "
        f"({text.num_kv_heads} K/V) x {text.head_dim}, vocabulary {text.vocab_size}, "
        f"{'tied' if text.tied_head else 'own'} head"
    )
    yield (
        f"context    {text.context_limit} rows, {row_bytes / 1e3:.1f} kB of cache each, "
        f"{row_bytes * text.context_limit / 1e9:.2f} GB when full"
    )
    if text.linear is not None:
        yield _describe_state(text, text.linear)
    yield from _describe_images(manifest, row_bytes)
    yield f"stop ids   {list(manifest.stop_ids)}; {len(manifest.banned_ids)} banned ids"
    yield f"taps       after layers {list(manifest.tap_layers)}"
    for name, draft in manifest.drafts.items():
        yield from _describe_draft(name, draft)
    if manifest.target.mtp:
        yield f"draft      mtp: {_describe_mtp(manifest)}"


def _describe_state(text: TextConfig, linear: LinearConfig) -> str:
    window = (linear.conv_kernel - 1) * linear.conv_width
    size = 4 * len(text.linear_layers) * (linear.value_width * linear.key_dim + window)
    return (
        f"state      {len(text.linear_layers)} Gated DeltaNet layers, {size / 1e6:.2f} MB for a "
        "sequence of any length"
    )


def _describe_images(manifest: Manifest, row_bytes: int) -> Iterator[str]:
    vision, image = manifest.target.vision, manifest.image
    if vision is None or image is None:
        yield "vision     none: a text-only model"
        return
    layers = list(vision.deepstack_layers)
    deepstack = f"DeepStack from blocks {layers}" if layers else "no DeepStack"
    yield f"vision     {vision.depth} blocks x {vision.hidden_size}, {deepstack}"
    max_rows = image.max_pixels // image.factor**2
    yield (
        f"images     {image.min_pixels} to {image.max_pixels} pixels, at most {max_rows} rows "
        f"({max_rows * row_bytes / 1e6:.0f} MB of cache), {image.factor}x{image.factor} pixels each"
    )


def _describe_mtp(manifest: Manifest) -> str:
    if manifest.mtp:
        return "the target's own head"
    return "not in the bundle: the checkpoint was saved without its mtp.* tensors"


def _describe_draft(name: str, draft: DraftSpec) -> Iterator[str]:
    layers = ", ".join(
        f"{'full' if layer.window is None else f'window {layer.window}'}"
        f"{' causal' if layer.causal else ''}"
        for layer in draft.layers
    )
    media = {True: "yes", False: "no", None: "unknown"}[draft.trained_on_media]
    policy = default_policy(draft.trained_on_media).value
    yield f"draft      {name}: {draft.kind} ({draft.layout}), block {draft.block_size}"
    yield f"           layers {layers}; taps {list(draft.target_layer_ids)}"
    yield f"           mask id {draft.mask_token_id}, trained on media: {media}, holes: {policy}"
