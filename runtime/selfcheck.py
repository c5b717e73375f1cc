"""The export's self-check: a few rows through every graph of a finished bundle.

Finds what a file check cannot: values that are not finite or do not depend on anything, taps that
repeat each other, a drafter whose graphs do not fit its target.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..models.draft_config import DraftLayer
from ..models.errors import ExportError
from ..models.grid import Grid
from ..models.manifest import Manifest
from ..models.positions import Ints, Position, Row, Span, advancing_positions, block_positions
from ..models.vision_config import VisionConfig
from .bundle_files import open_bundle
from .drafters.base import BlockRows, Observed, Request
from .drafters.choosers import BestToken, SelectorWalk
from .drafters.dflash import DFlash
from .drafters.draft_cache import DraftCache
from .drafters.mtp import MtpNetworks
from .drafters.networks import DFlashNetworks
from .drafters.policy import HolePolicy, HoleSettings
from .drafters.rows import Float, HostWriter
from .mapped_runtime import MappedRuntime, packed_graphs
from .selfcheck_values import alive, finite, usable_logits
from .target import ImageRows, Target, TargetRows, open_head

NUM_ROWS = 5
# Of the largest hidden value: the two forms sum in another order.
PORTABLE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Checked:
    """The bundle that is looked at, and its target."""

    folder: Path
    manifest: Manifest
    runtime: MappedRuntime
    target: Target


def self_check(folder: Path) -> None:
    """Run every graph of the bundle on a few rows; `ExportError` says which one is wrong."""
    # The tokenizer is held against its digest here, and was read before it was written.
    manifest = open_bundle(folder)
    with MappedRuntime(folder, packed_graphs(manifest)) as runtime:
        target = Target(folder, manifest, runtime, open_head(manifest, runtime))
        _check(Checked(folder, manifest, runtime, target))


def _check(bundle: Checked) -> None:
    """Part by part: mapped weights count as memory once they are read, until they are closed."""
    manifest, runtime = bundle.manifest, bundle.runtime
    token_ids, hybrid = _token_ids(manifest), manifest.target.text.linear is not None
    # Before anything runs, since these two are opened meanwhile.
    head = bundle.target.head
    portable = Target(bundle.folder, manifest, runtime, head, portable=True) if hybrid else None
    mtp = MtpNetworks(manifest, runtime, bundle.target) if manifest.mtp else None
    image = _check_vision(bundle, vision) if (vision := manifest.target.vision) else None
    rows = _check_target(bundle, token_ids, image)
    runtime.close()
    if portable is not None:
        _check_portable(portable, rows, token_ids)
        runtime.close()
    if mtp is not None:
        _check_mtp(mtp, rows, token_ids)
    for name in manifest.drafts:
        runtime.close()
        _check_draft(bundle, name, rows, token_ids)


def _check_vision(bundle: Checked, vision: VisionConfig) -> ImageRows:
    grid = Grid(2 * vision.merge_size, vision.merge_size, vision.merge_size)
    values = np.linspace(-1, 1, grid.num_patches * vision.patch_dim, dtype=np.float32)
    patches = values.reshape(grid.num_patches, vision.patch_dim)
    encoded = bundle.target.encode_patches(patches, grid)
    alive("vision", encoded.embeds)
    alive("vision (DeepStack)", encoded.deepstack)
    return encoded


def _token_ids(manifest: Manifest) -> Ints:
    """A few ids from all over the vocabulary."""
    allowed = np.ones(manifest.target.text.vocab_size, bool)
    allowed[list(manifest.banned_ids)] = False
    usable = np.flatnonzero(allowed[: manifest.tokenizer_size])
    return usable[:: max(1, usable.size // NUM_ROWS)][:NUM_ROWS]


def _check_target(bundle: Checked, token_ids: Ints, image: ImageRows | None) -> TargetRows:
    """Text rows and then an image's, so that DeepStack gets real rows; returns the text rows."""
    target, taps, num_text = bundle.target, bundle.manifest.tap_layers, token_ids.size
    embeds, deepstack = target.embed(token_ids), None
    if image is not None:
        nothing = np.zeros((len(image.deepstack), *embeds.shape), np.float32)
        deepstack = np.concatenate([nothing, image.deepstack], axis=1)
        embeds = np.concatenate([embeds, image.embeds])
    rows = target.forward(
        target.new_cache(embeds.shape[0] + 1),
        embeds,
        advancing_positions(Position(0), embeds.shape[0]),
        deepstack,
        taps,
        certain=False,
    )
    alive("target", rows.hidden)
    for tap in taps:
        alive(f"target, tap {tap}", rows.taps[tap])
    bundle.runtime.close()
    head = target.head.rows(rows.hidden, np.arange(embeds.shape[0]), True)
    assert head.logits is not None
    usable_logits("head", head.logits)
    text = TargetRows(rows.hidden[:num_text], {i: tap[:num_text] for i, tap in rows.taps.items()})
    _check_distinct(text)
    return text


def _check_portable(target: Target, rows: TargetRows, token_ids: Ints) -> None:
    """Both forms of the recurrent layers must agree, after a replay of half of the rows too."""
    cache, half = target.new_cache(2 * token_ids.size), token_ids.size // 2
    embeds = target.embed(token_ids)
    positions = advancing_positions(Position(0), token_ids.size)
    for count in (half, token_ids.size - half):
        first = cache.num_rows
        output = target.forward(
            cache, embeds[first:], positions[:, first:], None, (), certain=False
        )
        cache.commit(count)
        finite("target (portable)", output.hidden)
        difference = np.abs(output.hidden - rows.hidden[first:]).max()
        if not difference <= PORTABLE_TOLERANCE * np.abs(rows.hidden).max():
            raise ExportError(
                f"self-check: the target's portable graph differs from the fused one by "
                f"{difference:.2g}; one of the two is wrong on this machine."
            )


def _check_mtp(networks: MtpNetworks, rows: TargetRows, token_ids: Ints) -> None:
    embeds = networks.target.embed(token_ids)
    positions = advancing_positions(Position(0), token_ids.size)
    cache = networks.new_cache(token_ids.size + 1)
    hidden = networks.forward(cache, embeds[1:], rows.hidden[:-1], positions[:, :-1])
    alive("mtp", hidden)


def _check_distinct(rows: TargetRows) -> None:
    taps = sorted(rows.taps)
    for i, first in enumerate(taps):
        for second in taps[i + 1 :]:
            if np.array_equal(rows.taps[first], rows.taps[second]):
                raise ExportError(
                    f"self-check: the target's taps {first} and {second} are identical; a layer "
                    "between them does nothing or the taps are wired wrongly."
                )


def _check_draft(bundle: Checked, name: str, rows: TargetRows, token_ids: Ints) -> None:
    # By the append graph, so that the check runs it too; answers write their caches in NumPy.
    networks = DFlashNetworks(
        name, bundle.folder, bundle.manifest, bundle.runtime, bundle.target, append_by_graph=True
    )
    count = token_ids.size
    features = [rows.taps[i] for i in networks.taps]
    keys, values = networks.inject(features, np.arange(count))
    for array in (*keys, *values):
        finite(f"drafter {name} (inject)", array)
    caches = [_check_append(name, networks, kind, keys, values) for kind in networks.kinds]
    anchor, start = int(token_ids[-1]), Position(count)
    block = networks.block(anchor, block_positions(start, networks.block_size), caches)
    alive(f"drafter {name} (block)", block.hidden)
    # Before drafting, since a walk over NaN finds no best candidate.
    _check_chooser(name, networks, block.drafted, anchor)
    drafter = DFlash(name, networks, HoleSettings(HolePolicy.GAP))
    span = Span(Row(0), count, "text", False)
    positions = advancing_positions(Position(0), count)
    embeds = bundle.target.embed(token_ids)
    drafter.observe(Observed(Row(0), token_ids, positions, rows.taps, span, embeds, rows.hidden))
    request = Request(anchor, drafter.max_drafts, Row(count), start, 1, token_ids.tolist())
    ids = drafter.propose(request).token_ids
    vocab_size = bundle.manifest.target.text.vocab_size
    if len(ids) != drafter.max_drafts or not all(0 <= i < vocab_size for i in ids):
        raise ExportError(f"self-check: drafter {name} drafted {ids}, which are no token ids.")


def _check_append(
    name: str,
    networks: DFlashNetworks,
    kind: DraftLayer,
    keys: list[Float],
    values: list[Float],
) -> DraftCache:
    """The append graph must write what NumPy writes and nothing else; returns NumPy's cache."""
    layers = [i for i, layer in enumerate(networks.layers) if layer == kind]
    spec, by_graph = networks.spec, networks.new_cache(kind)
    by_host = DraftCache(len(layers), spec.num_kv_heads, spec.head_dim, kind.window, HostWriter())
    for cache in (by_graph, by_host):
        for buffer in (*cache.keys, *cache.values):
            buffer.fill(0.5)
        for row in reversed(range(keys[0].shape[2])):
            part = slice(row, row + 1)
            cache.append(
                [keys[i][:, :, part] for i in layers],
                [values[i][:, :, part] for i in layers],
                np.arange(row, row + 1),
                True,
            )
    pairs = zip((*by_graph.keys, *by_graph.values), (*by_host.keys, *by_host.values), strict=True)
    if not all(np.array_equal(ours, theirs) for ours, theirs in pairs):
        raise ExportError(
            f"self-check: drafter {name}'s append graph does not write the rows it is given; "
            "export the bundle again."
        )
    return by_host


def _check_chooser(name: str, networks: DFlashNetworks, rows: BlockRows, anchor: int) -> None:
    """An argmax over NaN is a token id too, so the numbers behind the ids are looked at."""
    chooser = networks.chooser
    if isinstance(chooser, BestToken):
        logits = chooser.head.rows(rows.hidden, np.arange(len(rows.hidden)), True).logits
        assert logits is not None
        usable_logits(f"drafter {name} (head)", logits)
    if isinstance(chooser, SelectorWalk):
        assert rows.projected is not None
        usable_logits(f"drafter {name} (candidates)", chooser.candidates(rows.hidden)[0])
        finite(f"drafter {name} (candidates)", rows.projected)
        usable_logits(f"drafter {name} (selector)", _all_scores(chooser, rows, anchor))


def _all_scores(walk: SelectorWalk, rows: BlockRows, anchor: int) -> Float:
    """Scores [n, K] of every candidate after every one that may stand before it."""
    ids, scorer = walk.scorer(rows)
    before = [[anchor], *ids[:-1].tolist()]
    return np.stack([scorer.scores(row, token) for row, ts in enumerate(before) for token in ts])
