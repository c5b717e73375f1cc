"""What a rejected block costs a hybrid target: median call times after rejection and acceptance.

    python benchmarks/rollback_cost.py BUNDLE [--drafts 7] [--rows 512] [--repeats 60]

Verify calls alternate between rounds that reject every draft and rounds that accept all of them,
always at the same number of cached rows. Prints both medians and their ratio.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from dflash_onnx.models.positions import Position, Row, advancing_positions
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.target_cache import TargetCache

WARM_UP = 6


def filled(model: Model, rows: int) -> TargetCache:
    """A cache with `rows` committed rows."""
    target, cache = model.target, model.target.new_cache(model.context_limit)
    embeds = target.embed(np.arange(rows) % model.manifest.tokenizer_size)
    target.forward(cache, embeds, advancing_positions(Position(0), rows), None, (), certain=True)
    cache.commit(rows)
    return cache


def call(model: Model, cache: TargetCache, rows: int, drafts: int, kept: int) -> float:
    """Seconds of one verify call at `rows` cached rows, of which `kept` new ones are committed."""
    cache.num_rows = Row(rows)  # K/V of earlier rounds are simply overwritten
    ids = np.arange(drafts + 1) + 100
    embeds = model.target.embed(ids)
    positions = advancing_positions(Position(rows), ids.size)
    started = perf_counter()
    model.target.forward(cache, embeds, positions, None, (), certain=False)
    seconds = perf_counter() - started
    cache.commit(kept)
    return seconds


def measure(model: Model, rows: int, drafts: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of calls that follow a rejecting and an accepting round."""
    cache = filled(model, rows)
    after: dict[str, list[float]] = {"reject": [], "accept": []}
    previous = "accept"
    for i in range(2 * repeats + WARM_UP):
        outcome = ("reject", "accept")[i % 2]
        seconds = call(model, cache, rows, drafts, 1 if outcome == "reject" else drafts + 1)
        if i >= WARM_UP:
            after[previous].append(1e3 * seconds)
        previous = outcome
    medians = {f"after_{name}_ms": median(times) for name, times in after.items()}
    return medians | {"ratio": medians["after_reject_ms"] / medians["after_accept_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    model = Model(args.bundle, threads=args.threads)
    print(json.dumps(measure(model, args.rows, args.drafts, args.repeats)))


if __name__ == "__main__":
    main()
