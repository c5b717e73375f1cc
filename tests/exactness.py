"""The product's promise as a space of cases: speculative output equals the plain run, bit for bit.

    python tests/exactness.py --full [--processes N] [--limit N]

runs every case; `test_exactness.py` runs a covering array of them. A case equals the plain run
when ids, text, finish reason and the target's cache rows are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
import tempfile
from dataclasses import dataclass, fields, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

from support_cases import DRAFTS, NETWORKS, PLAIN, SAMPLING, TARGET, Case, all_cases, covering_array
from support_drafters import Adversary, FirstK, GuidedNetworks, Known, Oracle, Raising, Random
from support_layouts import Prompt, make_prompt

from dflash_onnx.runtime import Model, Result
from dflash_onnx.runtime.conversation import Conversation
from dflash_onnx.runtime.drafters.base import Drafter, NoDraft
from dflash_onnx.runtime.drafters.dflash import DFlash
from dflash_onnx.runtime.drafters.lookup import Lookup
from dflash_onnx.runtime.drafters.policy import HoleSettings, parse_policy
from dflash_onnx.runtime.options import make_options

NUM_TOKENS = 20


@dataclass(frozen=True)
class Outcome:
    """What must not depend on how one drafts; `cache` digests the target's rows."""

    ids: tuple[int, ...]
    text: str
    finish_reason: str
    cache: str


class Suite:
    """Runs cases on one model that holds the three drafters; plain runs are made once."""

    def __init__(self, bundle: Path) -> None:
        self.model = Model(bundle, threads=1)
        self.prompt = cache(lambda media: make_prompt(self.model, media))
        self._plain: dict[tuple[str, str], Outcome] = {}

    def plain(self, case: Case) -> Outcome:
        """The run without a drafter, with the prompt in one piece and no earlier turn."""
        key = case.media, case.sampling
        if key not in self._plain:
            prompt = replace(self.prompt(case.media), before=None)
            plain = replace(PLAIN, media=case.media, sampling=case.sampling)
            self._plain[key] = self._run(plain, prompt, NoDraft())[0]
        return self._plain[key]

    def run_case(self, case: Case) -> Outcome:
        """Run one case; raises AssertionError when its drafter did not do what it is there for."""
        prompt, ids = self.prompt(case.media), self.plain(case).ids
        position = int(prompt.plan.mrope_positions.max()) + 1
        known = Known(ids, prompt.plan.num_rows, position)
        drafter = self._drafter(case, known)
        outcome, result = self._run(case, prompt, drafter)
        check_drafter(case, drafter, result)
        return outcome

    def difference(self, case: Case) -> str:
        """How a case differs from the plain run; empty when it does not."""
        try:
            got, want = self.run_case(case), self.plain(case)
        except Exception as error:
            return f"{case}: {type(error).__name__}: {error}"
        if got == want:
            return ""
        names = [f.name for f in fields(Outcome) if getattr(got, f.name) != getattr(want, f.name)]
        return f"{case}: {', '.join(names)} differ: {got.ids} instead of {want.ids}"

    def _run(self, case: Case, prompt: Prompt, drafter: Drafter) -> tuple[Outcome, Result]:
        options = make_options(
            max_new_tokens=NUM_TOKENS,
            chunk=case.chunk,
            accept=case.accept,
            **SAMPLING[case.sampling],
        )
        conversation = self.model.conversation("none" if prompt.before else drafter)
        if prompt.before is not None:
            before = make_options(max_new_tokens=8)
            conversation.generate_plan(prompt.before, before).result()
            conversation.use_draft(draft=drafter)
        result = conversation.generate_plan(prompt.plan, options).result()
        assert bool(result.timings.reused_rows) == (prompt.before is not None)
        digest = cache_digest(conversation)
        return Outcome(result.token_ids, result.text, result.finish_reason, digest), result

    def _drafter(self, case: Case, known: Known) -> Drafter:
        kind, _, detail = case.drafter.partition(" ")
        drafts = case.block - 1
        makers: dict[str, Any] = {
            "none": NoDraft,
            "oracle": lambda: Oracle(known, drafts),
            "adversary": lambda: Adversary(known, drafts),
            "first-k": lambda: FirstK(known, drafts, range(drafts + 1)),
            "random": lambda: Random(drafts, self.model.manifest.target.text.vocab_size),
            "lookup": lambda: Lookup(drafts),
            "raising": lambda: Raising(known, drafts, detail, 0 if detail == "crop" else 2, (1,)),
        }
        return makers[kind]() if kind in makers else self._dflash(case, kind, detail, known)

    def _dflash(self, case: Case, kind: str, draft: str, known: Known) -> DFlash:
        networks: Any = self.model.networks[NETWORKS[draft]]
        policy = parse_policy(case.policy)
        if kind == "guided":
            start = known.position if policy.ruler == "text" else known.row
            networks = GuidedNetworks(networks, known, start, range(case.block))
        return DFlash(case.drafter, networks, HoleSettings(policy), case.block - 1)


def cache_digest(conversation: Conversation) -> str:
    """Digest of the target's committed rows, their number and their identities."""
    rows, digest = conversation.cache.num_rows, hashlib.sha256()
    for key, value in conversation.cache.layers:
        digest.update(key[:, :, :rows].tobytes() + value[:, :, :rows].tobytes())
    digest.update(repr((rows, conversation.row_keys)).encode())
    return digest.hexdigest()


def check_drafter(case: Case, drafter: Drafter, result: Result) -> None:
    """The drafter took part as meant: a silent failure would make equality worth nothing."""
    stats, kind = result.draft, case.drafter.split()[0]
    if kind == "raising":
        assert "on purpose" in stats.state, stats.state
        return
    assert stats.state == "on", stats.state
    if kind == "oracle":
        assert set(stats.tokens_per_round[:-1]) <= {case.block}, stats.tokens_per_round
    if kind == "adversary":
        assert stats.accepted == 0 < stats.drafted
    if kind in ("first-k", "guided") and case.policy != "off":
        assert 0 < stats.accepted < stats.drafted
    if isinstance(drafter, DFlash):
        assert case.policy == "off" or stats.drafted > 0
        for draft_cache in drafter.caches:
            draft_cache.check()


_suite: Suite


def _open_suite(bundle: Path) -> None:
    global _suite
    logging.disable()  # drafters that fail on purpose
    _suite = Suite(bundle)


def _difference(case: Case) -> str:
    return _suite.difference(case)


def make_bundle(folder: Path) -> Path:
    """Write the suite's checkpoints and their bundle."""
    from tiny_checkpoint import make_draft, make_target

    from dflash_onnx.export.bundle import ExportOptions, export_bundle

    make_target(folder / "target", **TARGET)
    drafts = tuple(folder / name for name in DRAFTS)
    for draft in drafts:
        make_draft(draft, folder / "target", **DRAFTS[draft.name])
    return export_bundle(ExportOptions(folder / "target", folder / "bundle", drafts))


def run_all(cases: list[Case], processes: int) -> int:
    """Run the cases with a progress line; returns the number that failed."""
    started, failed = perf_counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        bundle = make_bundle(Path(folder))
        # ONNX Runtime's threads do not survive a fork.
        with get_context("spawn").Pool(processes, _open_suite, (bundle,)) as pool:
            for i, difference in enumerate(pool.imap(_difference, cases, 32), 1):
                if difference:
                    failed += 1
                    print(difference, flush=True)
                if i % 100 == 0 or i == len(cases):
                    seconds = perf_counter() - started
                    line = f"\r{i}/{len(cases)} cases, {failed} failed, {seconds:.0f} s"
                    print(line, end="", file=sys.stderr, flush=True)
    print(f"\n{len(cases) - failed} passed, {failed} failed")
    return failed


def main() -> None:
    """Run the covering array, or the whole product with --full."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="every case, not a covering array")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--limit", type=int, help="the first N cases only")
    args = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    cases = list(all_cases() if args.full else covering_array())[: args.limit]
    sys.exit(1 if run_all(cases, args.processes) else 0)


if __name__ == "__main__":
    main()
