"""The run command: a prompt and images in, text out, with statistics and traces on request."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..models.errors import PromptError
from .conversation import Generation
from .drafters.policy import HolePolicy
from .estimate import WARN_ROWS, prefill_seconds
from .model import Model, load
from .options import ACCEPT_RULES, GenerateOptions, make_options
from .plan import PromptPlan
from .results import Memory, Result, Round


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = commands.add_parser("run", help="answer a prompt, speculatively")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the prompt; - or nothing reads stdin"
    )
    parser.add_argument("--image", action="append", default=[], metavar="F", help="repeatable")
    parser.add_argument(
        "--max-pixels", type=int, metavar="N", help="scale larger images down to N pixels"
    )
    _add_draft_options(parser)
    _add_sampling_options(parser)
    parser.add_argument("--provider", default="cpu", metavar="P")
    parser.add_argument("--chunk", type=int, metavar="N", help="prefill rows per call")
    parser.add_argument("--stats", action="store_true", help="statistics on stderr")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="one JSON line per round")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add_draft_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft", metavar="NAME", help="none, lookup, mtp or a drafter of the bundle"
    )
    parser.add_argument(
        "--draft-tokens", type=draft_tokens, default="auto", metavar="N",
        help="drafts per round at most, or auto: as many as pay (default)",
    )  # fmt: skip
    policies = ", ".join(p.value for p in HolePolicy)
    parser.add_argument("--holes", metavar="POLICY", help=policies)
    parser.add_argument("--hole-rows", type=int, metavar="N", help="rows a hole is filled with")
    parser.add_argument("--accept", default="equal", help=" or ".join(ACCEPT_RULES))


def draft_tokens(value: str) -> int | str:
    """A number of drafts, or auto."""
    return value if value == "auto" else int(value)


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, metavar="K")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P")
    parser.add_argument("--presence-penalty", type=float, default=0.0, metavar="X")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--stop", action="append", default=[], metavar="S", help="repeatable")


def execute(options: argparse.Namespace) -> None:
    """Answer the prompt and print what was asked for."""
    made = _generate_options(options)
    with _trace(options.trace) as observer:
        result = _answer(options, made, observer)
    if options.json:
        print(json.dumps(result.to_json(), ensure_ascii=False))
    if options.stats:
        print(format_stats(result), file=sys.stderr)


def _answer(
    options: argparse.Namespace, made: GenerateOptions, observer: Callable[[Round], None]
) -> Result:
    model = load(options.bundle, options.provider, max_pixels=options.max_pixels)
    conversation = model.conversation(
        options.draft,
        holes=options.holes,
        hole_rows=options.hole_rows,
        draft_tokens=options.draft_tokens,
    )
    plan = model.plan(_prompt(options), options.image)
    conversation.output_budget(plan, made.max_new_tokens)
    _warn_about_size(model, plan)
    generation = conversation.generate_plan(plan, made).on_round(observer)
    return _print_text(generation, sys.stdout.isatty() and not options.json, options.json)


def _generate_options(options: argparse.Namespace) -> GenerateOptions:
    return make_options(
        max_new_tokens=options.max_new_tokens,
        stop=tuple(options.stop),
        chunk=options.chunk,
        accept=options.accept,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        rng_seed=options.seed,
    )


def _prompt(options: argparse.Namespace) -> str:
    """The prompt argument, or stdin when it is - or missing."""
    if options.prompt not in (None, "-"):
        return options.prompt
    if options.prompt is None and sys.stdin.isatty():
        if options.image:
            return ""
        raise PromptError("no prompt was given; pass it as an argument or on stdin.")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise PromptError(f"stdin is not UTF-8 text (byte {error.start}).") from None


def _warn_about_size(model: Model, plan: PromptPlan) -> None:
    if plan.num_image_rows > WARN_ROWS:
        seconds = prefill_seconds(model, plan)
        print(
            f"warning: the images take {plan.num_image_rows} rows; reading them will take about "
            f"{seconds:.0f} s. --max-pixels lowers both.",
            file=sys.stderr,
        )


def _print_text(generation: Generation, streaming: bool, silent: bool) -> Result:
    """Print text as it comes on a terminal, and as a whole elsewhere; the loop is the same."""
    for delta in generation:
        if streaming:
            print(delta.text, end="", flush=True)
    result = generation.result()
    if not silent:
        print("" if streaming else result.text)
    return result


@contextmanager
def _trace(path: Path | None) -> Iterator[Callable[[Round], None]]:
    if path is None:
        yield lambda record: None
        return
    try:
        handle = path.open("w", encoding="utf-8")
    except OSError as error:
        raise PromptError(f"the trace file {path} cannot be written: {error.strerror}.") from None
    with handle:
        yield lambda record: print(json.dumps(record.to_json()), file=handle, flush=True)


def format_identity(difference: float | None) -> str:
    """What the probe at load found, for people."""
    if difference == 0:
        return "a block's rows equal single steps bit for bit on this machine"
    return f"a block's rows differ from single steps by up to {difference:.2g}; near ties may flip"


def format_memory(memory: Memory) -> str:
    """Memory of a sequence, for people."""
    parts = {
        "keys and values": memory.key_value_bytes,
        "recurrent state": memory.state_bytes,
        "its snapshots": memory.snapshot_bytes,
        "draft cache": memory.draft_bytes,
        "encoded images": memory.image_bytes,
        "process": memory.process_bytes,
    }
    return ", ".join(
        f"{name} {size / 1e6:.2f} MB" for name, size in parts.items() if size is not None
    )


def format_stats(result: Result) -> str:
    """The statistics a person wants to know."""
    draft, timings = result.draft, result.timings
    policy = f", holes {draft.policy}" if draft.policy else ""
    rate = draft.accepted / draft.drafted if draft.drafted else 0.0
    return "\n".join(
        (
            f"prompt    {result.prompt_tokens} tokens ({timings.reused_rows} reused) in "
            f"{timings.prefill_seconds:.2f} s, of which vision {timings.vision_seconds:.2f} s",
            f"answer    {result.output_tokens} tokens, {timings.tokens_per_second:.1f} tokens/s, "
            f"finished by {result.finish_reason}",
            f"draft     {draft.name} ({draft.state}{policy}): {draft.accepted} of {draft.drafted} "
            f"accepted ({rate:.0%}), {draft.mean_accepted_length:.2f} tokens per target call",
            f"length    {draft.length}",
            f"holes     {len(draft.holes)} holes {list(map(list, draft.holes))}, "
            f"{draft.seeded_rows} seeded rows, {draft.skipped_spans} skipped spans",
            f"target    {timings.target_calls} calls in {draft.rounds} rounds",
            f"memory    {format_memory(result.memory)}",
            f"time      draft {timings.draft_seconds:.2f} s, verify {timings.verify_seconds:.2f} s "
            f"of {timings.decode_seconds:.2f} s",
            f"identity  {format_identity(result.provider['block_difference'])}",
            f"provider  {', '.join(f'{k} {v}' for k, v in result.provider.items())}",
        )
    )
