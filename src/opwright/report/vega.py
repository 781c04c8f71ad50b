"""Writes the pictures once more as Vega-Lite specifications, to be changed in an editor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from opwright.records import Measurement
from opwright.report.cards import Card, elements_of, noise_bounds
from opwright.report.quantities import rate_gb_s, rate_gflop_s

_SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"


def specify_sizes(card: Card, measured: Sequence[Measurement], by_elements: bool) -> dict[str, Any]:
    """Returns time against size as a specification, a facet for each direction and dtype."""
    assert card.bench is not None
    copy_gb_s = card.bench.machine.copy_gb_s
    values = [
        {
            "direction": m.direction,
            "dtype": m.dtype,
            "in_cache": m.in_cache,
            "size": elements_of(m) if by_elements else m.bytes_moved,
            "candidate": t.candidate,
            "time_us": _short(t.median_us),
            "low_us": _short(noise_bounds(t)[0]),
            "high_us": _short(noise_bounds(t)[1]),
        }
        | ({"copy_us": _short(m.bytes_moved / copy_gb_s / 1e3)} if copy_gb_s else {})
        for m in measured
        for t in m.timings
    ]
    x = _log("size", "elements" if by_elements else "bytes moved")
    y = _log("time_us", "time per call (us)")
    colour = {"field": "candidate", "type": "nominal", "sort": None}
    layers: list[dict[str, Any]] = [
        {
            "mark": {"type": "rule"},
            "encoding": {"x": x, "y": _log("low_us"), "y2": {"field": "high_us"}, "color": colour},
        },
        {
            "mark": {"type": "line", "point": True},
            "encoding": {"x": x, "y": y, "color": colour, "shape": colour},
        },
    ]
    if copy_gb_s:
        layers.append(
            {"mark": {"type": "line", "strokeDash": [4, 4]}, "encoding": {"x": x, "y": _log("copy_us")}}
        )
    host_us = card.bench.host_us.get(measured[0].timings[0].candidate)
    if host_us:
        forward = {"transform": [{"filter": "datum.direction == 'forward'"}]}
        mark = {"type": "rule", "strokeDash": [2, 3]}
        layers.append(forward | {"mark": mark, "encoding": {"y": {"datum": host_us}}})
    return {
        "$schema": _SCHEMA,
        "title": f"{card.name}: time against size",
        "data": {"values": values},
        "facet": {"row": {"field": "direction", "sort": None}, "column": {"field": "dtype", "sort": None}},
        "spec": {"width": 300, "height": 220, "layer": layers},
    }


def specify_roofline(card: Card, measured: Sequence[Measurement]) -> dict[str, Any]:
    """Returns the roofline as a specification; the roofs are where both of them are measured."""
    values = []
    for m in measured:
        flop = m.flop or 0
        rate = rate_gflop_s(flop, m.timings[0].median_us)
        fact = _facts(m) | {"intensity": _short(flop / m.bytes_moved), "opwright": _short(rate)}
        before = m.time_of(card.baseline)
        values.append(fact | ({card.baseline: _short(rate_gflop_s(flop, before))} if before else {}))
    x, y = _log("intensity", "arithmetic intensity (FLOP/byte)"), _log("opwright", "GFLOP/s")
    colour = {"field": "dtype", "type": "nominal", "sort": None}
    shape = {"field": "direction", "type": "nominal", "sort": None}
    layers: list[dict[str, Any]] = [
        {"mark": "point", "encoding": {"x": x, "y": y, "color": colour, "shape": shape}}
    ]
    if card.baseline:
        moves = {"x": x, "y": _log(_path(card.baseline)), "y2": {"field": "opwright"}, "color": colour}
        layers.insert(0, {"mark": "rule", "encoding": moves})
    roofs = _roofs(card, [value["intensity"] for value in values])
    if roofs:
        encoding = {"x": x, "y": _log("roof"), "order": {"field": "intensity"}}
        layers.insert(0, {"data": {"values": roofs}, "mark": "line", "encoding": encoding})
    return {
        "$schema": _SCHEMA,
        "title": f"{card.name}: roofline",
        "data": {"values": values},
        "width": 600,
        "height": 360,
        "layer": layers,
    }


def specify_shares(card: Card, measured: Sequence[Measurement]) -> dict[str, Any]:
    """Returns the shares of the copy bandwidth as a specification, or the rates where it is unknown."""
    copy_gb_s = card.machine.copy_gb_s
    field, title = ("share", "share of the copy bandwidth") if copy_gb_s else ("gb_s", "GB/s")
    values = []
    for m in measured:
        times = {"opwright": m.timings[0].median_us, card.baseline: m.time_of(card.baseline)}
        rates = {
            name: rate_gb_s(m.bytes_moved, time) / (copy_gb_s or 1.0) for name, time in times.items() if time
        }
        values.append(_facts(m) | {name: _short(rate) for name, rate in rates.items()})
    x = {"field": field, "type": "quantitative", "title": title} | (
        {"axis": {"format": "%"}} if copy_gb_s else {}
    )
    y = {"field": "input", "type": "nominal", "sort": None, "axis": {"labelLimit": 400}}
    return {
        "$schema": _SCHEMA,
        "title": f"{card.name}: {title}",
        "data": {"values": values},
        "transform": [
            {"fold": ["opwright", *([_path(card.baseline)] if card.baseline else [])], "as": ["candidate", field]},
            {"calculate": "datum.direction + ' ' + datum.case", "as": "input"},
        ],
        "width": 500,
        "mark": {"type": "bar"},
        "encoding": {
            "x": x,
            "y": y,
            "yOffset": {"field": "candidate", "sort": None},
            "color": {"field": "candidate", "type": "nominal", "sort": None},
        },
    }


def _facts(measurement: Measurement) -> dict[str, Any]:
    return {
        "direction": measurement.direction,
        "dtype": measurement.dtype,
        "case": measurement.case,
        "in_cache": measurement.in_cache,
    }


def _path(name: str) -> str:
    """Returns the name of a candidate as that of a field, where a point would lead into an object."""
    return re.sub(r"([.\[\]])", r"\\\1", name)


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _log(field: str, title: str | None = None) -> dict[str, Any]:
    encoding = {"field": field, "type": "quantitative", "scale": {"type": "log"}}
    return encoding | ({"title": title} if title else {})


def _roofs(card: Card, intensities: Sequence[float]) -> list[dict[str, float]]:
    copy, compute = card.machine.copy_gb_s, card.machine.compute_gflops
    if not copy:
        return []
    low, high = min(intensities) / 2, max(intensities) * 2
    corners = [low, high]
    if compute:
        ridge = compute / copy
        corners = [min(low, ridge / 2), ridge, max(high, ridge * 2)]
    return [{"intensity": at, "roof": min(at * copy, compute or at * copy)} for at in corners]
