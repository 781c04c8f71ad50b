"""The source texts that `load_inline` makes of its arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from opwright.errors import ExtensionError

# The module of generated bindings is called this in every extension, so that its object depends on no
# name; a C function of the real name calls it.
MODULE = "opwright_extension_module"

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(::[A-Za-z_]\w*)*")


def cpp_text(
    name: str,
    sources: Sequence[str],
    functions: str | Sequence[str] | Mapping[str, str] | None,
    *,
    with_headers: bool,
    with_error_handling: bool,
) -> str:
    """Returns the C++ source of an inline extension, with bindings for `functions` behind it."""
    parts = ["#include <torch/extension.h>"] if with_headers else []
    parts += sources
    if functions is not None:
        parts += _bindings(name, functions, with_error_handling)
    return "\n".join(parts) + "\n"


def cuda_text(sources: Sequence[str], *, with_headers: bool) -> str:
    """Returns the CUDA source of an inline extension."""
    headers = ("torch/types.h", "cuda.h", "cuda_runtime.h") if with_headers else ()
    return "\n".join([*(f"#include <{header}>" for header in headers), *sources]) + "\n"


def init_text(name: str) -> str:
    """Returns C that gives generated bindings their module's name."""
    return (
        f"extern void *PyInit_{MODULE}(void);\n"
        f'__attribute__((visibility("default"))) void *PyInit_{name}(void) {{ return PyInit_{MODULE}(); }}\n'
    )


def _bindings(name: str, functions: object, with_error_handling: bool) -> list[str]:
    if isinstance(functions, str):
        functions = [functions]
    if isinstance(functions, (list, tuple)):
        functions = {function: function for function in functions}
    if not isinstance(functions, Mapping):
        raise ValueError(f"Expected 'functions' to be a list or dict, but was {type(functions)}")
    lines = [f"PYBIND11_MODULE({MODULE}, m) {{"]
    for function, text in functions.items():
        if not _IDENTIFIER.fullmatch(function):
            raise ExtensionError(
                name,
                "what is in `functions` must be the name of a C++ function",
                rows=[("got", repr(function))],
                hint='`functions=["my_function"]`',
            )
        target = f"torch::wrap_pybind_function({function})" if with_error_handling else function
        quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines.append(f'm.def("{function}", {target}, "{quoted}");')
    return [*lines, "}"]
