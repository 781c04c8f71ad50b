"""The source texts that `load_inline` makes of its arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from opwright.cpp_extension.signatures import declarations
from opwright.errors import ExtensionError

# The module of generated bindings is called this in every extension, so that its object depends on no
# name; a C function of the real name calls it.
MODULE = "opwright_extension_module"

GENERATED = "generated bindings"

_HEADERS = ("#include <torch/csrc/Exceptions.h>", "#include <torch/csrc/utils/pybind.h>")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(::[A-Za-z_]\w*)*")


def cpp_sources(
    name: str,
    sources: Sequence[str],
    functions: str | Sequence[str] | Mapping[str, str] | None,
    *,
    with_headers: bool,
    with_error_handling: bool,
    apart: bool = True,
) -> list[tuple[str, str]]:
    """Returns the C++ texts of an inline extension, each with what is put in front of it.

    What each part of a text is called in errors is in `#line`s: `cpp_sources[0]`, `GENERATED`.

    Args:
        apart: bindings for `functions` are a text of their own where their declarations are certain.
    """
    text = "\n".join([*(["#include <torch/extension.h>"] if with_headers else []), *numbered("cpp_sources", sources)])
    if functions is None:
        return [(f"{text}\n", "")]
    wanted = _checked(name, functions)
    bindings = _bindings(wanted, with_error_handling)
    declared = declarations("\n".join(sources), wanted) if apart and with_headers else None
    if declared is None:
        return [("\n".join([text, *bindings, ""]), "")]
    return [(f"{text}\n", ""), ("\n".join([*_HEADERS, *declared, *bindings, ""]), "bindings")]


def cuda_text(sources: Sequence[str], *, with_headers: bool) -> str:
    """Returns the CUDA source of an inline extension."""
    headers = ("torch/types.h", "cuda.h", "cuda_runtime.h") if with_headers else ()
    return "\n".join([*(f"#include <{header}>" for header in headers), *numbered("cuda_sources", sources)]) + "\n"


def generated_part(text: str) -> str:
    """Returns what `cpp_sources` wrote behind the author's text."""
    return text.partition(f'#line 1 "{GENERATED}"\n')[2]


def numbered(argument: str, sources: Sequence[str]) -> list[str]:
    """Returns the strings of an argument, each of which compilers call `argument[i]`, with its own lines."""
    return [f'#line 1 "{argument}[{i}]"\n{source}' for i, source in enumerate(sources)]


def init_text(name: str) -> str:
    """Returns C that gives generated bindings their module's name."""
    return (
        f"extern void *PyInit_{MODULE}(void);\n"
        f'__attribute__((visibility("default"))) void *PyInit_{name}(void) {{ return PyInit_{MODULE}(); }}\n'
    )


def _checked(name: str, functions: object) -> dict[str, str]:
    """Returns functions and their docstrings."""
    if isinstance(functions, str):
        functions = [functions]
    if isinstance(functions, (list, tuple)):
        functions = {function: function for function in functions}
    if not isinstance(functions, Mapping):
        raise ValueError(f"Expected 'functions' to be a list or dict, but was {type(functions)}")
    for function in functions:
        if not _IDENTIFIER.fullmatch(function):
            raise ExtensionError(
                name,
                "what is in `functions` must be the name of a C++ function",
                rows=[("got", repr(function))],
                hint='`functions=["my_function"]`',
            )
    return dict(functions)


def _bindings(functions: Mapping[str, str], with_error_handling: bool) -> list[str]:
    lines = [f'#line 1 "{GENERATED}"', f"PYBIND11_MODULE({MODULE}, m) {{"]
    for function, text in functions.items():
        target = f"torch::wrap_pybind_function({function})" if with_error_handling else function
        quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines.append(f'm.def("{function}", {target}, "{quoted}");')
    return [*lines, "}"]
