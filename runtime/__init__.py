"""Bundle to tokens: sessions, caches, drafting, verification, sampling, images, command line.

Knows onnxruntime and NumPy; never imports onnx or torch.
"""

from ..models.errors import (
    ContextError,
    DflashOnnxError,
    ExportError,
    ImageError,
    ManifestError,
    PromptError,
    ProviderError,
)
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
