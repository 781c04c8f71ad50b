"""Calls on distributed tensors (`torch.distributed.tensor.DTensor`): a rule is chosen, the shards go to the operator.

The operator stays one opaque operator on each rank: its kernel gets the local tensors, its gradient is that of the
local call. A choice is made once for each combination of placements, shapes and options.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from opwright import _torch
from opwright.dispatch.derived_gradient import place_for_node
from opwright.dispatch.exchange import Ranks, exchange_rule
from opwright.dispatch.fake import pack, unpack
from opwright.dispatch.record import Operator, keep
from opwright.dispatch.reference import conforming, tensors_in
from opwright.dispatch.registration import Registration
from opwright.dispatch.sharding_rules import Rule, Signature, names, signature_of, word_of
from opwright.errors import ShardingError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_is_compiling = torch.compiler.is_compiling


class Plan(NamedTuple):
    """How one call runs on the ranks of a mesh.

    Attributes:
        inputs: the placements that the tensors are to have, one for each axis of the mesh.
        moves: whether any tensor has others.
        outputs: the specs of the results.
        rules: for each axis of the mesh.
        takes_part: whether this rank belongs to the mesh.
        codes: the numbers of the choices among the arguments, with their places.
        compute: what runs in place of the operator on each rank where these exchange numbers within the call.
    """

    mesh: Any
    inputs: tuple[tuple[Placement, ...], ...]
    moves: bool
    outputs: tuple[Any, ...]
    rules: tuple[Rule, ...]
    takes_part: bool
    codes: tuple[tuple[int, int], ...]
    compute: Callable[[Sequence[Any]], Any] | None = None


def has_sharded(values: Sequence[Any]) -> bool:
    """Returns whether there is a distributed tensor among arguments. Cheap in programs without any."""
    kind = _kind()
    if kind is None:
        return False
    for value in values:
        if type(value) is kind:
            return True
        if isinstance(value, (list, tuple)) and has_sharded(value):
            return True
    return False


def _kind() -> Any:
    """Returns the class of distributed tensors; None where the program has not imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else getattr(module, "DTensor", None)  # amid its import there is none


def install(registration: Registration) -> None:
    """Lets the dispatcher's entry of an operator take distributed tensors, if the program can have any."""
    if registration.takes_sharded or _kind() is None:
        return
    registration.takes_sharded = True
    try:
        handlers = names().handlers
    except ShardingError:
        return  # a call on distributed tensors raises it

    def handle(op: Any, args: Sequence[Any], kwargs: Any) -> Any:
        current = registration.current
        return run(current, current.normalize(*args, **kwargs))

    handlers[registration.public] = handle


def call(operator: Operator, values: tuple[Any, ...]) -> Any:
    """Calls an operator on distributed tensors, outside the dispatcher if nobody else looks on."""
    if (
        operator.contract.mutated
        or _is_compiling()
        or _torch.count_dispatch_modes()
        or _torch.count_function_modes()
        or _torch.are_transforms_active()
        or _torch.is_any_autocast_enabled()
        or _torch.is_forward_mode()
    ):
        install(operator.registration)
        return operator.arguments.pass_to(operator.registration.entry(), values)
    if torch.is_grad_enabled():
        for tensor in tensors_in(values):
            if tensor.requires_grad:
                return operator.gradient.record_node(lambda *_, **__: run(operator, values, True), *values)
    return run(operator, values, True)


def run(operator: Operator, values: Sequence[Any], is_direct: bool = False) -> Any:
    """Runs an operator on the shards of distributed tensors, below autograd.

    Args:
        operator: the operator.
        values: its arguments in schema order.
        is_direct: whether kernels may be called past the dispatcher.

    Raises:
        ShardingError: there is no way to run it on these.
    """
    kind = names().DTensor
    key: list[Any] = []
    local: list[Any] = []
    for value in values:
        if type(value) is kind:
            key.append(value._spec)
            value = value._local_tensor
            is_direct = is_direct and type(value) is torch.Tensor
        elif isinstance(value, tuple):
            key.append([])  # as for a list, no plan is kept
        else:
            key.append(value)
        local.append(value)
    try:
        plan = operator.plans.get(tuple(key))
    except TypeError:  # a list, or a symbolic size
        plan, key = None, []
    if plan is None:
        is_kept = bool(key) and not any(isinstance(value, torch.Tensor) for value in key)
        values = place(operator, values)
        plan = make_plan(operator, values)
        if is_kept:
            keep(operator.plans, tuple(key), plan)
        local, is_direct = _local(values), False
    if plan.moves:
        local, is_direct = _move(operator, values, plan), False
    if not plan.takes_part:
        device = next(tensors_in(local)).device
        made = pack([torch.empty(0, dtype=spec.tensor_meta.dtype, device=device) for spec in plan.outputs])
    elif plan.compute is not None:
        made = plan.compute(local)
    elif is_direct:
        for i, code in plan.codes:
            local[i] = code
        try:
            made = operator.kernel(*local)
        except RuntimeError as error:
            raise operator.explain(error, values) from None
    else:
        made = operator.arguments.pass_to(operator.function, local)
    # The constructor of a subclass costs 2 us more, for programs that are being exported.
    make = partial(kind.__new__, kind) if is_direct else kind
    if len(plan.outputs) == 1:
        return make(made, plan.outputs[0], requires_grad=False)
    made = unpack(made, operator.contract)
    return pack([make(m, spec, requires_grad=False) for m, spec in zip(made, plan.outputs, strict=True)])


def _local(values: Sequence[Any]) -> list[Any]:
    return [
        _local(value) if isinstance(value, list) else value._local_tensor if isinstance(value, torch.Tensor) else value
        for value in values
    ]


def _move(operator: Operator, values: Sequence[Any], plan: Plan) -> list[Any]:
    """Returns the arguments of this rank, moved between the ranks as a plan wants them."""
    t = names()
    moved = []
    for tensor, placements in zip(tensors_in(values), plan.inputs, strict=True):
        local, held = tensor._local_tensor, tensor._spec
        whole = t.Spec(plan.mesh, (t.Replicate(),) * plan.mesh.ndim, tensor_meta=held.tensor_meta)
        if _usual_order(tensor) != held.placements:
            local, held = t.redistribute(local, held, whole), whole
        wanted = t.Spec(plan.mesh, placements, tensor_meta=held.tensor_meta)
        moved.append(local if held.placements == placements else t.redistribute(local, held, wanted))
    return signature_of(operator.contract, values).arrange(moved)


def _redistribute(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Returns a tensor that is placed otherwise; gradients flow through."""
    mesh = tensor.device_mesh
    if _usual_order(tensor) != tuple(tensor.placements):
        tensor = tensor.redistribute(mesh, [names().Replicate()] * mesh.ndim)
    return tensor.redistribute(mesh, placements)


def place(operator: Operator, values: Sequence[Any]) -> list[Any]:
    """Returns arguments with plain tensors replicated where that is meant.

    Autograd makes plain zeros for a result that had no gradient. Other plain tensors may differ between ranks.

    Raises:
        ShardingError: a plain tensor that is not a number, or tensors on different meshes.
    """
    t, name = names(), operator.declaration.name
    slots = signature_of(operator.contract, values).slots
    sharded = [x for x in tensors_in(values) if isinstance(x, t.DTensor)]
    mesh = sharded[0].device_mesh
    for slot, x in zip(slots, tensors_in(values), strict=True):
        if isinstance(x, t.DTensor):
            if x.device_mesh != mesh:
                raise ShardingError(
                    name,
                    "its arguments are on different meshes",
                    rows=[
                        (s.label, str(getattr(v, "device_mesh", "none")))
                        for s, v in zip(slots, tensors_in(values), strict=True)
                    ],
                    hint="distribute all of them on one mesh",
                )
        elif x.ndim and operator.declaration.forward is None and not t.takes_plain():
            raise ShardingError(
                name,
                f"`{slot.label}` is a plain tensor among distributed ones",
                rows=[(s.label, type(v).__name__) for s, v in zip(slots, tensors_in(values), strict=True)],
                hint=f"`distribute_tensor({slot.label}, mesh, [Replicate()])`, if it is the same on every rank",
            )

    def make(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [make(v) for v in value]
        return _replicate(value, mesh) if isinstance(value, torch.Tensor) else value

    return [make(value) for value in values]


def _replicate(value: torch.Tensor, mesh: Any) -> DTensor:
    t = names()
    if isinstance(value, t.DTensor):
        return value
    return t.DTensor.from_local(value, mesh, [t.Replicate()] * mesh.ndim, run_check=False)


# --- the choice ---------------------------------------------------------------------------------------


def make_plan(operator: Operator, values: Sequence[Any], is_differentiated: bool = False) -> Plan:
    """Chooses a rule for each axis of the mesh: the one that moves the fewest bytes.

    Args:
        operator: the operator.
        values: its arguments; all of the tensors are distributed.
        is_differentiated: whether gradients are to flow through the call.

    Raises:
        ContractError: the arguments break the contract.
        ShardingError: there is no rule that leaves mutated arguments where they are.
    """
    t, contract = names(), operator.contract
    if operator.declaration.random:
        raise ShardingError(
            operator.declaration.name,
            "it draws random numbers, and shards would draw the same ones",
            hint="call it on `x.to_local()`, with a generator of each rank",
        )
    bindings = contract.bind(contract.name_arguments(values))
    signature = signature_of(contract, values)
    tensors = list(tensors_in(values))
    mesh = tensors[0].device_mesh
    held = [_usual_order(x) for x in tensors]
    rules: list[Rule] = []
    for axis in range(mesh.ndim):
        now = [placements[axis] for placements in held]
        offered = operator.rules.offer(signature, tensors, now)
        exchanged = exchange_rule(operator, signature, now)
        if is_differentiated:
            offered = [rule for rule in offered if is_differentiable(rule, signature)]
        elif exchanged is not None:
            offered = [exchanged, *offered]
        costs = [_cost(rule, now, tensors, mesh.size(axis), signature) for rule in offered]
        best = min(range(len(offered)), key=costs.__getitem__)
        if math.isinf(costs[best][0]):
            raise _stuck(operator, signature, now, offered)
        rules.append(offered[best])
    rules = _settle(rules, operator.rules.replicate(signature), tensors, mesh)
    inputs = tuple(tuple(rule.inputs[i] for rule in rules) for i in range(len(tensors)))
    for slot, placements, wanted in zip(signature.slots, held, inputs, strict=True):
        if slot.parameter.mutated and placements != wanted:
            raise _stuck(operator, signature, [each[0] for each in held], rules)
    outputs = []
    for i, output in enumerate(contract.outputs):
        known = {getattr(a, "name", None) for a in output.type.axes}.isdisjoint(contract.data_dependent)
        if not known:
            raise ShardingError(
                operator.declaration.name,
                "the size of a result depends on the data",
                hint="call it on `x.full_tensor()`",
            )
        shape = contract.output_shape(output, bindings)
        meta = t.TensorMeta(torch.Size(shape), names().strides_of(shape), contract.output_dtype(output, bindings))
        outputs.append(t.Spec(mesh, tuple(rule.outputs[i] for rule in rules), tensor_meta=meta))
    moves = any(x.placements != p or h != x.placements for x, h, p in zip(tensors, held, inputs, strict=True))
    pairs = enumerate(zip(contract.parameters, values, strict=True))
    codes = tuple((i, p.choices.index(v)) for i, (p, v) in pairs if p.kind == "choice")
    dims = tuple(axis for axis, rule in enumerate(rules) if rule.exchanges)
    compute = None
    if dims:
        axis, function = operator.exchange_of
        compute = conforming(contract, partial(function, Ranks(bindings.sizes[axis], mesh, dims)))
    return Plan(mesh, inputs, moves, tuple(outputs), tuple(rules), mesh.get_coordinate() is not None, codes, compute)


def _usual_order(tensor: DTensor) -> tuple[Placement, ...]:
    """Returns the placements of a tensor; none that a rule has, where its shards lie in another order than usual."""
    spec = tensor._spec
    order = getattr(spec, "shard_order", None)
    if order is not None and order != type(spec).compute_default_shard_order(spec.placements):
        return (names().Partial("product"),) * len(spec.placements)
    return tuple(spec.placements)


def _cost(
    rule: Rule, now: Sequence[Placement], tensors: Sequence[Any], ranks: int, signature: Signature
) -> tuple[float, int]:
    """Returns how many bytes a rank sends and how many tensors change; infinity where a rule cannot be followed."""
    t = names()
    total, changes = 0.0, 0
    for slot, x, held, wanted in zip(signature.slots, tensors, now, rule.inputs, strict=True):
        if held == wanted:
            continue
        if slot.parameter.mutated or isinstance(wanted, t.Partial):
            return math.inf, 0
        changes += 1
        if not isinstance(held, t.Replicate):
            size = x.numel() * x.element_size() * (ranks - 1) / ranks
            to_shard = isinstance(wanted, t.Shard)
            total += size / ranks if isinstance(held, t.Shard) and to_shard else size
            total += size if isinstance(held, t.Partial) and not to_shard else 0
    return total, changes


def _settle(rules: Sequence[Rule], replicated: Rule, tensors: Sequence[Any], mesh: Any) -> list[Rule]:
    """Returns the rules for the axes of a mesh, with replication in place of those that do not go with the others.

    A result is reduced in one way alone, as a sum or as a maximum; and there is no maximum of no elements.
    """
    t = names()
    found: list[Rule] = []
    for rule in rules:
        reductions = zip(*(r.outputs for r in [*found, rule]), strict=True)
        is_mixed = any(len({p for p in each if isinstance(p, t.Partial)}) > 1 for each in reductions)
        found.append(replicated if is_mixed else rule)
    for axis, rule in enumerate(found):
        if rule.needs_elements and any(
            _has_empty(x, [r.inputs[i] for r in found], mesh) for i, x in enumerate(tensors)
        ):
            found[axis] = replicated
    return found


def _has_empty(tensor: Any, placements: Sequence[Placement], mesh: Any) -> bool:
    """Returns whether a rank has no elements of a tensor."""
    sizes = [{size} for size in tensor.shape]
    for axis, placement in enumerate(placements):
        if isinstance(placement, names().Shard):
            sizes[placement.dim] = {part for size in sizes[placement.dim] for part in _chunks(size, mesh.size(axis))}
    return any(0 in each for each in sizes)


def _chunks(size: int, ranks: int) -> list[int]:
    each = -(-size // ranks)
    return [max(min(each, size - rank * each), 0) for rank in range(ranks)]


def _stuck(
    operator: Operator, signature: Signature, now: Sequence[Placement], offered: Sequence[Rule]
) -> ShardingError:
    pairs = list(zip(signature.slots, now, strict=True))
    written = next(slot for slot, p in pairs if slot.parameter.mutated)
    return ShardingError(
        operator.declaration.name,
        f"it writes into `{written.label}`, which cannot be moved, and no rule takes it as it is",
        rows=[(slot.label, word_of(p)) for slot, p in pairs] + [("rule", rule.describe(signature)) for rule in offered],
        hint=f"`{written.label}.redistribute(placements=[Replicate()])` before the call",
    )


# --- the derived gradient -----------------------------------------------------------------------------


def redistribute(operator: Operator, values: Sequence[Any]) -> Sequence[Any]:
    """Returns arguments with shards of reduced axes gathered; gradients flow through.

    PyTorch's rules for the operators of a reference may fail on those.
    """
    if not has_sharded(values):
        return values
    values = place(operator, values)
    plan = make_plan(operator, values, is_differentiated=True)
    moved = [_redistribute(x, p) for x, p in zip(tensors_in(values), plan.inputs, strict=True)]
    return signature_of(operator.contract, values).arrange(moved)


def differentiate(
    operator: Operator,
    values: Sequence[Any],
    gradients: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
) -> tuple[torch.Tensor | None, ...] | None:
    """Returns the gradients of a call on distributed tensors, each rank differentiating its part; else None.

    Args:
        operator: the operator.
        values: its arguments.
        gradients: those of its results.
        needed: which arguments of its node need a gradient.
    """
    if not has_sharded([*values, *gradients]):
        return None
    t = names()
    sharded = next(x for x in tensors_in([*values, *gradients]) if isinstance(x, t.DTensor))
    mesh = sharded.device_mesh
    values = [
        [_replicate(v, mesh) for v in value]
        if isinstance(value, (list, tuple))
        else _replicate(value, mesh)
        if isinstance(value, torch.Tensor)
        else value
        for value in values
    ]
    plan = make_plan(operator, values, is_differentiated=True)
    signature = signature_of(operator.contract, values)
    tensors = list(tensors_in(values))
    backward = [tuple(gradient_of_input(rule, i) for rule in plan.rules) for i in range(len(tensors))]
    local = [
        _redistribute(x, p).to_local(grad_placements=g) for x, p, g in zip(tensors, plan.inputs, backward, strict=True)
    ]
    cotangents = []
    for gradient, spec in zip(gradients, plan.outputs, strict=True):
        if gradient is not None:
            wanted = [t.Replicate() if isinstance(p, t.Partial) else p for p in spec.placements]
            gradient = _replicate(gradient, mesh).redistribute(mesh, wanted).to_local(grad_placements=spec.placements)
        cotangents.append(gradient)
    found = operator.gradient.derived.compute(signature.arrange(local), cotangents, needed)
    where = place_for_node(operator.contract, signature.arrange(list(zip(tensors, backward, strict=True))))
    return tuple(
        None
        if gradient is None
        else t.DTensor.from_local(
            gradient, mesh, place[1], run_check=False, shape=place[0].shape, stride=names().strides_of(place[0].shape)
        )
        for gradient, place in zip(found, where, strict=True)
    )


def is_differentiable(rule: Rule, signature: Signature) -> bool:
    """Returns whether the gradients of the ranks make that of the whole.

    Which rank has a maximum, none knows. A result that every rank has would be counted once for each.
    """
    t = names()
    outputs = zip(signature.contract.outputs, rule.outputs, strict=True)
    present = [p for o, p in outputs if o.gradient_of not in signature.absent]
    return _is_whole(rule) or all(p == t.Partial() or isinstance(p, t.Shard) for p in present)


def _is_whole(rule: Rule) -> bool:
    return all(p == names().Replicate() for p in (*rule.inputs, *rule.outputs))


def gradient_of_input(rule: Rule, index: int) -> Placement:
    """Returns how the gradient of an argument is placed: a sum over the ranks, where each used all of it."""
    t = names()
    placement = rule.inputs[index]
    if isinstance(placement, t.Shard):
        return placement
    return t.Replicate() if _is_whole(rule) or isinstance(placement, t.Partial) else t.Partial()
