"""The generic suite: every check of verify on every operator, each a test of its own."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch

from opwright import _torch
from opwright.dispatch.operator import Operator
from opwright.errors import CheckError, align
from opwright.records import Failure, VerifyRecord
from opwright.target import find_operators
from opwright.testing.sweep import one_operator
from opwright.verify.api import verify
from opwright.verify.checks import CHECKS, TRACING, unknown_check
from opwright.verify.devices import devices_for
from opwright.verify.request import Request

_OF_INPUTS = ("reference", "samples", "contract", "expand")  # settings that change what is tried


def suite(
    *targets: Any,
    checks: Iterable[str] | None = None,
    devices: Iterable[str | torch.device] | None = None,
    only: str = "",
    **settings: Any,
) -> Callable[..., None]:
    """Makes the test of all operators of some TARGETs: `test_operators = opwright.testing.suite("my_ops")`.

    Each operator and check, on a GPU also each device, is an item: `test_operators[bias_gelu-numerics]`. A
    check includes the operator's backward. A check that does not apply is skipped with its reason.

    Args:
        targets: modules or files, with `::name` for one operator, or operators themselves.
        checks: names of the checks, all by default; `opwright verify` lists them.
        devices: "cpu", "cuda", ...; by default the CPU, and the GPU where there is one and a CUDA kernel.
        only: run only cases whose description contains this text.
        settings: further arguments of `opwright.verify`.

    Returns:
        A test function; pytest finds it under a name that begins with `test`.

    Raises:
        TargetError: a TARGET cannot be imported, or declares no operator.
        CheckError: there is no such check.
    """
    names = list(CHECKS) if checks is None else list(checks)
    for name in names:
        if name not in CHECKS:
            raise unknown_check("opwright.testing.suite", name)
    chosen = None if devices is None else [str(device) for device in devices]
    items = [
        pytest.param(operator, name, device, id=_id(operator, name, device), marks=_marks(device))
        for operator in _find(targets)
        for device in chosen or map(str, devices_for(operator, []))
        for name in names
    ]

    def test(operator, check, device): _run(operator, check, device, {"only": only, **settings})  # fmt: skip

    # pytest names the file of a test beside its id where the two differ: this one is its caller's, all on one line.
    caller = sys._getframe(1)
    test.__code__ = test.__code__.replace(co_filename=caller.f_code.co_filename, co_firstlineno=caller.f_lineno)
    test.__module__ = caller.f_globals["__name__"]
    test.__doc__ = "The generic suite of Opwright."
    return pytest.mark.parametrize(("operator", "check", "device"), items)(test)


def _find(targets: Sequence[Any]) -> list[Operator]:
    if not targets:
        raise CheckError("opwright.testing.suite", "it takes what to test", hint='`opwright.testing.suite("my_ops")`')
    found: dict[str, Operator] = {}
    for target in targets:
        several = (
            find_operators(target) if isinstance(target, str) else [one_operator(target, "opwright.testing.suite")]
        )
        found |= {operator.declaration.qualified_name: operator for operator in several}
    return list(found.values())


def _id(operator: Operator, check: str, device: str) -> str:
    return "-".join([operator.declaration.name, check, *([device] if device != "cpu" else [])])


def _marks(device: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.gpu] if device != "cpu" else []


def _run(operator: Operator, check: str, device: str, settings: Mapping[str, Any]) -> None:
    __tracebackhide__ = True
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip(f"there is no device {device} here")
    # For a GPU each process takes seconds to start, and one check is all that it would do.
    settings = {"isolated": device == "cpu", **settings}
    if settings["isolated"] and CHECKS[check].group in TRACING:
        _torch.import_dynamo()  # once: each check would, in a process of its own
        _torch.import_optests()
    target = operator.function
    if not settings.keys() & set(_OF_INPUTS):
        target = _request_for(operator, "full" if settings.get("full") else "default")
    record = verify(target, checks=[check], devices=[device], **settings)
    if record.failures:
        pytest.fail("\n\n".join(map(describe_failure, record.failures)), pytrace=False)
    if not record.passed:
        pytest.skip(_reason(record))
    if record.undecided:
        warnings.warn(_reason(record), stacklevel=2)


@functools.lru_cache(maxsize=1)
def _request_for(operator: Operator, effort: str) -> Request:
    """Returns what one check after the other verifies: its inputs, which take a second to make, are made once."""
    return Request(operator.function, None, None, effort, expand=True)


def describe_failure(failure: Failure) -> str:
    """Returns what verify found, as its command prints it."""
    return "\n".join([f"FAILED {failure.title}", *("  " + line for line in align(failure.rows))])


def _reason(record: VerifyRecord) -> str:
    reasons = dict.fromkeys(check.explanation for check in record.checks if check.note)
    return "; ".join(reasons) or "no case applies"
