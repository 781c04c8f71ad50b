"""Measures in a process of its own: who asks for it, and the process that answers.

What the latter prints on stdout and stderr is the target's.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from opwright.errors import CheckError, NotVerifiedError, OpwrightError, plural
from opwright.isolation import Channel, Limits, Worker, WorkerEnded, describe_error, rebuild_error, serve, spawn
from opwright.records import BenchRecord, CallRecord, Machine, Measurement, decoded
from opwright.records.bench import DIRECTIONS
from opwright.typed_json import decode

RIVALS = ("eager", "compile")  # that have a name
INTERRUPTED = 130  # as a shell has it of a program that SIGINT has ended
_EVENT_SECONDS = 0.2  # between two events about the same call: each wakes the other process


def start_worker(request: dict[str, Any], threads: int | None, **where: Any) -> Worker:
    """Starts a process that measures.

    Args:
        threads: of PyTorch; by default as many as there are cores for it.
        where: arguments of `spawn`; variables of `env` are added to those that fix the threads.
    """
    fixed = {"PYTHONHASHSEED": "0"}
    if threads is not None:
        fixed |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if request.get("cpus"):
        fixed |= {"OMP_PROC_BIND": "close", "OMP_PLACES": ",".join(f"{{{cpu}}}" for cpu in request["cpus"])}
    env = fixed | request["env"] | where.pop("env", {})
    with _on_cpus(request.get("cpus")):
        worker = Worker(spawn("-m", "opwright.bench.worker", env=env, **where), Limits(request["timeout_s"]))
    worker.ask({**request, "threads": threads})
    return worker


@contextlib.contextmanager
def _on_cpus(cpus: Sequence[int] | None) -> Iterator[None]:
    """Runs on these CPUs: a process that is started then does so from its start, and PyTorch counts them only."""
    if not cpus:
        yield
        return
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)


class Watcher:
    """Is told how a run goes, and shows nothing."""

    def is_interrupted(self) -> bool:
        """Whether to stop and keep what was measured: asked many times a second."""
        return False

    def say(self, text: str) -> None:
        """A line for the person who waits."""

    def watch(self, current: Current, what: str) -> None:
        """Something has come of the operator that is measured now."""

    def watch_pair(self, operator: str, number: int) -> None:
        """A pair of processes measures two versions of an operator."""

    def finish(self, record: BenchRecord | CallRecord) -> None:
        """An operator is done."""


def measure(request: dict[str, Any], threads: int | None, watcher: Watcher) -> tuple[list[Any], int]:
    """Measures the operators of a request; returns their records, or what verify has said of them, and the exit code.

    An operator that is refused, or ends the process, is named; its record has what was measured until then, and the
    others are measured in another process. A candidate of `against` that ends the process is skipped, and so is one of
    several inputs that takes too much memory.
    """
    records: list[Any] = []
    code, done, skipped = 0, list(request["skip"]), ""
    too_large: dict[str, str] = {}
    against = request["against"]
    while True:
        current = Current()
        worker = start_worker({**request, "skip": done, "against": against, "too_large": too_large}, threads)

        def finish(record: BenchRecord | CallRecord, name: str) -> None:
            nonlocal against, skipped, too_large
            if isinstance(record, BenchRecord) and skipped:
                record.left_out.append(skipped)
            against, skipped, too_large = request["against"], "", {}
            records.append(record)
            done.append(name)
            watcher.finish(record)

        try:
            for event in worker.events(watcher.is_interrupted):
                current.take(event)
                watcher.watch(current, worker.running.what)
                if "refused" in event:
                    error = rebuild_error(event["refused"])
                    watcher.say(f"error: {error}")
                    code = 1
                    if request["mode"] == "bench":
                        finish(current.partial(error), current.name)
                    else:
                        done.append(current.name)
                elif "verified" in event:
                    records.append(event["verified"])
                    done.append(current.name)
                elif "record" in event:
                    finish(decoded(event["record"]), current.name)
            return records, code
        except KeyboardInterrupt:
            if current.measured:
                record = current.partial()
                record.left_out.append(
                    f"interrupted after {len(current.measured)} of {plural(current.inputs, 'input')}"
                )
                finish(record, current.name)
            return records, INTERRUPTED
        except WorkerEnded as ended:
            if not current.name:
                raise ended.error(request["target"], CheckError) from None
            timed = ended.running.what.removeprefix("timing ")
            is_input = timed.partition(" ")[0] in DIRECTIONS
            if ended.took_memory and is_input and current.inputs > 1 and timed not in too_large:
                too_large = {**too_large, timed: ended.how}
                watcher.say(f"skipped: {timed}: it {ended.how}; the other inputs are measured in a new process")
                continue
            error = ended.error(current.name, NotVerifiedError, current.memory_hint)
            watcher.say(f"error: {error}")
            code = 1
            who = ended.running.who
            rivals = RIVALS if against is None else against
            if who in rivals:
                against, skipped = [name for name in rivals if name != who], f"{who}: {error.rule}"
                continue
            if request["mode"] == "bench":
                finish(current.partial(error), current.name)
            else:
                done.append(current.name)
        finally:
            worker.close()


class Current:
    """The operator that is measured now, and what is known of it.

    Attributes:
        name: of the operator; "" before there is one.
        measured: its measurements, by the number of the input.
        inputs: how many there are.
        started: when it was.
        memory_hint: how to get inputs that need less memory.
    """

    def __init__(self) -> None:
        self.memory_hint = ""
        self.name, self.inputs, self.measured, self.started = "", 0, {}, time.monotonic()
        self._machine: dict[str, Any] = {}
        self._record: BenchRecord | None = None

    def take(self, event: dict[str, Any]) -> None:
        """Notes what the worker has sent."""
        if "operator" in event:
            self.name, self._machine, self._record = event["operator"], event["machine"], None
            self.measured, self.started = {}, time.monotonic()
            self.memory_hint = event["memory_hint"]
        elif "started" in event:
            self._record, self.inputs = decoded(event["started"]), event["inputs"]
        elif "measured" in event:
            self.measured[event["number"]] = decode(Measurement, event["measured"], "measurement")

    def partial(self, error: OpwrightError | None = None) -> BenchRecord:
        """Returns the record with the measurements made so far.

        Args:
            error: why it goes no further; None if it does.
        """
        record = self._record or BenchRecord(
            name=self.name,
            measurements=[],
            host_us={},
            verified=False,
            threads=self._machine["cores"],
            machine=Machine(**self._machine),
            created=time.time(),
            seconds=0.0,
        )
        measurements = [self.measured[number] for number in sorted(self.measured)]
        seconds = time.monotonic() - self.started
        refused, hint = (error.rule, error.hint) if error else ("", "")
        if error and error.rows:
            refused += f" ({'; '.join(' '.join(row) for row in error.rows)})"
        return replace(record, measurements=measurements, seconds=seconds, refused=refused, hint=hint)


# --- in the process that measures ----


def answer(channel: Channel) -> None:
    """Answers one request."""
    request = channel.receive()
    from opwright.bench.api import memory_hint
    from opwright.errors import BuildError, ContractError, KernelError
    from opwright.machine import machine_card
    from opwright.records import builtins_of
    from opwright.verify.devices import parse_device

    channel.running("target", f"importing {request['target']}")
    answer_for = {"bench": _bench, "call": _call, "verified": _verified, "pairs": _pairs}[request["mode"]]
    device = parse_device(request["device"]) if request["device"] is not None else None
    targets = _find_targets(request)
    _what(request)  # what is wrong with it is said before anything is verified

    def announce(name: str) -> None:
        channel.running("", "preparation")
        hint = memory_hint(targets[name], has_samples=False)
        channel.send(operator=name, machine=builtins_of(machine_card(device)), memory_hint=hint)

    unfit: dict[str, CheckError] = {}  # they lack the axis or the dtype that was asked for
    for name in [name for name in targets if name not in request["skip"]]:
        announce(name)
        try:
            answer_for(targets[name], request, channel)
        except (BuildError, ContractError, KernelError, NotVerifiedError) as error:  # of this operator only
            channel.send(refused=describe_error(error))
        except CheckError as error:
            unfit[name] = error
    if unfit and len(unfit) == len(targets):  # no operator has it
        raise next(iter(unfit.values()))
    for name, error in unfit.items():
        announce(name)
        channel.send(refused=describe_error(error))


def _find_targets(request: dict[str, Any]) -> dict[str, Any]:
    """Imports what is measured; returns operators, or tasks, by name."""
    from opwright.target import find_operators
    from opwright.verify.tasks import find_tasks

    place, candidate = request["target"], request["candidate"]
    tasks = find_tasks(place, Path(candidate) if candidate else None)
    if not tasks:
        return {operator.declaration.qualified_name: operator for operator in find_operators(place)}
    if request["mode"] != "bench":
        flag = "--call" if request["mode"] == "call" else "--base"
        raise CheckError(
            flag, "is for operators, and this is a task", rows=[("got", place)], hint=f"leave `{flag}` out"
        )
    return {task.name: task for task in tasks}


class _Running:
    """Tells what runs: at once when it is something else, and from time to time that it goes on."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._last, self._told = channel, ("", ""), 0.0

    def __call__(self, who: str, what: str) -> None:
        now = time.monotonic()
        if (who, what) != self._last or now - self._told > _EVENT_SECONDS:
            self._last, self._told = (who, what), now
            self._channel.running(who, what)


def _bench(target: Any, request: dict[str, Any], channel: Channel) -> None:
    from opwright.bench.api import bench
    from opwright.records import builtins_of, encodable

    record = bench(
        getattr(target, "function", target),
        request["against"],
        **_what(request),
        seconds=request["seconds"],
        precision=request["precision"],
        threads=request.get("threads"),
        measure_limits=request["measure_limits"],
        on_start=lambda record, inputs: channel.send(started=encodable(record), inputs=inputs),
        on_measurement=lambda number, m: channel.send(measured=builtins_of(m), number=number),
        on_run=_Running(channel),
        timeout_s=request["timeout_s"],
        too_large=request.get("too_large"),
        part=tuple(request["part"]),
    )
    channel.send(record=encodable(record))


def _what(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments that say what is measured."""
    for name in request["directions"] or ():
        if name not in DIRECTIONS:
            expected = f"one of {', '.join(DIRECTIONS)}"
            raise CheckError("--direction", f"unknown value `{name}`", rows=[("expected", expected)])
    found: dict[str, Any] = {"device": request["device"], "directions": request["directions"]}
    if request["sweep"]:
        found["sweep"] = request["sweep"]
    if request["dtypes"]:
        found["dtypes"] = [_dtype(name) for name in request["dtypes"]]
    return found


def _dtype(name: str) -> Any:
    from opwright.contract.dtypes import SCALAR_TYPES, short_name

    for dtype in SCALAR_TYPES:
        if name in (short_name(dtype), str(dtype).removeprefix("torch.")):
            return dtype
    there = ", ".join(str(dtype).removeprefix("torch.") for dtype in SCALAR_TYPES)
    raise CheckError("--dtype", f"unknown value `{name}`", rows=[("expected", f"one of {there}")])


def _verified(operator: Any, request: dict[str, Any], channel: Channel) -> None:
    from opwright.bench.api import choose_device, refuse_unverified
    from opwright.machine import machine_card
    from opwright.records import builtins_of

    where = choose_device(operator.declaration.name, operator, None, request["device"])
    refuse_unverified(operator.function, None, None, where, None, request["timeout_s"])
    card = builtins_of(machine_card(where))
    channel.send(verified={"name": operator.declaration.qualified_name, "machine": card, "device": str(where)})


def _call(operator: Any, request: dict[str, Any], channel: Channel) -> None:
    from opwright.bench.call_split import where_a_call_goes
    from opwright.records import encodable

    channel.send(record=encodable(where_a_call_goes(operator.function, device=request["device"])))


def _pairs(operator: Any, request: dict[str, Any], channel: Channel) -> None:
    """Measures block by block, as the other process asks for them: it alternates between two of these."""
    from opwright.bench.blocks import Side

    side = Side(operator, **_what(request), seconds=request["seconds"], on_run=_Running(channel))
    if request["core"] is not None:
        os.sched_setaffinity(0, [request["core"]])
    channel.send(inputs=side.inputs, named_cases=side.named_cases)
    for line in channel.requests:
        channel.send(block=side.block(json.loads(line)))


if __name__ == "__main__":
    serve(answer)
