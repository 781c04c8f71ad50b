"""Samples with other options: another `eps`, `dim`, `keepdim`, as far as the reference takes them.

A candidate may have been made with the options of its samples in mind. One that raises where they are others is not
at fault; one that ignores what it is given is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from opwright.spec.samples import Case
from opwright.verify.oracle import to_oracle
from opwright.verify.subject import Subject
from opwright.verify.tensors import are_same, copy_of, tensors_of

_MOST_ELEMENTS = 2**20  # of a sample: the oracle computes each case a dozen times
_MOST_GROWN = 8  # times the outputs of the sample
_EACH = 2  # other values of an integer: 0 and 1 beside -1 are two axes, 8 and 2 beside 4 two numbers of groups


def cases_with_other_options(subject: Subject) -> Iterator[Case]:
    """Yields the first sample with each set of options with one of them changed, where that changes the results."""
    if subject.callables is None or not subject.expand:
        return
    seen = set()
    for case in [case for _, case in subject.cases() if "," not in case.label]:
        count = case.values[-1].arguments
        options = {i: v for i, v in enumerate(case.values[:count]) if isinstance(v, (bool, int, float))}
        key = tuple(options.items())
        if key in seen or sum(t.numel() for t in tensors_of(case.values)) > _MOST_ELEMENTS:
            continue
        seen.add(key)
        before = _outputs(subject, case)
        for i, value in options.items():
            found = 0
            for other in _others(value):
                made = _with(case, i, other)
                after = _outputs(subject, made)
                if not before or not after or _numel(after) > _MOST_GROWN * _numel(before):
                    continue
                if len(before) != len(after) or not are_same(before, after):
                    yield made
                    found += 1
                if found == (1 if isinstance(value, (bool, float)) else _EACH):
                    break


def _others(value: bool | int | float) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [value / 2, value * 2] if value else [0.5]
    tried = (value + 1, -1, value - 1, 2 * value, value // 2)  # axes are counted from the end as well
    return [v for v in dict.fromkeys(tried) if v != value]


def _with(case: Case, at: int, value: Any) -> Case:
    values = [value if i == at else v for i, v in enumerate(case.values)]
    assembly = case.values[-1]
    args, kwargs = tree_unflatten(list(range(assembly.arguments)), assembly.spec)
    name = next((f"`{name}`" for name, i in kwargs.items() if i == at), "")
    name = name or next((f"argument {number}" for number, i in enumerate(args) if i == at), "an option")
    options = {key: value if f"`{key}`" == name else v for key, v in case.options.items()}
    return Case(f"{case.label}, {name} {value} for {case.values[at]}", tuple(values), options)


def _outputs(subject: Subject, case: Case) -> list[torch.Tensor]:
    """Returns the outputs of the reference; none if it refuses, draws random numbers or writes into other arguments."""
    found = []
    try:
        for _ in range(2):
            values = copy_of(list(case.values))
            with torch.no_grad():
                found.append(tensors_of(subject.reference(values)))
            pairs = enumerate(zip(case.values, values, strict=True))
            if any(not are_same(tensors_of([a]), tensors_of([b])) for i, (a, b) in pairs if i not in subject.mutated()):
                return []
        with torch.no_grad():
            exact = tensors_of(subject.reference([to_oracle(v) for v in case.values]))
    except Exception:  # whatever a reference may raise to refuse
        return []
    is_input = are_same(*found) and all(bool(torch.isfinite(e).all()) for e in exact)
    return found[0] if is_input else []


def _numel(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() for t in tensors)
