"""Kernels in CUDA C++: `cuda.cu`; where nvcc is, its architectures, and the host compiler that it accepts."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opwright import settings
from opwright.backends.protocol import CompiledBackend, CompileJob, WheelPart
from opwright.backends.toolchain import INCLUDE, NATIVE, Compiler, header_folders, remember, signature_of
from opwright.contract.sources import Source
from opwright.errors import HostCompilerError, NoNvccError
from opwright.processes import run_program

# Every GPU from Ampere on: 8.x runs the first, 9.0 the second, and the driver compiles the PTX of the
# last for what is newer.
DEFAULT_ARCHITECTURES = ("80", "90")

# -O1 is about the host half; device code is always compiled at -O3. -O3 takes 0.2 s longer for d_sigmoid and
# 0.45 s for bias_gelu, and a call is not faster.
NVCC_FLAGS = (
    "-std=c++20",
    "-O1",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-fvisibility-inlines-hidden",
    "-Xcompiler=-ffile-prefix-map=" + str(NATIVE) + "=opwright",
)
_HOST_COMPILERS = tuple(f"g++-{version}" for version in range(16, 8, -1)) + tuple(
    f"clang++-{version}" for version in range(21, 12, -1)
)


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler.

    Attributes:
        path: how to call it.
        identity: changes when it is updated.
        root: the toolkit that it belongs to; headers below it need no digests of their own.
        cudart: the directory of libcudart_static.a.
    """

    path: str
    identity: str
    root: Path
    cudart: Path


def find_nvcc(identities: Path) -> Nvcc | None:
    """Returns the CUDA compiler to use, or None when the machine has none.

    It is looked for under CUDA_HOME, on PATH, under /usr/local/cuda, and among the installed packages
    of Python (`nvidia-cuda-nvcc`).

    Args:
        identities: a directory in which answers of compilers are remembered.

    Raises:
        NoNvccError: CUDA_HOME names a directory without nvcc, or the toolkit is incomplete.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home and not shutil.which("nvcc", path=os.path.join(home, "bin")):
        raise NoNvccError(
            "CUDA_HOME",
            "there is no nvcc in its directory `bin`",
            rows=[("got", home)],
            hint="unset CUDA_HOME, or `export CUDA_HOME=/usr/local/cuda`",
        )
    for path in _places(home):
        found = _ask(path, identities)
        if found is not None:
            return found
    return None


def _places(home: str | None) -> Iterator[str]:
    """Yields the nvcc that there are, the preferred first."""
    folders = [os.path.join(home, "bin")] if home else []
    folders += [*os.environ.get("PATH", "").split(os.pathsep), "/usr/local/cuda/bin"]
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    if found:
        yield found
    for entry in sys.path:
        for package in sorted(Path(entry or ".").glob("nvidia/*/bin/nvcc"), reverse=True):
            if os.access(package, os.X_OK):
                yield str(package)


def _ask(path: str, identities: Path) -> Nvcc | None:
    """Returns what nvcc says about itself; None when it cannot run."""

    def ask() -> str:
        version = run_program([path, "--version"])
        plan = run_program([path, "--dryrun", "-x", "cu", "/dev/null"])
        release = re.search(r"release .*", version.stdout)
        top = re.search(r"^#\$ TOP=(.*)$", plan.stderr, re.MULTILINE)
        if not release or not top:
            return ""
        return f"nvcc {release[0]}\n{Path(top[1]).resolve()}"

    try:
        answer = remember(signature_of("nvcc", path), identities, ask)
    except OSError:
        return None
    if not answer:
        return None
    identity, top = answer.split("\n")
    root = Path(top)
    places = [root / "lib64", root / "lib", *sorted(root.glob("targets/*/lib"))]
    cudart = next((place for place in places if (place / "libcudart_static.a").exists()), None)
    if cudart is None:
        raise NoNvccError(
            path,
            "its toolkit has no libcudart_static.a",
            rows=[("looked in", ", ".join(map(str, places)))],
            hint="`pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-nvvm` of the same version",
        )
    return Nvcc(path, identity, root, cudart)


# --- architectures ------------------------------------------------------------------------------------


def architectures() -> tuple[str, ...]:
    """Returns what to compile for: OPWRIGHT_ARCH, else the GPUs present, else DEFAULT_ARCHITECTURES."""
    return settings.architectures() or gpu_architectures() or DEFAULT_ARCHITECTURES


@functools.cache
def gpu_architectures() -> tuple[str, ...]:
    """Returns the architectures of the GPUs present, as "90"; asks the driver, so needs no torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    found = set()
    for index in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # compute capability, major
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # minor
        found.add(10 * major.value + minor.value)
    return tuple(str(number) for number in sorted(found))


def driver_version() -> str:
    """Returns the newest CUDA that the driver knows, as "13.0"; "none" without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return "none"
    return "none" if failed else f"{version.value // 1000}.{version.value % 1000 // 10}"


def remedy(error: int, architecture: str) -> str:
    """Returns what to type where CUDA finds no code for a GPU, from the number of its error."""
    if error == 35:
        return "update the driver, or build with an nvcc that is no newer than it"
    if os.environ.get("OPWRIGHT_ARCH"):
        return f"unset OPWRIGHT_ARCH, or `export OPWRIGHT_ARCH={architecture}`"
    return f"`OPWRIGHT_ARCH={architecture} opwright build TARGET`"


def architecture_flags(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the flags for machine code of each architecture and PTX of the newest."""
    ordered = sorted(dict.fromkeys(names), key=_number)
    flags = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in ordered[:-1]]
    newest = ordered[-1]
    return (*flags, f"-gencode=arch=compute_{newest},code=[sm_{newest},compute_{newest}]")


def _number(name: str) -> tuple[int, str]:
    digits = name.rstrip("af")
    return int(digits), name[len(digits) :]


def known_architectures(nvcc: Nvcc) -> list[str]:
    """Returns what `nvcc --list-gpu-arch` lists, as "90"."""
    listed = run_program([nvcc.path, "--list-gpu-arch"]).stdout
    return re.findall(r"compute_(\w+)", listed)


# --- commands -----------------------------------------------------------------------------------------


# The halves of a source that are compiled side by side, with their flags; "" is the whole.
PARTS = {"": (), "_32bit": ("-DOPWRIGHT_ONLY_16BIT=0",), "_16bit": ("-DOPWRIGHT_ONLY_16BIT=1",)}


def parts_of(text: str) -> tuple[str, ...]:
    """Returns the names in PARTS that a source is compiled as, by its text and those of its headers.

    One that exports 16-bit and other types is compiled as two halves, on two cores: bias_gelu takes 2.1
    instead of 3.6 s. Variables in device memory would then exist twice, so a source with such
    variables that the host can reach stays whole.
    """
    exported = re.findall(r"OPWRIGHT_KERNEL\(\s*\w+\s*,([^)]*)\)", text)
    words = {word for types in exported for word in re.findall(r"\w+", types)} - {"opwright"}
    is_stateful = re.search(r"__constant__|__managed__|cuda\w+Symbol", text)
    small = words & {"half", "bfloat16"}
    return ("_32bit", "_16bit") if small and words - small and not is_stateful else ("",)


def compile_command(nvcc: Nvcc, host: str, flags: Sequence[str], source: Path, header: str, stem: str) -> list[str]:
    """Returns the command that compiles one source to `<stem>.o` and notes what it read in `<stem>.d`.

    ptxas says what each kernel takes, into the log of the build; the code is the same.
    """
    return [
        nvcc.path, *flags, "-Xptxas=-v", "-ccbin", host, "-I", str(INCLUDE), "-include", header,
        "-MD", "-MF", f"{stem}.d", "-x", "cu", "-c", str(source), "-o", f"{stem}.o",
    ]  # fmt: skip


def link_flags(nvcc: Nvcc) -> list[str]:
    """Returns the flags that link the static runtime, and keep its functions to the library.

    Exported, they would be replaced by those of the runtime that torch has loaded, another version.
    `muldefs`: both halves of a source define what it defines, in the same way.
    """
    return [
        f"-L{nvcc.cudart}",
        "-lcudart_static",
        "-ldl",
        "-lpthread",
        "-lrt",
        "-Wl,--exclude-libs,ALL",
        "-Wl,-z,muldefs",
    ]


def host_compiler(nvcc: Nvcc, preferred: Compiler, identities: Path) -> str:
    """Returns the host compiler that was found to work with nvcc, `preferred` when none was refused."""
    path = identities / f"host-{_pair(nvcc, preferred)}"
    try:
        chosen = path.read_text()
    except OSError:
        return preferred.path
    return chosen if os.access(chosen, os.X_OK) else preferred.path


def is_refusal(output: str) -> bool:
    """Returns whether a failed compile failed because nvcc refuses the host compiler."""
    return bool(re.search(r"#error -- unsupported|host compiler .* (not supported|cannot be found)", output))


def choose_host_compiler(nvcc: Nvcc, refused: Compiler, identities: Path, subject: str) -> str:
    """Returns another host compiler, one that nvcc accepts, and remembers it.

    Raises:
        HostCompilerError: there is none.
    """
    tried = [refused.path]
    for name in ("g++", "c++", "clang++", *_HOST_COMPILERS):
        path = shutil.which(name)
        if path is None or path in tried:
            continue
        tried.append(path)
        probe = [nvcc.path, "-ccbin", path, "-std=c++20", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null"]
        if run_program(probe).returncode == 0:
            remember(None, identities, lambda path=path: path, name=f"host-{_pair(nvcc, refused)}")
            return path
    version = re.search(r"GNUC__ > (\d+)", _host_config(nvcc))
    newest = version[1] if version else "13"
    raise HostCompilerError(
        subject,
        "nvcc accepts none of the host compilers here",
        rows=[("nvcc", nvcc.identity), *(("refused", path) for path in tried)],
        hint=f"`apt-get install g++-{newest}`, which is found by itself",
    )


def _pair(nvcc: Nvcc, compiler: Compiler) -> str:
    return re.sub(r"\W+", "-", f"{nvcc.identity} {compiler.path} {compiler.identity}")[:200]


def _host_config(nvcc: Nvcc) -> str:
    for path in (
        nvcc.root / "include/crt/host_config.h",
        *nvcc.root.glob("targets/*/include/crt/host_config.h"),
    ):
        if path.exists():
            return path.read_text(errors="replace")
    return ""


# --- the backend --------------------------------------------------------------------------------------


class GpuBackend(CompiledBackend):
    """A backend whose kernels run on the GPUs that CUDA programs reach.

    The flags of nvcc are part of the address of all its builds, as they decide the architectures.
    """

    device_type = "cuda"
    devices = "CUDA GPUs"
    is_gpu = True
    stream = "cudaStream_t"
    # Without nvcc: launch functions of Triton kernels.
    prelude = ("#if !defined(__CUDACC__)", "using cudaStream_t = struct CUstream_st*;", "#endif")
    after_launch = "::opwright::detail::check_launch();"

    def flags(self) -> tuple[str, ...]:
        """Returns the flag policy, and the flags of the architectures."""
        return (*NVCC_FLAGS, *architecture_flags(architectures()))

    def is_in_torch(self) -> bool:
        """Returns whether torch was built with CUDA."""
        import torch

        return torch.backends.cuda.is_built()

    def is_device_here(self) -> bool:
        """Returns whether torch finds a GPU."""
        import torch

        return torch.cuda.is_available()

    def count_devices(self) -> int:
        """Returns how many GPUs torch finds."""
        import torch

        return torch.cuda.device_count() if self.is_device_here() else 0


class CudaBackend(GpuBackend):
    """CUDA C++, compiled by nvcc."""

    name = "cuda"
    file_name = "cuda.cu"
    has_own_compiler = True

    def describe_surroundings(self, generated: Sequence[str]) -> list[str]:
        """Returns the variables that nvcc reads itself."""
        return [os.environ.get(f"NVCC_{name}_FLAGS", "") for name in ("PREPEND", "APPEND")]

    def find_compiler(self, identities: Path) -> Nvcc | None:
        """Returns nvcc."""
        return find_nvcc(identities)

    def make_compiler_error(self, subject: str) -> NoNvccError:
        """Returns the error for a machine without nvcc."""
        return NoNvccError(
            subject,
            "there is no CUDA compiler (nvcc) to build its kernel with",
            rows=[
                ("architecture", ", ".join(f"sm_{name}" for name in architectures())),
                ("looked in", "CUDA_HOME, PATH, /usr/local/cuda, Python's packages"),
            ],
            hint="`pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-crt nvidia-nvvm`, "
            "or `export CUDA_HOME=/path/to/cuda`",
        )

    def split(self, text: str) -> tuple[str, ...]:
        """Returns the names in PARTS that a source is compiled as."""
        return parts_of(text)

    def make_command(self, job: CompileJob, part: str = "") -> list[str]:
        """Returns the command that compiles a source, or a half of it."""
        host = host_compiler(job.tool, job.compiler, job.identities)
        return compile_command(job.tool, host, (*job.flags, *PARTS[part]), job.path, job.header, job.stem)

    def repair(self, output: str, tool: Nvcc, compiler: Compiler, identities: Path, subject: str) -> bool:
        """Chooses another host compiler where nvcc refused the one that it was given."""
        if not is_refusal(output):
            return False
        choose_host_compiler(tool, compiler, identities, subject)
        return True

    def known_architectures(self, identities: Path) -> list[str]:
        """Returns what `nvcc --list-gpu-arch` lists, as "90"."""
        nvcc = find_nvcc(identities)
        return known_architectures(nvcc) if nvcc else []

    def link_flags(self, tool: Nvcc) -> list[str]:
        """Returns the flags that link the static runtime."""
        return link_flags(tool)

    def system_folders(self, tool: Nvcc, compiler: Compiler, identities: Path) -> list[Path]:
        """Returns the toolkit, and the folders of the host compiler."""
        return [tool.root, *header_folders(host_compiler(tool, compiler, identities), identities)]

    def wheel_parts(
        self, source: Source, levels: Mapping[str, Sequence[str]], architectures: Sequence[str]
    ) -> list[WheelPart]:
        """Returns the halves that a source is compiled as, each for all architectures."""
        return (
            [WheelPart(self.name, part, PARTS[part]) for part in parts_of(source.with_headers(source.read()))]
            if architectures
            else []
        )

    def wheel_flags(self, level: Sequence[str], architectures: Sequence[str], tool: Nvcc) -> tuple[str, ...]:
        """Returns the flags for all architectures.

        GPU code is packed most densely: a third of the size. The drivers for CUDA 13 unpack it.
        """
        kept = [f for f in NVCC_FLAGS if "-ffile-prefix-map" not in f]
        release = re.search(r"release (\d+)", tool.identity)
        packing = ("--compress-mode=size",) if release and int(release[1]) >= 13 else ()
        return (*kept, "-Xcompiler=-fno-gnu-unique", *architecture_flags(architectures), *packing)

    def make_wheel_command(self, job: CompileJob, part: str, prefix_maps: Sequence[str]) -> list[str]:
        """Returns the command that compiles a source, or a half of it."""
        # nvcc would split them at spaces and commas.
        maps = [f"-Xcompiler={flag}" for flag in prefix_maps if not re.search(r"[\s,]", flag)]
        flags = (*job.flags, *maps)
        return compile_command(job.tool, job.compiler.path, flags, job.path, job.header, job.stem)


BACKEND = CudaBackend()
