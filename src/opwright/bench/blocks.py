"""One version of an operator, measured block by block in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from opwright.bench.api import choose_device
from opwright.bench.environment import kept_memory
from opwright.bench.measure import describe_case, pair_with_directions
from opwright.bench.timers import calls_in_sample, no_garbage_collection
from opwright.bench.workload import Plan, Workload, plans
from opwright.contract.sweep import without_names
from opwright.dispatch.operator import Operator

_SAMPLES = 15  # in a block


class Side:
    """The inputs of one version, and its times on them.

    Args:
        seconds: the longest that a block of samples takes.
        on_run: called with the candidate that runs next, and on what, before each block.

    Attributes:
        inputs: "direction case" of each, in order.
    """

    def __init__(
        self,
        operator: Operator,
        *,
        device: str | None = None,
        sweep: Mapping[str, Sequence[Any]] | None = None,
        dtypes: Sequence[torch.dtype] | None = None,
        directions: Sequence[str] | None = None,
        seconds: float = 0.1,
        on_run: Callable[[str, str], object] = lambda who, what: None,
    ) -> None:
        self._operator, self._seconds, self._on_run = operator, seconds, on_run
        self._device = choose_device(operator.declaration.name, operator, None, device)
        self._planned: dict[str, tuple[str, Plan]] = {}
        self.named_cases: dict[str, str] = {}
        found = plans(operator, None, sweep, None, dtypes, self._device)
        for direction, plan in pair_with_directions(found, directions, operator):
            named_case = describe_case(plan.make(0))
            name = f"{direction} {without_names(named_case)}"
            self._planned[name], self.named_cases[name] = (direction, plan), named_case
        self.inputs = list(self._planned)
        self._current: tuple[str, Callable[[], object], int] | None = None
        # For the rest of the process, which ends with this.
        self._memory = kept_memory()
        self._memory.__enter__()

    def block(self, name: str) -> list[float]:
        """Returns a few samples on one of the inputs, in microseconds: on a GPU of many calls and a wait."""
        with torch.set_grad_enabled(not name.startswith("forward ")), no_garbage_collection():
            if self._current is None or self._current[0] != name:
                self._current = None
                self._on_run("opwright", name)
                direction, plan = self._planned[name]
                call = Workload(direction, plan.make(0).values, self._operator).bind(self._operator.function)
                self._current = name, call, calls_in_sample(call)
            self._on_run("opwright", name)
            _, call, repeats = self._current
            samples, begun = [], perf_counter()
            while len(samples) < _SAMPLES and (not samples or perf_counter() - begun < self._seconds):
                samples.append(self._sample(call, repeats))
            return samples

    def _sample(self, call: Callable[[], object], repeats: int) -> float:
        wait = torch.cuda.synchronize if self._device.type == "cuda" else lambda: None
        wait()
        start = perf_counter()
        for _ in range(repeats):
            call()
        wait()
        return (perf_counter() - start) / repeats * 1e6
