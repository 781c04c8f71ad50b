"""Sorts records into cards: one for each operator on each machine, and on each device that was measured there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from opwright.errors import RecordError
from opwright.records import (
    BaseRecord,
    BenchRecord,
    BuildRecord,
    CallRecord,
    Machine,
    Measurement,
    Record,
    Summary,
    Timing,
    VerifyRecord,
)
from opwright.records.bench import DIRECTIONS
from opwright.report.ratios import tell_share

_Timed = TypeVar("_Timed", BenchRecord, CallRecord, BaseRecord)


@dataclass(frozen=True)
class Card:
    """What is known of one operator on one machine, measured on one of its devices.

    Attributes:
        history: the benchmarks on this device, on a CPU with as many threads, the oldest first.
        older: how many other records were skipped, because a newer one of the same kind exists.
    """

    verify: VerifyRecord | None = None
    bench: BenchRecord | None = None
    call: CallRecord | None = None
    base: BaseRecord | None = None
    build: BuildRecord | None = None
    history: tuple[BenchRecord, ...] = ()
    older: int = 0

    @property
    def name(self) -> str:
        """The name of the operator."""
        return self._any.name

    @property
    def machine(self) -> Machine:
        """The machine; the benchmark's, which knows the bandwidth, before verify's."""
        return self._any.machine

    @property
    def created(self) -> float:
        """When it was measured or verified, in seconds since 1970."""
        return self._any.created

    @property
    def _any(self) -> Record:
        record = self.bench or self.verify or self.call or self.base or self.build
        assert record is not None
        return record

    @property
    def on_gpu(self) -> bool:
        """Whether the times are those of a GPU."""
        timed = self.bench or self.call or self.base
        return timed is not None and timed.device not in ("", "cpu")

    @property
    def place(self) -> str:
        """What it was measured or verified on: the name of the GPU or of the CPU."""
        is_cpu = (self.bench or self.call or self.base) is not None and not self.on_gpu
        return self.machine.cpu if is_cpu else self.machine.device or self.machine.cpu

    @property
    def fails(self) -> bool:
        """Whether verify ran and found something wrong."""
        return self.verify is not None and (
            bool(self.verify.failures) or any(check.outcome == "failed" for check in self.verify.checks)
        )

    @property
    def refusal(self) -> str:
        """Why bench did not measure it to the end; "" where it did."""
        return self.bench.refused if self.bench is not None else ""

    @property
    def state(self) -> str:
        """What is to be said of it in a word or two."""
        if self.fails:
            return "fails"
        return "not measured" if self.refusal else "verified" if self.is_verified else "not verified"

    @property
    def is_verified(self) -> bool:
        """Whether verify has passed, in this record or before the benchmark."""
        if self.verify is not None:
            return self.verify.passed and not self.fails
        return self.bench is not None and self.bench.verified

    @property
    def cases(self) -> int:
        """How many inputs the checks that passed have found right."""
        checks = self.verify.checks if self.verify else []
        return sum(check.cases - len(check.undecided) for check in checks if check.outcome == "passed")

    @property
    def undecided(self) -> int:
        """How many inputs the oracle could not decide."""
        return self.verify.undecided if self.verify else 0

    @property
    def measurements(self) -> list[Measurement]:
        """The measurements that can be shown, by direction, dtype and size."""
        listed = self.bench.measurements if self.bench else []
        found = [m for m in listed if m.timings and all(t.median_us > 0 for t in m.timings)]
        dtypes = list(dict.fromkeys(m.dtype for m in found))
        return sorted(found, key=lambda m: (direction_rank(m.direction), dtypes.index(m.dtype), size_of(m)))

    @property
    def baselines(self) -> list[str]:
        """The candidates other than Opwright: eager, compile, then peers in the order of the record."""
        names = dict.fromkeys(t.candidate for m in self.measurements for t in m.timings[1:])
        return sorted(names, key=lambda name: {"eager": 0, "compile": 1}.get(name, 2))

    @property
    def baseline(self) -> str:
        """The candidate that pictures start from: eager, or the first of those that were timed; "" for none."""
        return next(iter(self.baselines), "")

    @property
    def directions(self) -> list[str]:
        """Those that were measured."""
        return list(dict.fromkeys(m.direction for m in self.measurements))

    @property
    def summaries(self) -> list[Summary]:
        """What bench says of all inputs together; nothing of an operator that is wrong or was refused."""
        return [] if self.bench is None or self.fails or self.refusal else self.bench.summarize()

    def summaries_of(self, direction: str) -> list[Summary]:
        """Returns the summaries against eager, compile and the fastest of the others."""
        found = {s.candidate: s for s in self.summaries if s.direction == direction}
        others = [s for name, s in found.items() if name not in ("eager", "compile")]
        fastest = min(others, key=lambda s: s.ratio, default=None)
        return [s for s in (found.get("eager"), found.get("compile"), fastest) if s is not None]

    def tell_shares(self, direction: str) -> str:
        """Returns the range of the shares of the copy bandwidth on inputs that do not fit the cache; "" for none."""
        shares = [m.roof_share for m in self.measurements if m.direction == direction and not m.in_cache]
        known = [share for share in shares if share is not None]
        if not known or self.fails or self.refusal:
            return ""
        return " to ".join(dict.fromkeys(tell_share(share) for share in (min(known), max(known))))

    @property
    def has_intervals(self) -> bool:
        """Whether times have confidence intervals; in older records they have a noise."""
        return any(t.interval is not None for m in self.measurements for t in m.timings)

    def spread_of(self, timing: Timing) -> float | None:
        """Returns the half-width of the confidence interval of a time, or its noise where the record has no intervals."""
        return timing.interval if self.has_intervals else timing.noise


def collect_cards(records: Sequence[Record]) -> list[Card]:
    """Sorts records into cards, those that fail first, then those not measured, else in the order of the records.

    Of several records of one kind the newest counts; benchmarks on the CPU and on a GPU are two kinds. Older
    benchmarks are history.

    Raises:
        RecordError: there are no records.
    """
    if not records:
        raise RecordError("report", "there are no records to show", hint="run `opwright verify` first")
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.name, record.machine.cpu, record.machine.device), []).append(record)
    cards = [card for group in groups.values() for card in _cards_of(group)]
    return sorted(cards, key=lambda card: (not card.fails, not card.refusal))


def _cards_of(group: Sequence[Record]) -> list[Card]:
    """Returns the cards of the records of one operator on one machine: one for each device that was measured."""
    newest = sorted(group, key=lambda record: record.created, reverse=True)
    verify = next((r for r in newest if isinstance(r, VerifyRecord)), None)
    build = next((r for r in newest if isinstance(r, BuildRecord)), None)
    benches = _by_device(newest, BenchRecord)
    calls = _by_device(newest, CallRecord)
    bases = _by_device(newest, BaseRecord)
    history = [r for r in reversed(newest) if isinstance(r, BenchRecord)]
    kept = sum(record is not None for record in (verify, build)) + len(history) + len(calls) + len(bases)
    devices = list(dict.fromkeys([*benches, *calls, *bases])) or [""]
    cards = []
    for device in devices:
        bench, call, base = benches.get(device), calls.get(device), bases.get(device)
        on_device = [r for r in history if r.device == device]
        # On a CPU another count of threads is another measurement, or another machine with a CPU of this name.
        alike = tuple(r for r in on_device if r.on_gpu or r.threads == on_device[-1].threads)
        older = len(group) - kept + len(on_device) - len(alike)
        cards.append(Card(verify, bench, call, base, build, alike, older))
    return cards


def _by_device(newest: Sequence[Record], kind: type[_Timed]) -> dict[str, _Timed]:
    """Returns the newest record of a kind for each device."""
    return {record.device: record for record in reversed(newest) if isinstance(record, kind)}


def direction_rank(direction: str) -> int:
    """Returns where a direction stands in tables and pictures."""
    return DIRECTIONS.index(direction) if direction in DIRECTIONS else len(DIRECTIONS)


def size_of(measurement: Measurement, by_elements: bool = True) -> float:
    """Returns the elements of an input, or the bytes it moves, also where the record does not count elements."""
    elements = elements_of(measurement) if by_elements else None
    return measurement.bytes_moved if elements is None else elements


def elements_of(measurement: Measurement) -> float | None:
    """Returns the elements of an input, or None where the record does not count them."""
    elements = measurement.axes.get("elements")
    if isinstance(elements, (int, float)) and not isinstance(elements, bool) and elements > 0:
        return elements
    return None
