"""The product's promise as a space of cases: speculative output equals the plain run, bit for bit.

    python tests/exactness.py --full [--target hybrid] [--processes N] [--limit N]

runs every case; `test_exactness.py` runs a covering array of them. A case equals the plain run
when ids, text, finish reason, the target's cache rows and its recurrent state are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import numpy as np
from support_case_drafters import check_drafter, make_drafter
from support_cases import DRAFTS, PLAIN, SAMPLING, TARGETS, Case, all_cases, covering_array
from support_drafters import FirstK, Known
from support_layouts import NUM_KEPT, Before, Prompt, make_prompt

from dflash_onnx.models.positions import Position, advancing_positions
from dflash_onnx.runtime import Model, Result
from dflash_onnx.runtime.conversation import Conversation
from dflash_onnx.runtime.drafters.base import Drafter, NoDraft
from dflash_onnx.runtime.drafters.dflash import DFlash
from dflash_onnx.runtime.drafters.lookup import Lookup
from dflash_onnx.runtime.drafters.mtp import Mtp
from dflash_onnx.runtime.options import make_options
from dflash_onnx.runtime.recurrent_state import StateCopy

NUM_TOKENS = 20


@dataclass(frozen=True)
class Outcome:
    """What must not depend on how one drafts; `cache` digests rows and state."""

    ids: tuple[int, ...]
    text: str
    finish_reason: str
    cache: str


class Suite:
    """Runs cases on one model that holds all drafters; plain runs are made once."""

    def __init__(self, bundle: Path) -> None:
        self.model = Model(bundle, threads=1)
        self.prompt = cache(lambda media: make_prompt(self.model, media))
        self._plain: dict[tuple[str, str], Outcome] = {}

    def plain(self, case: Case) -> Outcome:
        """The run without a drafter, with the prompt in one piece and no earlier turn."""
        key = case.media, case.sampling
        if key not in self._plain:
            prompt = replace(self.prompt(case.media), before=None)
            plain = replace(PLAIN, target=case.target, media=case.media, sampling=case.sampling)
            self._plain[key] = self._run(plain, prompt, NoDraft())[0]
        return self._plain[key]

    def run_case(self, case: Case) -> Outcome:
        """Run one case; raises AssertionError when its drafter did not do what it is there for."""
        prompt, ids = self.prompt(case.media), self.plain(case).ids
        position = int(prompt.plan.mrope_positions.max()) + 1
        known = Known(ids, prompt.plan.num_rows, position)
        drafter = make_drafter(self.model, case, known)
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
        conversation = self.model.conversation(drafter)
        if prompt.before is not None:
            have_turn(conversation, prompt.before)
        held = conversation.cache.num_rows
        result = conversation.generate_plan(prompt.plan, options).result()
        reused = result.timings.reused_rows
        assert bool(reused) == (prompt.before is not None)
        if prompt.before is not None:
            assert (reused == held) == prompt.before.continues, (reused, held)
        digest = cache_digest(conversation)
        return Outcome(result.token_ids, result.text, result.finish_reason, digest), result


def have_turn(conversation: Conversation, before: Before) -> None:
    """Break off an answer whose last round had rejected drafts; only what can be told in advance
    goes on with another drafter."""
    drafter = conversation.choice.draft
    own = isinstance(drafter, (DFlash, Mtp, Lookup)) and not before.continues
    if not own:
        conversation.use_draft(draft=FirstK(before.known, 3, [1]))
    generation = conversation.generate_plan(before.plan, make_options(max_new_tokens=4 * NUM_KEPT))
    for _ in zip(range(1 + NUM_KEPT // 2), generation, strict=False):
        pass
    generation.close()
    if not own:
        conversation.use_draft(draft=drafter)


def cache_digest(conversation: Conversation) -> str:
    """Digest of the target's committed rows, their number and identities, and the state."""
    rows, digest = conversation.cache.num_rows, hashlib.sha256()
    for key, value in conversation.cache.layers:
        digest.update(key[:, :, :rows].tobytes() + value[:, :, :rows].tobytes())
    digest.update(repr((rows, conversation.row_keys)).encode())
    if conversation.cache.state is not None:
        state = settled_state(conversation)
        for array in (*state.states, *state.windows):
            digest.update(array.tobytes())
    return digest.hexdigest()


def settled_state(conversation: Conversation) -> StateCopy:
    """The recurrent state after the committed rows, whether or not some wait to be replayed.

    A call replays them; its own row is rejected, so the conversation can go on as if none was.
    """
    cache, target = conversation.cache, conversation.model.target
    state = cache.state
    assert state is not None and state.is_whole
    position = advancing_positions(Position(cache.num_rows), 1)
    target.forward(cache, target.embed(np.array([0])), position, None, (), certain=False)
    states, windows = (tuple(a.copy() for a in x) for x in (state._states, state._windows))
    state.restore(StateCopy(states, windows))
    return StateCopy(states, windows)


_suite: Callable[[str], Suite]


def _open_suites(folder: Path) -> None:
    global _suite
    logging.disable()  # drafters that fail on purpose
    _suite = cache(lambda target: Suite(folder / target / "bundle"))


def _difference(case: Case) -> str:
    return _suite(case.target).difference(case)


def make_bundle(folder: Path, target: str) -> None:
    """Write a target's checkpoints and their bundle."""
    from tiny_checkpoint import make_draft, make_target

    from dflash_onnx.export.bundle import ExportOptions, export_bundle

    make_target(folder / "target", **TARGETS[target])
    drafts = tuple(folder / name for name in DRAFTS)
    for draft in drafts:
        make_draft(draft, folder / "target", **DRAFTS[draft.name])
    export_bundle(ExportOptions(folder / "target", folder / "bundle", drafts))


def run_all(cases: list[Case], processes: int) -> int:
    """Run the cases with a progress line; returns the number that failed."""
    started, failed = perf_counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        for target in {case.target for case in cases}:
            make_bundle(Path(folder) / target, target)
        # ONNX Runtime's threads do not survive a fork.
        with get_context("spawn").Pool(processes, _open_suites, (Path(folder),)) as pool:
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
    parser.add_argument("--target", choices=TARGETS, help="one target's cases, not all")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--limit", type=int, help="the first N cases only")
    args = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    targets = [args.target] if args.target else list(TARGETS)
    space = all_cases if args.full else covering_array
    cases = [case for target in targets for case in space(target)][: args.limit]
    sys.exit(1 if run_all(cases, args.processes) else 0)


if __name__ == "__main__":
    main()
