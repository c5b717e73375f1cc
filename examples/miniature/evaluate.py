"""Measure the miniature on held-out samples: reading, and tokens per target call of each drafter.

    python examples/miniature/evaluate.py MODELS [--count N] [--seed S] [--json FILE]

MODELS has the folders target, dflash and dflash2 (a missing drafter is skipped; an MTP head lies in
target). The tables count whole answers of greedy decoding; an answer is right if every character
is.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import batches
import torch
from blocks import encode_batch, target_features
from draft import Draft, load_draft
from measure import Result, measure
from model import make_target, special_ids
from mtp import Mtp, load_mtp
from tokenizers import Tokenizer
from torch import Tensor, nn

from dflash_onnx.models.miniature import data

LONGEST = 120  # answer tokens
GROUP = 48  # samples a batch


def groups(samples: list[data.Sample]) -> list[list[data.Sample]]:
    """Samples whose prompts can share a batch."""
    sets: dict[object, list[data.Sample]] = defaultdict(list)
    for sample in samples:
        key = (sample.kind, *(page.canvas for page in sample.pages))
        sets[key].append(sample)
    return [part[i : i + GROUP] for part in sets.values() for i in range(0, len(part), GROUP)]


@torch.no_grad()
def answer(tokenizer: Tokenizer, target: nn.Module, samples: list[data.Sample]) -> list[Result]:
    """Greedy answers: where the right one survives teacher forcing it is the greedy one."""
    batch = batches.collate(tokenizer, samples)
    best = target_features(target, batch).best
    answers = []
    for index in range(len(samples)):
        start, end = batch.starts[index], batch.lengths[index]
        truth = batch.ids[index, start:end].tolist()
        said = best[index, start - 1 : end - 1].tolist()
        same = [a == b for a, b in zip(truth, said, strict=True)]
        agreed = same.index(False) if False in same else len(same)
        answers.append(truth[:agreed] + said[agreed : agreed + 1])
    decode(tokenizer, target, samples, answers)
    results = []
    for sample, ids in zip(samples, answers, strict=True):
        text = tokenizer.decode(ids[:-1], skip_special_tokens=False)
        results.append(Result(sample, ids, text, distance(text, sample.answer)))
    return results


def decode(
    tokenizer: Tokenizer, target: nn.Module, samples: list[data.Sample], answers: list[list[int]]
) -> None:
    """Plain greedy decoding without a cache: extends all unfinished answers in place."""
    stop = special_ids(tokenizer).stop
    images: list[Tensor] = []
    chosen: list[int] = []
    while True:
        going = [i for i, ids in enumerate(answers) if ids[-1] != stop and len(ids) < LONGEST]
        if not going:
            return
        batch = batches.collate(tokenizer, [samples[i] for i in going], [answers[i] for i in going])
        if going != chosen:
            chosen, images = going, encode_batch(target, batch)
        best = target_features(target, batch, images).best
        for row, index in enumerate(going):
            answers[index].append(int(best[row, batch.lengths[row] - 1]))


def distance(left: str, right: str) -> int:
    """Edit distance in characters."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        last, row[0] = row[0], i
        for j, b in enumerate(right, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (a != b))
    return row[-1]


def table(title: str, sets: dict[str, list[Result]]) -> list[dict[str, object]]:
    """Print one line a set and return the numbers."""
    names = sorted({name for part in sets.values() for result in part for name in result.rounds})
    print(f"\n{title:24}   n  whole  chars  " + "  ".join(names))
    rows = []
    for key, part in sorted(sets.items()):
        characters = sum(len(result.sample.answer) for result in part)
        row: dict[str, object] = {"set": key, "count": len(part)}
        row["whole"] = round(sum(r.errors == 0 for r in part) / len(part), 4)
        row["characters"] = round(1 - sum(r.errors for r in part) / characters, 5)
        for name in names:
            rounds = [size for result in part for size in result.rounds.get(name, [])]
            row[name] = round(sum(rounds) / max(1, len(rounds)), 3)
        print(f"{key:24} {row['count']:4} {row['whole']:6.3f} {row['characters']:6.4f}  ", end="")
        print("  ".join(f"{row[name]:>{len(name)}}" for name in names))
        rows.append(row)
    return rows


def split(results: list[Result]) -> dict[str, dict[str, list[Result]]]:
    """The published tables: by kind of question, and single images by lines."""
    tables: dict[str, dict[str, list[Result]]] = {"kind": defaultdict(list)}
    tables["lines, one image"] = defaultdict(list)
    tables["summary"] = defaultdict(list)
    for result in results:
        sample = result.sample
        tables["kind"][sample.kind].append(result)
        if sample.kind in ("read", "json"):
            tables["lines, one image"][f"{sample.num_lines}"].append(result)
        if sample.kind == "text":
            tables["summary"]["text turns"].append(result)
        elif sample.kind != "image+text":
            tables["summary"]["image answers"].append(result)
            if len(sample.pages) == 1:
                tables["summary"]["single image"].append(result)
    return tables


def load_drafters(target: nn.Module, models: Path) -> dict[str, Draft | Mtp]:
    """All drafters of a folder by name."""
    drafters: dict[str, Draft | Mtp] = {}
    for name in ("dflash", "dflash2"):
        if (models / name / "model.safetensors").exists():
            drafters[name] = load_draft(models / name)
    # Only the hybrid's family has the head.
    hybrid = target.config.model_type == "qwen3_5"
    mtp = load_mtp(target, models / "target") if hybrid else None
    return drafters if mtp is None else drafters | {"mtp": mtp}


def evaluate(models: Path, count: int, seed: int) -> dict[str, list[dict[str, object]]]:
    """Print all tables for `count` held-out samples and return them."""
    tokenizer = Tokenizer.from_file(str(models / "target" / "tokenizer.json"))
    target = make_target(tokenizer, models / "target").eval()
    drafters = load_drafters(target, models)
    results = []
    for group in groups([data.sample(seed, index) for index in range(count)]):
        part = answer(tokenizer, target, group)
        measure(tokenizer, target, drafters, part)
        results += part
    for result in [r for r in results if r.errors][:10]:
        print(f"wrong: {result.sample.answer!r} -> {result.text!r}")
    return {title: table(title, sets) for title, sets in split(results).items()}


def main(arguments: list[str] | None = None) -> None:
    """Parse the arguments and print the tables; --json keeps the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tables = evaluate(args.models, args.count, args.seed)
    if args.json:
        args.json.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
