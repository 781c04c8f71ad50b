"""Makes torch.compile's cache on disk depend on the text of the operators.

Its keys hold the names of a graph's operators only. A graph whose gradient follows from a reference would outlive an
edit of that reference.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
import re
from collections.abc import Callable
from typing import Any

import torch

from opwright.contract.declaration import Declaration, code_of
from opwright.dispatch.registry import captured, listing

_MARK = __name__  # of this copy of the runtime: each wheel brings its own
_SUFFIX = re.compile(rf" {re.escape(_MARK)}-[0-9a-f]{{64}}")
_texts: dict[str, str] = {}


def include(declaration: Declaration) -> None:
    """Adds the text of a declaration to the keys of torch.compile's caches, behind the user's own tag."""
    _texts[declaration.qualified_name] = _text_of(declaration.reference, declaration.file)
    config = torch.compiler.config
    digest = hashlib.sha256(repr(sorted(_texts.items())).encode()).hexdigest()
    config.cache_key_tag = f"{_SUFFIX.sub('', config.cache_key_tag)} {_MARK}-{digest}"


def _text_of(reference: Callable[..., Any], file: str) -> str:
    """Returns a digest of the file that declares an operator, or of its code where no file is left."""
    linecache.checkcache(file)
    names = getattr(inspect.unwrap(reference), "__globals__", None)
    text = "".join(linecache.getlines(file, names)) or listing(code_of(reference))
    return hashlib.sha256(f"{text}{captured(reference)}".encode()).hexdigest()
