"""From a caller's choice to a drafter: names, options, what the bundle has, what may be kept.

Knows every way to draft; runs none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from ..models.errors import PromptError
from ..models.manifest import Manifest
from .draft_length import AdaptiveLength, FixedLength
from .drafters.base import Drafter, NoDraft
from .drafters.dflash import DFlash
from .drafters.lookup import MAX_DRAFTS, Lookup
from .drafters.mtp import Mtp, MtpNetworks
from .drafters.networks import DFlashNetworks
from .drafters.policy import HoleSettings, default_policy, parse_policy
from .drafting import DraftRunner
from .sampling_params import check_whole


@dataclass(frozen=True)
class DraftChoice:
    """Which drafter to use and how; None stands for the bundle's own answer.

    `draft_tokens` are the drafts of every round at most, or "auto": as many as pay, by the times
    and the acceptance measured on the way.
    """

    draft: str | Drafter | None = None
    holes: str | None = None
    hole_rows: int | None = None
    draft_tokens: int | Literal["auto"] | None = None

    @property
    def most_tokens(self) -> int | None:
        """The fixed number, if there is one."""
        return None if self.draft_tokens == "auto" else self.draft_tokens


class DraftFactory:
    """Makes the drafters of one bundle."""

    def __init__(
        self,
        manifest: Manifest,
        networks: Mapping[str, DFlashNetworks],
        mtp: MtpNetworks | None,
        context_limit: int,
    ) -> None:
        self._manifest = manifest
        self._networks = networks
        self._mtp = mtp
        self._context_limit = context_limit

    def runner(self, choice: DraftChoice) -> DraftRunner:
        """A fresh drafter for one conversation; `PromptError` names what the bundle has."""
        vocab_size = self._manifest.target.text.vocab_size
        length = AdaptiveLength() if choice.draft_tokens == "auto" else FixedLength()
        return DraftRunner(self._drafter(choice), self._manifest.banned_ids, vocab_size, length)

    def switched(self, current: DraftRunner, choice: DraftChoice) -> DraftRunner:
        """The drafter to go on with: the current one when only settings on its ruler change."""
        fresh = self.runner(choice)
        old, new = current.drafter, fresh.drafter
        if not (current.is_on and isinstance(old, DFlash) and isinstance(new, DFlash)):
            return fresh
        if not old.take_settings(new):
            return fresh
        current.length = fresh.length
        return current

    def _drafter(self, choice: DraftChoice) -> Drafter:
        name = choice.draft
        if name is None:
            name = next(iter(self._manifest.draft_names), "none")
        if not isinstance(name, str):
            _refuse_options(name.name, choice, "holes", "hole_rows", "draft_tokens")
            _check_taps(name, self._manifest.tap_layers)
            return name
        if name in self._networks:
            return self._dflash(name, choice)
        if name not in ("none", "lookup", *self._manifest.draft_names):
            known = ", ".join(["none", "lookup", *self._manifest.draft_names])
            raise PromptError(f"the bundle has no drafter {name!r}; choose one of {known}.")
        _refuse_options(name, choice, "holes", "hole_rows")
        if self._mtp is not None and name == "mtp":
            return Mtp(self._mtp, self._context_limit, choice.most_tokens)
        if name == "lookup":
            return Lookup(_lookup_tokens(choice.most_tokens))
        _refuse_options(name, choice, "draft_tokens")
        return NoDraft()

    def _dflash(self, name: str, choice: DraftChoice) -> DFlash:
        networks = self._networks[name]
        # Here and not at the drafter's first step, whose errors only turn the drafter off.
        networks.open()
        trained = networks.spec.trained_on_media
        policy = default_policy(trained) if choice.holes is None else parse_policy(choice.holes)
        if choice.hole_rows is not None and not policy.uses_rows:
            raise PromptError(f"hole_rows has no meaning under the policy {policy.value!r}.")
        settings = HoleSettings(policy, choice.hole_rows)
        return DFlash(name, networks, settings, choice.most_tokens)


def _refuse_options(name: str, choice: DraftChoice, *options: str) -> None:
    given = {f.name: getattr(choice, f.name) for f in fields(choice)}
    given["draft_tokens"] = choice.most_tokens
    for option in options:
        if given[option] is not None:
            raise PromptError(f"{option}={given[option]!r} has no meaning for drafter {name!r}.")


def _check_taps(drafter: Drafter, tap_layers: tuple[int, ...]) -> None:
    if not set(drafter.taps) <= set(tap_layers):
        raise PromptError(
            f"drafter {drafter.name!r} reads target layers {list(drafter.taps)}, the bundle was "
            f"exported with {list(tap_layers)}; export it with a drafter that reads them."
        )


def _lookup_tokens(draft_tokens: int | None) -> int:
    tokens = MAX_DRAFTS if draft_tokens is None else draft_tokens
    check_whole("draft_tokens", tokens, 0)
    return tokens
