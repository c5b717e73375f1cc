"""Small byte-level tokenizers of the Qwen kind, trained or spelled out in a moment.

Knows their special tokens and how to name single bytes; holds no expectations about our code.
"""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PLAIN_ADDED = ("<think>", "</think>")
CORPUS = [
    "the cat sat on the mat, and the dog sat on the cat",
    "user\nassistant\nsystem\nDescribe the image: im_start im_end image_pad",
    "ob 👍🏽 ke 똻 日本 日本語 👍🏽 👍🏽",
] * 4


def small_tokenizer() -> tokenizers.Tokenizer:
    """Train a byte-level BPE of some 350 tokens with Qwen's special tokens."""
    library = _byte_level(tokenizers.Tokenizer(models.BPE()))
    library.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    library.train_from_iterator(CORPUS, trainer)
    return _with_added_tokens(library)


def substring_tokenizer(text: str) -> tokenizers.Tokenizer:
    """Return a tokenizer that has every stretch of the UTF-8 bytes of `text` as one token."""
    word = spelled(text)
    stretches = {word[i:j] for i in range(len(word)) for j in range(i + 1, len(word) + 1)}
    vocabulary = {piece: index for index, piece in enumerate(sorted(stretches))}
    return _with_added_tokens(_byte_level(tokenizers.Tokenizer(models.BPE(vocabulary, []))))


def spelled(text: str) -> str:
    """Return `text` as byte-level BPE spells it: one character per UTF-8 byte."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in byte_level.pre_tokenize_str(text))


def save(library: tokenizers.Tokenizer, folder: Path) -> Path:
    """Write tokenizer.json into `folder` and return its path."""
    path = folder / "tokenizer.json"
    library.save(str(path))
    return path


def _byte_level(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def _with_added_tokens(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    library.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    library.add_tokens([AddedToken(text, normalized=False) for text in PLAIN_ADDED])
    return library
