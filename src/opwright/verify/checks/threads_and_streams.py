"""Checks of what surrounds a call: streams, devices, graphs of a GPU, threads.

A kernel may be right on every input and still be launched on the wrong stream, on the wrong device, or
keep state between calls. Each check runs a trial, a computation forward or with its gradient, in such
surroundings and wants the bits that the same trial gives alone.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from opwright import _torch
from opwright.contract.sweep import Case
from opwright.dispatch import kernels
from opwright.errors import plural
from opwright.verify.checks.finding import Finding, Skipped, agree, first_line, outputs_and_mutated
from opwright.verify.checks.gradients import as_leaves, call_for_gradient, floats_of, has_gradient, seed_like
from opwright.verify.checks.numerics import check_call, expected_of, representatives
from opwright.verify.devices import capture, is_gpu, raise_if_lost
from opwright.verify.target import Target
from opwright.verify.tensors import copy_of, storage_bytes, tensors_of

# How long a producer keeps its stream busy: above any time in which the host enqueues a warm call. If the
# call has outlasted it, once more with the longer one, for a slow host, and on other streams: what waits for
# another reason than the kernel (new memory, a queue of the hardware that streams share) does not do so always.
_BUSY_MS = (30, 600, 30, 30)
_CYCLES, _TIMES = 2_000_000, 8  # a millisecond, to measure the clock by
_THREADS, _ROUNDS, _ROUNDS_OF_CALLABLE = 4, 8, 4


@dataclass
class Trial:
    """A computation to be run in several surroundings.

    Attributes:
        label: the case and the direction.
        values: what it reads, on the device: arguments, and cotangents of a gradient.
        compute: takes `values` or a copy; returns all results, mutated arguments included.
        compute_reference: the same by the reference.
        change: returns other data of the same layout, within the domains of the arguments.
        agree: takes results, those of another call, and the values of both; returns whether they are the same.
    """

    label: str
    values: list[Any]
    compute: Callable[[list[Any]], list[torch.Tensor]]
    compute_reference: Callable[[list[Any]], list[torch.Tensor]]
    change: Callable[[list[Any]], list[Any]]
    agree: Callable[[list[torch.Tensor], list[torch.Tensor], list[Any]], bool]


def trials(target: Target) -> Iterator[Trial]:
    """Yields the forward of a small and of a large case, and their gradients where a kernel may have part in them."""
    for case in target.run_cases():
        yield _forward(target, case)
        gradient = None if target.is_derivative_of_reference else _gradient(target, case)
        if gradient is not None:
            yield gradient


def _forward(target: Target, case: Case) -> Trial:
    def compute(call: Any, values: list[Any]) -> list[torch.Tensor]:
        with torch.no_grad():
            outputs = call(values)
        return tensors_of([*outputs, *target.written(values)])

    def is_same(got: list[torch.Tensor], wanted: list[torch.Tensor], values: list[Any]) -> bool:
        return agree(target, got, wanted, outputs_and_mutated, values)

    computes = [functools.partial(compute, call) for call in (target.call, target.reference)]
    return Trial(str(case), target.inputs(case), *computes, functools.partial(_other_arguments, target), is_same)


def _gradient(target: Target, case: Case) -> Trial | None:
    if not has_gradient(target):
        return None

    def is_same(got: list[torch.Tensor], wanted: list[torch.Tensor], both: list[Any]) -> bool:
        return agree(target, got, wanted, _pull_back_by_reference, both, of_gradient=True)

    def change(both: list[Any]) -> list[Any]:
        return [_other_arguments(target, both[0]), other_values(both[1])]

    values = target.inputs(case)
    outputs = call_for_gradient(target, target.call, as_leaves(values))
    if not outputs:
        return None
    seeds = [seed_like(o) for o in outputs]
    computes = [functools.partial(_pull_back, target, call) for call in (target.call, target.reference)]
    return Trial(f"{case}, gradient", [values, seeds], *computes, change, is_same)


def _pull_back(target: Target, call: Any, both: list[Any]) -> list[torch.Tensor]:
    """Returns gradients, without waiting for a GPU."""
    values, seeds = both
    leaves = as_leaves(values)
    found = torch.autograd.grad(call_for_gradient(target, call, leaves), floats_of(leaves), seeds, allow_unused=True)
    return [g for g in found if g is not None]


def _pull_back_by_reference(target: Target, both: list[Any]) -> list[torch.Tensor]:
    return _pull_back(target, target.reference, both)


def _other_arguments(target: Target, values: list[Any]) -> list[Any]:
    found = other_values(values)
    for position, value in enumerate(found):
        for tensor in tensors_of([value]):
            tensor.copy_(target.fold(tensor, position))
    return found


def other_values(values: list[Any]) -> list[Any]:
    """Returns other data of the same layout: floating-point tensors reversed and halved."""
    found = copy_of(values)
    for tensor in tensors_of(found):
        if tensor.is_floating_point():
            tensor.copy_(0.5 * tensor.flip(tuple(range(tensor.ndim))))
    return found


def fill_storage(targets: list[Any], sources: list[Any]) -> None:
    """Copies data into tensors of the same layout, on the current stream."""
    for target, source in zip(tensors_of(targets), tensors_of(sources), strict=True):
        storage_bytes(target).copy_(storage_bytes(source), non_blocking=True)


def clear(values: list[Any]) -> list[Any]:
    """Returns tensors of the same layout that are all zero."""
    found = copy_of(values)
    for tensor in tensors_of(found):
        storage_bytes(tensor).zero_()
    return found


def need_gpu(target: Target) -> None:
    if target.device.type != "cuda":
        raise Skipped("only on a GPU")


def _alone(trial: Trial, values: list[Any]) -> list[torch.Tensor]:
    result = [t.detach().clone() for t in trial.compute(copy_of(values))]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


# --- streams -----------------------------------------------------------------------------------------------


def side_stream(target: Target) -> Iterator[Finding]:
    """On a side stream, behind a slow producer of its input, while the default stream is busy with something else."""
    need_gpu(target)
    with torch.cuda.device(target.device):
        busy = _Busy()
        for trial in trials(target):
            yield Finding(trial.label, _on_side_stream(trial, busy))


def _on_side_stream(trial: Trial, busy: _Busy) -> str:
    wanted = _alone(trial, trial.values)
    stream = _warm_stream(trial)
    early = clear(trial.values)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        busy.keep(_BUSY_MS[0])
        fill_storage(early, trial.values)
        got = trial.compute(early)
    stream.synchronize()
    same = trial.agree(got, wanted, trial.values)
    torch.cuda.synchronize()
    if not same:
        return "on a side stream it reads its input before the stream has produced it, or returns before it is done"
    for milliseconds in _BUSY_MS:
        if not _does_wait(functools.partial(trial.compute, copy_of(trial.values)), stream, busy, milliseconds):
            return ""
        stream = _warm_stream(trial)
    one = torch.zeros(1, device="cuda").zero_
    if any(_does_wait(one, stream, busy, milliseconds) for milliseconds in _BUSY_MS):
        raise Skipped("others use the GPU: even one kernel on a side stream ends after the default stream's work")
    return "on a side stream it waits for the default stream"


def _does_wait(run: Callable[[], Any], stream: torch.cuda.Stream, busy: _Busy, milliseconds: float) -> bool:
    """Returns whether what runs on a stream ends after what keeps the default stream busy for a time."""
    torch.cuda.synchronize()
    busy.keep(milliseconds)
    end = torch.cuda.Event()
    end.record()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    is_over = end.query()
    torch.cuda.synchronize()
    return is_over


def _warm_stream(trial: Trial) -> torch.cuda.Stream:
    """Returns a stream on which the trial has run: whatever a first call has to do, memory for one, is done."""
    stream = torch.cuda.Stream()
    values = clear(trial.values)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        trial.compute(values)
    torch.cuda.synchronize()
    return stream


class _Busy:
    def __init__(self) -> None:
        # Another process has the GPU in between: the shortest of some times is that of the clock.
        self.cycles_per_ms = _CYCLES / min(self._time_ms() for _ in range(_TIMES))

    def _time_ms(self) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        _torch.keep_gpu_busy(_CYCLES // 2)  # the host is ahead
        start.record()
        _torch.keep_gpu_busy(_CYCLES)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def keep(self, milliseconds: float) -> None:
        _torch.keep_gpu_busy(int(self.cycles_per_ms * milliseconds))


# --- devices -----------------------------------------------------------------------------------------------


def other_device(target: Target) -> Iterator[Finding]:
    """On tensors of a device that is not the current one."""
    need_gpu(target)
    count = torch.cuda.device_count()
    if count < 2:
        raise Skipped("there is one GPU")
    if target.operator is None:
        raise Skipped("the samples of a callable are on one device")
    home = torch.device("cuda", torch.cuda.current_device() if target.device.index is None else target.device.index)
    other = torch.device("cuda", (home.index + 1) % count)
    for trial in trials(target):
        for own, current in ((home, other), (other, home)):
            values = copy_of(trial.values, own)
            with torch.cuda.device(own):
                wanted = _alone(trial, values)
            with torch.cuda.device(current):
                got = trial.compute(copy_of(values))
                is_home = all(t.device == own for t in got)
            torch.cuda.synchronize(own)
            torch.cuda.synchronize(current)
            message = "" if trial.agree(got, wanted, values) else "different values than with its own device current"
            if not is_home:
                message = f"results are on {', '.join(sorted({str(t.device) for t in got}))}"
            yield Finding(f"{trial.label}, tensors on {own}, {current} current", message)


# --- graphs ------------------------------------------------------------------------------------------------


def graph_replays(target: Target) -> Iterator[Finding]:
    """Captured into a CUDA graph and replayed, with the same data and with other data."""
    need_gpu(target)
    if target.operator is not None and target.operator.contract.data_dependent:
        raise Skipped("sizes depend on data")
    with torch.cuda.device(target.device):
        for trial in trials(target):
            yield Finding(trial.label, _in_graph(trial, target))


def _in_graph(trial: Trial, target: Target) -> str:
    given = [trial.values, trial.change(trial.values)]
    wanted = [_alone(trial, values) for values in given]
    static = copy_of(trial.values)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            trial.compute(static)
    torch.cuda.synchronize()
    try:
        graph, got = capture(lambda: trial.compute(static), stream)
    except Exception as error:
        raise_if_lost(target.device, error)
        if target.operator is not None and not kernels.is_loaded(target.operator, target.device.type):
            raise Skipped(f"its reference cannot be captured: {first_line(error)}") from None
        return f"it cannot be captured: {first_line(error, 3)}"
    for values, right in zip([*given, given[0]], [*wanted, wanted[0]], strict=True):
        fill_storage(static, values)
        graph.replay()
        torch.cuda.synchronize()
        if not trial.agree(got, right, values):
            data = "the data it was captured with" if values is given[0] else "other data"
            return f"a replay with {data} gives different values than a call"
    return ""


# --- chunks ------------------------------------------------------------------------------------------------


def chunks(target: Target) -> Iterator[Finding]:
    """Loops of `parallel_for` cut into chunks of a few steps, on one to four threads that start at once.

    A boundary falls everywhere, and threads that write into one element meet there. A larger case gives them time to.
    """
    operator = target.operator
    if is_gpu(target.device):
        raise Skipped("only on a CPU")
    with torch.no_grad():
        aligned = next((case for case in target.cases() if case.label == "aligned"), None)
        for case in (*representatives(target), *((aligned,) if aligned else ())):
            target.run(target.inputs(case))  # loads its kernels
            library = kernels.library_of(operator, target.device.type)
            if not hasattr(library, "limit_chunks"):
                raise Skipped("no kernels for a CPU that were built here")
            expected = expected_of(target, case)
            finding = Finding(str(case))
            for steps, count in _CHUNKS if case is not aligned else _FOR_RACES:
                with _in_chunks(target, library, steps, count):
                    finding = check_call(target, case, target.inputs(case), expected)
                if finding.message:
                    how = f"in chunks of {plural(steps, 'step')}, on {plural(count, 'thread')}"
                    finding.message = f"{how}: {finding.message}"
                    break
            yield finding


@contextlib.contextmanager
def _in_chunks(target: Target, library: Any, steps: int, count: int) -> Iterator[None]:
    before, target.threads.count = target.threads.count, count
    library.limit_chunks(steps)
    try:
        yield
    finally:
        library.limit_chunks(0)
        target.threads.count = before


# Steps, threads. Vectors have a remainder in most chunks; in others they are whole.
_CHUNKS = ((1, 1), (3, 2), (17, 3), (64, 4))
_FOR_RACES = ((64, 2), (64, 4)) * 3


# --- threads -----------------------------------------------------------------------------------------------


def threads(target: Target) -> Iterator[Finding]:
    """In several threads at once, each with data of its own, on a GPU with a stream of its own.

    Then all threads with the same data, which none may write into, not even for a moment.
    """
    mutates = bool(target.mutated())
    is_plain = target.operator is None and target.device.type == "cpu"
    if is_plain and mutates:
        raise Skipped("it mutates its arguments")
    if is_plain and target.callables.are_shared and target.callables.parameters:
        raise Skipped("a module is given its parameters call by call")
    device = torch.cuda.device(target.device) if target.device.type == "cuda" else contextlib.nullcontext()
    with device, _frequent_switches():
        for trial in [_forward_of_callable(target)] if is_plain else trials(target):
            given = [trial.values]
            while len(given) < _THREADS:
                given.append(trial.change(given[-1]))
            message = _in_threads(target, trial, given, copies=True)
            if not message and not mutates and not is_plain:
                message = _in_threads(target, trial, [trial.values] * _THREADS, copies=False)
            yield Finding(trial.label, message)


def _forward_of_callable(target: Target) -> Trial:
    """Returns a trial whose results may round otherwise, with other values only where it takes them."""
    case = target.run_cases()[0]
    trial = _forward(target, case)

    def change(values: list[Any]) -> list[Any]:
        changed = other_values(values)
        try:
            trial.compute(copy_of(changed))
        except Exception:  # not an input that it takes
            return trial.values
        return changed

    def is_right(got: list[torch.Tensor], wanted: list[torch.Tensor], values: list[Any]) -> bool:
        return agree(target, got, wanted, outputs_and_mutated, values, may_round=True)

    return replace(trial, change=change, agree=is_right)


@contextlib.contextmanager
def _frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _in_threads(target: Target, trial: Trial, given: list[list[Any]], copies: bool) -> str:
    on_gpu = any(t.is_cuda for t in tensors_of(trial.values))
    device = torch.cuda.current_device() if on_gpu else None
    start, bad = threading.Barrier(len(given)), []
    found: list[tuple[list[Any], list[torch.Tensor], list[list[torch.Tensor]]]] = []

    def run(function: Callable[..., None], *args: Any) -> None:
        try:
            if on_gpu:
                torch.cuda.set_device(device)
            function(*args)
        except BaseException as error:
            start.abort()
            bad.append(f"raised {type(error).__name__} in a thread: {first_line(error)}")

    def work(values: list[Any], right: list[torch.Tensor]) -> None:
        used = [
            copy_of(values) if copies else values
            for _ in range(_ROUNDS if target.operator is not None else _ROUNDS_OF_CALLABLE)
        ]
        stream = torch.cuda.Stream() if on_gpu else None
        if on_gpu:
            torch.cuda.synchronize()
        start.wait(60)
        with torch.cuda.stream(stream) if on_gpu else contextlib.nullcontext():
            results = [trial.compute(each) for each in used]
        if on_gpu:
            stream.synchronize()
        found.append((values, right, results))

    # What one thread gets alone: not the main one, whose share of the CPU's threads may be another.
    wanted: list[list[torch.Tensor]] = []

    def compute_alone() -> None:
        wanted.extend(_alone(trial, values) for values in given)

    _run_all([threading.Thread(target=run, args=(compute_alone,))])
    if bad:
        return bad[0]
    _run_all([threading.Thread(target=run, args=(work, *pair)) for pair in zip(given, wanted, strict=True)])
    if on_gpu:
        torch.cuda.synchronize()
    if bad or all(trial.agree(result, right, values) for values, right, results in found for result in results):
        return bad[0] if bad else ""
    shared = "do calls share memory, a `static` buffer" if copies else "does a call write into its input"
    return f"several threads at once differ from one thread: {shared}, or do threads of a call share a variable?"


def _run_all(running: list[threading.Thread]) -> None:
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
