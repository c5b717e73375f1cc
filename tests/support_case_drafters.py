"""The drafters of the exactness suite's cases, by name, and the check that each took part.

Right ones get their knowledge from the plain run; real ones their networks from the bundle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from support_cases import NETWORKS, Case
from support_drafters import Adversary, FirstK, GuidedNetworks, Known, Oracle, Raising, Random

from dflash_onnx.runtime import Model, Result
from dflash_onnx.runtime.drafters.base import Drafter, NoDraft, Proposal, Request
from dflash_onnx.runtime.drafters.dflash import DFlash
from dflash_onnx.runtime.drafters.lookup import Lookup
from dflash_onnx.runtime.drafters.mtp import Mtp
from dflash_onnx.runtime.drafters.policy import HoleSettings, parse_policy


class GuidedMtp(Mtp):
    """The real MTP head, whose first k drafts are replaced by right ones; k goes round."""

    def __init__(
        self, model: Model, max_drafts: int, known: Known | None, rights: Sequence[int]
    ) -> None:
        assert model.mtp is not None
        super().__init__(model.mtp, model.context_limit, max_drafts)
        self._known = known
        self._rights: Iterator[int] = cycle(rights)

    def propose(self, request: Request) -> Proposal:
        """Draft for real, then put the right ids in front, if it was asked at the right place."""
        drafts, count = super().propose(request).token_ids, next(self._rights)
        if self._known is None or not self._known.fits(request):
            return Proposal(drafts, request.position)
        right = list(self._known.ids[request.output_index :][:count])[: len(drafts)]
        return Proposal(right + drafts[len(right) :], request.position)


def make_drafter(model: Model, case: Case, known: Known) -> Drafter:
    """The drafter that a case names; `known` is the plain answer."""
    kind, _, detail = case.drafter.partition(" ")
    drafts = case.block - 1
    makers: dict[str, Any] = {
        "none": NoDraft,
        "oracle": lambda: Oracle(known, drafts),
        "adversary": lambda: Adversary(known, drafts),
        "first-k": lambda: FirstK(known, drafts, range(drafts + 1)),
        "random": lambda: Random(drafts, model.manifest.target.text.vocab_size),
        "lookup": lambda: Lookup(drafts),
        "raising": lambda: Raising(known, drafts, detail, 0 if detail == "crop" else 2, (1,)),
        "mtp": lambda: GuidedMtp(model, drafts, known if detail else None, range(case.block)),
    }
    return makers[kind]() if kind in makers else _dflash(model, case, known)


def _dflash(model: Model, case: Case, known: Known) -> DFlash:
    kind, _, draft = case.drafter.partition(" ")
    networks: Any = model.networks[NETWORKS[draft]]
    policy = parse_policy(case.policy)
    if kind == "guided":
        start = known.position if policy.ruler == "text" else known.row
        networks = GuidedNetworks(networks, known, start, range(case.block))
    return DFlash(case.drafter, networks, HoleSettings(policy), case.block - 1)


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
    if (kind in ("first-k", "guided") and case.policy != "off") or case.drafter == "mtp guided":
        assert 0 < stats.accepted < stats.drafted
    if isinstance(drafter, (DFlash, Mtp)):
        assert case.policy == "off" or stats.drafted > 0
    if isinstance(drafter, DFlash):
        for draft_cache in drafter.caches:
            draft_cache.check()
