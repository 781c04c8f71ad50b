"""`opwright doctor`: each thing that can be wrong with a machine is made wrong, and found."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from opwright.backends import cuda
from opwright.doctor import environment as environment_doctor
from opwright.doctor.environment import examine_extensions, examine_machine
from opwright.doctor.finding import Finding
from opwright.doctor.installed_torch import InstalledTorch, build_for


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A machine with nvcc 12.4, which takes gcc up to 11 and knows sm_80 to sm_90, and whatever is set."""
    for name in ("CUDA_HOME", "CUDA_PATH", "OPWRIGHT_ARCH", "TORCH_CUDA_ARCH_LIST", "OPWRIGHT_CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "include" / "crt").mkdir(parents=True)
    (tmp_path / "include" / "crt" / "host_config.h").write_text(
        "#if __GNUC__ > 11\n#error\n#endif\n#if (__clang_major__ >= 18) || (__clang_major__ < 7)\n#error\n#endif\n"
    )
    nvcc = cuda.Nvcc(program(tmp_path / "bin" / "nvcc", "12.4"), "nvcc release 12.4, V12.4.1", tmp_path, tmp_path)

    class Machine:
        folder = tmp_path

        def has(self, *, nvcc=nvcc, torch_cuda="12.4", gpus=(), driver="none", gcc=11) -> None:
            torch = InstalledTorch(tmp_path, "2.13.0", torch_cuda, False)
            object.__setattr__(torch, "has_cxx11_abi", True)
            monkeypatch.setattr(environment_doctor, "find_torch", lambda: torch)
            monkeypatch.setattr(environment_doctor, "_gpu_names", lambda: ["GPU"])
            monkeypatch.setattr(cuda, "find_nvcc", lambda identities: nvcc)
            monkeypatch.setattr(cuda, "gpu_architectures", lambda: gpus)
            monkeypatch.setattr(cuda, "driver_version", lambda: driver)
            macros = {"__GNUC__": str(gcc), "_GLIBCXX_USE_CXX11_ABI": "1"}
            monkeypatch.setattr(environment_doctor._Machine, "macros", macros)

        def says(self, subject: str) -> Finding:
            findings = [*examine_machine(), *examine_extensions()]
            for finding in findings:
                assert finding.state == "ok" or "`" in finding.hint, finding
            return next(finding for finding in findings if finding.subject == subject)

        def sees(self, subject: str, state: str, detail: str, hint: str) -> None:
            finding = self.says(subject)
            assert finding.state == state, finding
            assert detail in finding.detail
            assert hint in finding.hint

    made = Machine()
    made.has()
    return made


def program(path: Path, release: str = "") -> str:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(f"#!/bin/sh\necho 'release {release}, V{release}.1'\necho compute_80 compute_86 compute_90\n")
    path.chmod(0o755)
    return str(path)


# --- compilers -------------------------------------------------------------------------------------------


def test_a_compiler_that_nvcc_does_not_take(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.says("nvcc and compiler").detail.endswith("which takes gcc up to 11")
    machine.has(gcc=13)
    programs = machine.folder / "programs"
    program(programs / "c++")
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("CXX", raising=False)
    machine.sees("nvcc and compiler", "wrong", "takes gcc up to 11, and", "`apt-get install g++-11`")
    program(programs / "g++-10")
    machine.sees("nvcc and compiler", "warn", "Opwright takes g++-10", "`export CC=gcc-10 CXX=g++-10`")
    monkeypatch.setattr(environment_doctor._Machine, "macros", {"__clang_major__": "18", "_GLIBCXX_USE_CXX11_ABI": "1"})
    machine.sees("nvcc and compiler", "wrong", "takes clang up to 17", "`apt-get install clang++-17`")


def test_an_nvcc_without_a_compiler_is_not_said_to_be_missing(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    assert machine.says("nvcc").state == "ok"
    assert machine.says("nvcc and compiler") == Finding(
        "nvcc and compiler", "missing", "no compiler", "`apt-get install g++`"
    )


@pytest.mark.compiler
def test_the_abi_and_the_standard_are_asked_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def says() -> Finding:
        return next(finding for finding in examine_extensions() if finding.subject == "C++ ABI")

    assert says().state == "ok"
    monkeypatch.setenv("OPWRIGHT_CXXFLAGS", "-D_GLIBCXX_USE_CXX11_ABI=0")
    assert says().state == "wrong"
    assert says().hint == "`export OPWRIGHT_CXXFLAGS=-D_GLIBCXX_USE_CXX11_ABI=1`"
    monkeypatch.setenv("OPWRIGHT_CXXFLAGS", "-nostdinc++")
    assert "does not compile `#include <string>`" in says().detail
    monkeypatch.delenv("OPWRIGHT_CXXFLAGS")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert says() == Finding("C++ ABI", "missing", "no compiler", "`apt-get install g++`")


def test_nvcc_and_torch(machine) -> None:
    assert machine.says("nvcc and torch").state == "ok"
    machine.has(torch_cuda="13.0")
    machine.sees("nvcc and torch", "warn", "nvcc 12.4, torch's CUDA 13.0", "nvidia-cuda-nvcc==13.0.*")
    machine.has(torch_cuda="")
    machine.sees("nvcc and torch", "none", "torch without CUDA", build_for("12.4"))
    machine.has(nvcc=None)
    machine.sees("nvcc and torch", "none", "no nvcc", "`pip install nvidia-cuda-nvcc")


def test_nvcc_and_driver(machine) -> None:
    machine.sees("nvcc and driver", "none", "no driver", "nvidia-driver")
    machine.has(driver="12.4")
    assert machine.says("nvcc and driver").state == "ok"
    machine.has(driver="12.10")  # a newer one, not an older one
    assert machine.says("nvcc and driver").state == "ok"
    machine.has(driver="12.2", gpus=("90",))
    machine.sees("nvcc and driver", "warn", "PTX does not", "`export OPWRIGHT_ARCH=90`")
    machine.has(driver="11.8")
    machine.sees("nvcc and driver", "wrong", "does not run here", "cuda-nvcc=11.8")


def test_the_driver_is_too_old_for_torch(machine) -> None:
    machine.has(gpus=("90",), driver="12.4")
    assert machine.says("GPU").state == "ok"
    machine.has(gpus=("90",), driver="12.4", torch_cuda="13.0")
    machine.sees(
        "GPU", "wrong", "too old for torch's CUDA 13.0", "torch --index-url https://download.pytorch.org/whl/cu126`"
    )
    machine.has(gpus=("90",), driver="13.0", torch_cuda="")
    machine.sees("GPU", "none", "this torch has no CUDA", "torch --index-url https://download.pytorch.org/whl/cu130`")


def test_cuda_home(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(machine.folder / "bin"))
    assert machine.says("CUDA_HOME").detail == f"not set; torch takes {machine.folder}/bin/nvcc"
    monkeypatch.setenv("CUDA_HOME", str(machine.folder / "empty"))
    machine.sees("CUDA_HOME", "wrong", "has no bin/nvcc", f"`export CUDA_HOME={machine.folder}`")
    other = machine.folder / "other"
    program(other / "bin" / "nvcc", "11.8")
    monkeypatch.setenv("CUDA_HOME", str(other))
    machine.sees("CUDA_HOME", "warn", "has nvcc 11.8, and", f"`export PATH={other}/bin:$PATH`")
    program(other / "bin" / "nvcc", "12.4")
    assert machine.says("CUDA_HOME").state == "ok"


# --- architectures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "gpus", "state", "detail", "hint"),
    [
        ({}, (), "none", "IndexError", '`export TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX"`'),
        ({}, ("86",), "ok", "GPU sm_86", ""),
        ({"TORCH_CUDA_ARCH_LIST": "8.0"}, ("86",), "ok", "TORCH_CUDA_ARCH_LIST=8.0", ""),
        (
            {"TORCH_CUDA_ARCH_LIST": "8.6"},
            ("80",),
            "wrong",
            "sm_80",
            '`export TORCH_CUDA_ARCH_LIST="8.0+PTX"`',
        ),
        ({"TORCH_CUDA_ARCH_LIST": "8.0"}, ("90",), "wrong", "nothing for the GPU here", "9.0+PTX"),
        ({"TORCH_CUDA_ARCH_LIST": "8.0+PTX"}, ("90",), "ok", "8.0+PTX", ""),
        ({"TORCH_CUDA_ARCH_LIST": "Ampere"}, ("86",), "ok", "TORCH_CUDA_ARCH_LIST=Ampere", ""),
        ({"TORCH_CUDA_ARCH_LIST": "bogus"}, (), "wrong", "'bogus'", 'TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX"'),
        ({"OPWRIGHT_ARCH": "90"}, ("80",), "wrong", "sm_80", "`export OPWRIGHT_ARCH=80`"),
        ({"OPWRIGHT_ARCH": "80"}, ("90",), "ok", "OPWRIGHT_ARCH=80", ""),
        # PTX is that of the newest alone.
        ({"OPWRIGHT_ARCH": "80,100"}, ("90",), "wrong", "nothing for the GPU here, sm_90", "`export OPWRIGHT_ARCH=90`"),
        ({"OPWRIGHT_ARCH": "80,90a"}, ("100",), "wrong", "nothing for the GPU here", "`export OPWRIGHT_ARCH=100`"),
        ({"OPWRIGHT_ARCH": "90a"}, ("90",), "ok", "OPWRIGHT_ARCH=90a", ""),
        ({"OPWRIGHT_ARCH": "120"}, (), "wrong", "this nvcc does not know 120", "`unset OPWRIGHT_ARCH`"),
        ({"OPWRIGHT_ARCH": "ninety"}, (), "wrong", "'ninety'", "OPWRIGHT_ARCH=90"),
        ({}, ("120",), "wrong", "does not know the GPU here, sm_120", "--upgrade nvidia-cuda-nvcc"),
    ],
)
def test_architectures(machine, monkeypatch, named, gpus, state, detail, hint) -> None:
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cuda, "known_architectures", lambda nvcc: ["80", "86", "90", "100"])
    machine.has(gpus=gpus, driver="13.0")
    machine.sees("architectures", state, detail, hint)


# --- the rest --------------------------------------------------------------------------------------------


def test_ninja_is_only_for_torchs_own(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    machine.sees("ninja", "none", "only torch.utils.cpp_extension", "`pip install ninja`")


def test_python_headers(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(machine.folder)})
    machine.sees("Python headers", "warn", "Python.h", f"python{sys.version_info[0]}.{sys.version_info[1]}-dev`")
    (machine.folder / "Python.h").touch()
    assert machine.says("Python headers").state == "ok"


def test_disks_that_are_full(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1 << 20

    monkeypatch.setattr(environment_doctor.shutil, "disk_usage", lambda place: Usage)
    machine.sees("cache", "missing", "1 MiB free", "`opwright cache prune`")
    machine.sees("temporary files", "wrong", "1 MiB free", "`export TMPDIR=")


def test_a_cache_that_builds_refuse(machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was found to be ok."""
    monkeypatch.setenv("OPWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    store = tmp_path / "cache" / "opwright-store"
    (store / "work").mkdir(mode=0o700, parents=True)
    store.chmod(0o700)
    machine.sees("cache", "missing", f"{store}: the directory has files, and Opwright has not made it", "`export ")
    (store / "CACHEDIR.TAG").touch()
    assert machine.says("cache").state == "ok"
    (store / "work").chmod(0o770)
    machine.sees("cache", "missing", "work: others may write to the cache; mode: 0o770", "`chmod -R go-w ")
    store.chmod(0o777)
    machine.sees("cache", "missing", "others may write to the cache; mode: 0o777", "`chmod -R go-w ")
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPWRIGHT_CACHE_DIR", str(tmp_path / "file"))
    machine.sees("cache", "missing", "cannot be written", "`export OPWRIGHT_CACHE_DIR=")


def test_a_torch_whose_libraries_are_gone(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_doctor, "find_torch", lambda: None)
    machine.sees("torch", "missing", "not installed", "`pip install 'torch>=2.11'`")
    old = InstalledTorch(machine.folder, "2.9.1", "", False)
    monkeypatch.setattr(environment_doctor, "find_torch", lambda: old)
    machine.sees("torch", "missing", "2.9.1, older than 2.11", "`pip install 'torch>=2.11'`")


def test_a_check_that_fails_is_a_finding(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise RuntimeError("the driver is upset")

    monkeypatch.setattr(cuda, "driver_version", broken)
    machine.sees("nvcc and driver", "warn", "RuntimeError: the driver is upset", "`")


def test_it_is_quick_and_does_not_import_torch(start_python) -> None:
    program = """
import resource, sys
from opwright.cli.doctor_command import doctor
doctor()
# Of the processor, not of the clock: other tests run beside this one.
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print("torch" in sys.modules, sum(part.ru_utime + part.ru_stime for part in used))
"""
    start_python(program)  # the compilers are asked once
    has_torch, seconds = start_python(program).stdout.splitlines()[-1].split()
    assert has_torch == "False"
    assert float(seconds) < 1.5


@pytest.mark.gpu
def test_the_gpus_are_named_as_torch_names_them() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU, or a torch without CUDA")
    assert environment_doctor._gpu_names() == [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]
