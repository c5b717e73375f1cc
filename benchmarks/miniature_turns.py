"""Held-out questions to the miniature, asked of several engines and drafters in turn.

Knows questions, turns and tables; the engines are children (`serving`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import Child, bundle_digest, our_command

Runs = list[dict[str, Any]]
CLOCKS = ("second", "second_best", "cpu_second")


@dataclass(frozen=True)
class Question:
    """A prompt, and the files of its pages."""

    text: str
    images: tuple[str, ...]

    @property
    def group(self) -> str:
        """Whether the answer comes after an image."""
        return "image" if self.images else "text"


@dataclass(frozen=True)
class Setting:
    """An engine, what drafts in it, and how many tokens a round."""

    engine: str
    draft: str = "none"
    draft_tokens: int | str | None = None

    def __str__(self) -> str:
        auto = " auto" if self.draft_tokens == "auto" else ""
        return f"{self.engine} {'plain' if self.draft == 'none' else self.draft}{auto}"


def settings(peers: Iterable[str], drafts: int) -> list[Setting]:
    """Everything that takes turns: our drafters, also with an adaptive length, and the peers'."""
    found = [Setting("ours")]
    for draft in ("dflash", "dflash2"):
        found += [Setting("ours", draft, drafts), Setting("ours", draft, "auto")]
    for peer in peers:
        found += [Setting(peer), Setting(peer, "dflash", drafts)]
    return found


def make_questions(seed: int, count: int, folder: Path) -> list[Question]:
    """What `dflash-onnx bench --holes` asks with the same seed; pages go to `folder`."""
    from dflash_onnx.models.miniature.data import sample

    questions = []
    for index in range(count):
        made = sample(seed, index)
        files = [folder / f"{index}-{page}.npy" for page in range(len(made.images))]
        for file, image in zip(files, made.images, strict=True):
            np.save(file, image)
        questions.append(Question(made.prompt, tuple(map(str, files))))
    return questions


def measure(
    options: argparse.Namespace,
    questions: list[Question],
    peers: dict[str, list[str | Path]],
    threads: int,
) -> dict[str, Any]:
    """Ask every question in every setting, `repeats` times in each of `restarts` processes.

    `peers` names the other engines' commands.
    """
    commands = {"ours": our_command(options.bundle, threads)} | peers
    chosen = settings(peers, options.draft_tokens)
    runs: dict[Setting, list[Runs]] = {setting: [[] for _ in questions] for setting in chosen}
    versions: dict[str, dict[str, str]] = {}
    for _ in range(options.restarts):
        children = {name: Child(line, threads) for name, line in commands.items()}
        for turn in range(options.repeats + 1):
            _take_turn(children, questions, options.max_new_tokens, turn, runs)
        for name, child in children.items():
            versions[name] = child.loaded["versions"]
            child.close()
    names = ("repeats", "restarts", "prompts", "draft_tokens", "seed")
    facts = {name: getattr(options, name) for name in names}
    facts |= {"threads": threads, "versions": versions}
    return facts | {"bundle_digest": bundle_digest(options.bundle)} | _tables(runs, questions)


def _take_turn(
    children: dict[str, Child],
    questions: list[Question],
    new_tokens: int,
    turn: int,
    runs: dict[Setting, list[Runs]],
) -> None:
    """Ask everything once; the order of settings turns around, and turn 0 is a warm-up."""
    for index, question in enumerate(questions):
        for setting in list(runs)[:: -1 if (turn + index) % 2 else 1]:
            run = children[setting.engine].ask(_request(question, setting, new_tokens))
            if turn:
                runs[setting][index].append(run)


def _request(question: Question, setting: Setting, new_tokens: int) -> dict[str, Any]:
    asked = {"text": question.text, "images": question.images, "new_tokens": new_tokens}
    return asked | {"draft": setting.draft, "draft_tokens": setting.draft_tokens}


def _tables(runs: dict[Setting, list[Runs]], questions: list[Question]) -> dict[str, Any]:
    """Figures of every setting by group of questions, and how many answers are equal."""
    _check_prompts(runs)
    plain = runs[Setting("ours")]
    found: dict[str, Any] = {"figures": {}, "equal": {}}
    for setting, by_question in runs.items():
        groups: dict[str, list[Runs]] = {}
        for of_one, question in zip(by_question, questions, strict=True):
            groups.setdefault(question.group, []).append(of_one)
        found["figures"][str(setting)] = {name: summary(of) for name, of in groups.items()}
        own = runs[Setting(setting.engine)]
        equal = {"own plain": _equal(by_question, own), "our plain": _equal(by_question, plain)}
        found["equal"][str(setting)] = equal
    return found


def _check_prompts(runs: dict[Setting, list[Runs]]) -> None:
    """Refuse engines that read a question as different numbers of rows."""
    for of_one in zip(*runs.values(), strict=True):
        rows = {some[0]["prompt_tokens"] for some in of_one}
        if len(rows) > 1:
            raise SystemExit(f"the engines read a question as {sorted(rows)} rows.")


def _equal(some: list[Runs], others: list[Runs]) -> int:
    """Questions that every run answers with the same token ids."""
    pairs = zip(some, others, strict=True)
    return sum(len({tuple(run["token_ids"]) for run in a + b}) == 1 for a, b in pairs)


def summary(by_question: list[Runs]) -> dict[str, float]:
    """Sums over questions of medians over turns; the prompt's own token and call do not count."""
    tokens = sum(len(runs[0]["token_ids"]) - 1 for runs in by_question)
    calls = sum(median(run["calls"] for run in runs) for runs in by_question)

    def total(clock: str, of: Callable[[list[float]], float] = median) -> float:
        return sum(of([run[clock] for run in runs]) for runs in by_question)

    return {
        "questions": len(by_question),
        "tokens": tokens,
        "tokens_per_call": tokens / calls,
        "tokens_per_second": tokens / total("decode_seconds"),
        "tokens_per_second_best": tokens / total("decode_seconds", min),
        "tokens_per_cpu_second": tokens / total("decode_cpu_seconds"),
        "call_ms": 1e3 * total("decode_seconds") / calls,
        "first_token_ms": 1e3 * total("prefill_seconds") / len(by_question),
        "answer_ms": 1e3 * (total("prefill_seconds") + total("decode_seconds")) / len(by_question),
    }


def explain(report: dict[str, Any]) -> None:
    """The lines that a person wants to read, on stderr."""
    print(f"{report['threads']} threads, load {report['load']}", file=sys.stderr)
    for name, groups in report["figures"].items():
        own = report["figures"][f"{name.split()[0]} plain"]
        for group, figures in groups.items():
            print(f"{name}, {group}: {_line(figures, own[group])}", file=sys.stderr)
        print(f"    equal answers: {report['equal'][name]}", file=sys.stderr)


def _line(figures: dict[str, float], plain: dict[str, float]) -> str:
    ratio, best, cpu = (figures[f"tokens_per_{k}"] / plain[f"tokens_per_{k}"] for k in CLOCKS)
    return (
        f"{figures['tokens_per_second']:.0f} tokens/s ({ratio:.2f}x its plain, best turns "
        f"{best:.2f}x, CPU {cpu:.2f}x), best {figures['tokens_per_second_best']:.0f}, "
        f"{figures['tokens_per_call']:.2f} tokens a call of {figures['call_ms']:.2f} ms, first "
        f"token {figures['first_token_ms']:.0f} ms, answer {figures['answer_ms']:.0f} ms"
    )
