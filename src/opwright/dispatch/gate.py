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

from opwright.spec.contract import MISSING, Contract, Parameter

if TYPE_CHECKING:
    from opwright.dispatch.operator import Operator

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


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
    source = f"def normalize({_signature(contract, out=False)}):\n    return ({', '.join(names)},)\n"
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<opwright arguments of {contract.subject}>", "exec"), namespace)
    return namespace["normalize"]


def gate(operator: Operator) -> Callable[..., Any]:
    """Returns the function that a declaration puts in place of its reference."""
    contract = operator.declaration.contract
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
    names = {
        "_plain": _PLAIN,
        "_is_compiling": torch.compiler.is_compiling,
        "_dispatch_modes": torch._C._len_torch_dispatch_stack,
        "_function_modes": torch._C._len_torch_function_stack,
        "_transforms": torch._C._are_functorch_transforms_active,
        "_any_autocast": torch._C._is_any_autocast_enabled,
        "_forward_ad": torch.autograd.forward_ad,
        "_is_grad_enabled": torch.is_grad_enabled,
        "_kernel": operator.kernel,
        "_entries": operator.entries,
        "_Result": contract.result_type,
    }
    coded = []
    for parameter in contract.parameters:
        if parameter.kind == "choice":
            names[f"_{parameter.name}_code"] = {choice: i for i, choice in enumerate(parameter.choices)}
            coded.append(f"_{parameter.name}_code[{parameter.name}]")
        else:
            coded.append(parameter.name)
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
        "            or _any_autocast() or _forward_ad._current_level >= 0):",
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
    # The names are closed over, not globals: torch.compile looks globals up in the author's module.
    source = (
        f"def make({', '.join(names)}):\n"
        + "".join(f"    {line}\n" for line in lines)
        + f"    return {name}\n"
    )
    namespace: dict[str, Any] = {"__name__": operator.declaration.module}
    exec(compile(source, f"<opwright {operator.declaration.qualified_name}>", "exec"), namespace)
    function = namespace["make"](**names)
    reference = operator.declaration.reference
    function.__module__, function.__qualname__ = reference.__module__, reference.__qualname__
    function.__doc__, function.__annotations__ = reference.__doc__, reference.__annotations__
    return function


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
