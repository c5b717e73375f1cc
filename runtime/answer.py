"""The loop: prefill, then rounds of propose, verify, accept, commit, emit.

One loop for streaming and one-shot, greedy and sampled, speculative and plain. Knows rows and
tokens; prompts, images and templates are behind the plan it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from ..models.positions import (
    Ints,
    Position,
    Row,
    Span,
    advanced,
    advancing_positions,
    next_position,
    text_ruler,
)
from .drafters.base import DraftSampling, Observed, Proposal, Request
from .options import GenerateOptions
from .output_text import OutputText
from .plan import Batch, PromptPlan, common_rows
from .prompt_rows import PromptRows
from .results import Delta, FinishReason, Round, Timings
from .round_log import RoundLog
from .sampling import Distribution, HeadRows, History, Sampler
from .target import Float, TargetRows
from .target_cache import MAX_SNAPSHOTS
from .verify import Verdict, accept_equal, accept_rejection, accept_synthetic

if TYPE_CHECKING:
    from .conversation import Conversation


class Answer:
    """One answer being generated in a conversation."""

    def __init__(
        self,
        conversation: Conversation,
        plan: PromptPlan,
        options: GenerateOptions,
        on_round: Callable[[Round], None],
    ) -> None:
        model = conversation.model
        self._conversation = conversation
        self._plan = plan
        self._options = options
        self._log = RoundLog(on_round)
        self._target = model.target
        self._cache = conversation.cache
        self._budget = conversation.output_budget(plan, options.max_new_tokens)
        vocab_size = model.manifest.target.text.vocab_size
        self._sampler = Sampler(options.sampling, History.start(plan.text_ids, vocab_size))
        self._stop_ids = frozenset(model.manifest.stop_ids)
        self._with_logits = options.sampling.needs_logits(model.manifest.num_top)
        self._tokens = plan.token_ids.tolist()
        self._pos_next = Position(0)
        self.draft = conversation.draft
        ends = frozenset() if options.ignore_stop else self._stop_ids
        self.text = OutputText(model.tokenizer, ends, options.stop)
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.timings = Timings()
        self._prompt_rows = PromptRows(model.target, self.timings, conversation.encoded)

    @property
    def rounds(self) -> list[Round]:
        """The rounds so far."""
        return self._log.rounds

    def deltas(self) -> Iterator[Delta]:
        """Generate; yields whenever tokens were emitted."""
        # Another answer, or another drafter, may have come in between.
        self.draft = self._conversation.draft
        self._log.start(self.draft.counts)
        if self._budget == 0:
            self.finish_reason = "length"
            return
        started = perf_counter()
        kept = self._keep(self._prefill().tokens)
        self.timings.prefill_seconds += perf_counter() - started
        yield self._emit(kept)
        while self.finish_reason is None:
            started = perf_counter()
            kept = self._round()
            self.timings.decode_seconds += perf_counter() - started
            yield self._emit(kept)

    def _prefill(self) -> Verdict:
        """Bring the cache up to the whole prompt and sample the first token."""
        start = self._reuse_prefix()
        self._pos_next = next_position(self._plan.mrope_positions)
        self.timings.reused_rows = start
        self.timings.prefilled_rows = self._plan.num_rows - start
        self._cache.prepare(self.timings.prefilled_rows, self._budget)
        asked = self._options.chunk or self._target.prefill_rows
        chunk = min(asked, self._target.max_rows)
        ends = self._plan.message_ends(self._stop_ids, start)[-MAX_SNAPSHOTS:]
        for batch in self._plan.batches(start, chunk, ends if self._cache.state else ()):
            rows = self._run_batch(batch)
            if self._cache.num_rows in ends:
                self._cache.snapshot()
        last = self._target.head.rows(rows.hidden[-1:], np.arange(1), self._with_logits)
        return self._accept(last, [])

    def _reuse_prefix(self) -> Row:
        """Crop target and draft to the rows this prompt shares with what is cached."""
        conversation, plan = self._conversation, self._plan
        keys = plan.keys()
        start = self._cache.reachable(common_rows(conversation.row_keys, keys))
        # Keys first: an interrupt in between must never leave keys of rows that are gone.
        del conversation.row_keys[start:]
        self._cache.crop(start)
        position = Position(int(text_ruler(plan.mrope_positions)[start]))
        self.draft.crop(start, position)
        self._keys = keys
        return start

    def _run_batch(self, batch: Batch) -> TargetRows:
        embeds, deepstack = self._prompt_rows.of(batch)
        output = self._target.forward(
            self._cache, embeds, batch.mrope_positions, deepstack, self.draft.taps, certain=True
        )
        keys = self._keys[batch.first_row : batch.first_row + batch.token_ids.size]
        self._commit(batch.token_ids, batch.mrope_positions, embeds, output, batch.span, keys)
        return output

    def _commit(
        self,
        token_ids: Ints,
        positions: Ints,
        embeds: Float,
        output: TargetRows,
        span: Span,
        keys: Sequence,
    ) -> None:
        """Keep the first of the rows the target has just computed, and show them to the drafter."""
        first, count = self._cache.num_rows, token_ids.size
        self._cache.commit(count)
        self._conversation.row_keys += keys
        taps = {i: tap[:count] for i, tap in output.taps.items()}
        rows = (embeds[:count], output.hidden[:count])
        self.draft.observe(Observed(first, token_ids, positions, taps, span, *rows))

    def _round(self) -> list[int]:
        """Propose, verify, accept, keep, commit; returns the tokens to emit."""
        first_row, anchor = self._cache.num_rows, self._tokens[-1]
        drafted_before, verified_before = self.timings.draft_seconds, self.timings.verify_seconds
        proposal = self._propose(anchor)
        block = np.array([anchor, *proposal.token_ids])
        positions = advancing_positions(self._pos_next, block.size)
        embeds = self._target.embed(block)
        output, verdict = self._verify(embeds, positions, proposal)
        kept = self._keep(verdict.tokens)
        produced = len(kept)
        # The newest kept token becomes the anchor; it has no row yet.
        committed, positions = block[:produced], positions[:, :produced]
        span = Span(first_row, produced, "text", False)
        self._commit(committed, positions, embeds, output, span, committed.tolist())
        self._pos_next = advanced(self._pos_next, produced)
        counts = self.draft.counts
        self._log.add(first_row, anchor, proposal, verdict.accepted, produced, counts)
        seconds = self.timings.since(drafted_before, verified_before)
        self.draft.length.record(len(proposal.token_ids), verdict.accepted, *seconds)
        return kept

    def _propose(self, anchor: int) -> Proposal:
        started, most = perf_counter(), self._num_drafts()
        if most < 1:
            return Proposal([])
        request = Request(
            anchor=anchor,
            max_drafts=most,
            row=self._cache.num_rows,
            position=self._pos_next,
            output_index=len(self.token_ids),
            tokens=self._tokens,
            sampling=self._draft_sampling(),
        )
        proposal = self.draft.propose(request)
        self.timings.draft_seconds += perf_counter() - started
        return proposal

    def _num_drafts(self) -> int:
        """Drafts to ask for: what budget, graph and drafter allow, and what pays."""
        room = min(self._budget - len(self.token_ids), self._target.max_rows) - 1
        most = min(room, self.draft.max_drafts)
        # Under the rejection rule text depends on lengths, and a seed must give one text.
        return most if self._draft_sampling() else self.draft.length.choose(most)

    def _draft_sampling(self) -> DraftSampling | None:
        """Drawn drafts pay under the rejection rule only; equality is met best by the likeliest."""
        sampling = self._options.sampling
        if self._options.accept == "equal" or sampling.greedy:
            return None
        return DraftSampling(sampling.temperature, sampling.rng_seed, len(self.token_ids))

    def _verify(
        self, embeds: Float, positions: Ints, proposal: Proposal
    ) -> tuple[TargetRows, Verdict]:
        """One target call on the anchor and its drafts; without drafts its row is certain."""
        started, drafts = perf_counter(), proposal.token_ids
        output = self._target.forward(
            self._cache, embeds, positions, None, self.draft.taps, certain=not drafts
        )
        self.timings.target_calls += 1
        rows = self._target.head.rows(output.hidden, np.arange(len(embeds)), self._with_logits)
        verdict = self._accept(rows, drafts, proposal.proposals)
        self.timings.verify_seconds += perf_counter() - started
        return output, verdict

    def _accept(
        self, rows: HeadRows, drafts: list[int], proposals: list[Distribution] | None = None
    ) -> Verdict:
        first, chance = len(self.token_ids), self._options.synthetic_acceptance
        if chance is not None:
            return accept_synthetic(self._sampler, rows, drafts, first, chance)
        if self._options.accept == "equal":
            return accept_equal(self._sampler, rows, drafts, first)
        return accept_rejection(self._sampler, rows, drafts, first, proposals)

    def _keep(self, tokens: Sequence[int]) -> list[int]:
        """Take tokens until one ends the answer; ids, text, counts and history stop there."""
        kept = []
        for token in tokens:
            kept.append(token)
            self.token_ids.append(token)
            self._tokens.append(token)
            self._sampler.history.push(token)
            if self.text.push(token):
                self.finish_reason = "stop"
            elif len(self.token_ids) == self._budget:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        return kept

    def _emit(self, kept: list[int]) -> Delta:
        text = self.text.take_delta() if self.finish_reason is None else self.text.finish()
        return Delta(text, tuple(kept))
