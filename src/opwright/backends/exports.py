"""Which kernels a source exports, read off its text: nothing is compiled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from opwright.backends.protocol import CompiledBackend
from opwright.backends.registry import all_backends
from opwright.contract.declaration import Declaration
from opwright.contract.sources import Source
from opwright.errors import DeclarationError

# A comment; a string, which may hold the beginning of one, is passed over.
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_EXPORT = re.compile(r"\bOPWRIGHT_KERNEL\(\s*(\w+)\s*,?([^)]*)\)", re.MULTILINE)
_DEFINE = re.compile(r"^\s*#\s*define\b.*", re.MULTILINE)


def find_exports(source: Source) -> dict[str, list[str]] | None:
    """Returns the C++ types of each kernel that a source exports, by its name; None where a text does not tell.

    It does not where a macro of the author's exports, or another language is translated.
    """
    backend = all_backends()[source.backend]
    if not isinstance(backend, CompiledBackend) or not backend.is_read_in_place:
        return None
    try:
        texts = [source.read(), *source.read_headers(source.read())]
    except (OSError, UnicodeDecodeError):
        return None
    if None in texts:
        return None
    code = "\n".join(without_comments(text).replace("\\\n", " ") for text in texts)
    if "OPWRIGHT_KERNEL" in "".join(_DEFINE.findall(code)):
        return None
    return {name: [t.strip() for t in types.split(",") if t.strip()] for name, types in _EXPORT.findall(code)}


def may_export(source: Source, name: str) -> bool:
    """Returns whether a source has a kernel of this name, as far as its text tells."""
    exports = find_exports(source)
    return exports is None or name in exports


def refuse_kernel(declaration: Declaration, kernels: Mapping[str, str | Path | None]) -> None:
    """Refuses a kernel of an operator whose reference always runs. Kernels of its backward may lie in the same source.

    Args:
        kernels: those that the declaration names, by backend.

    Raises:
        DeclarationError: it has such a kernel.
    """
    is_random = declaration.random
    if not is_random and not declaration.contract.data_dependent:
        return
    name = declaration.name
    for backend, source in declaration.backward_sources.items():
        is_named = kernels.get(backend) is not None
        if _defines(source, name) or (is_named and not _defines(source, f"{name}_backward")):
            raise DeclarationError(
                name,
                f"an operator {'that draws random numbers' if is_random else 'with `data_dependent=`'} has no kernel: "
                "its reference runs",
                rows=[("kernel", f"{source.backend}, {source.origin}")],
                hint=f"leave out the kernel of `{name}`, or "
                + (
                    "give the operator the random numbers as an input tensor"
                    if is_random
                    else "return tensors of the largest size, and the count of entries as another output"
                ),
            )


def _defines(source: Source, name: str) -> bool:
    """Returns whether a source has a kernel of this name, or a function where its text does not tell its kernels."""
    exports = find_exports(source)
    if exports is not None:
        return name in exports
    code = re.sub(all_backends()[source.backend].comments, "", source.read())
    return re.search(rf"(?<![\w.]){name}\s*\(", code) is not None


def without_comments(text: str) -> str:
    """Returns C++ without its comments; lines stay lines."""
    return _COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else "\n" * found[0].count("\n"), text)
