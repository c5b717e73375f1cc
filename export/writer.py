"""Fills a bundle folder: data files first, then the graphs that name them, the manifest last.

Knows the order and what is shared; the networks, the checkpoint and the pair checks are elsewhere.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import onnx

from ..models.config import TargetConfig
from ..models.graphs.mtp import build_mtp
from ..models.graphs.recurrence import Recurrence
from ..models.graphs.target import build_head, build_target
from ..models.graphs.vision import build_vision
from ..models.manifest import (
    FORMAT_VERSION,
    DataFile,
    DraftSpec,
    Manifest,
    Versions,
    write_manifest,
)
from ..models.precision import FLOATS, Precisions
from ..models.stored import StoredTensor
from .checkpoint import Checkpoint, TensorInfo
from .data_files import DataJob, Written, write_data
from .drafts import Draft, draft_spec, table_spec, write_draft_graphs, write_draft_weights
from .graphs import GraphWriter
from .progress import progress
from .sidecars import Sidecars
from .store import DataWriter, ToHalf
from .weights import (
    HEAD,
    HEAD_PREFIXES,
    MTP_PREFIXES,
    TABLE,
    VISION_PREFIXES,
    Wanted,
    joined,
    matrix,
    mtp_weights,
    one,
    refuse_leftovers,
    resolve,
    text_prefixes,
    text_weights,
    vision_weights,
)

NUM_TOP = 64

Found = list[tuple[Wanted, list[TensorInfo]]]


class BundleWriter:
    """Writes one bundle into an empty folder."""

    def __init__(
        self, folder: Path, precisions: Precisions, progress: bool, to_half: ToHalf
    ) -> None:
        self._folder = folder
        self._precisions = precisions
        self._progress = progress
        self._to_half = to_half
        self._graphs = GraphWriter(folder)
        self._files: dict[str, DataFile] = {}
        self._sidecars: dict[str, DataFile] = {}
        self._tensors: dict[str, StoredTensor] = {}

    def write(
        self,
        checkpoint: Checkpoint,
        target: TargetConfig,
        coming_sidecars: Callable[[], Sidecars],
        drafts: list[Draft],
    ) -> None:
        """Write everything; raises `ExportError` for the first thing that does not fit.

        The sidecars are asked for once weights are being written.
        """
        plan = target_plan(checkpoint, target, self._precisions)
        sources = (checkpoint, *(d.checkpoint for d in drafts))
        total = sum(self._num_bytes(source.tensors.values()) for source in sources)
        jobs = [*self._target_jobs(plan), *(self._draft_job(draft, target) for draft in drafts)]
        with progress(self._progress, total) as bar:
            written, sidecars = write_data(self._folder, jobs, bar, coming_sidecars, self._to_half)
        self._files = {file: found.summary for file, found in written.items()}
        for file in plan:
            self._tensors |= written[file].tensors
        digest = self._digest(checkpoint, plan)
        specs = {
            draft.name: self._write_draft(draft, target, digest, written[_data_file(draft)])
            for draft in drafts
        }
        taps = tuple(sorted({i for d in drafts for i in d.config.target_layer_ids}))
        selectors = (d.config.selector for d in drafts)
        most = max([NUM_TOP, *(s.top_k for s in selectors if s)])
        self._num_top = min(most, target.text.vocab_size)
        self._write_target_graphs(target, taps)
        self._write_sidecar("tokenizer.json", sidecars.tokenizer_json)
        self._write_sidecar("chat_template.jinja", sidecars.chat_template.encode("utf-8"))
        write_manifest(self._manifest(target, sidecars, taps, digest, specs), self._folder)

    def _target_jobs(self, plan: dict[str, Found]) -> Iterator[DataJob]:
        for file, found in plan.items():
            size = self._num_bytes(info for _, infos in found for info in infos)
            precision = self._precisions.of(Path(file).stem)
            yield DataJob(file, precision, size, partial(_fill, found))

    def _draft_job(self, draft: Draft, target: TargetConfig) -> DataJob:
        size = self._num_bytes(draft.checkpoint.tensors.values())
        fill = partial(write_draft_weights, draft, target)
        return DataJob(_data_file(draft), self._precisions.draft, size, fill)

    def _write_sidecar(self, name: str, content: bytes) -> None:
        (self._folder / name).write_bytes(content)
        self._sidecars[name] = DataFile(len(content), hashlib.sha256(content).hexdigest())

    def _write_draft(
        self, draft: Draft, target: TargetConfig, digest: str, data: Written
    ) -> DraftSpec:
        write_draft_graphs(draft, target, data.tensors, self._graphs, NUM_TOP)
        return draft_spec(draft, data.tensors, data.summary.sha256, digest)

    def _write_target_graphs(self, target: TargetConfig, taps: tuple[int, ...]) -> None:
        text, tensors = target.text, self._tensors
        head = HEAD if HEAD in tensors else TABLE
        width, vocab_size = text.hidden_size, text.vocab_size
        if target.vision is not None:
            self._graphs.write("vision", build_vision(target.vision, tensors))
        forms: dict[str, Recurrence] = {"target": "fused"}
        if text.linear is not None:
            forms["target.portable"] = "chunked"
        for name, recurrence in forms.items():
            model = build_target(text, target.num_deepstack, taps, tensors, recurrence)
            self._graphs.write(name, model)
        model = build_head("head", head, width, vocab_size, self._num_top, tensors)
        self._graphs.write("head", model)
        if "mtp.data" in self._files:
            self._graphs.write("mtp", build_mtp(text, tensors))

    def _manifest(
        self,
        target: TargetConfig,
        sidecars: Sidecars,
        taps: tuple[int, ...],
        digest: str,
        drafts: dict[str, DraftSpec],
    ) -> Manifest:
        return Manifest(
            format_version=FORMAT_VERSION,
            family=target.family,
            precision=self._precisions,
            versions=Versions(importlib.metadata.version("dflash-onnx"), onnx.__version__),
            target=target,
            image=sidecars.image,
            tokenizer_size=sidecars.tokenizer_size,
            stop_ids=sidecars.stop_ids,
            banned_ids=sidecars.banned_ids,
            tap_layers=taps,
            tap_before_deepstack=True,
            num_top=self._num_top,
            target_digest=digest,
            embedding=table_spec(self._tensors[TABLE]),
            graphs=self._graphs.specs,
            data_files=self._files,
            sidecars=self._sidecars,
            drafts=drafts,
            mtp="mtp.data" in self._files,
        )

    def _digest(self, checkpoint: Checkpoint, files: Iterable[str]) -> str:
        """Identity of the target: its configuration and every byte of its files."""
        source = json.dumps(checkpoint.config, sort_keys=True)
        source += "".join(self._files[file].sha256 for file in files)
        return hashlib.sha256(source.encode()).hexdigest()

    def _num_bytes(self, tensors: Iterable[TensorInfo]) -> int:
        """About how large tensors are when written, for the progress."""
        width = {"fp32": 4, "fp16": 2}.get(self._precisions.target, 1)
        return width * sum(math.prod(tensor.shape) for tensor in tensors)


def _fill(found: Found, writer: DataWriter) -> None:
    for want, infos in found:
        writer.add(want.name, infos, want.shape, want.matrix)


def _data_file(draft: Draft) -> str:
    return f"{draft.name}.data"


def target_plan(
    checkpoint: Checkpoint, target: TargetConfig, precisions: Precisions
) -> dict[str, Found]:
    """Data file -> tensors to write, with every tensor of the checkpoint accounted for."""
    text, prefixes = target.text, text_prefixes(target)
    size = (text.vocab_size, text.hidden_size)
    table = one(TABLE, *size)
    plan = {
        "embedding.data": resolve([table], checkpoint, prefixes),
        "target.data": resolve(text_weights(text), checkpoint, prefixes),
    }
    if target.vision is not None:
        plan["vision.data"] = resolve(vision_weights(target.vision), checkpoint, VISION_PREFIXES)
    if has_mtp(checkpoint, target):
        plan["mtp.data"] = resolve(mtp_weights(text), checkpoint, MTP_PREFIXES)
    ignored = {f"{p}rotary_emb.": "recomputed" for p in prefixes}
    if text.tied_head:
        ignored[HEAD] = "tied: the embedding table is the head"
    if not text.tied_head:
        plan["head.data"] = resolve([matrix(HEAD, *size)], checkpoint, HEAD_PREFIXES)
    elif precisions.head not in FLOATS:
        # A quantised head is a matrix of its own, made from the table.
        head = joined(HEAD, ((TABLE, size),))
        plan["head.data"] = resolve([head], checkpoint, prefixes)
    used = [info for found in plan.values() for _, infos in found for info in infos]
    refuse_leftovers(checkpoint, used, ignored)
    return plan


def has_mtp(checkpoint: Checkpoint, target: TargetConfig) -> bool:
    """Whether the MTP head that the configuration speaks of is among the tensors.

    A checkpoint saved by transformers has lost it, and is a whole target without.
    """
    prefixes = tuple(f"{p}mtp." for p in MTP_PREFIXES)
    return target.mtp and any(name.startswith(prefixes) for name in checkpoint.tensors)
