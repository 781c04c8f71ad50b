"""The dispatcher's entries of an operator. They outlive the declaration: a new one takes them over.

PyTorch has no safe way to take an operator's schema back: functions, graphs and compiled code may hold
a handle to it. So the entries of a schema are made once, and their kernels ask for the declaration that
is current. Only a declaration with another schema replaces the public entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from opwright import _torch
from opwright._torch import OpOverload, OpOverloadPacket
from opwright.dispatch import kernels
from opwright.dispatch.autocast import DEVICES
from opwright.spec.declaration import Declaration
from opwright.spec.schema import (
    coded_schema_of,
    kernel_twin,
    out_names,
    out_schema_of,
    reference_twin,
    schema_of,
)

if TYPE_CHECKING:
    from opwright.dispatch.operator import Operator


_is_compiling = torch.compiler.is_compiling


class _Overload(OpOverload):
    """`torch.ops.ns.name.default`: a plain call takes the way of the operator's Python function.

    The Python kernel at the Autograd keys, which PyTorch's own way always passes, costs 4 us. Tracers see PyTorch's class.
    """

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling() or "out" in kwargs:
            return _torch.direct_entry(self)(*args, **kwargs)
        return self.opwright_function(*args, **kwargs)


class _Packet(OpOverloadPacket):
    """`torch.ops.ns.name`, likewise."""

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


class Entries:
    """What is registered for one schema of one name.

    Attributes:
        current: the operator whose declaration the kernels follow.
        generation: how many schemas this name had before.
    """

    def __init__(self, declaration: Declaration, generation: int) -> None:
        self.signature = signature_of(declaration)
        self.generation = generation
        self.current: Operator | None = None
        self._namespace = declaration.namespace
        self._name = declaration.name
        self._define(declaration)
        found = getattr(torch.ops, self._namespace)
        packet = getattr(found, self._name)
        self.public = packet.default
        self.public_out = packet.out if declaration.contract.outputs else None
        self.kernel = _torch.direct_entry(getattr(found, kernel_twin(self._name, generation)).default)
        self._packet = packet

    def call_function(self, operator: Operator) -> None:
        """Lets plain calls of the public entry take the way of an operator's function."""
        if operator.contract.result_type is not None:
            return  # its function returns a named tuple, the entry a plain one
        self.public.opwright_function = self._packet.opwright_function = operator.function
        self._packet.opwright_outs = {*out_names(operator.contract), "out"}
        self.public.__class__, self._packet.__class__ = _Overload, _Packet

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
        twins.impl(kernel, lambda *a: self.current.run_coded_fallback(*a), "CompositeExplicitAutograd")
        twins.impl(reference, lambda *a: self.current.run_coded_reference(*a), "CompositeExplicitAutograd")

        public.define(schema_of(contract, name), tags=tags)
        public.impl(name, lambda *a, **k: self.current.run_fallback(*a, **k), "CompositeExplicitAutograd")
        # The level is PyTorch's own frame: to find the module of another takes it 2 ms.
        torch.library.register_fake(
            declaration.qualified_name,
            lambda *a, **k: self.current.run_fake(*a, **k),
            lib=public,
            _stacklevel=0,
        )
        public.impl(name, lambda *a, **k: self.current.run_autograd(*a, **k), "Autograd", with_keyset=True)
        public.impl(name, lambda *a, **k: self.current.run_vmap(*a, **k), "FuncTorchBatched")
        if declaration.autocast is not None:
            for device, key in DEVICES.items():
                public.impl(name, self._autocast(device), key)
        if contract.mutated:
            public.impl(name, lambda *a, **k: self.current.run_bumping(*a, **k), "ADInplaceOrView", with_keyset=True)
        if contract.outputs:
            out = f"{name}.out"
            public.define(out_schema_of(contract, name), tags=[torch.Tag.pt2_compliant_tag])
            public.impl(out, lambda *a, **k: self.current.run_fallback_out(*a, **k), "CompositeExplicitAutograd")
            public.impl(
                out,
                lambda *a, **k: self.current.run_bumping_out(*a, **k),
                "ADInplaceOrView",
                with_keyset=True,
            )

    def _autocast(self, device: str) -> Any:
        return lambda *args, **kwargs: self.current.run_autocast[device](*args, **kwargs)

    def retire(self) -> None:
        """Makes room for another schema. The twins stay, for functions that still hold them.

        PyTorch cannot do this while other threads call the public entry. Plain calls of the operator's function
        do not: they go to the twins.
        """
        self.current.leave_public()
        kernels.retire(self.current.declaration)
        _torch.destroy_library(self._library)
        namespace = getattr(torch.ops, self._namespace)
        if hasattr(namespace, self._name):
            delattr(namespace, self._name)
