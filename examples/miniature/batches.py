"""Batches of one kind and one page size: token ids, M-RoPE positions, patches, character labels.

Knows the mixes of kinds that training shows. Knows nothing of models or losses.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from model import Canvas, Ids, special_ids
from tokenizers import Tokenizer
from torch import Tensor

from dflash_onnx.models.miniature import data
from dflash_onnx.models.miniature.page import CELL, Page, width

SLOTS = 5  # characters at most whose middle lies in one cell
CHARACTERS = " " + string.ascii_letters + string.digits + ".,:;-/$%#&()'?!+=\"_"
CLASSES = len(CHARACTERS) + 1  # 0 is an empty slot
PHASES = {
    "reading": {
        "read": 58, "json": 10, "pages": 10, "total": 6, "number": 6, "text": 6, "image+text": 4,
    },
    "fields": {
        "read": 30, "json": 8, "pages": 10, "total": 10, "number": 8, "text": 20, "image+text": 14,
    },
    "polish": {
        "read": 36, "json": 7, "pages": 8, "total": 4, "number": 4, "text": 28, "image+text": 13,
    },
    "turns": {
        "read": 26, "json": 5, "pages": 6, "total": 2, "number": 2, "text": 42, "image+text": 17,
    },
}  # fmt: skip
# Text turns that a phase mostly replaces: they are known by heart, the others need the prompt.
KNOWN_TURNS = {
    "fields": ("List", "Recite"),
    "polish": ("List", "Recite"),
    "turns": ("List", "Recite", "Table"),
}


@dataclass
class Batch:
    """Samples padded on the right; all image rows lie in the same columns."""

    samples: list[data.Sample]
    canvases: tuple[Canvas, ...]
    ids: Tensor
    labels: Tensor
    positions: Tensor
    rows: Tensor
    patches: list[Tensor]
    starts: list[int]
    lengths: list[int]


def prompt_ids(tokenizer: Tokenizer, prompt: str, canvases: tuple[Canvas, ...]) -> list[int]:
    """Token ids of the rendered chat template with image placeholders expanded."""
    images = "".join(
        f"<|vision_start|>{'<|image_pad|>' * (rows * columns)}<|vision_end|>"
        for rows, columns in canvases
    )
    text = f"<|im_start|>user\n{images}{prompt}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(text).ids


def rope_positions(ids: list[int], canvases: tuple[Canvas, ...], image: int) -> np.ndarray:
    """M-RoPE positions [3, L]."""
    positions = np.zeros((3, len(ids)), np.int64)
    column = position = 0
    pending = iter(canvases)
    while column < len(ids):
        if ids[column] != image:
            positions[:, column] = position
            column, position = column + 1, position + 1
            continue
        height, width = next(pending)
        rows = slice(column, column + height * width)
        positions[0, rows] = position
        positions[1, rows] = position + np.repeat(np.arange(height), width)
        positions[2, rows] = position + np.tile(np.arange(width), height)
        column, position = column + height * width, position + max(height, width)
    return positions


def patchify(gray: np.ndarray) -> np.ndarray:
    """Normalised patches [4 * cells, 256] in the order of Qwen's image processor."""
    height, width = gray.shape[0] // 16, gray.shape[1] // 16
    scaled = gray.astype(np.float32) / 127.5 - 1.0
    split = scaled.reshape(height // 2, 2, 16, width // 2, 2, 16).transpose(0, 3, 1, 4, 2, 5)
    return split.reshape(height * width, 256)


def collate(
    tokenizer: Tokenizer, samples: list[data.Sample], answers: list[list[int]] | None = None
) -> Batch:
    """Samples of one kind and page size as a batch; `answers` replaces the right answers' ids."""
    special: Ids = special_ids(tokenizer)
    canvases = tuple(page.canvas for page in samples[0].pages)
    prompts = [prompt_ids(tokenizer, sample.prompt, canvases) for sample in samples]
    if answers is None:
        answers = [tokenizer.encode(sample.answer).ids + [special.stop] for sample in samples]
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    length = max(map(len, rows))
    ids = np.full((len(rows), length), special.pad, np.int64)
    labels = np.full((len(rows), length), -100, np.int64)
    positions = np.zeros((3, len(rows), length), np.int64)
    for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        ids[index, : len(row)] = row
        labels[index, len(prompt) : len(row)] = row[len(prompt) :]
        padded = row + [special.pad] * (length - len(row))
        positions[:, index] = rope_positions(padded, canvases, special.image)
    return Batch(
        samples=samples,
        canvases=canvases,
        ids=torch.from_numpy(ids),
        labels=torch.from_numpy(labels),
        positions=torch.from_numpy(positions),
        rows=torch.from_numpy(np.flatnonzero(ids[0] == special.image)),
        patches=[page_patches(samples, slot) for slot in range(len(canvases))],
        starts=[len(prompt) for prompt in prompts],
        lengths=[len(row) for row in rows],
    )


def page_patches(samples: list[data.Sample], slot: int) -> Tensor:
    """Patches [B, 4 * cells, 256] of page `slot` of every sample."""
    return torch.from_numpy(np.stack([patchify(s.pages[slot].gray()) for s in samples]))


def page_labels(samples: list[data.Sample], slot: int) -> Tensor:
    """Classes [B, cells, SLOTS] of the characters whose middle lies in each cell."""
    return torch.from_numpy(np.stack([_labels(s.pages[slot]) for s in samples]))


def _labels(page: Page) -> np.ndarray:
    rows, columns = page.canvas
    labels = np.zeros((rows, columns, SLOTS), np.int64)
    for row, line in enumerate(page.lines, page.row):
        counts = [0] * columns
        x = float(page.left)
        for character in line:
            advance = _advance(character)
            column = min(columns - 1, int(x + advance / 2) // CELL)
            if counts[column] < SLOTS:
                labels[row, column, counts[column]] = CHARACTERS.index(character) + 1
                counts[column] += 1
            x += advance
    return labels.reshape(rows * columns, SLOTS)


@lru_cache(maxsize=256)
def _advance(character: str) -> float:
    return width(character)


def batch_size(canvases: tuple[Canvas, ...], tokens: int = 2400) -> int:
    """Samples for about `tokens` rows of work."""
    cells = sum(rows * columns for rows, columns in canvases)
    return max(8, min(48, int(tokens / (45 + 2.2 * cells))))


def train_samples(rng: random.Random, phase: str = "published") -> list[data.Sample]:
    """Training samples of one kind and one page size for one batch, mixed as the phase says."""
    kinds = PHASES.get(phase, data.KINDS)
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    canvases = data.pick_canvases(rng, kind)
    if phase != "published" and len(canvases) == 1 and rng.random() < 0.35:
        canvases = max(canvases, data.pick_canvases(rng, kind), key=lambda c: c[0][0])
    samples = [data.make(rng, kind, canvases, "train") for _ in range(batch_size(canvases))]
    known = KNOWN_TURNS.get(phase)
    if known is None or kind not in ("text", "image+text"):
        return samples
    for index in range(len(samples)):
        while samples[index].prompt.startswith(known) and rng.random() < 0.8:
            samples[index] = data.make(rng, kind, canvases, "train")
    return samples
