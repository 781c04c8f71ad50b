"""Runs the checks in processes of their own, so that one that crashes, hangs or exits is a finding.

For a CPU each is a fork, so it has the candidate as it lives here: a closure, a compiled function. Thread pools
of OpenMP and MKL do not survive a fork, but only the thread that has used one knows of it: the fork is made
from a fresh thread, and the first parallel loop in the child makes a new pool. CUDA does not survive a fork at all:
for a GPU the process starts anew, and the candidate has to be one that can be imported again.

When a child dies, or has to be killed, that is the finding of the check it was at, and another child goes on with
the next one. The groups that jobs fall into have children of their own, some at a time, and their results come in the
order of the jobs, as if one child had done them all: after a death too many, or a fault after which no call is
safe, nothing counts that another child has found meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from opwright.verify.checks import group_of, place_of
from opwright.verify.child import Child, Limits, Send, Start, Unfit, count, do_work, serve, wait_for_any
from opwright.verify.devices import is_gpu
from opwright.verify.oracle_process import OracleProcess
from opwright.verify.processes import Fork
from opwright.verify.recipes import Recipe
from opwright.verify.spawned import starter
from opwright.verify.worker import Job, Result, Work, skipped

# What derives a gradient imports it, a second of each process that does not have it from its parent; opcheck the other.
_FOR_GRADIENTS = ("torch._dynamo", "torch.testing._internal.optests")
_MOST_DEATHS = 4  # each may have cost the whole timeout


def has_supervision() -> bool:
    """Returns whether processes can be supervised here: by what Linux has for that."""
    return sys.platform == "linux"


def can_fork(device: torch.device) -> bool:
    """Returns whether a fork can run the checks for a device: it cannot use the GPU of its parent."""
    return not is_gpu(device)


def supervise(recipe: Recipe, work: Work, jobs: Sequence[Job], limits: Limits) -> Iterator[Result]:
    """Yields the result of each job, in order; all are for one device.

    Raises:
        Unfit: no process of its own can run them. What was yielded before stands.
    """
    if not has_supervision():
        raise Unfit(f"processes are supervised on Linux only, not on {sys.platform}")
    if can_fork(jobs[0].device):
        recipe.make_cases()
        leaves = recipe.leaves()

        def start(pending: Sequence[Job]) -> Start:
            run = functools.partial(do_work, work, list(pending))
            return _fork(run, lambda: OracleProcess(recipe.references, leaves))

    else:
        limits = replace(limits, processes=1)  # each would need a context of its own on the GPU

        def start(pending: Sequence[Job]) -> Start:
            return starter(recipe, work, pending)

    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(group_of(job.prefix, job.check) if limits.processes > 1 else "", []).append(job)
    told: set[str] = set()
    waiting = [_Lane(work, groups[name], limits, start, told) for name in sorted(groups, key=place_of)]
    running = [waiting.pop(0)]
    results: dict[Job, Result] = {}
    deaths, given_up = 0, ""
    try:
        running[0].start()
        if len(waiting) > 1 and can_fork(jobs[0].device):  # while the first one works
            for name in _FOR_GRADIENTS:
                importlib.import_module(name)
        for job in jobs:
            while not given_up and job not in results:
                while waiting and len(running) < limits.processes:
                    running.append(waiting.pop(0))
                for lane in running:
                    lane.start()
                wait_for_any([lane.child for lane in running if lane.child is not None])
                for lane in running:
                    results |= lane.look()
                running = [lane for lane in running if lane.pending or lane.child is not None]
            if given_up:
                yield skipped(job, given_up)
                continue
            result = results.pop(job)
            deaths += result.has_ended
            given_up = result.fatal or (_too_many(deaths) if result.has_ended else "")
            yield result
    finally:
        for lane in running:
            lane.end()


def _fork(
    run: Callable[[Send, mmap.mmap, OracleProcess | None], None],
    start_oracle: Callable[[], OracleProcess] | None = None,
) -> Start:
    return lambda *descriptors: Fork(lambda: serve(run, *descriptors, start_oracle=start_oracle))


def _too_many(deaths: int) -> str:
    return f"the candidate has ended its process {deaths} times" if deaths == _MOST_DEATHS else ""


class _Lane:
    """Jobs that are done one after the other.

    Attributes:
        pending: those that are left.
        child: does them.
    """

    def __init__(
        self,
        work: Work,
        jobs: Sequence[Job],
        limits: Limits,
        start: Callable[[Sequence[Job]], Start],
        told: set[str],
    ) -> None:
        self.pending = list(jobs)
        self.child: Child | None = None
        self._work, self._limits, self._start = work, limits, start
        self._deaths, self._told = 0, told

    def start(self) -> None:
        """Starts a child where there is none, and something to do."""
        if self.child is None and self.pending:
            self.child = Child(self._start(self.pending), self._limits)

    def look(self) -> dict[Job, Result]:
        """Returns what has come of jobs since the last time."""
        if self.child is None:
            return {}
        found = {self.pending.pop(0): result for result in self.child.look()}
        self._deaths += sum(result.has_ended for result in found.values())
        if self.child.is_over:
            self.child.end(self._told)
            if self.pending and not self.child.is_done:  # else it has said which job was its last
                job = self.pending.pop(0)
                found[job] = self.child.death(job, self._work)
                self._deaths += 1
            if any(result.fatal for result in found.values()) or _too_many(self._deaths):
                self.pending.clear()  # nobody will ask for them
            self.child = None
        return found

    def end(self) -> None:
        if self.child is not None:
            self.child.end(self._told)


def try_out(function: Callable[[], Any], limits: Limits) -> str:
    """Calls a function in a process of its own, and returns how it ended that one; "" if it did not.

    An exception that it raises is ignored: it is raised again, here.
    """
    if not has_supervision():
        return ""

    def run(send: Send, calls: mmap.mmap, oracle: OracleProcess | None) -> None:
        count(calls)
        with contextlib.suppress(Exception):
            function()
        count(calls)

    child = Child(_fork(run), limits)
    try:
        while not child.is_over:
            wait_for_any([child])
            child.look()
    except Unfit:
        return ""
    finally:
        child.end()
    return "" if child.is_done else child.how_it_ended()
