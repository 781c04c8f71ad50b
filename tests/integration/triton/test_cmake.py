"""CMake: find_package, add_subdirectory, packs at build time; what is built is run above the stub driver."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import stub  # noqa: E402

CMAKE = shutil.which("cmake")
PACKAGE = ROOT / "src" / "opwright" / "cmake"
BUILD = ROOT / "build" / "tests" / "cmake"
SCALED_ADD = """
import sys, torch
torch.ops.load_library(sys.argv[1])
x = torch.zeros(3, 1000)
cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
torch.ops.triton_example.scaled_add.default.redispatch(cuda, x, x, 2.5)
"""

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(CMAKE is None, reason="no cmake on PATH"),
    pytest.mark.skipif(sys.platform != "linux", reason="Linux only"),
]


def cmake(*arguments: Any, fails: bool = False) -> str:
    """Returns what cmake writes."""
    done = subprocess.run([CMAKE, *map(str, arguments)], capture_output=True, text=True)
    text = done.stdout + done.stderr
    if "PyTorch: CUDA cannot be found" in text:
        pytest.skip("this torch has CUDA, and its CMake files find no CUDA toolkit here")
    assert (done.returncode != 0) == fails, text[-6000:]
    return text


def configure(source: Path, build: Path, *options: str, fails: bool = False) -> str:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    return cmake("-S", source, "-B", build, *generator, f"-DPython3_EXECUTABLE={sys.executable}", *options, fails=fails)


@pytest.fixture(scope="module")
def triton() -> Path:
    """A Python with the newest Triton."""
    pythons = stub.find_tritons()
    if not pythons:
        pytest.skip("no Triton at .venv/triton-*/bin/python; link an environment that has it there")
    return pythons[max(pythons, key=lambda version: tuple(map(int, version.split("."))))]


@pytest.fixture(scope="module")
def built(triton: Path) -> Path:
    """The build of tests/integration/triton/cmake: by add_subdirectory, the examples, the adapters, the guide."""
    import torch

    with FileLock(str(BUILD) + ".lock"):
        configure(
            HERE / "cmake",
            BUILD,
            f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
            f"-DOPWRIGHT_TRITON_PYTHON={triton}",
            "-DCMAKE_BUILD_TYPE=Release",
            "-DEXAMPLE_ARGUMENTS=--launch-only",
        )
        cmake("--build", BUILD, "--parallel", 2)
    return BUILD


def launches(command: list[Any], folder: Path, python: Path | str) -> list[dict[str, Any]]:
    """Runs a command above the stub; returns its launches."""
    record = folder / "launches.jsonl"
    env = stub.environment(record=record)
    env |= {"OPWRIGHT_TRITON": f"python={python}", "OPWRIGHT_CACHE_DIR": str(BUILD.with_name("cmake-cache"))}
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return stub.read_records(record)


def ctest(build: Path, name: str, folder: Path, python: Path | str) -> list[dict[str, Any]]:
    """Runs a test of a build above the stub; returns its launches."""
    command = [Path(CMAKE).with_name("ctest"), "--test-dir", build, "-R", f"^{name}$", "--output-on-failure"]
    return launches([*command, "--no-tests=error"], folder, python)


def shapes(records: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(record["kernel"], record["grid"][0], record["block"][0]) for record in records]


def number(record: dict[str, Any], index: int, letter: str) -> Any:
    return struct.unpack("<" + letter, bytes.fromhex(record["params"][index]["hex"]))[0]


@pytest.mark.parametrize("program", ["vector_add", "vector_add_packed"])
def test_vector_add(program: str, built: Path, triton: Path, tmp_path: Path) -> None:
    python = triton if program == "vector_add" else "/nonexistent"
    records = ctest(built, program, tmp_path, python)
    assert shapes(records) == 2 * [("add_kernel", 98, 128)]
    assert [number(record, 3, "i") for record in records] == [100_000, 99_999]
    # Two kernels: 99,999 is not a multiple of 16.
    assert len({record["image"] for record in records}) == 2


def test_a_reduction_has_its_block_from_the_heuristic_and_its_grid_from_autotune(
    built: Path, triton: Path, tmp_path: Path
) -> None:
    first, second = ctest(built, "reduction", tmp_path, triton)
    # 1000 rows, 4 in a program of 4 warps: the first configuration.
    assert shapes([first, second]) == 2 * [("row_sum_kernel", 250, 128)]
    assert first["image"] == second["image"]
    assert [number(first, index, "i") for index in (2, 3)] == [1000, 500]


@pytest.mark.parametrize("language", ["cpp", "python"])
def test_the_torch_operator_is_right_on_the_cpu(language: str, built: Path, triton: Path, tmp_path: Path) -> None:
    assert ctest(built, f"scaled_add_from_{language}", tmp_path, triton) == []


def test_the_torch_operator_launches_on_cuda(built: Path, triton: Path, tmp_path: Path) -> None:
    library = built / "torch_operator" / "libscaled_add.so"
    (record,) = launches([sys.executable, "-c", SCALED_ADD, library], tmp_path, triton)
    assert shapes([record]) == [("scaled_add_kernel", 3, 128)]
    x, y, out = (number(record, index, "Q") for index in range(3))
    assert x == y != out
    assert (number(record, 3, "f"), number(record, 4, "i")) == (2.5, 3000)


def test_tensors_of_aten_are_arguments(built: Path, triton: Path, tmp_path: Path) -> None:
    records = ctest(built, "aten", tmp_path, triton)
    assert [record["grid"][0] for record in records] == [1, 2, 3, 4]
    # fp32 and fp16; an empty optional and an undefined tensor are the same None.
    assert records[0]["image"] != records[1]["image"]
    assert records[2]["image"] == records[3]["image"]


def test_tensors_of_the_stable_abi_are_arguments(built: Path, triton: Path, tmp_path: Path) -> None:
    (record,) = ctest(built, "stable", tmp_path, triton)
    assert record["grid"][0] == 5
    assert len({number(record, index, "Q") for index in range(3)}) == 1


def test_tensors_of_dlpack_are_arguments(built: Path, triton: Path, tmp_path: Path) -> None:
    assert ctest(built, "dlpack", tmp_path, triton) == []


def test_the_code_of_the_guide(built: Path, triton: Path, tmp_path: Path) -> None:
    records = ctest(built, "guide", tmp_path, triton)
    assert [record["grid"] for record in records if record["grid"] != [4, 1, 1]] == [[1, 1, 1], [16, 2, 1]]
    assert [record["block"][0] for record in records] == [128] * 5 + [256] + [128] * 5


def test_every_block_of_the_guide_is_in_a_file_that_is_built() -> None:
    guide = (ROOT / "docs" / "guides" / "triton-from-cpp.md").read_text()
    files = [*(HERE / "cmake").rglob("*"), *(ROOT / "examples").glob("triton_*/*")]
    texts = [file.read_text() for file in files if file.is_file()]
    texts.append(re.sub(r"^\$ (.*)\n(?:[^$].*\n)*", r"\1\n", "".join(texts), flags=re.M))
    blocks = re.findall(r"^```(cpp|python|cmake)\n(.*?)^```", guide, re.M | re.S)
    assert len(blocks) > 8
    lines = {" ".join(line.split()) for text in texts for line in text.splitlines()}
    for _, block in blocks:
        assert [line for line in block.splitlines() if " ".join(line.split()) not in lines] == []


@pytest.fixture(scope="module")
def consumer(triton: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A copy of the project `consumer` and its build, with the toolkit installed in a folder of its own."""
    folder = tmp_path_factory.mktemp("consumer")
    configure(ROOT, folder / "toolkit")
    cmake("--install", folder / "toolkit", "--prefix", folder / "first place")
    (folder / "first place").rename(folder / "prefix")  # nothing in it says where it was
    source = shutil.copytree(HERE / "cmake" / "consumer", folder / "source")
    configure(
        source, folder / "build", f"-DCMAKE_PREFIX_PATH={folder / 'prefix'}", f"-DOPWRIGHT_TRITON_PYTHON={triton}"
    )
    cmake("--build", folder / "build", "--parallel", 2)
    return source, folder / "build"


def test_an_installed_copy_is_found_and_its_packs_need_no_python(consumer: tuple[Path, Path], tmp_path: Path) -> None:
    _, build = consumer
    found = build.parent / "prefix" / "share" / "opwright" / "cmake"
    assert f"opwright_DIR:PATH={found}\n" in (build / "CMakeCache.txt").read_text()
    assert shapes(ctest(build, "consumer", tmp_path, "/nonexistent")) == [("twice_kernel", 7, 64)]
    (tmp_path / "launches.jsonl").unlink()
    assert shapes(ctest(build, "beside", tmp_path, "/nonexistent")) == [("twice_kernel", 8, 64)]
    assert (build / "packs" / "beside.opk").read_bytes()[:8] == b"OPWPACK1"


def test_a_pack_is_built_again_when_a_source_or_the_manifest_changes(
    consumer: tuple[Path, Path], tmp_path: Path
) -> None:
    source, build = consumer
    assert "Triton kernels" not in cmake("--build", build)
    pack = (build / "packs" / "beside.opk").read_bytes()
    kernel = source / "twice.py"
    kernel.write_text(kernel.read_text().replace("2 * tl", "3 * tl"))
    assert cmake("--build", build).count("Compiling Triton kernels") == 2
    assert (build / "packs" / "beside.opk").read_bytes() != pack
    manifest = source / "kernels.json"
    manifest.write_text(manifest.read_text().replace('"num_warps": 2', '"num_warps": 4'))
    cmake("--build", build)
    # The program has the new pack in it: the kernel that it asks for is not there any more.
    done = subprocess.run([build / "consumer"], env=stub.environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert "wanted   sm_90  *i32:16, =128; num_warps=2" in done.stderr
    assert "nearest  sm_90  *i32:16, =128; num_warps=4" in done.stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("nothing SOURCES a.py MANIFEST k.json ARCHS 90", "`nothing` is not a target"),
        ("target SOURCES a.py MANIFEST k.json", "`target` needs ARCHS"),
        ("target SOURCES a.py MANIFEST missing.json ARCHS 90", "there is no file"),
        ("target SOURCES a.py MANIFEST k.json ARCHS 90 EMBEDDED", "`EMBEDDED` is not an architecture"),
        ("target MORE SOURCES a.py MANIFEST k.json ARCHS 90", "no argument is called `MORE`"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(call: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    (tmp_path / "k.json").touch()
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(wrong LANGUAGES CXX)\nfind_package(opwright CONFIG REQUIRED)\n"
        f"add_library(target INTERFACE)\nopwright_add_triton_kernels({call})\n"
    )
    text = configure(tmp_path, tmp_path / "build", f"-Dopwright_DIR={PACKAGE}", fails=True)
    assert message in " ".join(text.split())


@pytest.mark.parametrize(
    ("wanted", "fits"), [("", True), ("0", True), ("0.1", True), ("0.1.0", True), ("0.2", False), ("0.0.9", False)]
)
def test_versions(wanted: str, fits: bool, tmp_path: Path) -> None:
    script = tmp_path / "version.cmake"
    count = len(wanted.split(".")) if wanted else 0
    script.write_text(
        f"set(PACKAGE_FIND_VERSION {wanted})\nset(PACKAGE_FIND_VERSION_COUNT {count})\n"
        f"include({PACKAGE}/opwrightConfigVersion.cmake)\nmessage(STATUS ${{PACKAGE_VERSION}} ${{PACKAGE_VERSION_COMPATIBLE}})\n"
    )
    from opwright import __version__

    assert cmake("-P", script).strip() == f"-- {__version__}{str(fits).upper()}"


def test_the_command_says_where_the_package_is() -> None:
    command = [sys.executable, str(PACKAGE / "run_opwright.py"), "--cmake-dir"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=os.sep)
    assert done.stdout == f"{PACKAGE}\n"
    assert (Path(done.stdout.strip()) / "opwrightConfig.cmake").exists()
