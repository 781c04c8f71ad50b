"""Runs the checks on a subject and writes the record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from opwright.dispatch import kernels
from opwright.dispatch.operator import operator_of
from opwright.errors import CheckError
from opwright.records import Check, Failure, VerifyRecord
from opwright.verify.checks import CHECKS
from opwright.verify.finding import Finding, Skipped
from opwright.verify.machine import machine_card
from opwright.verify.subject import Subject, subject_of

_RANDOM_CHECKS = ("refusals", "copy", "outputs written")


def verify(
    target: Any,
    reference: Callable[..., Any] | None = None,
    samples: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
    *,
    checks: Iterable[str] | None = None,
    only: str = "",
    on_check: Callable[[Check], None] | None = None,
) -> VerifyRecord:
    """Checks whether an operator, or any callable, is right.

    An operator is compared with its reference in float64 over dtypes, layouts, shapes and values that
    follow from its contract, forward and backward, and with what PyTorch expects of an operator.

    Args:
        target: an operator, its `torch.ops` entry, or a callable with `reference` and `samples`.
        reference: the same computation in PyTorch; an operator has its own.
        samples: an iterable, or a function giving one, of argument tuples or of `(args, kwargs)`.
        checks: names of the checks to run; all by default.
        only: run only cases whose description contains this text.
        on_check: called with each check when it has finished.

    Returns:
        The record; `.passed` and `.failures` say how it went.

    Raises:
        CheckError: a callable comes without a reference or samples, or there is no such check.
    """
    started = time.time()
    wanted = set(checks) if checks is not None else None
    for name in sorted((wanted or set()) - set(CHECKS)):
        raise CheckError("verify", f"there is no check {name!r}", rows=[("there", ", ".join(CHECKS))])
    subjects = [subject_of(target, reference, samples)]
    operator = operator_of(target)
    if operator is not None and operator.backward_operator is not None and samples is None:
        subjects.append(subject_of(operator.backward_operator.function, None, None))
    record_checks: list[Check] = []
    failures: list[Failure] = []
    is_unsafe = False
    for subject in subjects:
        prefix = "backward: " if subject is not subjects[0] else ""
        for name, check in CHECKS.items():
            if wanted is not None and name not in wanted:
                continue
            if is_unsafe:
                result, found = (
                    Check(prefix + name, "skipped", reason="the kernel writes outside of its output"),
                    [],
                )
            else:
                result, found, is_unsafe = _run_one(prefix + name, check, subject, only)
            record_checks.append(result)
            failures.extend(found)
            if on_check is not None:
                on_check(result)
    return VerifyRecord(
        name=subjects[0].name,
        checks=record_checks,
        failures=failures,
        backends=_backends(operator),
        machine=machine_card(),
        created=started,
        seconds=time.time() - started,
    )


def _run_one(name: str, check: Callable, subject: Subject, only: str) -> tuple[Check, list[Failure], bool]:
    start = time.perf_counter()
    findings: list[Finding] = []
    try:
        if (
            subject.operator is not None
            and subject.operator.declaration.random
            and name not in _RANDOM_CHECKS
        ):
            raise Skipped("it draws random numbers")
        for finding in check(subject):
            if only in finding.case or finding.is_fatal:
                findings.append(finding)
    except Skipped as reason:
        return Check(name, "skipped", reason=str(reason)), [], False
    except Exception as error:  # a check that breaks down has found something
        findings.append(Finding("the check itself", f"raised {type(error).__name__}: {error}"[:600]))
    bad = [finding for finding in findings if finding.message]
    outcome = "failed" if bad else "passed" if findings else "skipped"
    ulps = [f.worst_ulp for f in findings if f.worst_ulp is not None]
    ratios = [f.worst_ratio for f in findings if f.worst_ratio is not None]
    result = Check(
        name,
        outcome,
        cases=len(findings),
        reason="" if findings else "no case applies",
        worst_ulp=max(ulps, default=None),
        worst_ratio=max(ratios, default=None),
        seconds=time.perf_counter() - start,
    )
    return result, [_failure(name, bad, subject)] if bad else [], any(f.is_fatal for f in findings)


def _failure(name: str, bad: list[Finding], subject: Subject) -> Failure:
    # Cases come small ones first, so the first is the smallest.
    first = bad[0]
    more = f" (and {len(bad) - 1} more cases)" if len(bad) > 1 else ""
    repeat = ""
    if subject.operator is not None:
        declaration = subject.operator.declaration
        owner = (declaration.forward or declaration.qualified_name).split("::")[1]
        repeat = f"opwright verify {declaration.file}::{owner} --check '{name.removeprefix('backward: ')}'"
    return Failure(name, first.case, first.message + more, first.pattern, repeat)


def _backends(operator: Any) -> list[str]:
    if operator is None:
        return ["callable"]
    found = [b for b in kernels.BACKENDS if kernels.is_loaded(operator, b)]
    return found or ["reference"]
