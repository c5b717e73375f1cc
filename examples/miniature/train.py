"""Train the miniature on the CPU: tokenizer, target, drafters, evaluation.

    python examples/miniature/train.py OUT
    python examples/miniature/train.py OUT --hybrid models/miniature

Writes OUT/models/{target,dflash,dflash2} and OUT/log.jsonl. --hybrid trains the hybrid, begun from
the finished pure-attention models of that folder. A stopped run goes on where its last state (every
200 steps) left off; the same versions and thread count give the same weights.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# glibc hands large blocks back after every step otherwise; this alone saves a third of the time.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
}
STEPS = {"vision": 700, "joint": 3880, "dflash": 1400, "dflash2": 800, "mtp": 0}
HYBRID_STEPS = {"vision": 0, "joint": 2900, "dflash": 650, "dflash2": 400, "mtp": 550}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def copy_files(source: Path, folder: Path, names: tuple[str, ...]) -> None:
    """Copy named files into a folder that need not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copy(source / name, folder / name)


def make_tokenizer(folder: Path, start: Path | None) -> Tokenizer:
    """Train the tokenizer, or take the one that the weights to begin from were trained with."""
    import tokenizer as tokenizer_module
    from tokenizers import Tokenizer

    if start is None:
        return tokenizer_module.train(folder)
    copy_files(start / "target", folder, TOKENIZER_FILES)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def run(out: Path, steps: dict[str, int], start: Path | None) -> None:
    """All stages that are not done yet."""
    # Imported here: they load torch, which must find the environment set.
    import evaluate
    import train_draft
    import train_mtp
    import train_target
    from draft import load_draft, save_draft
    from model import make_target
    from mtp import save_mtp
    from save import save_target

    models = out / "models"
    tokenizer = make_tokenizer(models / "target", start)
    source = None if start is None else make_target(tokenizer, start / "target")
    target = train_target.train(tokenizer, out, steps["vision"], steps["joint"], source)
    save_target(target, tokenizer, models / "target")
    # The drafters learn the features of the fp16 weights that are shipped.
    target = make_target(tokenizer, models / "target")
    if start is not None:
        save_mtp(train_mtp.train(tokenizer, target, out, steps["mtp"]), models / "target")
    draft = None if start is None else load_draft(start / "dflash")
    for kind in ("dflash", "dflash2"):
        draft = train_draft.train(tokenizer, target, kind, out, steps[kind], start=draft)
        save_draft(draft, models / kind)
        copy_files(models / "target", models / kind, TOKENIZER_FILES[:2])
    evaluate.main([str(models), "--json", str(out / "results.json")])


def main() -> None:
    """Parse the arguments, set the environment, run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hybrid", type=Path, metavar="MODELS")
    for name in STEPS:
        parser.add_argument(f"--{name}-steps", type=int)
    args = parser.parse_args()
    if not MALLOC.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)
    import torch

    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    steps = dict(STEPS if args.hybrid is None else HYBRID_STEPS)
    chosen = {name: getattr(args, f"{name}_steps") for name in STEPS}
    steps |= {name: count for name, count in chosen.items() if count is not None}
    run(args.out, steps, args.hybrid)


if __name__ == "__main__":
    main()
