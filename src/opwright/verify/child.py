"""A process of the checks, seen from its parent: what it sends, what it takes, how it ends.

The child announces each check and each case before it runs, as lines of JSON on a pipe, and sends what came
of the check. Its parent counts its calls, its memory and what it prints, and kills it when it passes a limit.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import selectors
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opwright.isolation import describe_exit, free_memory
from opwright.records import Check, Failure, builtins_of
from opwright.typed_json import decode
from opwright.verify.finding import Finding
from opwright.verify.oracle_process import OracleProcess
from opwright.verify.processes import Process, end_children, end_stragglers, keep, settle_in
from opwright.verify.worker import LOADING, NOT_LOADED, Job, Result, Work, failure_of

_TICK_SECONDS = 0.05
_KEPT_OUTPUT = 64 * 1024
_PATIENCE = 10  # with the oracle: it computes a case a dozen times, in float64


Send = Callable[[dict[str, Any]], None]
# Starts a process; takes the descriptors of its events, of its output and of the counter of calls.
Start = Callable[[int, int, int], Process]
_COUNTER_BYTES = 8


@dataclass(frozen=True)
class Limits:
    """What a process of the checks may take.

    Attributes:
        timeout_s: seconds for one call of the candidate.
        memory_bytes: more than it had at its start; by default half of what the machine has to spare, or a third
            of it for each of two.
        processes: how many may run side by side.
        output_bytes: printed by all cases of all checks together.
    """

    timeout_s: float = 120.0
    memory_bytes: int | None = None
    processes: int = 1
    output_bytes: int = 16 * 2**20


class Unfit(Exception):
    """A process of its own cannot run the checks; the text is the reason."""


class Child:
    """One process of the checks, seen from its parent.

    Attributes:
        case: what the candidate was given last.
        is_done: whether it has done all that it had to.
        is_over: whether nothing more will come.
    """

    def __init__(self, start: Start, limits: Limits) -> None:
        self.limits = limits
        self.is_done = self.is_over = False
        self._spare = free_memory()
        self._memory = limits.memory_bytes or self._spare // (1 + limits.processes)
        counter = os.memfd_create("opwright-calls")  # shared: counts each time that the candidate is entered or left
        os.ftruncate(counter, _COUNTER_BYTES)
        self._calls = mmap.mmap(counter, _COUNTER_BYTES)
        self._events, events = os.pipe()
        self._output, output = os.pipe()
        self._pipe = os.fstat(output).st_ino
        self._kept, self._printed, self._prints = b"", 0, True
        self.case, self._unread = "", b""
        self._started = time.perf_counter()
        self._why_killed = ""
        self._seen, self._moved = b"", time.monotonic()
        try:
            self._process = start(events, output, counter)
        finally:
            os.close(counter)
            os.close(events)
            os.close(output)
        for descriptor in (self._events, self._output):
            os.set_blocking(descriptor, False)
        self._first_bytes, self._is_settled = self._process.resident_bytes(), not self._process.settles
        self._stragglers = ""

    def look(self) -> list[Result]:
        """Returns what it has sent, and notes whether it is over: done, dead or beyond a limit.

        Raises:
            Unfit: it cannot run the checks.
        """
        self._prints = self._prints and self._read_output()
        status = self._process.ended()  # before the last look at what it has sent
        found: list[Result] = []
        for event in self._read_events():
            self._moved = time.monotonic()
            if "done" in event:
                self.is_done = True
            elif "unfit" in event:
                raise Unfit(event["unfit"])
            elif "settled" in event:
                self._first_bytes, self._is_settled = self._process.resident_bytes(), True
            elif "raised" in event:
                self._why_killed = f"raised {event['raised']}"
            else:
                found += self._take(event)
        if status is None and not (self.is_done or self._why_killed):
            self._why_killed = self._excess()
        self.is_over = self.is_done or status is not None or bool(self._why_killed)
        return found

    def _take(self, event: dict[str, Any]) -> list[Result]:
        if "case" in event:
            self.case = event["case"]
        elif "start" in event:
            self.case, self._started = "", time.perf_counter()
        else:
            failures = [Failure(**failure) for failure in event["failures"]]
            check = decode(Check, event["check"], "check")
            return [Result(check, failures, event["fatal"], event["backend"], event["has_ended"])]
        return []

    def descriptors(self) -> list[int]:
        """Returns what can be read when it has something to say."""
        return [self._events, self._output] if self._prints else [self._events]

    @property
    def _is_inside(self) -> bool:
        """Whether the candidate runs."""
        return self._calls[0] % 2 == 1

    def _excess(self) -> str:
        """Returns which limit it has passed; "" for none."""
        if self._printed > self.limits.output_bytes:
            return f"printed more than {self.limits.output_bytes / 2**20:g} MiB"
        # What PyTorch and CUDA take until it is settled is not the candidate's.
        most = self._memory if self._is_settled else max(self._memory, self._spare // 2)
        if self._process.resident_bytes() - self._first_bytes > most:
            return f"took more than {most / 2**30:.3g} GiB of memory"
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

    def end(self, told: set[str] | None = None) -> None:
        """Ends it, whatever it does, and shows what it has printed.

        Args:
            told: how other children have crashed: Python's report of each way to crash is shown once.
        """
        was_alive = self._process.ended() is None
        self._process.kill()
        if not was_alive or self._why_killed:
            self._stragglers = end_stragglers(self._process.pid, self._pipe)
        self._read_output()
        self._process.let_go()
        os.close(self._events)
        os.close(self._output)
        self._show_output(set() if told is None else told)

    def _show_output(self, told: set[str]) -> None:
        text, fatal, report = self._kept.decode(errors="replace").partition("Fatal Python error: ")
        if fatal and (how := report.partition("\n")[0]) not in told:
            told.add(how)
            text += fatal + report
        if self._printed > len(self._kept):
            text += f"\n... {self._printed - len(self._kept)} more bytes\n"
        if text:
            sys.stderr.write(text)
            sys.stderr.flush()

    def how_it_ended(self) -> str:
        """Returns what has ended it, and what it has left, in words."""
        text = self._why_killed or describe_exit(self._process.ended() or 0)
        if not self._why_killed and not self._is_inside:
            text += ", after the call had returned"
        return f"{text}; {self._stragglers}" if self._stragglers else text

    def death(self, job: Job, work: Work) -> Result:
        """Returns the finding of the check at which it has ended."""
        finding = Finding(self.case or "before the first case", self.how_it_ended())
        check = Check(
            job.name,
            "failed",
            cases=1,
            seconds=time.perf_counter() - self._started,
            device=str(job.device),
        )
        fatal = NOT_LOADED if self.case == LOADING else ""
        return Result(check, [failure_of(job, [finding], work.repeat)], fatal, has_ended=True)


def wait_for_any(children: Sequence[Child]) -> None:
    """Waits until one has something to say, but no longer than until it is time to look after them."""
    with selectors.DefaultSelector() as selector:
        for descriptor in (d for child in children for d in child.descriptors()):
            selector.register(descriptor, selectors.EVENT_READ)
        selector.select(_TICK_SECONDS)


# --- in the child ----------------------------------------------------------------------------------------


def serve(
    run: Callable[[Send, mmap.mmap, OracleProcess | None], None],
    events: int,
    output: int,
    counter: int,
    is_fork: bool = True,
    start_oracle: Callable[[], OracleProcess] | None = None,
) -> None:
    """Calls a function, and ends the process.

    Args:
        run: takes a function that sends events to the parent, the counter of calls, and the oracle.
        start_oracle: starts the process of the oracle, a fork: before this one has threads.
    """
    owner = os.getpid()
    calls = mmap.mmap(counter, _COUNTER_BYTES)
    for descriptor in (events, output, counter):
        os.set_inheritable(descriptor, False)  # what the candidate starts has no business with them

    def send(event: dict[str, Any], write: Callable = os.write, dumps: Callable = json.dumps) -> None:
        if os.getpid() != owner:  # a fork of the candidate's, that has come back
            os._exit(0)
        data = dumps(event).encode() + b"\n"
        while data:
            data = data[write(events, data) :]

    try:
        settle_in(output, is_fork)
        oracle = start_oracle() if start_oracle is not None else None
        if oracle is not None:
            keep(oracle.pid)
        if reason := _unfit():
            send({"unfit": reason})
        else:
            run(send, calls, oracle)
            if oracle is not None:
                oracle.close()
            send({"done": True})
    except Unfit as reason:
        send({"unfit": str(reason)})
    except BaseException as error:  # KeyboardInterrupt is a candidate's to raise
        send({"raised": f"{type(error).__name__}: {error}"[:300]})
    finally:
        os._exit(0)


def count(calls: mmap.mmap) -> None:
    calls[:] = (int.from_bytes(calls[:], "little") + 1).to_bytes(8, "little")


class _Over(Exception):
    """This process can do no more; another one can do what is left."""


def do_work(work: Work, jobs: Sequence[Job], send: Send, calls: mmap.mmap, oracle: OracleProcess | None = None) -> None:
    """Runs jobs and sends what they do and what comes of them."""

    def emit(result: Result) -> None:
        event = {
            "check": builtins_of(result.check),
            "failures": [builtins_of(failure) for failure in result.failures],
            "fatal": "" if result.has_ended else result.fatal,
            "backend": result.backend,
            "has_ended": result.has_ended,
        }
        send(event)
        if result.has_ended:
            raise _Over

    def is_inside(now: bool) -> None:
        if calls[0] % 2 != now:  # in several threads at once the first and the last count
            count(calls)

    with contextlib.suppress(_Over):
        work.run(
            jobs,
            emit,
            on_start=lambda job: send({"start": job.name}),
            on_case=lambda case: send({"case": case}),
            is_inside=is_inside,
            left_behind=end_children,
            oracle=oracle,
        )


def _unfit() -> str:
    """Returns why this process cannot run the checks, "" if it can."""
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError as error:  # the parent's autograd has threads, as it has for a GPU
        return str(error).splitlines()[0]
    return ""
