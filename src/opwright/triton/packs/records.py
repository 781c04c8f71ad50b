"""Whether the fields of a record are what they may be, with the bounds of the runtime's own reader."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from ..worker.classes import parse_class
from ..worker.errors import WorkerError

_MOST_PARAMETER_BYTES = 32764  # of a kernel, by the driver since CUDA 12.1
_MOST_ONE_PARAMETER = 128  # a CUtensorMap
_WARP_SIZE = 32
_VERSION = re.compile(r"\d+(\.\d+)+\S*")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def _number(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _version(value: Any) -> bool:
    return isinstance(value, str) and _VERSION.fullmatch(value) is not None


def _scratch(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return _number(0, 1 << 32)(value[0]) and _number(1, 1 << 20)(value[1])


def _sources(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(source, list)
            and len(source) == 2
            and _text(source[0])
            and isinstance(source[1], str)
            and _DIGEST.fullmatch(source[1]) is not None
            for source in value
        )
    )


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "file": (_text, "a path"),
    "function": (_text, "a name"),
    "key": (lambda value: isinstance(value, str), "classes"),  # none for a kernel without parameters
    "arch": (_number(10, 999), "a compute capability, as 90"),
    "triton": (_version, "a version"),
    "ptxas": (_version, "a version"),
    "cuda": (_number(11000, 1 << 20), "a CUDA version, as 12080"),
    "symbol": (_text, "a name"),
    "num_warps": (_number(1, 64), "1 to 64"),
    "num_ctas": (_number(1, 16), "1 to 16"),
    "shared": (_number(0, 1 << 20), "0 to 1 MiB"),
    "tmem": (_number(0, 512), "0 to 512"),
    "pdl": (lambda value: isinstance(value, bool), "true or false"),
    "cooperative": (lambda value: isinstance(value, bool), "true or false"),
    "global_scratch": (_scratch, "[size, align]"),
    "profile_scratch": (_scratch, "[size, align]"),
    "params": (lambda value: isinstance(value, list), "a list"),
    "tma": (lambda value: isinstance(value, list), "a list"),
    "max_threads": (lambda value: value is None or _number(1, 2048)(value), "null, or 1 to 2048"),
    "sources": (_sources, "[[path, sha256], ...]"),
    "source_key": (_text, "a digest"),
}


def check_kernel(record: dict[str, Any]) -> Iterator[str]:
    """Yields what is wrong with the fields of a kernel's record."""
    wrong = list(_fields(record, _FIELDS))
    yield from wrong
    if wrong:
        return
    try:
        count = len(classes_of(record["key"]))
    except WorkerError as error:
        yield f"`key`: {error.message}"
        return
    end = 0
    for index, parameter in enumerate(record["params"]):
        if not isinstance(parameter, dict) or not _is_parameter(parameter, count):
            yield f"`params[{index}]` is {parameter!r}, expected arg, type, offset and size"
            return
        if parameter["offset"] < end:
            yield f"`params[{index}]` begins at {parameter['offset']}, inside the one before, which ends at {end}"
        end = parameter["offset"] + parameter["size"]
    if end > _MOST_PARAMETER_BYTES:
        yield f"`params` take {end} bytes, expected at most {_MOST_PARAMETER_BYTES}"
    threads = record["num_warps"] * _WARP_SIZE
    if record["max_threads"] not in (None, threads):
        yield f"`max_threads` is {record['max_threads']}, and {record['num_warps']} warps have {threads}"


def _is_parameter(parameter: dict[str, Any], count: int) -> bool:
    path = parameter.get("arg")
    known = path in ("global_scratch", "profile_scratch") or (
        isinstance(path, list) and bool(path) and all(_number(0, 1 << 16)(step) for step in path) and path[0] < count
    )
    return (
        known
        and _text(parameter.get("type"))
        and _number(0, _MOST_PARAMETER_BYTES)(parameter.get("offset"))
        and _number(1, _MOST_ONE_PARAMETER)(parameter.get("size"))
        and _number(0, 4)(parameter.get("dim", 0))
    )


def check_description(record: dict[str, Any]) -> Iterator[str]:
    """Yields what is wrong with the fields of a description."""
    fields = {name: _FIELDS[name] for name in ("file", "function", "triton", "sources", "source_key")}
    fields["line"] = (_number(1, 1 << 31), "a line")
    fields["params"] = (lambda value: isinstance(value, list), "a list")
    fields["heuristics"] = fields["params"]
    fields["autotune"] = (lambda value: value is None or _is_autotune(value), "null, or key and configs")
    wrong = list(_fields(record, fields))
    yield from wrong
    if wrong:
        return
    for index, parameter in enumerate(record["params"]):
        if not isinstance(parameter, dict) or not _text(parameter.get("name")):
            yield f"`params[{index}]` is {parameter!r}, expected a name and what is declared"


def _is_autotune(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("key"), list) and bool(value.get("configs"))


def check_table(record: dict[str, Any]) -> Iterator[str]:
    """Yields what is wrong with the fields of a table of measurements."""
    fields = {name: _FIELDS[name] for name in ("file", "function", "arch")}
    fields["gpu"] = (_text, "a name")
    fields["rows"] = (lambda value: isinstance(value, list) and bool(value), "a list")
    wrong = list(_fields(record, fields))
    yield from wrong
    if wrong:
        return
    for index, row in enumerate(record["rows"]):
        if not _is_row(row):
            yield f"`rows[{index}]` is {row!r}, expected key, config and microseconds"
            continue
        times = [time for time in row["microseconds"] if time is not None]
        if row["microseconds"][row["config"]] != min(times, default=None):
            yield f"`rows[{index}]` chooses configuration {row['config']}, which is not the fastest"


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict):
        return False
    key, times = row.get("key"), row.get("microseconds")
    return (
        isinstance(key, list)
        and all(isinstance(text, str) for text in key)
        and isinstance(times, list)
        and all(time is None or (isinstance(time, (int, float)) and time > 0) for time in times)
        and _number(0, len(times) - 1)(row.get("config"))
    )


def _fields(record: dict[str, Any], fields: dict[str, tuple[Callable[[Any], bool], str]]) -> Iterator[str]:
    for name, (is_right, expected) in fields.items():
        if name not in record:
            yield f"`{name}` is missing, expected {expected}"
        elif not is_right(record[name]):
            yield f"`{name}` is {record[name]!r}, expected {expected}"


def classes_of(key: str) -> list[str]:
    """Returns the classes of a key's text.

    Raises:
        WorkerError: The key has an invalid class.
    """
    parts, depth, quoted, start = [], 0, False, 0
    at = 0
    while at < len(key):
        letter = key[at]
        if quoted:
            at += letter == "\\"
            quoted = letter != '"'
        elif letter == '"':
            quoted = True
        elif letter in "([":
            depth += 1
        elif letter in ")]":
            depth -= 1
        elif depth == 0 and letter in ",;":
            parts.append(key[start:at])
            start = at + 2
            if letter == ";":
                break
        at += 1
    else:
        parts.append(key[start:])
    for part in parts:
        if part:
            parse_class(part)
    return [part for part in parts if part]
