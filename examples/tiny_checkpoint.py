"""Write small random-weight checkpoints in Hugging Face layout: a Qwen3-VL target and its drafter.

    python examples/tiny_checkpoint.py OUT        writes OUT/target and OUT/draft

They have every file and tensor of the released ones and answer nonsense. Needs neither torch nor
transformers; the same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tiny_draft import DraftSpec, make_draft
from tiny_target import TargetSpec, make_target
from tiny_tokenizer import SPARE_COLUMNS, SPECIALS, train_tokenizer

__all__ = [
    "SPARE_COLUMNS",
    "SPECIALS",
    "DraftSpec",
    "TargetSpec",
    "make_draft",
    "make_target",
    "train_tokenizer",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder that gets target/ and draft/")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make_target(args.out / "target", seed=args.seed)
    make_draft(args.out / "draft", args.out / "target", seed=args.seed + 1)
    print(f"wrote {args.out / 'target'} and {args.out / 'draft'}")


if __name__ == "__main__":
    main()
