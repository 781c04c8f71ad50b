"""Launches kernels through Triton's own `kernel[grid](...)` over the stub driver, and records what reaches it.

    LD_LIBRARY_PATH=<stub> TRITON_LIBCUDA_PATH=<stub> python genuine_launch.py LAUNCHES.json RESULTS.json

`python` has Triton 3.5 to 3.9; torch is not needed and not imported. `stub.py` sets the environment.

LAUNCHES.json is a list of

    {"file": "add.py", "function": "add_kernel",
     "grid": [4, 1, 1] or the name of a function of the module,
     "args": [ARG, ...] in the signature's order, or {name: ARG},
     "options": {"num_warps": 8},
     "device": 0, "stream": 0 or "new", "scratch": 4096, "repeat": 1}        the last four may be absent

with ARG one of

    {"tensor": "fp16", "address": 4096, "shape": [8], "stride": [1]}         nothing is read from the address
    {"int": 3}  {"float": 0.5}  {"bool": true}  {"none": true}  {"tuple": [ARG, ...]}
    {"constexpr": VALUE}                                                     text as in docs/decisions/0006
    {"descriptor": {"dtype": "fp16", "address": 4096, "shape": [..], "strides": [..], "block": [..],
                    "padding": "nan", "round_f32_to_tf32": true}}            the last two may be absent

RESULTS.json is a list, one for each launch (and each repetition), of

    {"error": null or {"type", "message"}, "records": the stub's lines, "counts": driver calls by name,
     "scratch": [{"kind", "size", "align", "stream", "address"}], "metadata": the compiled kernel's,
     "cubin": its path}
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import triton
import triton.language as tl
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
from triton.runtime import _allocation, driver

_ITEM_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "1": 1}
_METADATA = (
    "name num_warps num_ctas shared tmem_size global_scratch_size global_scratch_align profile_scratch_size "
    "profile_scratch_align launch_pdl launch_cooperative_grid"
).split()
_DEFAULT_SCRATCH = 0x7F00_0000_0000


class Dtype:
    """What Triton asks of a torch dtype: its name as text, and for descriptors its size and kind."""

    def __init__(self, name: str) -> None:
        self.name = name
        digits = re.search(r"fp(8)|(\d+)$", name)
        self.itemsize = _ITEM_SIZES[digits[1] or digits[2]]
        self.is_floating_point = "f" in name

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dtype) and other.name == self.name


class Tensor:
    """What Triton asks of a tensor; no memory is behind it."""

    def __init__(self, dtype: str, address: int, shape: list[int], stride: list[int]) -> None:
        self.dtype = Dtype(dtype)
        self.shape = shape
        self._address = address
        self._stride = stride

    def data_ptr(self) -> int:
        return self._address

    def stride(self) -> list[int]:
        return self._stride


class Buffer:
    """What Triton asks of an allocator's result."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class StubDriver(CudaDriver):
    """Triton's driver with its own utils and launcher; only what it asks torch for is answered here.

    Device and stream are Python's own state, so that every call the stub counts is one of Triton's.
    """

    def __init__(self) -> None:
        self.utils = CudaUtils()
        self.launcher_cls = CudaLauncher
        self.device = 0
        self.stream = 0

    def get_current_device(self) -> int:
        return self.device

    def set_current_device(self, device: int) -> None:
        self.device = device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return CUDA.capabilities[device]


class Cuda:
    """The stub, as far as this script calls it itself."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        if not hasattr(self.library, "stub_record"):
            raise SystemExit("genuine_launch.py: libcuda.so.1 is not the stub driver; see stub.py")
        self.library.stub_count.restype = ctypes.c_int64
        self.call("cuInit", 0)
        self._streams: dict[int, int] = {}
        self.stream_ids: dict[int | None, int] = {}  # the numbers that the recorder writes
        self.capabilities = []
        count, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        for device in range(count.value):
            self.call("cuDeviceComputeCapability", ctypes.byref(major), ctypes.byref(minor), device)
            self.capabilities.append((major.value, minor.value))
        names = os.path.join(os.path.dirname(__file__), "..", "..", "native", "stub_functions.h")
        with open(names) as file:
            self.functions = re.findall(r"F\((cu\w+)\)", file.read())

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} returned {status}")

    def use_device(self, device: int) -> None:
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def stream(self, device: int) -> int:
        if device not in self._streams:
            stream = ctypes.c_void_p()
            self.call("cuStreamCreate", ctypes.byref(stream), 1)
            self._streams[device] = stream.value
            number = ctypes.c_uint64()
            self.call("cuStreamGetId", stream, ctypes.byref(number))
            self.stream_ids[stream.value] = number.value
        return self._streams[device]

    def counts(self) -> dict[str, int]:
        found = {name: self.library.stub_count(name.encode()) for name in self.functions}
        return {name: count for name, count in found.items() if count > 0}


class Values:
    """Reads VALUE texts; `@name` is a function of the module."""

    _WORDS: ClassVar = {
        "True": True,
        "False": False,
        "None": None,
        "inf": math.inf,
        "-inf": -math.inf,
        "nan": math.nan,
    }

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def parse(self, text: str) -> Any:
        value, rest = self._read(text)
        if rest:
            raise ValueError(f"{text!r} is not a VALUE: {rest!r} is left over")
        return value

    def _read(self, text: str) -> tuple[Any, str]:
        if text.startswith('"'):
            value, end = json.JSONDecoder().raw_decode(text)
            return value, text[end:]
        if text.startswith("("):
            items, text = [], text[1:]
            while not text.startswith(")"):
                item, text = self._read(text)
                items.append(item)
                text = re.sub(r"^,\s*", "", text)
            return tuple(items), text[1:]
        word, rest = re.match(r"([^,()]+)(.*)", text, re.DOTALL).groups()
        if word in self._WORDS:
            return self._WORDS[word], rest
        if word.startswith("@"):
            found: Any = self.module
            for name in word[1:].split("."):
                found = getattr(found, name)
            return found, rest
        if re.fullmatch(r"-?\d+", word):
            return int(word), rest
        if re.match(r"-?\d", word):
            return float(word), rest
        return tl.dtype(word), rest


def make_argument(argument: dict[str, Any], values: Values) -> Any:
    """Returns the Python object that an ARG stands for."""
    if "tensor" in argument:
        shape = argument.get("shape", [1])
        return Tensor(argument["tensor"], argument["address"], shape, argument.get("stride", [1] * len(shape)))
    if "descriptor" in argument:
        from triton.tools.tensor_descriptor import TensorDescriptor

        given = argument["descriptor"]
        base = Tensor(given["dtype"], given["address"], given["shape"], given["strides"])
        extra = {name: given[name] for name in ("padding", "round_f32_to_tf32") if name in given}
        return TensorDescriptor(base, given["shape"], given["strides"], given["block"], **extra)
    if "tuple" in argument:
        return tuple(make_argument(item, values) for item in argument["tuple"])
    if "constexpr" in argument:
        return values.parse(argument["constexpr"])
    if "none" in argument:
        return None
    for kind, convert in (("int", int), ("float", float), ("bool", bool)):
        if kind in argument:
            return convert(argument[kind])
    raise ValueError(f"no ARG: {argument}")


def load_module(path: str, loaded: dict[str, ModuleType]) -> ModuleType:
    """Imports a kernel's file, once."""
    path = os.path.abspath(path)
    if path not in loaded:
        name = os.path.splitext(os.path.basename(path))[0]
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        sys.path.insert(0, os.path.dirname(path))
        spec.loader.exec_module(module)
        loaded[path] = module
    return loaded[path]


def prepare(request: dict[str, Any], module: ModuleType, active: StubDriver) -> Callable[[], Any]:
    """Makes the arguments and the device current; returns the launch, which returns Triton's compiled kernel."""
    values = Values(module)
    arguments = request.get("args", [])
    positional, named = [], {}
    if isinstance(arguments, dict):
        named = {name: make_argument(value, values) for name, value in arguments.items()}
    else:
        positional = [make_argument(value, values) for value in arguments]
    grid = request["grid"]
    if isinstance(grid, str):
        grid = getattr(module, grid)
    device = request.get("device", 0)
    if device != active.device:
        CUDA.use_device(device)
    active.device = device
    stream = request.get("stream", 0)
    active.stream = CUDA.stream(device) if stream == "new" else stream
    function = getattr(module, request["function"])
    return lambda: function[grid](*positional, **named, **request.get("options", {}))


def run(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Does all launches; an exception of one is its result."""
    active = StubDriver()
    driver.set_active(active)
    modules: dict[str, ModuleType] = {}
    allocated: list[dict[str, Any]] = []
    scratch = _DEFAULT_SCRATCH

    def allocator(kind: str) -> Any:
        def allocate(size: int, align: int, stream: int | None) -> Buffer:
            known = CUDA.stream_ids.get(stream, stream)
            allocated.append({"kind": kind, "size": size, "align": align, "stream": known, "address": scratch})
            return Buffer(scratch)

        return allocate

    triton.set_allocator(allocator("global"))
    _allocation.set_profile_allocator(allocator("profile"))
    CUDA.use_device(0)
    results = []
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as lines:
        CUDA.call("stub_record", lines.name.encode())
        for request in requests:
            scratch = request.get("scratch", _DEFAULT_SCRATCH)
            for _ in range(request.get("repeat", 1)):
                result: dict[str, Any] = {"error": None, "metadata": None, "cubin": None}
                before = CUDA.counts()
                try:
                    launch = prepare(request, load_module(request["file"], modules), active)
                    before = CUDA.counts()
                    kernel = launch()
                    result["metadata"] = {name: getattr(kernel.metadata, name, None) for name in _METADATA}
                    result["cubin"] = next(
                        str(path) for name, path in kernel.metadata_group.items() if name.endswith(".cubin")
                    )
                except Exception as error:
                    result["error"] = {"type": type(error).__name__, "message": str(error)}
                after = CUDA.counts()
                result["counts"] = {
                    name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)
                }
                result["records"] = [json.loads(line) for line in lines.read().splitlines()]
                result["scratch"] = allocated[:]
                allocated.clear()
                results.append(result)
    return results


def main() -> None:
    source, target = sys.argv[1:]
    with open(source) as file:
        requests = json.load(file)
    results = run(requests)
    with open(target, "w") as file:
        json.dump(results, file)


CUDA = Cuda()
if __name__ == "__main__":
    main()
