"""The errors a user can meet, one base class and six kinds.

A message says what went wrong, where (file, key or input), what was expected and found, and what
to do. The command line prints it as one line; embedders catch `DflashOnnxError`.
"""

from __future__ import annotations


class DflashOnnxError(Exception):
    """Base class of every error this package raises for a user."""


class ExportError(DflashOnnxError):
    """A checkpoint cannot be turned into a bundle."""


class ManifestError(DflashOnnxError):
    """A bundle is incomplete, damaged, of another version, or does not fit its manifest."""


class ProviderError(DflashOnnxError):
    """An ONNX Runtime installation or execution provider cannot do what was asked."""


class ImageError(DflashOnnxError):
    """An image cannot be read, or has a shape the model does not take."""


class PromptError(DflashOnnxError):
    """Messages, images or options of a request do not fit together."""


class ContextError(DflashOnnxError):
    """Prompt and answer do not fit the context limit."""
