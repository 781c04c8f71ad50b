"""Turns records into the rows of the report's tables, every number already written out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from opwright.errors import plural
from opwright.quantities import (
    BYTES,
    COMPUTE,
    RATE,
    TIME,
    rate_gb_s,
    round_to,
    with_unit,
)
from opwright.records import BenchRecord, Check, Measurement, Record
from opwright.report.cards import Card
from opwright.report.conditions import is_busy
from opwright.report.history import has_history
from opwright.report.ratios import tell_comparison, tell_interval, tell_ratio, tell_share


@dataclass(frozen=True)
class Overview:
    """A row for each card and direction, with the ratios to those that any card was compared with.

    Attributes:
        rivals: "eager", "compile", and "fastest other", for the fastest of the peers of each operator.
        rows: for each card its rows of direction, ratios and share of the copy bandwidth beyond the cache. A wrong
            operator, or one that bench refused, has one row without figures.
    """

    rivals: list[str]
    rows: list[list[tuple[str, list[str], str]]]


def overlook(cards: Sequence[Card]) -> Overview:
    """Returns the summaries of all cards."""
    names = ("eager", "compile", "fastest other")
    found = []
    for card in cards:
        rows = []
        for direction in card.directions if card.summaries or any(map(card.tell_shares, card.directions)) else []:
            told = dict.fromkeys(names, "")
            for s in card.summaries_of(direction):
                ratio = tell_ratio(s.ratio, s.visible)
                if s.candidate in told:
                    told[s.candidate] = ratio
                else:
                    told["fastest other"] = f"{ratio} ({s.candidate})"
            rows.append((direction, told, card.tell_shares(direction)))
        found.append(rows or [("", dict.fromkeys(names, ""), "")])
    used = [name for name in names if any(told[name] for rows in found for _, told, _ in rows)]
    return Overview(used, [[(d, [told[name] for name in used], share) for d, told, share in rows] for rows in found])


@dataclass(frozen=True)
class CheckRow:
    """One kind of check."""

    name: str
    outcome: str
    cases: str
    worst_ulp: str
    worst_ratio: str
    ratio: float | None
    time: str
    reason: str


@dataclass(frozen=True)
class Rival:
    """One other candidate on one input.

    Attributes:
        spread: its confidence interval, and on a GPU its other times.
        ratio: as `opwright bench` prints it.
        verdict: "faster", "same" or "slower": what Opwright is; "" without an interval.
    """

    time: str
    spread: str
    ratio: str
    verdict: str


@dataclass(frozen=True)
class BenchRow:
    """One input, with Opwright's time and that of every baseline; None where one was not timed.

    Attributes:
        spread: the confidence interval of the time; in older records its noise.
        share: of the copy bandwidth; "in cache" where the input fits the cache.
        warm, host: on a GPU, device time with a warm cache, and the host's time of the call; else "".
        same_share: on a GPU, the share of what a copy of as many bytes reaches; else "".
    """

    case: str
    time: str
    spread: str
    rivals: list[Rival | None]
    rate: str
    share: str
    roof_share: float | None
    warm: str = ""
    host: str = ""
    same_share: str = ""


def list_checks(card: Card) -> list[CheckRow]:
    """Returns a row for each check."""
    return [
        CheckRow(
            name=check.title,
            outcome=check.outcome,
            cases=f"{check.cases:,}" if check.outcome != "skipped" else "",
            worst_ulp=f"{round_to(check.worst_ulp)} ulp" if check.worst_ulp is not None and check.has_ulp else "",
            worst_ratio=""
            if (ratio := _worst_ratio(check)) is None
            else "infinite"
            if math.isinf(ratio)
            else round_to(ratio),
            ratio=ratio,
            time=with_unit(check.seconds * 1e6, TIME) if check.seconds else "",
            reason=check.explanation,
        )
        for check in (card.verify.checks if card.verify else [])
    ]


def _worst_ratio(check: Check) -> float | None:
    """Returns the largest error over allowance, where JSON has null for infinite as well."""
    return math.inf if any(error.ratio is None for error in check.errors) else check.worst_ratio


def count_outcomes(card: Card) -> str:
    """Returns how many checks had each outcome: `36 checks: 30 passed, 6 skipped`."""
    outcomes = Counter(check.outcome for check in (card.verify.checks if card.verify else []))
    names = ("failed", "passed", "undecided", "skipped")
    told = ", ".join(f"{outcomes[name]} {name}" for name in names if outcomes[name])
    return f"{plural(outcomes.total(), 'check')}: {told}"


def list_inputs(card: Card) -> dict[str, list[BenchRow]]:
    """Returns a row for each input, by direction and dtype."""
    groups: dict[str, list[BenchRow]] = {}
    for measurement in card.measurements:
        ours, share = measurement.timings[0], measurement.roof_share
        row = BenchRow(
            case=measurement.input,
            time=with_unit(ours.median_us, TIME),
            spread=tell_interval(card.spread_of(ours)),
            rivals=[_compare(card, measurement, name) for name in card.baselines],
            rate="" if share is None else with_unit(rate_gb_s(measurement.bytes_moved, ours.median_us), RATE),
            share="in cache" if measurement.in_cache else "" if share is None else tell_share(share),
            roof_share=None if measurement.in_cache else share,
            warm=_time(ours.warm_us),
            host=_time(ours.host_us) + (", waits" if ours.waits else ""),
            same_share="" if measurement.copy_share is None else tell_share(measurement.copy_share),
        )
        groups.setdefault(f"{measurement.direction} {measurement.dtype}", []).append(row)
    return groups


def tell_memory(card: Card) -> str:
    """Returns the most memory that a call has held, over that of its results; "" where nobody counted."""
    shares = [
        m.timings[0].peak_bytes / m.output_bytes
        for m in card.measurements
        if m.timings[0].peak_bytes is not None and m.output_bytes
    ]
    if not shares:
        return ""
    found = " to ".join(dict.fromkeys(f"{round_to(share)}x" for share in (min(shares), max(shares))))
    return f"A call held at most {found} the memory of its results."


BASE_HEAD = ("input", "before", "now", "ratio", "visible", "verdict")


def list_base(card: Card) -> list[list[str]]:
    """Returns a row for each input that was compared with an earlier version of the operator."""
    return [
        [
            f"{row.direction} {row.input}",
            with_unit(row.base_us, TIME),
            with_unit(row.now_us, TIME),
            f"{row.ratio:.3f}x",
            tell_interval(row.visible),
            row.verdict,
        ]
        for row in (card.base.rows if card.base else [])
    ]


def describe_machine(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Returns the rows of the card of one machine; a value that differs between records is given as its range."""
    machines = [r.machine for r in records]
    on_gpu = [r.machine for r in records if isinstance(r, BenchRecord) and r.on_gpu]
    on_cpu = [r.machine for r in records if not (isinstance(r, BenchRecord) and r.on_gpu)]
    loads = [m.load for m in machines]
    limits = []
    # A machine whose CPU nobody measured has no row for that, if its GPU was.
    measured_cpu = any(m.copy_gb_s or m.compute_gflops for m in on_cpu)
    for of, chosen in (("", on_cpu if measured_cpu or not on_gpu else []), ("GPU: ", on_gpu)):
        if chosen:
            copies = [m.copy_gb_s for m in chosen if m.copy_gb_s is not None]
            computes = [m.compute_gflops for m in chosen if m.compute_gflops is not None]
            limits.append((f"{of}copy bandwidth", _range(copies, RATE)))
            limits.append((f"{of}float32 matrix product", _range(computes, COMPUTE)))
            limits += [(f"{of}{label}", value) for label, value in _list_limits(records, bool(of))]
    memory = [with_unit(m.gpu_memory_bytes, BYTES) for m in machines if m.gpu_memory_bytes]
    cache = [with_unit(m.gpu_l2_bytes, BYTES) for m in machines if m.gpu_l2_bytes]
    rows = [
        ("CPU", _distinct(m.cpu for m in machines)),
        ("cores used", _distinct(str(m.cores) for m in machines)),
        ("GPU", _distinct(m.device for m in machines) or "none"),
        ("multiprocessors", _distinct(str(m.multiprocessors or "") for m in machines)),
        ("GPU memory", _distinct(memory)),
        ("L2 cache", _distinct(cache)),
        ("GPU driver", _distinct(m.driver for m in machines)),
        ("system", _distinct(m.system for m in machines)),
        ("PyTorch", _distinct(m.torch for m in machines)),
        ("Python", _distinct(m.python for m in machines)),
        ("compiler", _distinct(m.compiler for m in machines) or "none"),
        ("load average", " to ".join(dict.fromkeys(round_to(x) for x in (min(loads), max(loads))))),
        *limits,
    ]
    return [(label, value) for label, value in rows if value]


def _list_limits(records: Sequence[Record], on_gpu: bool) -> list[tuple[str, str]]:
    """Returns the other limits of a device, as the newest benchmark on it has them."""
    benches = [r for r in records if isinstance(r, BenchRecord) and r.limits is not None and r.on_gpu == on_gpu]
    if not benches:
        return []
    limits = max(benches, key=lambda record: record.created).limits
    assert limits is not None
    products = ", ".join(
        f"{dtype} {with_unit(rate, COMPUTE)}" for dtype, rate in limits.gemm_gflops.items() if dtype != "f32"
    )
    return [
        ("triad bandwidth", with_unit(limits.triad_gb_s, RATE)),
        ("copy in the cache", with_unit(limits.cache_gb_s, RATE)),
        ("other matrix products", products),
        ("call without work", with_unit(limits.empty_call_us, TIME)),
        ("launch", _time(limits.launch_us)),
    ]


def warn(card: Card) -> list[str]:
    """Returns what a reader has to know before trusting the numbers, the warnings of bench in its own words."""
    notes = []
    bench = card.bench
    if bench is not None:
        if card.refusal and bench.measurements:
            notes.append("Bench stopped early: the times of the inputs that it measured are not a result.")
        elif card.fails:
            notes.append("This operator fails verify: its times are shown for debugging only and are not a result.")
        elif not card.refusal and not card.is_verified:
            notes.append("This operator was not verified: its times are not a result until it is.")
        notes += bench.all_warnings
        notes += [f"Skipped: {each}" for each in bench.left_out]
        if card.measurements and not card.has_intervals:
            notes.append(
                "This record has no confidence intervals of times: beside a time stands the noise of its samples."
            )
            if not bench.has_comparisons and card.baselines:
                notes.append("Its ratios are those of median times, without an interval.")
            if busy := is_busy(bench):
                load = f"{round_to(busy[0])} on {plural(busy[1], 'core')}"
                notes.append(f"The machine was busy when the benchmark ran: load average {load}.")
        waiting = sum(m.timings[0].waits for m in card.measurements)
        if waiting:
            notes.append(
                f"On {plural(waiting, 'input')} the call waits for the GPU by itself: the host's time is in it."
            )
        if bench.machine.copy_gb_s is None and card.measurements:
            notes.append(
                f"The copy bandwidth of the {'GPU' if card.on_gpu else 'machine'} was not measured, so no share of it can be given."
            )
    if card.base is not None:
        notes += [f"Not compared with {card.base.base}: {each}" for each in card.base.left_out]
    older = card.older + (0 if has_history(card) else max(len(card.history) - 1, 0))
    if older:
        notes.append(f"{plural(older, 'older record')} of this operator on this machine not shown.")
    return notes


def advise_failed(card: Card) -> str:
    """Returns what to do about failures of verify; "" where there are none."""
    if not card.fails:
        return ""
    assert card.verify is not None
    repeat = (
        "The command of a failure repeats its smallest case. " if any(f.repeat for f in card.verify.failures) else ""
    )
    return f"{repeat}Correct the kernel, or the reference where that is wrong, and run `opwright verify TARGET` again."


def advise_refused(card: Card) -> str:
    """Returns what to do about a refusal of bench, as the record says it where it does; "" where there is none."""
    if not card.refusal:
        return ""
    assert card.bench is not None
    return card.bench.hint or (
        "`opwright verify TARGET` shows which check fails and the command that repeats it; then run `opwright bench TARGET` again."
    )


def _time(microseconds: float | None) -> str:
    return with_unit(microseconds, TIME) if microseconds else ""


def _compare(card: Card, measurement: Measurement, candidate: str) -> Rival | None:
    assert card.bench is not None
    other = next((t for t in measurement.timings[1:] if t.candidate == candidate), None)
    if other is None:
        return None
    compared = measurement.comparison_with(candidate)
    ratio = "" if compared is None else tell_comparison(compared)
    if not card.bench.has_comparisons:
        ratio = tell_ratio(other.median_us / measurement.ours.median_us, None)
    return Rival(
        time=with_unit(other.median_us, TIME),
        spread=tell_interval(card.spread_of(other))
        + (f", warm {_time(other.warm_us)}, host {_time(other.host_us)}" if other.warm_us else ""),
        ratio=ratio,
        verdict="" if compared is None else compared.verdict,
    )


def _distinct(values) -> str:
    return " / ".join(dict.fromkeys(value for value in values if value))


def _range(values: Sequence[float], units) -> str:
    if not values:
        return "not measured"
    return " to ".join(dict.fromkeys(with_unit(x, units) for x in (min(values), max(values))))
