"""`@operator`: a declaration becomes an operator of PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from opwright.dispatch import kernels, registry
from opwright.dispatch.autocast import DEVICES, autocast_kernel
from opwright.dispatch.autograd import autograd_kernel, reference_gradient, refuse_mutation
from opwright.dispatch.fake import fake_kernel, unpack
from opwright.dispatch.gate import gate, normalizer
from opwright.dispatch.node import recorder
from opwright.dispatch.reference import conforming, tensors_in
from opwright.dispatch.vmap import vmap_kernel
from opwright.errors import DeclarationError, KernelError, OpwrightError, OutError
from opwright.spec.contract import ContractError
from opwright.spec.cost import Cost, default_cost
from opwright.spec.declaration import Declaration, declare, declare_backward
from opwright.spec.dryrun import dry_run
from opwright.spec.dtypes import describe
from opwright.spec.schema import kernel_twin, out_names, out_schema_of, reference_twin, schema_of


def operator(
    qualified_name: str,
    cpu: str | Path | None = None,
    cuda: str | Path | None = None,
    triton: str | Path | None = None,
    *,
    random: bool = False,
    data_dependent: Sequence[str] = (),
    autocast: str | None = "promote",
) -> Callable[[Callable[..., Any]], Any]:
    """Declares a PyTorch operator by its reference.

    Args:
        qualified_name: `ns::name`; the operator is also `torch.ops.ns.name`.
        cpu, cuda, triton: the kernel for that backend, a path relative to the declaring file or the
            source itself (a string with a newline). Left out: the file `cpu.cpp`, `cuda.cu` or
            `triton.py` next to the declaring file, if it exists.
        random: the reference draws random numbers.
        data_dependent: axes of outputs whose size only the data know.
        autocast: what happens to mixed precisions under autocast: "promote", "lower", "float32", None.

    Returns:
        A decorator. The decorated function calls the operator; its attributes `backward`, `samples`,
        `sweep`, `cost` and `baseline` say more about it, `operator` is the `Operator` behind it.

    Raises:
        DeclarationError: the declaration cannot be honoured; the subclass says why.
    """
    frame = sys._getframe(1)

    def decorate(reference: Callable[..., Any]) -> Any:
        try:
            declaration = declare(
                qualified_name,
                reference,
                kernels={"cpu": cpu, "cuda": cuda, "triton": triton},
                random=random,
                data_dependent=data_dependent,
                autocast=autocast,
                local_names=frame.f_locals,
            )
            return _install(declaration).function
        except DeclarationError as error:
            raise _located(error, reference) from None

    return decorate


def _install(declaration: Declaration) -> Operator:
    dry_run(declaration)
    with registry.lock:
        old = registry.check_free(declaration)
        if old is not None:
            old.withdraw()
        new = Operator(declaration)
        registry.operators[declaration.qualified_name] = new
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
        public: `torch.ops.ns.name.default`.
        kernel: the same kernels without autograd, functorch and autocast in front.
        record: `record(compute, *values)` calls `compute` and records the call for a gradient.
        backward_operator: the operator of the declared backward, if there is one.
    """

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self.contract = declaration.contract
        self.backward_operator: Operator | None = None
        self.normalize = normalizer(self.contract)
        self._run_reference = conforming(self.contract, declaration.reference)
        self._samples: Callable[[], Any] | None = None
        self._sweep: dict[str, list[Any]] = {}
        self._cost: Callable[..., Any] | None = None
        self._baseline: Callable[..., Any] | None = None
        self._positional = sum(not p.keyword_only for p in self.contract.parameters)
        self._named = [p.name for p in self.contract.parameters if p.keyword_only]
        self._set_saved(None)
        self._register()
        namespace = getattr(torch.ops, declaration.namespace)
        self.public = getattr(namespace, declaration.name).default
        self.kernel = getattr(namespace, kernel_twin(declaration.name)).default._op
        self._reference_op = getattr(namespace, reference_twin(declaration.name)).default
        self.function = gate(self)
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

        The reference takes the gradient of each output, then whichever inputs, outputs and options it
        needs, by their names; what it names is what is kept for it. It returns a gradient for each
        floating-point tensor input, in order.

        Raises:
            BackwardError: its parameters do not fit this operator.
        """
        try:
            declaration = declare_backward(self.declaration, reference, sys._getframe(1).f_locals)
            self.backward_operator = _install(declaration)
        except DeclarationError as error:
            raise _located(error, reference) from None
        self._set_saved(self.backward_operator)
        return self.backward_operator.function

    def samples(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Declares test inputs: a function that yields tuples of arguments, or `(args, kwargs)`."""
        self._samples = function
        return function

    def sweep(self, **axes: Sequence[Any]) -> None:
        """Declares the sizes of axes that benchmarks go through: `sweep(n=[1024, 4096])`."""
        self._sweep = {name: list(values) for name, values in axes.items()}

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
            return self.kernel(*values[: self._positional], **self._keywords(values))
        except RuntimeError as error:
            raise self.explain(error, values) from None

    def call_public(self, values: Sequence[Any]) -> Any:
        """Calls the dispatcher's own entry, with the arguments in schema order."""
        return self.public(*values[: self._positional], **self._keywords(values))

    def call_general(self, values: tuple[Any, ...]) -> Any:
        """Calls the dispatcher's own entry; a broken contract raises its ContractError."""
        try:
            return self.call_public(values)
        except (RuntimeError, TypeError) as error:
            raise self.explain(error, values) from None

    def redispatch(self, keyset: Any, values: Sequence[Any]) -> Any:
        """Goes on in the dispatcher below the keys that were handled."""
        return self.public.redispatch(keyset, *values[: self._positional], **self._keywords(values))

    def call_out(self, values: tuple[Any, ...], out: Any) -> Any:
        """Computes into given tensors and returns them.

        Raises:
            OutError: they have not the shape, dtype or device of the result, or need a gradient.
        """
        outs = (out,) if isinstance(out, torch.Tensor) else tuple(out)
        self._check_out(values, outs)
        names = dict(zip(out_names(self.contract), outs, strict=True))
        try:
            self._public_out(*values[: self._positional], **self._keywords(values), **names)
        except RuntimeError as error:
            raise self.explain(error, values) from None
        return out

    def call_public_out(self, values: tuple[Any, ...], out: Any) -> Any:
        """The out variant in terms of the functional one, for tracing."""
        outs = (out,) if isinstance(out, torch.Tensor) else tuple(out)
        for target, result in zip(outs, unpack(self.call_public(values), self.contract), strict=True):
            target.copy_(result)
        return out

    def _check_out(self, values: Sequence[Any], outs: Sequence[Any]) -> None:
        contract = self.contract
        bindings = contract.bind(dict(zip([p.name for p in contract.parameters], values, strict=True)))
        if torch.is_grad_enabled() and any(t.requires_grad for t in [*tensors_in(values), *outs]):
            raise OutError(
                self.declaration.name, "`out=` takes no part in autograd", hint="`with torch.no_grad():`"
            )
        if len(outs) != len(contract.outputs):
            raise OutError(
                self.declaration.name,
                "`out=` has the wrong number of tensors",
                rows=[("got", str(len(outs))), ("expected", str(len(contract.outputs)))],
            )
        for output, tensor in zip(contract.outputs, outs, strict=True):
            shape = contract.output_shape(output, bindings)
            dtype = contract.output_dtype(output, bindings)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != bindings.device:
                expected = torch.empty(shape, dtype=dtype, device="meta")
                text = describe(expected).replace("meta", str(bindings.device))
                raise OutError(
                    self.declaration.name,
                    f"`out=` must have the shape, dtype and device of `{output.name}`",
                    rows=[("out", describe(tensor)), ("expected", text)],
                    hint="`torch.empty_like(result)` of a first call without `out=`",
                )

    def pull(
        self, gradients: Sequence[torch.Tensor], values: Sequence[Any], saved_outputs: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """Returns the gradients by the names of the inputs, from the declared backward or the reference."""
        backward = self.backward_operator
        if backward is None:
            return reference_gradient(self, values, gradients)
        known = {f"grad_{o.name}": g for o, g in zip(self.contract.outputs, gradients, strict=True)}
        known |= {p.name: v for p, v in zip(self.contract.parameters, values, strict=True)}
        for i, output in zip(self.saved_outputs, saved_outputs, strict=True):
            known[self.contract.outputs[i].name] = output
        arguments = {p.name: known[p.name] for p in backward.contract.parameters}
        found = unpack(backward.function(**arguments), backward.contract)
        absent = {p.name for p in self.contract.parameters if p.optional and known[p.name] is None}
        names = [output.name.removeprefix("grad_") for output in backward.contract.outputs]
        return {n: None if n in absent else g for n, g in zip(names, found, strict=True)}

    def _set_saved(self, backward: Operator | None) -> None:
        names = [p.name for p in self.contract.parameters]
        if backward is None:
            self.saved_inputs, self.saved_outputs = (True,) * len(names), ()
        else:
            used = {p.name for p in backward.contract.parameters}
            self.saved_inputs = tuple(name in used for name in names)
            self.saved_outputs = tuple(
                i for i, o in enumerate(self.contract.outputs) if o.name in used and o.name not in names
            )
        self.record = recorder(self)

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
        prefix = f"{self.declaration.name}: "
        if text.startswith(prefix):
            return KernelError(self.declaration.name, text.removeprefix(prefix))
        return error

    def bump_versions(self, values: Sequence[Any]) -> None:
        """Tells autograd that these tensors were written into."""
        for tensor in tensors_in(values):
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)

    # --- registration --------------------------------------------------------------------------------

    def _register(self) -> None:
        declaration, contract = self.declaration, self.contract
        name = declaration.name
        self._library = library = torch.library.Library(declaration.namespace, "FRAGMENT")
        tags = [torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout]
        if declaration.random:
            tags.append(torch.Tag.nondeterministic_seeded)
        twins = (kernel_twin(name), reference_twin(name))
        library.define(schema_of(contract, name), tags=tags)
        for twin in twins:
            library.define(schema_of(contract, twin), tags=tags)
            library.impl(twin, torch.library.fallthrough_kernel, "Autograd")
            library.impl(twin, torch.library.fallthrough_kernel, "ADInplaceOrView")
        library.impl(name, self._fallback, "CompositeExplicitAutograd")
        library.impl(twins[0], self._fallback, "CompositeExplicitAutograd")
        library.impl(twins[1], self._reference, "CompositeExplicitAutograd")
        torch.library.register_fake(
            declaration.qualified_name, fake_kernel(contract, self.normalize), lib=library
        )
        library.impl(name, autograd_kernel(self), "Autograd", with_keyset=True)
        library.impl(name, vmap_kernel(self), "FuncTorchBatched")
        if declaration.autocast is not None:
            for device, key in DEVICES.items():
                library.impl(name, autocast_kernel(self, device), key)
        if contract.mutated:
            library.impl(name, self._bump_and_go_on, "ADInplaceOrView", with_keyset=True)
        if contract.outputs:
            library.define(out_schema_of(contract, name), tags=[torch.Tag.pt2_compliant_tag])
            library.impl(f"{name}.out", self._fallback_out, "CompositeExplicitAutograd")
            packet = getattr(getattr(torch.ops, declaration.namespace), name)
            self._public_out = packet.out

    def withdraw(self) -> None:
        """Takes the operator out of the dispatcher, so that another declaration can take its place."""
        kernels.unload(self.declaration)
        self._library._destroy()
        namespace = getattr(torch.ops, self.declaration.namespace)
        name = self.declaration.name
        for entry in (name, kernel_twin(name), reference_twin(name)):
            if hasattr(namespace, entry):
                delattr(namespace, entry)

    def _reference(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_reference(self.normalize(*args, **kwargs))

    def _fallback(self, *args: Any, **kwargs: Any) -> Any:
        """Runs where no kernel is registered (yet): loads it, or runs the reference."""
        values = self.normalize(*args, **kwargs)
        device = next(tensors_in(values)).device.type
        if device in kernels.BACKENDS and kernels.ensure_loaded(self, device):
            return self.call_kernel(values)
        self._bind(values)
        return self._run_reference(values)

    def _fallback_out(self, *args: Any, **kwargs: Any) -> Any:
        outs = [kwargs.pop(name) for name in out_names(self.contract)]
        values = self.normalize(*args, **kwargs)
        device = next(tensors_in(values)).device.type
        if device in kernels.BACKENDS and kernels.ensure_loaded(self, device):
            named = dict(zip(out_names(self.contract), outs, strict=True))
            return self._public_out(*values[: self._positional], **self._keywords(values), **named)
        self._bind(values)
        for out, result in zip(outs, unpack(self._run_reference(values), self.contract), strict=True):
            out.copy_(result)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _bind(self, values: Sequence[Any]) -> None:
        self.contract.bind(dict(zip([p.name for p in self.contract.parameters], values, strict=True)))

    def _bump_and_go_on(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        values = self.normalize(*args, **kwargs)
        mutated = [v for p, v in zip(self.contract.parameters, values, strict=True) if p.mutated]
        self.bump_versions(mutated)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, values)


def operator_of(target: Any) -> Operator | None:
    """Returns the Operator behind a declared function or a `torch.ops` entry, or None."""
    found = getattr(target, "operator", None)
    if isinstance(found, Operator):
        return found
    name = getattr(target, "_qualified_op_name", None) or getattr(target, "_name", None)
    return registry.operators.get(str(name).removesuffix(".default")) if name else None
