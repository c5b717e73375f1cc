"""Plain decoding and prefill against onnxruntime-genai: same ids, same threads, interleaved.

python benchmarks/against_genai.py BUNDLE GENAI_MODEL --peer-python GENAI_PYTHON
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving import Request, serve_or

PACKAGES = ("onnxruntime-genai", "onnxruntime", "numpy")


class GenAi:
    """A folder that its model builder wrote."""

    def __init__(self, folder: Path, threads: int) -> None:
        import onnxruntime_genai as genai

        self._genai: Any = genai
        config = genai.Config(str(folder))
        session = {"session_options": {"intra_op_num_threads": threads}}
        config.overlay(json.dumps({"model": {"decoder": session}}))
        self._model = genai.Model(config)
        self._tokenizer = self._open_tokenizer()

    def _open_tokenizer(self) -> Any:
        """Not used, but ours has one too and it counts as memory; Qwen3.5's is unknown to it."""
        try:
            return self._genai.Tokenizer(self._model)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return None

    def generate(self, request: Request, on_token: Callable[[int], object]) -> None:
        """Answer with a new generator."""
        params = self._genai.GeneratorParams(self._model)
        longest = len(request.ids) + request.new_tokens
        params.set_search_options(do_sample=False, max_length=longest, min_length=longest)
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens(request.ids)
        for _ in range(request.new_tokens):
            generator.generate_next_token()
            on_token(generator.get_next_tokens()[0])


def main() -> None:
    """Compare."""
    from common import compare, parser

    compare(parser(__doc__, "GENAI_MODEL").parse_args(), "onnxruntime-genai", __file__)


if __name__ == "__main__":
    serve_or(main, GenAi, PACKAGES)
