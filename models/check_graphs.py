"""Whether the graphs that a manifest states are the ones that its numbers call for.

Compares the manifest with itself: the graphs as files are held against it when they are opened.
"""

from __future__ import annotations

from collections.abc import Sequence

from .interfaces import Interface, interfaces, shapes_fit
from .manifest import Manifest, TensorSpec
from .requirements import Place


def check_graphs(place: Place, manifest: Manifest) -> None:
    """Raise `ManifestError` for the first graph that is not there or has another interface."""
    graphs, text = manifest.graphs, manifest.target.text
    if "target" in graphs:
        # First of all, as the interfaces below have an entry for every layer.
        names = [t.name for t in graphs["target"].outputs]
        attending = sum(name.startswith("present.") for name in names) // 2
        found = attending + sum(name.startswith("state_all.") for name in names)
        place.equal("target.text.num_layers", text.num_layers, found, "layers of the target graph")
    for name, expected in interfaces(manifest).items():
        place.require(name in graphs, "graphs", f"with one named {name!r}", sorted(graphs))
        _check_interface(
            place, f"graphs.{name}", graphs[name].inputs, graphs[name].outputs, expected
        )


def _check_interface(
    place: Place,
    key: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    expected: Interface,
) -> None:
    by_name = [sorted(specs, key=lambda t: t.name) for specs in (inputs, expected.inputs)]
    _check_tensors(place, f"{key}.inputs", *by_name)
    # A tap that no drafter reads is never fetched.
    asked = {t.name for t in expected.outputs}
    outputs = [t for t in outputs if t.name in asked or not t.name.startswith("tap.")]
    _check_tensors(place, f"{key}.outputs", outputs, expected.outputs)


def _check_tensors(
    place: Place, key: str, stated: Sequence[TensorSpec], expected: Sequence[TensorSpec]
) -> None:
    names, ours = [t.name for t in stated], [t.name for t in expected]
    place.require(names == ours, key, f"named {', '.join(ours)}", ", ".join(names))
    for found, want in zip(stated, expected, strict=True):
        fits = found.dtype == want.dtype and shapes_fit(want.shape, found.shape)
        form = f"{want.dtype} {list(want.shape)}"
        place.require(fits, f"{key}, {want.name!r},", form, f"{found.dtype} {list(found.shape)}")
