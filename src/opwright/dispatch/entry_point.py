"""The Python function of an operator, generated for its signature.

A call on plain tensors that needs no gradient goes to the kernels directly (`direct.py`). What that declines is looked
at here: calls on plain tensors go to the kernels below autograd, with a node in front where a gradient is needed.
Everything unusual (tracing, functorch, autocast, forward-mode, subclasses, modes) goes through the dispatcher's own
entry, which knows how to treat it. The checks cost a few tens of nanoseconds each, so they are written out
for the signature instead of looped over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opwright import _torch
from opwright.contract.contract import Contract, Parameter
from opwright.contract.declaration import Declaration
from opwright.dispatch.arguments import signature_text
from opwright.dispatch.compiled import compiled
from opwright.dispatch.mutation import bump_versions
from opwright.dispatch.reference import PLAIN
from opwright.dispatch.registration import Registration


def entry_point(declaration: Declaration, registration: Registration) -> Callable[..., Any]:
    """Returns the function that a declaration puts in place of its reference."""
    contract = declaration.contract
    # In the order of `_NAMES`.
    given: list[Any] = [
        PLAIN,
        torch.compiler.is_dynamo_compiling,
        torch.compiler.is_compiling,
        _torch.count_dispatch_modes,
        _torch.count_function_modes,
        _torch.are_transforms_active,
        _torch.is_any_autocast_enabled,
        _torch.tracing_state,
        _torch.is_key_included,
        _torch.PYTHON_DISPATCHER,
        torch.autograd.forward_ad,
        torch.is_grad_enabled,
        torch.is_inference_mode_enabled,
        registration.kernel,
        registration.direct,
        registration,
        bump_versions,
        contract.result_type,
        any,  # an argument may have such a name
        list,
        map,
        type,
    ]
    given += [{choice: i for i, choice in enumerate(p.choices)} for p in contract.parameters if p.kind == "choice"]
    make = compiled(declaration.qualified_name, entry_point_source(contract), declaration.module)
    function = make(*given)
    reference = declaration.reference
    function.__module__, function.__qualname__ = reference.__module__, reference.__qualname__
    function.__doc__, function.__annotations__ = reference.__doc__, reference.__annotations__
    return function


# What an entry point closes over. As globals, torch.compile would look them up in the author's module.
_NAMES = (
    "_plain", "_is_traced", "_is_compiling", "_dispatch_modes", "_function_modes", "_transforms", "_any_autocast",
    "_tracing_state", "_is_key_included", "_python_dispatcher", "_forward_ad", "_is_grad_enabled", "_is_inference",
    "_kernel", "_direct", "_registration", "_bump_versions", "_Result", "_any", "_list", "_map", "_type",
)  # fmt: skip


def entry_point_source(contract: Contract) -> str:
    """Returns the text of `make`, a function that takes what an entry point uses and returns the entry point."""
    name = contract.subject
    plain = " and ".join(_is_plain(p) for p in contract.tensors)
    wants = " or ".join(_requires_gradient(p) for p in contract.tensors if p.is_differentiable)
    wants = f"_is_grad_enabled() and ({wants}) and not _is_inference()" if wants else "False"
    values = ", ".join(p.name for p in contract.parameters)
    call = ", ".join(f"{p.name}={p.name}" if p.keyword_only else p.name for p in contract.parameters)
    choices = [p.name for p in contract.parameters if p.kind == "choice"]
    coded = [f"_{p.name}_code[{p.name}]" if p.name in choices else p.name for p in contract.parameters]
    kernel_values = ", ".join(coded)
    # Through `_registration`: a function from before a new declaration calls what is declared now.
    current = "_registration.current"
    shown = "{}" if contract.result_type is None else "_Result({})" if len(contract.outputs) == 1 else "_Result(*{})"
    public = f"        return {shown.format(f'_registration.public({call})')}"
    explained = [
        "except (RuntimeError, KeyError, TypeError) as _error:",
        f"    raise {current}.explain(_error, ({values},)) from None",
    ]
    # The dispatcher is needed for what writes into arguments; lists are seldom worth a way of their own.
    is_direct = not contract.mutated and all(p.kind == "tensor" for p in contract.tensors)
    lines = [
        f"def _call_kernel({signature_text(contract, out=False)}):",
        f"    _found = {f'_direct.call({kernel_values})' if is_direct else None}",
        f"    return _kernel({kernel_values}) if _found is None or _found is False else _found",
        f"def {name}({signature_text(contract, out=bool(contract.outputs))}):",
    ]
    if contract.outputs:
        lines += ["    if out is not None:", f"        return {current}.call_with_out(({values},), out)"]
    lines.append("    _found = False")
    if is_direct:
        lines += [
            "    if _is_traced():",  # before TorchDynamo meets a function that it does not know
            public,
            f"    if not {_torch.FORWARD_MODE_TEST}:",
            "        try:",
            f"            _found = _direct.call({kernel_values})",
            "        except (KeyError, TypeError):",  # an unknown choice, perhaps beside a tensor of another class
            "            pass",
            *(f"        {line}" for line in explained),
            "        if _found is not None and _found is not False:",
            f"            return {shown.format('_found')}",
        ]
    lines += [
        "    if _is_compiling():",
        public,
        f"    if {plain} and (_found is None or not (_dispatch_modes() or _function_modes() or _transforms()",
        "            or _any_autocast() or _tracing_state() is not None or _is_key_included(_python_dispatcher)",
        f"            or {_torch.FORWARD_MODE_TEST})):",
        "        try:",
        f"            if {wants}:",
        f"                _made = {current}.gradient.record(_call_kernel, {values})",
        "            else:",
        f"                _made = _registration.run({kernel_values})",
        *(f"        {line}" for line in explained),
    ]
    if contract.mutated:
        lines.append(f"        _bump_versions(({''.join(p.name + ', ' for p in contract.mutated)}))")
    lines += [
        f"        return {shown.format('_made')}",
        f"    return {shown.format(f'{current}.call_general(({values},))')}",
    ]
    head = f"def make({', '.join([*_NAMES, *(f'_{name}_code' for name in choices)])}):\n"
    return head + "".join(f"    {line}\n" for line in lines) + f"    return {name}\n"


def _requires_gradient(parameter: Parameter) -> str:
    name = parameter.name
    if parameter.kind == "tensors":
        return f"_any(_each.requires_grad for _each in {name})"
    return f"({name} is not None and {name}.requires_grad)" if parameter.optional else f"{name}.requires_grad"


def _is_plain(parameter: Parameter) -> str:
    if parameter.kind == "tensors":
        return f"_type({parameter.name}) is _list and _plain.issuperset(_map(_type, {parameter.name}))"
    test = f"_type({parameter.name}) in _plain"
    return f"({parameter.name} is None or {test})" if parameter.optional else test
