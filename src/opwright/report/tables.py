"""Turns records into the rows of the report's tables, every number already written out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from opwright.records import BenchRecord, Check, Measurement, Record, Timing
from opwright.report.cards import Card
from opwright.report.conditions import is_busy
from opwright.report.history import has_history
from opwright.report.quantities import (
    BYTES,
    COMPUTE,
    RATE,
    TIME,
    percent,
    plural,
    rate_gb_s,
    round_to,
    with_unit,
)

_NOISY = 0.05  # a noise above this is pointed out


@dataclass(frozen=True)
class Overview:
    """A row for each card, with its speed-ups over those that any card was compared with.

    Attributes:
        rivals: "eager", "compile", and "fastest other", for the fastest of the peers of each operator.
        speedups: for each card and rival; "" where there is none, as a wrong operator has no speed.
        shares: of the copy bandwidth, on the inputs that do not fit the cache.
    """

    rivals: list[str]
    speedups: list[list[str]]
    shares: list[str]


def overlook(cards: Sequence[Card]) -> Overview:
    """Returns the medians of all cards."""
    rows, shares = [], []
    for card in cards:
        peer = card.fastest_peer
        ratios = {name: card.median_speedup_over(name) for name in ("eager", "compile", peer)}
        told = {name: f"{round_to(ratio)}x" for name, ratio in ratios.items() if ratio is not None and not card.fails}
        rows.append([told.get("eager", ""), told.get("compile", ""), f"{told[peer]} {peer}" if peer in told else ""])
        outside, _ = card.roof_shares()
        shares.append(percent(median(outside)) if outside and not card.fails else "")
    names = ("eager", "compile", "fastest other")
    used = [i for i in range(len(names)) if any(row[i] for row in rows)]
    return Overview([names[i] for i in used], [[row[i] for i in used] for row in rows], shares)


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
    """One baseline on one input.

    Attributes:
        is_noise: whether the difference to Opwright is within the noise of the two.
        is_slower: whether Opwright is slower, and by more than that.
    """

    time: str
    noise: str
    speedup: str
    is_noise: bool
    is_slower: bool


@dataclass(frozen=True)
class BenchRow:
    """One input, with Opwright's time and that of every baseline; None where one was not timed.

    Attributes:
        warm, host: on a GPU, device time with a warm cache, and the host's time of the call; else "".
        same_share: on a GPU, the share of what a copy of as many bytes reaches; else "".
    """

    case: str
    in_cache: bool
    time: str
    noise: str
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
            worst_ulp=f"{round_to(check.worst_ulp)} ulp" if check.has_ulp else "",
            worst_ratio="" if (ratio := _worst_ratio(check)) is None else "infinite" if math.isinf(ratio) else round_to(ratio),
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
        ours = measurement.timings[0]
        row = BenchRow(
            case=measurement.case,
            in_cache=measurement.in_cache,
            time=with_unit(ours.median_us, TIME),
            noise=f"± {percent(ours.noise, 2)}",
            rivals=[_compare(measurement, name) for name in card.baselines],
            rate=with_unit(rate_gb_s(measurement.bytes_moved, ours.median_us), RATE),
            share="" if measurement.roof_share is None else percent(measurement.roof_share),
            roof_share=measurement.roof_share,
            warm=_time(ours.warm_us),
            host=_time(ours.host_us) + (", waits" if ours.waits else ""),
            same_share="" if measurement.copy_share is None else percent(measurement.copy_share),
        )
        groups.setdefault(f"{measurement.direction} {measurement.dtype}", []).append(row)
    return groups


def tell_memory(card: Card) -> str:
    """Returns the most memory that a call has held, over that of its results; "" where nobody counted."""
    shares = [m.timings[0].peak_bytes / m.output_bytes for m in card.measurements if m.timings[0].peak_bytes is not None and m.output_bytes]
    if not shares:
        return ""
    found = " to ".join(dict.fromkeys(f"{round_to(share)}x" for share in (min(shares), max(shares))))
    return f"A call held at most {found} the memory of its results."


def list_base(card: Card) -> list[list[str]]:
    """Returns a row for each input that was compared with an earlier version of the operator."""
    return [
        [
            f"{row.direction} {row.case}",
            with_unit(row.base_us, TIME),
            with_unit(row.now_us, TIME),
            f"{round_to(row.ratio)}x",
            "none is" if math.isinf(row.visible) else f"± {percent(row.visible, 2)}",
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
    """Returns what a reader has to know before trusting the numbers; each names a value and its limit."""
    notes = []
    if card.bench is not None:
        machine = card.bench.machine
        if card.refusal:
            notes.append(f"Bench has refused this operator: {card.refusal}.")
        elif card.fails:
            notes.append("This operator fails verify: its times are shown for its author and are no result.")
        elif not card.is_verified:
            notes.append("This operator was not verified: its times are no result until it is.")
        if card.bench.refused and not card.refusal:
            notes.append(f"A rival was left out: {card.bench.refused}.")
        notes += [f"An input was left out: {each}." for each in card.bench.left_out]
        if not card.refusal and (busy := is_busy(card.bench)):
            load = f"{round_to(busy[0])} on {plural(busy[1], 'core')}"
            notes.append(f"The machine was busy when the benchmark ran: load average {load}.")
        noisy = sum(m.timings[0].noise > _NOISY for m in card.measurements)
        if noisy:
            notes.append(
                f"{noisy} of {plural(len(card.measurements), 'input')} have a noise above {percent(_NOISY, 1)}: "
                "smaller differences mean nothing there."
            )
        waiting = sum(m.timings[0].waits for m in card.measurements)
        if waiting:
            notes.append(
                f"On {plural(waiting, 'input')} the call waits for the GPU by itself: the host's time is in it."
            )
        if machine.copy_gb_s is None and not card.refusal:
            notes.append(
                f"The copy bandwidth of the {'GPU' if card.on_gpu else 'machine'} was not measured, so no share of it can be given."
            )
    older = card.older + (0 if has_history(card) else max(len(card.history) - 1, 0))
    if older:
        notes.append(f"{plural(older, 'older record')} of this operator on this machine not shown.")
    return notes


def _time(microseconds: float | None) -> str:
    return with_unit(microseconds, TIME) if microseconds else ""


def _compare(measurement: Measurement, candidate: str) -> Rival | None:
    other = next((t for t in measurement.timings[1:] if t.candidate == candidate), None)
    speedup = measurement.speedup_over(candidate)
    if other is None or speedup is None:
        return None
    is_noise = _is_noise(measurement, other)
    return Rival(
        time=with_unit(other.median_us, TIME),
        noise=f"± {percent(other.noise, 2)}"
        + (f", warm {_time(other.warm_us)}, host {_time(other.host_us)}" if other.warm_us else ""),
        speedup=f"{round_to(speedup)}x",
        is_noise=is_noise,
        is_slower=speedup < 1 and not is_noise,
    )


def _is_noise(measurement: Measurement, other: Timing) -> bool:
    """Whether a difference cannot be told from none: by the smallest visible one, in older records by the noise."""
    compared = next((c for c in measurement.comparisons if c.candidate == other.candidate), None)
    return _overlap(measurement.timings[0], other) if compared is None else compared.verdict == "same"


def _overlap(one: Timing, other: Timing) -> bool:
    distance = abs(one.median_us - other.median_us)
    return distance <= one.noise * one.median_us + other.noise * other.median_us


def _distinct(values) -> str:
    return " / ".join(dict.fromkeys(value for value in values if value))


def _range(values: Sequence[float], units) -> str:
    if not values:
        return "not measured"
    return " to ".join(dict.fromkeys(with_unit(x, units) for x in (min(values), max(values))))
