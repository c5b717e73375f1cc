"""The loop of a stage, its resumable state and a JSON-lines log.

Knows nothing of what a step does.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from optim import Optimizer
from torch import nn


def save_state(path: Path, module: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Write weights, optimiser and step; a reader never sees half a file."""
    state: dict[str, Any] = {
        "module": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
    }
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


def load_state(path: Path, module: nn.Module, optimizer: Optimizer) -> int:
    """The number of steps done; zero and nothing changed if there is no file."""
    if not path.exists():
        return 0
    state = torch.load(path)
    module.load_state_dict(state["module"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


class Log:
    """Running means of named values, printed and appended to a file every 50 steps."""

    def __init__(self, path: Path, stage: str, steps: int, done: int) -> None:
        self.path, self.stage, self.steps = path, stage, steps
        self.means: dict[str, float] = {}
        self.started, self.done = time.perf_counter(), done

    def add(self, step: int, values: dict[str, float]) -> None:
        """Take one step's values in."""
        for name, value in values.items():
            mean = self.means.get(name, value)
            self.means[name] = mean + 0.08 * (value - mean)
        if (step + 1) % 50 and step + 1 != self.steps:
            return
        wall = time.perf_counter() - self.started
        left = wall / (step + 1 - self.done) * (self.steps - step - 1)
        entry = {"stage": self.stage, "step": step + 1, "wall": round(wall), "left": round(left)}
        entry |= {name: round(mean, 4) for name, mean in sorted(self.means.items())}
        line = json.dumps(entry)
        print(line, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def run_stage(
    out: Path, stage: str, steps: int, module: nn.Module,
    take: Callable[[Optimizer, int], dict[str, float]],
) -> None:  # fmt: skip
    """Run or resume the steps of a stage; the last state stays in `out`/`stage`.pt."""
    optimizer = Optimizer(module.named_parameters())
    state = out / f"{stage}.pt"
    done = load_state(state, module, optimizer)
    log = Log(out / "log.jsonl", stage, steps, done)
    for step in range(done, steps):
        started = time.perf_counter()
        values = take(optimizer, step)
        log.add(step, values | {"seconds": time.perf_counter() - started})
        if (step + 1) % 200 == 0 or step + 1 == steps:
            save_state(state, module, optimizer, step + 1)
