"""The check of the rules for distributed tensors: what simulated ranks give against what one process gives."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from opwright._torch import find_simulation
from opwright.contract.sweep import Case
from opwright.dispatch.exchange import exchange_rule
from opwright.dispatch.fake import unpack
from opwright.dispatch.reference import conforming
from opwright.dispatch.sharding import gradient_of_input, is_differentiable
from opwright.dispatch.sharding_rules import Rule, Signature, join, names, signature_of, split
from opwright.errors import ShardingError
from opwright.verify.checks.finding import Finding, Skipped, first_line
from opwright.verify.checks.gradients import has_gradient, seed_like
from opwright.verify.target import Target
from opwright.verify.tensors import tensors_of

_RANKS = {"default": (3,), "full": (2, 3)}  # shards on three are uneven, and some of them empty
_CASES = {"default": 1, "full": 6}
_MAX_WAIT_S = 60  # of one rank for the others


def sharding(target: Target) -> Iterator[Finding]:
    """Every rule for distributed tensors gives, rank by rank, what one process gives, gradients included."""
    operator = target.operator
    try:
        names()
    except ShardingError as error:
        raise Skipped(f"{error.rule}: {error.rows[0][1]}") from None
    cases = sorted(target.small_cases(torch.float64), key=lambda case: case.label != "base")
    for case in cases[: _CASES[target.effort]]:
        signature = signature_of(operator.contract, case.values)
        rules = operator.rules.offer(signature, tensors_of(case.values))
        wanted = _Call(target, target.inputs(case))
        for ranks in _RANKS[target.effort]:
            for rule in rules:
                yield _hold(target, case, rule, ranks, wanted)
            if (exchange := exchange_rule(operator, signature)) is not None:
                yield _hold_exchange(target, case, exchange, ranks, wanted)
        if target.effort == "full":
            yield from _simulate(target, case, rules, wanted)


class _Call:
    """One call on plain tensors, by one process or by one rank.

    Attributes:
        results: the outputs, then the arguments that it wrote into.
        gradients: of each tensor among the arguments, None where there is none.
    """

    def __init__(self, target: Target, values: Sequence[Any], cotangents: Sequence[Any] | None = None) -> None:
        tensors = tensors_of(values)
        is_recorded = not target.is_derivative_of_reference and has_gradient(target)
        for tensor in tensors:
            tensor.requires_grad_(is_recorded and tensor.is_floating_point())
        outputs = target.call(values)
        made = (None if o is None else seed_like(o) for o in outputs)
        self.cotangents = list(made if cotangents is None else cotangents)
        self.results = [*outputs, *target.written(values)]
        self.results = [None if r is None else r.detach() for r in self.results]
        self.gradients: list[torch.Tensor | None] = [None] * len(tensors)
        pairs = zip(outputs, self.cotangents, strict=True)
        ends = [(o, c) for o, c in pairs if o is not None and o.requires_grad and o.shape == c.shape]
        leaves = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        if ends and leaves:
            made = torch.autograd.grad(
                [o for o, _ in ends], [tensors[i] for i in leaves], [c for _, c in ends], allow_unused=True
            )
            for i, gradient in zip(leaves, made, strict=True):
                self.gradients[i] = gradient


def _hold(target: Target, case: Case, rule: Rule, ranks: int, wanted: _Call) -> Finding:
    t, operator = names(), target.operator
    signature = signature_of(operator.contract, case.values)
    label = f"{case}, {rule.describe(signature)}, {ranks} ranks"
    given = tensors_of(target.inputs(case))
    pieces = [split(x, p, ranks) for x, p in zip(given, rule.inputs, strict=True)]
    if rule.needs_elements and any(part.numel() == 0 for each in pieces for part in each):
        return Finding(label)  # no call takes this rule
    cotangents = [
        [None] * ranks if c is None else split(c, p if isinstance(p, t.Shard) else t.Replicate(), ranks)
        for c, p in zip(wanted.cotangents, rule.outputs, strict=True)
    ]
    try:
        values = [signature.arrange([each[rank].detach().clone() for each in pieces]) for rank in range(ranks)]
        calls = [_Call(target, own, [each[rank] for each in cotangents]) for rank, own in enumerate(values)]
        message = _compare(target, signature, rule, calls, wanted)
    except Exception as error:  # whatever a kernel may raise on such parts
        for rank in range(ranks):
            parts, seeds = [each[rank] for each in pieces], [each[rank] for each in cotangents]
            if any(part.numel() == 0 for part in parts) and _is_refused(target, signature, parts, seeds):
                return Finding(label)  # an empty part, which the operator does not take
        return Finding(label, f"raised {type(error).__name__}: {first_line(error)}")
    return Finding(label, message and message + _reason(signature, rule))


def _is_refused(target: Target, signature: Signature, parts: Sequence[torch.Tensor], cotangents: Sequence[Any]) -> bool:
    """Returns whether the reference raises on the parts of a rank, or its backward does, as that of pixel_shuffle."""
    try:
        values = signature.arrange([part.detach().clone() for part in parts])
        _Call(replace(target, call=target.reference), values, cotangents)
    except Exception:  # whatever a reference may raise to refuse
        return True
    return False


class _Meeting:
    """Ranks in threads, each with a part of the calls of the function of `@name.exchange`."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.given: list[Any] = [None] * count

    def reduce(self, rank: int, how: str, numbers: Sequence[torch.Tensor]) -> Any:
        joined = torch.stack(tuple(numbers))
        self.given[rank] = how, joined
        self.barrier.wait(_MAX_WAIT_S)
        if len({(how, each.shape, each.dtype) for how, each in self.given}) > 1:
            raise RuntimeError("the ranks exchange different things")
        reduced = {"sum": torch.sum, "max": torch.amax}[how](torch.stack([each for _, each in self.given]), 0)
        self.barrier.wait(_MAX_WAIT_S)
        return reduced.unbind() if len(numbers) > 1 else reduced[0]


def _hold_exchange(target: Target, case: Case, rule: Rule, ranks: int, wanted: _Call) -> Finding:
    """Runs the function of `@name.exchange` on the parts of all ranks at once.

    Its gradient is an operator of its own, or that of whole rows.
    """
    operator = target.operator
    contract, (_, function) = operator.contract, operator.exchange_of
    signature = signature_of(contract, case.values)
    label = f"{case}, {rule.describe(signature)}, exchanging among {ranks} ranks"
    given = tensors_of(target.inputs(case))
    pieces = [split(x, p, ranks) for x, p in zip(given, rule.inputs, strict=True)]
    at = next(i for i, p in enumerate(rule.inputs) if isinstance(p, names().Shard))
    sizes = [part.shape[rule.inputs[at].dim] for part in pieces[at]]
    meeting = _Meeting(ranks)

    def run(rank: int) -> SimpleNamespace:
        try:
            with torch.no_grad():
                values = signature.arrange([each[rank].detach().clone() for each in pieces])
                place = SimpleNamespace(  # with the names of `Ranks`
                    size=sum(sizes),
                    start=sum(sizes[:rank]),
                    sum=lambda *numbers: meeting.reduce(rank, "sum", numbers),
                    max=lambda *numbers: meeting.reduce(rank, "max", numbers),
                )
                outputs = unpack(conforming(contract, partial(function, place))(values), contract)
                return SimpleNamespace(results=[*outputs, *target.written(values)], gradients=[None] * len(given))
        except BaseException:
            meeting.barrier.abort()
            raise

    try:
        with ThreadPoolExecutor(ranks) as pool:
            runs = [pool.submit(run, rank) for rank in range(ranks)]
        failed = [each.exception() for each in runs if each.exception() is not None]
        # A barrier is broken by the failure of another rank, or by one that never came.
        for error in sorted(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            if isinstance(error, threading.BrokenBarrierError):
                return Finding(label, "some ranks exchange numbers more often than others")
            raise error
        message = _compare(target, signature, rule, [each.result() for each in runs], wanted)
    except Exception as error:  # whatever the function may raise on such parts
        return Finding(label, f"raised {type(error).__name__}: {first_line(error)}")
    return Finding(label, message and message + _reason(signature, rule))


def _compare(target: Target, signature: Signature, rule: Rule, calls: Sequence[_Call], wanted: _Call) -> str:
    contract = target.operator.contract
    least_eps = _least_eps(target)
    slots = list(zip(signature.slots, rule.inputs, strict=True))
    written = [(f"`{slot.label}`", p) for slot, p in slots if slot.parameter.mutated]
    placed = [(f"`{o.name}`", p) for o, p in zip(contract.outputs, rule.outputs, strict=True)] + written
    parts = list(zip(*(call.results for call in calls), strict=True))
    whole = list(wanted.results)
    if is_differentiable(rule, signature):
        placed += [(f"the gradient of `{slot.label}`", gradient_of_input(rule, i)) for i, (slot, _) in enumerate(slots)]
        parts += zip(*(call.gradients for call in calls), strict=True)
        whole += wanted.gradients
    for (name, placement), made, expected in zip(placed, parts, whole, strict=True):
        if expected is None or any(m is None for m in made):
            continue
        try:
            joined = join(made, placement)
        except RuntimeError:
            return f"no {name} can be made"
        if not all(_is_same(each, expected, least_eps) for each in joined):
            return f"{name} is not what one process gives"
    return ""


def _reason(signature: Signature, rule: Rule) -> str:
    t = names()
    pairs = list(zip(signature.slots, rule.inputs, strict=True))
    summed = [f"`{slot.label}`" for slot, p in pairs if isinstance(p, t.Partial)]
    sharded = [f"`{slot.label}` along dimension {p.dim}" for slot, p in pairs if isinstance(p, t.Shard)]
    if summed:
        return f": the operator is not linear in {' and '.join(summed)}"
    return f" from shards of {' and of '.join(sharded)}" if sharded else ""


def _least_eps(target: Target) -> float:
    """Returns what float64 results are rounded to: a cast in the reference, or parts of an input that has one dtype."""
    families = [p.type.family for p in target.operator.contract.tensors]
    singles = [f.dtypes[0] for f in families if f.is_single and f.is_floating]
    singles += [torch.float32] if target.casts_to_single else []
    return max((torch.finfo(dtype).eps for dtype in singles), default=0.0)


def _is_same(got: torch.Tensor, wanted: torch.Tensor, least_eps: float) -> bool:
    """Whether two results differ by rounding alone: sums over ranks are in another order."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point() or not wanted.numel():
        return torch.equal(got, wanted)
    # Half of the digits: rounding takes far fewer, a wrong rule all of them.
    tolerance = math.sqrt(max(torch.finfo(wanted.dtype).eps, least_eps))
    largest = float(wanted.nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(got, wanted, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


# --- PyTorch's own simulation and its validator ---------------------------------------------------------


def _simulate(target: Target, case: Case, rules: Sequence[Rule], wanted: _Call) -> Iterator[Finding]:
    """Runs a case on distributed tensors of two simulated ranks, and asks PyTorch's validator of placements.

    To import the validator takes more than a second.
    """
    from torch import distributed

    try:
        t = find_simulation()
    except ImportError:
        return
    operator = target.operator
    contract = operator.contract
    if distributed.is_initialized() or contract.mutated or any(o.gradient_of for o in contract.outputs):
        return  # the validator looks at results alone, all of which are there
    signature = signature_of(contract, case.values)
    args, kwargs = contract.split_arguments(case.values)
    whole = wanted.results[0] if len(contract.outputs) == 1 else list(wanted.results)
    found = []
    with torch.no_grad():
        distributed.init_process_group("fake", rank=0, world_size=2)
        try:
            with t.LocalTensorMode(2):  # nothing is yielded within, where tensors are those of several ranks
                mesh = t.init_device_mesh("cpu", (2,))
                for rule in rules:
                    is_right, why = t.validate_aten_combination(
                        operator.public, args, kwargs, whole, (rule.inputs, rule.outputs), 2, mesh
                    )
                    if is_right is not None:
                        label = f"{case}, {rule.describe(signature)}, PyTorch's validator"
                        found.append(Finding(label, "" if is_right else first_line(why)))
        finally:
            distributed.destroy_process_group()
    yield from found
