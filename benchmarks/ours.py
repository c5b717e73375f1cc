"""Our runtime as a child of a benchmark.

Started by the scripts beside it: python ours.py BUNDLE THREADS
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving import Request, serve

PACKAGES = ("dflash-onnx", "onnxruntime", "numpy")


class Ours:
    """A bundle; every request is a new conversation, so nothing is reused."""

    def __init__(self, bundle: Path, threads: int) -> None:
        from dflash_onnx.runtime import load

        self._model = load(bundle, threads=threads)

    def generate(self, request: Request, on_token: Callable[[int], object]) -> dict[str, Any]:
        """Answer, and say how many target calls it took after the prompt."""
        from dflash_onnx.runtime.options import make_options

        options = make_options(
            max_new_tokens=request.new_tokens, ignore_stop=request.ids is not None
        )
        drafting = {} if request.draft == "none" else {"draft_tokens": request.draft_tokens}
        conversation = self._model.conversation(draft=request.draft, **drafting)
        generation = conversation.generate_plan(self._plan(request), options)
        for delta in generation:
            for token_id in delta.token_ids:
                on_token(token_id)
        result = generation.result()
        return {"calls": len(generation.rounds), "prompt_tokens": result.prompt_tokens}

    def _plan(self, request: Request) -> Any:
        """The ids as they are, or the chat turn."""
        import numpy as np

        from dflash_onnx.runtime.plan import PlanBuilder

        if request.ids is None:
            return self._model.plan(request.text, [np.load(file) for file in request.images])
        builder = PlanBuilder()
        builder.text(request.ids)
        return builder.plan()


if __name__ == "__main__":
    serve(lambda: Ours(Path(sys.argv[1]), int(sys.argv[2])), PACKAGES)
