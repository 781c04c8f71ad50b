"""Makes torch.compile's cache on disk depend on the text of the operators.

Its keys hold the names of a graph's operators only. A graph whose gradient follows from a reference would outlive an
edit of that reference.
"""

from __future__ import annotations

import contextlib
import hashlib
import linecache
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from opwright.contract.declaration import Declaration

_texts: dict[str, str] = {}
_suffix = ""


def include(declaration: Declaration) -> None:
    """Adds the text of a declaration to the keys of torch.compile's caches, behind the user's own tag."""
    global _suffix
    _texts[declaration.qualified_name] = _text_of(declaration.reference, declaration.file)
    config = torch.compiler.config
    tag = config.cache_key_tag.removesuffix(_suffix)
    _suffix = "opwright-" + hashlib.sha256(repr(sorted(_texts.items())).encode()).hexdigest()
    config.cache_key_tag = tag + _suffix


def _text_of(reference: Callable[..., Any], file: str) -> str:
    """Returns a digest of the file that declares an operator, or of its code where no file is left."""
    linecache.checkcache(file)
    text = "".join(linecache.getlines(file, reference.__globals__)) or _listing(reference.__code__)
    return hashlib.sha256("\n".join([text, *_values_around(reference)]).encode()).hexdigest()


def _listing(code: CodeType) -> str:
    constants = [_listing(value) if isinstance(value, CodeType) else value for value in code.co_consts]
    return repr((code.co_code, code.co_names, constants))


def _values_around(reference: Callable[..., Any]) -> list[str]:
    """Returns the numbers and strings that a reference takes from the function that declares it."""
    values = []
    for cell in reference.__closure__ or ():
        with contextlib.suppress(ValueError):  # the function's own name is bound behind its declaration
            if isinstance(cell.cell_contents, (bool, int, float, str)):
                values.append(repr(cell.cell_contents))
    return values
