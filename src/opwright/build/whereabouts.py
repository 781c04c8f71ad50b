"""Where a header, a library or a symbol comes from that a build did not find."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

# Parts of the CUDA toolkit: the headers that begin so, the library, and the wheel of CUDA 13 that has both
# (in CUDA 12 its name ends in -cu12).
_CUDA = [
    (r"cublas|nvblas", "cublas", "nvidia-cublas"),
    (r"cusparseLt", "cusparseLt", "nvidia-cusparselt"),
    (r"cusparse", "cusparse", "nvidia-cusparse"),
    (r"cusolver", "cusolver", "nvidia-cusolver"),
    (r"cufft", "cufft", "nvidia-cufft"),
    (r"cufile", "cufile", "nvidia-cufile"),
    (r"curand", "curand", "nvidia-curand"),
    (r"cudnn", "cudnn", "nvidia-cudnn"),
    (r"nccl", "nccl", "nvidia-nccl"),
    (r"nvrtc", "nvrtc", "nvidia-cuda-nvrtc"),
    (r"nvJitLink", "nvJitLink", "nvidia-nvjitlink"),
    (r"nvtx|nvToolsExt", "nvtx3interop", "nvidia-nvtx"),
    (r"cupti", "cupti", "nvidia-cuda-cupti"),
    (r"(cub|thrust|cuda|nv)/", "", "nvidia-cuda-cccl"),
    (r"crt/", "", "nvidia-cuda-crt"),
    (r"cuda|cuComplex|driver_types|vector_types|device_launch|cooperative_groups", "cudart", "nvidia-cuda-runtime"),
]  # fmt: skip
# Always named with the CUDA version: these are versioned apart from the toolkit.
_SUFFIXED = ("nvidia-cusparselt", "nvidia-cudnn", "nvidia-nccl")
_DEBIAN = [
    (r"Eigen/", "libeigen3-dev"),
    (r"boost/", "libboost-dev"),
    (r"fmt/", "libfmt-dev"),
    (r"opencv", "libopencv-dev"),
    (r"mpi\.h", "libopenmpi-dev"),
    (r"omp\.h", "libomp-dev"),
    (r"cblas\.h|openblas", "libopenblas-dev"),
    (r"fftw3", "libfftw3-dev"),
]
# Headers that PyTorch has removed, and those that took their place.
_REMOVED = [
    (r"THC/THCAtomics", "ATen/cuda/Atomic.cuh"),
    (r"THC/THCDeviceUtils", "ATen/cuda/DeviceUtils.cuh"),
    (r"THC/", "ATen/cuda/CUDAContext.h"),
    (r"TH/", "ATen/ATen.h"),
]
_SYMBOLS = [
    (r"(GOMP|omp)_", '`extra_cflags=["-fopenmp"], extra_ldflags=["-fopenmp"]`'),
    (r"__(asan|ubsan|tsan)_", "a sanitizer's library must be in the process first: `LD_PRELOAD=$(gcc -print-file-name=libasan.so) python ...`"),
    (r"cublasLt", '`extra_ldflags=["-lcublasLt"]`'),
    (r"(cublas|cusparse|cusolver|cufft|curand|cudnn|nccl|nvrtc)", '`extra_ldflags=["-l{0}"]`'),
    (r"(__cuda|cuda[A-Z])", '`with_cuda=True`, or `extra_ldflags=["-lcudart"]`'),
    (r"cu[A-Z]", '`extra_ldflags=["-lcuda"]`'),
    (r"(c10|at)::cuda", "a function of a PyTorch with CUDA, and {torch} may be without: `opwright doctor`"),
    (r"(?:\w+ )*(c10|at|torch|caffe2)::", "{torch} has no such function: its headers and its libraries must be of one version, and the compiler must use PyTorch's C++ ABI (`opwright doctor`)"),
    (r"cblas_|[sdcz]gemm_", '`extra_ldflags=["-lopenblas"]`'),
]  # fmt: skip


@dataclass(frozen=True)
class Search:
    """Where something was looked for, each with what the place is, and how it can be found."""

    looked_in: list[tuple[str, str]]
    hint: str


def of_header(header: str, source: str, command: Sequence[str]) -> Search:
    """Returns where a header was looked for, and where it is.

    Args:
        source: the file that includes it, or what a text is called.
        command: the words of the compiler's command.
    """
    beside = os.path.dirname(source) if os.path.isfile(source) else ""
    given = [word[2:] for word in command if re.match(r"-I.", word)]
    system = [folder for word, folder in pairwise(command) if word == "-isystem"]
    looked_in = [(beside, "beside the source")] if beside else []
    looked_in += [(folder, "extra_include_paths") for folder in given]
    looked_in += [("the directories of PyTorch, Python and the compiler", "")]
    if re.match(r"(torch|ATen|c10|caffe2|pybind11)/", header):
        return Search(looked_in, _of_torch(header))
    found = next((folder for folder in _folders(beside) if os.path.isfile(os.path.join(folder, header))), None)
    if found in _cuda_folders() and found not in system:
        return Search(looked_in, f'`with_cuda=True`, or `extra_include_paths=["{found}"]`')
    if found:
        return Search(looked_in, f'`extra_include_paths=["{found}"]`')
    return Search(looked_in, _package_of(header))


def of_library(library: str, command: Sequence[str]) -> Search:
    """Returns where a library was looked for, and where it is."""
    given = [word[2:] for word in command if re.match(r"-L.", word)]
    looked_in = [(folder, "-L") for folder in given] + [("the system's own", "")]
    places = [*given, *_nvidia("lib"), *_around("lib"), "/usr/lib/*-linux-gnu"]
    for pattern in places:
        for path in sorted(glob.glob(os.path.join(pattern, f"lib{library}.*"))):
            folder, name = os.path.split(path)
            if name.endswith((".so", ".a")):
                return Search(looked_in, f'`extra_ldflags=["-L{folder}", "-l{library}"]`')
            if ".so." in name:  # without its headers' package, a library has only its versioned name
                return Search(looked_in, f'`extra_ldflags=["-L{folder}", "-l:{name}"]`')
    for _, name, wheel in _CUDA:
        if name == library:
            return Search(looked_in, f"`pip install {_of_this_cuda(wheel)}`")
    return Search(looked_in, f'name its directory: `extra_ldflags=["-L/path/to/lib", "-l{library}"]`')


def of_symbol(symbol: str) -> str:
    """Returns what defines a symbol, as the hint of an error."""
    for pattern, hint in _SYMBOLS:
        found = re.match(pattern, symbol)
        if found:
            return hint.format(*found.groups(), torch=_torch())
    return 'define it in one of the sources, or name the library that has it: `extra_ldflags=["-lNAME"]`'


def _folders(beside: str) -> Iterator[str]:
    """Yields the directories where a header might be, those of the author's project first."""
    for base in (beside, os.path.dirname(beside)) if beside else ():
        for name in ("", "include", "src", "csrc"):
            yield os.path.join(base, name).rstrip("/")
        yield from glob.glob(os.path.join(glob.escape(base), "third_party", "*", "include"))
    yield from _cuda_folders()
    yield from glob.glob("/usr/include/*/")
    yield from _around("include")


def _cuda_folders() -> list[str]:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return [os.path.join(home, "include"), *_nvidia("include")]


def _nvidia(folder: str) -> list[str]:
    return [
        found
        for entry in sys.path
        if entry.endswith("-packages")
        for found in sorted(glob.glob(os.path.join(glob.escape(entry), "nvidia", "*", folder)))
    ]


def _around(folder: str) -> list[str]:
    """Returns the directories of what was installed outside the system's own places, as by conda."""
    patterns = (f"{glob.escape(sys.prefix)}/{folder}", f"/usr/local/*/{folder}", f"/opt/*/{folder}")
    return [found for pattern in patterns for found in sorted(glob.glob(pattern))]


def _package_of(header: str) -> str:
    if header == "Python.h":
        return f"`apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-dev` (or python3-dev)"
    for pattern, successor in _REMOVED:
        if re.match(pattern, header):
            return f"PyTorch has removed it: `#include <{successor}>`"
    for pattern, package in _DEBIAN:
        if re.match(pattern, header):
            return f"`apt-get install {package}`"
    for pattern, _, wheel in _CUDA:
        if re.match(pattern, header):
            return (
                f"`pip install {_of_this_cuda(wheel)}`, or `export CUDA_HOME=/path/to/cuda` for a toolkit that has it"
            )
    if re.match(r"cutlass/|cute/", header):
        return '`git clone https://github.com/NVIDIA/cutlass`, then `extra_include_paths=["cutlass/include"]`'
    return f'name the directory that holds `{header}`: `extra_include_paths=["/path/to/include"]`'


def _of_torch(header: str) -> str:
    if header.startswith("pybind11/"):
        return f"{_torch()} brings pybind11 along; its installation is damaged: `pip install --force-reinstall torch`"
    if "cuda" in header.lower():
        return f"{_torch()} is without CUDA: install one with it (https://pytorch.org/get-started)"
    return f"{_torch()} has no such header: look for its new name in the directory torch/include of its installation"


def _of_this_cuda(wheel: str) -> str:
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None) or "13"
    major = cuda.split(".")[0]
    if major == "12" and wheel == "nvidia-cuda-crt":
        return "nvidia-cuda-nvcc-cu12"
    return f"{wheel}-cu{major}" if wheel in _SUFFIXED or major == "12" else wheel


def _torch() -> str:
    version = getattr(sys.modules.get("torch"), "__version__", "")
    return f"PyTorch {version}".strip()
