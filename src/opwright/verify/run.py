"""Runs the checks on a subject and writes the record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from opwright.dispatch import kernels
from opwright.errors import CheckError
from opwright.records import Check, Failure, VerifyRecord
from opwright.spec.samples import Case
from opwright.verify.checks import CHECKS
from opwright.verify.devices import DeviceLost, device_of, devices_for, is_lost, parse_device
from opwright.verify.finding import Finding, Skipped
from opwright.verify.machine import machine_card
from opwright.verify.shrink import shrink
from opwright.verify.subject import Subject, subject_of
from opwright.verify.tensors import tensors_of

_RANDOM_CHECKS = ("refusals", "copy", "outputs written")


def verify(
    target: Any,
    reference: Callable[..., Any] | None = None,
    samples: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
    *,
    checks: Iterable[str] | None = None,
    only: str = "",
    quick: bool = False,
    full: bool = False,
    devices: Iterable[str | torch.device] | None = None,
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
        quick: fewer inputs of each kind, in seconds; no kind of check is left out.
        full: more seeds and options, every 16-bit value, large sizes; in minutes.
        devices: "cpu", "cuda", "cuda:1", ...; by default the CPU, and the GPU when there is one and the
            operator has a CUDA kernel; for a callable, and for samples on a GPU, where the samples are.
        on_check: called with each check when it has finished.

    Returns:
        The record; `.passed` and `.failures` say how it went.

    Raises:
        CheckError: a callable comes without a reference or samples, or there is no such check or device.
    """
    started = time.time()
    wanted = set(checks) if checks is not None else None
    for name in sorted((wanted or set()) - set(CHECKS)):
        raise CheckError("verify", f"there is no check {name!r}", rows=[("there", ", ".join(CHECKS))])
    if quick and full:
        raise CheckError("verify", "`quick` and `full` exclude each other", hint="leave one out")
    effort = "quick" if quick else "full" if full else "default"
    subject = subject_of(target, reference, samples, effort)
    operator = subject.operator
    chosen = _devices(subject, samples, devices)
    subjects = {"": subject}
    if operator is not None and operator.backward_operator is not None and samples is None:
        subjects["backward: "] = subject_of(operator.backward_operator.function, None, None, effort)
    machine = machine_card()
    record_checks: list[Check] = []
    failures: list[Failure] = []
    unsafe: dict[str, str] = {}  # why nothing more is called, by type of device
    for device in chosen:
        for prefix, each in subjects.items():
            here = each.on(device)
            # Several checks ask for the same gradients; of many large inputs that would be too much to keep.
            here.memo = {} if quick else None
            for name, check in CHECKS.items():
                if wanted is not None and name not in wanted:
                    continue
                known = unsafe.get("cpu") or unsafe.get(device.type)  # a damaged heap is everybody's
                if known:
                    result, found = Check(prefix + name, "skipped", reason=known, device=str(device)), []
                else:
                    result, found, reason = _run_one(prefix, name, check, here, only)
                    if reason:
                        unsafe[device.type] = reason
                record_checks.append(result)
                failures.extend(found)
                if on_check is not None:
                    on_check(result)
    return VerifyRecord(
        name=subject.name,
        checks=record_checks,
        failures=failures,
        backends=_backends(operator, chosen),
        machine=machine,
        created=started,
        seconds=time.time() - started,
        effort=effort,
        only=only,
    )


def _devices(
    subject: Subject, samples: Any, named: Iterable[str | torch.device] | None
) -> list[torch.device]:
    if named is not None:
        return [parse_device(name) for name in named]
    if subject.operator is None:
        return [device_of([t for _, case in subject.cases() for t in tensors_of(case.values)])]
    is_iterator = callable(samples) or hasattr(samples, "__next__")
    return devices_for(subject.operator, [] if samples is None or is_iterator else tensors_of(samples))


def _run_one(
    prefix: str, name: str, check: Callable, subject: Subject, only: str
) -> tuple[Check, list[Failure], str]:
    """Runs one check; the last result is why no further call is safe, if one is not."""
    start = time.perf_counter()
    findings: list[Finding] = []
    device = str(subject.device)
    subject.current = None
    smallest: Case | None = None
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
                if finding.message and smallest is None:
                    smallest = subject.current
    except Skipped as reason:
        if not any(finding.message for finding in findings):
            return Check(prefix + name, "skipped", reason=str(reason), device=device), [], ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a check that breaks down has found something; SystemExit too
        findings.append(_broken(error, subject))
        smallest = smallest or subject.current
    bad = [finding for finding in findings if finding.message]
    outcome = "failed" if bad else "passed" if findings else "skipped"
    ulps = [f.worst_ulp for f in findings if f.worst_ulp is not None]
    ratios = [f.worst_ratio for f in findings if f.worst_ratio is not None]
    result = Check(
        prefix + name,
        outcome,
        cases=len(findings),
        reason="" if findings else "no case applies",
        worst_ulp=max(ulps, default=None),
        worst_ratio=max(ratios, default=None),
        seconds=time.perf_counter() - start,
        device=device,
    )
    fatal = next((f.is_fatal for f in findings if f.is_fatal), "")
    if bad and not fatal and smallest is not None:
        shrunk = shrink(check, subject, smallest, bad[0])
    else:
        shrunk = None
    return result, [_failure(prefix, name, bad, subject, shrunk)] if bad else [], fatal


def _broken(error: BaseException, subject: Subject) -> Finding:
    case = str(subject.current) if subject.current else "the check itself"
    if isinstance(error, DeviceLost) or is_lost(subject.device):
        cause = error if isinstance(error, DeviceLost) else f"{type(error).__name__}: {error}"
        message = f"the GPU accepts no more work after this call: {cause}"[:600]
        return Finding(case, message, is_fatal=f"a fault on {case} has ended all work on the GPU")
    return Finding(case, f"raised {type(error).__name__}: {error}"[:600])


def _failure(
    prefix: str, name: str, bad: list[Finding], subject: Subject, shrunk: Finding | None
) -> Failure:
    # Cases come small ones first, so the first is the smallest, but for what a smaller part of it shows.
    first = bad[0]
    case, message = first.case, first.message
    if shrunk is not None:
        case, message = f"{shrunk.case}, a part of {first.case}", shrunk.message
    more = f" (and {len(bad) - 1} more cases)" if len(bad) > 1 else ""
    repeat = ""
    if subject.operator is not None:
        declaration = subject.operator.declaration
        owner = (declaration.forward or declaration.qualified_name).split("::")[1]
        repeat = f"opwright verify {declaration.file}::{owner} --check '{name}' --device {subject.device}"
        repeat += "" if subject.effort == "default" else f" --{subject.effort}"
    return Failure(prefix + name, case, message + more, first.pattern, repeat, str(subject.device))


def _backends(operator: Any, devices: Sequence[torch.device]) -> list[str]:
    if operator is None:
        return ["callable"]
    behind = [o for o in (operator, operator.backward_operator) if o is not None]
    return list(
        dict.fromkeys(
            d.type if any(kernels.is_loaded(o, d.type) for o in behind) else "reference" for d in devices
        )
    )
