"""Checkpoint to bundle: safetensors, weight transforms, manifest, atomic write.

Knows onnx through `models.graphs`; runs no session and never imports torch or transformers.
"""
