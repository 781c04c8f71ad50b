"""The process that `opwright bench` measures in: it takes a request, and sends what it measures as it comes.

What it prints on stdout and stderr is the target's.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from opwright.isolation import Channel, describe_error, serve

_EVENT_SECONDS = 0.2  # between two events about the same call: each wakes the other process


def answer(channel: Channel) -> None:
    """Answers one request."""
    request = channel.receive()
    from opwright.errors import BuildError, ContractError, KernelError, NotVerifiedError
    from opwright.records import builtins_of
    from opwright.verify.devices import parse_device
    from opwright.verify.machine import machine_card

    channel.running("target", f"importing {request['target']}")
    answer_for = {"bench": _bench, "call": _call, "verified": _verified, "pairs": _pairs}[request["mode"]]
    device = parse_device(request["device"]) if request["device"] is not None else None
    targets = _find_targets(request)
    for name in [name for name in targets if name not in request["skip"]]:
        channel.running("", "preparation")
        channel.send(operator=name, machine=builtins_of(machine_card(device)))
        try:
            answer_for(targets[name], request, channel)
        except (BuildError, ContractError, KernelError, NotVerifiedError) as error:  # of this operator only
            channel.send(refused=describe_error(error))


def _find_targets(request: dict[str, Any]) -> dict[str, Any]:
    """Imports what is measured; returns operators, or tasks, by name."""
    from opwright.errors import CheckError
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
        measure_limits=request["measure_limits"],
        on_start=lambda record, inputs: channel.send(started=encodable(record), inputs=inputs),
        on_measurement=lambda number, m: channel.send(measured=builtins_of(m), number=number),
        on_run=_Running(channel),
        timeout_s=request["timeout_s"],
    )
    channel.send(record=encodable(record))


def _what(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments that say what is measured."""
    found: dict[str, Any] = {"device": request["device"], "directions": request["directions"]}
    if request["sweep"]:
        found["sweep"] = request["sweep"]
    if request["dtypes"]:
        found["dtypes"] = [_dtype(name) for name in request["dtypes"]]
    return found


def _dtype(name: str) -> Any:
    from opwright.errors import CheckError
    from opwright.spec.dtypes import SCALAR_TYPES, short_name

    for dtype in SCALAR_TYPES:
        if name in (short_name(dtype), str(dtype).removeprefix("torch.")):
            return dtype
    there = ", ".join(str(dtype).removeprefix("torch.") for dtype in SCALAR_TYPES)
    raise CheckError("--dtype", f"unknown value `{name}`", rows=[("expected", f"one of {there}")])


def _verified(operator: Any, request: dict[str, Any], channel: Channel) -> None:
    from opwright.bench.api import choose_device, refuse_unverified
    from opwright.records import builtins_of
    from opwright.verify.machine import machine_card

    where = choose_device(operator.declaration.name, operator, None, request["device"])
    refuse_unverified(operator.function, None, None, where, None, request["timeout_s"])
    card = builtins_of(machine_card(where))
    channel.send(verified={"name": operator.declaration.qualified_name, "machine": card, "device": str(where)})


def _call(operator: Any, request: dict[str, Any], channel: Channel) -> None:
    from opwright.bench.call_split import where_a_call_goes
    from opwright.records import encodable

    channel.send(record=encodable(where_a_call_goes(operator.function, request["device"])))


def _pairs(operator: Any, request: dict[str, Any], channel: Channel) -> None:
    """Measures block by block, as the other process asks for them: it alternates between two of these."""
    from opwright.bench.versions import Side

    side = Side(operator, **_what(request), seconds=request["seconds"], on_run=_Running(channel))
    if request["core"] is not None:
        os.sched_setaffinity(0, [request["core"]])
    channel.send(inputs=side.inputs)
    for line in channel.requests:
        channel.send(block=side.block(json.loads(line)))


if __name__ == "__main__":
    serve(answer)
