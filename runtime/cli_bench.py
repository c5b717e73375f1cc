"""The bench command: acceptance per phase, policy and drafter on held-out prompts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tqdm import tqdm

from ..models.errors import PromptError
from ..models.miniature.data import sample
from .bench_holes import Prompt, measure, settings
from .bench_table import best_policy, markdown, tabulate, to_json
from .drafters.policy import HolePolicy, parse_policy
from .model import Model, load


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = commands.add_parser("bench", help="acceptance before and after images")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--holes", default="all", metavar="POLICY", help="a policy, or all")
    parser.add_argument("--prompts", type=int, default=200, metavar="N", help="held-out prompts")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=160, metavar="N")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def execute(options: argparse.Namespace) -> None:
    """Measure and print the table."""
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
