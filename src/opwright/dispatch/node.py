"""The node that autograd records for a call, generated for the operator's signature.

Written out for the signature, a recorded call costs half of what looping over the arguments would. It is
functorch's own kind of node, which `torch.autograd.Function.apply` makes after a detour: inside a
functorch transform the dispatcher has already brought the call down to one level.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from opwright import _torch
from opwright.dispatch.autograd import differentiable_outputs, reference_gradient

if TYPE_CHECKING:
    from opwright.dispatch.operator import Operator
    from opwright.spec.contract import Parameter


def recorder(operator: Operator) -> Callable[..., Any]:
    """Returns `record(compute, *values)`: calls `compute` with the arguments, and records the call.

    Lists of tensors are passed on one by one behind the other arguments, because autograd only follows
    tensors that are arguments themselves.
    """
    contract = operator.contract
    lists = [p for p in contract.parameters if p.kind == "tensors"]
    plain = [p for p in contract.parameters if p.kind != "tensors"]
    counts = [f"_{p.name}_count" for p in lists]
    # Names of arguments never start with an underscore, so the function's own do.
    parameters = ["_compute", *(p.name for p in plain), *counts, *(["*_flat"] if lists else [])]
    forward, backward = (
        _forward_lines(operator, lists, plain, counts),
        _backward_lines(operator, lists, plain, counts),
    )
    source = "\n".join(
        [
            "class Node(_SingleLevelFunction):",
            f"    {_torch.COMPILED_AUTOGRAD_KEY} = _key",
            "    @staticmethod",
            f"    def forward(_ctx, {', '.join(parameters)}):",
            *(f"        {line}" for line in forward),
            "    @staticmethod",
            "    def backward(_ctx, *_gradients):",
            *(f"        {line}" for line in backward),
        ]
    )
    namespace: dict[str, Any] = {
        "torch": torch,
        "_SingleLevelFunction": _torch.SingleLevelFunction,
        "_key": _torch.compiled_autograd_key,
        "_reference_gradient": partial(reference_gradient, operator),
        "_compute_again": partial(differentiable_outputs, operator),
    }
    if operator.backward_operator is not None:
        namespace["_backward"] = operator.backward_operator.function
    exec(compile(source, f"<opwright node of {operator.declaration.qualified_name}>", "exec"), namespace)
    node = namespace["Node"]
    node.__name__ = node.__qualname__ = f"{contract.subject}_node"
    apply = node.apply
    if not lists:
        return apply
    is_list = [p.kind == "tensors" for p in contract.parameters]

    def record(compute: Callable[..., Any], *values: Any) -> Any:
        given = [v for v, many in zip(values, is_list, strict=True) if many]
        others = [v for v, many in zip(values, is_list, strict=True) if not many]
        return apply(compute, *others, *map(len, given), *(t for v in given for t in v))

    return record


def _kept(operator: Operator) -> dict[str, bool]:
    """Returns which arguments the node keeps for the backward, by name."""
    return dict(zip([p.name for p in operator.contract.parameters], operator.saved_inputs, strict=True))


def _saved(operator: Operator, lists: list[Parameter], plain: list[Parameter]) -> tuple[list[str], bool]:
    """Returns the names of what is saved, and whether lists follow behind."""
    contract, kept = operator.contract, _kept(operator)
    tensors = [p.name for p in plain if p.is_tensor and kept[p.name]]
    outputs = [f"_{contract.outputs[i].name}" for i in operator.saved_outputs]
    return [*tensors, *outputs], any(kept[p.name] for p in lists)


def _forward_lines(operator: Operator, lists: list[Parameter], plain: list[Parameter], counts: list[str]) -> list[str]:
    contract, kept = operator.contract, _kept(operator)
    call = ", ".join(f"{p.name}={p.name}" if p.keyword_only else p.name for p in contract.parameters)
    fixed = [f"_{o.name}" for o in contract.outputs if o.is_constant]
    integral = [f"_{o.name}" for o in contract.outputs if not o.type.family.is_floating and not o.is_constant]
    constants = [p.name for p in plain if not p.is_tensor]
    lines: list[str] = []
    for i, (p, count) in enumerate(zip(lists, counts, strict=True)):
        before = " + ".join(counts[:i]) or "0"
        lines.append(f"{p.name} = list(_flat[{before}:{before} + {count}])")
    lines.append(f"_result = _compute({call})")
    if contract.outputs:
        lines.append(f"{', '.join(f'_{o.name}' for o in contract.outputs)} = _result")
    names, _ = _saved(operator, lists, plain)
    saved = [*names, *(f"*{p.name}" for p in lists if kept[p.name])]
    if saved:
        lines.append(f"_ctx.save_for_backward({', '.join(saved)})")
    if constants or lists:
        lines.append(f"_ctx.constants = ({''.join(name + ', ' for name in [*constants, *counts])})")
    if integral:
        # By what came out, not by the family: `Shaped` may be either.
        some = f"(o for o in ({', '.join(integral)},) if not o.is_floating_point())"
        lines.append(f"_ctx.mark_non_differentiable({', '.join([*fixed, f'*{some}'])})")
    elif fixed:
        lines.append(f"_ctx.mark_non_differentiable({', '.join(fixed)})")
        lines.append(f"_ctx.{_torch.MATERIALIZE_CONSTANT_GRADIENTS} = False")  # zeros that nobody reads
    return [*lines, "return _result"]


def _backward_lines(operator: Operator, lists: list[Parameter], plain: list[Parameter], counts: list[str]) -> list[str]:
    contract, kept, declared = operator.contract, _kept(operator), operator.backward_operator
    constants = [p.name for p in plain if not p.is_tensor]
    lines: list[str] = []
    names, has_lists = _saved(operator, lists, plain)
    if names or has_lists:
        lines.append(f"{', '.join([*names, *(['*_flat'] if has_lists else [])])}, = _ctx.saved_tensors")
    if constants or lists:
        lines.append(f"{', '.join([*constants, *counts])}, = _ctx.constants")
    start = "0"
    for p, count in zip(lists, counts, strict=True):
        lines.append(f"{p.name} = _flat[{start}:{start} + {count}]" if kept[p.name] else f"{p.name} = None")
        start += f" + {count}" if kept[p.name] else ""
    values = ", ".join(p.name for p in contract.parameters)
    if declared is None:
        return [*lines, f"return _reference_gradient(({values},), _gradients, _ctx.needs_input_grad)"]
    # The gradients come in the order of the floating-point tensors among the arguments.
    if operator.computed_again:
        lines.append("if torch.is_grad_enabled():")
        lines.append(f"    _outputs = _compute_again(({values},))")
        lines += [f"    _{contract.outputs[i].name} = _outputs[{i}]" for i in operator.computed_again]
    known = {f"grad_{o.name}": f"_gradients[{i}]" for i, o in enumerate(contract.outputs)}
    known |= {o.name: f"_{o.name}" for o in contract.outputs} | {p.name: p.name for p in contract.parameters}
    arguments = ", ".join(f"{p.name}={known[p.name]}" for p in declared.contract.parameters)
    found = [f"_{o.name}" for o in declared.contract.outputs]
    lines.append(f"{', '.join(found)} = _backward({arguments})")
    gradients = {
        o.name.removeprefix("grad_"): f"_{o.name} if {o.gradient_of} is not None else None"
        if o.gradient_of
        else f"_{o.name}"
        for o in declared.contract.outputs
    }
    returned = [gradients.get(p.name, "None") for p in plain]
    spread = [f"*([None] * {count})" for count in counts]
    return [*lines, f"return {', '.join(['None', *returned, *('None' for _ in counts), *spread])}"]
