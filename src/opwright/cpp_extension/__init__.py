"""A drop-in for `torch.utils.cpp_extension`: `from opwright.cpp_extension import load, load_inline`.

`load` and `load_inline` are Opwright's own on Linux, for C++ and CUDA: objects and libraries are kept by the
digest of all that went into them, so an unchanged source is compiled once for all processes, and nothing
waits for a lock whose holder is dead. Everything else is PyTorch's, under the same names.
"""

from __future__ import annotations

from typing import Any

from opwright.cpp_extension.jit import load, load_inline

__all__ = ["load", "load_inline"]


def __getattr__(name: str) -> Any:
    from torch.utils import cpp_extension

    return getattr(cpp_extension, name)


def __dir__() -> list[str]:
    from torch.utils import cpp_extension

    return sorted({*globals(), *dir(cpp_extension)})
