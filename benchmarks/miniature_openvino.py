"""Speculative and plain decoding of the trained miniature, here and with OpenVINO GenAI.

python benchmarks/miniature_openvino.py BUNDLE OPENVINO_TARGET OPENVINO_DRAFT --peer-python PYTHON

The same weights, held-out questions, threads and drafts a round; all settings take turns. Without
OpenVINO's models it measures ours alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from against_openvino import PACKAGES, properties, scheduler, token_streamer
from serving import Request, serve

PEER = "openvino-genai"


class OpenVino:
    """The miniature that optimum-intel exported, with and without its DFlash drafter."""

    def __init__(self, target: Path, draft: Path, threads: int) -> None:
        import openvino_genai as genai

        self._genai: Any = genai
        plain = properties(threads) | scheduler()
        drafting = properties(threads) | scheduler(**_blocks(target))
        drafting["draft_model"] = genai.draft_model(str(draft), "CPU", **properties(threads))
        self._pipelines = {
            "none": genai.VLMPipeline(str(target), "CPU", **plain),
            "dflash": genai.VLMPipeline(str(target), "CPU", **drafting),
        }

    def generate(self, request: Request, on_token: Callable[[int], object]) -> dict[str, Any]:
        """Answer with its own chat template, and say how many target calls the answer took."""
        from numpy import load
        from openvino import Tensor

        config = self._genai.GenerationConfig(max_new_tokens=request.new_tokens, do_sample=False)
        if request.draft != "none":
            config.num_assistant_tokens = request.draft_tokens
        streamer = token_streamer(on_token)
        images = [Tensor(load(file)[None]) for file in request.images]
        media = {"images": images} if images else {}
        found = self._pipelines[request.draft].generate(
            request.text, generation_config=config, streamer=streamer, **media
        )
        prompt_tokens = found.perf_metrics.get_num_input_tokens()
        # The prompt's own call emits the first token.
        return {"calls": streamer.calls - 1, "prompt_tokens": prompt_tokens}


def _blocks(target: Path) -> dict[str, int]:
    """A round of a hybrid takes drafts + 2 blocks; its own choice is too few. Others refuse any."""
    kind = json.loads((target / "config.json").read_text())["model_type"]
    return {"num_linear_attention_blocks": 32} if kind == "qwen3_5" else {}


def main() -> None:
    """Measure, and print a JSON line per number of threads."""
    from miniature_turns import explain, make_questions, measure

    options = _options()
    with TemporaryDirectory() as folder:
        questions = make_questions(options.seed, options.prompts, Path(folder))
        for threads in options.threads:
            load = os.getloadavg()[0]
            report = measure(options, questions, _peers(options, threads), threads)
            report |= {"load": [load, os.getloadavg()[0]]}
            explain(report)
            print(json.dumps(report), flush=True)


def _peers(options: argparse.Namespace, threads: int) -> dict[str, list[str | Path]]:
    """OpenVINO's child, if its models were given."""
    if options.draft is None:
        return {}
    models = [options.target, options.draft, str(threads)]
    return {PEER: [options.peer_python, __file__, "--serve", *models]}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("target", type=Path, nargs="?", metavar="OPENVINO_TARGET")
    parser.add_argument("draft", type=Path, nargs="?", metavar="OPENVINO_DRAFT")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with the peer")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompts", type=int, default=60, help="held-out questions")
    parser.add_argument("--draft-tokens", type=int, default=7, help="drafts a round")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=3, help="turns per process")
    parser.add_argument("--restarts", type=int, default=3, help="processes of each, one by one")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        target, draft, threads = Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
        serve(lambda: OpenVino(target, draft, threads), PACKAGES)
    else:
        main()
