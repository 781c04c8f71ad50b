"""What this machine has for operators and extensions, what is missing or does not fit, and how to mend it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from opwright import settings
from opwright.backends import cuda
from opwright.backends.toolchain import Compiler, find_compiler
from opwright.build.elf import read_library
from opwright.build.store import Store
from opwright.doctor.finding import Finding, gather
from opwright.doctor.installed_torch import InstalledTorch, build_for, find_torch, install_build
from opwright.doctor.loader import closure_of, torch_folders
from opwright.errors import NoNvccError, StoreOwnerError, plural

_OLDEST_TORCH = (2, 11)
_NVCC_PACKAGES = "`pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-crt nvidia-nvvm`"
_FEW_BYTES = 100 << 20
_HEADERS = "#include <string>\n"  # tells that the headers of the C++ library are there, and their ABI


def examine_machine() -> list[Finding]:
    """Returns what operators need; never raises."""
    machine = _Machine()
    checks = {
        "Python": machine.python,
        "torch": machine.installed_torch,
        "C++ compiler": machine.cxx,
        "CPU": machine.cpu,
        "nvcc": machine.cuda_compiler,
        "GPU": machine.gpu,
        "cache": machine.store,
    }
    return gather(checks.items())


def examine_extensions() -> list[Finding]:
    """Returns what extensions with torch's headers need beside; never raises."""
    machine = _Machine()
    checks = {
        "Python headers": machine.python_headers,
        "C++ ABI": machine.cxx_abi,
        "nvcc and compiler": machine.host_compiler,
        "nvcc and torch": machine.nvcc_and_torch,
        "nvcc and driver": machine.nvcc_and_driver,
        "CUDA_HOME": machine.cuda_home,
        "architectures": machine.architectures,
        "ninja": machine.ninja,
        "temporary files": machine.temporary_files,
    }
    return gather(checks.items())


class _Machine:
    """What several checks ask about."""

    @cached_property
    def torch(self) -> InstalledTorch | None:
        return find_torch()

    @cached_property
    def compiler(self) -> Compiler | None:
        return find_compiler(Store().identities)

    @cached_property
    def nvcc(self) -> cuda.Nvcc | None:
        with contextlib.suppress(NoNvccError):  # `cuda_compiler` says it
            return cuda.find_nvcc(Store().identities)
        return None

    @cached_property
    def macros(self) -> dict[str, str]:
        """What the compiler defines in C++20; empty when it does not compile that."""
        if self.compiler is None:
            return {}
        command = [self.compiler.path, "-std=c++20", *settings.cxxflags(), "-dM", "-E", "-x", "c++", "-"]
        result = subprocess.run(command, input=_HEADERS, capture_output=True, text=True, timeout=30)
        if result.returncode:
            return {}
        return dict(re.findall(r"^#define (\w+) (\S*)$", result.stdout, re.MULTILINE))

    # --- what operators need --------------------------------------------------------------------------

    def python(self) -> Finding:
        return Finding("Python", "ok", f"{platform.python_version()} {platform.machine()}")

    def installed_torch(self) -> Finding:
        torch, hint = self.torch, "`pip install 'torch>=2.11'`"
        if torch is None:
            return Finding("torch", "missing", "not installed", hint)
        if torch.number < _OLDEST_TORCH:
            return Finding("torch", "missing", f"{torch.version}, older than 2.11", hint)
        main = torch.libraries / "libtorch_python.so"
        if main.exists():
            absent = closure_of(read_library(main), torch_folders(torch.folder)).absent
            if absent:
                hint = f"`pip install --force-reinstall torch=={torch.version}`"
                detail = f"{torch.version}, and {', '.join(absent)} that it needs is not found"
                return Finding("torch", "wrong", detail, hint)
        return Finding("torch", "ok", torch.version)

    def cxx(self) -> Finding:
        if self.compiler is None:
            return Finding("C++ compiler", "missing", "operators run their reference", "`apt-get install g++`")
        return Finding("C++ compiler", "ok", f"{self.compiler.path}  {self.compiler.identity}")

    def cpu(self) -> Finding:
        text = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
        model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
        widest = next((name for name in ("avx512f", "avx2", "sve", "asimd") if f" {name}" in text), "")
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        told = [model[1] if model else platform.processor() or platform.machine(), widest.upper()]
        return Finding("CPU", "ok", ", ".join([*filter(None, told), plural(count or 1, "thread")]))

    def cuda_compiler(self) -> Finding:
        try:
            nvcc = cuda.find_nvcc(Store().identities)
        except NoNvccError as error:
            got = ", ".join(row[-1] for row in error.rows)
            return Finding("nvcc", "missing", f"{error.subject}: {error.rule}: {got}", error.hint)
        if nvcc is None:
            return Finding("nvcc", "none", "operators run their reference on CUDA", _NVCC_PACKAGES)
        compiled_for = " ".join(f"sm_{name}" for name in cuda.architectures())
        return Finding("nvcc", "ok", f"{nvcc.path}  {nvcc.identity}, compiles for {compiled_for}")

    def gpu(self) -> Finding:
        present, version = cuda.gpu_architectures(), cuda.driver_version()
        if not present:
            driver = "no driver" if version == "none" else f"driver for CUDA {version}"
            hint = "`nvidia-smi` shows what the driver sees; in a container: `docker run --gpus all`"
            return Finding("GPU", "none", driver, hint)
        told = f"{', '.join(_gpu_names())}, sm_{' sm_'.join(present)}, driver for CUDA {version}"
        if self.torch is None or not self.torch.cuda:
            return Finding("GPU", "none", f"{told}, but this torch has no CUDA", _install_torch(version))
        if _major(version) < _major(self.torch.cuda):
            detail = f"{told}, too old for torch's CUDA {self.torch.cuda}"
            return Finding("GPU", "wrong", detail, _install_torch(version))
        return Finding("GPU", "ok", told)

    def store(self) -> Finding:
        store = Store()
        place = store.root
        while not place.exists():
            place = place.parent
        try:
            store.check()
        except StoreOwnerError as error:
            got = ", ".join(": ".join(row) for row in error.rows)
            return Finding("cache", "missing", f"{error.subject}: {error.rule}; {got}", error.hint)
        if not (place.is_dir() and os.access(place, os.W_OK)):
            hint = "`export OPWRIGHT_CACHE_DIR=/tmp/opwright`"
            return Finding("cache", "missing", f"{store.root} cannot be written", hint)
        builds = sum(1 for _ in store.root.glob("e*/*/*/record.json"))  # entries and extensions
        size, free = _size_bytes(store.root), shutil.disk_usage(place).free
        detail = f"{store.root}  {plural(builds, 'build')}, {size >> 20} MiB, {free >> 20} MiB free"
        return Finding("cache", "ok" if free > _FEW_BYTES else "missing", detail, "`opwright cache prune`")

    # --- what extensions need beside ------------------------------------------------------------------

    def python_headers(self) -> Finding:
        header = Path(sysconfig.get_paths()["include"]) / "Python.h"
        if header.exists():
            return Finding("Python headers", "ok", str(header))
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        detail = f"no {header}; modules need it, operators do not"
        return Finding("Python headers", "warn", detail, f"`apt-get install python{version}-dev`")

    def cxx_abi(self) -> Finding:
        if self.compiler is None:
            return Finding("C++ ABI", "missing", "no compiler", "`apt-get install g++`")
        if not self.macros:
            detail = f"{self.compiler.path} does not compile `#include <string>` with -std=c++20, as torch asks"
            return Finding("C++ ABI", "wrong", detail, "`apt-get install g++-12`, `export CXX=g++-12`")
        own = self.macros.get("_GLIBCXX_USE_CXX11_ABI")
        if own is None:
            detail = "not of libstdc++, the C++ library that torch was built with"
            return Finding(
                "C++ ABI",
                "wrong",
                detail,
                "remove `-stdlib=libc++` from the flags: `unset OPWRIGHT_CXXFLAGS`",
            )
        if self.torch is None:
            return Finding("C++ ABI", "ok", f"_GLIBCXX_USE_CXX11_ABI={own}, -std=c++20")
        wanted = str(int(self.torch.has_cxx11_abi))
        if own != wanted:
            detail = f"_GLIBCXX_USE_CXX11_ABI={own}, torch {self.torch.version} has {wanted}"
            return Finding("C++ ABI", "wrong", detail, f"`export OPWRIGHT_CXXFLAGS=-D_GLIBCXX_USE_CXX11_ABI={wanted}`")
        return Finding("C++ ABI", "ok", f"_GLIBCXX_USE_CXX11_ABI={own} as torch {self.torch.version}, takes -std=c++20")

    def host_compiler(self) -> Finding:
        subject = "nvcc and compiler"
        if self.nvcc is None:
            return Finding(subject, "none", "no nvcc", _NVCC_PACKAGES)
        if self.compiler is None:
            return Finding(subject, "missing", "no compiler", "`apt-get install g++`")
        is_clang = "__clang_major__" in self.macros
        family, program = ("clang", "clang++") if is_clang else ("gcc", "g++")
        version = int(self.macros.get("__clang_major__" if is_clang else "__GNUC__", 0))
        newest = newest_host_compilers(self.nvcc).get(family)
        if newest is None or version <= newest:
            upto = f", which takes {family} up to {newest}" if newest else ""
            return Finding(subject, "ok", f"{family} {version} with {self.nvcc.identity}{upto}")
        older = [n for n in range(newest, 8, -1) if shutil.which(f"{program}-{n}")]
        detail = f"{self.nvcc.identity} takes {family} up to {newest}, and {self.compiler.path} is {version}"
        if older:
            detail += f"; Opwright takes {program}-{older[0]}, torch must be told"
            return Finding(subject, "warn", detail, f"`export CC=gcc-{older[0]} CXX={program}-{older[0]}`")
        return Finding(subject, "wrong", detail, f"`apt-get install {program}-{newest}`")

    def nvcc_and_torch(self) -> Finding:
        subject, torch = "nvcc and torch", self.torch
        if self.nvcc is None:
            return Finding(subject, "none", "no nvcc", _NVCC_PACKAGES)
        release = _release(self.nvcc.identity)
        if torch is None or not torch.cuda:
            detail = f"nvcc {release}, torch without CUDA: sources with torch's CUDA headers do not compile"
            return Finding(subject, "none", detail, _install_torch(release))
        if _major(release) == _major(torch.cuda):
            return Finding(subject, "ok", f"nvcc {release}, torch's CUDA {torch.cuda}")
        detail = f"nvcc {release}, torch's CUDA {torch.cuda}: torch refuses to build extensions, operators build"
        return Finding(subject, "warn", detail, f"{_install_nvcc(torch.cuda)}, or {_install_torch(release)}")

    def nvcc_and_driver(self) -> Finding:
        subject, driver = "nvcc and driver", cuda.driver_version()
        if self.nvcc is None:
            return Finding(subject, "none", "no nvcc", _NVCC_PACKAGES)
        release = _release(self.nvcc.identity)
        if driver == "none":
            detail = f"nvcc {release}, no driver: what it compiles runs elsewhere"
            return Finding(subject, "none", detail, "where there is a GPU: `apt-get install nvidia-driver-580`")
        if _numbers(driver) >= _numbers(release):
            return Finding(subject, "ok", f"nvcc {release}, driver for CUDA {driver}")
        if _major(driver) < _major(release):
            detail = f"nvcc {release}, driver for CUDA {driver}: what nvcc compiles does not run here"
            return Finding(subject, "wrong", detail, _install_nvcc(driver))
        named = ",".join(cuda.gpu_architectures())
        detail = f"nvcc {release}, driver for CUDA {driver}: machine code runs, PTX does not"
        return Finding(subject, "warn", detail, f"`export OPWRIGHT_ARCH={named}`")

    def cuda_home(self) -> Finding:
        name = next((n for n in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(n)), "")
        on_path = shutil.which("nvcc")
        if not name:
            told = f"not set; torch takes {on_path}" if on_path else "not set"
            return Finding("CUDA_HOME", "ok" if on_path else "none", told, "" if on_path else _NVCC_PACKAGES)
        home = os.environ[name]
        own = shutil.which("nvcc", path=os.path.join(home, "bin"))
        if own is None:
            root = Path(on_path).resolve().parent.parent if on_path else "/usr/local/cuda"
            return Finding(
                "CUDA_HOME",
                "wrong",
                f"{name}={home} has no bin/nvcc",
                f"`unset {name}`, or `export {name}={root}`",
            )
        releases = [_ask_release(own), _ask_release(on_path) if on_path else ""]
        if on_path and releases[0] != releases[1]:
            detail = f"{name}={home} has nvcc {releases[0]}, and {on_path} on PATH is {releases[1]}"
            return Finding("CUDA_HOME", "warn", detail, f"`export PATH={home}/bin:$PATH`, or `unset {name}`")
        return Finding("CUDA_HOME", "ok", f"{name}={home}, nvcc {releases[0]}")

    def architectures(self) -> Finding:
        subject, gpus = "architectures", cuda.gpu_architectures()
        lists = {
            "OPWRIGHT_ARCH": settings.architectures(),
            "TORCH_CUDA_ARCH_LIST": settings.torch_architectures(),
        }
        named = {name: values for name, values in lists.items() if os.environ.get(name)}
        known = cuda.known_architectures(self.nvcc) if self.nvcc else []
        for name, values in named.items():
            text = os.environ[name]
            unknown = [value for value in values if known and value.rstrip("af") not in known]
            if unknown:
                detail = f"{name}={text}: this nvcc does not know {' '.join(unknown)}, only {' '.join(known)}"
                return Finding(subject, "wrong", detail, f"`unset {name}`, or `pip install --upgrade nvidia-cuda-nvcc`")
            without = [gpu for gpu in gpus if not _covers(values, gpu, "PTX" in text or name == "OPWRIGHT_ARCH")]
            if values and without:
                detail = f"{name}={text} has nothing for the GPU here, sm_{' sm_'.join(without)}"
                return Finding(subject, "wrong", detail, _export(name, gpus))
        new = [gpu for gpu in gpus if known and gpu not in known]
        if new:
            detail = f"this nvcc does not know the GPU here, sm_{' sm_'.join(new)}"
            return Finding(subject, "wrong", detail, "`pip install --upgrade nvidia-cuda-nvcc`")
        if not gpus and "TORCH_CUDA_ARCH_LIST" not in named and self.nvcc:
            detail = "no GPU and no TORCH_CUDA_ARCH_LIST: torch's own builds fail with IndexError"
            return Finding(subject, "none", detail, _export("TORCH_CUDA_ARCH_LIST", cuda.DEFAULT_ARCHITECTURES))
        told = [f"{name}={os.environ[name]}" for name in named] + [f"GPU sm_{gpu}" for gpu in gpus]
        return Finding(subject, "ok", ", ".join(told) or "none named")

    def ninja(self) -> Finding:
        found = shutil.which("ninja")
        if found:
            return Finding("ninja", "ok", found)
        return Finding(
            "ninja",
            "none",
            "only torch.utils.cpp_extension needs it, Opwright does not",
            "`pip install ninja`",
        )

    def temporary_files(self) -> Finding:
        import tempfile

        place = tempfile.gettempdir()
        free = shutil.disk_usage(place).free
        state = "ok" if free > _FEW_BYTES else "wrong"  # a compiler's files of one source with torch's headers
        return Finding("temporary files", state, f"{place}, {free >> 20} MiB free", "`export TMPDIR=/a/larger/disk`")


def newest_host_compilers(nvcc: cuda.Nvcc) -> dict[str, int]:
    """Returns the newest version of "gcc" and "clang" that an nvcc takes, as its own header says."""
    for path in (nvcc.root / "include", *nvcc.root.glob("targets/*/include")):
        header = path / "crt" / "host_config.h"
        if header.exists():
            text = header.read_text(errors="replace")
            gcc = re.search(r"__GNUC__ > (\d+)", text)
            clang = re.search(r"__clang_major__ >= (\d+)", text)
            return {
                **({"gcc": int(gcc[1])} if gcc else {}),
                **({"clang": int(clang[1]) - 1} if clang else {}),
            }
    return {}


def _gpu_names() -> list[str]:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    count, names = ctypes.c_int(), []
    driver.cuDeviceGetCount(ctypes.byref(count))
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, len(name), device)
        names.append(name.value.decode(errors="replace"))
    return names


def _size_bytes(root: Path) -> int:
    """Returns what a directory takes, in which others build and remove at this moment."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _covers(values: Sequence[str], gpu: str, has_ptx: bool) -> bool:
    """Returns whether machine code for these architectures, or PTX of the newest, runs on a GPU."""
    numbers = {value: int(value.rstrip("af")) for value in values}
    here = int(gpu)
    if any(
        n == here or (n // 10 == here // 10 and n < here and not value.endswith("a")) for value, n in numbers.items()
    ):
        return True
    newest = max(numbers.values(), default=0)
    return has_ptx and newest <= here and str(newest) in values  # that of "90a" and "100f" is for these alone


def _export(name: str, gpus: Sequence[str]) -> str:
    if name == "OPWRIGHT_ARCH":
        return f"`export OPWRIGHT_ARCH={','.join(gpus)}`"
    listed = ";".join(f"{gpu[:-1]}.{gpu[-1]}" for gpu in gpus)
    return f'`export TORCH_CUDA_ARCH_LIST="{listed}+PTX"`'


def _install_nvcc(version: str) -> str:
    """Returns how the nvcc of a CUDA is installed; on PyPI it is whole from 13.0 on."""
    if _major(version) >= 13:
        packages = ("nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-nvvm")
        return f"`pip install {' '.join(f'{package}=={version}.*' for package in packages)}`"
    return f"`conda install -c nvidia cuda-nvcc={version}`"


def _install_torch(cuda_version: str) -> str:
    return install_build(build_for(cuda_version))


def _ask_release(nvcc: str) -> str:
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=30).stdout
    return _release(said)


def _release(text: str) -> str:
    found = re.search(r"release (\d+\.\d+)", text)
    return found[1] if found else "of an unknown version"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def _major(version: str) -> int:
    return (_numbers(version) or [0])[0]
