"""The Python function of an operator, generated for its signature.

A call on plain tensors that needs no gradient goes to the kernels directly. Everything unusual
(tracing, functorch, autocast, forward-mode, subclasses, modes) goes through the dispatcher's own entry,
which knows how to treat it. The checks cost a few tens of nanoseconds each, so they are written out
for the signature instead of looped over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from opwright import _torch
from opwright.dispatch.backward_trace import PLAIN
from opwright.dispatch.compiled import compiled
from opwright.spec.contract import MISSING, Contract, Parameter

if TYPE_CHECKING:
    from opwright.dispatch.operator import Operator


def normalizer(contract: Contract) -> Callable[..., tuple[Any, ...]]:
    """Returns a function that turns the arguments of a call into a tuple in schema order."""
    made: Callable[..., tuple[Any, ...]] | None = None

    def normalize(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        nonlocal made
        if made is None:  # only now: most operators of a package are never called this way
            made = _compile_normalizer(contract)
        return made(*args, **kwargs)

    return normalize


def _compile_normalizer(contract: Contract) -> Callable[..., tuple[Any, ...]]:
    names = [p.name for p in contract.parameters]
    source = f"def make({_signature(contract, out=False)}):\n    return ({', '.join(names)},)\n"
    return compiled(f"arguments of {contract.subject}", source, __name__)


def gate(operator: Operator) -> Callable[..., Any]:
    """Returns the function that a declaration puts in place of its reference."""
    contract = operator.declaration.contract
    # In the order of `_NAMES`.
    given: list[Any] = [
        PLAIN,
        torch.compiler.is_compiling,
        _torch.count_dispatch_modes,
        _torch.count_function_modes,
        _torch.are_transforms_active,
        _torch.is_any_autocast_enabled,
        torch.autograd.forward_ad,
        torch.is_grad_enabled,
        operator.kernel,
        operator.entries,
        contract.result_type,
    ]
    given += [{choice: i for i, choice in enumerate(p.choices)} for p in contract.parameters if p.kind == "choice"]
    declaration = operator.declaration
    make = compiled(declaration.qualified_name, gate_source(contract), declaration.module)
    function = make(*given)
    reference = declaration.reference
    function.__module__, function.__qualname__ = reference.__module__, reference.__qualname__
    function.__doc__, function.__annotations__ = reference.__doc__, reference.__annotations__
    return function


# What a gate closes over. As globals, torch.compile would look them up in the author's module.
_NAMES = (
    "_plain", "_is_compiling", "_dispatch_modes", "_function_modes", "_transforms", "_any_autocast", "_forward_ad",
    "_is_grad_enabled", "_kernel", "_entries", "_Result",
)  # fmt: skip


def gate_source(contract: Contract) -> str:
    """Returns the text of `make`, a function that takes what a gate uses and returns the gate."""
    name = contract.subject
    tensors = [p for p in contract.tensors if p.kind == "tensor"]
    plain = " and ".join(_is_plain(p) for p in tensors)
    if any(p.kind == "tensors" for p in contract.parameters):
        plain = "False"  # a list is looked through by the general path
    wants = " or ".join(
        f"({p.name} is not None and {p.name}.requires_grad)" if p.optional else f"{p.name}.requires_grad"
        for p in tensors
        if p.is_differentiable
    )
    wants = f"(_is_grad_enabled() and ({wants}))" if wants else "False"
    values = ", ".join(p.name for p in contract.parameters)
    call = ", ".join(f"{p.name}={p.name}" if p.keyword_only else p.name for p in contract.parameters)
    choices = [p.name for p in contract.parameters if p.kind == "choice"]
    coded = [f"_{p.name}_code[{p.name}]" if p.name in choices else p.name for p in contract.parameters]
    kernel_call = f"_kernel({', '.join(coded)})"
    # Through `_entries`: a function from before a new declaration calls what is declared now.
    current = "_entries.current"
    shown = "_Result(*{})" if contract.result_type is not None else "{}"
    lines = [
        f"def _call_kernel({_signature(contract, out=False)}):",
        f"    return {kernel_call}",
        f"def {name}({_signature(contract, out=bool(contract.outputs))}):",
    ]
    if contract.outputs:
        lines += ["    if out is not None:", f"        return {current}.call_with_out(({values},), out)"]
    lines += [
        "    if _is_compiling():",
        f"        return {shown.format(f'{current}.public({call})')}",
        f"    if {plain} and not (_dispatch_modes() or _function_modes() or _transforms()",
        f"            or _any_autocast() or {_torch.FORWARD_MODE_TEST}):",
        "        try:",
        f"            if {wants}:",
        f"                result = {current}.record(_call_kernel, {values})",
        "            else:",
        f"                result = {kernel_call}",
        "        except (RuntimeError, KeyError, TypeError) as _error:",
        f"            raise {current}.explain(_error, ({values},)) from None",
    ]
    if contract.mutated:
        lines.append(f"        {current}.bump_versions(({''.join(p.name + ', ' for p in contract.mutated)}))")
    lines += [
        f"        return {shown.format('result')}",
        f"    return {shown.format(f'{current}.call_general(({values},))')}",
    ]
    head = f"def make({', '.join([*_NAMES, *(f'_{name}_code' for name in choices)])}):\n"
    return head + "".join(f"    {line}\n" for line in lines) + f"    return {name}\n"


def _is_plain(parameter: Parameter) -> str:
    test = f"type({parameter.name}) in _plain"
    return f"({parameter.name} is None or {test})" if parameter.optional else test


def _signature(contract: Contract, *, out: bool) -> str:
    parts: list[str] = []
    for parameter in contract.parameters:
        if parameter.keyword_only and "*" not in parts:
            parts.append("*")
        default = "" if parameter.default is MISSING else f"={parameter.default!r}"
        parts.append(f"{parameter.name}{default}")
    if out:
        parts += [] if "*" in parts else ["*"]
        parts.append("out=None")
    return ", ".join(parts)
