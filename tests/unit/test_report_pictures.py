"""The report's pictures: points against the records, scales, and the page in a browser."""

from __future__ import annotations

import html
import math
import re
import shutil
import struct
import subprocess
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from report_cases import (
    COMPUTE_GFLOPS,
    COPY_GB_S,
    SIZES,
    Page,
    make_bench,
    make_measurement,
    make_verify,
    show,
)

from opwright.quantities import COMPUTE, RATE, TIME, percent, round_to, tick_with_unit, with_unit
from opwright.report import verdict, write_report
from opwright.report.axes import LogScale, log_scale, spread
from opwright.report.svg import _SHAPES, marker

# --- the pictures -------------------------------------------------------------------------------------


def find_svgs(page: Page, start: str) -> list[str]:
    found = re.findall(r"<svg.*?</svg>", page.source, re.DOTALL)
    return [svg for svg in found if re.search(r"<title [^>]*>([^<]*)", svg)[1].startswith(start)]


def numbers(pattern: str, svg: str) -> list[tuple[float, ...]]:
    return [tuple(float(x) for x in found.groups()) for found in re.finditer(pattern, svg)]


def test_time_against_size_places_points_and_the_memory_slope_on_one_scale(tmp_path):
    bench = make_bench()
    for m in bench.measurements:
        m.timings[2].noise, m.timings[2].interval = 124.0, 0.34
    (svg,) = find_svgs(show(tmp_path, bench), "forward f32: time against size")
    points = numbers(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)
    measured = [m for m in bench.measurements if (m.direction, m.dtype) == ("forward", "f32")]
    assert len(points) == len(measured) == 3
    # Logarithmic: pixels go with the logarithm of size and time, whatever the ends of the axes.
    x_slope = (points[2][0] - points[0][0]) / math.log(SIZES[2] / SIZES[0])
    ours = [m.time_of("opwright") for m in measured]
    y_slope = (points[2][1] - points[0][1]) / math.log(ours[2] / ours[0])
    assert x_slope > 0 > y_slope
    assert points[1][0] - points[0][0] == pytest.approx(x_slope * math.log(SIZES[1] / SIZES[0]), abs=0.2)
    assert points[1][1] - points[0][1] == pytest.approx(y_slope * math.log(ours[1] / ours[0]), abs=0.2)
    slope = re.search(r'<path d="M([^"]*)" fill="none" class="bound"', svg)[1]
    slope = [tuple(float(x) for x in point.split()) for point in slope.split("L")]
    for (x, y), point, m in zip(slope, points, measured, strict=True):
        copy_us = m.bytes_moved / (COPY_GB_S * 1e9) * 1e6
        assert x == point[0]
        assert y - point[1] == pytest.approx(y_slope * math.log(copy_us / m.time_of("opwright")), abs=0.2)
    (host,) = numbers(r'<line x1="[\d.]+" y1="([\d.]+)" x2="[\d.]+" y2="([\d.]+)" class="bound"', svg)
    assert host[0] == host[1]
    assert host[0] - points[0][1] == pytest.approx(y_slope * math.log(3.1 / ours[0]), abs=0.2)
    # Only the interval of compile, 34 %, is larger than a point.
    bars = numbers(r'y1="([\d.]+)" x2="[\d.]+" y2="([\d.]+)" class="noise"', svg)
    assert len(bars) == 3
    assert bars[0][0] - bars[0][1] == pytest.approx(-y_slope * math.log(1.34 / 0.66), abs=0.2)


def test_labels_of_lines_do_not_overlap(tmp_path):
    panels = find_svgs(show(tmp_path, make_bench()), "forward")
    assert len(panels) == 2
    for svg in panels:
        places = numbers(r'y="([\d.]+)" class="line-label', svg)
        assert len(places) == 6  # four candidates, copy, host
        assert min(b - a for (a,), (b,) in pairwise(sorted(places))) >= 12.9


def test_roofline_moves_from_eager_to_ours_under_the_measured_roofs(tmp_path):
    one = make_measurement("forward", "f32", 2**24)
    other = make_measurement("forward", "f32", 2**24, flop_each=160)
    (svg,) = find_svgs(show(tmp_path, make_bench(measurements=[one, other])), "ns::bias_gelu: roofline")
    (tail, _) = numbers(r'y1="([\d.]+)" x2="[\d.]+" y2="[\d.]+" class="tail"/><line', svg)
    (head, _) = numbers(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="3.4" class="filled"/></g>(?!<text)', svg)
    (x0, y0, x1, y1), (x2, y2, _, y3) = numbers(
        r'd="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)" fill="none" class="roof"', svg
    )
    assert (x1, y1) == (x2, y2)  # the ridge
    assert y2 == y3
    y_slope = (tail[0] - head[1]) / math.log(one.time_of("eager") / one.time_of("opwright"))
    assert y_slope > 0  # slower is lower on the page
    rate = one.flop / one.time_of("opwright") / 1e3
    assert head[1] - y2 == pytest.approx(y_slope * math.log(COMPUTE_GFLOPS / rate), abs=0.3)
    # The slope of memory rises as fast as intensity does, and meets the other roof at the ridge.
    x_slope = (head[0] - x2) / math.log(one.flop / one.bytes_moved / (COMPUTE_GFLOPS / COPY_GB_S))
    assert (y0 - y1) / y_slope == pytest.approx((x1 - x0) / x_slope, rel=0.02)


def test_names_from_records_are_escaped_in_pictures(tmp_path):
    odd = make_measurement("forward", "f32", 2**24, flop_each=None, case="<b>&'")
    odd.dtype = "<i>"
    smaller = replace(odd, axes={"elements": 2**20})
    page = show(tmp_path, make_bench(measurements=[odd, smaller], flop_each=None))
    assert page.mistakes == []
    assert (page.counts.get("b", 0), page.counts.get("i", 0)) == (0, 2)  # <i> is the meter's
    assert page.source.count("&lt;b&gt;&amp;") >= 4


def test_bars_give_shares_where_nobody_counted_operations(tmp_path):
    bench = make_bench(flop_each=None)
    (svg,) = find_svgs(show(tmp_path, bench), "ns::bias_gelu: share of the copy bandwidth")
    bars = numbers(r'<path d="M([\d.]+) [\d.]+h([\d.]+)v12h', svg)
    (line,) = numbers(r'<line x1="([\d.]+)" y1="[\d.]+" x2="[\d.]+" y2="[\d.]+" class="base"', svg)
    assert len(bars) == 12
    shares = [m.roof_share for m in sorted(bench.measurements, key=lambda m: m.direction == "backward")]
    for (left, width), share in zip(bars, shares, strict=True):
        assert width / (line[0] - left) == pytest.approx(share, abs=0.003)
    (values,) = re.findall(r'<g class="values">(.*?)</g>', svg)
    assert re.findall(r">([\d.]+ %)<", values) == [f"{100 * share:.0f} %" for share in shares]
    assert svg.count('class="hollow"') == sum(m.in_cache for m in bench.measurements)


@pytest.mark.parametrize("shape", range(len(_SHAPES)))
def test_every_marker_has_an_area(shape):
    """The fifth kind, a cross, was a polygon of no area: nothing was painted."""
    drawn = marker(shape, 0.0, 0.0, class_="filled")
    if "circle" in drawn:
        return
    points = numbers(r"(-?[\d.]+),(-?[\d.]+)", drawn)
    area = sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in zip(points, [*points[1:], points[0]], strict=True))
    assert abs(area) / 2 > 10


# --- numbers and scales -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (9.996, "10.0"),
        (0.0999999, "0.100"),
        (123.4, "123"),
        (8123.0, "8,120"),
        (3.14e-7, "3.14e-07"),
    ],
)
def test_three_significant_digits(value, text):
    assert round_to(value) == text


def test_units_change_where_the_rounded_number_does():
    written = [with_unit(x, TIME) for x in (0.0312, 0.9996, 999.4, 999.6, 1.5e6)]
    assert written == ["31.2 ns", "1.00 µs", "999 µs", "1.00 ms", "1.50 s"]
    assert with_unit(4812.0, RATE) == "4.81 TB/s"
    assert with_unit(0.25, COMPUTE) == "250 MFLOP/s"
    assert tick_with_unit(300.0, TIME) == "300 µs"
    assert percent(1.0349) == "103 %"


@pytest.mark.parametrize(("low", "high"), [(3, 40), (1e-3, 1e9), (5, 6), (0.02, 800)])
def test_ticks_are_round_lie_on_the_axis_and_keep_their_distance(low, high):
    scale = log_scale([low, high], 0, 400, margin=1.25)
    ticks = scale.ticks(gap=40)
    assert 2 <= len(ticks) <= 11
    assert all(scale.low <= t <= scale.high for t in ticks)
    assert all(f"{t:.0e}"[0] in "1235" and float(f"{t:.0e}") == pytest.approx(t) for t in ticks)
    assert all(scale(b) - scale(a) >= 40 for a, b in pairwise(ticks))
    assert scale.high / scale.low >= 9.999


def test_a_log_scale_maps_equal_ratios_to_equal_distances():
    scale = LogScale(1.0, 1000.0, 100.0, 400.0)
    assert [scale(v) for v in (1, 10, 100, 1000)] == pytest.approx([100, 200, 300, 400])


def test_spreading_keeps_order_distance_and_bounds():
    assert spread([50, 10, 90], 10, 0, 100) == [50, 10, 90]
    assert spread([50, 50, 51], 10, 0, 100) == pytest.approx([40.33, 50.33, 60.33], abs=0.01)
    assert spread([1, 2, 99], 10, 0, 100) == pytest.approx([0, 10, 99])
    assert spread([99, 98], 10, 0, 100) == pytest.approx([100, 90])


# --- in a browser -------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --window-size=1200,1600"""


def browse(tmp_path: Path, path: Path, *flags: str) -> str:
    command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}", *flags, path.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def read_png(png: Path) -> tuple[bytes, float]:
    """Returns the first pixel, and the share of bytes in which the picture differs from its surroundings."""
    data, at, body = png.read_bytes(), 8, b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            body += data[at + 8 : at + 8 + length]
        at += 12 + length
    # Rows are stored as differences from the pixels before and above, so a blank picture is all zeros.
    rows = zlib.decompress(body)
    return rows[1:4], 1 - rows.count(0) / len(rows)


@pytest.mark.chromium
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
@pytest.mark.parametrize(("scheme", "page"), [("1", "fbfbfa"), ("0", "14161a")], ids=["light", "dark"])
def test_chromium_paints_the_page_in_both_colour_schemes(tmp_path, scheme, page):
    path = write_report([make_verify(), make_bench()], tmp_path / "report.html")
    shot = tmp_path / "shot.png"
    browse(tmp_path, path, f"--screenshot={shot}", f"--blink-settings=preferredColorScheme={scheme}")
    corner, painted = read_png(shot)
    assert corner == bytes.fromhex(page)
    assert 0.01 < painted < 0.5


@pytest.mark.chromium
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
def test_chromium_builds_the_pictures(tmp_path):
    path = write_report([make_verify(), make_bench()], tmp_path / "report.html")
    dom = browse(tmp_path, path, "--dump-dom")
    assert dom.count("<svg") == dom.count("</svg>") == path.read_text().count("<svg") == 9
    assert html.escape(verdict([make_verify(), make_bench()]), quote=False) in dom
