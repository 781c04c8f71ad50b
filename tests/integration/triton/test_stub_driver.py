"""The stub driver by itself, through ctypes.

A check_* function runs in a process of its own, above the stub; `stub.run_check` starts it.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from stub import run_check
from stub_calls import Driver, cluster, make_cubin

pytestmark = pytest.mark.compiler


# ---- launches


def check_refused_launches() -> None:
    driver = Driver()
    first = driver.start()
    function = driver.load(make_cubin(params=()))
    assert driver.launch(function) == 0
    assert driver.launch(function, grid=(0, 1, 1)) == 1
    assert driver.launch(function, grid=(1, 65536, 1)) == 1
    assert driver.launch(function, block=(256, 1, 1)) == 1, "not .reqntid"
    assert driver.launch(function, block=(64, 1, 1)) == 1, "not .reqntid"
    assert driver.launch(driver.load(make_cubin(params=(), threads=0)), block=(1025, 1, 1)) == 1
    assert driver.launch(function, stream=0xDEAD) == 400
    assert driver.launch(function, shared=49153) == 1
    assert driver.cuFuncSetAttribute(function, 8, 232449) == 1, "227 KB are what sm_90 has"
    assert driver.cuFuncSetAttribute(function, 8, 232448) == 0
    assert driver.launch(function, shared=49153) == 0
    driver.start(1)
    assert driver.launch(function) == 400, "a function of another context"
    own = driver.load(make_cubin(params=()))
    stream = driver.make("cuStreamCreate", 1)
    assert driver.launch(own, stream=stream) == 0
    assert driver.cuCtxSetCurrent(first) == 0
    assert driver.launch(own) == 400
    assert driver.launch(function, stream=stream) == 400
    assert driver.launch(function) == 0
    assert driver.cuCtxSetCurrent(None) == 0
    assert driver.launch(function) == 201


def check_clusters() -> None:
    driver = Driver()
    driver.start()
    plain, two = driver.load(make_cubin(params=())), driver.load(make_cubin(params=(), clusters=2))
    assert driver.launch(plain, attributes=[cluster(4)]) == 0
    assert driver.launch(plain, attributes=[cluster(3)]) == 912, "does not divide the grid"
    assert driver.launch(two, attributes=[cluster(2)]) == 0
    assert driver.launch(two) == 0, "the cubin states it"
    assert driver.launch(two, attributes=[cluster(4)]) == 912
    assert driver.launch(plain, grid=(16, 1, 1), attributes=[cluster(16)]) == 912, "not portable"
    assert driver.cuFuncSetAttribute(plain, 14, 1) == 0
    assert driver.launch(plain, grid=(16, 1, 1), attributes=[cluster(16)]) == 0


# ---- images


def check_images() -> None:
    driver = Driver()
    assert driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) == 3
    assert driver.cuInit(0) == 0
    good = make_cubin()
    module = ctypes.c_void_p()
    assert driver.cuModuleLoadData(ctypes.byref(module), good) == 201
    driver.start()
    assert driver.cuModuleLoadData(ctypes.byref(module), good) == 0
    function = ctypes.c_void_p()
    assert driver.cuModuleGetFunction(ctypes.byref(function), module, b"kernels") == 500
    assert driver.cuModuleGetFunction(ctypes.byref(function), module, b"kernel") == 0
    assert driver.cuModuleUnload(module) == 0
    assert driver.cuModuleGetFunction(ctypes.byref(function), module, b"kernel") == 400
    assert driver.launch(function) == 400
    for bad in (b"garbage", b"\x7fELF", b"\x7fELF" + bytes(100), good[:64], bytes(64) + good):
        assert driver.cuModuleLoadData(ctypes.byref(module), bad) == 200, bad[:8]
    assert driver.cuModuleLoadData(ctypes.byref(module), None) == 1
    # Offsets that lead anywhere: an error, never a fault.
    for at, flip in itertools.product(range(len(good)), (0x01, 0x80, 0xFF)):
        flipped = bytearray(good)
        flipped[at] ^= flip
        assert driver.cuModuleLoadData(ctypes.byref(module), bytes(flipped)) in (0, 200, 209), at


def check_attributes() -> None:
    driver = Driver()
    driver.start()
    function = driver.load(make_cubin(clusters=2, static_shared=1024 + 96))
    expected = {0: 128, 1: 96, 4: 40, 6: 90, 8: 49152 - 96, 11: 2, 12: 1, 13: 1, 14: 0}
    for attribute, value in expected.items():
        assert driver.make("cuFuncGetAttribute", attribute, function, out=ctypes.c_int).value == value, attribute
    assert driver.cuFuncSetAttribute(function, 0, 64) == 1, "read only"
    assert driver.cuFuncSetAttribute(function, 8, 232448) == 1, "less the static 96"
    assert driver.cuFuncSetAttribute(function, 8, 232448 - 96) == 0
    assert driver.cuFuncSetAttribute(function, 17, 3) == 1, "of a later CUDA"


# ---- contexts and devices


def check_devices() -> None:
    driver = Driver()
    contexts = [driver.start(1), driver.start(0)]
    contexts.reverse()
    assert driver.make("cuDeviceGetCount", out=ctypes.c_int).value == 2
    assert driver.cuModuleLoadData(ctypes.byref(ctypes.c_void_p()), make_cubin(arch=80)) == 209, "device 0 is sm_90"
    assert driver.cuCtxSetCurrent(contexts[1]) == 0
    module = driver.make("cuModuleLoadData", make_cubin(arch=80))
    function = driver.make("cuModuleGetFunction", module, b"kernel")
    assert driver.make("cuModuleGetFunction", module, b"kernel").value == function.value
    assert driver.cuFuncSetAttribute(function, 8, 100000) == 0
    assert driver.cuFuncSetAttribute(function, 8, 200000) == 1, "sm_80 has 163 KB"
    assert driver.make("cuFuncGetAttribute", 8, function, out=ctypes.c_int).value == 100000
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    found = []
    for index in itertools.count():
        if driver.cuFuncGetParamInfo(function, index, ctypes.byref(offset), ctypes.byref(size)) != 0:
            break
        found.append((offset.value, size.value))
    assert found == [(0, 8), (8, 4)]
    params = [ctypes.c_uint64(), ctypes.c_uint32()]
    assert driver.launch(function, params) == 0
    memory = driver.make("cuMemAlloc_v2", ctypes.c_size_t(1000), out=ctypes.c_uint64)
    assert driver.cuCtxSetCurrent(contexts[0]) == 0
    inside = ctypes.c_uint64(memory.value + 999)
    assert driver.make("cuPointerGetAttribute", 9, inside, out=ctypes.c_int).value == 1
    assert driver.make("cuPointerGetAttribute", 1, inside).value == contexts[1].value
    assert driver.cuMemFree_v2(memory) == 0
    assert driver.cuMemFree_v2(memory) == 1


# ---- names


def check_names() -> None:
    driver = Driver()
    address = {
        name: ctypes.cast(getattr(driver.library, name), ctypes.c_void_p).value
        for name in ("cuCtxGetDevice", "cuCtxGetDevice_v2", "cuMemAlloc_v2", "cuLaunchKernel")
    }

    def lookup(name: str, version: int) -> int | None:
        found = ctypes.c_void_p()
        driver.cuGetProcAddress_v2(name.encode(), ctypes.byref(found), version, ctypes.c_uint64(0), None)
        return found.value

    assert lookup("cuCtxGetDevice", 12000) == address["cuCtxGetDevice"]
    assert lookup("cuCtxGetDevice", 13000) == address["cuCtxGetDevice_v2"]
    assert lookup("cuMemAlloc", 12000) == lookup("cuMemAlloc_v2", 12000) == address["cuMemAlloc_v2"]
    assert lookup("cuLaunchKernel", 12000) == address["cuLaunchKernel"]
    assert lookup("cuNothing", 12000) is None
    assert lookup("stub_count", 12000) is None
    text = ctypes.c_char_p()
    for number, name, message in (
        (400, b"CUDA_ERROR_INVALID_HANDLE", b"invalid resource handle"),
        (209, b"CUDA_ERROR_NO_BINARY_FOR_GPU", b"no kernel image is available for execution on the device"),
    ):
        assert driver.cuGetErrorName(number, ctypes.byref(text)) == 0
        assert text.value == name
        assert driver.cuGetErrorString(number, ctypes.byref(text)) == 0
        assert text.value == message
    assert driver.cuGetErrorName(12345, ctypes.byref(text)) == 1


# ---- tensor maps


def check_tensor_maps() -> None:
    driver = Driver()
    driver.start()
    buffer = ctypes.create_string_buffer(256)
    place = (ctypes.addressof(buffer) + 127) & -128

    def encode(**changes: Any) -> bytes | int:
        given: dict[str, Any] = {
            "type": 6,
            "rank": 3,
            "address": 4096,
            "dims": (64, 32, 8),
            "strides": (128, 4096),
            "box": (32, 8, 2),
            "steps": (1, 1, 1),
            "interleave": 0,
            "swizzle": 3,
            "promotion": 2,
            "fill": 0,
        } | changes
        status = driver.cuTensorMapEncodeTiled(
            ctypes.c_void_p(place),
            given["type"],
            given["rank"],
            ctypes.c_void_p(given["address"]),
            (ctypes.c_uint64 * 5)(*given["dims"]),
            (ctypes.c_uint64 * 4)(*given["strides"]),
            (ctypes.c_uint32 * 5)(*given["box"]),
            (ctypes.c_uint32 * 5)(*given["steps"]),
            *(given[name] for name in ("interleave", "swizzle", "promotion", "fill")),
        )
        return ctypes.string_at(place, 128) if status == 0 else status

    assert encode() == encode()
    changes = [
        {"type": 9},
        {"rank": 2},
        {"address": 4112},
        {"dims": (65, 32, 8)},
        {"dims": (64, 33, 8)},
        {"dims": (64, 32, 2**32)},
        {"strides": (144, 4096)},
        {"strides": (128, 4112)},
        {"box": (64, 8, 2)},
        {"box": (32, 256, 2)},
        {"box": (32, 8, 1)},
        {"steps": (2, 1, 1)},
        {"steps": (1, 1, 8)},
        {"swizzle": 2},
        {"promotion": 3},
        {"fill": 1},
    ]
    maps = [encode(), *(encode(**change) for change in changes)]
    assert all(isinstance(found, bytes) for found in maps), maps
    assert len(set(maps)) == len(maps)
    assert all(found[10] & 0x20 for found in maps), "the bit that Triton clears of small tensors"
    for change in (
        {"rank": 0},
        {"rank": 6},
        {"address": 4104},
        {"dims": (0, 32, 8)},
        {"strides": (120, 4096)},
        {"box": (257, 8, 2)},
        {"box": (128, 8, 2)},  # 256 bytes in a swizzle of 128
        {"box": (4, 8, 2)},  # 8 bytes
        {"steps": (9, 1, 1)},
        {"type": 16},
        {"fill": 2},
    ):
        assert encode(**change) == 1, change


CHECKS: dict[Callable[[], None], dict[str, Any]] = {
    check_refused_launches: {"devices": 2},
    check_clusters: {},
    check_images: {},
    check_attributes: {},
    check_devices: {"devices": 2, "arch": "90,80"},
    check_names: {},
    check_tensor_maps: {},
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_the_stub(check: Callable[[], None]) -> None:
    run_check(check, **CHECKS[check])


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
