"""The tables of fields on the page about records, from the dataclasses; docs/generate.py puts them there.

What a field means is in the docstring of its class; its unit in its name, or in that text.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

from opwright.records.files import KINDS

PAGE = Path(__file__).parent / "reference/records.md"
MARK = "<!-- fields -->"

_UNITS = {"_us": "us", "_mhz": "MHz", "_gb_s": "GB/s", "_bytes": "bytes", "_gflops": "GFLOP/s", "_ulp": "ulp"}
_OWN_UNITS = {
    "seconds": "s",
    "created": "s",
    "measured": "s",
    "start": "s",
    "built": "s",
    "bytes_moved": "bytes",
    "flop": "FLOP",
    "us": "us",
    "noise": "share",
    "roof_share": "share",
    "visible": "share",
    "interval": "share",
    "ratio": "ratio",
    "worst_ratio": "ratio",
    "load": "processes",
    "load_before": "processes",
    "load_after": "processes",
    "page_faults": "pages",
    "clock_mhz_before": "MHz",
    "clock_mhz_after": "MHz",
    "gpu_clock_mhz_before": "MHz",
    "gpu_clock_mhz_after": "MHz",
}
_USUAL = {
    "name": "the operator, `ns::name`, or the callable",
    "machine": "where it was made",
    "created": "when it was begun, since 1970",
    "seconds": "how long it took",
    "version": "of the format",
    "verified": "whether it has passed verify",
    "threads": "of PyTorch",
    "checks": "one for each kind and device",
    "failures": "one for each check that failed",
    "measurements": "one for each direction and input",
    "cores": "that can be used",
    "device": "`cpu`, `cuda` or `cuda:1`",
    "system": "name and release of the operating system",
    "python": "its version",
    "torch": "its version",
    "compiler": "name and version; empty without one",
    "timings": "one for each candidate, Opwright's first",
}


def parts_of(type_: type, found: dict[str, type] | None = None) -> dict[str, type]:
    """Returns the dataclasses that a record consists of, by name."""
    found = {} if found is None else found
    if is_dataclass(type_) and type_.__name__ not in found:
        found[type_.__name__] = type_
        for hint in get_type_hints(type_).values():
            for inner in (hint, *get_args(hint)):
                parts_of(inner, found)
    return found


def meanings(type_: type) -> dict[str, str]:
    """Returns what the docstring of a class says about its fields."""
    _, _, listed = (type_.__doc__ or "").partition("Attributes:\n")
    entries = re.split(r"\n(?= {8}\w)", "\n" + listed.rstrip())
    found = {}
    for entry in filter(str.strip, entries):
        names, _, text = entry.strip().partition(": ")
        for name in names.split(", "):
            found[name.strip()] = " ".join(text.split()).replace("None", "null")
    return found


def unit_of(name: str) -> str:
    """Returns the unit of a field; "" where it has none."""
    return _OWN_UNITS.get(name) or next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "")


def table(type_: type) -> str:
    """Returns the fields of a class as a table."""
    said, rows = meanings(type_), ["| field | unit | type | meaning |", "| --- | --- | --- | --- |"]
    for field in fields(type_):
        meaning = said.get(field.name) or _USUAL.get(field.name, "")
        kind = str(field.type).replace(" | None", " or null").replace("|", "or")
        kind += " or null" if "null" in field.metadata and not kind.endswith(" or null") else ""
        is_optional = field.default is not MISSING or field.default_factory is not MISSING
        rows.append(
            f"| `{field.name}` | {unit_of(field.name)} | {kind}{', may be absent' if is_optional else ''} | {meaning} |"
        )
    return "\n".join(rows)


def tables() -> str:
    """Returns the part of the page that is made."""
    done, lines = set(), []
    for name, kind in KINDS.items():
        for part in parts_of(kind).values():
            if part in done:
                continue
            done.add(part)
            title = f'### `{part.__name__}`, of type `"{name}"`' if part is kind else f"### `{part.__name__}`"
            lines += [title, "", part.__doc__.splitlines()[0], "", table(part), ""]
    return "\n".join(lines)


def page(text: str) -> str:
    """Returns the text of the page with its tables."""
    return text.replace(MARK, tables())
