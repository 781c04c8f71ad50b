"""`assert_matches`: a result against the float64 oracle, with the allowance that verify computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opwright.contract.dtypes import describe
from opwright.dispatch.operator import Operator, operator_of
from opwright.dispatch.reference import caller, outputs_of
from opwright.errors import CheckError, align, plural
from opwright.testing.arguments import Inputs
from opwright.verify.compare import compare
from opwright.verify.oracle import Discrete, Expected, expect, ulp_of

_ULP = 4.0  # what every element is allowed; see docs/decisions/0003-allowances.md


def assert_matches(actual: Any, expected: Any, /, *args: Any, **kwargs: Any) -> None:
    """Asserts that a result is as near to the exact one as its dtype and the computation allow.

        assert_matches(bias_gelu(x, b), reference, x, b)     # a function, with the arguments of the call
        assert_matches(bias_gelu(x, b), exact)               # tensors, in float64

    With a function, each element is allowed four ulp, plus four times what the function itself errs in this
    dtype or moves when its intermediate results are rounded. With tensors nothing is known of the
    computation, so each element is allowed four ulp. What is not floating-point must be equal.

    Where the function in float64 may be off by more than the result is, nothing is proven: a warning says so.

    Args:
        actual: a tensor, or several.
        expected: an operator (its reference counts) or a function in PyTorch, followed by the arguments that
            `actual` was computed from; or exact values, more precise than `actual`.

    Raises:
        AssertionError: an element is wrong, or a shape or dtype.
        CheckError: `expected` cannot serve.
    """
    __tracebackhide__ = True
    operator = operator_of(expected) if callable(expected) else None
    got = _as_list(actual)
    if callable(expected):
        if not args and not kwargs:
            raise CheckError(
                "assert_matches",
                "a function is compared on the arguments of the call",
                hint="`assert_matches(op(x, y), op, x, y)`",
            )
        names, wanted = _from_function(expected, operator, args, kwargs)
        case = str(Inputs(args, kwargs))
    else:
        if args or kwargs:
            raise CheckError(
                "assert_matches", "exact values need no arguments", hint="`assert_matches(actual, expected)`"
            )
        given = _as_list(expected)
        wanted = [_from_exact(value, tensor) for value, tensor in zip(given, got)] + given[len(got) :]
        names, case = [], ""
    problem = _compare_all(got, wanted, names)
    if problem is not None:
        subject = operator.declaration.name if operator is not None else getattr(expected, "__name__", "")
        what, found, pattern = problem
        rows = [("found", found)] if not case else [("case", case), ("found", found)]
        rows += [("pattern", pattern)] if pattern else []
        of = f" of `{subject}`" if subject.isidentifier() else ""
        raise AssertionError("\n".join([f"{what}{of} does not match", *("  " + row for row in align(rows))]))


def _from_function(
    function: Callable[..., Any], operator: Operator | None, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[str], list[Any]]:
    """Returns the names of the outputs, and what each must be."""
    if operator is not None:
        contract = operator.contract
        call = caller(contract, operator.declaration.reference)
        names = [p.name for p in contract.parameters]
        given = dict(zip(names, args)) | kwargs
        values = [given.get(p.name, p.default) for p in contract.parameters]

        def compute(values: Sequence[Any]) -> Sequence[Any]:
            return outputs_of(contract, call(values))

        return [output.name for output in contract.outputs], _expect(compute, values)
    keys = list(kwargs)

    def compute_plain(values: Sequence[Any]) -> Sequence[Any]:
        results = _as_list(function(*values[: len(args)], **dict(zip(keys, values[len(args) :]))))
        for result in results:
            if result is not None and not isinstance(result, torch.Tensor):
                raise CheckError(
                    "assert_matches",
                    "it compares a tensor, or a tuple or list of tensors",
                    rows=[("got", f"{describe(result)} from `{getattr(function, '__name__', 'the function')}`")],
                    hint="return the tensors of a dict as `tuple(found.values())`",
                )
        return results

    return [], _expect(compute_plain, [*args, *kwargs.values()])


def _expect(compute: Callable[[Sequence[Any]], Sequence[Any]], values: Sequence[Any]) -> list[Any]:
    with torch.no_grad():
        return expect(compute, values)


def _from_exact(value: Any, actual: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not isinstance(actual, torch.Tensor):
        raise CheckError(
            "assert_matches",
            "it compares tensors",
            rows=[("actual", describe(actual)), ("expected", describe(value))],
            hint="`torch.as_tensor(...)`, or a function and its arguments",
        )
    if not actual.is_floating_point() or not value.is_floating_point():
        return Discrete(value, value)
    if torch.finfo(value.dtype).eps >= torch.finfo(actual.dtype).eps and actual.dtype != torch.float64:
        raise CheckError(
            "assert_matches",
            "exact values are more precise than the result",
            rows=[("actual", describe(actual)), ("expected", describe(value))],
            hint="compute them in float64: `reference(*(x.double() for x in inputs))`",
        )
    exact = value.detach().double()
    ulp = ulp_of(exact, actual.dtype)
    nowhere = torch.zeros_like(exact, dtype=torch.bool)
    return Expected(exact, _ULP * ulp, ulp, nowhere, actual.dtype)


def _compare_all(got: Sequence[Any], wanted: Sequence[Any], names: Sequence[str]) -> tuple[str, str, str] | None:
    """Returns which result is wrong, what was found, and the pattern; None when all match."""
    if len(got) != len(wanted):
        return "the result", f"got {plural(len(got), 'tensor')}, expected {len(wanted)}", ""
    for i, (value, expected) in enumerate(zip(got, wanted)):
        name = f"`{names[i]}`" if i < len(names) else f"result {i}" if len(got) > 1 else "the result"
        if expected is None:
            continue
        shape = list(expected.exact.shape)
        if not isinstance(value, torch.Tensor) or list(value.shape) != shape or value.dtype != expected.dtype:
            like = torch.empty(0, dtype=expected.dtype).new_empty(shape, device="meta")
            return name, f"got {describe(value)}, expected {describe(like).removesuffix(' meta')}", ""
        difference = compare(value.detach(), expected)
        if difference.message:
            return name, difference.message, difference.pattern
        if difference.undecided:
            warnings.warn(f"{name}: {difference.undecided}", stacklevel=3)
    return None


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]
