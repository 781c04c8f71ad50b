"""Triton's own launchers above the stub: what of a launch reaches the driver, against values written here by hand."""

from __future__ import annotations

import ctypes
import itertools
import struct
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import stub
from stub import run_check, triton_python  # noqa: F401
from stub_calls import Driver

pytestmark = pytest.mark.compiler
KERNELS = str(Path(__file__).with_name("stub_kernels.py"))
X, Y, OUT = 0x1000, 0x2000, 0x3000


def tensor(dtype: str, address: int) -> dict[str, Any]:
    return {"tensor": dtype, "address": address}


def request(function: str, args: list[Any], grid: Any = (4,), **more: Any) -> dict[str, Any]:
    return {"file": KERNELS, "function": function, "grid": grid, "args": args, **more}


def descriptor(address: int, **more: Any) -> dict[str, Any]:
    shape = {"shape": [256, 128], "strides": [128, 1], "block": [64, 64]}
    return {"descriptor": {"dtype": "fp16", "address": address, **shape, **more}}


ADD = [*(tensor("fp32", address) for address in (X, Y, OUT)), {"int": 4000}, {"constexpr": "1024"}]
MATMUL = [tensor("fp16", X), tensor("fp16", Y), tensor("fp32", OUT), {"int": 256}]
REQUESTS = {
    "add": request("add_kernel", ADD, "add_grid", repeat=2),
    "named": request("add_kernel", dict(zip(("x", "y", "out", "n", "BLOCK"), ADD)), "add_grid"),
    "warps": request("add_kernel", ADD, (4, 2, 3), options={"num_warps": 8}),
    "empty": request("add_kernel", ADD, (4, 0)),
    "cluster": request("add_kernel", ADD, options={"num_ctas": 2}),
    "pdl": request("add_kernel", ADD, options={"launch_pdl": True}),
    "cooperative": request("add_kernel", ADD, options={"launch_cooperative_grid": True}),
    "values": request(
        "values_kernel",
        [
            tensor("fp32", 0x1001),
            {"bool": True},
            {"float": 0.1},
            {"int": -7},
            {"int": 2**33},
            {"int": 2**63 + 5},
        ],
    ),
    "annotated": request(
        "annotated_kernel",
        [
            tensor("fp64", OUT),
            *({"int": value} for value in (3, -300, -70000, -(2**40), 200, 60000, 2**31 + 5, 2**63 + 9)),
            *({"float": 0.1} for _ in range(4)),
            {"bool": True},
        ],
    ),
    "tuple": request(
        "tuple_kernel",
        [
            tensor("fp32", OUT),
            {"tuple": [tensor("fp32", X), {"tuple": [{"int": 5}, {"float": 2.5}]}]},
            {"int": 1},
        ],
    ),
    "constant": request(
        "constant_kernel",
        [
            tensor("fp16", OUT),
            {"none": True},
            *({"constexpr": text} for text in ('"twice"', "fp16", "@twice", "(16, 2)")),
        ],
    ),
    "shared": request("matmul_kernel", [*MATMUL, *({"constexpr": text} for text in ("128", "128", "64"))], (1,)),
    "host": request("host_descriptor_kernel", [descriptor(0x10000), descriptor(0x20000, padding="nan"), {"int": 64}]),
    "device": request(
        "device_descriptor_kernel",
        [tensor("fp16", X), tensor("fp16", Y), {"int": 256}, {"int": 64}, {"constexpr": "64"}],
        stream="new",
        scratch=0x5000,
    ),
    "other device": request("add_kernel", ADD, "add_grid", device=1),
    "wrong type": request("add_kernel", [{"constexpr": '"text"'}, *ADD[1:]]),
}


@pytest.fixture(scope="module")
def genuine(triton_python: Path) -> dict[str, list[dict[str, Any]]]:  # noqa: F811
    """The results of REQUESTS by name."""
    results = iter(stub.run_genuine(triton_python, list(REQUESTS.values()), devices=2))
    return {name: list(itertools.islice(results, given.get("repeat", 1))) for name, given in REQUESTS.items()}


def record_of(genuine: dict[str, list[dict[str, Any]]], name: str) -> dict[str, Any]:
    result = genuine[name][0]
    assert result["error"] is None, result["error"]
    (record,) = result["records"]
    return record


def attributes_of(record: dict[str, Any]) -> dict[str, Any]:
    return {attribute["name"]: attribute["value"] for attribute in record["attributes"]}


def test_genuine_launch(genuine: Any) -> None:
    record = record_of(genuine, "add")
    assert stub.unpack_params(record, "QQQiQQ") == [X, Y, OUT, 4000, 0, 0]
    assert [param["offset"] for param in record["params"]] == [0, 8, 16, 24, 32, 40]
    assert (record["grid"], record["block"], record["shared"]) == ([4, 1, 1], [128, 1, 1], 0)
    assert (record["kernel"], record["call"], record["attributes"]) == ("add_kernel", "cuLaunchKernelEx", [])
    assert record["image"] == stub.image_digest(Path(genuine["add"][0]["cubin"]).read_bytes())
    assert record_of(genuine, "named") == record
    again = genuine["add"][1]
    assert again["records"] == [record]
    assert again["counts"] == {"cuCtxGetCurrent": 1, "cuPointerGetAttribute": 3, "cuLaunchKernelEx": 1}


def test_genuine_grid_and_warps(genuine: Any) -> None:
    record = record_of(genuine, "warps")
    assert (record["grid"], record["block"]) == ([4, 2, 3], [256, 1, 1])
    assert genuine["empty"][0]["error"] is None
    assert genuine["empty"][0]["records"] == []
    assert "cuLaunchKernelEx" not in genuine["empty"][0]["counts"]


def test_genuine_attributes(genuine: Any) -> None:
    record = record_of(genuine, "cluster")
    assert record["grid"] == [8, 1, 1]
    assert attributes_of(record) == {
        "cluster_dimension": [2, 1, 1],
        "cluster_scheduling_policy_preference": 1,
    }
    assert attributes_of(record_of(genuine, "pdl")) == {"programmatic_stream_serialization": 1}
    assert attributes_of(record_of(genuine, "cooperative")) == {"cooperative": 1}


def test_genuine_values(genuine: Any) -> None:
    found = stub.unpack_params(record_of(genuine, "values"), "QBfiqQQQ")
    assert found[2] == pytest.approx(0.1)
    assert found[:2] + found[3:] == [0x1001, 1, -7, 2**33, 2**63 + 5, 0, 0]


def test_genuine_annotated_values(genuine: Any) -> None:
    found = stub.unpack_params(record_of(genuine, "annotated"), "QbhiqBHIQeHfdBQQ")
    whole, floats, flag = found[1:9], found[9:13], found[13]
    assert whole == [3, -300, -70000, -(2**40), 200, 60000, 2**31 + 5, 2**63 + 9]
    bf16 = struct.unpack("<f", struct.pack("<I", floats.pop(1) << 16))[0]
    assert floats == [struct.unpack("<e", struct.pack("<e", 0.1))[0], pytest.approx(0.1), 0.1]
    assert bf16 == pytest.approx(0.1, rel=1 / 128)
    assert bf16 < 0.1, "cut off, not rounded: 0x3dcc"
    assert flag == 1


def test_genuine_tuples_and_constants(genuine: Any) -> None:
    assert stub.unpack_params(record_of(genuine, "tuple"), "QQifQQ") == [OUT, X, 5, 2.5, 0, 0]
    assert stub.unpack_params(record_of(genuine, "constant"), "QQQ") == [OUT, 0, 0]


def test_genuine_large_shared_memory(genuine: Any) -> None:
    result = genuine["shared"][0]
    record = record_of(genuine, "shared")
    assert record["shared"] == result["metadata"]["shared"] > 49152
    assert result["counts"]["cuFuncSetAttribute"] >= 1


def test_genuine_oversized_shared_memory(triton_python: Path) -> None:  # noqa: F811
    """Tritons from 3.8 on try a newer attribute first, and leave the older alone where it is known."""
    (result,) = stub.run_genuine(triton_python, [REQUESTS["shared"]], oversized_shared=True)
    assert result["error"] is None
    newer = stub.triton_version(triton_python) >= (3, 8)
    assert result["counts"].get("cuFuncSetCacheConfig", 0) == (0 if newer else 1)


def test_genuine_host_descriptors(genuine: Any, triton_python: Path) -> None:  # noqa: F811
    record = record_of(genuine, "host")
    maps = [bytes.fromhex(param["hex"]) for param in record["params"] if param["size"] == 128]
    assert [struct.unpack("<Q", found[:8])[0] for found in maps] == [0x10000, 0x20000]
    assert [found[10] >> 2 & 1 for found in maps] == [0, 1], "fill with NaN"
    # Triton clears bit 21 for tensors under 128 KB, under drivers up to 13.1; these have 64.
    cleared = stub.triton_version(triton_python) >= (3, 7)
    assert [found[10] >> 5 & 1 for found in maps] == [0 if cleared else 1] * 2
    rest = {**record, "params": [param for param in record["params"] if param["size"] != 128]}
    assert stub.unpack_params(rest, "iiqqiiqqiQQ") == [256, 128, 128, 1] * 2 + [64, 0, 0]


def test_genuine_global_scratch(genuine: Any) -> None:
    result = genuine["device"][0]
    record = record_of(genuine, "device")
    assert stub.unpack_params(record, "QQiiQQ") == [X, Y, 256, 64, 0x5000, 0]
    (allocated,) = result["scratch"]
    size = result["metadata"]["global_scratch_size"]
    assert (allocated["size"], allocated["align"]) == (4 * size, 128)
    assert allocated["stream"] == record["stream"] > 2


def test_genuine_second_device(genuine: Any) -> None:
    first, second = record_of(genuine, "add"), record_of(genuine, "other device")
    assert (first["device"], second["device"]) == (0, 1)
    assert first["params"] == second["params"]
    assert first["context"] != second["context"]


def test_a_launch_that_fails_is_a_result(genuine: Any) -> None:
    (result,) = genuine["wrong type"]
    assert result["records"] == []
    assert result["error"]["type"] == "TypeError"


def test_genuine_driver_errors(triton_python: Path) -> None:  # noqa: F811
    launches = [request("add_kernel", ADD, "add_grid", repeat=2)]
    results = stub.run_genuine(triton_python, launches, fail="cuLaunchKernelEx:1:700")
    assert results[0]["error"]["message"] == "Triton Error [CUDA]: an illegal memory access was encountered"
    assert results[1]["error"] is None
    (result,) = stub.run_genuine(triton_python, [request("add_kernel", ADD)], unified=False)
    assert "cpu tensor?" in result["error"]["message"]


def check_load(status: str, cubin: str) -> None:
    driver = Driver()
    driver.start()
    assert driver.cuModuleLoadData(ctypes.byref(ctypes.c_void_p()), Path(cubin).read_bytes()) == int(status)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_genuine_cubins_run_on_their_own_architecture(triton_python: Path, arch: int) -> None:  # noqa: F811
    (result,) = stub.run_genuine(triton_python, [request("add_kernel", ADD)], arch=arch)
    assert result["error"] is None
    for device in (80, 90, 100):
        run_check(check_load, 0 if device == arch else 209, result["cubin"], arch=device)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
