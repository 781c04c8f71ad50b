"""Stubs in a wheel: what type checkers and editors see of operators."""

import ast

from opwright.package.stubs import stub_of

MODULE = '''"""An operator."""
from __future__ import annotations
import math
from typing import Literal, TypeVar
from jaxtyping import Float, Int
from torch import Tensor
from opwright import Mutates, operator

Mode = Literal["a", "b"]
T = TypeVar("T")
LIMIT = math.pi
_table = {}

@operator("my::scale")
def scale(x: Float[Tensor, "*batch n"], s: Float[Tensor, "n"] | None, ks: list[Int[Tensor, "n"]], *, mode: Mode = "a") -> Float[Tensor, "*batch n"]:
    """x times s."""
    return x * s

@scale.backward
def scale_backward(grad_output, x, s, *, mode="a"):
    return grad_output

@operator("my::fill")
def fill(x: Mutates[Float[Tensor, "n"]]) -> None:
    x.fill_(1)

def _hidden(): ...

class Layer:
    """Scales."""
    size: int = 3
    @property
    def width(self) -> int:
        return 3
'''


def test_a_module() -> None:
    assert (
        stub_of(MODULE)
        == '''"""An operator."""
from typing import Any
from typing import Literal, TypeVar
from torch import Tensor
Mode = Literal['a', 'b']
T = TypeVar('T')
LIMIT: Any

def scale(x: Tensor, s: Tensor | None, ks: list[Tensor], *, mode: Mode='a', out: Tensor | None=None) -> Tensor:
    """x times s.

Shapes:
    x: Float[Tensor, '*batch n']
    s: Float[Tensor, 'n'] | None
    ks: list[Int[Tensor, 'n']]
    returns: Float[Tensor, '*batch n']
"""
    ...

def scale_backward(grad_output, x, s, *, mode='a'):
    ...

def fill(x: Tensor) -> None:
    """Shapes:
    x: Mutates[Float[Tensor, 'n']]
"""
    ...

class Layer:
    """Scales."""
    size: int = ...

    @property
    def width(self) -> int:
        ...
'''
    )


def test_a_package_keeps_what_it_imports_for_others() -> None:
    text = "from my.scale import scale\nfrom my.layer import Layer as Layer\n"
    assert stub_of(text, is_package=True) == text
    assert stub_of(text) == "from my.layer import Layer as Layer\n"
    ast.parse(stub_of(""))


def test_domains_are_left_out_of_types_and_kept_in_the_shapes() -> None:
    stub = stub_of("""
from typing import Annotated
from jaxtyping import Float
from torch import Tensor
from opwright import Mutates, Positive, Range, operator

@operator("my::decay_")
def decay_(x: Mutates[Annotated[Float[Tensor, "n"], Positive]], rate: Annotated[float, Range(0, 1)] = 0.5) -> None:
    x.mul_(rate)
""")
    assert "def decay_(x: Tensor, rate: float=0.5) -> None:" in stub
    assert 'x: Mutates[Annotated[Float[Tensor, "n"], Positive]]'.replace('"', "'") in stub.replace('"', "'")
    assert "Range" not in stub


def test_names_that_are_declared_in_other_ways_than_one_by_one() -> None:
    stub = stub_of("""
import sys
try:
    from fast import sort, SIZE
    HAS_FAST = True
except ImportError:
    HAS_FAST = False
    def sort(x: list[int]) -> list[int]:
        return sorted(x)
if sys.version_info >= (3, 12):
    def first(x: int) -> int:
        return x
else:
    def first(x: int) -> int:
        return x + 0
if __name__ == "__main__":
    argument = sys.argv[1]
low, (high, _middle) = 1, (2, 3)
left = right = SIZE
class Layer:
    width: int
    def __init__(self, width: int, **options):
        self.width, self.height = width, options.pop("height")
        if options:
            self.options: dict[str, int] = options
        self._cache = {}
        other.name = 1
    @property
    def depth(self) -> int:
        return 1
""")
    assert (
        stub
        == """from typing import Any
HAS_FAST: Any

def sort(x: list[int]) -> list[int]:
    ...

def first(x: int) -> int:
    ...
low: Any
high: Any
left: Any
right: Any

class Layer:
    width: int

    def __init__(self, width: int, **options):
        ...

    @property
    def depth(self) -> int:
        ...
    height: Any
    options: dict[str, int]
"""
    )


def test_assignments_do_not_replace_what_was_declared() -> None:
    """`width: Any` of a subclass took the place of the type in its base; a name assigned twice was declared twice."""
    stub = stub_of("""
first, second = 1, 2
first = 3
size: int = 1
size = 2
class Base:
    kind = "base"
    def __init__(self, /, other):
        self.width: int = 1
        other.height = 1
    @property
    def depth(self) -> int:
        return 1
class Layer(Base):
    kind = "layer"
    def __init__(self):
        self.width = self.depth = 2
        self.height = 3
class Inner(Layer):
    def __init__(self):
        self.width, self.height = 4, 5
""")
    assert (
        stub
        == """from typing import Any
first: Any
second: Any
size: int = ...

class Base:
    kind: Any

    def __init__(self, /, other):
        ...

    @property
    def depth(self) -> int:
        ...
    width: int

class Layer(Base):

    def __init__(self):
        ...
    height: Any

class Inner(Layer):

    def __init__(self):
        ...
"""
    )
