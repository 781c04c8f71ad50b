"""A drop-in for `torch.utils.cpp_extension`: `from opwright.cpp_extension import load, load_inline`.

`load`, `load_inline`, `BuildExtension`, `CppExtension` and `CUDAExtension` are Opwright's own on Linux, for C++ and
CUDA: objects and libraries are kept by the digest of all that went into them, so an unchanged source is
compiled once for all processes and checkouts, and nothing waits for a lock whose holder is dead.
Everything else is PyTorch's, under the same names.
"""

from __future__ import annotations

import importlib
from typing import Any

from opwright.cpp_extension.jit import load as load
from opwright.cpp_extension.jit import load_inline as load_inline

_OWN = {
    "BuildExtension": "build_extension",
    "CppExtension": "build_extension",
    "CUDAExtension": "build_extension",
    "CUDA_HOME": "toolkit",
    "check_compiler_abi_compatibility": "toolkit",
    "include_paths": "toolkit",
    "library_paths": "toolkit",
}


def __getattr__(name: str) -> Any:
    if name in _OWN:
        return getattr(importlib.import_module(f"opwright.cpp_extension.{_OWN[name]}"), name)
    from torch.utils import cpp_extension

    return getattr(cpp_extension, name)  # `__all__` too: `import *` gives the same names


def __dir__() -> list[str]:
    from torch.utils import cpp_extension

    return sorted({*globals(), *_OWN, *dir(cpp_extension)})
