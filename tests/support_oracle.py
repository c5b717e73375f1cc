"""An all-knowing drafter's networks: right tokens only for the right position and the right rows.

What is true comes from a plain run and from counting positions by hand, never from the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
from support_prompts import Part, lay_out, text

from dflash_onnx.models.draft_config import DraftLayer
from dflash_onnx.models.positions import Ints, Position, Row, Ruler
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.drafters.base import (
    DraftCounts,
    Drafted,
    DraftSampling,
    Observed,
    Proposal,
    Request,
)
from dflash_onnx.runtime.drafters.dflash import DFlash
from dflash_onnx.runtime.drafters.draft_cache import FREE, DraftCache
from dflash_onnx.runtime.drafters.policy import HolePolicy, HoleSettings
from dflash_onnx.runtime.drafters.rows import Float, HostWriter
from dflash_onnx.runtime.options import make_options
from dflash_onnx.runtime.results import Result

TAPS: tuple[int, ...] = (1, 2)
FULL = DraftLayer(None, False)
WINDOW_64 = DraftLayer(64, True)


def endless(model: Model) -> Model:
    """The model with no stop token, so that every answer has the length asked for."""
    model.manifest = replace(model.manifest, stop_ids=())
    return model


@dataclass(frozen=True)
class TrueRow:
    """A row of the whole text: where it belongs on the text ruler, and its features' print."""

    position: int
    skipped: bool
    fingerprint: float


@dataclass(frozen=True)
class Truth:
    """The plain answer of a prompt and every row of prompt and answer."""

    rows: list[TrueRow]
    tokens: tuple[int, ...]
    num_prompt_rows: int

    @property
    def pos_next(self) -> int:
        """Where the first output token belongs on the text ruler."""
        return self.rows[self.num_prompt_rows].position

    def first(self, ruler: Ruler) -> int:
        """Where the first output token belongs on a ruler."""
        return self.pos_next if ruler == "text" else self.num_prompt_rows


class Witness:
    """Never drafts; notes the features of every committed row."""

    name = "witness"
    max_drafts = 0
    taps = TAPS

    def __init__(self) -> None:
        self.counts = DraftCounts()
        self.fingerprints: list[float] = []

    def observe(self, rows: Observed) -> None:
        assert rows.first_row == len(self.fingerprints)
        self.fingerprints += fingerprints([rows.taps[i] for i in self.taps]).tolist()

    def propose(self, request: Request) -> Proposal:
        return Proposal([])

    def crop(self, num_rows: Row, position: Position) -> None:
        del self.fingerprints[num_rows:]


def fingerprints(features: list[Float]) -> Float:
    """One number per feature row; zero for a row of zeros."""
    return np.concatenate(features, axis=1).sum(axis=1).astype(np.float32)


def find_truth(model: Model, parts: Sequence[Part], tokens: int = 20) -> Truth:
    """Run plainly, and count positions by hand."""
    witness = Witness()
    plan = lay_out(model, parts)
    options = make_options(max_new_tokens=tokens)
    result = model.conversation(witness).generate_plan(plan, options).result()
    assert len(result.token_ids) == tokens, "an `endless` model is needed"
    positions, skipped, start = [], [], 0
    for part in [*parts, text(tokens)]:
        step = 0 if part.kind == "image" else 1
        positions += [start + step * i for i in range(part.num_rows)]
        skipped += [part.is_skipped] * part.num_rows
        start += part.advance
    # The last token has no row, hence the pad.
    prints = [*witness.fingerprints, 0.0]
    rows = [TrueRow(*row) for row in zip(positions, skipped, prints, strict=False)]
    return Truth(rows, result.token_ids, plan.num_rows)


@dataclass(frozen=True)
class InjectCall:
    positions: tuple[int, ...]
    fingerprints: tuple[float, ...]


@dataclass(frozen=True)
class DraftCall:
    anchor: int
    start: int
    fault: str | None


@dataclass
class OracleNetworks:
    """Implements `DraftNetworks`. Rows before `seen_from` are not expected in the caches."""

    truth: Truth
    ruler: Ruler = "text"
    kinds: tuple[DraftLayer, ...] = (FULL,)
    seen_from: int = 0
    block_size: int = 8
    taps: tuple[int, ...] = TAPS
    injects: list[InjectCall] = field(default_factory=list)
    drafts: list[DraftCall] = field(default_factory=list)
    layers: tuple[DraftLayer, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.layers = self.kinds

    def new_cache(self, kind: DraftLayer) -> DraftCache:
        return DraftCache(1, 1, 2, kind.window, HostWriter())

    def inject(self, features: list[Float], positions: Ints) -> tuple[list[Float], list[Float]]:
        prints = fingerprints(features)
        self.injects.append(InjectCall(tuple(positions.tolist()), tuple(prints.tolist())))
        rows = np.stack([positions.astype(np.float32), prints], axis=1)[None, None]
        return [rows] * len(self.kinds), [rows] * len(self.kinds)

    def draft(
        self,
        anchor: int,
        positions: Ints,
        caches: list[DraftCache],
        sampling: DraftSampling | None,
    ) -> Drafted:
        start, tokens = int(positions[0]), self.truth.tokens
        index = start - self.truth.first(self.ruler)
        fault = self._fault(anchor, index, start, caches)
        self.drafts.append(DraftCall(anchor, start, fault))
        wrong = next(i for i in range(20, 480) if i not in tokens)
        right = list(tokens[index + 1 : index + positions.size]) if fault is None else []
        return Drafted(right + [wrong] * (positions.size - 1 - len(right)))

    def zero_features(self, num_rows: int) -> list[Float]:
        return [np.zeros((num_rows, 1), np.float32) for _ in self.taps]

    def injected(self) -> list[tuple[int, float]]:
        """Position and features' print of all injected rows, in order."""
        calls = (zip(c.positions, c.fingerprints, strict=True) for c in self.injects)
        return [row for call in calls for row in call]

    def real_positions(self) -> list[int]:
        """Positions of all injected rows with features, in order."""
        return [p for p, f in self.injected() if f != 0]

    def zero_positions(self) -> list[int]:
        """Positions of all rows without features, in order."""
        return [p for p, f in self.injected() if f == 0]

    def _fault(self, anchor: int, index: int, start: int, caches: list[DraftCache]) -> str | None:
        tokens = self.truth.tokens
        if not 0 <= index < len(tokens) or tokens[index] != anchor:
            return f"the block starts at {start}, output token {index} of {len(tokens)}"
        expected = self._expected(index)
        for kind, cache in zip(self.kinds, caches, strict=True):
            lowest = -1 if kind.window is None else start - kind.window
            due = {p: f for p, f in expected.items() if p > lowest}
            held = {p: f for p, f in _real_rows(cache).items() if p > lowest}
            if due.keys() != held.keys():
                return f"rows differ at {sorted(due.keys() ^ held.keys())[:8]} for {kind}"
            if not np.allclose(list(due.values()), [held[p] for p in due], rtol=1e-4):
                return f"a row holds another row's features for {kind}"
        return None

    def _expected(self, index: int) -> dict[int, float]:
        """{position on the ruler: fingerprint} of all rows a drafter should know by now."""
        rows = enumerate(self.truth.rows[: self.truth.num_prompt_rows + index])
        if self.ruler == "index":
            return {i: r.fingerprint for i, r in rows if i >= self.seen_from}
        return {r.position: r.fingerprint for i, r in rows if i >= self.seen_from and not r.skipped}


def _real_rows(cache: DraftCache) -> dict[int, float]:
    cache.check()
    rows = {}
    for slot in np.flatnonzero((cache.positions != FREE) & cache.valid):
        position, fingerprint = cache.keys[0][0, 0, slot]
        assert position == cache.positions[slot], "a slot holds another position's row"
        if fingerprint != 0:
            rows[int(position)] = float(fingerprint)
    return rows


@dataclass(frozen=True)
class OracleRun:
    """An answer drafted by the oracle, and all the oracle saw."""

    result: Result
    oracle: OracleNetworks

    @property
    def expected_starts(self) -> list[int]:
        """Where every block must start: at the anchor's position, round after round."""
        first = self.oracle.truth.first(self.oracle.ruler)
        return list(accumulate(self.result.draft.tokens_per_round[:-1], initial=first))


def run_oracle(
    model: Model,
    parts: Sequence[Part],
    truth: Truth,
    policy: HolePolicy,
    *,
    kinds: tuple[DraftLayer, ...] = (FULL,),
    drafter: type[DFlash] = DFlash,
    chunk: int = 512,
) -> OracleRun:
    """Answer in a fresh conversation."""
    oracle = OracleNetworks(truth, policy.ruler, kinds)
    conversation = model.conversation(drafter("oracle", oracle, HoleSettings(policy)))
    options = make_options(max_new_tokens=len(truth.tokens), chunk=chunk)
    result = conversation.generate_plan(lay_out(model, parts), options).result()
    assert result.token_ids == truth.tokens and result.draft.state == "on", result.draft.state
    return OracleRun(result, oracle)


def acceptance(result: Result) -> float:
    """Share of drafts the target took; -1 where nothing was drafted."""
    return result.draft.accepted / result.draft.drafted if result.draft.drafted else -1.0
