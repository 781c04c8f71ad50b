"""What is registered with the dispatcher for an operator. It outlives the declaration: a new one takes it over.

PyTorch has no safe way to take an operator's schema back: functions, graphs and compiled code may hold
a handle to it. So the entries of a schema are made once, and their kernels ask for the declaration that
is current. Only a declaration with another schema replaces the public entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from opwright import _torch
from opwright._torch import OpOverload, OpOverloadPacket
from opwright.contract.contract import Contract
from opwright.contract.declaration import Declaration
from opwright.contract.schema import (
    coded_schema_of,
    kernel_twin,
    out_names,
    out_schema_of,
    reference_twin,
    schema_of,
)
from opwright.dispatch.devices import DISPATCH_KEYS
from opwright.dispatch.direct import Direct

# The dispatcher's keys of autocast, by type of device; not every device has one.
AUTOCAST_KEYS = {d: f"Autocast{key}" for d, key in DISPATCH_KEYS.items() if _torch.has_key(f"Autocast{key}")}

_is_compiling = torch.compiler.is_compiling


class _Overload(OpOverload):
    """`torch.ops.ns.name.default`: a plain call takes the way of the operator's Python function.

    The Python kernel at the Autograd keys, which PyTorch's own way passes, costs 4 us. Tracers see PyTorch's class.
    """

    @_torch.hide_frames
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling() or "out" in kwargs:
            return _torch.direct_entry(self)(*args, **kwargs)
        return self.opwright_function(*args, **kwargs)


class _Packet(OpOverloadPacket):
    """`torch.ops.ns.name`, likewise."""

    @_torch.hide_frames
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling() or (kwargs and not self.opwright_outs.isdisjoint(kwargs)):
            return _torch.direct_entry(self)(*args, **kwargs)
        return self.opwright_function(*args, **kwargs)


# Of each namespace, what holds the twins of all its operators. They stay for ever.
_twins: dict[str, torch.library.Library] = {}


def signature_of(declaration: Declaration) -> tuple:
    """Returns what two declarations must have in common to share entries."""
    contract = declaration.contract
    return (
        schema_of(contract, declaration.name),
        declaration.random,
        declaration.autocast is not None,
        tuple(p.name for p in contract.mutated),
        tuple(p.choices for p in contract.parameters),  # kernels get their numbers
    )


@dataclass(frozen=True)
class Functions:
    """What the dispatcher calls for one declaration.

    Attributes:
        fallback: where no kernel is registered (yet), with the arguments of a call.
        coded_fallback: the same, with the arguments of a kernel.
        coded_reference: what the glue calls where a kernel does not compute.
        plain: what plain calls without a gradient run, with the arguments of a kernel; None for the kernels.
        reference: the reference alone; after another schema has taken the public name, in place of all the others.
        fake, autograd, vmap: for the keys of these.
        autocast: for the keys of autocast, by type of device.
        mutation: for operators that write into their arguments.
        out, out_mutation: for the variant that writes into given tensors.
    """

    fallback: Callable[..., Any]
    coded_fallback: Callable[..., Any]
    coded_reference: Callable[..., Any]
    plain: Callable[..., Any] | None
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    autograd: Callable[..., Any]
    vmap: Callable[..., Any]
    autocast: Mapping[str, Callable[..., Any]]
    mutation: Callable[..., Any]
    out: Callable[..., Any]
    out_mutation: Callable[..., Any]


class Registration:
    """What is registered for one schema of one name.

    Attributes:
        public: `torch.ops.ns.name.default`.
        public_out: the same of the variant that writes into given tensors.
        kernel: the same kernels as `public`, without autograd, functorch and autocast in front.
        direct: the same kernels for calls that need nothing of the dispatcher.
        run: what plain calls without a gradient run: `kernel`, or the reference of an operator that has no kernels.
        current: the record of the operator whose declaration is followed.
        functions: those of that declaration.
        generation: how many schemas this name had before.
        takes_sharded: whether the public entry takes distributed tensors.
    """

    def __init__(self, declaration: Declaration, generation: int) -> None:
        self.signature = signature_of(declaration)
        self.generation = generation
        self.current: Any = None  # an `Operator`, which has a registration
        self.functions: Functions
        self.takes_sharded = False
        self.direct = Direct()
        self._namespace = declaration.namespace
        self._name = declaration.name
        self._is_retired = False
        self._define(declaration)
        found = getattr(torch.ops, self._namespace)
        packet = getattr(found, self._name)
        self.public = packet.default
        self.public_out = packet.out if declaration.contract.outputs else None
        self._twin = getattr(found, kernel_twin(self._name, generation)).default
        self.run = self.kernel = _torch.direct_entry(self._twin)
        self._packet = packet

    def follow(self, operator: Any, functions: Functions) -> None:
        """Makes the declaration of an operator the one that is followed."""
        self.current, self.functions = operator, functions
        self.run = functions.plain or self.kernel

    def call_function(self, contract: Contract, function: Callable[..., Any]) -> None:
        """Lets plain calls of the public entry take the way of an operator's function."""
        if contract.result_type is not None:
            return  # its function returns a named tuple, the entry a plain one
        self.public.opwright_function = self._packet.opwright_function = function
        self._packet.opwright_outs = {*out_names(contract), "out"}
        self.public.__class__, self._packet.__class__ = _Overload, _Packet

    def forget_choices(self) -> None:
        """Lets PyTorch's dispatcher in Python find kernels that were registered from C."""
        for overload in (self.public, self.public_out, self._twin):
            if overload is not None:
                _torch.forget_choices(overload)

    def entry(self) -> Callable[..., Any]:
        """Returns what calls the dispatcher's own way: as tracers see it, else without PyTorch's Python around it."""
        is_as_it_is = torch.compiler.is_compiling() or self._is_retired
        return self.public if is_as_it_is else _torch.direct_entry(self.public)

    def _define(self, declaration: Declaration) -> None:
        contract, name = declaration.contract, self._name
        tags = [torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout]
        if declaration.random:
            tags.append(torch.Tag.nondeterministic_seeded)
        self._library = public = torch.library.Library(self._namespace, "FRAGMENT")
        if self._namespace not in _twins:
            _twins[self._namespace] = torch.library.Library(self._namespace, "FRAGMENT")
        twins = _twins[self._namespace]
        kernel, reference = kernel_twin(name, self.generation), reference_twin(name, self.generation)
        coded = coded_schema_of(contract, "")
        for twin in (kernel, reference):
            twins.define(twin + coded, tags=tags)
            twins.impl(twin, torch.library.fallthrough_kernel, "Autograd")
            twins.impl(twin, torch.library.fallthrough_kernel, "ADInplaceOrView")
        self._implement(twins, kernel, "coded_fallback", "CompositeExplicitAutograd")
        self._implement(twins, reference, "coded_reference", "CompositeExplicitAutograd")

        public.define(schema_of(contract, name), tags=tags)
        self._implement(public, name, "fallback", "CompositeExplicitAutograd")
        # The level is PyTorch's own frame: to find the module of another takes it 2 ms.
        torch.library.register_fake(
            declaration.qualified_name,
            lambda *a, **k: self.functions.fake(*a, **k),
            lib=public,
            _stacklevel=0,
        )
        self._implement(public, name, "autograd", "Autograd", with_keyset=True)
        self._implement(public, name, "vmap", "FuncTorchBatched")
        if declaration.autocast is not None:
            for device, key in AUTOCAST_KEYS.items():
                public.impl(name, self._autocast(device), key)
        if contract.mutated:
            self._implement(public, name, "mutation", "ADInplaceOrView", with_keyset=True)
        if contract.outputs:
            out = f"{name}.out"
            public.define(out_schema_of(contract, name), tags=[torch.Tag.pt2_compliant_tag])
            self._implement(public, out, "out", "CompositeExplicitAutograd")
            self._implement(public, out, "out_mutation", "ADInplaceOrView", with_keyset=True)

    def _implement(
        self, library: torch.library.Library, name: str, kind: str, key: str, *, with_keyset: bool = False
    ) -> None:
        """Lets the dispatcher run the current function of that kind at a key."""
        call = _torch.hide_frames(lambda *a, **k: getattr(self.functions, kind)(*a, **k))
        library.impl(name, call, key, with_keyset=with_keyset)

    def _autocast(self, device: str) -> Callable[..., Any]:
        return _torch.hide_frames(lambda *args, **kwargs: self.functions.autocast[device](*args, **kwargs))

    def retire(self) -> None:
        """Makes room for another schema; whoever still calls the public entry gets the reference.

        The twins stay, for functions that still hold them. PyTorch cannot do this while other threads call the public
        entry. Plain calls of the operator's function do not: they go to the twins.
        """
        self._is_retired = True
        self.public, self.public_out = self.functions.reference, self.functions.out
        _torch.destroy_library(self._library)
        namespace = getattr(torch.ops, self._namespace)
        if hasattr(namespace, self._name):
            delattr(namespace, self._name)
