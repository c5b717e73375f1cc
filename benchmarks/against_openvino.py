"""Plain decoding and prefill against OpenVINO GenAI: same ids, same threads, interleaved.

python benchmarks/against_openvino.py BUNDLE OPENVINO_MODEL --peer-python OPENVINO_PYTHON
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving import Request, serve_or

PACKAGES = ("openvino-genai", "openvino", "openvino-tokenizers")


class OpenVino:
    """A folder that optimum-intel exported, on the CPU in fp32 as our graphs are."""

    def __init__(self, folder: Path, threads: int) -> None:
        import openvino_genai as genai

        self._genai: Any = genai
        self._pipeline = genai.VLMPipeline(str(folder), "CPU", **properties(threads), **scheduler())
        self._checked = False

    def generate(self, request: Request, on_token: Callable[[int], object]) -> None:
        """Answer the text, which its tokenizer reads as the same ids."""
        config = self._genai.GenerationConfig(max_new_tokens=request.new_tokens, ignore_eos=True)
        config.apply_chat_template = False
        config.do_sample = False
        self._check(request)
        self._pipeline.generate(
            request.text, generation_config=config, streamer=token_streamer(on_token)
        )

    def _check(self, request: Request) -> None:
        """On the first request, which is a warm-up, compare what the tokenizer makes of it."""
        if self._checked:
            return
        self._checked = True
        tokenizer = self._pipeline.get_tokenizer()
        ids = tokenizer.encode(request.text, add_special_tokens=False).input_ids.data[0].tolist()
        if ids != request.ids:
            raise SystemExit("OpenVINO's tokenizer reads the prompt as other ids.")


def properties(threads: int) -> dict[str, Any]:
    """Threads, and fp32 everywhere, the cache included."""
    precision = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    return {"INFERENCE_NUM_THREADS": threads} | precision


def scheduler(**settings: int) -> dict[str, Any]:
    """Prefix caching off: repeats would find their prompt read, and DFlash refuses it."""
    import openvino_genai as genai

    made = genai.SchedulerConfig()
    made.enable_prefix_caching = False
    made.max_num_batched_tokens = 4096
    for name, value in settings.items():
        setattr(made, name, value)
    return {"scheduler_config": made}


def token_streamer(on_token: Callable[[int], object]) -> Any:
    """A streamer that passes on token ids; its `calls` counts how often any came."""
    import openvino_genai as genai

    base: Any = genai.StreamerBase

    class Streamer(base):
        """Token ids come one or several at a time."""

        calls = 0

        def write(self, tokens: int | list[int]) -> Any:
            self.calls += 1
            for token in [tokens] if isinstance(tokens, int) else tokens:
                on_token(token)
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """Nothing is held back."""

    return Streamer()


def main() -> None:
    """Compare."""
    from common import compare, parser

    compare(parser(__doc__, "OPENVINO_MODEL").parse_args(), "openvino-genai", __file__)


if __name__ == "__main__":
    serve_or(main, OpenVino, PACKAGES)
