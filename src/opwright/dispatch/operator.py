"""`@operator`: a declaration becomes an operator of PyTorch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opwright.dispatch import kernels, registry
from opwright.dispatch.autocast import DEVICES, autocast_kernel
from opwright.dispatch.autograd import (
    autograd_kernel,
    composite_recorder,
    reference_recorder,
    refuse_mutation,
)
from opwright.dispatch.backward_trace import BackwardTraces, signature_of_call
from opwright.dispatch.device_errors import device_error
from opwright.dispatch.entries import Entries, signature_of
from opwright.dispatch.fake import fake_kernel, unpack
from opwright.dispatch.gate import gate, normalizer
from opwright.dispatch.node import recorder
from opwright.dispatch.reference import conforming, tensors_in
from opwright.dispatch.vmap import vmap_kernel
from opwright.errors import DeclarationError, KernelError, OpwrightError, OutError, OutOfBoundsError
from opwright.spec.contract import ContractError
from opwright.spec.cost import Cost, default_cost
from opwright.spec.declaration import Declaration, declare, declare_backward
from opwright.spec.dryrun import dry_run
from opwright.spec.dtypes import describe
from opwright.spec.memory import find_shared, overlaps_itself
from opwright.spec.precision import Precision
from opwright.spec.schema import out_names, schema_of

MAX_CHECKED = 1024  # signatures of one operator
_INDEX_ERROR = "IndexError: "  # what the text of `opwright::check_index` starts with


def operator(
    qualified_name: str,
    cpu: str | Path | None = None,
    cuda: str | Path | None = None,
    triton: str | Path | None = None,
    *,
    random: bool = False,
    data_dependent: Sequence[str] = (),
    non_differentiable: Sequence[str] = (),
    autocast: str | None = "promote",
    deterministic: bool = True,
    precision: Precision | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Declares a PyTorch operator by its reference.

    Args:
        qualified_name: `ns::name`; the operator is also `torch.ops.ns.name`.
        cpu: the kernel for CPUs: a path relative to the declaring file, or the source itself (a string with a newline).
            None: the file `cpu.cpp` next to the declaring file, if it exists.
        cuda: the same for NVIDIA GPUs, and `cuda.cu`.
        triton: the same for a Triton kernel, and `triton.py`.
        random: the reference draws random numbers.
        data_dependent: axes of outputs whose size only the data know.
        non_differentiable: outputs that no gradient flows through, such as those that the backward needs.
        autocast: what happens to mixed precisions under autocast: "promote", "lower", "float32", None.
        deterministic: False where the last bits of a result vary from call to call, as sums by atomics do.
        precision: "tf32" where products of float32 matrices are computed in TF32; `Factor(4, "reason")` where results
            may err four times what verify otherwise allows.

    Returns:
        A decorator. The decorated function calls the operator; its attributes `backward`, `samples`,
        `sweep`, `cost` and `baseline` say more about it, `operator` is the `Operator` behind it.

    Raises:
        DeclarationError: the declaration cannot be honoured; the subclass says why.
    """
    if not isinstance(qualified_name, str):
        name = getattr(qualified_name, "__name__", "name")
        raise DeclarationError(name, "`@operator` wants the operator's name", hint=f'`@operator("my_ops::{name}")`')
    frame = sys._getframe(1)

    def decorate(reference: Callable[..., Any]) -> Any:
        try:
            declaration = declare(
                qualified_name,
                reference,
                kernels={"cpu": cpu, "cuda": cuda, "triton": triton},
                random=random,
                data_dependent=data_dependent,
                non_differentiable=non_differentiable,
                autocast=autocast,
                deterministic=deterministic,
                precision=precision,
                local_names=frame.f_locals,
            )
            return _install(declaration).function
        except DeclarationError as error:
            raise _located(error, reference) from None

    return decorate


def _install(declaration: Declaration, forward: Operator | None = None) -> Operator:
    """Makes a declaration the current one of its name, and of its forward if it is a backward."""
    dry_run(declaration)  # without the lock, for the reference may call operators that have to be built
    with registry.lock:
        old = registry.check_free(declaration)
        if old is not None:
            kernels.unload(old.declaration)
        entries = registry.entries.get(declaration.qualified_name)
        if entries is not None and entries.signature != signature_of(declaration):
            entries.retire()
            declaration = declaration._replace(generation=entries.generation + 1)
            entries = None
        if entries is None:
            entries = Entries(declaration, declaration.generation)
            registry.entries[declaration.qualified_name] = entries
        declaration = declaration._replace(generation=entries.generation)
        new = Operator(declaration, entries)
        registry.operators[declaration.qualified_name] = new
        if forward is not None:
            forward.backward_operator = new
        for other in registry.operators.values():
            other.traces.clear()  # they may call what was declared before
        kernels.unload(declaration)  # a library that was built without this operator is out of date
    return new


def _located(error: DeclarationError, reference: Callable[..., Any]) -> DeclarationError:
    code = reference.__code__
    rows = [("at", f"{code.co_filename}:{code.co_firstlineno}"), *error.rows]
    return type(error)(error.subject, error.rule, rows=rows, body=error.body, hint=error.hint)


class Operator:
    """A declared operator: its declaration, its entries in the dispatcher, its function.

    Attributes:
        declaration: what was declared.
        function: the Python function, the fastest way to call it.
        entries: what is registered with the dispatcher.
        public: `torch.ops.ns.name.default`.
        kernel: the same kernels without autograd, functorch and autocast in front.
        record: `record(compute, *values)` calls `compute`, or the reference in its place, and records the call for a
            gradient: for plain tensors outside any mode.
        record_node: the same with a node of the operator's own, under transforms and tracers too.
        backward_operator: the operator of the declared backward, if there is one.
        traces: backwards that were derived from the reference.
    """

    def __init__(self, declaration: Declaration, entries: Entries) -> None:
        self.declaration = declaration
        self.contract = declaration.contract
        self.entries = entries
        self.public, self.kernel = entries.public, entries.kernel
        self.backward_operator: Operator | None = None
        self.traces = BackwardTraces()
        self.normalize = normalizer(self.contract)
        self._run_reference = conforming(self.contract, declaration.reference)
        self._samples: Callable[[], Any] | None = None
        self._sweep: list[dict[str, Sequence[Any]]] = []
        self._cost: Callable[..., Any] | None = None
        self._baseline: Callable[..., Any] | None = None
        self._positional = sum(not p.keyword_only for p in self.contract.parameters)
        self._named = [p.name for p in self.contract.parameters if p.keyword_only]
        self._raised = threading.local()
        self._checked: set[tuple] = set()
        self.run_fake = fake_kernel(self.contract, self.normalize)
        self.run_autograd = autograd_kernel(self)
        self.run_vmap = vmap_kernel(self)
        self.run_autocast = {device: autocast_kernel(self, device) for device in DEVICES}
        self._set_saved(None)
        entries.current = self
        self.function = gate(self)
        entries.call_function(self)
        self.function.operator = self
        self.function.backward = self.backward
        self.function.samples = self.samples
        self.function.sweep = self.sweep
        self.function.cost = self.cost
        self.function.baseline = self.baseline

    def __repr__(self) -> str:
        return f"<operator {schema_of(self.contract, self.declaration.qualified_name)}>"

    # --- what a declaration adds ---------------------------------------------------------------------

    def backward(self, reference: Callable[..., Any]) -> Any:
        """Declares the backward by its reference; returns the function of the operator `ns::name_backward`.

        The reference takes the gradient of each differentiable output, then whichever inputs, outputs and
        options it needs, by their names; what it names is what is kept for it. It returns a gradient for
        each floating-point tensor input, in order.

        Raises:
            BackwardError: its parameters do not fit this operator.
        """
        try:
            declaration = declare_backward(self.declaration, reference, sys._getframe(1).f_locals)
            _install(declaration, self)
        except DeclarationError as error:
            raise _located(error, reference) from None
        self._set_saved(self.backward_operator)
        return self.backward_operator.function

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
        """Declares the cost of a call: a function of the arguments that returns `(bytes, flop)`."""
        self._cost = function
        return function

    def baseline(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Declares what people write without this operator, to be measured against; by default the reference.

        A reference is written for accuracy; comparing speed with it would flatter the kernel.
        """
        self._baseline = function
        return function

    def cost_of(self, values: Sequence[Any], outputs: Sequence[torch.Tensor]) -> Cost:
        """Returns the bytes that a call must move and the operations it must do, where known."""
        if self._cost is None:
            return default_cost(self.contract, values, outputs)
        return Cost(*self._cost(*values[: self._positional], **self._keywords(values)))

    # --- calls ---------------------------------------------------------------------------------------

    def _keywords(self, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self._named, values[self._positional :], strict=True))

    def call_kernel(self, values: Sequence[Any]) -> Any:
        """Calls the kernels below autograd, with the arguments in schema order."""
        try:
            return self.kernel(
                *(
                    p.choices.index(v) if p.kind == "choice" else v
                    for p, v in zip(self.contract.parameters, values, strict=True)
                )
            )
        except RuntimeError as error:
            raise self.explain(error, values) from None

    def call_public(self, values: Sequence[Any]) -> Any:
        """Calls the dispatcher's own entry, with the arguments in schema order."""
        entry = self.public if torch.compiler.is_compiling() else self.public._op
        return entry(*values[: self._positional], **self._keywords(values))

    def call_general(self, values: tuple[Any, ...]) -> Any:
        """Calls the dispatcher's own entry; a broken contract raises its ContractError."""
        try:
            return self.call_public(values)
        except (RuntimeError, TypeError) as error:
            raise self.explain(error, values) from None

    def leave_public(self) -> None:
        """Runs the reference where the public entry was called, which will belong to another schema."""
        compute = composite_recorder(self)
        self.public = lambda *args, **kwargs: compute(None, *self.normalize(*args, **kwargs))
        self.public._op = self.public
        self.entries.public_out = self.run_fallback_out

    def redispatch(self, keyset: Any, values: Sequence[Any]) -> Any:
        """Goes on in the dispatcher below the keys that were handled."""
        return self.public.redispatch(keyset, *values[: self._positional], **self._keywords(values))

    def call_with_out(self, values: tuple[Any, ...], out: Any) -> Any:
        """Computes into given tensors and returns them.

        Raises:
            OutError: they differ from the result in shape, dtype or device, share memory, or need a gradient.
        """
        outs = (out,) if isinstance(out, torch.Tensor) else tuple(out)
        if torch.compiler.is_compiling():
            # A graph has only functional calls and copies.
            results = unpack(self.call_public(values), self.contract)
            for output, target, result in zip(self.contract.outputs, outs, results, strict=True):
                if target.shape != result.shape or target.dtype != result.dtype or target.device != result.device:
                    rule = f"`out=` must have the shape, dtype and device of `{output.name}`"
                    raise OutError(self.declaration.name, rule)
                target.copy_(result)
            return out
        name, names = self.declaration.name, out_names(self.contract)
        if torch.is_grad_enabled() and any(t.requires_grad for t in [*tensors_in(values), *outs]):
            raise OutError(name, "`out=` takes no part in autograd", hint="`with torch.no_grad():`")
        if len(outs) != len(names):
            raise OutError(
                name,
                "`out=` has the wrong number of tensors",
                rows=[("got", str(len(outs))), ("expected", str(len(names)))],
            )
        try:
            self.entries.public_out(
                *values[: self._positional], **self._keywords(values), **dict(zip(names, outs, strict=True))
            )
        except (RuntimeError, TypeError) as error:
            raise self._explain_out(error, values, outs) from None
        return out

    def _explain_out(self, error: Exception, values: Sequence[Any], outs: Sequence[Any]) -> Exception:
        """Returns the error to raise in place of one from below: the glue checks the same, in fewer words."""
        try:
            self._check_out(values, outs)
        except OpwrightError as broken:
            return broken
        return self.explain(error, values)

    def _check_out(self, values: Sequence[Any], outs: Sequence[Any]) -> None:
        contract, name = self.contract, self.declaration.name
        bindings = contract.bind(dict(zip([p.name for p in contract.parameters], values, strict=True)))
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
                raise self._wrong_out(output.name, tensor, text)
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

    def _wrong_out(self, result: str, tensor: torch.Tensor, expected: str) -> OutError:
        return OutError(
            self.declaration.name,
            f"`out=` must have the shape, dtype and device of `{result}`",
            rows=[("out", describe(tensor)), ("expected", expected)],
            hint="`torch.empty_like(result)` of a first call without `out=`",
        )

    def _record_first(self, compute: Callable[..., Any], *values: Any) -> Any:
        """Makes the node when the first call is recorded: that takes as long as all the rest of a declaration."""
        node = recorder(self)
        if self.record == self._record_first:
            self.record = node
        self.record_node = node
        return node(compute, *values)

    def _set_saved(self, backward: Operator | None) -> None:
        names = [p.name for p in self.contract.parameters]
        # What second derivatives need: saved outputs that no gradient flows through.
        self.computed_again: tuple[int, ...] = ()
        if backward is None:
            self.saved_inputs, self.saved_outputs = (True,) * len(names), ()
        else:
            used = {p.name for p in backward.contract.parameters}
            self.saved_outputs = tuple(
                i for i, o in enumerate(self.contract.outputs) if o.name in used and o.name not in names
            )
            if not self.declaration.random:  # other numbers would be drawn
                self.computed_again = tuple(i for i in self.saved_outputs if self.contract.outputs[i].is_constant)
            self.saved_inputs = tuple(bool(self.computed_again) or name in used for name in names)
        if self.contract.mutated:
            self.record = self.record_node = lambda compute, *values: refuse_mutation(self, values)
        elif backward is None and self.declaration.random:
            self.record = self.record_node = composite_recorder(self)
        else:
            self.record_node = self._record_first
            backends = kernels.BACKENDS if torch.backends.cuda.is_built() else ("cpu",)
            has_all = self.declaration.sources.keys() >= set(backends)
            self.record = self._record_first if backward or has_all else reference_recorder(self)

    def explain(self, error: Exception, values: Sequence[Any]) -> Exception:
        """Returns the error to raise in place of one from below: the broken rule of the contract, if any."""
        if isinstance(error, OpwrightError):
            return error
        names = [p.name for p in self.contract.parameters]
        try:
            self.contract.bind(dict(zip(names, values, strict=True)))
        except ContractError as broken:
            return broken
        text = str(error).split("\n")[0]
        raised = getattr(self._raised, "error", None)
        if raised is not None and "the reference failed" in text:
            self._raised.error = None
            return raised
        prefix = f"{self.declaration.name}: "
        found = device_error(self, text.removeprefix(prefix), list(tensors_in(values)))
        if found is not None:
            return found
        if text.startswith(prefix):
            given = [(name, describe(v)) for name, v in zip(names, values, strict=True)]
            said = text.removeprefix(prefix)
            is_index_error = said.startswith(_INDEX_ERROR) or self._has_index_out_of_bounds(values)
            raised = OutOfBoundsError if is_index_error else KernelError
            return raised(self.declaration.name, said.removeprefix(_INDEX_ERROR), rows=given)
        return error

    def _has_index_out_of_bounds(self, values: Sequence[Any]) -> bool:
        """Returns whether the reference raises an IndexError for what a kernel has refused.

        A call that runs the reference, in a dtype without a kernel, then raises the same type of error.
        """
        if self.declaration.random:  # the caller's next numbers are not to change
            return False
        pairs = zip(self.contract.parameters, values, strict=True)
        copied = [v.clone() if p.mutated and isinstance(v, torch.Tensor) else v for p, v in pairs]
        try:
            with torch.no_grad():
                self._run_reference(copied)
        except IndexError:
            return True
        except Exception:  # whatever a reference may raise
            return False
        return False

    def bump_versions(self, values: Sequence[Any]) -> None:
        """Tells autograd that these tensors were written into."""
        for tensor in tensors_in(values):
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)

    # --- what the dispatcher calls -------------------------------------------------------------------

    def _decode(self, coded: Sequence[Any]) -> tuple[Any, ...]:
        """Returns arguments with the names of choices in place of their numbers."""
        pairs = zip(self.contract.parameters, coded, strict=True)
        return tuple(p.choices[v] if p.kind == "choice" else v for p, v in pairs)

    def run_coded_reference(self, *coded: Any) -> Any:
        """Runs the reference for the glue; where the kernels were taken back, the current ones."""
        try:
            values = self._decode(coded)
            if not kernels.is_loaded(self, _device_of(values)):
                return self._fall_back(values)
            return self._run_reference(values)
        except Exception as error:
            self._raised.error = error  # C code in between keeps only that there was one
            raise

    def run_coded_fallback(self, *coded: Any) -> Any:
        """Runs in place of the kernels, as `run_fallback`."""
        return self._fall_back(self._decode(coded))

    def run_fallback(self, *args: Any, **kwargs: Any) -> Any:
        """Runs where no kernel is registered (yet): loads it, or runs the reference."""
        return self._fall_back(self.normalize(*args, **kwargs))

    def _fall_back(self, values: tuple[Any, ...]) -> Any:
        if self._can_load(values):
            return self.call_kernel(values)
        return self.run_checked_reference(values)

    def run_checked_reference(self, values: Sequence[Any]) -> Any:
        """Checks the arguments as the glue does, and runs the reference; a signature that has passed passes again."""
        key = (
            None if self.contract.mutated else signature_of_call(values)
        )  # where memory overlaps differs between calls
        if key is None or key not in self._checked:
            self.contract.bind(dict(zip([p.name for p in self.contract.parameters], values, strict=True)))
            if key is not None:
                if len(self._checked) >= MAX_CHECKED:
                    self._checked = set()
                self._checked.add(key)
        return self._run_reference(values)

    def run_fallback_out(self, *args: Any, **kwargs: Any) -> Any:
        """The same for the out variant."""
        outs = [kwargs.pop(name) for name in out_names(self.contract)]
        values = self.normalize(*args, **kwargs)
        if self._can_load([*values, *outs]):
            named = dict(zip(out_names(self.contract), outs, strict=True))
            return self.entries.public_out(*values[: self._positional], **self._keywords(values), **named)
        self._check_out(values, outs)
        results = unpack(self._run_reference(values), self.contract)
        for output, out, result in zip(self.contract.outputs, outs, results, strict=True):
            if out.shape != result.shape:  # along an axis whose size only the data know
                raise self._wrong_out(output.name, out, describe(result))
            out.copy_(result)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def run_bumping(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Bumps the versions of the mutated arguments and goes on."""
        values = self.normalize(*args, **kwargs)
        self.bump_versions([v for p, v in zip(self.contract.parameters, values, strict=True) if p.mutated])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, values)

    def run_bumping_out(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """The same for the tensors of the out variant."""
        self.bump_versions([kwargs[name] for name in out_names(self.contract)])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self.entries.public_out.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)

    def _can_load(self, values: Sequence[Any]) -> bool:
        """Loads the kernels for these tensors; returns whether there are any that can take them."""
        device = _device_of(values)
        for t in tensors_in(values):  # one of another kind would lead the dispatcher here again
            if t.layout != torch.strided or t.is_nested or t.device.type != device:
                return False
        return device in kernels.BACKENDS and kernels.ensure_loaded(self, device)


def _device_of(values: Sequence[Any]) -> str:
    return next((tensor.device.type for tensor in tensors_in(values)), "")


def operator_of(target: Any) -> Operator | None:
    """Returns the Operator behind a declared function or a `torch.ops` entry, or None."""
    found = getattr(target, "operator", None)
    if isinstance(found, Operator):
        return found
    name = getattr(target, "_qualified_op_name", None) or getattr(target, "_name", None)
    return registry.operators.get(str(name).removesuffix(".default")) if name else None
