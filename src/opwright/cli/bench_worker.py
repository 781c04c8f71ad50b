"""The process that `opwright bench` measures in: it takes a request and answers in lines of JSON.

    python -m opwright.cli.bench_worker ANSWERS PULSE     the request on stdin, answers to a descriptor

What measures is imported before the target is, so that the target cannot come first to the clocks. It prints
nothing: what comes on stdout and stderr is the target's. It says who runs before it lets them, in memory that the
other process looks at.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from opwright.cli.pulse import Pulse

# Short, so that some of them pass without another process getting the core; as many as it takes for that.
_WINDOW_SECONDS, _FEWEST_WINDOWS, _MOST_WINDOWS = 0.002, 5, 300
_PR_SET_PDEATHSIG = 1


class Answers:
    """Where the answers go: one line of JSON each.

    Attributes:
        asked: where questions come from, line by line.
        pulse: where is written who runs.
    """

    def __init__(self, descriptor: int, asked: TextIO, pulse: Pulse) -> None:
        self._stream = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")
        self.asked, self.pulse = asked, pulse

    def send(self, **answer: Any) -> None:
        """Sends one answer."""
        self._stream.write(json.dumps(answer) + "\n")

    def witness(self, claimed_us: float, call: Callable[[], object]) -> None:
        """Makes calls between two answers, so that the other process can time them.

        It begins when that one has looked at its clock: what it sees is never less than what the calls took, so
        one window of about the claimed time is enough.
        """
        import torch

        from opwright.bench.timing import no_garbage_collection

        wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        calls = max(1, math.ceil(_WINDOW_SECONDS * 1e6 / claimed_us))
        with no_garbage_collection():
            for _ in range(_MOST_WINDOWS if calls > 1 else _FEWEST_WINDOWS):
                wait()
                self.pulse.beat("opwright", "once more, for another process's clock")
                self.send(begin={"calls": calls, "claimed_us": claimed_us})
                self.asked.readline()
                for _ in range(calls):
                    call()
                wait()
                self.send(end=True)
                if json.loads(self.asked.readline()) == "enough":
                    break


def main() -> None:
    """Serves one request."""
    written, shared = map(int, sys.argv[1:])
    answers = Answers(written, _settle_in(), Pulse(shared))
    os.close(shared)
    request = json.loads(answers.asked.readline())
    from opwright.errors import BuildError, ContractError, KernelError, OpwrightError

    try:
        _run_on(request["cpus"])  # before torch counts them
        import opwright.bench.run  # noqa: F401  before the target
        from opwright.bench import judges
        from opwright.bench.gates import refuse_changes
        from opwright.cli.target import find_operators
        from opwright.verify.state import Guard

        judges.remember(sys.modules[__name__])  # and what answers
        answers.pulse.beat("target", "import")
        guard = Guard()
        operators = [o for o in find_operators(request["target"]) if o.declaration.qualified_name not in request["skip"]]
        guard.put_back_functions()
        refuse_changes(request["target"], "import", guard.take())
        serve = {"bench": _bench, "call": _call, "verified": _verified, "pairs": _pairs}[request["mode"]]
        for operator in operators:
            answers.pulse.beat("", "preparation")
            answers.send(operator=operator.declaration.qualified_name, machine=_machine(request["device"]))
            try:
                serve(operator, request, answers)
            except (BuildError, ContractError, KernelError) as error:  # of this operator, not of what was asked
                answers.send(refused=_parts(error))
        answers.send(done=True)
    except OpwrightError as error:
        answers.send(failed=_parts(error))
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        answers.send(raised=f"{type(error).__name__}: {error}"[:300])


def _settle_in() -> TextIO:
    """Keeps stdin for questions and gives the target an empty one; ends with the process that has started this one."""
    asked = os.fdopen(os.dup(0), encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
            f.write("1000")  # when memory runs out, this process goes first
    return asked


def _machine(device: str | None) -> dict[str, Any]:
    from opwright.records import builtins_of
    from opwright.verify.devices import parse_device
    from opwright.verify.machine import machine_card

    return builtins_of(machine_card(parse_device(device) if device is not None else None))


def _run_on(cpus: list[int]) -> None:
    from opwright.errors import CheckError

    if not cpus:
        return
    there = sorted(os.sched_getaffinity(0))
    if not set(cpus) <= set(there):
        raise CheckError(
            "--cpus",
            "names CPUs that are not there for this process",
            rows=[("got", ", ".join(map(str, cpus))), ("there", ", ".join(map(str, there)))],
        )
    os.sched_setaffinity(0, cpus)


def _parts(error: Any) -> dict[str, Any]:
    return {
        "class": type(error).__name__,
        "subject": error.subject,
        "rule": error.rule,
        "rows": error.rows,
        "body": error.body,
        "hint": error.hint,
    }


def _bench(operator: Any, request: dict[str, Any], answers: Answers) -> None:
    from opwright.bench.run import bench
    from opwright.errors import NotVerifiedError
    from opwright.records import encodable

    try:
        record = bench(
            operator.function,
            request["against"],
            **_what(request),
            seconds=request["seconds"],
            precision=request["precision"],
            measure_limits=request["measure_limits"],
            witness=answers.witness,
            on_measurement=lambda m: answers.send(measured=f"{m.direction} {m.case}"),
            on_run=answers.pulse.beat,
            timeout_s=request["timeout_s"],
        )
    except NotVerifiedError as error:
        answers.send(refused=_parts(error))
    else:
        answers.send(record=encodable(record))


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
    raise CheckError(name, "this is no dtype of a kernel", rows=[("there", there)])


def _verified(operator: Any, request: dict[str, Any], answers: Answers) -> None:
    from opwright.bench.run import choose_device, refuse_unverified
    from opwright.errors import NotVerifiedError
    from opwright.records import builtins_of
    from opwright.verify.machine import machine_card

    where = choose_device(operator.declaration.name, operator, None, request["device"])
    try:
        refuse_unverified(operator.function, None, None, where, None, request["timeout_s"])
    except NotVerifiedError as error:
        answers.send(refused=_parts(error))
    else:
        card = builtins_of(machine_card(where))
        answers.send(verified={"name": operator.declaration.qualified_name, "machine": card, "device": str(where)})


def _call(operator: Any, request: dict[str, Any], answers: Answers) -> None:
    from opwright.bench.call_split import split_call
    from opwright.records import encodable

    answers.send(record=encodable(split_call(operator.function, request["device"])))


def _pairs(operator: Any, request: dict[str, Any], answers: Answers) -> None:
    """Measures block by block, as the other process asks for them: it alternates between two of these."""
    from opwright.bench.pairs import Side

    side = Side(operator, **_what(request), seconds=request["seconds"], on_run=answers.pulse.beat)
    if request["core"] is not None:
        os.sched_setaffinity(0, [request["core"]])
    answers.send(inputs=side.inputs)
    for line in answers.asked:
        answers.send(block=side.block(json.loads(line)))


if __name__ == "__main__":
    main()
