"""A launch from C++ reaches the driver exactly as Triton's own launcher makes it, for every class of argument."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import runtime
import stub
from stub import triton_python  # noqa: F401

pytestmark = pytest.mark.compiler
KERNELS = str(Path(__file__).with_name("stub_kernels.py"))
POINTERS = "fp16 bf16 fp32 fp64 fp8e4nv fp8e5 i8 i16 i32 i64 u8 u16 u32 u64".split()


def tensor(dtype: str, address: int) -> dict[str, Any]:
    return {"tensor": dtype, "address": address}


def launch(function: str, args: Any, grid: Any = (4,), **more: Any) -> dict[str, Any]:
    return {"file": KERNELS, "function": function, "grid": grid, "args": args, **more}


def more(function: str, args: Any, grid: Any = (4,)) -> dict[str, Any]:
    return launch(function, args, grid) | {"file": str(Path(KERNELS).with_name("differential_kernels.py"))}


def descriptor(address: int, **more: Any) -> dict[str, Any]:
    shape = {"shape": [256, 128], "strides": [128, 1], "block": [64, 64]}
    return {"descriptor": {"dtype": "fp16", "address": address, **shape, **more}}


def add(n: int = 4000, dtype: str = "fp32", x: int = 0x1000, grid: Any = "add_grid", **more: Any) -> dict[str, Any]:
    arguments = [
        *(tensor(dtype, address) for address in (x, 0x2000, 0x3000)),
        {"int": n},
        {"constexpr": "1024"},
    ]
    return launch("add_kernel", arguments, grid, **more)


def annotated(*floats: Any) -> dict[str, Any]:
    whole = (3, -300, -70000, -(2**40), 200, 60000, 2**31 + 5, 2**40)
    return launch(
        "annotated_kernel",
        [tensor("fp64", 0x3000), *({"int": value} for value in whole), *floats, {"bool": True}],
    )


def matmul(*sizes: str) -> dict[str, Any]:
    pointers = [tensor("fp16", 0x1000), tensor("fp16", 0x2000), tensor("fp32", 0x3000)]
    return launch("matmul_kernel", [*pointers, {"int": 256}, *({"constexpr": text} for text in sizes)], (1,))


def values(flag: bool, number: float, small: int, large: int, unsigned: Any) -> dict[str, Any]:
    arguments = [{"bool": flag}, {"float": number}, {"int": small}, {"int": large}, {"int": unsigned}]
    return launch("values_kernel", [tensor("fp32", 0x1001), *arguments])


LAUNCHES = {
    "add": add(repeat=2),
    "multiple of 16": add(4096),
    "one": add(1),
    "zero": add(0, grid=(1,)),
    "negative": add(-16, grid=(1,)),
    "beyond 32 bits": add(2**33 + 1, grid=(1,)),
    "beyond 32 bits, multiple of 16": add(2**33, grid=(1,)),
    "most negative int32": add(-(2**31), grid=(1,)),
    "below int32": add(-(2**31) - 1, grid=(1,)),
    "not aligned": add(x=0x1004),
    "null": add(x=0),
    "by name": launch(
        "add_kernel", dict(zip(("x", "y", "out", "n", "BLOCK"), add()["args"])), "add_grid"
    ),
    **{f"pointer to {dtype}": add(dtype=dtype) for dtype in POINTERS if "8e" not in dtype},
    **{
        f"pointer to {dtype}": more("copy_kernel", [tensor(dtype, 0x1000), tensor(dtype, 0x2001)])
        for dtype in POINTERS
        if "8e" in dtype
    },
    "pointer to bool": more("copy_kernel", [tensor("u1", 0x1000), tensor("u1", 0x2001)]),
    "not specialized": more("unspecialized_kernel", [*({"int": 16},) * 3, *(tensor("fp32", 0x1000),) * 3]),
    "not specialized, ones": more("unspecialized_kernel", [*({"int": 1},) * 3, *(tensor("fp32", 0x1004),) * 3]),
    "defaults": more("defaults_kernel", [tensor("fp32", 0x1000)]),
    "some defaults": more("defaults_kernel", {"out": tensor("fp32", 0x1000), "BLOCK": {"constexpr": "32"}, "n": {"int": 16}}),
    "nothing": launch("nothing_kernel", []),
    "three dimensions": add(grid=(4, 2, 3), options={"num_warps": 8}),
    "empty": add(grid=(4, 0)),
    "cluster": add(options={"num_ctas": 2}),
    "dependent launch": add(options={"launch_pdl": True}),
    "cooperative": add(options={"launch_cooperative_grid": True}),
    "cluster of a cooperative, dependent launch": add(
        options={"launch_cooperative_grid": True, "launch_pdl": True, "num_ctas": 4}
    ),
    "values": values(True, 0.1, -7, 2**33, 2**62),
    "values, of other classes": values(False, -1e-42, 1, 16, 3),
    "annotated": annotated(*({"float": 0.1} for _ in range(4))),
    "annotated, negative": annotated(*({"float": -3e-6} for _ in range(4))),
    "tuple": launch(
        "tuple_kernel",
        [
            tensor("fp32", 0x3000),
            {"tuple": [tensor("fp32", 0x1000), {"tuple": [{"int": 5}, {"float": 2.5}]}]},
            {"int": 1},
        ],
    ),
    "tuple with a one in it": launch(
        "tuple_kernel",
        [
            tensor("fp32", 0x3001),
            {"tuple": [tensor("fp32", 0x1001), {"tuple": [{"int": 1}, {"int": 2**40}]}]},
            {"float": 1.5},
        ],
    ),
    "constants": launch(
        "constant_kernel",
        [tensor("fp16", 0x3000), {"none": True}, *({"constexpr": t} for t in ('"twice"', "fp16", "@twice", "(16, 2)"))],
    ),
    "constants, and a pointer": launch(
        "constant_kernel",
        [tensor("fp16", 0x3000), tensor("fp16", 0x1000), *({"constexpr": t} for t in ('"no"', "fp32", "None", "(32,)"))],
    ),
    "shared memory": matmul("128", "128", "64"),
    "descriptors": launch(
        "host_descriptor_kernel", [descriptor(0x10000), descriptor(0x20000, padding="nan"), {"int": 64}]
    ),
    "descriptors made by the kernel": launch(
        "device_descriptor_kernel",
        [tensor("fp16", 0x1000), tensor("fp16", 0x2000), {"int": 256}, {"int": 64}, {"constexpr": "64"}],
        (2, 3),
    ),
    "other device": add(device=1),
}  # fmt: skip
# Line tables, which Opwright leaves out; addresses; C++ passes the parameters as one buffer.
DIFFERENT = {"image", "context", "form"}


@pytest.fixture(scope="module")
def pairs(triton_python: Path, tmp_path_factory: Any) -> dict[str, tuple[list[Any], list[Any]]]:  # noqa: F811
    """For each launch what Triton sent to the driver and what C++ sent."""
    genuine = iter(stub.run_genuine(triton_python, list(LAUNCHES.values()), devices=2))
    expected: dict[str, list[Any]] = {}
    for name, request in LAUNCHES.items():
        results = [next(genuine) for _ in range(request.get("repeat", 1))]
        assert all(result["error"] is None for result in results), (name, results)
        expected[name] = [record for result in results for record in result["records"]]
    results, records = runtime.run_launches(
        triton_python, list(LAUNCHES.values()), tmp_path_factory.mktemp("cpp"), devices=2
    )
    assert [result["error"] for result in results] == [None] * len(LAUNCHES)
    assert len(records) == sum(map(len, expected.values()))
    left = iter(records)
    return {name: (sent, [next(left) for _ in sent]) for name, sent in expected.items()}


def mend_small_descriptors(records: list[Any]) -> list[Any]:
    """Clears bit 21 of the maps of small tensors, as Triton does from 3.7 on and Opwright for every version."""
    for record in records:
        for param in record["params"]:
            if param["size"] == 128:
                mended = bytearray.fromhex(param["hex"])
                mended[10] &= ~(1 << 5)
                param["hex"] = mended.hex()
    return records


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in record.items() if name not in DIFFERENT}
    kept["attributes"] = sorted(record["attributes"], key=lambda attribute: attribute["id"])
    return kept


@pytest.mark.parametrize("name", LAUNCHES)
def test_cpp_launches_as_triton_does(pairs: Any, name: str) -> None:
    expected, given = pairs[name]
    expected = mend_small_descriptors(expected)
    assert [comparable(record) for record in given] == [comparable(record) for record in expected]
