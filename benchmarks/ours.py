"""Our runtime as a child of a benchmark: plain decoding, no drafter.

Started by the scripts beside it: python ours.py BUNDLE THREADS
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from serving import Request, serve

PACKAGES = ("dflash-onnx", "onnxruntime", "numpy")


class Ours:
    """A bundle; every request is a new conversation, so nothing is reused."""

    def __init__(self, bundle: Path, threads: int) -> None:
        from dflash_onnx.runtime import load

        self._model = load(bundle, threads=threads)

    def generate(self, request: Request, on_token: Callable[[int], object]) -> None:
        """Answer from the ids."""
        from dflash_onnx.runtime.options import make_options
        from dflash_onnx.runtime.plan import PlanBuilder

        builder = PlanBuilder()
        builder.text(request.ids)
        options = make_options(max_new_tokens=request.new_tokens, ignore_stop=True)
        conversation = self._model.conversation(draft="none")
        for delta in conversation.generate_plan(builder.plan(), options):
            for token_id in delta.token_ids:
                on_token(token_id)


if __name__ == "__main__":
    serve(lambda: Ours(Path(sys.argv[1]), int(sys.argv[2])), PACKAGES)
