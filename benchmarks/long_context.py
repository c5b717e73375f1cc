"""What a longer context costs a call: attention, and nothing else.

    python benchmarks/long_context.py BUNDLE [--rows 1024 16384] [--drafts 7] [--repeats 20]

Plain steps and verify calls over caches of different lengths, filled with random keys and values.
The split by operator comes from ONNX Runtime's profile of calls of their own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from dflash_onnx.models.positions import Position, Row, advancing_positions
from dflash_onnx.runtime.bundle_files import open_bundle
from dflash_onnx.runtime.session import Runtime
from dflash_onnx.runtime.target import Target, open_head
from dflash_onnx.runtime.target_cache import TargetCache

WARM_UP = 3
ATTENTION = "GroupQueryAttention"


def open_target(folder: Path, runtime: Runtime) -> Target:
    """The target alone, without tokenizer and drafters."""
    manifest = open_bundle(folder)
    return Target(folder, manifest, runtime, open_head(manifest, runtime))


def filled(target: Target, rows: int, spare: int) -> TargetCache:
    """A cache that stands at `rows` rows."""
    cache, rng = target.new_cache(rows + spare), np.random.default_rng(0)
    cache.reserve(rows + spare)
    for buffers in cache.layers:
        for buffer in buffers:
            buffer[:, :, :rows] = rng.normal(size=buffer[:, :, :rows].shape)
    cache.num_rows = Row(rows)
    return cache


def call_seconds(
    runtime: Runtime, target: Target, cache: TargetCache, count: int, repeats: int
) -> tuple[list[float], list[float]]:
    """Seconds of calls of `count` rows after the cache's, and of the part outside the network."""
    rows, seconds, host = cache.num_rows, [], []
    ids, positions = np.arange(count), advancing_positions(Position(rows), count)
    for _ in range(repeats + WARM_UP):
        before, started = runtime.clocks()["target"].seconds, perf_counter()
        target.forward(cache, target.embed(ids), positions, None, (), certain=count == 1)
        cache.commit(count)
        cache.num_rows = rows  # the next call overwrites the same rows
        seconds.append(perf_counter() - started)
        host.append(seconds[-1] - (runtime.clocks()["target"].seconds - before))
    return seconds[WARM_UP:], host[WARM_UP:]


def timed(options: argparse.Namespace, rows: int, count: int) -> dict[str, float]:
    """Median milliseconds of a call, and of its part outside the network."""
    folder = options.bundle
    runtime = Runtime(folder, "cpu", options.threads)
    target = open_target(folder, runtime)
    cache = filled(target, rows, count)
    seconds, host = call_seconds(runtime, target, cache, count, options.repeats)
    return {"call_ms": 1e3 * median(seconds), "host_ms": 1e3 * median(host)}


def profiled(options: argparse.Namespace, rows: int, count: int) -> dict[str, float]:
    """Median milliseconds of a call in attention, and in all other operators together."""
    folder = options.bundle
    with tempfile.TemporaryDirectory() as profiles:
        runtime = Runtime(folder, "cpu", options.threads, profiles=Path(profiles))
        target = open_target(folder, runtime)
        call_seconds(runtime, target, filled(target, rows, count), count, options.repeats)
        events = json.loads(runtime.end_profiles()["target"].read_text())
    by_node: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("kernel_time"):
            by_node[event["args"]["op_name"], event["name"]].append(event["dur"])
    totals = {"attention_ms": 0.0, "others_ms": 0.0}
    for (operator, _), times in by_node.items():
        key = "attention_ms" if operator == ATTENTION else "others_ms"
        totals[key] += median(times) / 1e3
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 16384])
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    report: dict[str, Any] = {}
    for name, count in (("plain", 1), ("verify", options.drafts + 1)):
        for rows in options.rows:
            figures = timed(options, rows, count) | profiled(options, rows, count)
            report[f"{name} at {rows}"] = {key: round(ms, 3) for key, ms in figures.items()}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
