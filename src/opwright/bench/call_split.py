"""Where one tiny call goes: the host's time of it, split into parts.

Every part is the difference of two calls that really run, one of which goes one step further than the
other; all of them take turns, and a difference is taken within a round, so that whatever
else the machine does slows both alike.

    python       the operator's function, minus the function of C that it calls (native/src/direct.c)
    binding      that, minus the glue: what Python's objects are and whether anything looks on, the interpreter's lock,
                 Python's objects for the results. Where all calls go through the dispatcher, `dispatcher` stands for
                 it: PyTorch's binding, its search for the kernel, and references to the tensors
    checks       the glue as far as reading and checking the arguments
    allocation   the outputs allocated and freed as well
    views        what the kernel sees of each tensor made as well
    launch       a kernel called that does nothing; on a GPU its device made current and its stream found
    kernel       the kernel itself; on a GPU its launch, behind which it runs

The glue's steps are those of glue.c, compiled once more with a loop around them. Each part comes with the
half-width of Student's 95 % interval over blocks of rounds. A part that is smaller than that may be nothing.
What remains of rounding and of the compiler's other choices for the loop is a few nanoseconds.

An operator that writes into arguments, or has no kernel here, has two parts: what stands before its reference, and the
reference.
"""

from __future__ import annotations

import ctypes
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from opwright import _torch
from opwright.bench.api import choose_device
from opwright.bench.measure import describe_case
from opwright.bench.roofline import GpuBench, bench_on
from opwright.bench.statistics import interval_of, into_blocks
from opwright.bench.timers import in_turn, no_garbage_collection, time_on_gpu
from opwright.bench.workload import applier, one_element
from opwright.build.probe import STEPS, load_probe
from opwright.contract.sweep import without_names
from opwright.dispatch import kernels
from opwright.dispatch.direct import is_result
from opwright.dispatch.operator import Operator, operator_of
from opwright.errors import CheckError
from opwright.machine import machine_card
from opwright.records import CallPart, CallRecord
from opwright.verify.callables import name_of

_ROUNDS = 160
_SAMPLE_SECONDS = 5e-4
_MAX_CALLS_ON_GPU = 100  # in a sample: fewer than its queue has room for

Loop = Callable[[int], object]


def where_a_call_goes(target: Any, *, device: str | torch.device | None = None) -> CallRecord:
    """Splits the host's time of a call on the smallest input there is.

    Args:
        target: an operator, or its `torch.ops` entry.
        device: as for `bench`.

    Raises:
        CheckError: it is not an operator.
        BuildError: there is no compiler to build the probe with.
    """
    operator = operator_of(target)
    if operator is None:
        raise CheckError(
            name_of(target),
            "only the calls of an operator can be split",
            hint='`@operator("my_ops::name")` declares one',
        )
    started = time.time()
    where = choose_device(operator.declaration.name, operator, None, device)
    place = bench_on(where)
    with place.current(), torch.no_grad():
        case = one_element(operator, place.device)
        if case is None:
            raise CheckError(
                operator.declaration.name,
                "the reference refuses every small input that was made for it",
                hint=f"`@{operator.declaration.name}.samples` declares an input",
            )
        one = torch.ones(1, device=place.device)
        loops = {"nothing": _nothing, "torch.add": _loop(torch.add, (one, one))}
        keywords = [p.name for p in operator.contract.parameters if p.keyword_only]
        loops["operator"] = _loop(operator.function, case.values, keywords)
        applier(operator.function, operator)(case.values)  # builds and loads
        backend = place.device.type
        if operator.contract.mutated or not kernels.is_loaded(operator, backend):
            loops["reference"] = _loop(applier(operator.declaration.reference, operator), (case.values,))
            steps = [("python, dispatcher", "operator", "reference"), ("reference", "reference", "nothing")]
        else:
            given = _Given(operator, case.values)
            direct = operator.registration.direct
            is_direct = is_result(direct.call(*given.coded))
            loops["binding"] = _loop(direct.call if is_direct else operator.kernel, given.coded)
            probe = load_probe(
                kernels.unit_of(kernels.unit_key(operator.declaration, backend)), operator.declaration, backend
            )
            for number, step in enumerate(STEPS):
                if step != "read":
                    loops[step] = _probe_loop(probe, given, number)
            binding = ("binding" if is_direct else "dispatcher", "binding", "whole call")
            steps = [_PYTHON, binding, *_STEPS, *(_STEPS_ON_GPU if backend == "cuda" else _STEPS_ON_CPU)]
        samples = _time(loops, place)
        device_us = None
        if isinstance(place, GpuBench):
            call = applier(operator.function, operator)
            (timing,) = time_on_gpu({"": [lambda: call(case.values)]}, 0.1, place.gpu).timings
            device_us = timing.warm_us
    named_case = describe_case(case)
    return CallRecord(
        name=operator.declaration.qualified_name,
        case=without_names(named_case),
        parts=[_part(samples, *step) for step in steps],
        total_us=statistics.median(_differences(samples, "operator", "nothing")),
        peers_us={"torch.add": statistics.median(_differences(samples, "torch.add", "nothing"))},
        device_us=device_us,
        rounds=_ROUNDS,
        machine=machine_card(where),
        created=started,
        seconds=time.time() - started,
        device=str(where),
        named_case=named_case,
    )


# Name, what goes further, what does not.
_PYTHON = ("python", "operator", "binding")
_STEPS = [("checks", "check", "stack"), ("allocation", "allocate", "check"), ("views", "view", "allocate")]
_STEPS_ON_CPU = [("launch", "empty launch", "view"), ("kernel", "whole call", "empty launch")]
_STEPS_ON_GPU = [("device, stream", "empty launch", "view"), ("launch", "whole call", "empty launch")]


def _part(samples: dict[str, list[float]], name: str, further: str, before: str) -> CallPart:
    blocks = into_blocks(_differences(samples, further, before), 10)
    center, half = interval_of([statistics.median(block) for block in blocks])
    return CallPart(name, center, half, f"{further} - {before}")


def _differences(samples: dict[str, list[float]], further: str, before: str) -> list[float]:
    return [a - b for a, b in zip(samples[further], samples[before], strict=True)]


def _time(loops: dict[str, Loop], place: Any) -> dict[str, list[float]]:
    """Returns microseconds of a call for each loop, round by round."""
    wait = place.gpu.wait if isinstance(place, GpuBench) else lambda: None
    counts = {}
    for name, loop in loops.items():
        loop(10)
        start = perf_counter()
        loop(10)
        counts[name] = max(10, int(_SAMPLE_SECONDS / max((perf_counter() - start) / 10, 1e-9)))
        if isinstance(place, GpuBench):
            counts[name] = min(counts[name], _MAX_CALLS_ON_GPU)
        wait()
    samples: dict[str, list[float]] = {name: [] for name in loops}
    with no_garbage_collection():
        for round_index in range(_ROUNDS):
            for name, loop in in_turn(loops, round_index):
                wait()
                start = perf_counter()
                loop(counts[name])
                samples[name].append((perf_counter() - start) / counts[name] * 1e6)
    wait()
    return samples


# --- the variants ----------------------------------------------------------------------------------------------


def _nothing(count: int) -> None:
    for _ in range(count):
        pass


def _loop(function: Callable[..., Any], arguments: Sequence[Any], keywords: Sequence[str] = ()) -> Loop:
    """Returns a loop of calls that are written out: to unpack a tuple would cost as much as a check."""
    names = [f"a{i}" for i in range(len(arguments))]
    first = len(arguments) - len(keywords)
    written = [*names[:first], *(f"{k}={n}" for k, n in zip(keywords, names[first:], strict=True))]
    source = (
        f"def make(function, {''.join(name + ', ' for name in names)}):\n"
        "    def loop(count):\n"
        "        for _ in range(count):\n"
        f"            function({', '.join(written)})\n"
        "    return loop\n"
    )
    scope: dict[str, Any] = {}
    exec(compile(source, "<where a call goes>", "exec"), scope)
    return scope["make"](function, *arguments)


class _Given:
    """The arguments of a call, as a kernel's entry takes them and as the glue does."""

    def __init__(self, operator: Operator, values: Sequence[Any]) -> None:
        parameters = operator.contract.parameters
        self.coded = tuple(
            p.choices.index(v) if p.kind == "choice" else v for p, v in zip(parameters, values, strict=True)
        )
        self._kept: list[Any] = []
        words = [self._word(p.kind, v) for p, v in zip(parameters, self.coded, strict=True)]
        self.words = (ctypes.c_uint64 * max(len(words), 1))(*words)

    def _word(self, kind: str, value: Any) -> int:
        if isinstance(value, torch.Tensor):
            # A handle is a pointer to a pointer to the tensor; the tensor is kept alive by the case.
            cell = ctypes.c_void_p(_torch.address_of(value))
            self._kept += [value, cell]
            return ctypes.addressof(cell)
        if kind == "tensors":
            handles = [self._word("tensor", item) for item in value]
            array = (ctypes.c_uint64 * (1 + len(handles)))(len(handles), *handles)
            self._kept.append(array)
            return ctypes.addressof(array)
        if value is None:
            return 0
        return struct.unpack("<Q", struct.pack("<d" if kind == "float" else "<q", value))[0]


def _probe_loop(probe: Callable[..., bytes | None], given: _Given, step: int) -> Loop:
    def loop(count: int) -> None:
        failure = probe(given.words, step, count)
        if failure is not None:
            raise CheckError("bench", "a step of the call failed", rows=[("reason", failure.decode())])

    return loop
