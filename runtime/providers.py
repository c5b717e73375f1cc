"""Which ONNX Runtime is installed, and how a session is opened on a provider.

Knows distributions, provider names and thread counts; knows no graph.
"""

from __future__ import annotations

import importlib.metadata
import os
from types import ModuleType

from ..models.errors import ProviderError

PROVIDERS = {"cpu": "CPUExecutionProvider"}
# Those with a kernel for the gated delta rule; the others run its portable form (ort.md, 2).
LINEAR_ATTENTION = ("cpu", "cuda", "webgpu")


def installed_distributions() -> list[str]:
    """The installed distributions that own the import package `onnxruntime`."""
    found = importlib.metadata.distributions()
    return sorted({owner.metadata["Name"] for owner in found if _owns_onnxruntime(owner)})


def _owns_onnxruntime(distribution: importlib.metadata.Distribution) -> bool:
    """As `packages_distributions` finds it, which takes a fifth of a second for all packages."""
    packages = distribution.read_text("top_level.txt")
    if packages:
        return "onnxruntime" in packages.split()
    return "\nonnxruntime/" in "\n" + (distribution.read_text("RECORD") or "")


def check_distributions(found: list[str]) -> None:
    """Exactly one may be installed; `ProviderError` says which to install or remove."""
    if not found:
        raise ProviderError(
            "ONNX Runtime is not installed. Install one build: pip install 'dflash-onnx[cpu]' "
            "(or cuda, rocm, directml, coreml, webgpu, openvino)."
        )
    if len(found) > 1:
        raise ProviderError(
            f"{len(found)} builds of ONNX Runtime are installed ({', '.join(found)}) and overwrite "
            f"each other. Run: pip uninstall {' '.join(found)}; then install the one you want."
        )


def import_onnxruntime() -> ModuleType:
    """Import onnxruntime after checking that exactly one build is installed."""
    check_distributions(installed_distributions())
    try:
        import onnxruntime
    except ImportError as error:
        raise ProviderError(f"ONNX Runtime is installed but does not load: {error}") from error
    return onnxruntime


def provider_name(provider: str) -> str:
    """The execution provider of a short name; `ProviderError` lists what this version runs on."""
    if provider not in PROVIDERS:
        raise ProviderError(
            f"provider {provider!r} is not supported by this version "
            f"(supported: {', '.join(PROVIDERS)})."
        )
    return PROVIDERS[provider]


def num_threads() -> int:
    """Processors this process may use, which in a container is fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
