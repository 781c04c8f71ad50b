"""What a timing must pass to count: results that hold, a time that this machine can have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opwright.bench.inputs import all_tensors
from opwright.errors import NotVerifiedError
from opwright.records import Limits, Timing
from opwright.spec.cost import Cost

# How much faster than what was measured a kernel may be. PyTorch's copy of a core's cache does not reach what loads
# alone would, and its matrix products are not always the best there are.
_BANDWIDTH_FACTOR, _COMPUTE_FACTOR = 4.0, 2.0
# Of a GPU: the clocks of events, of graphs and of the host may differ by launches, and by this factor.
_CLOCK_FACTOR, _LAUNCHES_US = 2.0, 30.0

# How much longer a call may take on values that it has not seen: branches are not predicted any more, and other processes
# may have had the cores.
_FRESH_FACTOR, _FRESH_US = 3.0, 5.0


def floor_us(cost: Cost, limits: Limits) -> float:
    """Returns the least time that the limits of a machine allow for such a cost."""
    return max(_bytes_us(cost, limits), _flop_us(cost, limits))


def _bytes_us(cost: Cost, limits: Limits) -> float:
    return cost.bytes_moved / (_BANDWIDTH_FACTOR * max(limits.cache_gb_s, limits.copy_gb_s)) / 1e3


def _flop_us(cost: Cost, limits: Limits) -> float:
    return (cost.flop or 0) / (_COMPUTE_FACTOR * max(limits.gemm_gflops.values(), default=float("inf"))) / 1e3


def refuse_too_fast(subject: str, case: str, took_us: float, cost: Cost, limits: Limits) -> None:
    """Raises NotVerifiedError if a time is below the floor."""
    least = floor_us(cost, limits)
    if took_us >= least:
        return
    if _bytes_us(cost, limits) >= _flop_us(cost, limits):
        rate = max(limits.cache_gb_s, limits.copy_gb_s)
        why = f"{cost.bytes_moved} bytes at {_BANDWIDTH_FACTOR:g} times the measured {rate:.4g} GB/s of the cache"
    else:
        rate = max(limits.gemm_gflops.values())
        why = f"{cost.flop} FLOP at {_COMPUTE_FACTOR:g} times the measured {rate:.4g} GFLOP/s"
    raise NotVerifiedError(
        subject,
        "it is faster than this machine can be",
        rows=[("input", case), ("measured", f"{took_us:.4g} us"), ("at least", f"{least:.4g} us: {why}")],
        hint="a result that is not computed costs nothing; a wrong cost is declared with `@name.cost`, and old limits "
        "are measured again with `--measure-limits`",
    )


def refuse_deferred(subject: str, results: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Raises NotVerifiedError for a result of a class that may compute when it is looked at."""
    usual = {torch.Tensor, torch.nn.Parameter, *(type(t) for t in all_tensors(inputs))}
    for result in results:
        if isinstance(result, torch.Tensor) and type(result) not in usual:
            raise NotVerifiedError(
                subject,
                "its result is of a class that may compute later, when nobody measures",
                rows=[("got", type(result).__name__), ("expected", "torch.Tensor")],
                hint="return plain tensors",
            )


def refuse_changes(subject: str, case: str, changes: Sequence[str]) -> None:
    """Raises NotVerifiedError if settings or functions of PyTorch are others than before the candidate was called."""
    if changes:
        raise NotVerifiedError(
            subject,
            "it changes what it, and what it is compared with, runs in",
            rows=[("input", case), ("found", "; ".join(changes))],
            hint="a call leaves the settings and functions of PyTorch as they were",
        )


def refuse_file_changes(subject: str, case: str, changes: Sequence[str]) -> None:
    """Raises NotVerifiedError if files that were there are gone or changed."""
    if changes:
        raise NotVerifiedError(
            subject,
            "its call touches files that it has not made",
            rows=[("input", case), ("found", "; ".join(changes))],
            hint="an operator computes from its arguments and leaves files alone",
        )


def is_kept(fresh_us: float, said_us: float) -> bool:
    """Whether a call on other values takes so much longer that something must have been kept from the same ones."""
    return fresh_us > _longest_us(said_us)


def _longest_us(said_us: float) -> float:
    return _FRESH_FACTOR * said_us + _FRESH_US


def refuse_kept(subject: str, case: str, fresh_us: float, said_us: float) -> None:
    """Raises NotVerifiedError if a call takes much longer on values that it has not seen than on those of before."""
    if is_kept(fresh_us, said_us):
        raise NotVerifiedError(
            subject,
            "it is fast only on values that it has seen before",
            rows=[
                ("input", case),
                ("the same values", f"{said_us:.4g} us"),
                ("other values", f"{fresh_us:.4g} us at best, {_longest_us(said_us):.4g} us allowed"),
            ],
            hint="a result, or packed weights, that are kept from call to call are not computed: their cost belongs to the call",
        )


def refuse_clocks_apart(subject: str, case: str, timing: Timing) -> None:
    """Raises NotVerifiedError if the clocks that timed a call on a GPU do not agree.

    Events see the stream that they are on. The host's clock, with a wait for the whole device, sees every
    stream; a replayed graph has no host in it.
    """
    if timing.warm_us is None or timing.host_us is None:
        return
    events = max(timing.warm_us, timing.host_us)
    for name, other in (("by the host's clock", timing.wall_us), ("as a graph", timing.graph_us)):
        if other is not None and other > _CLOCK_FACTOR * events + _LAUNCHES_US:
            raise NotVerifiedError(
                subject,
                "two clocks do not agree about its time",
                rows=[("input", case), ("by events", f"{events:.4g} us"), (name, f"{other:.4g} us")],
                hint="work on a stream that PyTorch does not know is not seen by events: use "
                "`torch.cuda.current_stream()`; or another process uses the GPU: `nvidia-smi` lists them",
            )
