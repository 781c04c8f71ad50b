"""`out=`: the variant of an operator that writes its results into given tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opwright import _torch
from opwright.contract.dtypes import describe
from opwright.contract.memory import find_shared, overlaps_itself
from opwright.contract.schema import out_names
from opwright.dispatch import sharding
from opwright.dispatch.arguments import Arguments
from opwright.dispatch.call_errors import CallErrors
from opwright.dispatch.fake import unpack
from opwright.dispatch.fallback import Fallback
from opwright.dispatch.mutation import bump_versions
from opwright.dispatch.reference import Reference, tensors_in
from opwright.dispatch.registration import Registration
from opwright.errors import OpwrightError, OutError, plural


class OutVariant:
    """The out variant of one declaration."""

    def __init__(
        self,
        registration: Registration,
        arguments: Arguments,
        reference: Reference,
        errors: CallErrors,
        fallback: Fallback,
    ) -> None:
        self._registration, self._arguments = registration, arguments
        self._reference, self._errors, self._fallback = reference, errors, fallback
        self._contract = arguments.contract
        self._name = arguments.contract.subject
        self._out_names = out_names(arguments.contract)

    def call(self, values: tuple[Any, ...], out: Any) -> Any:
        """Computes into given tensors and returns them.

        Raises:
            OutError: they are not tensors, differ from the result in shape, dtype or device, share memory, or need a
                gradient.
        """
        is_several = not isinstance(out, torch.Tensor) and hasattr(out, "__iter__")
        outs = tuple(out) if is_several else (out,)
        wrong = [each for each in outs if not isinstance(each, torch.Tensor)]
        if wrong:
            raise OutError(
                self._name,
                "`out=` takes a tensor for each result",
                rows=[("got", describe(wrong[0])), ("expected", plural(len(self._out_names), "tensor"))],
                hint="`torch.empty_like(result)` of a first call without `out=`",
            )
        is_recorded = torch.is_grad_enabled() and any(t.requires_grad for t in [*tensors_in(values), *outs])
        is_sharded = sharding.has_sharded([*values, *outs])
        if len(outs) != len(self._out_names):
            raise OutError(
                self._name,
                "`out=` has the wrong number of tensors",
                rows=[("got", str(len(outs))), ("expected", str(len(self._out_names)))],
            )
        if torch.compiler.is_compiling() or (is_sharded and not is_recorded):
            # A graph has only functional calls and copies; shards of a result may have to be moved.
            if is_sharded:
                made = sharding.call(self._registration.current, values)
            else:
                made = self._arguments.pass_to(self._registration.entry(), values)
            results = unpack(made, self._contract)
            for output, target, result in zip(self._contract.outputs, outs, results, strict=True):
                if target.shape != result.shape or target.dtype != result.dtype or target.device != result.device:
                    rule = f"`out=` must have the shape, dtype and device of `{output.name}`"
                    raise OutError(self._name, rule)
                target.copy_(result)
            return out
        if is_recorded or any(_torch.has_tangent(t) for t in [*tensors_in(values), *outs]):
            raise self._refuse_autograd("`with torch.no_grad():`" if is_recorded else "leave `out=` out")
        try:
            self._pass_to_public(values, outs)
        except (RuntimeError, TypeError) as error:
            raise self._explain(error, values, outs) from None
        return out

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs where no kernel is registered (yet): loads it, or runs the reference."""
        outs = [kwargs.pop(name) for name in self._out_names]
        values = self._arguments.normalize(*args, **kwargs)
        compute = self._reference.run
        if self._fallback.load_kernels([*values, *outs]):
            if not self._fallback.is_launched(values):
                return self._pass_to_public(values, outs)
            compute = self._fallback.run
        self._check(values, outs)
        is_shaped = outs[0].device.type == "meta" and not self._contract.data_dependent  # the contract has said all
        results = outs if is_shaped else unpack(compute(values), self._contract)
        for output, out, result in zip(self._contract.outputs, outs, results, strict=True):
            if out.shape != result.shape:  # along an axis whose size only the data know
                raise self._make_error(output.name, out, describe(result))
            out.copy_(result)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def run_mutation(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Bumps the versions of all tensors that are written into, and goes on.

        Raises:
            OutError: one of the tensors requires a gradient; this variant computes none.
        """
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in([*args, *kwargs.values()])):
            raise self._refuse_autograd("`with torch.no_grad():`")
        written = [kwargs[name] for name in self._out_names]
        if self._contract.mutated:
            others = {name: value for name, value in kwargs.items() if name not in self._out_names}
            written += self._arguments.mutated(self._arguments.normalize(*args, **others))
        bump_versions(written)
        with _torch.below_inplace_or_view():
            keys = keyset & _torch.KEYS_AFTER_INPLACE_OR_VIEW
            return self._registration.public_out.redispatch(keys, *args, **kwargs)

    def _pass_to_public(self, values: Sequence[Any], outs: Sequence[torch.Tensor]) -> Any:
        named = dict(zip(self._out_names, outs, strict=True))
        return self._arguments.pass_to(self._registration.public_out, values, **named)

    def _explain(self, error: Exception, values: Sequence[Any], outs: Sequence[Any]) -> Exception:
        """Returns the error to raise in place of one from below: the glue checks the same, in fewer words."""
        try:
            self._check(values, outs)
        except OpwrightError as broken:
            return broken
        return self._errors.explain(error, values)

    def _check(self, values: Sequence[Any], outs: Sequence[Any]) -> None:
        contract, name = self._contract, self._name
        bindings = self._arguments.bind(values)
        for output, tensor in zip(contract.outputs, outs, strict=True):
            axes = {getattr(axis, "name", None) for axis in output.type.axes}
            is_known = axes.isdisjoint(contract.data_dependent)
            shape = contract.output_shape(output, bindings) if is_known else tuple(tensor.shape)
            dtype = contract.output_dtype(output, bindings)
            if overlaps_itself(tensor):
                is_expanded = 0 in tensor.stride()
                raise OutError(
                    name,
                    f"`out=` is an {'expanded' if is_expanded else 'overlapping'} tensor, whose elements share memory",
                    rows=[("out", describe(tensor)), ("strides", str(list(tensor.stride())))],
                    hint="`out.contiguous()`",
                )
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != bindings.device:
                text = describe(torch.empty(shape, dtype=dtype, device="meta")).replace("meta", str(bindings.device))
                raise self._make_error(output.name, tensor, text)
        mutated = [(p.name, v) for p, v in zip(contract.parameters, values, strict=True) if p.mutated]
        written = [(label, tensor) for label, value in mutated for tensor in tensors_in([value])]
        written += [(o.name, tensor) for o, tensor in zip(contract.outputs, outs, strict=True)]
        found = find_shared([tensor for _, tensor in written], [True] * len(written))
        if found is not None:
            (one, tensor), (other, other_tensor) = written[found[0]], written[found[1]]
            is_out = {one, other} <= {o.name for o in contract.outputs}
            raise OutError(
                name,
                "two tensors of `out=` share memory" if is_out else "`out=` shares memory with a mutated argument",
                rows=[(one, describe(tensor)), (other, describe(other_tensor))],
                hint="a tensor of its own for each result",
            )

    def _refuse_autograd(self, hint: str) -> OutError:
        return OutError(self._name, "`out=` takes no part in autograd", hint=hint)

    def _make_error(self, result: str, tensor: torch.Tensor, expected: str) -> OutError:
        return OutError(
            self._name,
            f"`out=` must have the shape, dtype and device of `{result}`",
            rows=[("out", describe(tensor)), ("expected", expected)],
            hint="`torch.empty_like(result)` of a first call without `out=`",
        )
