"""Where a call goes."""

from __future__ import annotations

from dataclasses import dataclass

from opwright.records.case import OnCase
from opwright.records.machine import VERSION, Machine


@dataclass
class CallPart:
    """One part of the host's time of a call.

    Attributes:
        name: "python", "binding" ("dispatcher" where all calls go through that, and in older records), "checks",
            "allocation", "views", "launch", "kernel"; on a GPU "device, stream" and "launch" in place of the last two;
            without a kernel "python, dispatcher" and "reference".
        us: its time.
        uncertainty_us: half-width of the 95 % interval. A part that is smaller may be nothing at all.
        obtained: how, as the difference of two variants of the call: "allocate - check".
    """

    name: str
    us: float
    uncertainty_us: float
    obtained: str


@dataclass
class CallRecord(OnCase):
    """Where one tiny call of an operator spends the host's time.

    Attributes:
        case: the input, as `f32[1, 1] f32[1] approximate='tanh'`.
        parts: in the order of the call; together they are `total_us`, up to their uncertainties.
        total_us: the whole call, from Python.
        peers_us: other calls by the same clock: "torch.add".
        device_us: on a GPU, how long the kernel runs behind the host; None on a CPU.
        rounds: how many times each variant was timed, in turns.
        device: as in a BenchRecord.
        named_case: as in a Measurement.
    """

    name: str
    case: str
    parts: list[CallPart]
    total_us: float
    peers_us: dict[str, float]
    device_us: float | None
    rounds: int
    machine: Machine
    created: float
    seconds: float
    version: int = VERSION
    device: str = "cpu"
    named_case: str = ""
