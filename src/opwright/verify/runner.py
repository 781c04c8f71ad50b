"""Runs the checks: in worker processes where that can be, so that one that crashes, hangs or exits is a finding.

For a CPU each worker is a fork, so it has the candidate as it lives here: a closure, a compiled function. CUDA does not
survive a fork: for a GPU the process starts anew, and the candidate has to be one that can be imported again.

When a worker dies, or has to be killed, that is the finding of the check it was at, and another one goes on with the
next. The groups that jobs fall into have workers of their own, some at a time, and their results come in the order of
the jobs, as if one worker had done them all: after a death too many, or a fault after which no call is safe, nothing
counts that another one has found meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from opwright import _torch
from opwright.backends.exports import may_export
from opwright.contract.sweep import Case, without_names
from opwright.dispatch import kernels
from opwright.errors import BuildError, CheckError, plural
from opwright.isolation import (
    Channel,
    Limits,
    Running,
    Start,
    Unfit,
    Worker,
    WorkerEnded,
    fork,
    free_memory,
    serve,
    spawn,
    wait_for_any,
)
from opwright.records import CaseError, Check, Failure, Undecided, builtins_of
from opwright.typed_json import decode
from opwright.verify.checks import CALLING, CHECKS, TRACING, group_of, place_of
from opwright.verify.checks.finding import Finding, Skipped, first_line, origin
from opwright.verify.child_processes import end_children
from opwright.verify.compare import collect_undecided
from opwright.verify.devices import DeviceLost, is_gpu, is_lost
from opwright.verify.global_state import Guard, in_threads
from opwright.verify.inputs.budget import Pace
from opwright.verify.oracle_process import OracleProcess
from opwright.verify.request import Request, pack, unpack
from opwright.verify.shrink import shrink, tell_numbers
from opwright.verify.target import Target

_RANDOM_CHECKS = ("refusals", "copy", "outputs written")
_LOADING, _NOT_LOADED = "while it was loaded", "the candidate cannot be loaded"
BUILDING = "while its kernels were built"
_MAX_MESSAGE = 600  # characters
_ENOUGH_FAILED, _FAILING_SECONDS = 8, 5.0  # cases of one check, after which it stops
_MAX_DEATHS = 4  # each may have cost the whole timeout
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Job:
    """One check of one target on one device.

    Attributes:
        prefix: what the target is called in front of the name of the check: "" or "backward: ".
        check: its name.
    """

    prefix: str
    check: str
    device: torch.device

    @property
    def name(self) -> str:
        return self.prefix + self.check


@dataclass
class Result:
    """What came of a job.

    Attributes:
        fatal: why no further call is safe on that device, if one is not.
        backend: what ran: "cpu", "cuda", "reference", "callable".
        has_ended: whether it has ended the process that it ran in.
    """

    check: Check
    failures: list[Failure] = field(default_factory=list)
    fatal: str = ""
    backend: str = ""
    has_ended: bool = False


@dataclass(frozen=True)
class Work:
    """What the checks of a candidate are about.

    Attributes:
        request: makes what is checked, in the process where the candidate runs.
        only: run only cases whose description contains this text.
        is_of_reference: whether the reference is the candidate.
    """

    request: Request
    only: str = ""
    is_of_reference: bool = False


# --- in the process of the caller ---------------------------------------------------------------------------------


def can_fork(device: torch.device) -> bool:
    """Returns whether a fork can run the checks for a device: it cannot use the GPU of its parent."""
    return not is_gpu(device)


def run_apart(work: Work, jobs: Sequence[Job], limits: Limits, processes: int) -> Iterator[Result]:
    """Yields the result of each job, in order; all are for one device.

    Args:
        processes: how many workers may run side by side.

    Raises:
        Unfit: no process of its own can run them. What was yielded before stands.
    """
    if sys.platform != "linux":
        raise Unfit(f"processes are supervised on Linux only, not on {sys.platform}")
    is_fork = can_fork(jobs[0].device)
    processes = processes if is_fork else 1  # each would need a context of its own on the GPU
    if is_fork:
        _refuse_crash(work.request, limits)
        work.request.make_cases()
    limits = replace(limits, memory_bytes=limits.memory_bytes or free_memory() // (1 + processes))
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(group_of(job.prefix, job.check) if processes > 1 else "", []).append(job)
    told: set[str] = set()
    start = functools.partial(_start_fork, min(processes, len(groups))) if is_fork else start_anew
    lanes = {name: _Lane(work, groups[name], limits, start, told) for name in sorted(groups, key=place_of)}
    running = [lane for name, lane in lanes.items() if name not in TRACING][:processes]
    waiting = [lane for lane in lanes.values() if lane not in running]
    results: dict[Job, Result] = {}
    deaths, given_up = 0, ""
    try:
        for lane in running:
            lane.start()
        if running and not TRACING.isdisjoint(lanes):  # while they work
            _torch.import_dynamo()
            _torch.import_optests()
        for job in jobs:
            while not given_up and job not in results:
                while waiting and len(running) < processes:
                    running.append(waiting.pop(0))
                for lane in running:
                    lane.start()
                wait_for_any([lane.worker for lane in running if lane.worker is not None])
                for lane in running:
                    results |= lane.look()
                running = [lane for lane in running if lane.pending or lane.worker is not None]
            if given_up:
                yield skip(job, given_up)
                continue
            result = results.pop(job)
            deaths += result.has_ended
            given_up = result.fatal or (_tell_deaths(deaths) if result.has_ended else "")
            yield result
    finally:
        for lane in running:
            if lane.worker is not None:
                lane.worker.close()


def _refuse_crash(request: Request, limits: Limits) -> None:
    """Raises CheckError where the reference crashes on integers without a domain."""
    target = request.made().get("")
    unbounded = target.unbounded_integers() if target is not None else []
    how = try_out(request.make_cases, limits.timeout_s) if unbounded else ""
    if how.startswith("crashed"):
        name = target.operator.declaration.name
        raise CheckError(
            name,
            f"its reference {how}",
            rows=[("no domain", ", ".join(f"`{p.name}`" for p in unbounded))],
            hint=f"declare a domain, or `@{name}.samples`; or let the reference raise an error for what it cannot take",
        )


def _start_fork(processes: int, work: Work, jobs: Sequence[Job]) -> Start:
    def run(channel: Channel) -> None:
        _settle_in()
        # Workers share the cores: where one waits for a thread that another keeps from running, all take twice as long.
        # So the oracle and the checks of calls have few; calls of the candidate have all.
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, threads // processes))
        if torch.version.cuda is not None:  # it cannot use the GPU of its parent, so it sees none
            torch.cuda.is_available = lambda: False
            torch.cuda.device_count = lambda: 0
        channel.running("", _LOADING)
        shared = work.request.prepare()
        _work(work, jobs, channel, OracleProcess(work.request.references, shared), threads)

    return fork(run)


def start_anew(work: Work, jobs: Sequence[Job]) -> Start:
    """Returns what starts a process that makes the candidate again, and runs jobs.

    Raises:
        Unfit: it could not.
    """
    request = pack(work, list(jobs))
    program = f"import sys; sys.path[:] = {sys.path!r}\nfrom opwright.verify.runner import run_request; run_request()"

    def start(*descriptors: int) -> Any:
        with open(os.memfd_create("opwright-request"), "w+b") as file:
            file.write(request)
            file.seek(0)
            return spawn("-c", program, files=[file.fileno()])(*descriptors)

    return start


def _tell_deaths(deaths: int) -> str:
    return f"the candidate has ended its process {deaths} times" if deaths == _MAX_DEATHS else ""


@dataclass(eq=False)
class _Lane:
    """Jobs that are done one after the other.

    Attributes:
        pending: those that are left.
        worker: does them.
    """

    _work: Work
    pending: list[Job]
    _limits: Limits
    _start: Callable[[Work, Sequence[Job]], Start]
    _told: set[str]
    worker: Worker | None = None
    _deaths: int = 0
    _started: float = 0.0
    _unshrunk: Result | None = None  # of the job that runs, while its failing case is made smaller

    def start(self) -> None:
        """Starts a worker where there is none, and something to do."""
        if self.worker is None and self.pending:
            self.worker = self._start_worker(self._work, self.pending)
            self._started = time.perf_counter()

    def _start_worker(self, work: Work, jobs: Sequence[Job]) -> Worker:
        return Worker(self._start(work, jobs), self._limits, is_live=False, told=self._told)

    def look(self) -> dict[Job, Result]:
        if self.worker is None:
            return {}
        found: dict[Job, Result] = {}
        for event in self.worker.look():
            if "start" in event:
                self._started = time.perf_counter()
            elif "unshrunk" in event:
                self._unshrunk = decode(Result, event["unshrunk"], "result")
            elif "result" in event:
                result = decode(Result, event["result"], "result")
                found[self.pending.pop(0)] = result
                self._deaths += result.has_ended
                self._unshrunk = None
        if self.worker.is_over:
            self.worker.close()
            if self.pending and not self.worker.is_done:  # else it has said which job was its last
                job = self.pending.pop(0)
                found[job] = self._unshrunk or self._tell_death(job)
                self._unshrunk = None
                self._deaths += found[job].has_ended
            if any(result.fatal for result in found.values()) or _tell_deaths(self._deaths):
                self.pending.clear()  # nobody will ask for them
            self.worker = None
        return found

    def _tell_death(self, job: Job) -> Result:
        case = self.worker.running.what if self.worker.running != Running() else ""
        how = self.worker.tell_end()
        if how.startswith("crashed") and case and (reason := self._tell_crash_of_reference(job, case)):
            return skip(job, reason)
        finding = Finding(case or "before the first case", how)
        seconds = time.perf_counter() - self._started
        check = Check(job.name, "failed", cases=1, seconds=seconds, device=str(job.device))
        fatal = _NOT_LOADED if case == _LOADING else ""
        return Result(check, [_failure_of(job, [finding], self._work.request.command)], fatal, has_ended=True)

    def _tell_crash_of_reference(self, job: Job, case: str) -> str:
        """Returns how the reference alone crashes a process on this case; "" if it does not.

        PyTorch's own backward may crash: that of group_norm, where the bias alone needs a gradient.
        """
        if CHECKS[job.check].group != "gradients":  # other checks do not call the candidate through its target alone
            return ""
        worker = self._start_worker(replace(self._work, is_of_reference=True), [job])
        was_there = False
        try:
            for _ in worker.events():
                is_there = worker.running.what == case
                if was_there and not is_there:
                    break  # it has survived
                was_there = is_there
        except WorkerEnded as ended:
            if ended.running.what == case and ended.how.startswith("crashed"):
                return f"the reference alone {ended.how.partition(', ')[0]}, on {case}"
        except Unfit:
            pass
        finally:
            worker.close()
        return ""


def try_out(function: Callable[[], Any], timeout_s: float) -> str:
    """Calls a function in a process of its own, and returns how it ended that one; "" if it did not.

    An exception that it raises is ignored: it is raised again, here.
    """
    if sys.platform != "linux":
        return ""

    def run(channel: Channel) -> None:
        _settle_in()
        faulthandler.enable(file=2, all_threads=False)
        channel.mark_inside(True)
        with contextlib.suppress(Exception):
            function()
        channel.mark_inside(False)

    try:
        for _ in Worker(fork(run), Limits(timeout_s), is_live=False).events():
            pass
    except WorkerEnded as ended:
        return ended.how
    except Unfit:
        pass
    return ""


# --- in the worker ------------------------------------------------------------------------------------------------


def run_request() -> None:
    """Runs the jobs of a request, in a process that was started anew for them."""
    with open(int(sys.argv[3]), "rb") as file:
        request = file.read()

    def run(channel: Channel) -> None:
        _settle_in()
        # Before this process imports the candidate, and before it has threads.
        oracle = OracleProcess(lambda device: unpack(request)[0].request.references(device))
        work, jobs = unpack(request)
        try:
            for device in dict.fromkeys(job.device for job in jobs):
                torch.zeros(1, device=device)  # CUDA starts here, and not in the first call
        except RuntimeError as error:
            raise Unfit(f"another process cannot use the device: {first_line(error)}") from None
        channel.send(ready=True)
        _work(work, jobs, channel, oracle)

    serve(run)


def _settle_in() -> None:
    """Prepares a worker: what it leaves running is found, its random numbers are its own."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of what the candidate forks become its children
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    gc.freeze()  # the parent's objects are not looked at again, so their pages stay shared
    torch.default_generator.manual_seed(0x6F7077)  # any; the caller's seed is its own
    # Pools of workers of the parent's torch.compile are not here, and new ones would be left behind.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    _torch.compile_in_this_thread()


class _Over(Exception):
    """This process can do no more; another one can do what is left."""


def _work(work: Work, jobs: Sequence[Job], channel: Channel, oracle: OracleProcess, threads: int | None = None) -> None:
    def emit(result: Result) -> None:
        channel.send(result=builtins_of(replace(result, fatal="" if result.has_ended else result.fatal)))
        if result.has_ended:
            raise _Over

    if reason := _tell_unfit():
        raise Unfit(reason)
    if work.request.operator is None:  # the Python stack says nothing of a kernel
        faulthandler.enable(file=2, all_threads=False)
    with contextlib.suppress(_Over):
        _Here(work, channel, oracle, threads).run(jobs, emit)
    oracle.close()


def _tell_unfit() -> str:
    """Returns why this process cannot run the checks, "" if it can."""
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError as error:  # the parent's autograd has threads, as it has for a GPU
        return str(error).splitlines()[0]
    return ""


def run_here(work: Work, jobs: Iterable[Job], emit: Callable[[Result], None]) -> None:
    """Runs jobs in this process."""
    _Here(work).run(jobs, emit)


class _Here:
    """The checks of a candidate in this process.

    Args:
        channel: of a worker, which says what it does; None: nobody is told.
        oracle: says what results must be, and is the one process that checks may leave running; None: this process
            does, and they may leave any.
        threads: how many threads PyTorch has in calls of the candidate; None: as many as around them.
    """

    def __init__(
        self,
        work: Work,
        channel: Channel | None = None,
        oracle: OracleProcess | None = None,
        threads: int | None = None,
    ) -> None:
        self._work, self._channel, self._oracle, self._threads = work, channel, oracle, threads
        self._guard = Guard(channel.mark_inside) if channel is not None else Guard()
        self._targets: dict[torch.device, dict[str, Target]] = {}

    def _tell(self, **event: Any) -> None:
        if self._channel is not None:
            self._channel.send(**event)

    def _on_case(self, case: str) -> None:
        if self._channel is not None:
            self._channel.running("", case)

    def run(self, jobs: Iterable[Job], emit: Callable[[Result], None]) -> None:
        """Runs jobs; `emit` is called after each."""
        unsafe: dict[str, str] = {}  # why nothing more is called, by type of device
        for job in jobs:
            reason = unsafe.get("cpu") or unsafe.get(job.device.type)  # a damaged heap is everybody's
            if reason:
                emit(skip(job, reason))
                continue
            self._tell(start=job.name, running=["", ""])
            try:
                target = self._load(job.device)[job.prefix]
            except (Exception, SystemExit, DeviceLost) as error:
                result = self._tell_not_loaded(job, error)
            else:
                result = self._run_one(job, target)
            if result.fatal:
                unsafe[job.device.type] = result.fatal
            emit(result)

    def _load(self, device: torch.device) -> dict[str, Target]:
        if device not in self._targets:
            self._on_case(_LOADING)
            targets = self._work.request.targets(device, self._guard)
            for target in targets.values():
                if self._work.is_of_reference:
                    target.call = target.reference
                target.threads.count = self._threads
                target.call = self._guard.wrap(target.call, target.threads)
                if target.call_with_out is not None:
                    target.call_with_out = self._guard.wrap(target.call_with_out, target.threads)
                target.wait = self._guard.wrap_wait(target.wait)
                target.oracle = self._oracle or target.oracle
                target.on_case = self._on_case
                # Several checks ask for the same gradients; of many large inputs that would be too much to keep.
                target.memo = {} if target.effort != "full" else None
            self._on_case("")
            self._targets[device] = targets
        return self._targets[device]

    def _tell_not_loaded(self, job: Job, error: BaseException) -> Result:
        text = "; ".join([f"raised {type(error).__name__}: {error}", *self._guard.take()])[:_MAX_MESSAGE]
        check = Check(job.name, "failed", cases=1, device=str(job.device))
        failure = _failure_of(job, [Finding(_LOADING, text)], self._work.request.command)
        return Result(check, [failure], _NOT_LOADED, "callable")

    def _run_one(self, job: Job, target: Target) -> Result:
        start = time.perf_counter()
        findings: list[Finding] = []
        changes: dict[str, str] = {}  # of the process, and on which case
        target.current = None
        target.pace = Pace() if target.effort != "full" else None

        def note_changes() -> None:
            case = str(target.current) if target.current else "the check itself"
            changes.update((change, case) for change in self._guard.take() if change not in changes)

        reason, failed, has_stopped = "no case applies", 0, False
        smallest: Case | None = None
        try:
            if target.operator is not None and target.operator.declaration.random and job.check not in _RANDOM_CHECKS:
                raise Skipped("it draws random numbers")
            if target.operator is not None:  # an error of the compiler is one finding, and not one on each case
                self._on_case(BUILDING)
                kernels.ensure_loaded(target.operator, job.device.type)
                self._on_case("")
            is_calling = CHECKS[job.check].group in CALLING
            with in_threads(None if is_calling else self._threads), collect_undecided() as differences:
                for finding in CHECKS[job.check](target):
                    note_changes()
                    finding.undecided = "" if finding.message else "; ".join(dict.fromkeys(differences))
                    differences.clear()
                    is_wanted = self._work.only in finding.case or self._work.only in without_names(finding.case)
                    if is_wanted or finding.is_fatal:
                        findings.append(finding)
                        if finding.message and smallest is None:
                            smallest = target.current
                    failed += bool(finding.message)
                    # To be sure of a wrong result takes many calls of the reference, a second for a large case.
                    if has_stopped := failed >= _ENOUGH_FAILED and time.perf_counter() - start > _FAILING_SECONDS:
                        break
        except Skipped as skipped:
            if not any(finding.message for finding in findings):
                reason, findings = str(skipped), []
        except (Exception, SystemExit, DeviceLost) as error:  # a check that breaks down has found something
            findings.append(_tell_broken(error, target))
            smallest = smallest or target.current
        note_changes()
        if self._oracle is not None:
            changes |= dict.fromkeys(end_children({self._oracle.pid}), "after the check")
        bad = [finding for finding in findings if finding.message]
        undecided = [
            Undecided(without_names(f.case), f.undecided[:_MAX_MESSAGE], f.case) for f in findings if f.undecided
        ]
        measured = [f for f in findings if f.worst_ratio is not None]
        worst = max(measured, key=lambda f: f.worst_ratio, default=Finding(""))
        check = Check(
            job.name,
            _outcome(bool(bad or changes), len(findings), len(undecided)),
            cases=len(findings),
            reason=target.pace.tell() if findings and target.pace else "" if findings or changes else reason,
            worst_ulp=worst.worst_ulp,
            worst_ratio=worst.worst_ratio,
            seconds=time.perf_counter() - start,
            device=str(job.device),
            errors=[CaseError(without_names(f.case), f.worst_ulp, f.worst_ratio) for f in measured if not f.undecided],
            undecided=undecided,
        )
        fatal = next((f.is_fatal for f in findings if f.is_fatal), "")
        failures = []
        repeat = self._work.request.command
        if repeat and target.effort != "default":
            repeat += f" --{target.effort}"
        note = target.callables.note if target.callables is not None else ""
        of_state = note and f"; its state is not the reference's, so each has its own: {note}"
        if bad:
            if smallest is not None and str(smallest) == bad[0].case:
                bad[0].numbers = tell_numbers(target, smallest)
            bad[0].message += of_state
            failures.append(_failure_of(job, bad, repeat, has_stopped=has_stopped))
        if changes:
            found = Finding(next(iter(changes.values())), "; ".join(changes)[:_MAX_MESSAGE])
            failures.append(_failure_of(job, [found], repeat))
        result = Result(check, failures, fatal, _backend(target, job.device), any(f.has_ended for f in findings))
        if bad and smallest is not None and not fatal:
            self._tell(unshrunk=builtins_of(result))  # what is done next may end the process
            shrunk = shrink(CHECKS[job.check], target, smallest, bad[0])
            self._guard.take()  # what parts of a case change, the whole has changed
            if shrunk is not None:
                shrunk.message += of_state
                failures[0] = _failure_of(job, bad, repeat, shrunk, has_stopped)
        return result


def skip(job: Job, reason: str) -> Result:
    """Returns the result of a job that is not run."""
    return Result(Check(job.name, "skipped", reason=reason, device=str(job.device)))


def _outcome(has_failed: bool, cases: int, undecided: int) -> str:
    if has_failed:
        return "failed"
    return "skipped" if not cases else "undecided" if undecided == cases else "passed"


def _tell_broken(error: BaseException, target: Target) -> Finding:
    case = str(target.current) if target.current else "the check itself"
    text = f"raised {type(error).__name__}: {error}"
    if isinstance(error, DeviceLost) or is_lost(target.device):
        cause = error if isinstance(error, DeviceLost) else text.removeprefix("raised ")
        message = f"the GPU accepts no more work after this call: {cause}"[:_MAX_MESSAGE]
        return Finding(case, message, is_fatal=f"a fault on {case} has ended all work on the GPU", has_ended=True)
    if isinstance(error, BuildError):
        return Finding(BUILDING, str(error), is_fatal="its kernels cannot be built or loaded")
    return Finding(case, text[:_MAX_MESSAGE] + origin(error, target))


def _failure_of(
    job: Job, bad: Sequence[Finding], repeat: str, shrunk: Finding | None = None, has_stopped: bool = False
) -> Failure:
    """Returns the failure that stands for these findings; `shrunk`: what a part of the first case shows."""
    # Cases come small ones first, so the first is the smallest, but for what a smaller part of it shows.
    first = bad[0]
    case, message, numbers = first.case, first.message, first.numbers
    if shrunk is not None:
        case, message, numbers = f"{shrunk.case}, a part of {first.case}", shrunk.message, shrunk.numbers
    stopped = "; then the check stopped" if has_stopped else ""
    more = f" (and {plural(len(bad) - 1, 'more case')}{stopped})" if len(bad) > 1 else ""
    # One element has no place that would tell more than a large case does.
    telling = [found for found in bad if found.pattern.startswith("only") and first.pattern == "every element"]
    pattern = f"{telling[0].pattern} of {telling[0].case}" if telling else first.pattern
    repeat = "" if case == BUILDING else repeat and f"{repeat} --check {shlex.quote(job.check)} --device {job.device}"
    return Failure(job.name, without_names(case), message + more, pattern, repeat, str(job.device), case, numbers)


def _backend(target: Target, device: torch.device) -> str:
    if target.operator is None:
        return "callable"
    declaration, name = target.operator.declaration, device.type
    has_own = name in declaration.sources and may_export(declaration.sources[name], declaration.name)
    return name if has_own and kernels.is_loaded(target.operator, name) else "reference"
