"""The report: its numbers against the records, its page against a parser and a browser."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import struct
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from opwright.errors import RecordError
from opwright.records import (
    BenchRecord,
    Check,
    Failure,
    Machine,
    Measurement,
    Timing,
    VerifyRecord,
    encodable,
    read,
)
from opwright.report import verdict, write_report
from opwright.report.cards import collect_cards
from opwright.report.quantities import COMPUTE, RATE, TIME, percent, round_to, tick_with_unit, with_unit
from opwright.report.scales import LogScale, log_scale, spread
from opwright.report.svg import _SHAPES, marker

COPY_GB_S, COMPUTE_GFLOPS = 40.0, 125.0
SIZES = (1024, 65536, 2**24)
BYTES_EACH = {("forward", "f32"): 8, ("forward", "bf16"): 4, ("backward", "f32"): 12, ("backward", "bf16"): 6}


def make_machine(**changes) -> Machine:
    facts = {"cpu": "EPYC 9B14", "cores": 2, "device": "", "system": "Linux 6.8", "python": "3.11.7"}
    facts |= {"torch": "2.13.0+cpu", "compiler": "g++ 12.2.0", "load": 0.5}
    return Machine(**(facts | changes))


MEASURED = make_machine(copy_gb_s=COPY_GB_S, compute_gflops=COMPUTE_GFLOPS)


def make_timing(candidate: str, median_us: float, noise: float = 0.012) -> Timing:
    return Timing(candidate, median_us, 0.9 * median_us, noise, [median_us] * 3)


def make_measurement(direction: str, dtype: str, elements: int, *, flop_each=10, copy=COPY_GB_S, **changes):
    moved = BYTES_EACH[direction, dtype] * elements
    ours = 3.0 + moved / 30e3  # 3 us of host, 30 GB/s
    factor = 2.0 + math.log2(elements) / 8 + (0.37 if dtype == "bf16" else 0.0)
    facts = {
        "direction": direction,
        "case": f"{dtype}[{elements // 1024}, 1024] approximate='tanh'",
        "axes": {"elements": elements},
        "dtype": dtype,
        "bytes_moved": moved,
        "flop": flop_each * elements if flop_each else None,
        "timings": [
            make_timing("opwright", ours),
            make_timing("eager", ours * factor),
            make_timing("compile", ours * (factor - 0.5), noise=0.34),
            make_timing("liger", ours * 1.25),
        ],
        "roof_share": moved / ours / 1e3 / copy if copy else None,
        "in_cache": moved < 32e6,
    }
    return Measurement(**(facts | changes))


def make_bench(name: str = "ns::bias_gelu", machine: Machine = MEASURED, **changes) -> BenchRecord:
    copy, flop_each = machine.copy_gb_s, changes.pop("flop_each", 10)
    measurements = [
        make_measurement(direction, dtype, elements, flop_each=flop_each, copy=copy)
        for direction, dtype in BYTES_EACH
        for elements in SIZES
    ]
    facts = {
        "name": name,
        "measurements": measurements,
        "host_us": {"opwright": 3.1, "eager": 6.28},
        "verified": True,
        "threads": 2,
        "machine": machine,
        "created": 1_795_000_000.0,
        "seconds": 81.0,
    }
    return BenchRecord(**(facts | changes))


def make_verify(name: str = "ns::bias_gelu", failures=(), **changes) -> VerifyRecord:
    outcome, worst = ("failed", 391.4) if failures else ("passed", 0.4127)
    checks = [
        Check("numerics", outcome, 300, worst_ulp=1.6234, worst_ratio=worst, seconds=12.06),
        Check("gradcheck", "passed", 112, worst_ratio=0.08, seconds=0.4),
        Check("second device", "skipped", reason="only 1 <device> & no more"),
    ]
    facts = {"checks": checks, "failures": list(failures), "backends": ["cpu"], "machine": make_machine()}
    return VerifyRecord(**({"name": name, "created": 1_794_990_000.0, "seconds": 66.0} | facts | changes))


FAILURES = [
    Failure(
        "numerics", "f32[7, 13] sliced", "error 3.1e-2 at [6, 12]\n  of 7.9e-5", "last column", "verify x"
    ),
    Failure("gradcheck", "f64[3]", "grad of `w` is <zero> & more"),
]


class Page(HTMLParser):
    """A page, parsed: whether its elements are balanced, its references, and its tables as text."""

    VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.mistakes: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.counts: dict[str, int] = {}
        self.rows: list[list[str]] = []
        self.specs: list[str] = []
        self.heading = ""
        self.feed(self.source)
        self.close()
        self.mistakes += [f"<{tag}> is never closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "script":
            self.specs.append("")

    def handle_startendtag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        names = [name for name, _ in attrs]
        if len(set(names)) != len(names):
            self.mistakes.append(f"<{tag}> repeats an attribute")
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                self.references.append(value)
            elif name == "id":
                self.ids.append(value)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.mistakes.append(f"</{tag}> at {self.getpos()} closes something else")

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.specs[-1] += data
        elif "tr" in self.open and ("td" in self.open or "th" in self.open):
            self.rows[-1][-1] += data
        elif self.open and self.open[-1] == "h1":
            self.heading += data

    def cells(self, *starts: str) -> list[str]:
        """Returns the cells of the only row that begins with a text, stripped."""
        found = [[" ".join(cell.split()) for cell in row] for row in self.rows]
        found = [row for row in found if row[: len(starts)] == list(starts)]
        assert len(found) == 1, found
        return found[0]


def show(tmp_path: Path, *records) -> Page:
    return Page(write_report(records, tmp_path / "deep" / "report.html"))


def three(value: float) -> str:
    """Three significant digits by another route than the report's: decimal shifting."""
    exponent = math.floor(math.log10(abs(value)))
    return f"{round(value, 2 - exponent):.{max(0, 2 - exponent)}f}"


# --- the verdict --------------------------------------------------------------------------------------


def test_verdict_gives_cases_median_speedups_and_share_outside_the_cache():
    bench = make_bench()
    speedups = {
        name: median(m.time_of(name) / m.time_of("opwright") for m in bench.measurements)
        for name in ("eager", "compile")
    }
    shares = [m.roof_share for m in bench.measurements if not m.in_cache]
    assert 0 < len(shares) < 12
    assert verdict([make_verify(), bench]) == (
        f"ns::bias_gelu: right on 412 cases, {speedups['eager']:.1f}x faster than eager, "
        f"{speedups['compile']:.1f}x faster than torch.compile and 1.2x faster than liger (median over 12 inputs), "
        f"at {100 * median(shares):.0f} % of this machine's copy bandwidth on the {len(shares)} that do not fit the cache."
    )


def test_verdict_without_a_cache_or_peers_is_the_plain_sentence():
    timings = [make_timing("opwright", 100.0), make_timing("eager", 640.0), make_timing("compile", 590.0)]
    one = make_measurement("forward", "f32", 2**24, timings=timings, in_cache=False, roof_share=0.612)
    assert verdict([make_verify(), make_bench(measurements=[one, one])]) == (
        "ns::bias_gelu: right on 412 cases, 6.4x faster than eager and 5.9x faster than torch.compile "
        "(median over 2 inputs), at 61 % of this machine's copy bandwidth."
    )


@pytest.mark.parametrize(
    ("other_us", "words"),
    [(50.0, "2.0x slower than eager"), (100.2, "as fast as eager"), (103.0, "1.03x faster than eager")],
)
def test_verdict_says_slower_and_as_fast(other_us, words):
    timings = [make_timing("opwright", 100.0), make_timing("eager", other_us)]
    one = make_measurement("forward", "f32", 1024, timings=timings, roof_share=None)
    assert verdict([make_bench(measurements=[one])]) == f"ns::bias_gelu: verified, {words} (1 input)."


def test_verdict_of_a_failure_names_the_first_and_gives_no_speed():
    said = verdict([make_verify(failures=FAILURES), make_bench()])
    assert said == (
        "ns::bias_gelu FAILS verify: 2 failures, first: numerics on f32[7, 13] sliced: error 3.1e-2 at [6, 12]."
    )


def test_verdict_never_calls_the_unverified_right():
    assert verdict([make_bench(verified=False)]).startswith("ns::bias_gelu: NOT verified, ")
    skipped = make_verify(checks=[Check("numerics", "skipped", reason="no compiler")])
    assert verdict([skipped]) == "ns::bias_gelu: NOT verified, no check ran."
    broken = make_verify(checks=[Check("numerics", "passed", 3), Check("opcheck", "failed", 2)])
    assert verdict([broken]) == "ns::bias_gelu FAILS verify: 1 check failed."
    assert [card.cases for card in collect_cards([broken])] == [3]


def test_verdict_of_several_operators():
    fine = [make_verify("a"), make_bench("a"), make_verify("b")]
    assert verdict(fine).startswith("2 operators: right on 824 cases, ")
    assert verdict([*fine, make_verify("c", FAILURES)]) == "1 of 3 operators FAIL verify: c (2 failures)."
    assert verdict([*fine, make_bench("d", verified=False, measurements=[])]).startswith(
        "3 operators: 1 NOT verified (d), the others right on 824 cases"
    )


def test_verdict_and_failures_name_a_device_that_is_not_the_cpu(tmp_path):
    failure = Failure("numerics", "f32[7]", "off by one", device="cuda")
    record = make_verify(failures=[failure], checks=[Check("numerics", "failed", 3, device="cuda")])
    assert (
        verdict([record])
        == "ns::bias_gelu FAILS verify: 1 failure, first: cuda: numerics on f32[7]: off by one."
    )
    page = show(tmp_path, record)
    assert page.cells("cuda: numerics")[1] == "failed"
    assert "<h4>cuda: numerics <code>f32[7]</code></h4>" in page.source


def test_no_records_is_an_error_with_a_hint(tmp_path):
    with pytest.raises(RecordError, match="there are no records") as caught:
        write_report([], tmp_path / "x.html")
    assert "opwright verify" in str(caught.value)
    assert not (tmp_path / "x.html").exists()


def test_the_newest_record_counts_and_machines_are_kept_apart(tmp_path):
    old = make_verify(failures=FAILURES, created=1.0)
    assert [card.fails for card in collect_cards([make_verify(), old])] == [False]
    assert (
        "1 older record of this operator on this machine not shown"
        in show(tmp_path, make_verify(), old).source
    )
    other = make_verify(machine=make_machine(device="H200"), failures=FAILURES)
    assert [card.fails for card in collect_cards([make_verify(), other])] == [True, False]  # failures first


# --- the tables ---------------------------------------------------------------------------------------


def test_every_input_has_its_numbers(tmp_path):
    bench = make_bench()
    page = show(tmp_path, make_verify(), bench)
    for m in bench.measurements:
        group = page.rows.index([f"{m.direction} {m.dtype}"])
        rows = [[" ".join(cell.split()) for cell in row] for row in page.rows[group + 1 : group + 4]]
        row = next(row for row in rows if row[0] == m.case)
        unit, scale = ("µs", 1.0) if m.time_of("opwright") < 999.5 else ("ms", 1e3)
        assert row[1] == ("in cache" if m.in_cache else "")
        assert row[2] == f"{three(m.time_of('opwright') / scale)} {unit}"
        assert row[3] == "± 1.2 %"
        for column, name in ((5, "eager"), (7, "compile"), (9, "liger")):
            speedup = m.time_of(name) / m.time_of("opwright")
            mark = "~ " if name == "compile" and speedup - 1 <= 0.34 * speedup + 0.012 else ""
            assert row[column] == f"{mark}{three(speedup)}x"
        assert row[10] == f"{three(m.bytes_moved / m.time_of('opwright') / 1000)} GB/s"
        assert row[11] == f"{three(100 * m.bytes_moved / m.time_of('opwright') / 1000 / COPY_GB_S)} %"


def test_a_speedup_within_the_noise_is_marked(tmp_path):
    def speedup_cell(other_us, noise):
        timings = [make_timing("opwright", 100.0, 0.01), make_timing("eager", other_us, noise)]
        one = make_measurement("forward", "f32", 1024, timings=timings)
        return show(tmp_path, make_bench(measurements=[one])).cells(one.case)[5]

    assert speedup_cell(104.0, 0.01) == "1.04x"
    assert speedup_cell(104.0, 0.05) == "~ 1.04x"


def test_checks_show_cases_errors_and_why_they_were_skipped(tmp_path):
    page = show(tmp_path, make_verify())
    assert page.cells("numerics") == ["numerics", "passed", "300", "1.62 ulp", "0.413", "12.1 s"]
    assert page.cells("gradcheck") == ["gradcheck", "passed", "112", "", "0.0800", "400 ms"]
    assert page.cells("second device")[1] == "skipped: only 1 <device> & no more"


def test_failures_are_shown_in_full_and_escaped(tmp_path):
    name = "ns::<script>alert(1)</script >&"
    page = show(tmp_path, make_verify(name, FAILURES), make_bench(name))
    assert not page.mistakes
    assert page.heading == verdict([make_verify(name, FAILURES)])
    assert page.counts["script"] == page.source.count("</script") == 2  # the specifications, not the name
    for text in (
        FAILURES[0].message,
        "grad of `w` is &lt;zero&gt; &amp; more",
        "last column",
        "verify x",
    ):
        assert text in page.source
    assert "This operator fails verify: its times are shown for its author and are no result." in page.source
    assert all(name in json.loads(spec)["title"] for spec in page.specs)


def test_the_machine_card_gives_ranges_where_records_differ(tmp_path):
    page = show(
        tmp_path, make_verify(), make_bench(), make_bench("b", make_machine(copy_gb_s=41.26, load=3.0))
    )
    facts = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", page.source))
    assert facts["copy bandwidth"] == "40.0 GB/s to 41.3 GB/s"
    assert facts["float32 matrix product"] == "125 GFLOP/s"
    assert facts["load average"] == "0.500 to 3.00"
    assert facts["GPU"] == "none"
    assert "The machine was busy when the benchmark ran: load average 3.00 on 2 cores." in page.source


def test_the_page_says_what_its_words_mean(tmp_path):
    source = " ".join(show(tmp_path, make_verify(), make_bench()).source.split())
    for words in (
        "<dt>compile</dt><dd>The same computation under <code>torch.compile</code>",
        "(p75 − p25) / 2 / median",
        "as a share of the copy bandwidth measured on this machine",
        "the share of roof may pass 100 %",
        "One call on the smallest input: opwright 3.10 µs, eager 6.28 µs.",
    ):
        assert words in source


# --- a GPU --------------------------------------------------------------------------------------------


GPU = make_machine(
    device="H200",
    driver="580.1 (CUDA 13.0)",
    gpu_memory_bytes=150 * 10**9,
    gpu_l2_bytes=60 * 2**20,
    multiprocessors=132,
    copy_gb_s=4250.0,
    compute_gflops=51000.0,
)


def make_gpu_bench(name="ns::bias_gelu", **changes) -> BenchRecord:
    bench = make_bench(name, GPU, device="cuda", **changes)
    for m in bench.measurements:
        m.copy_us = 0.75 * m.timings[0].median_us
        for t in m.timings:
            t.warm_us, t.host_us = 0.5 * t.median_us, 4.25
    return bench


def test_a_gpu_shows_cold_warm_and_host_times_and_the_copy_of_the_same_size(tmp_path):
    bench = make_gpu_bench()
    page = show(tmp_path, bench)
    assert page.mistakes == []
    one = bench.measurements[1]
    rows = [[" ".join(cell.split()) for cell in row] for row in page.rows]
    head = next(row for row in rows if row[:1] == ["input"])
    assert head[2:5] == ["Opwright, cold ± noise", "warm", "host"]
    row = next(row for row in rows if row[0] == one.case)
    ours = one.time_of("opwright")
    assert row[2] == f"{three(ours)} µs"
    assert row[4:6] == [f"{three(ours / 2)} µs", "4.25 µs"]
    assert row[7] == f"{three(one.time_of('eager') / ours)}x"
    assert row[-1] == "75.0 %"
    assert "(on H200, load average 0.500)" in page.source
    assert "Median device time of a call on a cold cache" in page.source
    assert "of this GPU's copy bandwidth" in page.heading
    facts = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", page.source))
    assert facts["GPU: copy bandwidth"] == "4.25 TB/s"
    assert facts["GPU memory"] == "150 GB"
    assert facts["L2 cache"] == "62.9 MB"
    assert facts["GPU driver"] == "580.1 (CUDA 13.0)"
    assert "copy bandwidth" not in facts
    assert not {"warm", "host"} & {cell for row in show(tmp_path, make_bench()).rows for cell in row}


def test_cpu_and_gpu_of_one_machine_are_two_cards_with_one_verify(tmp_path):
    on_cpu = make_bench(
        machine=make_machine(device="H200", copy_gb_s=COPY_GB_S, compute_gflops=COMPUTE_GFLOPS)
    )
    checked = make_verify(machine=make_machine(device="H200"))
    old = make_gpu_bench(created=1.0)
    cards = collect_cards([on_cpu, make_gpu_bench(), checked, old])
    assert sorted((card.place, card.is_verified, card.cases, card.older) for card in cards) == [
        ("EPYC 9B14", True, 412, 1),
        ("H200", True, 412, 1),
    ]
    page = show(tmp_path, on_cpu, make_gpu_bench(), checked)
    facts = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", page.source))
    assert (facts["copy bandwidth"], facts["GPU: copy bandwidth"]) == ("40.0 GB/s", "4.25 TB/s")
    assert '<span class="muted">EPYC 9B14</span>' in page.source
    assert '<span class="muted">H200</span>' in page.source


def test_a_call_that_waits_for_the_gpu_is_pointed_out(tmp_path):
    bench = make_gpu_bench()
    bench.measurements[0].timings[0].waits = True
    page = show(tmp_path, bench)
    assert "On 1 input the call waits for the GPU by itself" in page.source
    assert "4.25 µs, waits" in page.source


def test_records_of_before_there_were_devices_are_read(tmp_path):
    """Of a record as version 1 wrote it, without any field that came later."""
    later = {"device", "driver", "gpu_memory_bytes", "gpu_l2_bytes", "multiprocessors"}
    later |= {"warm_us", "host_us", "waits", "copy_us"}
    content = encodable(make_bench())
    host_us = content["host_us"]

    def strip(value):
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k not in later}
        return [strip(v) for v in value] if isinstance(value, list) else value

    stripped = strip(content) | {"host_us": host_us}
    stripped["machine"]["device"] = ""
    path = tmp_path / "old.json"
    path.write_text(json.dumps(stripped))
    assert read(path) == make_bench()
    assert not read(path).on_gpu


# --- the page -----------------------------------------------------------------------------------------


def every_record():
    bare = make_machine(cpu="Old & slow")
    return [
        make_verify(),
        make_bench(),
        make_verify("ns::lstm", FAILURES),
        make_bench("ns::d_sigmoid", flop_each=None),
        make_bench("ns::bare", bare, flop_each=None),
        make_bench("ns::flop_only", bare, host_us={}),
        make_bench("ns::half", make_machine(compute_gflops=90.0)),
        make_bench("ns::empty", measurements=[]),
    ]


def test_the_page_stands_alone_balanced_and_small(tmp_path):
    page = show(tmp_path, *every_record())
    assert page.mistakes == []
    assert len(set(page.ids)) == len(page.ids)
    assert page.references
    assert all(r == "data:," or (r.startswith("#") and r[1:] in page.ids) for r in page.references)
    assert not re.search(r"@import|url\((?!#)", page.source)
    assert "default-src 'none'" in page.source
    assert "None" not in re.sub(r"<script.*?</script>", "", page.source, flags=re.DOTALL)
    assert "nan" not in " ".join(re.findall(r'="([^"]*)"', page.source)).split()
    assert len(page.source.encode()) < 300_000
    for reference in re.findall(r'aria-(?:labelledby|describedby)="([^"]*)"', page.source):
        assert reference in page.ids


def test_what_was_not_measured_is_said_and_not_drawn(tmp_path):
    bare = make_machine()
    page = show(tmp_path, make_bench(machine=bare, flop_each=None, host_us={}))
    assert (
        "The copy bandwidth of the machine was not measured, so no share of it can be given." in page.source
    )
    shares = [row[11].strip() for row in page.rows if len(row) == 12]
    assert shares == 12 * [""]
    assert 'class="bound"' not in page.source
    assert 'class="roof"' not in page.source
    assert "Roofline" not in page.source
    assert "copy bandwidth" not in verdict([make_bench(machine=bare)])
    assert "The roofs of this machine were not measured." in show(tmp_path, make_bench(machine=bare)).source


# --- the pictures -------------------------------------------------------------------------------------


def find_svgs(page: Page, start: str) -> list[str]:
    found = re.findall(r"<svg.*?</svg>", page.source, re.DOTALL)
    return [svg for svg in found if re.search(r"<title [^>]*>([^<]*)", svg)[1].startswith(start)]


def numbers(pattern: str, svg: str) -> list[tuple[float, ...]]:
    return [tuple(float(x) for x in found.groups()) for found in re.finditer(pattern, svg)]


def test_time_against_size_places_points_and_the_memory_slope_on_one_scale(tmp_path):
    bench = make_bench()
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
    # Only the noise of compile, 34 %, is larger than a point.
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
    (svg,) = find_svgs(show(tmp_path, make_bench(measurements=[one])), "ns::bias_gelu: roofline")
    (tail,) = numbers(r'y1="([\d.]+)" x2="[\d.]+" y2="[\d.]+" class="tail"/><line', svg)
    (head,) = numbers(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="3.4" class="filled"/></g>(?!<text)', svg)
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
    page = show(tmp_path, make_bench(measurements=[odd], flop_each=None))
    assert page.mistakes == []
    assert (page.counts.get("b", 0), page.counts.get("i", 0)) == (0, 1)  # <i> is the meter's
    assert page.source.count("&lt;b&gt;&amp;") >= 4


def test_bars_give_shares_where_nobody_counted_operations(tmp_path):
    bench = make_bench(flop_each=None)
    (svg,) = find_svgs(show(tmp_path, bench), "ns::bias_gelu: share of the copy bandwidth")
    bars = numbers(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', svg)
    (line,) = numbers(r'<line x1="([\d.]+)" y1="[\d.]+" x2="[\d.]+" y2="[\d.]+" class="roof"', svg)
    assert len(bars) == 12
    shares = [m.roof_share for m in sorted(bench.measurements, key=lambda m: m.direction == "backward")]
    for (left, width), share in zip(bars, shares, strict=True):
        assert width / (line[0] - left) == pytest.approx(share, abs=0.003)
    values = re.findall(r'class="value">([\d.]+ %)<', svg)
    assert values == [f"{three(100 * share)} %" for share in shares]
    assert svg.count("bar hollow") == sum(m.in_cache for m in bench.measurements)


def test_specifications_hold_the_data_of_the_pictures(tmp_path):
    bench = make_bench()
    roofline, sizes = [json.loads(spec) for spec in show(tmp_path, bench).specs]
    by_input = {(v["direction"], v["case"]): v for v in roofline["data"]["values"]}
    assert len(by_input) == 12
    for m in bench.measurements:
        value = by_input[m.direction, m.case]
        assert value["intensity"] == pytest.approx(m.flop / m.bytes_moved, rel=1e-4)
        assert value["opwright"] == pytest.approx(m.flop / m.time_of("opwright") / 1e3, rel=1e-4)
        assert value["eager"] == pytest.approx(m.flop / m.time_of("eager") / 1e3, rel=1e-4)
    assert len(sizes["data"]["values"]) == 12 * 4
    for value in sizes["data"]["values"]:
        key = (value["direction"], value["dtype"], value["size"])
        (m,) = [m for m in bench.measurements if (m.direction, m.dtype, m.axes["elements"]) == key]
        assert value["time_us"] == pytest.approx(m.time_of(value["candidate"]), rel=1e-4)
        assert value["copy_us"] == pytest.approx(m.bytes_moved / COPY_GB_S / 1e3, rel=1e-4)
        assert value["low_us"] < value["time_us"] < value["high_us"]


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


def test_the_report_imports_without_torch():
    code = "import sys, opwright.report; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
    )


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
    assert dom.count("<svg") == dom.count("</svg>") == path.read_text().count("<svg") == 5
    assert html.escape(verdict([make_verify(), make_bench()]), quote=False) in dom
