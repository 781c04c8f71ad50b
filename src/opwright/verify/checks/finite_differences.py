"""Checks of the first and the second derivatives of an operator against finite differences, in float64."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch.autograd.gradcheck import GradcheckError

from opwright._torch import leave_out_jacobians
from opwright.contract.sweep import Case
from opwright.verify.checks.finding import Finding, Skipped, first_line
from opwright.verify.checks.gradients import as_function_of_tensors, need_gradient
from opwright.verify.devices import raise_if_lost
from opwright.verify.target import Target

_VARIES = 1e-9  # between two results in float64 of an operator that is not deterministic
# Of the inputs, up to which finite differences are taken one by one; second ones take that many squared.
_MAX_ELEMENTS = 200
_MAX_SECONDS = 2.0  # for the calls with each element of the inputs changed both ways
_JACOBIANS = re.compile(
    r"Jacobian mismatch for output (?P<output>\d+) with respect to input (?P<input>\d+),"
    r"\s*numerical:\s*tensor\((?P<numerical>\[\[[^a-df-z]*\]\])"
    r".*?analytical:\s*tensor\((?P<analytical>\[\[[^a-df-z]*\]\])",
    re.DOTALL,
)


def gradients(target: Target) -> Iterator[Finding]:
    """First derivatives in float64 against finite differences."""
    with leave_out_jacobians():
        yield from _gradcheck(target, torch.autograd.gradcheck)


def second_gradients(target: Target) -> Iterator[Finding]:
    """Second derivatives in float64 against finite differences."""
    with leave_out_jacobians():
        yield from _gradcheck(target, torch.autograd.gradgradcheck)


def _gradcheck(target: Target, check: Callable[..., bool]) -> Iterator[Finding]:
    need_gradient(target)
    if not any(torch.float64 in p.type.family.dtypes for p in target.operator.contract.tensors):
        raise Skipped("float64 is not among its dtypes")
    if target.casts_to_single:
        raise Skipped("its reference casts to float32: too coarse for finite differences")
    cases = target.tiny_cases(torch.float64)
    has_finding = has_other_gradient = False
    refused = ""
    # Last bits that vary are far below what gradcheck itself allows.
    varies = 0.0 if target.operator.declaration.deterministic else _VARIES
    for case in target.within_time(cases):
        inputs, call = as_function_of_tensors(target, case, torch.float64)
        elements = sum(t.numel() for t in inputs)
        is_large = elements > _MAX_ELEMENTS
        outputs: Sequence[torch.Tensor] = ()
        try:
            started = time.perf_counter()
            outputs = call(*inputs) if inputs else ()
            # Of every element if they are few, else along random directions: a call or two for each.
            is_large = is_large or 2 * elements * (time.perf_counter() - started) > _MAX_SECONDS
            if not outputs or not all(bool(t.isfinite().all()) for t in (*inputs, *outputs)):
                continue  # there are no finite differences
            check(call, inputs, raise_exception=True, check_batched_grad=False, fast_mode=is_large, nondet_tol=varies)
            message = ""
        except Exception as error:
            raise_if_lost(target.device, error)
            own = _error_of_reference(target, case, check, is_large)
            if isinstance(error, GradcheckError) and isinstance(own, GradcheckError):
                has_other_gradient = True  # it may be meant not to be the derivative, as for a rounding
                continue
            if own is not None and not isinstance(own, GradcheckError) and first_line(own) == first_line(error):
                refused = first_line(error)  # PyTorch has no derivative of a backward, say
                continue
            names = _names_for(check, target, case, len(inputs), len(outputs))
            message = _tell_mismatch(str(error), *names) or first_line(error, 3)
        has_finding = True
        yield Finding(str(case), message)
    if refused and not has_finding:
        order = "" if check is torch.autograd.gradcheck else "second "
        raise Skipped(f"the reference has no {order}gradient: {refused}")
    if has_other_gradient and not has_finding:
        raise Skipped("the gradient of its reference is not the derivative, as after `detach`")
    if cases and not has_finding:
        raise Skipped("no output is float64 where its inputs are, and finite: there are no finite differences")


def _error_of_reference(target: Target, case: Case, check: Callable[..., bool], is_large: bool) -> Exception | None:
    """Returns what a check raises on the reference alone; None if it passes."""
    inputs, call = as_function_of_tensors(replace(target, call=target.reference), case, torch.float64)
    try:
        check(call, inputs, raise_exception=True, check_batched_grad=False, fast_mode=is_large)
    except Exception as error:
        return error
    return None


def _names_for(
    check: Callable[..., bool], target: Target, case: Case, inputs: int, outputs: int
) -> tuple[list[str], list[str]]:
    """Returns what the inputs and the outputs of a check's Jacobians are called."""
    of_inputs = target.float_names(case, target.computed)
    contract = target.operator.contract.outputs
    of_outputs = [f"`{o.name}`" for o in contract if o.type.family.has_floats and not o.is_constant]
    if len(of_inputs) != inputs:
        of_inputs = [f"input {i}" for i in range(inputs)]
    if len(of_outputs) != outputs:
        of_outputs = [f"output {i}" for i in range(outputs)]
    if check is torch.autograd.gradcheck:
        return of_inputs, of_outputs
    return [*of_inputs, *(f"the gradient of {name}" for name in of_outputs)], [
        f"the gradient of {name}" for name in of_inputs
    ]


def _tell_mismatch(text: str, inputs: list[str], outputs: list[str]) -> str:
    """Returns what gradcheck says of the worst element; "" where it shows no two matrices."""
    found = _JACOBIANS.search(text)
    try:
        numerical, analytical = (torch.tensor(ast.literal_eval(found[key])) for key in ("numerical", "analytical"))
    except (TypeError, ValueError, SyntaxError, RuntimeError):  # no such message, or dots for its middle
        return ""
    if numerical.ndim != 2 or numerical.shape != analytical.shape:
        return ""
    row, column = divmod(int((numerical - analytical).abs().nan_to_num(torch.inf).argmax()), numerical.shape[1])
    by, of = inputs[int(found["input"])], outputs[int(found["output"])]
    return (
        f"the gradient of {of} by {by} is wrong: when element {row} of {by} changes, element {column} of {of} changes "
        f"at a rate of {numerical[row, column]:g}; the gradient says {analytical[row, column]:g}"
    )
