"""The cases of an operator's sweep, for tests that take `opwright_case`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from opwright.contract.dtypes import SCALAR_TYPES, short_name
from opwright.dispatch.operator import Operator, operator_of
from opwright.errors import CheckError
from opwright.target import find_operators
from opwright.testing.arguments import Inputs, inputs_from
from opwright.verify.target import make_target

if TYPE_CHECKING:
    import pytest


def cases(
    operator: Any, *, dtypes: Iterable[Any] | Any = (), only: str = "", samples: Any = None
) -> pytest.MarkDecorator:
    """Marks a test that takes `opwright_case`: it runs on each case of an operator's sweep.

    The mark is `pytest.mark.opwright`, which takes an operator only by its TARGET: given a function, pytest
    marks that function.

    Args:
        operator: an operator, or a TARGET such as "my_ops::name".
        dtypes: of all cases, those of these dtypes: `torch.float32` or "f32".
        only: of all cases, those whose text contains this.
        samples: take these inputs in place of the sweep.
    """
    import pytest  # strategies, which this module serves too, go without

    return pytest.mark.opwright.with_args(operator, dtypes=dtypes, only=only, samples=samples)


def find_cases(operator: Any, *, dtypes: Iterable[Any] | Any = (), only: str = "", samples: Any = None) -> list[Inputs]:
    """Returns the inputs that verify would try on an operator, small ones first within a dtype.

    The arguments are those of `cases`.

    Raises:
        CheckError: it is not an operator, there is no such dtype, or no case is left.
    """
    found = one_operator(operator, "opwright.testing.cases")
    wanted = names_of(dtypes)
    every = _sweep(found) if samples is None else _cases(found, samples)
    left = [
        case
        for case in every
        if (not wanted or (case.dtype is not None and short_name(case.dtype) in wanted)) and only in str(case)
    ]
    if not left:
        raise CheckError(
            found.declaration.name,
            "no case is left",
            rows=[
                ("dtypes", " ".join(sorted(wanted)) or "all"),
                ("only", repr(only)),
                ("cases", str(len(every))),
            ],
            hint=f"such as {str(every[0])!r}" if every else "`@name.samples` of the operator gives none",
        )
    return left


def one_operator(given: Any, target: str) -> Operator:
    """Returns the operator that was given as such, as a `torch.ops` entry, or as a TARGET.

    Raises:
        CheckError: it is something else, or a TARGET of several.
    """
    if isinstance(given, str):
        found = find_operators(given)
        if len(found) > 1:
            names = ", ".join(operator.declaration.name for operator in found)
            hint = f"`{given}::{found[0].declaration.name}`"
            raise CheckError(given, "this TARGET has several operators", rows=[("there", names)], hint=hint)
        return found[0]
    operator = operator_of(given)
    if operator is None:
        raise CheckError(
            target,
            "it takes an operator of Opwright",
            rows=[("got", getattr(given, "__name__", repr(given)))],
            hint='`@operator("my_ops::name")` declares one',
        )
    return operator


# A module of tests may take the same sweep many times; its tensors are kept for one or two operators.
@lru_cache(maxsize=2)
def _sweep(operator: Operator) -> list[Inputs]:
    return _cases(operator, None)


def _cases(operator: Operator, samples: Any) -> list[Inputs]:
    found = make_target(operator.function, None, samples).cases()
    return [inputs_from(operator.contract, case.values, case.label) for case in found]


def names_of(dtypes: Iterable[Any] | Any) -> set[str]:
    """Returns the short names of dtypes that were given as such, or by name.

    Raises:
        CheckError: there is no such dtype.
    """
    given = [dtypes] if isinstance(dtypes, str) or not isinstance(dtypes, Iterable) else list(dtypes)
    known = {name for _, name, _ in SCALAR_TYPES.values()}
    names = {name if isinstance(name, str) else short_name(name) for name in given}
    for name in sorted(names - known):
        raise CheckError(name, "unknown dtype", rows=[("expected", " ".join(sorted(known)))])
    return names
