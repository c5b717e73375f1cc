"""The tokenizer of tiny checkpoints, a small byte-level BPE as Qwen's, and their chat template."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

SPECIALS = tuple(
    f"<|{name}|>"
    for name in "endoftext im_start im_end vision_start vision_end vision_pad image_pad video_pad "
    "mask".split()
)
# The head is wider than the tokenizer, as in released models: these columns must never win.
SPARE_COLUMNS = 8
# Qwen's own word splitter.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = """Read the text in the image and describe what you see. Answer in one short sentence.
The page shows a table with three columns: name, price and date. The total is 42.50 euro.
A small red house stands near the river, and two people walk over the old stone bridge.
Compare both pictures. Which one is larger, and what has changed between the first and the second?
user assistant system picture document invoice number street city country
"""
CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or 'video' in part -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part %}{{ part.text }}{% endif %}
{%- endfor %}
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def train_tokenizer(size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `size` entries, special tokens last."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = [first + last for first in syllables for last in syllables]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splitter = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splitter, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=size - len(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The made-up words only fill what the text cannot, hence the weight on the text.
    tokenizer.train_from_iterator([TEXT] * 100 + words[: 2 * size], trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIALS])
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"cannot train {size} entries, got {tokenizer.get_vocab_size()}")
    return tokenizer
