"""Direct calls: calls on plain tensors that bypass the dispatcher (`native/src/direct.c`), in about half of its time.

A tensor's Python object holds a pointer to its implementation, which holds the dispatcher's keys of the tensor. Their
offsets are found by looking for known values in several tensors. If a value is not at exactly one offset, as may be
with a later PyTorch, every call goes through the dispatcher.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from ctypes import c_int64, c_uint64, c_void_p, pythonapi
from functools import cache, partial
from typing import Any, TypeVar

import torch

from opwright import _torch
from opwright.contract.declaration import Declaration
from opwright.dispatch.devices import DISPATCH_KEYS

_DEVICES = ("cpu", "cuda")  # in the order of `keys` in direct.c
_MODES = 2  # outside and inside of inference mode
_IMPLEMENTATION_BYTES = 192  # of PyTorch's TensorImpl
_METH_FASTCALL = 0x80
_WORD = 8

_FUNCTIONS = {
    "is_grad_enabled": "_ZN3c108GradMode10is_enabledEv",
    "has_callbacks": "_ZN2at12hasCallbacksEv",
    "count_function_modes": "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv",
    "requires_grad": "_ZNK3c1010TensorImpl13requires_gradEv",
    "wrap": "_Z16THPVariable_WrapRKN2at10TensorBaseE",
    "as_pointer": "PyLong_AsVoidPtr",
    "as_int": "PyLong_AsLongLong",
    "as_float": "PyFloat_AsDouble",
    "error_occurred": "PyErr_Occurred",
    "clear_error": "PyErr_Clear",
    "set_error": "PyErr_SetString",
    "increase": "Py_IncRef",
    "decrease": "Py_DecRef",
    "new_tuple": "PyTuple_New",
    "set_item": "PyTuple_SetItem",
    "release_lock": "PyEval_SaveThread",
    "take_lock": "PyEval_RestoreThread",
}
_Memory = TypeVar("_Memory", bound=ctypes.Structure | ctypes.Array)
_LOCAL_KEYS = "_ZN3c104impl26raw_local_dispatch_key_setE"


class _Python(ctypes.Structure):
    """`Python` of direct.c."""

    _fields_ = [
        ("type_at", c_int64),
        ("implementation_at", c_int64),
        ("keys_at", c_int64),
        ("tensor_types", c_uint64 * 2),
        ("states", c_uint64 * 2 * _MODES),
        ("ignored", c_uint64),
        ("keys", c_uint64 * _MODES * len(_DEVICES)),
        *((name, c_uint64) for name in ("int_type", "float_type", "true_value", "false_value")),
        *((name, c_void_p) for name in ("none", "runtime_error", "pytorch", "find_symbol", *_FUNCTIONS)),
    ]


class _Method(ctypes.Structure):
    """`PyMethodDef`."""

    _fields_ = [("name", ctypes.c_char_p), ("function", c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)]


def decline(*values: Any) -> bool:
    """Leaves a call to the dispatcher, without a look at whether something watches it."""
    return False


def is_result(found: Any) -> bool:
    """Returns whether what a direct call has returned is the result of a kernel."""
    return found is not None and found is not False


class Direct:
    """The direct calls of one registration.

    Attributes:
        call: takes the arguments of a kernel; returns its results. Where the dispatcher has to be called: False, or
            None if no mode, transform, tracer, autocast or profiler is active.
    """

    def __init__(self) -> None:
        self.call: Callable[..., Any] = decline
        self._slots = _kept((c_void_p * len(_DEVICES))())
        self._function: Callable[..., Any] | None = None

    def add(self, library: ctypes.PyDLL, device: str, backend: str, declaration: Declaration) -> None:
        """Lets calls on a type of device go to kernels that are registered.

        Args:
            library: has the kernels.
            backend: the library's name for the set of kernels that is registered.
            declaration: the operator. One that writes into its arguments has to count their versions.
        """
        has_slots = device in _DEVICES and hasattr(library, "opwright_slot")
        if has_slots and not declaration.contract.mutated and hasattr(_pytorch(), _LOCAL_KEYS):
            library.opwright_slot.restype = c_void_p
            self._slots[_DEVICES.index(device)] = library.opwright_slot(backend.encode(), declaration.name.encode())
            self.call = partial(self._prepare, library)

    def _prepare(self, library: ctypes.PyDLL, *values: Any) -> Any:
        """Declines calls until no mode or transform is active; then replaces itself by the function of C, if it can."""
        with torch.inference_mode(False):  # calls in inference mode do not wait
            if not _is_quiet():
                return False
            table = _python()
            if table is None:
                self.call = decline
                return False
        if self._function is None:
            library.opwright_use_python(ctypes.byref(table))
            self._function = _make_function(library, ctypes.addressof(self._slots))
        self.call = self._function
        return self.call(*values)


def _is_quiet() -> bool:
    """Whether new tensors are plain, and this thread's keys are PyTorch's default."""
    is_watched = (
        torch.compiler.is_compiling()
        or _torch.count_dispatch_modes()
        or _torch.count_function_modes()
        or _torch.are_transforms_active()
    )
    return not is_watched and _local_keys() == [0, 0]


@cache
def _pytorch() -> ctypes.PyDLL:
    return ctypes.PyDLL(_torch.find_extension())


@cache
def _ignored_keys() -> int:
    """Up to 2.12, PyTorch's threads for the backward on GPUs exclude the key `Named`, which no plain tensor has."""
    return _torch.number_of_key("Named")


def _local_keys() -> list[int]:
    included, excluded = (c_uint64 * 2).in_dll(_pytorch(), _LOCAL_KEYS)  # those of this thread
    return [included, excluded & ~_ignored_keys()]


_tables: list[_Python | None] = []  # none or one


def _python() -> _Python | None:
    """Returns what is known of this process; None where something is not as expected."""
    if not _tables:
        _tables.append(_find_out())
    return _tables[0]


def _find_out() -> _Python | None:
    table = _kept(_Python())
    for field, name in _FUNCTIONS.items():
        function = getattr(pythonapi if name.startswith("Py") else _pytorch(), name, None)
        if function is None:
            return None
        setattr(table, field, ctypes.cast(function, c_void_p))
    table.ignored = _ignored_keys()
    plain = torch.zeros(2)
    with torch.inference_mode():
        table.states[1][:] = _local_keys()
        of_inference = torch.zeros(2)
    if _plain_keys("cpu") != [_torch.keys_of(plain), _torch.keys_of(of_inference)]:
        return None
    for i, device in enumerate(_DEVICES):  # a GPU is not asked: a process that only calls on the CPU may fork
        table.keys[i][:] = _plain_keys(device)
    tensors = [plain, torch.nn.Parameter(torch.zeros(2, 3)), _torch.negated(plain), plain.to_sparse()]
    objects = [
        (
            id(tensor),
            type(tensor).__basicsize__,
            {"type": id(type(tensor)), "implementation": _torch.address_of(tensor)},
        )
        for tensor in tensors
    ]
    implementations = [
        (_torch.address_of(tensor), _IMPLEMENTATION_BYTES, {"keys": _torch.keys_of(tensor)}) for tensor in tensors
    ]
    type_at, implementation_at = _place(objects, "type"), _place(objects, "implementation")
    keys_at = _place(implementations, "keys")
    if type_at is None or implementation_at is None or keys_at is None:
        return None
    table.type_at, table.implementation_at, table.keys_at = type_at, implementation_at, keys_at
    table.tensor_types[:] = [id(torch.Tensor), id(torch.nn.Parameter)]
    table.int_type, table.float_type, table.true_value, table.false_value = id(int), id(float), id(True), id(False)
    table.none, table.runtime_error, table.pytorch = id(None), id(RuntimeError), _torch.handle_of(_pytorch())
    table.find_symbol = ctypes.cast(ctypes.CDLL(None).dlsym, c_void_p)
    return table


def _place(parts: Iterable[tuple[int, int, dict[str, int]]], name: str) -> int | None:
    """Returns at which offset all parts of memory, `(address, bytes, values)`, have their value of that name."""
    places = [
        {
            offset
            for offset in range(0, size - _WORD + 1, _WORD)
            if c_uint64.from_address(address + offset).value == values[name]
        }
        for address, size, values in parts
    ]
    common = set.intersection(*places)
    return common.pop() if len(common) == 1 else None


def _plain_keys(device: str) -> list[int]:
    """Returns the keys of plain tensors on a type of device, those of inference mode behind them."""
    key = DISPATCH_KEYS[device]
    inference = (key, f"Autocast{key}")
    return [
        _torch.key_set(*inference, "ADInplaceOrView", f"Autograd{key}").raw_repr(),
        _torch.key_set(*inference).raw_repr(),
    ]


def _kept(memory: _Memory) -> _Memory:
    """Keeps memory that C reads, for ever: what runs last in a process may still call an operator."""
    pythonapi.Py_IncRef(ctypes.py_object(memory))
    return memory


def _make_function(library: ctypes.PyDLL, slots: int) -> Callable[..., Any]:
    """Returns the function of a library that calls the kernels at these addresses."""
    function = ctypes.cast(library.opwright_call_directly, c_void_p)
    method = _kept(_Method(b"call_directly", function, _METH_FASTCALL, None))
    make = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, ctypes.py_object, c_void_p)(("PyCFunction_NewEx", pythonapi))
    return make(ctypes.addressof(method), slots, None)
