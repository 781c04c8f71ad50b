"""Runs the checks, one after the other, in the process where the candidate runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from opwright.dispatch import kernels
from opwright.errors import BuildError
from opwright.records import CaseError, Check, Failure, Undecided
from opwright.spec.samples import Case
from opwright.verify.callable_checks import check_for
from opwright.verify.devices import DeviceLost, is_lost
from opwright.verify.difference import collect_undecided
from opwright.verify.finding import Finding, Skipped, origin
from opwright.verify.oracle_process import OracleProcess
from opwright.verify.shrink import shrink
from opwright.verify.state import Guard
from opwright.verify.subject import Subject

_RANDOM_CHECKS = ("refusals", "copy", "outputs written")
LOADING, NOT_LOADED = "while it was loaded", "the candidate cannot be loaded"
_LONGEST = 600  # characters of a message


@dataclass(frozen=True)
class Job:
    """One check of one subject on one device.

    Attributes:
        prefix: what the subject is called in front of the name of the check: "" or "backward: ".
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


Subjects = Callable[[torch.device, Guard], dict[str, Subject]]


class Work:
    """The checks of a candidate.

    Attributes:
        subjects: returns what is checked, by prefix, for a device; called in the process where the candidate runs.
        only: run only cases whose description contains this text.
        repeat: the command that verifies it again, without its flags; "" where there is none.
    """

    def __init__(self, subjects: Subjects, only: str, repeat: str = "") -> None:
        self._subjects = subjects
        self.only, self.repeat = only, repeat

    def run(
        self,
        jobs: Iterable[Job],
        emit: Callable[[Result], None],
        *,
        on_start: Callable[[Job], None] = lambda _: None,
        on_case: Callable[[str], None] = lambda _: None,
        is_inside: Callable[[bool], None] = lambda _: None,
        left_behind: Callable[[], list[str]] = list,
        oracle: OracleProcess | None = None,
    ) -> None:
        """Runs jobs in this process.

        Args:
            emit: called with each result as it comes.
            on_start: called with a job before it runs.
            on_case: called with a description of what the candidate is given next.
            is_inside: called with whether the candidate is running now.
            left_behind: returns what a check has left behind: processes.
            oracle: says what results must be; None: this process does.
        """
        guard = Guard(is_inside)
        here: dict[torch.device, dict[str, Subject]] = {}
        unsafe: dict[str, str] = {}  # why nothing more is called, by type of device
        for job in jobs:
            known = unsafe.get("cpu") or unsafe.get(job.device.type)  # a damaged heap is everybody's
            if known:
                emit(skipped(job, known))
                continue
            on_start(job)
            if job.device not in here:
                on_case(LOADING)
                try:
                    here[job.device] = self._subjects(job.device, guard)
                except (Exception, SystemExit) as error:
                    unsafe[job.device.type] = NOT_LOADED
                    emit(self._not_loaded(job, error, guard))
                    continue
                for subject in here[job.device].values():
                    subject.call = guard.wrap(subject.call)
                    subject.wait = guard.inside(subject.wait)
                    subject.oracle = oracle or subject.oracle
                    subject.on_case = lambda case: on_case(str(case))
                    # Several checks ask for the same gradients; of many large inputs that would be too much to keep.
                    subject.memo = {} if subject.effort == "quick" else None
                on_case("")
            result = self._run_one(job, here[job.device][job.prefix], guard, left_behind)
            if result.fatal:
                unsafe[job.device.type] = result.fatal
            emit(result)

    def _not_loaded(self, job: Job, error: BaseException, guard: Guard) -> Result:
        text = "; ".join([f"raised {type(error).__name__}: {error}", *guard.take()])[:_LONGEST]
        check = Check(job.name, "failed", cases=1, device=str(job.device))
        return Result(check, [failure_of(job, [Finding(LOADING, text)], self.repeat)], NOT_LOADED, "callable")

    def _repeat(self, subject: Subject) -> str:
        return self.repeat and self.repeat + ("" if subject.effort == "default" else f" --{subject.effort}")

    def _run_one(self, job: Job, subject: Subject, guard: Guard, left_behind: Callable[[], list[str]]) -> Result:
        start = time.perf_counter()
        findings: list[Finding] = []
        changes: dict[str, str] = {}  # of the process, and on which case
        device = str(job.device)
        subject.current = None

        def note() -> None:
            case = str(subject.current) if subject.current else "the check itself"
            changes.update((change, case) for change in guard.take() if change not in changes)

        reason = "no case applies"
        smallest: Case | None = None
        try:
            if subject.operator is not None and subject.operator.declaration.random and job.check not in _RANDOM_CHECKS:
                raise Skipped("it draws random numbers")
            with collect_undecided() as differences:
                for finding in check_for(job.check, subject)(subject):
                    note()
                    finding.undecided = "" if finding.message else "; ".join(dict.fromkeys(differences))
                    differences.clear()
                    if self.only in finding.case or finding.is_fatal:
                        findings.append(finding)
                        if finding.message and smallest is None:
                            smallest = subject.current
        except Skipped as skip:
            if not any(finding.message for finding in findings):
                reason, findings = str(skip), []
        except (Exception, SystemExit) as error:  # a check that breaks down has found something
            findings.append(_broken(error, subject))
            smallest = smallest or subject.current
        note()
        changes |= dict.fromkeys(left_behind(), "after the check")
        bad = [finding for finding in findings if finding.message]
        undecided = [Undecided(f.case, f.undecided[:_LONGEST]) for f in findings if f.undecided]
        compared = [f for f in findings if f.worst_ratio is not None and not f.undecided]
        with_error = [f for f in findings if f.worst_ratio is not None]
        worst = max(with_error, key=lambda f: f.worst_ratio, default=Finding(""))
        check = Check(
            job.name,
            _outcome(bool(bad or changes), len(findings), len(undecided)),
            cases=len(findings),
            reason="" if findings or changes else reason,
            worst_ulp=worst.worst_ulp,
            worst_ratio=worst.worst_ratio,
            seconds=time.perf_counter() - start,
            device=device,
            errors=[CaseError(f.case, f.worst_ulp, f.worst_ratio) for f in compared],
            undecided=undecided,
        )
        fatal = next((f.is_fatal for f in findings if f.is_fatal), "")
        has_ended = any(f.has_ended for f in findings)
        failures = []
        if bad:
            shrunk = None
            if smallest is not None and not fatal:
                shrunk = shrink(check_for(job.check, subject), subject, smallest, bad[0])
                guard.take()  # what parts of a case change, the whole has changed
            if subject.callables is not None and subject.callables.note:
                of_state = f"; its state is not the reference's, so each has its own: {subject.callables.note}"
                (shrunk or bad[0]).message += of_state
            failures.append(failure_of(job, bad, self._repeat(subject), shrunk))
        if changes:
            found = Finding(next(iter(changes.values())), "; ".join(changes)[:_LONGEST])
            failures.append(failure_of(job, [found], self._repeat(subject)))
        return Result(check, failures, fatal, _backend(subject, job.device), has_ended)


def skipped(job: Job, reason: str) -> Result:
    """Returns the result of a job that is not run."""
    return Result(Check(job.name, "skipped", reason=reason, device=str(job.device)))


def _outcome(has_failed: bool, cases: int, undecided: int) -> str:
    if has_failed:
        return "failed"
    return "skipped" if not cases else "undecided" if undecided == cases else "passed"


def _broken(error: BaseException, subject: Subject) -> Finding:
    case = str(subject.current) if subject.current else "the check itself"
    if isinstance(error, DeviceLost) or is_lost(subject.device):
        cause = error if isinstance(error, DeviceLost) else f"{type(error).__name__}: {error}"
        message = f"the GPU accepts no more work after this call: {cause}"[:_LONGEST]
        return Finding(case, message, is_fatal=f"a fault on {case} has ended all work on the GPU", has_ended=True)
    unbuilt = "its kernels cannot be built or loaded" if isinstance(error, BuildError) else ""
    text = f"raised {type(error).__name__}: {error}"[:_LONGEST]
    return Finding(case, text + origin(error, subject), is_fatal=unbuilt)


def failure_of(job: Job, bad: Sequence[Finding], repeat: str, shrunk: Finding | None = None) -> Failure:
    """Returns the failure that stands for these findings; `shrunk`: what a part of the first case shows."""
    # Cases come small ones first, so the first is the smallest, but for what a smaller part of it shows.
    first = bad[0]
    case, message = first.case, first.message
    if shrunk is not None:
        case, message = f"{shrunk.case}, a part of {first.case}", shrunk.message
    more = f" (and {len(bad) - 1} more cases)" if len(bad) > 1 else ""
    repeat = repeat and f"{repeat} --check '{job.check}' --device {job.device}"
    return Failure(job.name, case, message + more, first.pattern, repeat, str(job.device))


def _backend(subject: Subject, device: torch.device) -> str:
    operator = subject.operator
    if operator is None:
        return "callable"
    behind = [o for o in (operator, operator.backward_operator) if o is not None]
    return device.type if any(kernels.is_loaded(o, device.type) for o in behind) else "reference"
