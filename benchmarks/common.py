"""What all comparisons share: the prompt, the children, interleaved runs, medians and ratios.

Every engine is a child process (`serving`) that stays loaded; requests alternate between them, so
that a machine's moods hit both. Ratios are peer over ours: above 1 means that we are faster.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

HERE = Path(__file__).parent
# `decode` is from the first to the last token, `step` the median time between two.
PHASES = ("prefill", "decode", "step")
CLOCKS = tuple(f"{phase}_{kind}" for phase in PHASES for kind in ("seconds", "cpu_seconds"))
# A whole lower-case word with its space: text made of such tokens reads back as the same ids.
WORD = re.compile("Ġ[a-z]{3,}")


@dataclass(frozen=True)
class Prompt:
    """Token ids and the text that they come from."""

    ids: list[int]
    text: str

    @property
    def digest(self) -> str:
        """Identity of the ids."""
        return hashlib.sha256(np.array(self.ids, "<i8").tobytes()).hexdigest()[:16]


def make_prompt(tokenizer_file: Path, num_tokens: int, seed: int) -> Prompt:
    """Random words; the same ids whether a peer takes ids or text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    words = sorted(i for token, i in tokenizer.get_vocab().items() if WORD.fullmatch(token))
    ids = np.random.default_rng(seed).choice(words, num_tokens).tolist()
    text = tokenizer.decode(ids)
    if tokenizer.encode(text, add_special_tokens=False).ids != ids:
        raise SystemExit(f"seed {seed} gives words that do not read back as the same ids.")
    return Prompt(ids, text)


class Child:
    """An engine in its own process and environment."""

    def __init__(self, command: Sequence[str | Path], threads: int) -> None:
        self._command = [str(part) for part in command]
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        )
        self.loaded = self._read()

    def run(self, prompt: Prompt, new_tokens: int) -> dict[str, Any]:
        """One answer's figures, to a prompt of ids."""
        return self.ask({"ids": prompt.ids, "text": prompt.text, "new_tokens": new_tokens})

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One answer's figures; `request` has the fields of `serving.Request`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._command} ended with {self._process.wait()}.")
        return json.loads(line)


def our_command(bundle: Path, threads: int) -> list[str | Path]:
    """The child that runs our bundle, in this environment."""
    return [sys.executable, HERE / "ours.py", bundle, str(threads)]


def interleave(
    children: dict[str, Child], prompt: Prompt, new_tokens: int, repeats: int
) -> dict[str, list[dict[str, Any]]]:
    """One warm-up each, then `repeats` rounds; the order turns around every time."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in children}
    for repeat in range(repeats + 1):
        for name in list(children)[:: -1 if repeat % 2 else 1]:
            run = children[name].run(prompt, new_tokens)
            if len(run["token_ids"]) != new_tokens:
                raise SystemExit(f"{name} stopped after {len(run['token_ids'])} tokens.")
            if repeat:
                runs[name].append(run)
    return runs


def summary(runs: list[dict[str, Any]], prompt: Prompt, new_tokens: int) -> dict[str, float]:
    """Medians of the clocks, tokens a second, and memory after the last run."""
    clocks = {name: median(run[name] for run in runs) for name in CLOCKS}
    memory = {name: runs[-1][name] for name in runs[-1] if name.endswith("_mib")}
    return clocks | memory | {
        "prefill_tokens_per_second": len(prompt.ids) / clocks["prefill_seconds"],
        "decode_tokens_per_second": (new_tokens - 1) / clocks["decode_seconds"],
    }  # fmt: skip


def ratios(ours: list[dict[str, Any]], peer: list[dict[str, Any]]) -> dict[str, Any]:
    """Peer's median over ours for every clock, best over best, and the range over turns."""
    found: dict[str, Any] = {}
    for name in CLOCKS:
        key = name.removesuffix("_seconds")
        found[key] = median(r[name] for r in peer) / median(r[name] for r in ours)
        found[f"{key}_best"] = min(r[name] for r in peer) / min(r[name] for r in ours)
        pairs = [p[name] / o[name] for o, p in zip(ours, peer, strict=True)]
        found[f"{key}_range"] = [min(pairs), max(pairs)]
    return found


def agreement(ours: list[int], peer: list[int]) -> dict[str, Any]:
    """Leading tokens that both engines agree on, and the two that come next."""
    pairs = list(zip(ours, peer, strict=True))
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return {"equal_tokens": equal, "first_difference": pairs[equal : equal + 1]}


def parser(description: str, peer: str, default_repeats: int = 5) -> argparse.ArgumentParser:
    """The options of every comparison; `peer` names the second argument."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("bundle", type=Path, metavar="BUNDLE")
    made.add_argument("model", type=Path, metavar=peer)
    made.add_argument("--peer-python", default=sys.executable, help="interpreter with the peer")
    made.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    made.add_argument("--prompt-tokens", type=int, default=512)
    made.add_argument("--new-tokens", type=int, default=64)
    made.add_argument("--repeats", type=int, default=default_repeats, help="turns per process")
    made.add_argument("--restarts", type=int, default=2, help="processes of each, one by one")
    made.add_argument("--seed", type=int, default=0)
    return made


def compare(options: argparse.Namespace, peer: str, script: str | Path) -> None:
    """Measure ours against `script`, the peer's child, and print a JSON line per thread count."""
    prompt = make_prompt(options.bundle / "tokenizer.json", options.prompt_tokens, options.seed)
    for threads in options.threads:
        command = [options.peer_python, script, "--serve", options.model, "--threads", str(threads)]
        report = _measure(options, prompt, peer, command, threads)
        _explain(report, peer)
        print(json.dumps(report), flush=True)


def _measure(
    options: argparse.Namespace, prompt: Prompt, peer: str, command: Sequence, threads: int
) -> dict[str, Any]:
    load_before = os.getloadavg()[0]
    commands = {"ours": our_command(options.bundle, threads), peer: command}
    runs, found_versions = _take_turns(options, prompt, commands, threads)
    ours, theirs = runs["ours"], runs[peer]
    facts = {
        "threads": threads,
        "repeats": options.repeats,
        "restarts": options.restarts,
        "load": [load_before, os.getloadavg()[0]],
        "versions": found_versions,
        "bundle_digest": bundle_digest(options.bundle),
        "prompt_digest": prompt.digest,
        "prompt_tokens": len(prompt.ids),
        "new_tokens": options.new_tokens,
    }
    figures = {name: summary(found, prompt, options.new_tokens) for name, found in runs.items()}
    facts |= agreement(ours[-1]["token_ids"], theirs[-1]["token_ids"])
    return facts | {"ratios": ratios(ours, theirs)} | figures


def _take_turns(
    options: argparse.Namespace, prompt: Prompt, commands: dict[str, Sequence], threads: int
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, dict[str, str]]]:
    """Runs of all pairs of processes, and the versions that they name."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    found_versions = {}
    for restart in range(options.restarts):
        # Which pages a process gets is worth tens of percent of a large matrix product.
        order = list(commands)[:: -1 if restart % 2 else 1]
        children = {name: Child(commands[name], threads) for name in order}
        found = interleave(children, prompt, options.new_tokens, options.repeats)
        for name, child in children.items():
            child.close()
            runs[name] += found[name]
            found_versions[name] = child.loaded["versions"]
    return runs, found_versions


def bundle_digest(bundle: Path) -> str:
    """Identity of a bundle: that of its manifest, which names every file's."""
    return hashlib.sha256((bundle / "bundle.json").read_bytes()).hexdigest()[:16]


def _explain(report: dict[str, Any], peer: str) -> None:
    """The lines that a person wants to read, on stderr."""
    for name in ("ours", peer):
        figures = report[name]
        print(
            f"{name}, {report['threads']} threads: prefill "
            f"{figures['prefill_tokens_per_second']:.0f} tokens/s, decode "
            f"{figures['decode_tokens_per_second']:.1f} tokens/s, peak "
            f"{figures['peak_rss_mib']:.0f} MiB",
            file=sys.stderr,
        )
    ratio = report["ratios"]
    print(
        f"ours / {peer}: prefill {ratio['prefill']:.2f}x (CPU {ratio['prefill_cpu']:.2f}x), decode "
        f"{ratio['decode']:.2f}x (CPU {ratio['decode_cpu']:.2f}x, best step "
        f"{ratio['step_cpu_best']:.2f}x), "
        f"{report['equal_tokens']} of {report['new_tokens']} tokens equal, load {report['load']}",
        file=sys.stderr,
    )
