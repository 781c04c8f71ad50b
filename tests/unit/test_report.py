"""The report: its numbers against the records, its page against a parser."""

from __future__ import annotations

import json
import re
from statistics import median

import pytest
from report_cases import (
    COMPUTE_GFLOPS,
    COPY_GB_S,
    FAILURES,
    every_record,
    make_bench,
    make_gpu_bench,
    make_machine,
    make_measurement,
    make_timing,
    make_verify,
    show,
    three,
)

from opwright.errors import RecordError
from opwright.records import (
    Check,
    Conditions,
    Failure,
    encodable,
    read,
)
from opwright.report import verdict, write_report
from opwright.report.cards import collect_cards

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


# --- under which conditions ---------------------------------------------------------------------------


CONDITIONS = Conditions("own", [0, 1, 2, 3, 8], "keeps", 0.31, 1.4, 2700.0, 3400.0, witnessed=True, governor="powersave")


def test_the_conditions_of_a_timing_are_shown(tmp_path):
    page = show(tmp_path, make_bench(conditions=CONDITIONS))
    assert (
        "Measured in a process of its own, timed by another process as well; 2 threads on CPUs 0-3, 8; freed memory kept for "
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
    assert "was busy" not in show(tmp_path, make_bench(machine=one_thread, conditions=free)).source
    full = Conditions("own", [0], "keeps", 1.9, 1.9)
    assert "load average 1.90 on 1 core." in show(tmp_path, make_bench(machine=one_thread, conditions=full)).source


def test_a_candidate_without_a_process_of_its_own_is_said_so(tmp_path):
    alone = show(tmp_path, make_verify())
    assert "(backends: cpu)" in alone.source
    shared = show(tmp_path, make_verify(in_process="a fork cannot use a GPU"))
    assert "(backends: cpu; in the process of its caller: a fork cannot use a GPU)" in shared.source


def test_one_that_bench_has_refused_has_no_speed(tmp_path):
    why = "it did not return within 120 s (while timing forward f32[8])"
    refused = make_bench(measurements=[], verified=False, refused=why)
    assert verdict([make_verify(), refused]) == f"ns::bias_gelu: right on 412 cases, REFUSED by bench: {why}."
    page = show(tmp_path, make_verify(), refused, make_verify("ns::other"), make_bench("ns::other"))
    assert f"Bench has refused this operator: {why}." in page.source
    assert page.cells("ns::bias_gelu")[1] == "refused"
    assert "right on 824 cases, 1 REFUSED by bench (ns::bias_gelu), " in page.heading
    assert page.source.count("; refused by bench 2026-11-18 11:06 UTC.") == 1  # nothing was measured
    assert page.source.count("; measured 2026-11-18") == 1
    left_out = make_bench(refused="`eager` ended the process, with exit code 3")
    assert "A rival was left out: `eager` ended the process" in show(tmp_path, left_out).source


def test_memory_is_given_in_results(tmp_path):
    bench = make_bench()
    for m, peak in zip(bench.measurements, [4096, 8192], strict=False):
        m.timings[0].peak_bytes, m.output_bytes = peak, 4096
    assert "A call held at most 1.00x to 2.00x the memory of its results." in show(tmp_path, bench).source
