"""Turns records into the rows of the report's tables, every number already written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opwright.records import Machine, Measurement, Timing
from opwright.report.cards import Card
from opwright.report.quantities import COMPUTE, RATE, TIME, percent, plural, rate_gb_s, round_to, with_unit

_NOISY = 0.05  # a noise above this is pointed out


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
    """

    time: str
    noise: str
    speedup: str
    is_noise: bool
    is_faster: bool


@dataclass(frozen=True)
class BenchRow:
    """One input, with Opwright's time and that of every baseline; None where one was not timed."""

    case: str
    in_cache: bool
    time: str
    noise: str
    rivals: list[Rival | None]
    rate: str
    share: str
    roof_share: float | None


def list_checks(card: Card) -> list[CheckRow]:
    """Returns a row for each check."""
    return [
        CheckRow(
            name=check.name,
            outcome=check.outcome,
            cases=f"{check.cases:,}" if check.outcome != "skipped" else "",
            worst_ulp="" if check.worst_ulp is None else f"{round_to(check.worst_ulp)} ulp",
            worst_ratio="" if check.worst_ratio is None else round_to(check.worst_ratio),
            ratio=check.worst_ratio,
            time=with_unit(check.seconds * 1e6, TIME) if check.seconds else "",
            reason=check.reason,
        )
        for check in (card.verify.checks if card.verify else [])
    ]


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
        )
        groups.setdefault(f"{measurement.direction} {measurement.dtype}", []).append(row)
    return groups


def describe_machine(machines: Sequence[Machine]) -> list[tuple[str, str]]:
    """Returns the rows of a machine card; a value that differs between records is given as its range."""
    loads = [m.load for m in machines]
    copies = [m.copy_gb_s for m in machines if m.copy_gb_s is not None]
    computes = [m.compute_gflops for m in machines if m.compute_gflops is not None]
    rows = [
        ("CPU", _distinct(m.cpu for m in machines)),
        ("cores used", _distinct(str(m.cores) for m in machines)),
        ("GPU", _distinct(m.device for m in machines) or "none"),
        ("system", _distinct(m.system for m in machines)),
        ("PyTorch", _distinct(m.torch for m in machines)),
        ("Python", _distinct(m.python for m in machines)),
        ("compiler", _distinct(m.compiler for m in machines) or "none"),
        ("load average", " to ".join(dict.fromkeys(round_to(x) for x in (min(loads), max(loads))))),
        ("copy bandwidth", _range(copies, RATE)),
        ("float32 matrix product", _range(computes, COMPUTE)),
    ]
    return [(label, value) for label, value in rows if value]


def warn(card: Card) -> list[str]:
    """Returns what a reader has to know before trusting the numbers; each names a value and its limit."""
    notes = []
    if card.bench is not None:
        machine = card.bench.machine
        if card.fails:
            notes.append("This operator fails verify: its times are shown for its author and are no result.")
        elif not card.is_verified:
            notes.append("This operator was not verified: its times are no result until it is.")
        if machine.load > machine.cores:
            load = f"{round_to(machine.load)} on {plural(machine.cores, 'core')}"
            notes.append(f"The machine was busy when the benchmark ran: load average {load}.")
        noisy = sum(m.timings[0].noise > _NOISY for m in card.measurements)
        if noisy:
            notes.append(
                f"{noisy} of {plural(len(card.measurements), 'input')} have a noise above {percent(_NOISY, 1)}: "
                "smaller differences mean nothing there."
            )
        if machine.copy_gb_s is None:
            notes.append(
                "The copy bandwidth of the machine was not measured, so no share of it can be given."
            )
    if card.older:
        notes.append(f"{plural(card.older, 'older record')} of this operator on this machine not shown.")
    return notes


def _compare(measurement: Measurement, candidate: str) -> Rival | None:
    ours = measurement.timings[0]
    other = next((t for t in measurement.timings[1:] if t.candidate == candidate), None)
    speedup = measurement.speedup_over(candidate)
    if other is None or speedup is None:
        return None
    return Rival(
        time=with_unit(other.median_us, TIME),
        noise=f"± {percent(other.noise, 2)}",
        speedup=f"{round_to(speedup)}x",
        is_noise=_overlap(ours, other),
        is_faster=speedup < 1,
    )


def _overlap(one: Timing, other: Timing) -> bool:
    distance = abs(one.median_us - other.median_us)
    return distance <= one.noise * one.median_us + other.noise * other.median_us


def _distinct(values) -> str:
    return " / ".join(dict.fromkeys(value for value in values if value))


def _range(values: Sequence[float], units) -> str:
    if not values:
        return "not measured"
    return " to ".join(dict.fromkeys(with_unit(x, units) for x in (min(values), max(values))))
