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
    """A folder that optimum-intel exported, on the CPU in fp32 as our graphs are.

    Prefix caching is off, because repeats would find their prompt already read.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        import openvino_genai as genai

        self._genai: Any = genai
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = 4096
        properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
        properties |= {"KV_CACHE_PRECISION": "f32", "scheduler_config": scheduler}
        self._pipeline = genai.VLMPipeline(str(folder), "CPU", **properties)
        self._checked = False

    def generate(self, request: Request, on_token: Callable[[int], object]) -> None:
        """Answer the text, which its tokenizer reads as the same ids."""
        config = self._genai.GenerationConfig(max_new_tokens=request.new_tokens, ignore_eos=True)
        config.apply_chat_template = False
        config.do_sample = False
        self._check(request)
        self._pipeline.generate(
            request.text, generation_config=config, streamer=self._streamer(on_token)
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

    def _streamer(self, on_token: Callable[[int], object]) -> Any:
        base: Any = self._genai.StreamerBase
        status = self._genai.StreamingStatus.RUNNING

        class Streamer(base):
            """Passes token ids on, one or several at a time."""

            def write(self, tokens: int | list[int]) -> Any:
                for token in [tokens] if isinstance(tokens, int) else tokens:
                    on_token(token)
                return status

            def end(self) -> None:
                """Nothing is held back."""

        return Streamer()


def main() -> None:
    """Compare."""
    from common import compare, parser

    compare(parser(__doc__, "OPENVINO_MODEL").parse_args(), "openvino-genai", __file__)


if __name__ == "__main__":
    serve_or(main, OpenVino, PACKAGES)
