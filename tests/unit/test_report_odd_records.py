"""Records with parts missing or out of the common, and what a reader can tell apart."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from report_cases import (
    FAILURES,
    compare,
    find_svg,
    make_bench,
    make_build,
    make_verify,
    show,
    texts,
)

from opwright.records import BuildStep, CaseError, Check
from opwright.report import export
from opwright.report.heat import STRONGEST


def test_without_eager_pictures_start_from_the_candidate_that_there_is(tmp_path) -> None:
    """Legend and caption spoke of eager, and no arrow was drawn."""
    bench = make_bench(host_us={})
    for m in bench.measurements:
        m.timings = [t for t in m.timings if t.candidate in ("opwright", "liger")]
        compare(m)
    page = show(tmp_path, bench)
    roofline = find_svg(page, ": roofline")
    assert "liger" in texts(roofline)
    assert roofline.count('class="tail"') == 13  # one for each input, one in the legend
    assert "Each arrow leads from liger (grey bar) to Opwright" in page.source
    assert "eager" not in page.source.split("How to read the numbers")[0]
    for m in bench.measurements:
        m.timings, m.flop, m.comparisons = m.timings[:1], None, []
    alone = show(tmp_path, bench)
    assert "Bars: Opwright. Outlined bars fit the cache, which is faster than memory." in alone.source
    assert 'class="rival"' not in alone.source


def test_names_of_lines_have_the_room_that_they_need(tmp_path) -> None:
    """Those of 13 letters were cut by the edge of the picture."""
    bench = make_bench()
    for m in bench.measurements:
        m.timings[3].candidate = "gelu_backward_and_sum"
    (svg, *_) = [s for s in re.findall(r"<svg.*?</svg>", show(tmp_path, bench).source) if ": time against size" in s]
    width = float(re.search(r'width="([\d.]+)"', svg)[1])
    found = re.findall(r'<text x="([\d.]+)" y="[\d.]+" class="line-label[^>]*>([^<]+)<', svg)
    assert "gelu_bac…nd_sum" in {name for _, name in found} or any("…" in name for _, name in found)
    assert all(float(x) + 6.4 * len(name) <= width for x, name in found)


def test_a_long_input_keeps_its_end(tmp_path) -> None:
    bench = make_bench()
    for rank, m in enumerate(bench.measurements):
        m.case = f"{m.dtype}[8192, 4096] {m.dtype}[4096] approximate='tanh' x[:, {rank}:]"
    shown = texts(find_svg(show(tmp_path, bench), ": all samples"))
    for rank in range(len(bench.measurements)):
        assert any(label.endswith(f"x[:, {rank}:]") and "…" in label and len(label) <= 50 for label in shown)


def test_an_infinite_error_is_said_where_json_has_null(tmp_path) -> None:
    check = Check(
        "numerics",
        "failed",
        2,
        worst_ulp=None,
        worst_ratio=None,
        errors=[CaseError("f32[3] (base)", None, None), CaseError("f32[3] (large)", 2.0, 0.5)],
    )
    page = show(tmp_path, make_verify(checks=[check], failures=FAILURES))
    assert page.cells("numerics", "failed")[4] == "infinite"
    assert page.cells("numerics", "base") == ["numerics", "base", "infinite"]


def test_benchmarks_with_another_count_of_threads_are_no_history(tmp_path) -> None:
    benches = [make_bench(created=1.79e9 + i, threads=threads) for i, threads in enumerate((2, 16, 2))]
    page = show(tmp_path, *benches)
    assert "that all 2 benchmarks on this machine share" in page.source
    assert "1 older record of this operator on this machine not shown." in page.source


@pytest.mark.parametrize("count", [12, 25, 38, 200])
def test_a_long_history_has_labels_apart_and_lines_without_marks(tmp_path, count) -> None:
    """The label of the newest benchmark stood on that of one before it."""
    svg = find_svg(
        show(tmp_path, *(make_bench(created=1.79e9 + i, commit=f"{i:07}ab") for i in range(count))), ": history"
    )
    places = [float(x) for x in re.findall(r'<text x="([\d.]+)"[^>]*>\d{7}<', svg)]
    assert f"{count - 1:07}" in texts(svg)
    assert len(places) >= 5
    assert all(b - a >= 48 for a, b in pairwise(places))
    assert svg.count("<circle") == (count if count <= 60 else 1)


def test_a_build_that_took_no_time_has_no_timeline(tmp_path) -> None:
    page = show(tmp_path, make_build(steps=[BuildStep("glue", 0.0, 0.0)]))
    assert page.mistakes == []
    assert "time since the build began" not in page.source


def test_negative_operations_make_no_roofline(tmp_path) -> None:
    bench = make_bench()
    for m in bench.measurements:
        m.flop = -1
    assert "Share of the copy bandwidth" in show(tmp_path, bench).source


def test_several_operators_lead_back_to_their_table(tmp_path) -> None:
    page = show(tmp_path, make_verify("ns::a"), make_verify("ns::b"))
    assert page.references.count("#overview") == 2
    assert "overview" in page.ids
    assert "#overview" not in show(tmp_path, make_verify()).references


def test_no_two_regions_have_one_name(tmp_path) -> None:
    """Whoever goes from region to region heard `Bench` as often as there are operators, each of them twice."""
    page = show(
        tmp_path,
        *(
            record
            for name in ("ns::a", "ns::b")
            for record in (make_verify(name), make_bench(name), make_build(name=name))
        ),
    )
    said = dict(re.findall(r'<h[1-4] id="([\w-]+)">([^<]+)<', page.source))
    found = re.findall(r'role="region" aria-label(?:ledby)?="([^"]+)"', page.source)
    names = [" ".join(said.get(word, word) for word in label.split()) for label in found]
    assert {"ns::a Bench", "ns::b Bench", "ns::a Verify", "Operators", "Coverage", "ns::b, Build: the numbers"} <= set(
        names
    )
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("scheme", [0, 1, 2], ids=["light", "dark", "print"])
def test_text_stands_out_from_what_is_behind_it(scheme) -> None:
    """At least 4.5:1, on a full cell of a map as well: in the dark it was 3.7."""
    sheet = (Path(export.__file__).parent / "templates" / "style.css").read_text()
    blocks = [dict(re.findall(r"--(\w+): (#\w+);", block)) for block in re.findall(r":root \{([^}]*)\}", sheet)]
    assert len(blocks) == 3
    colours = blocks[0] | blocks[scheme]

    def channels(name: str) -> list[float]:
        code = colours[name].removeprefix("#")
        return [int(c, 16) / 255 for c in (re.findall("..", code) if len(code) == 6 else [2 * c for c in code])]

    def light(rgb: list[float]) -> float:
        return sum(
            w * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
            for w, c in zip((0.2126, 0.7152, 0.0722), rgb, strict=True)
        )

    def contrast(one: list[float], other: list[float]) -> float:
        dim, bright = sorted((light(one), light(other)))
        return (bright + 0.05) / (dim + 0.05)

    behind = {"page": "ink muted link bad warn", "card": "ink muted link good bad warn c0 c1 c2 c3 c4 c5 c6"}
    for ground, texts_on_it in behind.items():
        for name in texts_on_it.split():
            assert contrast(channels(name), channels(ground)) >= 4.5, (name, ground)
    for fill in ("heat", "fault"):
        cell = [STRONGEST * a + (1 - STRONGEST) * b for a, b in zip(channels(fill), channels("card"), strict=True)]
        assert contrast(channels("ink"), cell) >= 4.5, fill
