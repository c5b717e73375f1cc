"""Bundle to tokens: sessions, caches, drafting, verification, sampling, images, command line.

Knows onnxruntime and NumPy; never imports onnx or torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..models.errors import (
    ContextError,
    DflashOnnxError,
    ExportError,
    ImageError,
    ManifestError,
    PromptError,
    ProviderError,
)

if TYPE_CHECKING:
    from .conversation import Conversation, Generation
    from .model import Model, load
    from .results import Delta, Result, Round

__all__ = [
    "ContextError",
    "Conversation",
    "Delta",
    "DflashOnnxError",
    "ExportError",
    "Generation",
    "ImageError",
    "ManifestError",
    "Model",
    "PromptError",
    "ProviderError",
    "Result",
    "Round",
    "load",
]

# Imported when they are first asked for: a command does not wait for what only others need.
_HOMES = {
    "Conversation": ".conversation",
    "Delta": ".results",
    "Generation": ".conversation",
    "Model": ".model",
    "Result": ".results",
    "Round": ".results",
    "load": ".model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
