"""What a declaration has become: the record that `@operator` leaves, and that the other commands read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from opwright.contract.contract import Contract
from opwright.contract.cost import Cost, default_cost
from opwright.contract.declaration import Declaration
from opwright.contract.schema import schema_of
from opwright.dispatch.arguments import Arguments
from opwright.dispatch.autograd import Gradient
from opwright.dispatch.backward_trace import BackwardTraces
from opwright.dispatch.reference import Reference
from opwright.dispatch.registration import Registration
from opwright.errors import AxisError

_MAX_KEPT = 1024  # choices for distributed tensors: options may have another value in each call


@dataclass(eq=False, repr=False)
class Operator:
    """A declared operator.

    Attributes:
        declaration: what was declared.
        registration: what is registered with the dispatcher.
        arguments: the ways to pass arguments.
        reference: the ways to run the reference.
        gradient: how calls are recorded for a gradient.
        explain: turns an error from below and the arguments of its call into the one to raise.
        call_general: calls the dispatcher's own entry, with the arguments in schema order.
        call_with_out: the same with `out=`.
        function: the Python function, the fastest way to call it.
        backward_operator: the operator of the declared backward, if there is one.
        install_backward: makes an operator of the reference of a backward, with the local names that annotations may use.
        rules: how it runs on distributed tensors: its `Rules`.
        sharding_rules: the author's function that gives them, if there is one.
        exchange_of: the axis that may be sharded although it is reduced, and the author's function for its shards.
        plans: the choices that were made from them.
    """

    declaration: Declaration
    registration: Registration
    arguments: Arguments
    reference: Reference
    gradient: Gradient
    explain: Callable[[Exception, Sequence[Any]], Exception]
    call_general: Callable[[Sequence[Any]], Any]
    call_with_out: Callable[[Sequence[Any], Any], Any]
    function: Callable[..., Any]
    backward_operator: Operator | None = None
    install_backward: Callable[..., Any] | None = None
    rules: Any = None
    sharding_rules: Callable[..., Any] | None = None
    exchange_of: tuple[str, Callable[..., Any]] | None = None
    plans: dict[tuple, Any] = field(default_factory=dict)
    _samples: Callable[[], Any] | None = None
    _sweep: list[dict[str, Sequence[Any]]] = field(default_factory=list)
    _cost: Callable[..., Any] | None = None
    _baseline: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        return f"<operator {schema_of(self.contract, self.declaration.qualified_name)}>"

    @property
    def contract(self) -> Contract:
        """Its arguments and outputs."""
        return self.declaration.contract

    @property
    def public(self) -> Any:
        """`torch.ops.ns.name.default`."""
        return self.registration.public

    @property
    def kernel(self) -> Callable[..., Any]:
        """The same kernels without autograd, functorch and autocast in front."""
        return self.registration.kernel

    @property
    def normalize(self) -> Callable[..., tuple[Any, ...]]:
        """Turns the arguments of a call into a tuple in schema order."""
        return self.arguments.normalize

    @property
    def traces(self) -> BackwardTraces:
        """The backwards that were derived from the reference."""
        return self.gradient.derived.traces

    # --- what a declaration adds ---------------------------------------------------------------------

    def backward(self, reference: Callable[..., Any]) -> Any:
        """Declares the backward by its reference; returns the function of the operator `ns::name_backward`.

        The reference takes the gradient of each differentiable output, then whichever inputs, outputs and
        options it needs, by their names; what it names is what is kept for it. It returns a gradient for
        each floating-point tensor input, in order.

        Raises:
            BackwardError: its parameters do not fit this operator.
        """
        assert self.install_backward is not None
        return self.install_backward(reference, sys._getframe(1).f_locals)

    def samples(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Declares test inputs: a function that yields tuples of arguments, or `(args, kwargs)`."""
        self._samples = function
        return function

    def sweep(self, *several: Mapping[str, Sequence[Any]], **axes: Sequence[Any]) -> None:
        """Declares the sizes of axes that benchmarks go through: `sweep(n=[1024, 4096])`.

        Arguments may be named as well: `keep=[0, 1]` goes through values, `bias=[None]` leaves an optional one out.
        Sizes that belong together take a sweep each: `sweep({"k": [64], "n": [64]}, {"k": [256], "n": [256]})`.
        """
        self._sweep = [dict(each) for each in (*several, axes) if each]

    def cost(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Declares the cost of a call: a function of the arguments that returns `(bytes, flop)`.

        `torch.utils.flop_counter` counts these operations as well.
        """
        from torch.utils.flop_counter import flop_registry, register_flop_formula  # 4 ms, for those who declare a cost

        self._cost = function

        def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
            return self.cost_of(self.arguments.normalize(*args, **kwargs), ()).flop or 0

        packet = self.public.overloadpacket
        flop_registry.pop(packet, None)  # of a declaration before this one
        register_flop_formula(packet, get_raw=True)(count)
        return function

    def baseline(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Declares what people write without this operator, to be measured against; by default the reference.

        A reference is written for accuracy; comparing speed with it would flatter the kernel.
        """
        self._baseline = function
        return function

    def sharding(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Declares how the operator runs on distributed tensors, in place of the rules that are derived.

        The function takes the arguments, tensors without data, and returns rules for one axis of a mesh: pairs of the
        placements of arguments by name, those left out being replicated, and that of each result. Replication is
        always among the rules. `opwright verify --check sharding` checks them.
        """
        self.sharding_rules = function
        self.plans.clear()
        if self.backward_operator is not None:
            self.backward_operator.plans.clear()
        return function

    def exchange(self, axis: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Declares how the operator runs where a named axis is sharded that it reduces.

        The decorated function is called on each rank with the `Ranks` that hold the shards and the arguments, plain
        tensors: the shards of those that have the axis, the whole of the others. It returns the shards of results
        that have the axis, and the whole of the others.

        Raises:
            AxisError: no tensor argument has such an axis.
        """
        if not any(getattr(each, "name", None) == axis for p in self.contract.tensors for each in p.type.axes):
            raise AxisError(self.declaration.name, f"`exchange`: no tensor argument has an axis `{axis}`")

        def keep(function: Callable[..., Any]) -> Callable[..., Any]:
            self.exchange_of = axis, function
            self.plans.clear()
            return function

        return keep

    def cost_of(self, values: Sequence[Any], outputs: Sequence[torch.Tensor]) -> Cost:
        """Returns the bytes that a call must move and the operations it must do, where known."""
        if self._cost is None:
            return default_cost(self.contract, values, outputs)
        return Cost(*self.arguments.pass_to(self._cost, values))


def keep(found: dict[tuple, Any], key: tuple, value: Any) -> None:
    """Remembers what was found for a call, and forgets all others where there are many."""
    if len(found) >= _MAX_KEPT:
        found.clear()
    found[key] = value
