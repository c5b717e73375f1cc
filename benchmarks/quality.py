"""What a precision costs in quality: perplexity of a text, and whole answers of the miniature.

    python benchmarks/quality.py BUNDLE... --text FILE [--rows 4096]
    python benchmarks/quality.py BUNDLE... --answers 300 [--seed 0]

The first bundle is the reference that the others are compared with. Prints one Markdown table with
a line per bundle; every answer with a drafter is compared with the plain one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from dflash_onnx.models.miniature.data import sample
from dflash_onnx.models.positions import Position, advancing_positions
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.options import GenerateOptions, make_options

# Rows of a text that see each other, and rows whose logits are held at a time.
WINDOW, PIECE = 512, 64
LONGEST_ANSWER = 160
# Stands for a banned id's minus infinity, so that differences stay numbers.
LOWEST = -1e30
Float = NDArray[np.float32]
Wide = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass
class TextScore:
    """Sums over predicted tokens: losses, divergences from the reference, equal best tokens."""

    tokens: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    equal: int = 0

    def add(self, ours: Wide, theirs: Wide, next_ids: Ints) -> None:
        """Count rows of log-probabilities [n, V] and the tokens [n] that came next."""
        self.tokens += len(next_ids)
        self.loss -= float(ours[np.arange(len(next_ids)), next_ids].sum())
        self.divergence += float((np.exp(theirs) * (theirs - ours)).sum())
        self.equal += int((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum())

    def cells(self) -> dict[str, str]:
        """The columns of the table."""
        return {
            "perplexity": f"{np.exp(self.loss / self.tokens):.3f}",
            "KL": f"{self.divergence / self.tokens:.5f}",
            "equal best token": f"{self.equal / self.tokens:.2%}",
        }


@dataclass
class AnswerScore:
    """Whole answers that are right, equal the reference's, and tokens and calls of drafters."""

    answers: list[str] = field(default_factory=list)
    right: int = 0
    different: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    def add_draft(self, name: str, tokens: int, calls: int) -> None:
        """Count one answer of a drafter."""
        self.tokens[name] = self.tokens.get(name, 0) + tokens
        self.calls[name] = self.calls.get(name, 0) + calls

    def cells(self, reference: AnswerScore) -> dict[str, str]:
        """The columns of the table."""
        pairs = zip(self.answers, reference.answers, strict=True)
        same, count = sum(a == b for a, b in pairs), len(self.answers)
        cells = {"right answers": f"{self.right} of {count}", "as the first": f"{same}"}
        for name, calls in self.calls.items():
            cells[f"tokens per call, {name}"] = f"{self.tokens[name] / calls:.2f}"
        return cells | {"differ from plain": f"{self.different}"}


def windows(ids: Ints) -> Iterator[Ints]:
    """Pieces of a text that are read on their own."""
    for start in range(0, len(ids) - 1, WINDOW):
        yield ids[start : start + WINDOW]


def hidden_rows(model: Model, ids: Ints) -> Float:
    """Hidden rows [n, H] of ids [n] read from an empty cache."""
    target, cache = model.target, model.target.new_cache(model.context_limit)
    positions = advancing_positions(Position(0), len(ids))
    return target.forward(cache, target.embed(ids), positions, None, (), certain=True).hidden


def log_probabilities(model: Model, hidden: Float) -> Wide:
    """Log-probabilities [n, V] of hidden rows [n, H]; a banned id has none to speak of."""
    logits = model.target.head.rows(hidden, np.arange(len(hidden)), True).logits
    assert logits is not None
    wide = np.maximum(logits.astype(np.float64), LOWEST)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def score_text(model: Model, reference: Model, expected: list[Float], ids: Ints) -> TextScore:
    """Compare a model with the reference, whose hidden rows of every window are `expected`."""
    score = TextScore()
    for part, theirs in zip(windows(ids), tqdm(expected, disable=quiet()), strict=True):
        ours = hidden_rows(model, part)
        for start in range(0, len(part) - 1, PIECE):
            rows = slice(start, min(start + PIECE, len(part) - 1))
            right = log_probabilities(reference, theirs[rows])
            score.add(log_probabilities(model, ours[rows]), right, part[1:][rows])
    return score


def score_answers(model: Model, count: int, seed: int) -> AnswerScore:
    """Answer held-out questions plainly and with every drafter of the bundle."""
    score, options = AnswerScore(), make_options(max_new_tokens=LONGEST_ANSWER)
    for index in tqdm(range(count), disable=quiet()):
        score_answer(model, seed, index, options, score)
    return score


def score_answer(
    model: Model, seed: int, index: int, options: GenerateOptions, score: AnswerScore
) -> None:
    """One question."""
    question = sample(seed, index)
    plan = model.plan(question.prompt, question.images)
    plain = model.conversation("none").generate_plan(plan, options).result()
    score.answers.append(plain.text)
    score.right += plain.text == question.answer
    for name in model.manifest.draft_names:
        result = model.conversation(name).generate_plan(plan, options).result()
        score.different += result.token_ids != plain.token_ids
        # The first token comes from the prompt's own call.
        tokens = result.output_tokens - 1
        score.add_draft(name, tokens, result.timings.target_calls)


def quiet() -> bool:
    """Whether nobody watches."""
    return not sys.stderr.isatty()


def facts(model: Model) -> dict[str, str]:
    """The columns that need no run."""
    size = sum(file.num_bytes for file in model.manifest.data_files.values())
    return {"precision": str(model.manifest.precision), "MB": f"{size / 1e6:.1f}"}


def text_cells(model: Model, reference: Model, expected: list[Float], ids: Ints) -> dict[str, str]:
    """Columns about the text, if there is one."""
    return score_text(model, reference, expected, ids).cells() if expected else {}


def markdown(lines: list[dict[str, str]]) -> str:
    """A table whose head are the keys of the first line."""
    head = list(lines[0])
    cells = [head, ["---"] * len(head), *([line.get(key, "") for key in head] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def text_ids(model: Model, path: Path | None, rows: int) -> Ints:
    """Ids [rows] of the beginning of a text file; none without one."""
    text = path.read_text(encoding="utf-8") if path else ""
    return np.array(model.tokenizer.encode(text)[:rows], np.int64)


def measure(args: argparse.Namespace) -> list[dict[str, str]]:
    """A line of the table for every bundle."""
    reference = Model(args.bundles[0], threads=args.threads)
    ids = text_ids(reference, args.text, args.rows)
    expected = [hidden_rows(reference, part) for part in windows(ids)]
    lines: list[dict[str, str]] = []
    first: AnswerScore | None = None
    for path in args.bundles:
        model = Model(path, threads=args.threads)
        line = facts(model) | text_cells(model, reference, expected, ids)
        if args.answers:
            score = score_answers(model, args.answers, args.seed)
            first = first or score
            line |= score.cells(first)
        lines.append(line)
        print(markdown(lines[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    parser.add_argument("--text", type=Path, metavar="FILE", help="measure perplexity on it")
    parser.add_argument("--rows", type=int, default=4096, metavar="N", help="tokens of the text")
    parser.add_argument("--answers", type=int, default=0, metavar="N", help="held-out questions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if not (args.text or args.answers):
        parser.error("give --text, --answers or both")
    print(markdown(measure(args)))


if __name__ == "__main__":
    main()
