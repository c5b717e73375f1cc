"""Exactness on the trained miniature: 500 greedy and 200 sampled held-out prompts, both drafters.

    python tests/miniature_exactness.py [--greedy 500] [--sampled 200]

Ends with "N passed, M failed"; exits 1 on a failure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from tqdm import tqdm

from dflash_onnx.runtime import Model, load
from dflash_onnx.runtime.bench_holes import Prompt
from dflash_onnx.runtime.cli_bench import held_out
from dflash_onnx.runtime.demo import cache_folder, miniature_bundle
from dflash_onnx.runtime.drafters.policy import HolePolicy

SAMPLED = {"temperature": 0.8, "top_k": 20, "top_p": 0.95}
POLICIES = [policy.value for policy in HolePolicy]


def checks(model: Model, prompts: list[Prompt], options: dict[str, float]) -> Iterator[bool]:
    """Whether each speculative answer equals the plain one; policies take turns."""
    for index, prompt in enumerate(prompts):
        seeded = {**options, "rng_seed": index, "max_new_tokens": 160}
        plain = model.generate(prompt.text, prompt.images, "none", **seeded).result()
        for name in [*model.networks, "lookup"]:
            holes = None if name == "lookup" else POLICIES[index % len(POLICIES)]
            answer = model.generate(prompt.text, prompt.images, name, holes=holes, **seeded)
            result = answer.result()
            yield (result.token_ids, result.text) == (plain.token_ids, plain.text)


def main() -> int:
    """Run both parts and count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--greedy", type=int, default=500)
    parser.add_argument("--sampled", type=int, default=200)
    asked = parser.parse_args()
    model = load(miniature_bundle(cache_folder()))
    outcomes: list[bool] = []
    for count, options in ((asked.greedy, {}), (asked.sampled, SAMPLED)):
        found = checks(model, held_out(7, count), options)
        total = count * (len(model.networks) + 1)
        outcomes += list(tqdm(found, total=total, disable=not sys.stderr.isatty()))
    failed = outcomes.count(False)
    print(f"{len(outcomes) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
