"""Makes torch.compile's cache on disk depend on the text of the operators.

Its keys hold the names of a graph's operators only. A graph whose gradient follows from a reference would outlive an
edit of that reference.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from opwright.contract.declaration import Declaration, code_of
from opwright.dispatch.registry import captured

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
    text = "".join(linecache.getlines(file, reference.__globals__)) or _listing(code_of(reference))
    values = {name: v for name, v in captured(reference).items() if isinstance(v, (bool, int, float, str))}
    return hashlib.sha256(f"{text}{values}".encode()).hexdigest()


def _listing(code: CodeType) -> str:
    constants = [_listing(value) if isinstance(value, CodeType) else value for value in code.co_consts]
    return repr((code.co_code, code.co_names, constants))
