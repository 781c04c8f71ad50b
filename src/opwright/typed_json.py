"""Dataclasses from JSON, held to their annotations, and what JSON can hold of them."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints


def finite(value: Any) -> Any:
    """Replaces what JSON has no number for by null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@cache
def _types_of(type_: type) -> dict[str, Any]:
    return get_type_hints(type_)


def decode(type_: Any, value: Any, at: str) -> Any:
    """Returns JSON's value as the annotated type; a value of another type is a ValueError.

    Fields that nobody knows are passed over: versions to come add some. Where a field's metadata say what `null`
    stands for, that is taken.
    """
    if type_ is Any:
        return value
    if get_origin(type_) is UnionType:
        if value is None and NoneType in get_args(type_):
            return None
        return decode(get_args(type_)[0], value, at)
    if is_dataclass(type_) and isinstance(value, dict):
        return _decode_fields(type_, value, at)
    if get_origin(type_) is list and isinstance(value, list):
        return [decode(get_args(type_)[0], item, f"{at}[{i}]") for i, item in enumerate(value)]
    if get_origin(type_) is dict and isinstance(value, dict):
        return {key: decode(get_args(type_)[1], item, f"{at}.{key}") for key, item in value.items()}
    if type_ is float and type(value) is int:
        return float(value)
    if type(value) is not type_:
        raise ValueError(f"{at} is {type(value).__name__}, not {getattr(type_, '__name__', type_)}")
    return value


def _decode_fields(type_: Any, value: dict[str, Any], at: str) -> Any:
    known = {field.name: field for field in fields(type_)}
    missing = [
        name
        for name, field in known.items()
        if name not in value and field.default is MISSING and field.default_factory is MISSING
    ]
    if missing:
        raise ValueError(f"{at} has no field `{missing[0]}`")
    types, found = _types_of(type_), {}
    for name, field in known.items():
        if name in value:
            is_null = value[name] is None and "null" in field.metadata
            found[name] = field.metadata["null"] if is_null else decode(types[name], value[name], f"{at}.{name}")
    return type_(**found)
