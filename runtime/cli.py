"""The command line `dflash-onnx`: parse, call, print; one line on stderr for every user error.

Text goes to stdout, progress and statistics to stderr. Knows no networks and no loops.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import NoReturn, TextIO

from ..models.errors import DflashOnnxError

# Each has a module of its own.
COMMANDS = ("demo", "export", "run", "bench", "info")
EXIT_ERROR, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 130, 143


def build_parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of some commands; the modules of others are not imported."""
    parser = argparse.ArgumentParser(
        prog="dflash-onnx",
        description="DFlash speculative decoding for vision-language models on ONNX Runtime.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in names:
        module = import_module(f".cli_{name}", __package__)
        command = module.add_parser(commands)
        command.add_argument("--debug", action="store_true", help="show tracebacks of errors")
        command.set_defaults(execute=module.execute)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns 0, 1 for an error, 2 for wrong usage (by argparse)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    named = [name for name in COMMANDS if name in arguments[:1]]
    options = build_parser(named or COMMANDS).parse_args(arguments)
    _speak_utf8(sys.stdout, sys.stderr)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        options.execute(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("dflash-onnx: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader went away; point stdout elsewhere so that the exit does not fail on it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except DflashOnnxError as error:
        if options.debug:
            raise
        print(f"dflash-onnx: {_one_line(error)}", file=sys.stderr)
        return EXIT_ERROR
    except Exception as error:
        if options.debug:
            raise
        print(
            f"dflash-onnx: unexpected {type(error).__name__}: {_one_line(error)} "
            "(run again with --debug for the traceback, and report it)",
            file=sys.stderr,
        )
        return EXIT_ERROR
    return 0


def _speak_utf8(*streams: TextIO) -> None:
    """An answer must not be lost because a pipe was opened in another encoding."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Leave by an exception, so that a half-written export is removed on the way out."""
    sys.exit(EXIT_TERMINATED)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
