"""Errors in the form of the toolkit, without it: the library of operators runs without.

They are Python's own exception types.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

_SHORT = {torch.float16: "f16", torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16"}


def refuse(
    kind: type[Exception], what: str, rule: str, *rows: tuple[str, str], subject: str, hint: str = ""
) -> NoReturn:
    """Raises `kind`: the subject, what of it broke which rule, got against expected, a hint."""
    width = max((len(name) for name, _ in rows), default=0)
    body = "\n".join(f"  {name.ljust(width)}  {value}" for name, value in rows)
    raise kind("\n\n".join(part for part in (f"`{subject}`: `{what}` {rule}", body, hint and f"hint: {hint}") if part))


def require_tensors(subject: str, **given: Any) -> None:
    """Raises TypeError for the first of these arguments that is not a tensor."""
    for name, value in given.items():
        if not isinstance(value, Tensor):
            refuse(TypeError, name, "must be a tensor", ("got", shown(value)), subject=subject)


def shown(value: Any) -> str:
    """Returns a tensor as `f32[5, 2, 3] cpu`, anything else as its type and value."""
    if isinstance(value, Tensor):
        name = _SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{name}[{', '.join(map(str, value.shape))}] {value.device}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 60 else text[:57] + '...'}"
