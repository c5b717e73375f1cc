"""The bench command: speed on a prompt of random tokens, or acceptance on held-out prompts.

With --holes it asks the miniature's questions; without, any bundle will do.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from ..models.errors import PromptError
from ..models.miniature.data import sample
from .bench_holes import Prompt, measure, settings
from .bench_speed import SpeedOptions
from .bench_speed import measure as measure_speed
from .bench_table import best_policy, markdown, tabulate, to_json
from .cli_run import draft_tokens
from .drafters.policy import HolePolicy, parse_policy
from .model import Model, load


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = commands.add_parser("bench", help="speed, or acceptance before and after images")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--draft", metavar="NAME", help="default: the bundle's first")
    parser.add_argument("--draft-tokens", type=draft_tokens, metavar="N", help="a number, or auto")
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--threads", type=int, metavar="N", help="default: all processors")
    parser.add_argument(
        "--synthetic-acceptance", type=float, metavar="P",
        help="accept each draft with this probability: the ceiling without a good drafter",
    )  # fmt: skip
    parser.add_argument("--holes", metavar="POLICY", help="measure acceptance: a policy, or all")
    parser.add_argument("--prompts", type=int, default=200, metavar="N", help="held-out prompts")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=160, metavar="N")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def execute(options: argparse.Namespace) -> None:
    """Measure and print."""
    (_speed if options.holes is None else _acceptance)(options)


def _speed(options: argparse.Namespace) -> None:
    for name in ("prompt_tokens", "new_tokens", "repeats"):
        if getattr(options, name) < (2 if name == "new_tokens" else 1):
            raise PromptError(f"{name} is {getattr(options, name)}, too small to measure.")
    model = load(options.bundle, threads=options.threads)
    names = ("draft", "draft_tokens", "prompt_tokens", "new_tokens", "repeats")
    chosen = {name: getattr(options, name) for name in names}
    made = SpeedOptions(
        **chosen, synthetic_acceptance=options.synthetic_acceptance, seed=options.seed
    )
    total = 2 * (options.repeats + 1)
    with tqdm(total=total, desc="runs", disable=not sys.stderr.isatty()) as bar:
        report = measure_speed(model, made, bar.update)
    print(json.dumps(report) if options.json else "\n".join(describe(report)))


def describe(report: dict) -> Iterator[str]:
    """The lines that a person wants to read."""
    for name in ("plain", "speculative"):
        run = report[name]
        label = name if name == "plain" else f"{name} ({report['draft']}, {run['length']})"
        yield (
            f"{label}: {run['tokens_per_second']:.1f} tokens/s, {run['tokens_per_round']:.2f} "
            f"tokens a round of {run['round_ms']:.2f} ms (draft {run['draft_ms']:.2f}, verify "
            f"{run['verify_ms']:.2f}, host {run['host_us']:.0f} us = {run['host_share']:.1%})"
        )
    ratio, rows = report["ratios"], report["prompt_tokens"]
    prefill = report["plain"]["prefill_ms"]
    yield f"prefill: {rows} rows in {prefill:.1f} ms, {1e3 * rows / prefill:.0f} rows/s"
    yield (
        f"speed-up {ratio['speed_up']:.2f}; a round costs {ratio['round_cost']:.2f} plain steps, "
        f"so at most {ratio['allowed_speed_up']:.2f}: {ratio['efficiency']:.1%} of it"
    )


def _acceptance(options: argparse.Namespace) -> None:
    if options.prompts < 1:
        raise PromptError(f"prompts must be 1 or more, not {options.prompts}.")
    model = load(options.bundle)
    policies = list(HolePolicy) if options.holes == "all" else [parse_policy(options.holes)]
    prompts = held_out(options.seed, options.prompts)
    chosen = list(settings(model, policies))
    total = len(prompts) * len(chosen)
    with tqdm(total=total, desc="answers", disable=not sys.stderr.isatty()) as bar:
        samples = measure(model, prompts, chosen, options.max_new_tokens, bar.update)
        table = tabulate(samples)
    best = {name: best_policy(table, name) for name in model.networks}
    if options.json:
        facts = {"prompts": options.prompts, "seed": options.seed, "best_policy": best}
        print(json.dumps(facts | _subject(model) | to_json(table)))
        return
    print(markdown(table))
    print(
        f"tokens per target call (95 % interval) on {options.prompts} prompts; "
        f"{table.num_answers - table.num_different} of {table.num_answers} answers equal the "
        f"plain run; best policy after an image: {best}",
        file=sys.stderr,
    )


def held_out(seed: int, count: int) -> list[Prompt]:
    """Questions and pages that no training has seen."""
    samples = (sample(seed, index) for index in range(count))
    return [Prompt(s.prompt, s.images) for s in samples]


def _subject(model: Model) -> dict:
    return {"target_digest": model.manifest.target_digest, "provider": model.provider_info()}
