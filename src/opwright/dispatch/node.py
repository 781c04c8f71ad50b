"""The node that autograd records for a call, generated for the operator's signature.

Written out for the signature, a recorded call costs half of what looping over the arguments would. It
goes to the function below `torch.autograd.Function.apply`, without that one's detour for functorch:
inside a functorch transform the dispatcher has already brought the call down to one level, where a
plain node is the right thing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from opwright.dispatch.operator import Operator


def recorder(operator: Operator) -> Callable[..., Any]:
    """Returns `record(compute, *values)`: calls `compute` with the arguments, and records the call.

    Lists of tensors are passed on one by one behind the other arguments, because autograd only follows
    tensors that are arguments themselves.
    """
    contract = operator.contract
    lists = [p for p in contract.parameters if p.kind == "tensors"]
    plain = [p for p in contract.parameters if p.kind != "tensors"]
    counts = [f"{p.name}_count" for p in lists]
    parameters = ["compute", *(p.name for p in plain), *counts, *(["*flat"] if lists else [])]
    call = ", ".join(f"{p.name}={p.name}" if p.keyword_only else p.name for p in contract.parameters)
    kept = dict(zip([p.name for p in contract.parameters], operator.saved_inputs, strict=True))
    tensors = [p.name for p in plain if p.is_tensor and kept[p.name]]
    constants = [p.name for p in plain if not p.is_tensor]
    outputs = [o.name for o in contract.outputs]
    saved_outputs = [f"result_{outputs[i]}" for i in operator.saved_outputs]
    integral = [f"result_{o.name}" for o in contract.outputs if not o.type.family.is_floating]
    forward: list[str] = []
    for i, (p, count) in enumerate(zip(lists, counts, strict=True)):
        before = " + ".join(counts[:i]) or "0"
        forward.append(f"{p.name} = list(flat[{before}:{before} + {count}])")
    forward.append(f"result = compute({call})")
    if outputs:
        targets = ", ".join(f"result_{name}" for name in outputs)
        forward.append(f"{targets} = result")
    saved = [*tensors, *saved_outputs, *(f"*{p.name}" for p in lists if kept[p.name])]
    if saved:
        forward.append(f"ctx.save_for_backward({', '.join(saved)})")
    if constants or lists:
        forward.append(f"ctx.constants = ({''.join(name + ', ' for name in [*constants, *counts])})")
    if integral:
        # By what came out, not by the family: `Shaped` may be either.
        forward.append(f"fixed = [o for o in ({', '.join(integral)},) if not o.is_floating_point()]")
        forward.append("ctx.mark_non_differentiable(*fixed)")
    forward.append("return result")

    backward: list[str] = []
    if saved:
        rest = ["*flat"] if any(kept[p.name] for p in lists) else []
        backward.append(f"{', '.join([*tensors, *saved_outputs, *rest])}, = ctx.saved_tensors")
    if constants or lists:
        backward.append(f"{', '.join([*constants, *counts])}, = ctx.constants")
    start = "0"
    for p, count in zip(lists, counts, strict=True):
        backward.append(f"{p.name} = flat[{start}:{start} + {count}]" if kept[p.name] else f"{p.name} = None")
        start += f" + {count}" if kept[p.name] else ""
    values = ", ".join(p.name if kept[p.name] or not p.is_tensor else "None" for p in contract.parameters)
    backward.append(
        f"found = _pull(gradients, ({values},), ({''.join(name + ', ' for name in saved_outputs)}))"
    )
    gradients = [f"found.get({p.name!r})" if p.is_differentiable else "None" for p in plain]
    spread = [f"*(found.get({p.name!r}) or [None] * {count})" for p, count in zip(lists, counts, strict=True)]
    backward.append(f"return {', '.join(['None', *gradients, *('None' for _ in counts), *spread])}")

    source = "\n".join(
        [
            "class Node(torch.autograd.Function):",
            "    @staticmethod",
            f"    def forward(ctx, {', '.join(parameters)}):",
            *(f"        {line}" for line in forward),
            "    @staticmethod",
            "    def backward(ctx, *gradients):",
            *(f"        {line}" for line in backward),
        ]
    )
    namespace: dict[str, Any] = {"torch": torch, "_pull": operator.pull}
    exec(compile(source, f"<opwright node of {operator.declaration.qualified_name}>", "exec"), namespace)
    node = namespace["Node"]
    node.__name__ = node.__qualname__ = f"{contract.subject}_node"
    apply = super(torch.autograd.Function, node).apply
    if not lists:
        return apply
    is_list = [p.kind == "tensors" for p in contract.parameters]

    def record(compute: Callable[..., Any], *values: Any) -> Any:
        given = [v for v, many in zip(values, is_list, strict=True) if many]
        others = [v for v, many in zip(values, is_list, strict=True) if not many]
        return apply(compute, *others, *map(len, given), *(t for v in given for t in v))

    return record
