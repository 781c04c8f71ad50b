"""How large a difference has to be to show: against tables, and against simulated machines."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from pathlib import Path

import pytest
import torch

from opwright.bench.roofline import limits_of
from opwright.bench.statistics import (
    TRIMMED,
    compare,
    compare_all,
    interval_of,
    interval_of_blocks,
    into_blocks,
    reason_for_hint,
    row_of,
    rows_of_records,
    student,
)
from opwright.bench.timers import Timed, in_turn, join, summarize, time_interleaved
from opwright.build.store import Store
from opwright.records import BenchRecord, Comparison, Limits, Machine, Measurement, Timing
from opwright.report.ratios import tell_interval, tell_ratio, tell_speed, tell_summary


@pytest.mark.parametrize(
    ("freedom", "confidence", "t"),
    [(1, 0.95, 12.706), (2, 0.95, 4.303), (4, 0.95, 2.776), (7, 0.95, 2.365), (7, 0.99, 3.499), (30, 0.95, 2.042), (120, 0.99, 2.617)],
)  # fmt: skip
def test_student_is_that_of_the_tables(freedom: int, confidence: float, t: float) -> None:
    assert student(freedom, confidence) == pytest.approx(t, abs=6e-4)


def moods(random_: random.Random, rounds: int):
    """Yields, for each round, how much slower than at best the machine is: it stays in a mood for a while."""
    mood = 0.0
    for _ in range(rounds):
        mood = 0.9 * mood + random_.gauss(0, 0.05)
        yield math.exp(mood)


def pair_of_samples(random_: random.Random, ratio: float, blocks: int = 8, each: int = 5):
    ours, theirs = [], []
    for mood in moods(random_, blocks * each):
        ours.append(10 * mood * math.exp(random_.gauss(0, 0.01)))
        theirs.append(10 * ratio * mood * math.exp(random_.gauss(0, 0.01)))
        for samples in (ours, theirs):
            if random_.random() < 0.1:  # someone else had the core for a while
                samples[-1] *= 3
    return into_blocks(ours, blocks), into_blocks(theirs, blocks)


def test_the_same_version_stays_below_the_smallest_visible_difference() -> None:
    random_, runs = random.Random(1), 1500
    found = [compare("x", *pair_of_samples(random_, 1.0)) for _ in range(runs)]
    silent = sum(c.verdict == "same" for c in found) / runs
    assert 0.93 < silent < 0.985  # 95 % were promised; three standard errors are 1.7 %


def test_a_difference_that_is_there_is_seen_on_its_side() -> None:
    random_ = random.Random(2)
    for ratio, verdict in ((1.06, "faster"), (0.94, "slower")):
        found = [compare("x", *pair_of_samples(random_, ratio, each=11)) for _ in range(200)]
        assert sum(c.verdict == verdict for c in found) > 190
        assert sorted(c.visible for c in found)[100] < 0.015


def test_a_ratio_far_from_that_of_the_fastest_samples_is_imprecise() -> None:
    """Waits of 20 ms, which a candidate with several threads meets while other work has their cores."""
    random_ = random.Random(4)
    ours = [[3 + random_.random() for _ in range(5)] for _ in range(8)]
    theirs = [[20_000 + 1000 * random_.random() for _ in range(5)] for _ in range(8)]
    assert compare("x", ours, theirs).visible < 0.2
    theirs[3][2] = 30.0
    found = compare("x", ours, theirs)
    assert found.ratio / (1 + found.visible) < 10.01  # 30 / 3


@pytest.mark.parametrize("far_off", [0.0, 0.1])
def test_rows_that_are_read_together_are_silent_together(far_off: float) -> None:
    random_, runs = random.Random(3), 400
    silent, visible = 0, []
    for _ in range(runs):
        rows = []
        for name in ("forward a", "forward b", "backward a", "backward b"):
            pairs = []
            for _ in range(8):
                shift = random_.gauss(0, 0.02)  # where a process puts its code
                shift += random_.choice((-0.4, 0.4)) if random_.random() < far_off else 0  # not one quiet moment
                base = [10 * math.exp(shift + abs(random_.gauss(0, 0.05))) for _ in range(20)]
                pairs.append((base, [10 * math.exp(abs(random_.gauss(0, 0.05))) for _ in range(20)]))
            rows.append(row_of(name, pairs, 4))
        silent += all(row.verdict == "same" for row in rows)
        visible += [row.visible for row in rows]
    assert silent / runs > 0.97
    assert sorted(visible)[len(visible) // 2] < 0.06  # a mean's would be a fifth where one number of ten is far off


def test_a_row_names_what_has_changed() -> None:
    pairs = [([10.0, 14.0], [12.0 + 0.01 * i, 19.0]) for i in range(9)]
    row = row_of("forward f32[8] by=2", pairs, 1)
    assert (row.direction, row.case, row.verdict) == ("forward", "f32[8] by=2", "slower")
    assert row.base_us == 10.0
    assert row.now_us == pytest.approx(12.04)
    assert row.ratio == pytest.approx(10 / 12.04, rel=1e-4)


def test_the_trimmed_interval_is_yuens() -> None:
    numbers = [-4.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 70.0]
    center, half = interval_of(numbers, trimmed=TRIMMED)
    assert center == pytest.approx(3.5)
    squares = 2 * (2.5**2 + 2.5**2 + 1.5**2 + 0.5**2)  # of 1, 1, 2, 3, 4, 5, 6, 6
    assert half == pytest.approx(student(5, 0.95) * math.sqrt(squares / (6 * 5)))
    center, half = interval_of([0.1, 0.2], trimmed=TRIMMED)  # too few to trim
    assert center == pytest.approx(0.15)
    assert half == pytest.approx(student(1, 0.95) * 0.05)
    assert interval_of([0.3], trimmed=TRIMMED) == (0.3, math.inf)


def test_one_number_says_nothing_and_blocks_share_all_samples() -> None:
    assert interval_of([0.3]) == (0.3, math.inf)
    assert [len(b) for b in into_blocks(list(range(21)), 8)] == [3, 2, 3, 2, 3, 3, 2, 3]
    assert list(itertools.chain(*into_blocks(list(range(21)), 8))) == list(range(21))
    assert len(into_blocks([1.0, 2.0, 3.0], 8)) == 1


# --- taking turns -------------------------------------------------------------------------------------------------


def test_everyone_follows_everyone() -> None:
    followed = {(a, b): 0 for a in "abc" for b in "abc"}
    order = "".join(name for i in range(60) for name, _ in in_turn(dict.fromkeys("abc"), i))
    for pair in itertools.pairwise(order):
        followed[pair] += 1
    assert min(n for (a, b), n in followed.items() if a != b) > 15


def test_timing_ends_by_precision_or_by_time_and_says_so_before_each_block() -> None:
    counts = {"a": 0, "b": 0}
    blocks, results = [], []

    def call(name: str):
        def count() -> int:
            counts[name] += 1
            return counts[name]

        return count

    calls = {"a": call("a"), "b": call("b")}
    timed = time_interleaved(
        calls, 10.0, precision=1e9, repeats=3, before_block=blocks.append, on_result=lambda *r: results.append(r)
    )
    assert timed.stopped == "precision"
    assert blocks == list(range(8))
    assert [number for number, _ in results] == blocks  # of each block the first sample's last call
    assert results[0][1] == 3
    assert timed.comparisons[0].blocks == 8
    assert counts["a"] == counts["b"] == 3 * len(timed.timings[0].samples_us)
    timed = time_interleaved(calls, 0.0, precision=0.0, repeats=3)
    assert timed.stopped == "time"
    assert len(timed.timings[0].samples_us) == 3  # a round in each of the three blocks that slow calls have


def test_times_of_several_visits_count_together() -> None:
    """One candidate came later: it is compared in the blocks where both were timed."""
    first = timed_as({"a": 10.0, "b": 20.0})
    second = timed_as({"a": 40.0, "b": 80.0, "c": 40.0})
    both = join([first, second])
    assert [(t.candidate, t.median_us) for t in both.timings] == [("a", 25.0), ("b", 50.0), ("c", 40.0)]
    assert [(c.candidate, c.blocks) for c in both.comparisons] == [("b", 16), ("c", 8)]
    assert [c.ratio for c in both.comparisons] == pytest.approx([2.0, 1.0])
    assert both.timings[0].fresh_us == 1.5
    assert both.timings[2].fresh_us == 2.0


def timed_as(times_us: dict[str, float]) -> Timed:
    blocks = [{name: [us] * 2 for name, us in times_us.items()} for _ in range(8)]
    timings = [summarize(name, blocks) for name in times_us]
    for timing in timings:
        timing.fresh_us = len(times_us) - 1.0
    return Timed(timings, blocks, compare_all(blocks))


def test_the_interval_of_a_time_holds_the_truth_as_often_as_it_says() -> None:
    """Blocks that share a disturbance: 1,000 runs of eight blocks, the middle of the logarithms being 0."""
    rng = random.Random(1)
    inside = 0
    for _ in range(1000):
        blocks = []
        for _ in range(8):
            shared = rng.gauss(0.0, 0.05)
            blocks.append([math.exp(shared + rng.gauss(0.0, 0.02)) for _ in range(5)])
        half = math.log1p(interval_of_blocks(blocks))
        center = statistics.fmean(math.log(statistics.median(block)) for block in blocks)
        inside += abs(center) <= half
    assert 930 <= inside <= 970


def test_a_summary_is_the_geometric_mean_with_its_interval() -> None:
    one = record(10.0, 20.0)
    one.measurements += record(10.0, 5.0).measurements + record(10.0, 10.0).measurements
    (summary,) = one.summarize()
    assert (summary.direction, summary.candidate, summary.inputs) == ("forward", "eager", 3)
    assert (summary.faster, summary.slower) == (1, 1)
    assert summary.ratio == pytest.approx(1.0)
    assert summary.visible == pytest.approx(0.01 / math.sqrt(3), rel=0.01)
    assert tell_summary(summary) == (
        "forward: no visible difference from eager (mean of 3 inputs: 1 faster, 1 slower, 1 no visible difference)"
    )


def test_words_of_ratios() -> None:
    assert tell_ratio(1.414, 0.021) == "1.41x ±2.1 %"
    assert tell_ratio(1.414, 0.5) == "no visible difference"
    assert tell_ratio(0.5, 0.1) == "0.50x ±10 %"
    assert tell_ratio(5.0, 2.0) == "5.00x imprecise"
    assert tell_ratio(1.2, math.inf) == "no visible difference"
    assert tell_ratio(1.414, None) == "1.41x"


@pytest.mark.parametrize(
    ("ratio", "visible"), [(5.0, 2.0), (2.5, 1.0), (1.6, 0.5), (1.4, 0.5), (1.02, 0.03), (9.0, math.inf)]
)
def test_a_slowdown_is_visible_where_a_speedup_of_that_size_is(ratio: float, visible: float) -> None:
    """An operator of 0.40x ±100 % had no visible difference, and one of 2.50x ±100 % was faster."""
    up, down = Comparison("eager", ratio, visible, 9), Comparison("eager", 1 / ratio, visible, 9)
    assert (up.verdict, down.verdict) in {("faster", "slower"), ("same", "same")}
    assert (tell_ratio(ratio, visible) == "no visible difference") == (up.verdict == "same")
    assert (tell_ratio(1 / ratio, visible) == "no visible difference") == (down.verdict == "same")
    assert (tell_speed(1 / ratio, visible, "eager") == "no visible difference from eager") == (down.verdict == "same")
    assert tell_interval(0.004) == "±0.4 %"


# --- records ------------------------------------------------------------------------------------------------------


def record(ours: float, eager: float, *, visible: float | None = 0.01, **machine) -> BenchRecord:
    comparisons = [] if visible is None else [Comparison("eager", eager / ours, visible, 8)]
    timings = [
        Timing(n, us, us, 0.01, [us * f for f in (1.0, 1.01, 0.99) * 8])
        for n, us in (("opwright", ours), ("eager", eager))
    ]
    one = Measurement("forward", "f32[8]", {}, "f32", 64, None, timings, None, True, comparisons=comparisons)
    card = Machine(
        **(
            {
                "cpu": "EPYC",
                "cores": 2,
                "device": "",
                "system": "Linux",
                "python": "3",
                "torch": "2.13",
                "compiler": "g++",
                "load": 0.0,
            }
            | machine
        )
    )
    return BenchRecord("ns::f", [one], {}, True, 2, card, 0.0, 0.0)


def test_a_record_is_compared_by_what_both_have_timed() -> None:
    (row,), missing = rows_of_records(record(10.0, 30.0), record(10.0, 30.0))
    assert (row.verdict, row.ratio, missing) == ("same", 1.0, [])
    (row,), _ = rows_of_records(record(10.0, 30.0), record(13.0, 30.0))
    assert row.verdict == "slower"
    assert row.ratio == pytest.approx(10 / 13)
    # The machine is 30 % slower today, and so is PyTorch: nothing is known of the operator.
    (row,), _ = rows_of_records(record(10.0, 30.0), record(13.0, 39.0))
    assert row.verdict == "same"
    assert row.ratio == pytest.approx(1.0)
    (row,), _ = rows_of_records(record(10.0, 30.0, visible=None), record(13.0, 30.0, visible=None))
    assert row.verdict == "slower"  # records of version 1 have samples only


def test_another_machine_is_a_hint_only() -> None:
    now = record(13.0, 30.0)
    rows, _ = rows_of_records(now, now)
    assert reason_for_hint(record(10.0, 30.0), now, rows) == ""
    assert reason_for_hint(record(10.0, 30.0, cpu="Xeon"), now, rows) == (
        "the base was measured elsewhere: CPU (EPYC against Xeon)"
    )
    alone = record(10.0, 30.0)
    alone.measurements[0].timings.pop()
    rows, _ = rows_of_records(alone, now)
    assert "no rival in common" in reason_for_hint(alone, now, rows)


# --- the limits of a machine --------------------------------------------------------------------------------------


class Measured:
    """A device whose limits are counted, not measured."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.times = 0

    def measure_limits(self) -> Limits:
        self.times += 1
        return Limits(10.0 + self.times, 1.0, 1.0, {"f32": 1.0}, 1.0, None, 1, 0.0)


def test_limits_are_measured_once_for_a_machine_and_again_when_asked(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OPWRIGHT_CACHE_DIR", str(tmp_path / "store"))
    place, here = Measured(), record(1.0, 1.0).machine
    assert [limits_of(place, here).copy_gb_s for _ in range(3)] == [11.0] * 3
    assert limits_of(place, here, again=True).copy_gb_s == 12.0
    assert limits_of(place, here).copy_gb_s == 12.0
    assert limits_of(place, record(1.0, 1.0, cpu="Xeon").machine).copy_gb_s == 13.0
    (kept,) = [p for p in (Store().root / "limits").iterdir() if "12.0" in p.read_text()]
    kept.write_text(kept.read_text()[:-9])
    assert limits_of(place, here).copy_gb_s == 14.0  # damaged: measured again, and kept
    assert limits_of(place, here).copy_gb_s == 14.0
    assert Store().clean() == 0
    assert limits_of(place, here).copy_gb_s == 15.0


def test_a_store_that_cannot_be_written_is_no_reason_not_to_measure(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPWRIGHT_CACHE_DIR", str(tmp_path / "file" / "store"))
    assert limits_of(Measured(), record(1.0, 1.0).machine).copy_gb_s == 11.0
