"""Differences between plain and speculative decoding: every precision, every block size.

    python tests/bit_identity.py [--tokens 2000] [--precisions fp32 int4] [--threads 1]

Greedy answers of a random checkpoint, whose logits are near ties everywhere; counts the tokens
whose logits differ in any bit from those of single steps, and the ids that differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from support_cases import HYBRID, TARGET
from support_drafters import FirstK
from test_bit_identity import known, logits_of_answer, same_bits

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.models.precision import PRECISIONS

TARGETS = {"attention": TARGET, "hybrid": HYBRID}
BLOCKS = (2, 3, 8, 16)


def compare(bundle: Path, num_tokens: int, threads: int) -> dict[int, tuple[int, int]]:
    """For each block size, tokens whose logits differ and ids that differ."""
    ids, plain = logits_of_answer(bundle, "none", num_tokens, threads)
    answer = known(bundle, ids)
    found = {}
    for rows in BLOCKS:
        draft = FirstK(answer, rows - 1, range(rows))
        again, logits = logits_of_answer(bundle, draft, num_tokens, threads)
        bits = sum(not same_bits(a, b) for a, b in zip(plain, logits, strict=True))
        found[rows] = (bits, sum(a != b for a, b in zip(ids, again, strict=True)))
    return found


def exported(folder: Path, target: str, precision: str) -> Path:
    """A bundle of a random checkpoint."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    from tiny_checkpoint import make_target

    make_target(folder / "checkpoint", **TARGETS[target])
    options = ExportOptions(folder / "checkpoint", folder / "bundle", precision=precision)
    return export_bundle(options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    total = 0
    print("target precision " + " ".join(f"block-{rows}" for rows in BLOCKS))
    for target in options.targets:
        for precision in options.precisions:
            with tempfile.TemporaryDirectory() as folder:
                bundle = exported(Path(folder), target, precision)
                found = compare(bundle, options.tokens, options.threads)
            total += sum(bits + ids for bits, ids in found.values())
            cells = " ".join(f"{bits}/{ids}" for bits, ids in found.values())
            print(f"{target} {precision} {cells}", flush=True)
    print(f"{total} differences in {options.tokens} tokens (logits/ids)")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
