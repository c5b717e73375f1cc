"""Plain decoding and prefill against transformers on torch: same ids, same threads, interleaved.

python benchmarks/against_transformers.py BUNDLE CHECKPOINT --peer-python TORCH_PYTHON
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving import Request, serve_or

PACKAGES = ("transformers", "torch")


class Transformers:
    """A checkpoint in fp32; the loop asks for one row of logits, as `generate` does."""

    def __init__(self, checkpoint: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForImageTextToText

        torch.set_num_threads(threads)
        self._torch: Any = torch
        model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
        self._model = model.eval()

    def generate(self, request: Request, on_token: Callable[[int], object]) -> None:
        """Answer with a new cache."""
        ids, cache = self._torch.tensor([request.ids]), None
        with self._torch.inference_mode():
            for _ in range(request.new_tokens):
                output = self._model(
                    input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
                )
                cache = output.past_key_values
                ids = output.logits[:, -1].argmax(-1, keepdim=True)
                on_token(int(ids))


def main() -> None:
    """Compare."""
    from common import compare, parser

    compare(parser(__doc__, "CHECKPOINT").parse_args(), "transformers", __file__)


if __name__ == "__main__":
    serve_or(main, Transformers, PACKAGES)
