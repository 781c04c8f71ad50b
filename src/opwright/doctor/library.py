"""Why a shared library cannot be imported here: what it was built for against what is here."""

from __future__ import annotations

import importlib.machinery
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opwright.backends import cuda
from opwright.build.demangle import demangle
from opwright.build.elf import has_old_string, newest, read_library
from opwright.doctor import loader
from opwright.doctor.finding import Finding, gather
from opwright.doctor.installed_torch import build_for, exact_build_for, install_build
from opwright.doctor.library_here import LibraryHere
from opwright.errors import LoadError
from opwright.package.shims import minimum_torch

_SHOWN = 3  # symbols of one cause
_LONGEST = 90  # characters of a symbol that are shown
_CUDA_NAME = re.compile(r"lib(cu\w+|nccl|nvrtc\w*|nvToolsExt|nvJitLink)\.so\.?(\d*)")
_LONG_STRING = "std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >"

# Symbols that are missing for a reason that their names tell: names, reason, how to mend it.
_CAUSES = (
    (r"__cudaRegisterLinkedBinary", "device code was not linked (-rdc)", "`CUDAExtension(..., dlink=True)`"),
    (r"cu(da|blas|dnn|fft|rand|solver|sparse)\w|cu[A-Z]|nccl[A-Z]|__cuda", "a library of CUDA is not linked",
     "name it: `extra_ldflags=['-lcudart']` (-lcublas, -lcudnn, ...)"),
    (r"omp_|GOMP_|__kmpc_", "OpenMP is not linked", "`extra_ldflags=['-fopenmp']`"),
    (r"__(a|ub|t|l)san_", "it was built with a sanitizer",
     "`LD_PRELOAD=$(gcc -print-file-name=libasan.so) python ...`"),
    (r"_ZN?K?S[t]|_ZT[ISV]N10__cxxabiv|__cxa_|__gxx_personality|_Zn[wa]|_Zd[la]",
     "the C++ library is not linked, or is too old", "link with `g++`, not `gcc`; `apt-get install libstdc++6`"),
)  # fmt: skip


@dataclass(frozen=True)
class LibraryReport:
    """What is said about a library.

    Attributes:
        facts: what the file tells, as plain data.
    """

    findings: list[Finding]
    facts: dict[str, Any] = field(default_factory=dict)


def examine(path: Path) -> LibraryReport:
    """Returns what a library was built for, what of it is missing here, and what to do; never raises."""
    try:
        library = read_library(path)
    except LoadError as error:
        state = "wrong" if path.is_file() else "missing"
        is_python = path.suffix == ".py" and path.is_file()
        rule = "is a file of Python, not a shared library" if is_python else error.rule
        hint = f"`opwright inspect {path}`; `opwright doctor` without a file examines this machine"
        return LibraryReport([Finding("file", state, rule, hint if is_python else error.hint)], {"path": str(path)})
    examination = _Examination(library)
    if examination.file().state != "ok":
        return LibraryReport([examination.file()], examination.facts())
    checks = {
        "file": examination.file,
        "module": examination.module,
        "Python": examination.python,
        "torch": examination.torch_versions,
        "C++ ABI": examination.cxx_abi,
        "pybind11": examination.pybind,
        "C library": examination.c_library,
        "CUDA": examination.cuda_version,
        "GPU code": examination.gpu_code,
        "libraries": examination.libraries,
        "symbols": examination.symbols,
    }
    return LibraryReport(gather(checks.items()), examination.facts())


class _Examination(LibraryHere):
    """The checks of one library."""

    def facts(self) -> dict[str, Any]:
        library = self.library
        return {
            "path": str(self.path),
            "machine": library.machine,
            "compilers": library.compilers,
            "needed": {
                name: str(self.closure.found[name].path) if name in self.closure.found else None
                for name in library.needed
            },
            "runpath": [*library.search, *library.inherited_search],
            "versions_needed": library.versions_needed,
            "modules": library.module_names,
            "cxx11_abi": library.has_cxx11_abi,
            "pybind_internals": library.pybind_internals,
            "machine_code": library.device_code.machine_code,
            "ptx": library.device_code.ptx,
            "cuda": library.device_code.toolkit,
            "stable_torch_symbols": library.stable_torch_symbols,
            "unstable_torch_symbols": library.unstable_torch_symbols,
            "missing_symbols": {name: demangle(name) for name in self.missing},
        }

    # --- what the file is -----------------------------------------------------------------------------

    def file(self) -> Finding:
        library = self.library
        if library.kind != "shared library":
            hint = f"link it: `g++ -shared -o {self.path.stem}.so {self.path}`"
            return Finding("file", "wrong", f"{library.kind}, not a shared library", hint)
        if library.machine != platform.machine():
            detail = f"for {library.machine}, and this machine is {platform.machine()}"
            return Finding("file", "wrong", detail, self.rebuild)
        kib = library.size_bytes / 1024
        size = f"{kib:.0f} KiB" if kib < 1000 else f"{kib / 1024:.1f} MiB"
        by = "; ".join(library.compilers[:2]) or "an unknown compiler"
        return Finding("file", "ok", f"{library.kind}, {library.machine}, {size}, by {by}")

    def module(self) -> Finding:
        names, (stem, _, _) = self.library.module_names, self.path.name.partition(".")
        if not names:
            if re.search(r"\.(cpython|abi3|pypy)", self.path.name):
                detail = f"`import {stem}` asks for the function PyInit_{stem}, and there is none"
                hint = "`PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}` in one of its sources"
                return Finding("module", "wrong", detail, hint)
            how = ", but for `torch.ops.load_library`" if self.needs_torch else ""
            return Finding("module", "ok", f"no PyInit_ function: not for `import`{how}")
        if stem in names or self.is_stored:
            return Finding("module", "ok", ", ".join(names))
        right = self.path.name.replace(stem, names[0], 1)
        detail = f"the file is called {stem}, its module {', '.join(names)} (PyInit_{names[0]})"
        return Finding("module", "wrong", detail, f"`mv {self.path} {self.path.with_name(right)}`")

    def python(self) -> Finding:
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        _, _, tag = self.path.name.partition(".")
        linked = [m[1] for name in self.library.needed if (m := re.match(r"libpython(3\.\d+\w*)", name))]
        named = re.match(r"cpython-(3)(\d+)(t?)", tag)
        version = f"{named[1]}.{named[2]}{named[3]}" if named else "".join(linked[:1])
        version = version or self.library.python_of_pybind
        stem = self.path.name.partition(".")[0]
        is_seen = f".{tag}" in importlib.machinery.EXTENSION_SUFFIXES
        if self.library.module_names and not is_seen:
            detail = f"this is {here}, and `import {stem}` does not see a file ending in .{tag}"
            detail = f"for {version}; {detail}" if version else detail
            return Finding("Python", "wrong", detail, f"{self.rebuild}, or run `python{version}`")
        if not self.library.python_symbols:
            return Finding("Python", "ok", "any: it needs none of its functions")
        if tag.startswith("abi3"):
            return Finding("Python", "ok", f"the stable ABI (abi3), this is {here}")
        inside = (linked[0] if linked else "") or self.library.python_of_pybind
        if inside and inside != here:
            return Finding("Python", "wrong", f"compiled for {inside}, this is {here}", self.rebuild)
        told = f"for {version}" if version else "for the version it was compiled with, which it does not tell"
        return Finding("Python", "ok", f"{told}, this is {here}")

    # --- torch ----------------------------------------------------------------------------------------

    def torch_versions(self) -> Finding:
        library, torch = self.library, self.torch
        if not self.needs_torch:
            return Finding("torch", "ok", "any: it needs nothing of torch")
        if torch is None:
            return Finding("torch", "missing", "it needs torch, which is not installed", "`pip install torch`")
        wanted, source = self.built_for_torch
        same = not wanted or _numbers(wanted)[:2] == list(torch.number)
        lacking = [name for name in library.unstable_torch_symbols if name in self.missing]
        unstable, stable = len(library.unstable_torch_symbols), len(library.stable_torch_symbols)
        told = f"for torch {wanted} ({source})" if wanted else "for the torch it was compiled with"
        if unstable:
            detail = f"{told}: {unstable} unstable C++ symbols (at::, c10::, torch::), {stable} stable ones"
            hint = f"`pip install torch=={wanted}`, or {self.rebuild}" if wanted else self.rebuild
            if lacking:
                if not torch.cuda and all(map(_is_of_cuda, lacking)):
                    hint = self._torch_with_cuda()
                return Finding("torch", "wrong", f"{detail}; torch {torch.version} lacks {len(lacking)}", hint)
            if not same:
                return Finding("torch", "warn", f"{detail}; this is {torch.version}, which has them all", hint)
            return Finding("torch", "ok", f"{detail}; torch {torch.version} has them all")
        floor = minimum_torch(library)
        since = f"for torch >= {floor[0]}.{floor[1]}: " if floor else ""
        detail = f"{since}{stable} stable C shims, no unstable symbol"
        if any(name in self.missing for name in library.stable_torch_symbols):
            detail = f"for a newer torch than {torch.version}, which lacks some of its {stable} stable C shims"
            return Finding("torch", "wrong", detail, "`pip install --upgrade torch`")
        return Finding("torch", "ok", detail)

    def cxx_abi(self) -> Finding:
        abi = self.library.has_cxx11_abi
        told = "unknown: no symbol with a string" if abi is None else f"_GLIBCXX_USE_CXX11_ABI={int(abi)}"
        if abi is None or self.torch is None or not self.library.unstable_torch_symbols:
            return Finding("C++ ABI", "ok", told)
        if abi == self.torch.has_cxx11_abi:
            return Finding("C++ ABI", "ok", f"{told}, as torch")
        detail = f"{told}, and torch {self.torch.version} has {int(self.torch.has_cxx11_abi)}"
        flag = "" if self.owner else f"; without `-D_GLIBCXX_USE_CXX11_ABI={int(abi)}` in `extra_compile_args`"
        hint = self.rebuild + flag
        return Finding("C++ ABI", "wrong", detail, hint)

    def pybind(self) -> Finding | list[Finding]:
        own = self.library.pybind_internals
        if not own:
            return []
        torchs = self.torch.python_part.pybind_internals if self.torch and self.torch.python_part else own
        detail = f"internals {own.partition('_')[0]}"
        if own == torchs or not self.needs_torch:
            return Finding("pybind11", "ok", f"{detail}, as torch" if self.needs_torch else detail)
        detail = f"internals {own}, torch's are {torchs}: its functions do not know torch's types"
        return Finding("pybind11", "warn", detail, self.rebuild)

    # --- what is loaded with it -----------------------------------------------------------------------

    def c_library(self) -> Finding:
        present = {**loader.process_closure().found, **self.closure.found}
        lacking = [
            f"{version} of {name}"
            for name, versions in self.library.versions_needed.items()
            for version in versions
            if name in present and present[name].versions_defined and version not in present[name].versions_defined
        ]
        everything = [version for library in present.values() for version in library.versions_defined]
        rows = [(family, self.library.newest_version(family)) for family in ("GLIBC", "GLIBCXX", "CXXABI")]
        told = ", ".join(f"{family} {needs} (here {newest(family, everything)})" for family, needs in rows if needs)
        if not lacking:
            return Finding("C library", "ok", f"needs {told}" if told else "any")
        detail = f"it was built on a newer system: there is no {', '.join(lacking)} here"
        if any("GLIBCXX" in text or "CXXABI" in text for text in lacking):
            return Finding(
                "C library",
                "wrong",
                detail,
                "`conda install -c conda-forge libstdcxx-ng`, or " + self.rebuild,
            )
        return Finding("C library", "wrong", detail, self.rebuild)

    def libraries(self) -> list[Finding]:
        closure = self.closure
        found = [Finding("libraries", "wrong", *self._absent(name, by)) for name, by in closure.absent.items()]
        if not found:
            detail = f"all {len(closure.found)} are found" if closure.found else "it needs none"
            if closure.late:
                detail += f", {' '.join(closure.late)} only after `import torch`"
            found = [Finding("libraries", "ok", detail)]
        return found

    def _absent(self, name: str, needed_by: Sequence[str]) -> tuple[str, str]:
        by = "" if self.path.name in needed_by else f", which {needed_by[0]} needs"
        detail = f"{name} is not found{by}"
        library_of_cuda = _CUDA_NAME.match(name)
        if name.startswith(("libtorch", "libc10")):
            if self.torch is None:
                return detail, "`pip install torch`"
            if "cuda" in name and not self.torch.cuda:
                return f"{detail}: torch {self.torch.version} has no CUDA", self._torch_with_cuda()
            return f"{detail}: torch {self.torch.version} has none such", self.rebuild
        if name == "libcuda.so.1":
            return (
                f"{detail}: there is no driver of NVIDIA",
                "`nvidia-smi`; in a container: `docker run --gpus all`",
            )
        if library_of_cuda:
            own = f"CUDA {self.torch.cuda}" if self.torch and self.torch.cuda else "no CUDA"
            detail = f"{detail}: it was built for {_cuda_of(name)}; torch here has {own}"
            return (
                detail,
                f"{self.rebuild}, or `export LD_LIBRARY_PATH=$(dirname $(find / -name {name} | head -1))`",
            )
        if name.startswith("libpython"):
            return f"{detail}: it was built for another Python", self.rebuild
        if "musl" in name:
            return f"{detail}: it was built for Alpine (musl)", self.rebuild
        gone = [folder for folder in self.library.search if not os.path.isdir(folder)]
        detail += f"; its RUNPATH names {gone[0]}, which does not exist" if gone else ""
        return detail, f"`export LD_LIBRARY_PATH=$(dirname $(find / -name {name} | head -1))`"

    def symbols(self) -> list[Finding]:
        groups: dict[tuple[str, str], list[str]] = {}
        for name in self.missing:
            groups.setdefault(self._cause(name), []).append(name)
        found = []
        for (cause, hint), names in groups.items():
            shown = ", ".join(_brief(name) for name in names[:_SHOWN])
            more = f" and {len(names) - _SHOWN} more (`--json`)" if len(names) > _SHOWN else ""
            found.append(Finding("symbols", "wrong", f"{len(names)} missing, {cause}: {shown}{more}", hint))
        return found or [Finding("symbols", "ok", f"all {len(self.library.undefined)} that it needs are here")]

    def _cause(self, name: str) -> tuple[str, str]:
        """Returns why a symbol is missing, and how to mend it."""
        library, torch = self.library, self.torch
        of_torch = name in library.unstable_torch_symbols or name in library.stable_torch_symbols
        if of_torch and torch is not None:
            for part in sorted(torch.libraries.glob("lib*.so")):
                if name in _defined(part):
                    flag = part.name.removeprefix("lib").removesuffix(".so")
                    hint = f"link it: `-L{torch.libraries} -l{flag}`, as `CppExtension` does"
                    return f"in torch's {part.name}, which it does not name", hint
            if not torch.cuda and _is_of_cuda(name):
                return f"torch {torch.version} has no CUDA", self._torch_with_cuda()
            if torch.has_cxx11_abi and has_old_string(name):
                return "with the strings of the old C++ ABI", self.cxx_abi().hint
            return f"not in torch {torch.version}", self.torch_versions().hint
        if name in library.python_symbols:
            return f"not in Python {platform.python_version()}", self.rebuild
        if self.closure.absent:
            return f"perhaps in {', '.join(self.closure.absent)}", self.libraries()[0].hint
        for pattern, cause, hint in _CAUSES:
            if re.match(pattern, name):
                return cause, hint
        hint = "add its source to `sources=[...]`, or its library to `extra_ldflags=['-l...']`"
        return "declared and never defined", hint

    # --- CUDA -----------------------------------------------------------------------------------------

    def cuda_version(self) -> Finding | list[Finding]:
        library, torch = self.library, self.torch
        shared = [_cuda_of(name) for name in library.needed if name.startswith("libcudart.so.")]
        toolkit = f"CUDA {library.device_code.toolkit}" if library.device_code.toolkit else ""
        told = toolkit or "".join(shared[:1])
        needs_torchs = any(re.match(r"lib(c10|torch)_cuda", name) for name in library.needed)
        if not told and not needs_torchs:
            return []
        how = "runtime shared" if shared else "runtime inside"
        detail = f"built with {told}, {how}" if told else "built with a torch that has CUDA"
        if torch is None or not (needs_torchs or shared):
            return Finding("CUDA", "ok", detail)
        if not torch.cuda and needs_torchs:
            return Finding("CUDA", "wrong", f"{detail}; torch {torch.version} has none", self._torch_with_cuda())
        major = re.search(r"\d+", told)
        if torch.cuda and major and major[0] != torch.cuda.split(".")[0]:
            return Finding("CUDA", "wrong", f"{detail}; torch here has CUDA {torch.cuda}", self.rebuild)
        return Finding("CUDA", "ok", f"{detail}; torch here has {f'CUDA {torch.cuda}' if torch.cuda else 'none'}")

    def gpu_code(self) -> Finding | list[Finding]:
        code, gpus, driver = self.library.device_code, cuda.gpu_architectures(), cuda.driver_version()
        if not code:
            return []
        if not gpus:
            return Finding("GPU code", "ok", f"{code}; no GPU here to compare with")
        ways = {gpu: code.way_to_run_on(gpu) for gpu in gpus}
        without = [gpu for gpu, way in ways.items() if not way]
        if without:
            detail = f"{code}: no kernel image for sm_{' sm_'.join(without)}"
            return Finding("GPU code", "wrong", detail, self._for_gpus(gpus))
        if "PTX" in ways.values() and code.toolkit and _numbers(driver) < _numbers(code.toolkit):
            detail = f"{code}: this GPU needs the PTX, of CUDA {code.toolkit}; the driver knows {driver}"
            return Finding("GPU code", "wrong", detail, self._for_gpus(gpus))
        told = ", ".join(f"sm_{gpu} runs its {way}" for gpu, way in ways.items())
        return Finding("GPU code", "ok", f"{code}; {told}")

    def _for_gpus(self, gpus: Sequence[str]) -> str:
        if self.is_stored:
            return f"`OPWRIGHT_ARCH={','.join(gpus)} opwright build TARGET`"
        listed = ";".join(f"{gpu[:-1]}.{gpu[-1]}" for gpu in gpus)
        return f'`export TORCH_CUDA_ARCH_LIST="{listed}"`, then {self.rebuild}'

    def _torch_with_cuda(self) -> str:
        toolkit, (wanted, _) = self.library.device_code.toolkit, self.built_for_torch
        if wanted:  # PyPI's are with CUDA
            named = f"torch=={wanted}"
            plain = f"`pip install --force-reinstall {named}`"
            return install_build(exact_build_for(toolkit), named) if toolkit else plain
        majors = [m[2] for name in self.library.needed if (m := _CUDA_NAME.match(name)) and m[1] == "cudart"]
        return install_build(build_for(toolkit or "".join(majors[:1])))


def _is_of_cuda(symbol: str) -> bool:
    return "cuda" in symbol.lower()


def _brief(name: str) -> str:
    text = demangle(name).replace(_LONG_STRING, "std::string")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _cuda_of(name: str) -> str:
    """Returns "CUDA 12" for libcudart.so.12; other libraries of CUDA count for themselves."""
    found = _CUDA_NAME.match(name)
    if found and found[1] in ("cudart", "cublas", "cublasLt", "nvJitLink", "nvrtc"):
        return f"CUDA {found[2]}"
    return name


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def _defined(path: Path) -> frozenset[str]:
    try:
        return read_library(path).defined
    except LoadError:
        return frozenset()
