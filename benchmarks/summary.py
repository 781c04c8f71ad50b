"""Writes the results of the benchmarks: the figures to summary.csv, everything else to a folder that git ignores.

A benchmark ends with `write_raw(NAME, result)` and `update(__file__, figures(result), result["machine"])`. Its own
function `figures` picks the rows of the summary out of its result.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SUMMARY = RESULTS / "summary.csv"
RAW = RESULTS / "raw"
COLUMNS = ("script", "figure", "value", "unit", "low", "high", "beside", "commit", "date", "machine")
DIGITS = 4


class Figure(NamedTuple):
    """A row of the summary.

    Attributes:
        low: the lower end of the spread of the value, in the same unit.
        high: its upper end.
        beside: the same figure of other candidates in the same run, as `beside` writes it.
    """

    name: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    beside: str = ""


def number(value: float) -> str:
    """Returns a number with four significant digits; integers whole."""
    if isinstance(value, int) or value == 0:
        return str(int(value))
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -3:
        return f"{value:.{DIGITS}g}"
    text = f"{value:.{max(0, DIGITS - 1 - magnitude)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def beside(value: float, others: Mapping[str, float]) -> str:
    """Returns other candidates, each with its ratio to the value: `eager 16.77 (1.9x); compile 31.36 (3.55x)`."""
    return "; ".join(f"{name} {number(other)} ({number(round(other / value, 3))}x)" for name, other in others.items())


def figure_of(measurement: Mapping[str, Any], name: str = "") -> Figure:
    """Returns the row of a measurement of `opwright bench`, from its JSON: medians, and the middle half of samples."""
    ours, *rivals = measurement["timings"]
    median, noise = ours["median_us"], ours["noise"]
    others = {rival["candidate"]: rival["median_us"] for rival in rivals}
    others |= {"copy_": measurement["copy_us"]} if measurement.get("copy_us") else {}
    others |= {"opwright, warm L2": ours["warm_us"]} if ours.get("warm_us") else {}
    name = name or f"{measurement['case']}, {measurement['direction']}"
    return Figure(name, median, "us", median * (1 - noise), median * (1 + noise), beside(median, others))


def machine_name(card: Mapping[str, Any]) -> str:
    """Returns a machine card as `NVIDIA H200, torch 2.11.0+cu130` or `AMD EPYC, 2 cores, torch 2.13.0+cpu`."""
    cpu = card["cpu"].replace("(R)", "").removesuffix(" Processor")
    place = card.get("device") or f"{cpu}, {card['cores']} cores"
    return f"{place}, torch {card['torch']}" if "torch" in card else f"{place}, Python {card['python']}"


def write_raw(name: str, result: Any) -> Path:
    """Writes a whole result to results/raw/NAME.json."""
    RAW.mkdir(parents=True, exist_ok=True)
    path = RAW / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")
    return path


def update(
    script: str | Path,
    figures: Iterable[Figure],
    machine: Mapping[str, Any] | str,
    *,
    group: str = "",
    commit: str = "",
    date: str = "",
) -> None:
    """Replaces the rows of a script in summary.csv.

    Args:
        machine: a machine card, or its name.
        group: replaces only the rows of this part of the script, whose figures begin with it and a colon.
        commit: the checkout's, with a + where tracked files are changed, when it is empty.
        date: today's when it is empty.
    """
    name = Path(script).resolve().relative_to(ROOT).as_posix()
    machine = machine if isinstance(machine, str) else machine_name(machine)
    prefix = f"{group}: " if group else ""
    rows = [row for row in read() if not (row["script"] == name and row["figure"].startswith(prefix))]
    source = {"commit": commit or _commit(), "date": date or time.strftime("%Y-%m-%d"), "machine": machine}
    for figure in figures:
        low, high = ("" if end is None else number(end) for end in (figure.low, figure.high))
        row = {"script": name, "figure": prefix + figure.name, "value": number(figure.value), "unit": figure.unit}
        rows.append({**row, "low": low, "high": high, "beside": figure.beside, **source})
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted(rows, key=_order))
    SUMMARY.write_text(text.getvalue())


def read() -> list[dict[str, str]]:
    """Returns the rows of summary.csv, by column."""
    if not SUMMARY.exists():
        return []
    with SUMMARY.open(newline="") as file:
        return list(csv.DictReader(file))


def _order(row: Mapping[str, str]) -> list[Any]:
    """Sorts numbers within names by their value."""
    parts = re.split(r"(\d+)", f"{row['script']}\n{row['figure']}")
    return [int(part) if part.isdigit() else part for part in parts]


def _commit() -> str:
    head = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULTS.relative_to(ROOT)}")
    return f"{head}+" if head and changed else head or "unknown"


def _git(*words: str) -> str:
    result = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return result.stdout.strip()
