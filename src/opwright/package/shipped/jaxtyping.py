"""The annotations that contracts are written in, for a package that does without jaxtyping."""

from __future__ import annotations

from typing import Any


class _Annotation(type):
    def __getitem__(cls, of: tuple[Any, str]) -> type:
        """Returns `Float[Tensor, "batch n"]` with the two attributes that contracts are read from."""
        return type(cls.__name__, (), {"dtype": cls, "dim_str": of[1].strip()})


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    made = globals()[name] = _Annotation(name, (), {})
    return made
