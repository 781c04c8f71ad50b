"""Triton kernels launched from C++ compute what they should, on a GPU."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "triton"))

import pytest
import runtime
import torch

pytest.importorskip("triton")
KERNELS = str(Path(__file__).with_name("triton_kernels.py"))
NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.bool: "u1",
}


def pytest_generate_tests(metafunc: Any) -> None:
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", NAMES, ids=str)


@pytest.fixture(scope="module")
def library(tmp_path_factory: Any) -> Iterator[ctypes.CDLL]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPWRIGHT_TRITON", f"python={sys.executable}")
        patch.setenv("OPWRIGHT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        path = runtime.build(Path(__file__).with_name("triton_library.cpp"), ("-shared",))
        loaded = ctypes.CDLL(str(path))
        loaded.triton_launch.restype = loaded.triton_load_pack.restype = ctypes.c_char_p
        yield loaded


@pytest.fixture
def launch(library: ctypes.CDLL) -> Any:
    def run(function: str, args: Any, grid: Any, **more: Any) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        request = {"file": KERNELS, "function": function, "args": args, "grid": grid, "stream": stream, **more}
        error = library.triton_launch(json.dumps(request).encode())
        if error:
            raise RuntimeError(error.decode())

    return run


def tensor(t: torch.Tensor) -> dict[str, Any]:
    return {"tensor": NAMES[t.dtype], "address": t.data_ptr()}


def ints(*values: int) -> list[dict[str, int]]:
    return [{"int": value} for value in values]


def constants(*texts: str) -> list[dict[str, str]]:
    return [{"constexpr": text} for text in texts]


def descriptor(t: torch.Tensor, block: list[int]) -> dict[str, Any]:
    shape = {"shape": list(t.shape), "strides": list(t.stride()), "block": block}
    return {"descriptor": {"dtype": NAMES[t.dtype], "address": t.data_ptr(), **shape}}


@pytest.mark.parametrize("n", [1, 16, 4096, 100_001])
def test_add(launch: Any, n: int) -> None:
    x, y = torch.randn(2, n, device="cuda").unbind()
    out = torch.full((n + 1,), -7.0, device="cuda")
    launch("add_kernel", [*map(tensor, (x, y, out)), *ints(n), *constants("1024")], "add_grid")
    assert torch.equal(out[:n], x + y)
    assert out[n] == -7


def test_every_dtype(launch: Any, dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2, (1001,), device="cuda")
    x = bits.to(dtype)
    out = torch.zeros(1001, device="cuda").to(dtype)
    launch("copy_kernel", [tensor(x), tensor(out), *ints(1001), *constants("256")], (4,))
    assert torch.equal(out.to(torch.float32), bits.to(torch.float32))


def test_slice_that_is_not_aligned(launch: Any) -> None:
    base = torch.randn(1002, device="cuda")
    out = torch.zeros(1001, device="cuda")
    launch("copy_kernel", [tensor(base[1:]), tensor(out), *ints(1001), *constants("256")], (4,))
    assert torch.equal(out, base[1:])


@pytest.mark.parametrize("small", [-7, 0, 2**31 - 1, 1])
@pytest.mark.parametrize("large", [2**33, -(2**40) - 1])
def test_scalars(launch: Any, small: int, large: int) -> None:
    out = torch.zeros(4, dtype=torch.float64, device="cuda")
    args = [tensor(out), {"bool": True}, {"float": 0.1}, *ints(small, large)]
    launch("values_kernel", args, (1,))
    assert out.tolist() == [1.0, float(torch.tensor(0.1, dtype=torch.float32)), small, large]


def test_annotated_scalars(launch: Any) -> None:
    out = torch.zeros(8, dtype=torch.float64, device="cuda")
    floats = [{"float": 0.1}] * 4
    launch("annotated_kernel", [tensor(out), *ints(3, -300, 2**32 - 5, -(2**40)), *floats], (1,))
    half = float(torch.tensor(0.1, dtype=torch.float16))
    # Triton cuts bfloat16 off a float.
    brain = float((torch.tensor(0.1).view(torch.int32) & -65536).view(torch.float32))
    assert out.tolist() == [3, -300, 2**32 - 5, -(2**40), half, brain, float(torch.tensor(0.1)), 0.1]


def test_tuples_and_constants(launch: Any) -> None:
    x = torch.tensor([3.0], device="cuda")
    out = torch.zeros(16, device="cuda")
    pairs = {"tuple": [tensor(x), {"tuple": [{"int": 5}, {"float": 2.5}]}]}
    launch("constants_kernel", [tensor(out), pairs, *constants('"squared"', "fp32", "@square", "(16, 2)")], (1,))
    assert torch.equal(out, torch.full((16,), 17.5**2, device="cuda"))


def test_large_shared_memory(launch: Any) -> None:
    a = torch.randn(128, 512, device="cuda", dtype=torch.float16)
    b = torch.randn(512, 128, device="cuda", dtype=torch.float16)
    c = torch.zeros(128, 128, device="cuda")
    launch(
        "matmul_kernel",
        [*map(tensor, (a, b, c)), *ints(512), *constants("128", "128", "128")],
        (1,),
        options={"num_stages": 3, "num_warps": 8},
    )
    torch.testing.assert_close(c, a.float() @ b.float(), atol=1e-2, rtol=1e-3)


def test_descriptors_of_the_host(launch: Any) -> None:
    source = torch.randn(256, 128, device="cuda", dtype=torch.float16)
    target = torch.zeros_like(source)
    for _ in range(2):
        for column in (0, 64):
            args = [descriptor(source, [64, 64]), descriptor(target, [64, 64]), *ints(column)]
            launch("host_descriptor_kernel", args, (4,))
        assert torch.equal(source, target)
        source, target = torch.randn_like(source), torch.zeros_like(target)


def test_descriptors_of_the_kernel(launch: Any) -> None:
    x = torch.randn(256, 64, device="cuda", dtype=torch.float16)
    out = torch.zeros_like(x)
    for _ in range(20):
        launch("device_descriptor_kernel", [tensor(x), tensor(out), *ints(256, 64), *constants("64")], (4,))
    assert torch.equal(x, out)


def test_cluster(launch: Any) -> None:
    x, y = torch.randn(2, 10_000, device="cuda").unbind()
    out = torch.zeros(10_000, device="cuda")
    args = [*map(tensor, (x, y, out)), *ints(10_000), *constants("2048")]
    launch("add_kernel", args, (5,), options={"num_ctas": 2})
    assert torch.equal(out, x + y)


def test_dependent_launches(launch: Any) -> None:
    x = torch.ones(50_000, device="cuda", dtype=torch.float64)
    expected = x.clone()
    for _ in range(50):
        launch("dependent_kernel", [tensor(x), *ints(50_000), *constants("256")], (196,), options={"launch_pdl": True})
        expected = expected * 1.5 + 1
    torch.testing.assert_close(x, expected, rtol=1e-13, atol=0)


def test_cooperative(launch: Any) -> None:
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.zeros(programs, device="cuda", dtype=torch.int32)
    counter = torch.zeros(1, device="cuda", dtype=torch.int32)
    options = {"launch_cooperative_grid": True}
    launch("barrier_kernel", [tensor(out), tensor(counter), *constants(str(programs))], (programs,), options=options)
    assert out.tolist() == [programs] * programs


def test_graph(launch: Any) -> None:
    x, y = torch.randn(2, 4096, device="cuda").unbind()
    out = torch.zeros(4096, device="cuda")
    args = [*map(tensor, (x, y, out)), *ints(4096), *constants("512")]
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="while a graph is captured"):
        with torch.cuda.graph(graph):
            launch("add_kernel", args, "add_grid", options={"num_warps": 2})
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    launch("add_kernel", args, "add_grid")
    with torch.cuda.graph(graph):
        launch("add_kernel", args, "add_grid")
    x.normal_()
    out.zero_()
    graph.replay()
    assert torch.equal(out, x + y)


def test_scratch_memory_in_a_graph(launch: Any) -> None:
    x = torch.randn(256, 64, device="cuda", dtype=torch.float16)
    out = torch.zeros_like(x)
    args = [tensor(x), tensor(out), *ints(256, 64), *constants("64")]
    launch("device_descriptor_kernel", args, (4,))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch("device_descriptor_kernel", args, (4,))
    x.normal_()
    graph.replay()
    assert torch.equal(x, out)


def test_autotune_and_heuristics(launch: Any) -> None:
    """Without a table the first configuration is taken: BLOCK = 256."""
    for n, added in ((512, 1), (500, 2), (768, 1)):
        x, out = torch.randn(n, device="cuda"), torch.zeros(n, device="cuda")
        launch("tuned_kernel", [tensor(x), tensor(out), *ints(n)], "tuned_grid")
        assert torch.equal(out, x + added)


def test_errors(launch: Any) -> None:
    x = torch.zeros(16, device="cuda")
    with pytest.raises(RuntimeError, match="argument 5 `BLOCK`"):
        launch("add_kernel", [*[tensor(x)] * 3, *ints(16, 1024)], (1,))
    with pytest.raises(RuntimeError, match="power of 2"):
        launch("add_kernel", [*[tensor(x)] * 3, *ints(16), *constants("1000")], (1,))
    with pytest.raises(RuntimeError, match="shared memory"):
        launch(
            "matmul_kernel",
            [*[tensor(x.half())] * 2, tensor(x), *ints(512), *constants("256", "256", "256")],
            (1,),
            options={"num_stages": 4},
        )


@pytest.mark.two_gpus
def test_two_devices(launch: Any) -> None:
    for device in (1, 0, 1):
        with torch.cuda.device(device):
            x, y = torch.randn(2, 5000, device="cuda").unbind()
            out = torch.zeros(5000, device="cuda")
            launch(
                "add_kernel", [*map(tensor, (x, y, out)), *ints(5000), *constants("1024")], "add_grid", device=device
            )
            assert torch.equal(out, x + y)


FROZEN = """
import ctypes, json, sys
import torch
library = ctypes.CDLL(sys.argv[1])
library.triton_launch.restype = library.triton_load_pack.restype = ctypes.c_char_p
assert library.triton_load_pack(sys.argv[2].encode()) is None
library.triton_freeze()
x, y = torch.randn(2, 5000, device="cuda").unbind()
out = torch.zeros(5000, device="cuda")
def launch(n, block):
    args = [{"tensor": "fp32", "address": t.data_ptr()} for t in (x, y, out)] + [{"int": n}, {"constexpr": block}]
    return library.triton_launch(json.dumps({"file": "gpu/triton_kernels.py", "function": "add_kernel",
        "args": args, "grid": "add_grid", "stream": 0}).encode())
assert launch(5000, "512") is None
torch.cuda.synchronize()
assert torch.equal(out, x + y)
missing = launch(5000, "256").decode()
assert "frozen" in missing and "nearest" in missing and "=256" in missing, missing
"""


def test_record_pack_freeze(library: ctypes.CDLL, tmp_path: Path) -> None:
    """Recorded once, built without a GPU, run with no Python to compile with."""
    request = {"file": KERNELS, "function": "add_kernel", "args": ["*fp32:16"] * 3 + ["i32", "=512"], "options": {}}
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"kernels": [request]}))
    major, minor = torch.cuda.get_device_capability()
    command = [sys.executable, "-m", "opwright", "pack", "build", manifest, "--out", tmp_path / "app.opk"]
    subprocess.run([*command, "--arch", f"{major}{minor}"], check=True)
    env = {name: value for name, value in os.environ.items() if name != "OPWRIGHT_TRITON"} | {"PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", FROZEN, library._name, tmp_path / "app.opk"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


TUNED = """
import ctypes, json, sys
import torch
library = ctypes.CDLL(sys.argv[1])
library.triton_launch.restype = ctypes.c_char_p
for n, added in ((1 << 20, 1), (1000, 2), (1 << 20, 1)):
    x, out = torch.randn(n, device="cuda"), torch.zeros(n, device="cuda")
    args = [{"tensor": "fp32", "address": t.data_ptr()} for t in (x, out)] + [{"int": n}]
    request = {"file": sys.argv[2], "function": "tuned_kernel", "args": args, "grid": "tuned_grid", "stream": 0}
    error = library.triton_launch(json.dumps(request).encode())
    assert error is None, error.decode()
    torch.cuda.synchronize()
    assert torch.equal(out, x + added), n
"""


def test_online_tuning(library: ctypes.CDLL) -> None:
    env = os.environ | {"OPWRIGHT_TRITON": f"python={sys.executable},tune"}
    done = subprocess.run(
        [sys.executable, "-c", TUNED, library._name, KERNELS], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
