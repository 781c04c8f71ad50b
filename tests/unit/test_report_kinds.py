"""The pictures beside roofline and sizes, and the coverage matrix: what is drawn against the records."""

from __future__ import annotations

import math
import re
from statistics import median

import pytest
from report_cases import (
    FAILURES,
    MEASURED,
    Page,
    find_svg,
    make_bench,
    make_build,
    make_gpu_bench,
    make_machine,
    make_measurement,
    make_timing,
    make_verify,
    show,
    texts,
    three,
)

from opwright.records import (
    BaseRecord,
    BaseRow,
    CallPart,
    CallRecord,
    CaseError,
    Check,
    Comparison,
    KernelUse,
    Limits,
    encodable,
    read,
    save,
)
from opwright.report.markdown import render_markdown
from opwright.report.verdict import verdict


def bars(svg: str) -> list[tuple[float, float, str]]:
    """Returns left end, width and kind of every bar."""
    found = re.findall(r'<path d="M([\d.]+) [\d.]+h([\d.]+)v12h[^"]*" class="(filled|hollow)"', svg)
    return [(float(left), float(width), kind) for left, width, kind in found]


def table_of(page: Page, *head: str) -> list[list[str]]:
    """Returns the rows under the heading that begins so."""
    rows = [[" ".join(cell.split()) for cell in row] for row in page.rows]
    start = next(i for i, row in enumerate(rows) if row[: len(head)] == list(head))
    width = len(rows[start])
    return [row for row in rows[start + 1 :] if len(row) == width]


# --- speed-ups and shares -------------------------------------------------------------------------------


def test_speed_up_bars_are_the_summaries_with_their_intervals(tmp_path) -> None:
    bench = make_bench()
    page = show(tmp_path, bench)
    svg = find_svg(page, ": speed-ups")
    drawn = bars(svg)
    groups = {}
    for m in bench.measurements:
        for c in m.comparisons:
            groups.setdefault((m.direction, c.candidate), []).append(c.ratio)
    assert len(drawn) == len(groups) == 6
    means = {key: math.exp(sum(map(math.log, ratios)) / len(ratios)) for key, ratios in groups.items()}
    left, longest, _ = max(drawn, key=lambda bar: bar[1])
    scale = longest / math.log(max(means.values()))
    for ratio, width in zip(sorted(means.values()), sorted(width for _, width, _ in drawn), strict=True):
        assert width == pytest.approx(scale * math.log(ratio), abs=0.2)
    half = math.log(1.03) / math.sqrt(6)  # of the mean of six
    whiskers = [(float(low), float(high)) for low, high in re.findall(r'd="M([\d.]+) [\d.]+v6m0-3H([\d.]+)m', svg)]
    assert len(whiskers) == 6
    for (low, high), ratio in zip(sorted(whiskers), sorted(means.values()), strict=True):
        assert low - left == pytest.approx(scale * (math.log(ratio) - half), abs=0.3)
        assert high - left == pytest.approx(scale * (math.log(ratio) + half), abs=0.3)
    assert f"{means['forward', 'eager']:.2f}x ±1.2 %" in texts(svg)
    assert all(kind == "filled" for _, _, kind in drawn)
    assert "lines over them: its 95 % confidence interval.</figcaption>" in page.source


def test_a_slower_candidate_is_outlined_and_says_so(tmp_path) -> None:
    timings = [make_timing("opwright", 100.0), make_timing("eager", 50.0), make_timing("liger", 100.0)]
    compared = [Comparison("eager", 0.5, 0.02, 9), Comparison("liger", 1.01, 0.02, 9)]
    one = make_measurement("forward", "f32", 1024, timings=timings, comparisons=compared)
    page = show(tmp_path, make_bench(measurements=[one]))
    svg = find_svg(page, ": speed-ups")
    assert [kind for _, _, kind in bars(svg)] == ["hollow", "hollow"]
    assert {"0.50x ±2 %  slower", "no visible difference"} <= set(texts(svg))
    assert "Outlined bars: slower or no visible difference." in page.source


def test_one_measurement_is_no_plot_of_one_point(tmp_path) -> None:
    """Roofline, shares, heat map, sizes and history of a single input showed one mark each."""
    timings = [make_timing("opwright", 100.0), make_timing("eager", 150.0)]
    one = make_measurement("forward", "f32", 1024, timings=timings)
    for flop in (None, 10_000):
        one.flop = flop
        page = show(tmp_path, make_bench(measurements=[one]))
        assert set(re.findall(r"<figure[^>]*>\s*<h3>([^<]*)</h3>", page.source)) == {"Speed-ups", "All samples"}
    one.comparisons = []
    assert "Speed-ups" not in show(tmp_path, make_bench(measurements=[one])).source  # one bar without an interval
    two = [make_measurement("forward", dtype, n) for dtype, n in (("f32", 1024), ("f32", 2048), ("bf16", 1024))]
    page = show(tmp_path, make_bench(measurements=two))
    assert "forward f32: time against size" in page.source
    assert "forward bf16: time against size" not in page.source


def test_a_picture_of_one_bar_is_its_table(tmp_path) -> None:
    build = make_build()
    build.steps, build.kernels = build.steps[:1], build.kernels[1:]
    page = show(tmp_path, build, make_verify(checks=[Check("numerics", "passed", 3, worst_ulp=1.0, worst_ratio=0.2)]))
    assert "svg" not in page.counts
    assert page.cells("kernel0_cpu") == ["kernel0_cpu", "0 ns", "500 ms"]
    assert page.cells("f_kernel<float, 4>")[2:4] == ["128", "48 B"]
    assert "1 kernel, up to 128 registers; 1 of them spill." in page.source
    assert "Error map" not in page.source


def test_the_heat_map_has_the_share_of_every_size_and_marks_the_cache(tmp_path) -> None:
    bench = make_bench()
    svg = find_svg(show(tmp_path, bench), ": share of the roof")
    written = texts(svg)
    for m in bench.measurements:
        assert f"{100 * m.roof_share:.0f} %" in written
    assert svg.count('class="dashed"') == sum(m.in_cache for m in bench.measurements)
    opacity = [float(x) for x in re.findall(r'fill-opacity="([\d.]+)"', svg)]
    shares = [m.roof_share for m in sorted(bench.measurements, key=lambda m: -m.roof_share)]
    assert sorted(opacity, reverse=True) == pytest.approx([0.62 * min(s, 1) for s in shares], abs=0.006)


def test_sizes_that_are_written_alike_share_a_column(tmp_path) -> None:
    pair = [make_measurement("forward", dtype, n) for dtype in ("f32", "bf16") for n in (16_777_216, 16_778_000)]
    svg = find_svg(show(tmp_path, make_bench(measurements=pair)), ": share of the roof")
    assert texts(svg).count("16.8 M") == 1
    shares = [m.roof_share for m in pair if m.dtype == "f32"]
    assert f"{100 * median(shares):.0f} %" in texts(svg)


# --- samples --------------------------------------------------------------------------------------------


def test_every_sample_is_a_pixel_at_its_ratio_to_the_median(tmp_path) -> None:
    samples = [95.0, 100.0, 100.0, 101.0, 104.0, 118.0]
    timing = make_timing("opwright", 100.0)
    timing.samples_us = samples
    one = make_measurement("forward", "f32", 1024, timings=[timing])
    svg = find_svg(show(tmp_path, make_bench(measurements=[one])), ": all samples")
    (d,) = re.findall(r'<path d="(M[^"]*)" class="stroke"', svg)
    (middle,) = re.findall(r'<line x1="([\d.]+)" y1="38', svg)
    x, runs = 0, []
    for kind, value in re.findall(r"([Mmh])(-?[\d.]+)", d):
        x = float(value) if kind == "M" else x + float(value)
        if kind == "h":
            runs.append((x - float(value), x))
    lefts = sorted({round(math.log(s / 100) * (runs[-1][0] - float(middle)) / math.log(1.18)) for s in samples})
    assert [start - round(float(middle)) for start, _ in runs] == pytest.approx(lefts, abs=1.5)
    assert "Each of the 6 samples is a stroke" in show(tmp_path, make_bench(measurements=[one])).source
    one.timings[0].samples_us = [100.0] * 200 + [1000.0]
    assert "1 sample beyond the ends stand" in show(tmp_path, make_bench(measurements=[one])).source


# --- errors ---------------------------------------------------------------------------------------------


def test_the_error_map_keeps_the_worst_of_each_kind_and_dtype(tmp_path) -> None:
    errors = [
        CaseError("f32[7, 13] f32[13] approximate='tanh' (base)", 1.5, 0.2),
        CaseError("f32[7, 13] f32[13] approximate='none' (base)", 2.25, 0.1),
        CaseError("bf16[7, 13] bf16[13] approximate='none' (values around 10)", 0.75, 0.9),
        CaseError("f32[9] (values around 10)", 4000.0, 31.0),
        CaseError("f32[9] (special values)", 0.0, math.inf),
    ]
    record = make_verify(checks=[Check("numerics", "failed", 5, errors=errors)])
    save(record, tmp_path / "x.json")
    page = show(tmp_path, read(tmp_path / "x.json"))  # JSON has no infinity
    svg = find_svg(page, "numerics: largest error in ulp")
    assert {"2.25", "0.750", "✗ 4,000", "✗ ∞"} <= set(texts(svg))
    assert "1.50" not in texts(svg)
    assert svg.count('class="bad"') == 2
    assert table_of(page, "check", "input", "f32: ulp, error / allowance") == [
        ["numerics", "special values", "infinite", ""],
        ["numerics", "values around 10", "4,000, 31.0", "0.750, 0.900"],
        ["numerics", "base", "2.25, 0.200", ""],
    ]


def test_what_is_special_of_a_case_is_its_label_and_dtypes_stand_in_one_order(tmp_path) -> None:
    errors = [
        CaseError("bf16[7, 13] bf16[13] approximate='tanh' (base), gradients of `bias` alone", 1.0, 0.1),
        CaseError("f32[7, 13] f32[13] approximate='none' (base), gradients of `bias` alone", 2.0, 0.2),
    ]
    page = show(tmp_path, make_verify(checks=[Check("gradient subsets", "passed", 2, errors=errors)]))
    assert table_of(page, "check", "input", "f32: ulp, error / allowance", "bf16: ulp, error / allowance") == [
        ["gradient subsets", "gradients of `bias` alone", "2.00, 0.200", "1.00, 0.100"]
    ]


def test_records_without_errors_of_cases_give_those_of_checks(tmp_path) -> None:
    svg = find_svg(show(tmp_path, make_verify(failures=FAILURES)), ": largest errors")
    assert {"✗ 1.62", "0.0800 of 1", "numerics", "gradcheck"} <= set(texts(svg))
    nothing = make_verify(checks=[Check("export", "passed", 1)])
    assert "Error map" not in show(tmp_path, nothing).source


# --- a call ---------------------------------------------------------------------------------------------


def make_call(**changes) -> CallRecord:
    parts = [
        CallPart("python", 0.6, 0.03, "call - dispatcher's entry"),
        CallPart("dispatcher", 0.9, 0.02, "operator - kernel's entry"),
        CallPart("views", 0.01, 0.02, "a <difference>"),
        CallPart("kernel", 0.49, 0.01, "kernel alone"),
    ]
    facts = {"name": "ns::bias_gelu", "case": "f32[1, 1]", "parts": parts, "total_us": 2.0}
    facts |= {"peers_us": {"torch.add": 1.1}, "device_us": None, "rounds": 20000, "machine": MEASURED}
    return CallRecord(**(facts | {"created": 1_795_000_000.0, "seconds": 4.0} | changes))


def test_the_parts_of_a_call_stand_one_behind_the_other(tmp_path) -> None:
    page = show(tmp_path, make_bench(), make_call())
    svg = find_svg(page, ": where a call goes")
    drawn = bars(svg)
    pixel = drawn[4][1] / 2.0  # the whole call
    at = drawn[0][0]
    for (left, width, kind), part in zip(drawn, make_call().parts, strict=False):
        assert left == pytest.approx(at, abs=0.2)
        assert width == pytest.approx(max(part.us * pixel, 1.0), abs=0.2)
        assert kind == ("hollow" if part.name == "views" else "filled")  # not told from nothing
        at += part.us * pixel
    assert drawn[5][1] == pytest.approx(1.1 * pixel, abs=0.2)
    assert page.cells("dispatcher") == ["dispatcher", "900 ns", "20 ns", "45.0 %", "operator - kernel's entry"]
    assert "maybe nothing" in svg
    assert {"0", "500 ns", "1 µs", "1.5 µs", "2 µs"} <= set(texts(svg))
    assert "The largest part of 2.00 µs is dispatcher, 45 %; the kernel itself takes 490 ns." in page.source
    assert "a &lt;difference&gt;" in page.source


def test_a_record_of_a_call_alone_is_a_card(tmp_path) -> None:
    page = show(tmp_path, make_call(machine=make_machine(device="H200"), device="cuda", device_us=3.0))
    assert page.mistakes == []
    assert "The kernel itself runs 3.00 µs behind the host." in page.source
    assert page.heading == "ns::bias_gelu: no record of verify."


# --- a build --------------------------------------------------------------------------------------------


def test_the_build_is_drawn_in_time(tmp_path) -> None:
    page = show(tmp_path, make_build())
    (kernel, glue, link) = bars(find_svg(page, ": build"))
    pixel = kernel[1] / 0.5
    assert glue[0] - kernel[0] == pytest.approx(0.1 * pixel, abs=0.2)
    assert glue[1] == pytest.approx(0.04 * pixel, abs=0.2)
    assert link[0] == pytest.approx(kernel[0] + kernel[1], abs=0.2)
    assert page.cells("link") == ["link", "500 ms", "300 ms"]
    assert "2 operators, 1.50 MB" in page.source


def test_registers_are_drawn_and_spills_are_outlined(tmp_path) -> None:
    page = show(tmp_path, make_build())
    (plain, spilling) = bars(find_svg(page, ": registers"))
    assert (plain[2], spilling[2]) == ("filled", "hollow")
    assert spilling[1] == pytest.approx(2 * plain[1], abs=0.2)
    assert "128 registers, 48 B spilled" in page.source
    rows = table_of(page, "kernel", "architecture")
    assert rows[1] == ["f_kernel<float, 4>", "sm_90", "128", "48 B", "16 B", "1.02 kB"]


def test_of_many_kernels_those_that_spill_or_take_the_most_are_shown(tmp_path) -> None:
    kernels = [KernelUse(f"k{i}", "sm_90", i, 8 if i == 1 else 0, 0, 0) for i in range(1, 101)]
    page = show(tmp_path, make_build(kernels=kernels))
    shown = {row[0] for row in table_of(page, "kernel", "architecture")}
    assert shown == {"k1", *(f"k{i}" for i in range(78, 101))}
    assert "Of 100 kernels, the 24 that spill or take the most registers." in page.source


def test_build_records_are_read_back(tmp_path) -> None:
    save(make_build(), tmp_path / "x.json")
    assert read(tmp_path / "x.json") == make_build()
    assert encodable(make_build())["type"] == "build"


# --- history and an earlier version -----------------------------------------------------------------------


def test_history_is_the_geometric_mean_over_the_inputs_that_all_share(tmp_path) -> None:
    first, second = make_bench(created=1.0, commit="a" * 40), make_bench(commit="b" * 40 + "+")
    first.measurements = [m for m in first.measurements if m.axes["elements"] != 1024]
    for m in first.measurements:
        for t in m.timings:
            t.median_us *= 3
    page = show(tmp_path, second, first)
    assert "older record" not in page.source
    rows = table_of(page, "benchmark", "made")
    assert [row[0] for row in rows] == ["aaaaaaa", "bbbbbbb+"]
    shared = [m for m in second.measurements if m.axes["elements"] != 1024]
    times = [m.time_of("opwright") for m in shared if (m.direction, m.dtype) == ("forward", "f32")]
    mean = math.exp(sum(map(math.log, times)) / len(times))
    half = 100 * (math.exp(math.log(1.021) / math.sqrt(len(times))) - 1)
    assert [row[2] for row in rows] == [f"{three(3 * mean)} µs ±{half:.1f} %", f"{three(mean)} µs ±{half:.1f} %"]
    svg = find_svg(page, ": history")
    both = 100 * (math.exp(math.log(1.021) * math.sqrt(2 / len(times))) - 1)
    assert f"The first over the last: forward f32 3.00x ±{both:.1f} %" in svg
    points = re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', svg)
    assert float(points[0]) < float(points[1])  # slower is higher


def test_older_benchmarks_that_share_no_input_are_counted_as_not_shown(tmp_path) -> None:
    other = make_bench(created=1.0, measurements=[make_measurement("forward", "f32", 2048)])
    page = show(tmp_path, make_bench(), other)
    assert "History" not in page.source
    assert "1 older record of this operator on this machine not shown." in page.source


def test_a_comparison_with_an_earlier_version_is_a_table(tmp_path) -> None:
    rows = [BaseRow("forward", "f32[8]", 30.0, 20.0, 1.5, 0.03, "faster")]
    base = BaseRecord("ns::bias_gelu", "v0.1", "record", rows, MEASURED, 2.0, 3.0, is_hint=True, reason="another torch")
    page = show(tmp_path, make_bench(), base)
    assert page.cells("forward f32[8]") == ["forward f32[8]", "30.0 µs", "20.0 µs", "1.500x", "±3 %", "faster"]
    assert "Compared with v0.1" in page.source
    assert "Only a hint: another torch." in page.source
    assert "against v0.1: 1 faster (of 1 input, only a hint: another torch)" in verdict([base])
    assert "Only a hint: another torch." in render_markdown([base])


def test_what_is_slower_than_before_is_told() -> None:
    rows = [
        BaseRow("forward", "f32[8]", 20.0, 30.0, 0.67, 0.03, "slower"),
        BaseRow("forward", "f32[9]", 20.0, 20.0, 1.0, 0.03, "same"),
    ]
    base = BaseRecord("ns::bias_gelu", "HEAD", "interleaved", rows, MEASURED, 2.0, 3.0)
    assert "against HEAD: 1 slower, 1 no visible difference (of 2 inputs)" in verdict([make_bench(), base])
    assert "; slower than before: ns::bias_gelu on 1 input." in verdict([make_bench(), base, make_bench("other")])
    text = render_markdown([make_bench(), base])
    assert "<details open><summary>ns::bias_gelu compared with HEAD</summary>" in text
    assert "| forward f32[8] | 20.0 µs | 30.0 µs | 0.670x | ±3 % | slower |" in text


def test_on_a_gpu_the_floor_is_a_launch(tmp_path) -> None:
    limits = Limits(4250.0, 4000.0, 9000.0, {"f32": 51000.0, "bf16": 600e3}, 4.0, 2.5, 16, 1.0)
    page = show(tmp_path, make_gpu_bench(limits=limits))
    svg = find_svg(page, "backward f32: time against size")
    assert "launch" in texts(svg)
    assert "host" not in texts(svg)
    assert "the time from one empty kernel to the next, 2.50 µs" in page.source
    facts = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", page.source))
    assert facts["GPU: triad bandwidth"] == "4.00 TB/s"
    assert facts["GPU: launch"] == "2.50 µs"
    assert facts["GPU: other matrix products"] == "bf16 600 TFLOP/s"
    assert "triad bandwidth" not in facts


# --- coverage ---------------------------------------------------------------------------------------------


def test_the_coverage_matrix_says_what_ran_where(tmp_path) -> None:
    checks = [
        Check("numerics", "passed", 300),
        Check("graph", "skipped", reason="only on a <GPU>"),
        Check("backward: numerics", "failed", 12),
        Check("numerics", "passed", 280, device="cuda"),
        Check("graph", "passed", 2, device="cuda"),
    ]
    page = show(tmp_path, make_verify("ns::a", checks=checks), make_verify("ns::b"))
    start = next(i for i, row in enumerate(page.rows) if row[:2] == ["operator", "device"])
    head = [cell.strip() for cell in page.rows[start]]
    assert head == ["operator", "device", "numerics", "graph", "gradcheck", "second device"]
    rows = {(row[0].replace("\u200b", ""), row[1]): row[2:] for row in page.rows[start + 1 : start + 5]}
    assert rows == {
        ("ns::a", "cpu"): ["✓passed, 300 cases", "– askipped: only on a <GPU>", "not in the record", "not in the record"],
        ("ns::a, backward", "cpu"): ["✗failed, 12 cases", *3 * ["not in the record"]],
        ("ns::a", "cuda"): ["✓passed, 280 cases", "✓passed, 2 cases", *2 * ["not in the record"]],
        ("ns::b", "cpu"): ["✓passed, 300 cases", "not in the record", "✓passed, 112 cases", "– bskipped: only 1 <device> & no more"],
    }  # fmt: skip
    assert "<b>a</b>: only on a &lt;GPU&gt;." in page.source


def test_one_operator_has_a_matrix_where_it_ran_on_two_devices(tmp_path) -> None:
    assert 'class="coverage"' not in show(tmp_path, make_verify()).source
    checks = [Check(name, "passed", 1, device=d) for d in ("cpu", "cuda") for name in ("export", "backward: export")]
    assert 'class="coverage"' in show(tmp_path, make_verify(checks=checks)).source


def test_one_operator_has_its_checks_open_and_several_have_them_folded(tmp_path) -> None:
    assert '<details class="fold"' not in show(tmp_path, make_verify()).source
    page = show(tmp_path, make_verify("a"), make_verify("b", FAILURES))
    assert page.source.count('<details class="fold">') == 1
    assert page.source.count('<details class="fold" open>') == 1
    assert "<summary>3 checks: 2 passed, 1 skipped</summary>" in page.source
