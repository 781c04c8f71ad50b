"""Where torch's and CUDA's headers and libraries are, also where torch itself has no CUDA."""

from __future__ import annotations

from pathlib import Path

from torch.utils import cpp_extension as torchs

from opwright.backends import cuda
from opwright.build.store import Store
from opwright.cpp_extension.objects import environment_folders, system_includes

_nvcc = cuda.find_nvcc(Store().identities)

# PyTorch takes the directory above that of the `nvcc` on PATH, where there is nothing if that is a script elsewhere.
_torchs_home = torchs.CUDA_HOME
if _nvcc and not Path(_torchs_home or "", "include", "cuda_runtime.h").exists():
    _torchs_home = None
CUDA_HOME = _torchs_home or (str(_nvcc.root) if _nvcc else None)


def include_paths(device_type: str = "cpu", torch_include_dirs: bool = True) -> list[str]:
    """Returns the directories of headers that an extension for a kind of device needs."""
    if device_type != "cuda" or _torchs_home or not _nvcc:
        return torchs.include_paths(device_type, torch_include_dirs)
    own = [str(path) for path in system_includes(_nvcc)[2:-1]] + environment_folders()[0]
    return [*(torchs.include_paths() if torch_include_dirs else []), *own]


def library_paths(device_type: str = "cpu", torch_include_dirs: bool = True, *args, **kwargs) -> list[str]:
    """Returns the directories of libraries that an extension for a kind of device needs."""
    if device_type != "cuda" or _torchs_home or not _nvcc:
        return torchs.library_paths(device_type, torch_include_dirs, *args, **kwargs)
    return [*(torchs.library_paths() if torch_include_dirs else []), str(_nvcc.cudart), *environment_folders()[1]]


def check_compiler_abi_compatibility(compiler: str) -> bool:
    """Returns whether a C++ compiler makes code that works with torch's."""
    return torchs.get_compiler_abi_compatibility_and_version(compiler)[0]
