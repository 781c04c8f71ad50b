"""Makes the samples of a callable from a contract that is given as text."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
import torch

from opwright.dispatch.reference import caller
from opwright.errors import CheckError
from opwright.spec import domains
from opwright.spec.annotations import Mutates
from opwright.spec.contract import Contract
from opwright.spec.declaration import read_contract
from opwright.spec.declared import Labelled
from opwright.spec.dtypes import family_names
from opwright.spec.likely import find_likely
from opwright.spec.samples import Case
from opwright.verify.target import accepts, sweep_cases

_DOMAINS = ("Index", "NonNegative", "Positive", "Probability", "Range")


def samples_of(text: str, name: str, reference: Callable[..., Any], effort: str) -> list[Labelled]:
    """Returns the inputs of a sweep over a contract, as far as the reference takes them.

    Args:
        text: the parameters and the result of a function, as in Python.
        name: what is verified, for messages.

    Raises:
        CheckError: the text is not a signature, or the reference takes none of the inputs.
        DeclarationError: an annotation cannot be read.
    """
    contract = _parse(text, name)
    call = caller(contract, reference)
    contract = find_likely(contract, call)
    cases = [case for _, case in sweep_cases(contract, call, effort)]
    taken = [case for case in cases if accepts(contract, call, case)]
    if not taken:
        raise CheckError(
            name,
            "its reference takes none of the inputs that follow from `contract`",
            rows=[("the first", str(cases[0])) if cases else ("inputs", "none")],
            hint="pass `samples`, or a contract with the reference's axes and domains",
        )
    return [_sample(contract, case) for case in taken]


def _parse(text: str, name: str) -> Contract:
    scope = {"Tensor": torch.Tensor, "torch": torch, "Mutates": Mutates}
    scope |= {key: getattr(jaxtyping, key) for key in family_names()}
    scope |= {key: getattr(domains, key) for key in _DOMAINS}
    scope |= {key: getattr(typing, key) for key in ("Annotated", "Literal", "Optional")}
    try:
        exec(f"def contract{text}: ...", scope)
    except (SyntaxError, NameError) as error:
        raise CheckError(
            name,
            "invalid `contract`",
            rows=[("got", text), ("error", str(error))],
            hint="""contract="(x: Float[Tensor, '*b n'], eps: float = 1e-5) -> Float[Tensor, '*b n']\"""",
        ) from None
    return read_contract(scope["contract"], name)


def _sample(contract: Contract, case: Case) -> Labelled:
    pairs = list(zip(contract.parameters, case.values, strict=True))
    args = tuple(value for parameter, value in pairs if not parameter.keyword_only)
    return Labelled(case.label, args, {p.name: value for p, value in pairs if p.keyword_only})
