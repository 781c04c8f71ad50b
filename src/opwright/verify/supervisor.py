"""Runs the checks in a process of their own, so that one that crashes, hangs or exits is a finding.

The process is a fork, so it has the candidate as it lives here: a closure, a compiled function. Thread pools
of OpenMP and MKL do not survive a fork, but only the thread that has used one knows of it: the fork is made
from a fresh thread, and the first parallel loop in the child makes a new pool.

The child announces each check and each case before it runs, as lines of JSON on a pipe, and sends what came
of the check. When it dies, or has to be killed, that is the finding of the check it was at, and another child
goes on with the next one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opwright.records import Check, Failure, builtins_of
from opwright.typed_json import decode
from opwright.verify.devices import CPU
from opwright.verify.finding import Finding
from opwright.verify.processes import Fork, end_children, end_stragglers, settle_in
from opwright.verify.worker import LOADING, NOT_LOADED, Job, Result, Work, failure_of, skipped

_TICK_SECONDS = 0.05
_MOST_DEATHS = 4  # each may have cost the whole timeout
_KEPT_OUTPUT = 64 * 1024
_PATIENCE = 10  # with the oracle, beside the candidate: it computes a case a dozen times, in float64


_Send = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Limits:
    """What the process of the checks may take.

    Attributes:
        timeout_s: seconds for one call of the candidate.
        memory_bytes: more than it had at its start; by default half of what the machine has to spare.
        output_bytes: printed by all cases of all checks together.
    """

    timeout_s: float = 120.0
    memory_bytes: int | None = None
    output_bytes: int = 16 * 2**20


class Unfit(Exception):
    """A fork of this process cannot run the checks; the text is the reason."""


def cannot_fork(device: torch.device) -> str:
    """Returns why the checks for a device have to run in this process; "" when they need not."""
    if sys.platform != "linux":
        return f"on {sys.platform} a fork of a process with threads is not safe"
    if device.type != "cpu":
        return "a fork cannot use a GPU"
    return ""


def supervise(work: Work, jobs: Sequence[Job], limits: Limits) -> Iterator[Result]:
    """Yields the result of each job, in order.

    Raises:
        Unfit: a fork cannot run them. What was yielded before stands.
    """
    pending, deaths, given_up = list(jobs), 0, ""
    while pending:
        if given_up:
            yield skipped(pending.pop(0), given_up)
            continue
        child = _Child(functools.partial(_work, work, pending), limits)
        try:
            for result in child.results():
                pending.pop(0)
                yield result
        finally:
            child.end()
        if pending:
            deaths += 1
            if child.case == LOADING:
                given_up = NOT_LOADED
            elif deaths == _MOST_DEATHS:
                given_up = f"the candidate has ended its process {deaths} times"
            yield child.death(pending.pop(0), work)


def try_out(function: Callable[[], Any], limits: Limits) -> str:
    """Calls a function in a process of its own, and returns how it ended that one; "" if it did not.

    What it raises is no trouble: it will do so again, here.
    """
    if cannot_fork(CPU):
        return ""

    def run(send: _Send, calls: mmap.mmap) -> None:
        _count(calls)
        with contextlib.suppress(Exception):
            function()
        _count(calls)

    child = _Child(run, limits)
    try:
        list(child.results())
    except Unfit:
        return ""
    finally:
        child.end()
    return "" if child.is_done else child.how_it_ended()


class _Child:
    """One process of the checks, seen from its parent.

    Attributes:
        case: what the candidate was given last.
        is_done: whether it has done all that it had to.
    """

    def __init__(self, run: Callable[[_Send, mmap.mmap], None], limits: Limits) -> None:
        self.limits = limits
        self.is_done = False
        self._memory = limits.memory_bytes or _spare_memory() // 2
        self._calls = mmap.mmap(-1, 8)  # shared: counts each time that the candidate is entered or left
        self._events, events = os.pipe()
        self._output, output = os.pipe()
        self._pipe = os.fstat(output).st_ino
        self._kept, self._printed = b"", 0
        self.case, self._unread = "", b""
        self._started = time.perf_counter()
        self._why_killed = ""
        self._seen, self._moved = b"", time.monotonic()
        try:
            self._fork = Fork(lambda: _main(run, events, output, self._calls))
        finally:
            os.close(events)
            os.close(output)
        self._first_bytes = self._fork.resident_bytes()
        self._stragglers = ""

    def results(self) -> Iterator[Result]:
        """Yields what it sends, until it is done or dead."""
        with selectors.DefaultSelector() as selector:
            for descriptor in (self._events, self._output):
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(_TICK_SECONDS):
                    if key.fd == self._output and not self._read_output():
                        selector.unregister(self._output)
                status = self._fork.ended()  # before the last look at what it has sent
                for event in self._read_events():
                    self._moved = time.monotonic()
                    if "done" in event:
                        self.is_done = True
                        return
                    if "unfit" in event:
                        raise Unfit(event["unfit"])
                    if "raised" in event:
                        self._why_killed = f"raised {event['raised']}"
                        return
                    yield from self._take(event)
                if status is not None:
                    return
                self._why_killed = self._excess()
                if self._why_killed:
                    return

    def _take(self, event: dict[str, Any]) -> Iterator[Result]:
        if "case" in event:
            self.case = event["case"]
        elif "start" in event:
            self.case, self._started = "", time.perf_counter()
        else:
            failures = [Failure(**failure) for failure in event["failures"]]
            yield Result(decode(Check, event["check"], "check"), failures, event["fatal"], event["backend"])

    @property
    def _is_inside(self) -> bool:
        """Whether the candidate runs."""
        return self._calls[0] % 2 == 1

    def _excess(self) -> str:
        """Returns which limit it has passed; "" for none."""
        if self._printed > self.limits.output_bytes:
            return f"printed more than {self.limits.output_bytes / 2**20:g} MiB"
        if self._fork.resident_bytes() - self._first_bytes > self._memory:
            return f"took more than {self._memory / 2**30:.3g} GiB of memory"
        calls = self._calls[:]
        if calls != self._seen:
            self._seen, self._moved = calls, time.monotonic()
        seconds = self.limits.timeout_s * (1 if self._is_inside else _PATIENCE)
        if time.monotonic() - self._moved < seconds:
            return ""
        if self._is_inside:
            return f"did not return within {seconds:g} s"
        return f"came to no other call within {seconds:g} s"

    def _read_output(self) -> bool:
        """Takes what it has printed; False at the end."""
        try:
            while data := os.read(self._output, 1 << 20):
                self._printed += len(data)
                self._kept += data[: max(_KEPT_OUTPUT - len(self._kept), 0)]
                if self._printed > self.limits.output_bytes:
                    return True
            return False
        except BlockingIOError:
            return True

    def _read_events(self) -> list[dict[str, Any]]:
        try:
            while data := os.read(self._events, 1 << 20):
                self._unread += data
        except BlockingIOError:
            pass
        *lines, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """Ends it, whatever it does, and shows what it has printed."""
        was_alive = self._fork.ended() is None
        self._fork.kill()
        if not was_alive or self._why_killed:
            self._stragglers = end_stragglers(self._fork.pid, self._pipe)
        self._read_output()
        self._fork.let_go()
        os.close(self._events)
        os.close(self._output)
        self._show_output()

    def _show_output(self) -> None:
        text = self._kept.decode(errors="replace")
        if self._printed > len(self._kept):
            text += f"\n... {self._printed - len(self._kept)} more bytes\n"
        if text:
            sys.stderr.write(text)
            sys.stderr.flush()

    def how_it_ended(self) -> str:
        """Returns what has ended it, and what it has left, in words."""
        text = self._why_killed or _describe(self._fork.ended() or 0)
        if not self._why_killed and not self._is_inside:
            text += ", after the call had returned"
        return f"{text}; {self._stragglers}" if self._stragglers else text

    def death(self, job: Job, work: Work) -> Result:
        """Returns the finding of the check at which it has ended."""
        text = "; ".join((self.how_it_ended(), *work.files.take()))
        finding = Finding(self.case or "before the first case", text)
        check = Check(
            job.name,
            "failed",
            cases=1,
            seconds=time.perf_counter() - self._started,
            device=str(job.device),
        )
        return Result(check, [failure_of(job, [finding], work.repeat)])


def _describe(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        why = "; the kernel does that when memory runs out" if number == signal.SIGKILL else ""
        return f"crashed the process: {name} ({signal.strsignal(number)}){why}"
    return f"ended the process, with exit code {os.WEXITSTATUS(status)}"


def _spare_memory() -> int:
    """Returns how many bytes could be had: of the machine, or of the control group if that is less."""
    spare = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as f:
            spare = next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
        with open("/sys/fs/cgroup/memory.max") as f, open("/sys/fs/cgroup/memory.current") as used:
            spare = min(spare, max(int(f.read()) - int(used.read()), 0))
    except (OSError, ValueError, StopIteration):  # no limit is "max"
        pass
    return max(spare, 2**30)


# --- in the child ----------------------------------------------------------------------------------------


def _main(run: Callable[..., None], events: int, output: int, calls: mmap.mmap) -> None:
    """Calls `run` with a function that sends events to the parent, and ends the process."""
    owner = os.getpid()

    def send(event: dict[str, Any], write: Callable = os.write, dumps: Callable = json.dumps) -> None:
        if os.getpid() != owner:  # a fork of the candidate's, that has come back
            os._exit(0)
        data = dumps(event).encode() + b"\n"
        while data:
            data = data[write(events, data) :]

    try:
        settle_in(output)
        if reason := _unfit():
            send({"unfit": reason})
        else:
            run(send, calls)
            send({"done": True})
    except BaseException as error:  # KeyboardInterrupt is a candidate's to raise
        send({"raised": f"{type(error).__name__}: {error}"[:300]})
    finally:
        os._exit(0)


def _count(calls: mmap.mmap) -> None:
    calls[:] = (int.from_bytes(calls[:], "little") + 1).to_bytes(8, "little")


def _work(work: Work, jobs: Sequence[Job], send: _Send, calls: mmap.mmap) -> None:
    """Runs jobs and sends what they do and what comes of them."""

    def emit(result: Result) -> None:
        failures = [builtins_of(failure) for failure in result.failures]
        check = builtins_of(result.check)
        send({"check": check, "failures": failures, "fatal": result.fatal, "backend": result.backend})

    def is_inside(now: bool) -> None:
        if calls[0] % 2 != now:  # in several threads at once the first and the last count
            _count(calls)

    work.run(
        jobs,
        emit,
        on_start=lambda job: send({"start": job.name}),
        on_case=lambda case: send({"case": case}),
        is_inside=is_inside,
        left_behind=end_children,
        is_own=True,
    )


def _unfit() -> str:
    """Returns why this fork cannot run the checks, "" if it can."""
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError as error:  # the parent's autograd has threads, as it has for a GPU
        return str(error).splitlines()[0]
    return ""
