"""The node that autograd records for a call, generated for the operator's signature.

Written out for the signature, a recorded call costs half of what looping over the arguments would. It is
functorch's own kind of node, which `torch.autograd.Function.apply` makes after a detour: inside a
functorch transform the dispatcher has already brought the call down to one level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from opwright import _torch
from opwright.contract.contract import Contract, Parameter
from opwright.contract.declaration import Declaration
from opwright.dispatch.derived_gradient import DerivedGradient


class Saved(NamedTuple):
    """What the node keeps for the backward.

    Attributes:
        inputs: for each argument, whether it is kept.
        outputs: the indices of the outputs that are kept.
        computed_again: those of them that second derivatives need, for no gradient flows through them.
        derived: where the node takes the inputs whose gradient the declared backward leaves to the reference. The
            arguments that are not kept are kept in calls that need one of these gradients.
    """

    inputs: tuple[bool, ...]
    outputs: tuple[int, ...] = ()
    computed_again: tuple[int, ...] = ()
    derived: tuple[int, ...] = ()

    @classmethod
    def of(cls, declaration: Declaration, backward: Contract | None) -> Saved:
        """Returns what a declared backward needs; all inputs for the gradient that is derived."""
        contract = declaration.contract
        names = [p.name for p in contract.parameters]
        if backward is None:
            return cls((True,) * len(names))
        used = {p.name for p in backward.parameters}
        outputs = tuple(i for i, o in enumerate(contract.outputs) if o.name in used and o.name not in names)
        again = tuple(i for i in outputs if contract.outputs[i].is_constant)
        if declaration.random:  # other numbers would be drawn
            again = ()
        plain = [p.name for p in contract.parameters if p.kind != "tensors"]
        derived = tuple(1 + plain.index(name) for name in declaration.derived_gradients)
        lists = {p.name for p in contract.parameters if p.kind == "tensors"} if derived else set()
        return cls(tuple(bool(again) or name in used | lists for name in names), outputs, again, derived)

    @property
    def asks(self) -> str:
        """The expression for whether a call needs a gradient that is derived."""
        return " or ".join(f"_ctx.needs_input_grad[{at}]" for at in self.derived)


def recorder(
    declaration: Declaration,
    saved: Saved,
    derived: DerivedGradient,
    backward_function: Callable[..., Any] | None,
    backward_contract: Contract | None,
) -> Callable[..., Any]:
    """Returns `record(compute, *values)`: calls `compute` with the arguments, and records the call.

    Lists of tensors are passed on one by one behind the other arguments, because autograd only follows
    tensors that are arguments themselves.
    """
    contract = declaration.contract
    lists = [p for p in contract.parameters if p.kind == "tensors"]
    plain = [p for p in contract.parameters if p.kind != "tensors"]
    counts = [f"_count_{p.name}" for p in lists]
    # Names of arguments and outputs never start with an underscore, so the function's own do, builtins among them.
    parameters = ["_compute", *(p.name for p in plain), *counts, *(["*_flat"] if lists else [])]
    forward, backward = (
        _forward_lines(contract, saved, lists, plain, counts, backward_contract is None),
        _backward_lines(contract, saved, backward_contract, lists, plain, counts, declaration.shared_gradients),
    )
    source = "\n".join(
        [
            f"def forward(_ctx, {', '.join(parameters)}):",
            *(f"    {line}" for line in forward),
            "def backward(_ctx, *_gradients):",
            *(f"    {line}" for line in backward),
        ]
    )
    namespace: dict[str, Any] = {
        **{f"_{each.__name__}": each for each in (torch, enumerate, len, list, tuple, zip)},
        "_are_transforms_active": _torch.are_transforms_active,
        "_unwrap_dead": _torch.unwrap_dead,
        "_reference_gradient": derived.compute,
        "_compute_again": derived.compute_outputs,
        "_backward": backward_function,
    }
    exec(compile(source, f"<opwright node of {declaration.qualified_name}>", "exec"), namespace)
    base = _torch.SingleLevelFunction
    members = {name: staticmethod(namespace[name]) for name in ("forward", "backward")}
    # `grad_fn` and profiles show its name, with "Backward" behind it.
    node = type(base)(contract.subject, (base,), members | {_torch.COMPILED_AUTOGRAD_KEY: _torch.compiled_autograd_key})
    apply = node.apply
    if not lists:
        return apply
    is_list = [p.kind == "tensors" for p in contract.parameters]

    def record(compute: Callable[..., Any], *values: Any) -> Any:
        given = [v for v, many in zip(values, is_list, strict=True) if many]
        others = [v for v, many in zip(values, is_list, strict=True) if not many]
        return apply(compute, *others, *map(len, given), *(t for v in given for t in v))

    return record


def _local(output: str) -> str:
    """Returns the variable of an output, in the functions of the node."""
    return f"_out_{output}"


def _kept(contract: Contract, saved: Saved) -> dict[str, bool]:
    """Returns which arguments the node keeps for the backward, by name."""
    return contract.name_arguments(saved.inputs)


def _saved(contract: Contract, saved: Saved, lists: list[Parameter], plain: list[Parameter]) -> tuple[list[str], bool]:
    """Returns the names of what is saved, and whether lists follow behind."""
    kept = _kept(contract, saved)
    tensors = [p.name for p in plain if p.is_tensor and (kept[p.name] or saved.derived)]
    outputs = [_local(contract.outputs[i].name) for i in saved.outputs]
    return [*tensors, *outputs], any(kept[p.name] for p in lists)


def _forward_lines(
    contract: Contract,
    saved: Saved,
    lists: list[Parameter],
    plain: list[Parameter],
    counts: list[str],
    is_derived: bool,
) -> list[str]:
    kept = _kept(contract, saved)
    call = ", ".join(f"{p.name}={p.name}" if p.keyword_only else p.name for p in contract.parameters)
    fixed = [_local(o.name) for o in contract.outputs if o.is_constant]
    integral = [_local(o.name) for o in contract.outputs if not o.type.family.is_floating and not o.is_constant]
    constants = [p.name for p in plain if not p.is_tensor]
    lines: list[str] = []
    may_lack = (is_derived or bool(saved.derived)) and len(contract.outputs) > 1
    if may_lack:
        # Zeros for an output that is not used would be multiplied by its derivative, which may be infinite.
        lines.append("_ctx.set_materialize_grads(False)")
    for i, (p, count) in enumerate(zip(lists, counts, strict=True)):
        before = " + ".join(counts[:i]) or "0"
        lines.append(f"{p.name} = _list(_flat[{before}:{before} + {count}])")
    lines.append(f"_result = _compute({call})")
    if contract.outputs:
        lines.append(f"{', '.join(_local(o.name) for o in contract.outputs)} = _result")
    if may_lack and not is_derived:  # the declared backward gets zeros
        made = [_local(o.name) for o in contract.outputs]
        kinds = (f"({name}.shape, {name}.dtype, {name}.device)" for name in made)
        lines.append(f"_ctx.outputs = ({', '.join(kinds)})")
    names, _ = _saved(contract, saved, lists, plain)
    if saved.derived:
        lines.append(f"_derives = {saved.asks}")
        names = [name if kept.get(name, True) else f"{name} if _derives else None" for name in names]
    tensors = [*names, *(f"*{p.name}" for p in lists if kept[p.name])]
    if tensors:
        lines.append(f"_ctx.save_for_backward({', '.join(tensors)})")
        lines.append("_ctx.is_transformed = _are_transforms_active()")
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


def _backward_lines(
    contract: Contract,
    saved: Saved,
    declared: Contract | None,
    lists: list[Parameter],
    plain: list[Parameter],
    counts: list[str],
    shared: tuple[tuple[str, ...], ...],
) -> list[str]:
    kept = _kept(contract, saved)
    constants = [p.name for p in plain if not p.is_tensor]
    lines: list[str] = []
    names, has_lists = _saved(contract, saved, lists, plain)
    if names or has_lists:
        lines.append("_saved = _ctx.saved_tensors")
        lines.append("if _ctx.is_transformed:")
        lines.append("    _saved, _gradients = _unwrap_dead(_saved), _unwrap_dead(_gradients)")
        lines.append(f"{', '.join([*names, *(['*_flat'] if has_lists else [])])}, = _saved")
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
    if saved.computed_again:
        lines.append("if _torch.is_grad_enabled():")
        lines.append(f"    _outputs = _compute_again(({values},))")
        lines += [f"    {_local(contract.outputs[i].name)} = _outputs[{i}]" for i in saved.computed_again]
    given = "_gradients"
    if saved.derived and len(contract.outputs) > 1:
        given = "_filled"
        lines.append("_filled = [")
        lines.append("    _torch.zeros(_shape, dtype=_dtype, device=_device) if _gradient is None else _gradient")
        lines.append("    for _gradient, (_shape, _dtype, _device) in _zip(_gradients, _ctx.outputs)")
        lines.append("]")
    known = {f"grad_{o.name}": f"{given}[{i}]" for i, o in enumerate(contract.outputs)}
    known |= {o.name: _local(o.name) for o in contract.outputs} | {p.name: p.name for p in contract.parameters}
    arguments = ", ".join(f"{p.name}={known[p.name]}" for p in declared.parameters)
    found = [_local(o.name) for o in declared.outputs]
    lines.append(f"{', '.join(found)} = _backward({arguments})")
    gradients = {
        o.name.removeprefix("grad_"): _local(o.name)
        + (f" if {o.gradient_of} is not None else None" if o.gradient_of else "")
        for o in declared.outputs
    }
    gradients |= {name: gradients[first] for first, *others in shared for name in others}
    if saved.derived:
        lines.append("_asked = _enumerate(_ctx.needs_input_grad)")
        lines.append(f"_needed = _tuple(is_asked and i in {saved.derived} for i, is_asked in _asked)")
        lines.append("_derived = [None] * _len(_needed)")
        lines.append(f"if {saved.asks}:")
        lines.append(f"    _derived = _reference_gradient(({values},), _gradients, _needed)")
        gradients |= {plain[at - 1].name: f"_derived[{at}]" for at in saved.derived}
    returned = [gradients.get(p.name, "None") for p in plain]
    spread = [f"*([None] * {count})" for count in counts]
    return [*lines, f"return {', '.join(['None', *returned, *('None' for _ in counts), *spread])}"]
