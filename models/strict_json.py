"""Dataclasses to JSON and back, where a missing, unknown or mistyped key is an error.

Knows dataclasses, tuples, string-keyed dicts, optionals and scalars; nothing about bundles.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from typing import Any, TypeVar

from .errors import ManifestError

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """The JSON form of a dataclass tree."""
    return dataclasses.asdict(value)


def from_json(cls: type[T], data: Any, where: str) -> T:
    """Build dataclass `cls` from JSON data; `ManifestError` names the key that does not fit."""
    return typing.cast(T, _convert(cls, data, where))


def _convert(kind: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, data, where)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, data, where)
    if origin is tuple:
        return _tuple(arguments, _expect(list, data, where), where)
    if origin is dict:
        items = _expect(dict, data, where).items()
        return {key: _convert(arguments[1], item, f"{where}.{key}") for key, item in items}
    if kind is float:
        return _float(data, where)
    return _expect(kind, data, where)


def _dataclass(kind: Any, data: Any, where: str) -> Any:
    data = _expect(dict, data, where)
    hints = _field_types(kind)
    names = hints.keys()
    for problem, keys in (("unknown", data.keys() - names), ("missing", names - data.keys())):
        if keys:
            raise ManifestError(
                f"{where}: {problem} key {sorted(keys)[0]!r}; the bundle was made by another "
                "version or damaged. Export it again."
            )
    return kind(**{name: _convert(hints[name], data[name], f"{where}.{name}") for name in names})


@functools.cache
def _field_types(kind: Any) -> dict[str, Any]:
    # A manifest has thousands of tensors, and Python parses the annotations anew at every call.
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _union(arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    """Optionals and unions of scalars, e.g. `int | str` dimensions."""
    if data is None and type(None) in arguments:
        return None
    others = [a for a in arguments if a is not type(None)]
    if len(others) == 1:
        return _convert(others[0], data, where)
    if type(data) in others:
        return data
    raise ManifestError(f"{where}: a value of type {type(data).__name__} does not belong here.")


def _tuple(arguments: tuple[Any, ...], data: list[Any], where: str) -> tuple[Any, ...]:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        kinds = [arguments[0]] * len(data)
    elif len(arguments) != len(data):
        raise ManifestError(f"{where}: expected {len(arguments)} values, got {len(data)}.")
    else:
        kinds = list(arguments)
    pairs = enumerate(zip(kinds, data, strict=True))
    return tuple(_convert(kind, item, f"{where}[{i}]") for i, (kind, item) in pairs)


def _float(data: Any, where: str) -> float:
    """A finite number; JSON as Python reads it also has NaN, infinities and endless integers."""
    try:
        value = float(data) if type(data) is int else _expect(float, data, where)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ManifestError(f"{where}: expected a finite number, got {str(data)[:20]}.")
    return value


def _expect(kind: Any, data: Any, where: str) -> Any:
    if type(data) is not kind:
        expected = {dict: "an object", list: "a list"}.get(kind, kind.__name__)
        raise ManifestError(f"{where}: expected {expected}, got {data!r}.")
    return data
