"""Train the miniature from scratch on the CPU: tokenizer, target, both drafters, evaluation.

    python examples/miniature/train.py OUT

Writes OUT/models/{target,dflash,dflash2} and OUT/log.jsonl. A stopped run goes on where its last
state (every 200 steps) left off; the same versions and thread count give the same weights.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

# glibc hands large blocks back after every step otherwise; this alone saves a third of the time.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
}
STEPS = {"vision": 700, "joint": 3880, "dflash": 1400, "dflash2": 800}


def run(out: Path, steps: dict[str, int]) -> None:
    """All stages that are not done yet."""
    # Imported here: they load torch, which must find the environment set.
    import evaluate
    import tokenizer as tokenizer_module
    import train_draft
    import train_target
    from draft import save_draft
    from model import make_target
    from save import save_target

    models = out / "models"
    tokenizer = tokenizer_module.train(models / "target")
    target = train_target.train(tokenizer, out, steps["vision"], steps["joint"])
    save_target(target, tokenizer, models / "target")
    # The drafters learn the features of the fp16 weights that are shipped.
    target = make_target(tokenizer, models / "target")
    draft = None
    for kind in ("dflash", "dflash2"):
        draft = train_draft.train(tokenizer, target, kind, out, steps[kind], start=draft)
        save_draft(draft, models / kind)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(models / "target" / name, models / kind / name)
    evaluate.main([str(models), "--json", str(out / "results.json")])


def main() -> None:
    """Parse the arguments, set the environment, run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    for name, default in STEPS.items():
        parser.add_argument(f"--{name}-steps", type=int, default=default)
    args = parser.parse_args()
    if not MALLOC.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)
    import torch

    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    run(args.out, {name: getattr(args, f"{name}_steps") for name in STEPS})


if __name__ == "__main__":
    main()
