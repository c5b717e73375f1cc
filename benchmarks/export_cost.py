"""Time and peak memory of our export against onnxruntime-genai's builder, and of running both.

    python benchmarks/export_cost.py CHECKPOINT WORK_FOLDER --peer-python GENAI_PYTHON

Exports alternate; each is a process of its own, and so is each run of a 512-token prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import Child, make_prompt, our_command

HERE = Path(__file__).parent
PEER = "onnxruntime-genai"
# Its int4 in our format: blocks of 32 with 8-bit activations.
INT4 = ["int4_block_size=32", "int4_accuracy_level=4"]


def our_export(options: argparse.Namespace, output: Path) -> list[str]:
    """Our command line, by default with the check that it makes."""
    program = "import sys; from dflash_onnx.runtime.cli import main; sys.exit(main())"
    paths = ["export", str(options.checkpoint), "-o", str(output)]
    check = ["--skip-check"] if options.skip_check else []
    return [sys.executable, "-c", program, *paths, "--precision", options.precision, *check]


def genai_export(options: argparse.Namespace, output: Path) -> list[str]:
    """The builder's command line; an MTP head would give a package that does not load on CPU."""
    module = [options.peer_python, "-m", "onnxruntime_genai.models.builder"]
    paths = ["-i", str(options.checkpoint), "-o", str(output), "-c", f"{output}.cache"]
    extra = ["exclude_mtp=true"] if _is_hybrid(options.checkpoint) else []
    extra += INT4 if options.precision == "int4" else []
    named = ["--extra_options", *extra] if extra else []
    return [*module, *paths, "-p", options.precision, "-e", "cpu", *named]


def _is_hybrid(checkpoint: Path) -> bool:
    return json.loads((checkpoint / "config.json").read_text())["model_type"] == "qwen3_5"


def export(command: Sequence[str], output: Path) -> dict[str, float]:
    """Run one export; wall and CPU seconds, and the peak memory of its process."""
    shutil.rmtree(output, ignore_errors=True)
    if hasattr(os, "sync"):  # not on Windows
        # What the export before this one still has to write would slow it down.
        os.sync()
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors[-2000:]}")
    return {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_rss_mib": usage.ru_maxrss / 1024,
        "bytes": sum(f.stat().st_size for f in output.rglob("*") if f.is_file()),
    }


def exports(options: argparse.Namespace, folders: dict[str, Path]) -> dict[str, Any]:
    """Medians of alternating exports."""
    commands = {
        "ours": our_export(options, folders["ours"]),
        PEER: genai_export(options, folders[PEER]),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(options.repeats):
        for name, command in commands.items():
            found[name].append(export(command, folders[name]))
    return {
        name: {key: median(run[key] for run in runs) for key in runs[0]}
        for name, runs in found.items()
    }


def run_memory(options: argparse.Namespace, folders: dict[str, Path]) -> dict[str, Any]:
    """Memory of a fresh process of each after one prompt and its answer."""
    prompt = make_prompt(folders["ours"] / "tokenizer.json", options.prompt_tokens, 0)
    peer = [options.peer_python, HERE / "against_genai.py", "--serve", folders[PEER]]
    commands = {
        "ours": our_command(folders["ours"], options.threads),
        PEER: [*peer, "--threads", str(options.threads)],
    }
    found = {}
    for name, command in commands.items():
        child = Child(command, options.threads)
        run = child.run(prompt, options.new_tokens)
        child.close()
        found[name] = {key: run[key] for key in run if key.endswith("_mib")}
        found[name] |= {"loaded_rss_mib": child.loaded["rss_mib"]}
        found[name] |= {"load_seconds": child.loaded["load_seconds"]}
    return found


def ratios(figures: dict[str, dict[str, float]]) -> dict[str, float]:
    """Ours over the peer's: below 1 is less time or memory."""
    return {key: figures["ours"][key] / figures[PEER][key] for key in figures["ours"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("work", type=Path, help="folder for what is exported")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with the peer")
    parser.add_argument("--precision", choices=("fp32", "int4"), default="fp32")
    parser.add_argument("--skip-check", action="store_true", help="as the builder, which has none")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of the runs")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    folders = {name: options.work / f"{name}-{options.precision}" for name in ("ours", PEER)}
    load = os.getloadavg()[0]
    exported = exports(options, folders)
    ran = run_memory(options, folders)
    report = {
        "checkpoint": options.checkpoint.name,
        "precision": options.precision,
        "self_check": not options.skip_check,
        "load": [load, os.getloadavg()[0]],
        "export": exported | {"ours/peer": ratios(exported)},
        "run": ran | {"ours/peer": ratios(ran)},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
