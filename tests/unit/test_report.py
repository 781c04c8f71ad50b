"""The report: its numbers against the records, its page against a parser."""

from __future__ import annotations

import html
import json
import math
import re
from math import prod

import pytest
from report_cases import (
    COMPUTE_GFLOPS,
    COPY_GB_S,
    FAILURES,
    compare,
    every_record,
    find_svg,
    make_bench,
    make_gpu_bench,
    make_machine,
    make_measurement,
    make_old_bench,
    make_timing,
    make_verify,
    show,
    texts,
    three,
)

from opwright.cli.bench_tables import print_bench, table_of
from opwright.errors import RecordError
from opwright.records import (
    Check,
    Comparison,
    Conditions,
    Failure,
    encodable,
    read,
)
from opwright.report import verdict, write_markdown, write_report
from opwright.report.cards import collect_cards
from opwright.report.ratios import tell_ratio, tell_speed

# --- the verdict --------------------------------------------------------------------------------------


def mean(ratios) -> float:
    """The geometric mean, by another route than the record's."""
    return prod(ratios) ** (1 / len(ratios))


def test_verdict_gives_each_direction_its_ratios_with_their_intervals():
    bench = make_bench()
    told = []
    for direction in ("forward", "backward"):
        inside = [m for m in bench.measurements if m.direction == direction]
        eager, compiled, liger = (
            mean([m.comparison_with(name).ratio for m in inside]) for name in ("eager", "compile", "liger")
        )
        half = 100 * (math.exp(math.log(1.03) / math.sqrt(len(inside))) - 1)
        told.append(
            f"{direction} {eager:.2f}x faster than eager (±{half:.1f} %), {compiled:.2f}x faster than torch.compile (±{half:.1f} %) "
            f"and {liger:.2f}x faster than liger (±{half:.1f} %)"
        )
    assert verdict([make_verify(), bench]) == (
        f"ns::bias_gelu: right on 412 cases; {'; '.join(told)}; at 75 % (forward) and 75 % (backward) of this machine's copy "
        "bandwidth on inputs that do not fit the cache."
    )


def make_one(other_us, visible=0.03, **changes):
    timings = [make_timing("opwright", 100.0), make_timing("eager", other_us)]
    comparisons = [Comparison("eager", other_us / 100, visible, 12)]
    facts = {"timings": timings, "comparisons": comparisons, "roof_share": None}
    return make_measurement("forward", "f32", 2**24, **(facts | changes))


@pytest.mark.parametrize(
    ("other_us", "visible", "words"),
    [
        (50.0, 0.03, "2.00x slower than eager (±3 %)"),
        (100.2, 0.03, "no visible difference from eager"),
        (103.0, 0.004, "1.03x faster than eager (±0.4 %)"),
        (300.0, 0.45, "3.00x faster than eager (±45 %)"),
        (300.0, 1.45, "3.00x faster than eager (imprecise)"),
    ],
)
def test_verdict_says_slower_and_where_no_difference_is_visible(other_us, visible, words):
    bench = make_bench(measurements=[make_one(other_us, visible)])
    assert verdict([bench]) == f"ns::bias_gelu: verified; forward {words}."


def test_verdict_never_averages_forward_and_backward():
    """One median over both hid that an operator was twice as fast forward and half as fast backward."""
    backward = make_one(50.0)
    backward.direction = "backward"
    said = verdict([make_bench(measurements=[make_one(200.0), backward])])
    assert (
        said
        == "ns::bias_gelu: verified; forward 2.00x faster than eager (±3 %); backward 2.00x slower than eager (±3 %)."
    )


def test_verdict_says_on_how_many_inputs_a_candidate_was_timed():
    full = make_bench(measurements=[make_one(200.0), make_one(200.0)])
    full.measurements[0].comparisons.append(Comparison("compile", 1.5, 0.02, 8))
    assert "and 1.50x faster than torch.compile (±2 %) on 1 of 2 inputs." in verdict([full])


def test_a_share_above_100_percent_has_its_reason(tmp_path):
    """A headline said 110 % of the copy bandwidth, without one; what fits the cache counts for nothing."""
    shares = [make_one(200.0, roof_share=1.1, in_cache=False), make_one(200.0, roof_share=0.87, in_cache=False)]
    bench = make_bench(measurements=[*shares, make_one(200.0, roof_share=3.4, in_cache=True)])
    reason = "above 100 % of copy: faster than PyTorch's copy of 40 GB/s here"
    assert verdict([bench]).endswith(
        f"; at 87 % to 110 % of this machine's copy bandwidth on inputs that do not fit the cache ({reason})."
    )
    assert reason in "\n".join(table_of(bench))
    page = show(tmp_path, bench)
    assert html.unescape(page.source).replace("\u00a0", " ").count(reason) >= 3  # title, headline, table
    assert "340 %" not in " ".join(cell for row in page.rows for cell in row)
    bench.measurements[0].roof_share = 7.4
    part = ", or a call moves a part of its arguments alone: `@bias_gelu.cost` declares the bytes"
    assert table_of(bench)[-1] == reason + part
    bench.measurements = bench.measurements[1:]
    assert verdict([bench]).endswith("; at 87 % of this machine's copy bandwidth on inputs that do not fit the cache.")
    assert "above 100 %" not in show(tmp_path, bench).source


def first_row(page, measurement):
    """Returns the cells of the first row of an input; other directions have one of the same name."""
    return next([" ".join(cell.split()) for cell in row] for row in page.rows if row[0] == measurement.case)


def test_a_record_of_version_1_says_that_it_has_no_intervals(tmp_path):
    bench = make_old_bench()
    eager = mean([m.time_of("eager") / m.time_of("opwright") for m in bench.measurements if m.direction == "forward"])
    assert f"forward {eager:.2f}x faster than eager (without an interval), " in verdict([bench])
    page = show(tmp_path, bench)
    assert page.mistakes == []
    assert f"forward: {eager:.2f}x faster than eager (without an interval) (mean of 6 inputs)" in page.source
    head = next(row for row in page.rows if row[0] == "input")
    assert [cell.strip() for cell in head[1:5]] == ["Opwright, warm", "noise", "eager", "vs eager"]
    one = bench.measurements[0]
    assert first_row(page, one)[2:5:2] == ["±1.2 %", f"{one.time_of('eager') / one.time_of('opwright'):.2f}x"]
    assert "Its ratios are those of median times, without an interval." in page.source
    assert "no visible difference" not in page.source.split("How to read the numbers")[0]
    assert "±" not in "".join(texts(find_svg(page, ": speed-ups")))
    assert verdict([bench, make_bench("ns::b")]).endswith(
        "forward against eager: 1 faster, 1 without an interval; backward against eager: 1 faster, 1 without an interval."
    )


def test_noise_above_100_percent_is_no_number(tmp_path):
    """A page said ± 12,468 %."""
    old = make_old_bench()
    for m in old.measurements:
        for t in m.timings:
            t.noise = 124.68
    new = make_bench("ns::new")
    for m in new.measurements:
        compare(m, math.inf)
        for t in m.timings:
            t.interval = math.inf
    for bench in (old, new):
        page = show(tmp_path, bench)
        assert first_row(page, bench.measurements[0])[2] == "imprecise"
        assert "inf" not in re.findall(r"[a-z0-9]+", page.source)
        assert "12,468" not in page.source
        assert "±12" not in page.source


def test_verdict_of_a_failure_names_the_first_and_gives_no_speed():
    said = verdict([make_verify(failures=FAILURES), make_bench()])
    assert said == (
        "ns::bias_gelu FAILS verify: 2 failures, first: numerics on f32[7, 13] sliced: error 3.1e-2 at [6, 12]."
    )


def test_verdict_never_calls_the_unverified_right():
    assert verdict([make_bench(verified=False)]).startswith("ns::bias_gelu: NOT verified; ")
    skipped = make_verify(checks=[Check("numerics", "skipped", reason="no compiler")])
    assert verdict([skipped]) == "ns::bias_gelu: NOT verified, no check ran."
    broken = make_verify(checks=[Check("numerics", "passed", 3), Check("opcheck", "failed", 2)])
    assert verdict([broken]) == "ns::bias_gelu FAILS verify: 1 check failed."
    assert [card.cases for card in collect_cards([broken])] == [3]


def test_verdict_of_several_operators():
    fine = [make_verify("a"), make_bench("a"), make_verify("b")]
    assert verdict(fine) == (
        "2 operators: right on 824 cases; forward against eager: 1 faster; backward against eager: 1 faster."
    )
    assert verdict([*fine, make_verify("c", FAILURES)]) == "1 of 3 operators FAIL verify: c (2 failures)."
    assert verdict([*fine, make_bench("d", verified=False, measurements=[])]).startswith(
        "3 operators: 1 NOT verified (d), the others right on 824 cases"
    )
    refused = make_bench("d", verified=False, measurements=[], refused="it does not pass verify")
    assert verdict([*fine, refused]).startswith(
        "3 operators: 1 NOT verified (d), the others right on 824 cases; 1 not measured (d)"
    )


def test_verdict_and_failures_name_a_device_that_is_not_the_cpu(tmp_path):
    failure = Failure("numerics", "f32[7]", "off by one", device="cuda")
    record = make_verify(failures=[failure], checks=[Check("numerics", "failed", 3, device="cuda")])
    assert verdict([record]) == "ns::bias_gelu FAILS verify: 1 failure, first: cuda: numerics on f32[7]: off by one."
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
    assert "1 older record of this operator on this machine not shown" in show(tmp_path, make_verify(), old).source
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
        assert row[1] == f"{three(m.time_of('opwright') / scale)} {unit}"
        assert row[2] == "±2.1 %"
        for column, name in ((4, "eager"), (6, "compile"), (8, "liger")):
            assert row[column] == f"{1.01 * m.time_of(name) / m.time_of('opwright'):.2f}x ±3 %"
        assert row[9] == f"{three(m.bytes_moved / m.time_of('opwright') / 1000)} GB/s"
        share = round(100 * m.bytes_moved / m.time_of("opwright") / 1000 / COPY_GB_S)
        assert row[10] == ("in cache" if m.in_cache else f"{share} %")


def test_the_page_has_each_ratio_and_interval_of_bench_to_the_digit(tmp_path, capsys):
    """The report said 2.3x and 1.4x faster where bench had printed 1.20x ±16 % and 1.13x ±23 %."""
    bench = make_bench()
    ratios = {"eager": (1.2, 0.16), "compile": (0.815, 0.045), "liger": (1.13, 0.23)}
    for rank, m in enumerate(bench.measurements):
        m.comparisons = [
            Comparison(name, ratio * (1 + rank / 40), visible * (1 + rank / 3), 12)
            for name, (ratio, visible) in ratios.items()
        ]
        m.roof_share = 0.3 + rank / 7
        m.ours.interval = 0.004 * 2**rank
    bench.warnings = ["the machine is busy (load 7.8 on 2 cores): confidence intervals are wider than ±100 %"]
    bench.left_out = ["compile: timed on 4 of 8 inputs"]
    bench.notes = ["the gradient is derived from the reference: it runs 2 operators of the forward again"]
    page = show(tmp_path, make_verify(), bench)
    text = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page.source)).split())
    print_bench(bench)
    printed = capsys.readouterr().out.splitlines()
    summaries, table = printed[:6], table_of(bench)
    for line in summaries:
        assert re.match(r"(for|back)ward: ", line)
        assert f" {line} " in text
    head = re.split(r" {2,}", table[0])
    for line, m in zip(table[1:], bench.measurements, strict=False):
        cells = dict(zip(head, re.split(r" {2,}", line), strict=True))
        (row,) = [
            row
            for row in page.rows
            if row[:1] == [m.case] and row in page.rows[page.rows.index([f"{m.direction} {m.dtype}"]) :][:4]
        ]
        row = [" ".join(cell.split()) for cell in row]
        shown = {"95 % CI": row[2], "vs eager": row[4], "vs compile": row[6], "vs liger": row[8], "of copy": row[10]}
        assert shown == {name: cells[name] for name in shown}
    assert table[-1] == "above 100 % of copy: faster than PyTorch's copy of 40 GB/s here"
    assert table[-1] in text
    assert bench.warnings[0] in text
    assert bench.notes[0] in text
    assert f"Skipped: {bench.left_out[0]}" in text
    for s in bench.summarize():
        assert tell_speed(s.ratio, s.visible, s.candidate) in page.heading.replace("\u00a0", " ")
        assert tell_ratio(s.ratio, s.visible) in " ".join(texts(find_svg(page, ": speed-ups")))
    markdown = write_markdown([make_verify(), bench], tmp_path / "x.md").read_text()
    assert all(f"| {tell_ratio(s.ratio, s.visible)}" in markdown for s in bench.summarize() if s.candidate != "liger")


def test_the_verdict_of_bench_is_that_of_the_page(tmp_path):
    def cell(visible, ratio=1.04):
        one = make_one(104.0, comparisons=[Comparison("eager", ratio, visible, 12)])
        page = show(tmp_path, make_bench(measurements=[one]))
        (kind,) = re.findall(r'<td class="ratio (\w*)">', page.source)
        return page.cells(one.case)[4], kind

    assert cell(0.01) == ("1.04x ±1 %", "faster")
    assert cell(0.05) == ("no visible difference", "same")
    assert cell(0.01, 0.5) == ("0.50x ±1 %", "slower")


def test_warnings_of_bench_are_on_the_page_in_its_words(tmp_path):
    bench = make_bench(warnings=["times vary: `--seconds 60` measures longer"], left_out=["eager: it <crashed>"])
    bench.measurements[2].warnings = ["faster than the machine's limits allow"]
    page = show(tmp_path, bench)
    (listed,) = re.findall(r'aria-label="Warnings">(.*?)</ul>', page.source, re.DOTALL)
    m = bench.measurements[2]
    assert [html.unescape(item) for item in re.findall(r"<li>(.*?)</li>", listed)] == [
        "times vary: `--seconds 60` measures longer",
        f"{m.direction} {m.case}: faster than the machine's limits allow",
        "Skipped: eager: it <crashed>",
    ]
    text = write_markdown([bench], tmp_path / "x.md").read_text()
    assert "- Skipped: eager: it \\<crashed\\>" in text


def test_the_answer_is_first_and_the_machine_after(tmp_path):
    source = show(
        tmp_path, make_verify(failures=FAILURES), make_bench(warnings=["w1"]), make_verify("b"), make_bench("b")
    ).source
    places = [
        source.index(text)
        for text in (
            '<h1 class="verdict',
            'id="overview"',
            "w1",
            ">Failures<",
            "repeat</b>",
            ">Machine</h2>",
            "How to read",
        )
    ]
    assert places == sorted(places)


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
    assert "script" not in page.counts
    for text in (
        FAILURES[0].message,
        "grad of `w` is &lt;zero&gt; &amp; more",
        "last column",
        "verify x",
    ):
        assert text in page.source
    assert "This operator fails verify: its times are shown for debugging only and are not a result." in page.source
    assert "The command of a failure repeats its smallest case. Correct the kernel, or the reference" in page.source


def test_the_machine_card_gives_ranges_where_records_differ(tmp_path):
    page = show(
        tmp_path, make_verify(), make_bench(), make_old_bench("b", machine=make_machine(copy_gb_s=41.26, load=3.0))
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
        "“imprecise” is wider than ±100 %",
        "the geometric mean, forward and backward apart",
        "as a share of the copy bandwidth measured on this machine",
        "the share may pass 100 %, so tables give none",
        "Host time of the smallest call: opwright 3.10 µs, eager 6.28 µs.",
    ):
        assert words in source
    assert "(p75 − p25) / 2 / median" not in source
    assert "(p75 − p25) / 2 / median" in show(tmp_path, make_old_bench()).source


# --- a GPU --------------------------------------------------------------------------------------------


def test_a_gpu_shows_cold_warm_and_host_times_and_the_copy_of_the_same_size(tmp_path):
    bench = make_gpu_bench()
    page = show(tmp_path, bench)
    assert page.mistakes == []
    one = bench.measurements[1]
    rows = [[" ".join(cell.split()) for cell in row] for row in page.rows]
    head = next(row for row in rows if row[:1] == ["input"])
    assert head[1:5] == ["Opwright, cold", "95 % CI", "warm", "host"]
    row = next(row for row in rows if row[0] == one.case)
    ours = one.time_of("opwright")
    assert row[1] == f"{three(ours)} µs"
    assert row[3:5] == [f"{three(ours / 2)} µs", "4.25 µs"]
    assert row[6] == f"{1.01 * one.time_of('eager') / ours:.2f}x ±3 %"
    assert row[-1] == "75 %"
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
    on_cpu = make_bench(machine=make_machine(device="H200", copy_gb_s=COPY_GB_S, compute_gflops=COMPUTE_GFLOPS))
    checked = make_verify(machine=make_machine(device="H200"))
    old = make_gpu_bench(created=1.0)
    cards = collect_cards([on_cpu, make_gpu_bench(), checked, old])
    assert sorted((card.place, card.is_verified, card.cases, card.older) for card in cards) == [
        ("EPYC 9B14", True, 412, 0),
        ("H200", True, 412, 0),
    ]
    assert sorted(len(card.history) for card in cards) == [1, 2]
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
    later |= {"warm_us", "host_us", "waits", "copy_us", "interval"}
    content = encodable(make_old_bench())
    host_us = content["host_us"]

    def strip(value):
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k not in later}
        return [strip(v) for v in value] if isinstance(value, list) else value

    stripped = strip(content) | {"host_us": host_us}
    stripped["machine"]["device"] = ""
    path = tmp_path / "old.json"
    path.write_text(json.dumps(stripped))
    assert read(path) == make_old_bench()
    assert not read(path).on_gpu


# --- the page -----------------------------------------------------------------------------------------


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
        assert set(reference.split()) <= set(page.ids)


def test_what_was_not_measured_is_said_and_not_drawn(tmp_path):
    bare = make_machine()
    page = show(tmp_path, make_bench(machine=bare, flop_each=None, host_us={}))
    assert "The copy bandwidth of the machine was not measured, so no share of it can be given." in page.source
    shares = [row[10].strip() for row in page.rows if len(row) == 11][1:]
    assert len(shares) == 12
    assert set(shares) == {"in cache", ""}
    assert 'class="bound"' not in page.source
    assert 'class="roof"' not in page.source
    assert "Roofline" not in page.source
    assert "copy bandwidth" not in verdict([make_bench(machine=bare)])
    assert "The roofs of this machine were not measured." in show(tmp_path, make_bench(machine=bare)).source


# --- under which conditions ---------------------------------------------------------------------------


CONDITIONS = Conditions("own", [0, 1, 2, 3, 8], "keeps", 0.31, 1.4, 2700.0, 3400.0, governor="powersave")


def test_the_conditions_of_a_timing_are_shown(tmp_path):
    page = show(tmp_path, make_bench(conditions=CONDITIONS))
    assert (
        "Measured in a process of its own; 2 threads on CPUs 0-3, 8; freed memory kept for "
        "the next call; load 0.310 to 1.40; clock 2,700 to 3,400 MHz (powersave)."
    ) in page.source
    caller = Conditions("caller", [1], "default", 0.3, 0.3)
    page = show(tmp_path, make_bench(conditions=caller, threads=1))
    assert "Measured in the process of its caller; 1 thread on CPU 1; freed memory the allocator" in page.source
    assert "; load 0.300." in page.source
    assert "Measured in" not in show(tmp_path, make_bench()).source  # an old record does not know


def test_the_load_is_held_against_the_cpus_that_there_were(tmp_path):
    one_thread = make_machine(cores=1, load=1.9)
    free = Conditions("own", [0, 1, 2, 3], "keeps", 1.9, 1.9)
    assert "was busy" not in show(tmp_path, make_old_bench(machine=one_thread, conditions=free)).source
    full = Conditions("own", [0], "keeps", 1.9, 1.9)
    assert "load average 1.90 on 1 core." in show(tmp_path, make_old_bench(machine=one_thread, conditions=full)).source


def test_a_candidate_without_a_process_of_its_own_is_said_so(tmp_path):
    alone = show(tmp_path, make_verify())
    assert "(backends: cpu)" in alone.source
    shared = show(tmp_path, make_verify(in_process="a fork cannot use a GPU"))
    assert "(backends: cpu; in the process of its caller: a fork cannot use a GPU)" in shared.source


def test_one_that_bench_has_refused_has_no_speed_but_cause_and_remedy(tmp_path):
    why = "it did not return within 120 s (while timing forward f32[8])"
    refused = make_bench(measurements=[], verified=False, refused=why)
    assert verdict([make_verify(), refused]) == f"ns::bias_gelu: right on 412 cases; bench stopped: {why}."
    page = show(tmp_path, make_verify(), refused, make_verify("ns::other"), make_bench("ns::other"))
    wrong = verdict([make_verify("ns::other"), refused, make_verify("ns::wrong", FAILURES)])
    assert wrong == "1 of 3 operators FAIL verify: ns::wrong (2 failures); 1 not measured (ns::bias_gelu)."
    assert f"<pre>{why}</pre>\n<p><b>remedy</b> `opwright verify TARGET` shows which check fails" in page.source
    assert page.cells("ns::bias_gelu")[1:] == ["not measured", "412", *5 * [""]]
    assert "right on 824 cases; 1 not measured (ns::bias_gelu); " in page.heading
    assert page.source.count("; bench stopped 2026-11-18 11:06 UTC") == 1
    assert page.source.count("; measured 2026-11-18") == 1
    text = write_markdown([make_verify(), refused], tmp_path / "x.md").read_text()
    assert (
        f"bench stopped: {why.replace('[', chr(92) + '[').replace(']', chr(92) + ']')}. \\`opwright verify TARGET\\`"
        in text
    )


def test_a_refusal_after_some_inputs_is_no_speed_and_has_the_remedy_of_its_error(tmp_path):
    stopped = make_bench(
        refused="results are wrong (got 2; expected 3)", hint="`opwright verify op.py --check numerics`"
    )
    assert verdict([stopped]) == "ns::bias_gelu: verified; bench stopped: results are wrong (got 2; expected 3)."
    page = show(tmp_path, stopped)
    assert "<p><b>remedy</b> `opwright verify op.py --check numerics`</p>" in page.source
    assert "the times of the inputs that it measured are not a result." in page.source
    assert 'class="summaries"' not in page.source
    assert first_row(page, stopped.measurements[0])[4].endswith("x ±3 %")


def test_memory_is_given_in_results(tmp_path):
    bench = make_bench()
    for m, peak in zip(bench.measurements, [4096, 8192], strict=False):
        m.timings[0].peak_bytes, m.output_bytes = peak, 4096
    assert "A call held at most 1.00x to 2.00x the memory of its results." in show(tmp_path, bench).source
