"""A conversation: the one object that owns a chat's mutable state.

Target cache, drafter, row identities and nothing else; several conversations share one model and
may run in different threads. One conversation generates one answer at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..models.errors import ContextError, PromptError
from .answer import Answer
from .draft_factory import DraftChoice
from .drafters.dflash import DFlash
from .drafting import DraftRunner
from .images import ImageSource
from .options import GenerateOptions, make_options
from .plan import PromptPlan, RowKey
from .prompt_rows import EncodedMedia
from .results import Delta, DraftStats, Memory, Result, Round, process_bytes

if TYPE_CHECKING:
    from .chat import Messages
    from .model import Model


class Generation:
    """An answer in progress: iterate for deltas, or call `result()` for the whole at once."""

    def __init__(self, conversation: Conversation, plan: PromptPlan, options: GenerateOptions):
        self._conversation = conversation
        self._observers: list[Callable[[Round], None]] = []
        # Not a method of this object: caches would outlive it until the garbage collector comes.
        self._answer = Answer(conversation, plan, options, partial(_notify, self._observers))
        self._prompt_tokens = plan.num_rows
        self._draft_stats: DraftStats | None = None
        self._deltas = self._run()

    def on_round(self, observer: Callable[[Round], None]) -> Generation:
        """Call `observer` with every round as it ends."""
        self._observers.append(observer)
        return self

    def __iter__(self) -> Generator[Delta, None, None]:
        return self._deltas

    def close(self) -> None:
        """Stop generating; the conversation stays usable with the rows committed so far."""
        self._deltas.close()

    def result(self) -> Result:
        """The finished answer, generating whatever is still to come."""
        for _ in self._deltas:
            pass
        if self._answer.finish_reason is None:
            raise PromptError("the generation was closed before it finished; it has no result.")
        return self._result()

    @property
    def rounds(self) -> list[Round]:
        """The rounds so far."""
        return self._answer.rounds

    def _run(self) -> Generator[Delta, None, None]:
        with self._conversation.busy():
            before = _counts(self._conversation.draft)
            try:
                yield from self._answer.deltas()
            finally:
                self._draft_stats = self._count_since(before)

    def _result(self) -> Result:
        answer = self._answer
        timings = answer.timings
        decoded = sum(r.produced for r in answer.rounds)
        timings.tokens_per_second = decoded / timings.decode_seconds if decoded else 0.0
        assert answer.finish_reason is not None and self._draft_stats is not None
        return Result(
            text=answer.text.text,
            token_ids=tuple(answer.token_ids),
            finish_reason=answer.finish_reason,
            prompt_tokens=self._prompt_tokens,
            output_tokens=len(answer.token_ids),
            draft=self._draft_stats,
            timings=timings,
            memory=self._conversation.memory(),
            provider=self._conversation.model.provider_info(),
        )

    def _count_since(self, before: tuple[int, int, int]) -> DraftStats:
        draft, rounds = self._answer.draft, self._answer.rounds
        holes, seeded, skipped = before
        drafter = draft.drafter
        produced = tuple(r.produced for r in rounds)
        return DraftStats(
            name=draft.name,
            state=draft.state,
            policy=drafter.policy.value if isinstance(drafter, DFlash) else None,
            length=draft.length.describe(),
            rounds=len(rounds),
            drafted=sum(len(r.drafted) for r in rounds),
            accepted=sum(r.accepted for r in rounds),
            mean_accepted_length=sum(produced) / len(produced) if produced else 0.0,
            tokens_per_round=produced,
            holes=tuple((h.start, h.stop) for h in draft.counts.holes[holes:]),
            seeded_rows=draft.counts.seeded_rows - seeded,
            skipped_spans=draft.counts.skipped_spans - skipped,
        )


class Conversation:
    """One chat on a loaded model."""

    def __init__(self, model: Model, choice: DraftChoice) -> None:
        self.model = model
        self.cache = model.target.new_cache(model.context_limit)
        self.row_keys: list[RowKey] = []
        self.encoded = EncodedMedia()
        self.choice = choice
        self.draft: DraftRunner = model.drafts.runner(choice)
        self._lock = threading.Lock()

    def use_draft(self, **choice: Any) -> None:
        """Draft differently from now on, with the fields of `DraftChoice`.

        Naming a `draft` starts from its own defaults. A change of drafter or of ruler drops what
        the drafter has seen, which is a hole; other changes keep it.
        """
        made = replace(DraftChoice() if "draft" in choice else self.choice, **choice)
        with self.busy():
            self.draft = self.model.drafts.switched(self.draft, made)
            self.choice = made

    def generate(
        self,
        messages: Messages,
        images: Sequence[ImageSource] = (),
        *,
        template_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Generation:
        """Answer `messages`; rows shared with what this conversation has seen are reused.

        Options are those of `make_options`. Raises `PromptError`, `ImageError`, `ContextError`.
        """
        made = make_options(**options)
        return self.generate_plan(self.model.plan(messages, images, template_options), made)

    def generate_plan(self, plan: PromptPlan, options: GenerateOptions) -> Generation:
        """Answer a prompt plan, for callers that lay out rows themselves."""
        return Generation(self, plan, options)

    def output_budget(self, plan: PromptPlan, max_new_tokens: int) -> int:
        """Tokens that may be emitted: the asked number, or what the context leaves."""
        left = self.cache.limit - plan.num_rows
        if left < 1:
            images = plan.num_image_rows
            parts = f" ({plan.num_rows - images} text, {images} image)" if images else ""
            advice = " or lower --max-pixels" if images else ""
            raise ContextError(
                f"the prompt takes {plan.num_rows} rows{parts} and {max_new_tokens} are asked for "
                f"the answer, but the context limit is {self.cache.limit}; shorten the "
                f"prompt{advice}."
            )
        return min(max_new_tokens, left)

    def memory(self) -> Memory:
        """What the target's and the drafter's caches hold."""
        cache = self.cache
        draft_bytes = self.draft.counts.cache_bytes
        return Memory(
            key_value_bytes=cache.num_bytes,
            state_bytes=cache.state_bytes,
            snapshot_bytes=cache.snapshot_bytes,
            draft_bytes=draft_bytes,
            image_bytes=self.encoded.num_bytes,
            process_bytes=process_bytes(),
        )

    def busy(self) -> _Busy:
        """Hold the conversation for one answer; `PromptError` when another is in progress."""
        return _Busy(self._lock)


class _Busy:
    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise PromptError(
                "this conversation is already generating an answer; finish or close it first, "
                "or use another conversation of the same model."
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _notify(observers: Sequence[Callable[[Round], None]], record: Round) -> None:
    for observer in observers:
        observer(record)


def _counts(draft: DraftRunner) -> tuple[int, int, int]:
    return len(draft.counts.holes), draft.counts.seeded_rows, draft.counts.skipped_spans
