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
    """Returns JSON's value as the annotated type; a value of another type is a ValueError."""
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


def _decode_fields(type_: type, value: dict[str, Any], at: str) -> Any:
    known = {field.name: field for field in fields(type_)}
    unknown = sorted(value.keys() - known.keys())
    missing = [
        name
        for name, field in known.items()
        if name not in value and field.default is MISSING and field.default_factory is MISSING
    ]
    if unknown or missing:
        raise ValueError(f"{at} has {'no' if missing else 'an unknown'} field `{(missing or unknown)[0]}`")
    types = _types_of(type_)
    return type_(**{name: decode(types[name], item, f"{at}.{name}") for name, item in value.items()})
