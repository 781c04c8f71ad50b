"""Names, annotations and defaults that few operators have: each is taken as it is meant, or refused in plain words."""

from __future__ import annotations

import collections
import contextlib
import enum
import math
from typing import Annotated, Any, Literal, NamedTuple

import pytest
import torch
import typing_extensions
from jaxtyping import Float, Int64
from torch import Tensor

import opwright
from opwright.errors import AnnotationError, AxisError, DeclarationError, NameTakenError, ReferenceError, ShapeError


class Taken(NamedTuple):
    """Names of the variables that an autograd node has for itself."""

    result: Float[Tensor, "n"]
    ctx: Float[Tensor, "n"]
    gradients: Float[Tensor, "n"]
    x_count: Float[Tensor, "n"]


def test_outputs_named_like_variables_of_a_node(ns) -> None:
    """The output `result` took the place of all outputs: the call returned two of its numbers."""

    @opwright.operator(f"{ns}::several")
    def several(x: Float[Tensor, "n"]) -> Taken:
        return Taken(x * 2, x * 3, x * 4, x * 5)

    @several.backward
    def several_backward(
        grad_result: Float[Tensor, "n"],
        grad_ctx: Float[Tensor, "n"],
        grad_gradients: Float[Tensor, "n"],
        grad_x_count: Float[Tensor, "n"],
        gradients: Float[Tensor, "n"],
    ) -> Float[Tensor, "n"]:
        return 2 * grad_result + 3 * grad_ctx + 4 * grad_gradients + 5 * grad_x_count + 0 * gradients

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    outputs = several(x)
    assert [each.tolist() for each in outputs] == [[2.0, 4.0], [3.0, 6.0], [4.0, 8.0], [5.0, 10.0]]
    torch.stack(outputs).sum().backward()
    assert x.grad.tolist() == [14.0, 14.0]


def test_arguments_named_like_builtins(ns) -> None:
    """A call raised that `str` is not callable."""

    @opwright.operator(f"{ns}::type")
    def product(
        type: Literal["a", "b"],
        list: Float[Tensor, "n"],
        map: list[Float[Tensor, "n"]],
        any: Float[Tensor, "n"] | None = None,
        zip: int = 1,
        tuple: float = 1.0,
        torch: int = 1,
    ) -> Float[Tensor, "n"]:
        return (list * map[0]).detach()  # so that the call makes a node of its own

    x = torch.ones(2, requires_grad=True)
    output = product("a", x, [torch.full((2,), 3.0)])
    assert output.tolist() == [3.0, 3.0]
    assert type(output.grad_fn).__name__ == "typeBackward"


def test_axes_named_like_keywords_of_python(ns) -> None:
    """`in` and `out` are what many call the axes of a weight; each call was a SyntaxError."""

    @opwright.operator(f"{ns}::sums")
    def sums(
        weight: Float[Tensor, "out in"], index: Annotated[Int64[Tensor, "m"], opwright.Index("in")]
    ) -> Float[Tensor, "in"]:
        return weight.sum(0)

    assert sums(torch.ones(2, 3), torch.tensor([0])).tolist() == [2.0, 2.0, 2.0]


def test_defaults_of_other_types_are_plain_numbers_and_strings(ns) -> None:
    """Of an enumeration, or of NumPy; a call was a SyntaxError or a NameError."""

    class Number(enum.IntEnum):
        TWO = 2

    class Text(str, enum.Enum):
        UP = "up"

    class Half(float):
        def __repr__(self) -> str:
            return "np.float64(0.5)"

    @opwright.operator(f"{ns}::defaults")
    def defaults(
        x: Float[Tensor, "n"], k: int = Number.TWO, s: float = Half(0.5), way: Literal["up", "down"] = Text.UP
    ) -> Float[Tensor, "n"]:
        return x * k * s

    assert defaults(torch.ones(2)).tolist() == [1.0, 1.0]
    assert [type(p.default) for p in defaults.operator.contract.parameters[1:]] == [int, float, str]


def test_sizes_that_only_absent_tensors_have(ns) -> None:
    """The reference returned another shape, and torch.compile and `out=` raised a KeyError."""

    @opwright.operator(f"{ns}::chosen")
    def chosen(x: Float[Tensor, "m"], b: Float[Tensor, "n"] | None = None) -> Float[Tensor, "n"]:
        return x if b is None else b * 1

    @opwright.operator(f"{ns}::total")
    def total(xs: list[Float[Tensor, "n"]], y: Int64[Tensor, "m"]) -> Float[Tensor, "n"]:
        return torch.stack(xs).sum(0)

    assert chosen(torch.ones(2), torch.ones(3)).shape == (3,)
    with pytest.raises(ShapeError, match=r"the size of `n` is not known[^`]*give `b`"):
        chosen(torch.ones(2))
    with pytest.raises(ShapeError, match="`n` is not known"):
        total([], torch.ones(1, dtype=torch.int64))


def test_a_type_alias(ns) -> None:
    """`type Vector = ...` was refused, since it cannot be passed."""
    Vector = typing_extensions.TypeAliasType("Vector", Float[Tensor, "n"])

    def twice(x: Vector, bias: Vector | None = None) -> Vector:
        return x * 2

    twice.__annotations__ = {"x": Vector, "bias": Vector | None, "return": Vector}
    assert opwright.operator(f"{ns}::twice")(twice)(torch.ones(2)).tolist() == [2.0, 2.0]


def test_arguments_that_are_positional_only(ns) -> None:
    """No check of a declaration was made: each called the reference with names."""

    @opwright.operator(f"{ns}::scaled")
    def scaled(x: Float[Tensor, "n"], /, *, k: int = 1) -> Float[Tensor, "n"]:
        return x * k

    assert scaled(torch.ones(2), k=3).tolist() == [3.0, 3.0]
    with pytest.raises(ReferenceError, match="breaks its annotation"):

        @opwright.operator(f"{ns}::summed")
        def summed(x: Float[Tensor, "n"], /) -> Float[Tensor, "n"]:
            return x.sum()


def test_the_smaller_of_two_sizes_is_exported_for_any_size(ns) -> None:
    """An exported module took sizes above 8 alone, since `min` compares."""

    @opwright.operator(f"{ns}::first")
    def first(x: Float[Tensor, "n"]) -> Float[Tensor, "min(n,8)"]:
        return x[:8].clone()

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return first(x)

    exported = torch.export.export(Module(), (torch.ones(12),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert [len(exported.module()(torch.ones(n))) for n in (3, 20)] == [3, 8]


CALLS: dict[str, Any] = {
    "vmap": lambda f: torch.vmap(f)(torch.ones(4, 3), torch.ones(4, 1)),
    "jvp": lambda f: torch.func.jvp(f, (torch.ones(3), torch.ones(1)), (torch.ones(3), torch.ones(1))),
    "jacfwd": lambda f: torch.func.jacfwd(f)(torch.ones(3), torch.ones(1)),
    "a gradient": lambda f: f(torch.ones(3, requires_grad=True), torch.ones(1)),
}


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("way", CALLS)
def test_the_contract_is_checked_under_transforms(ns, way: str, random: bool) -> None:
    """The reference broadcast what the contract refuses, and the transform returned its result."""

    def product(x: Float[Tensor, "n"], w: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * w

    with pytest.raises(ShapeError, match="`w` must have n = 3"):
        CALLS[way](opwright.operator(f"{ns}::product", random=random)(product))


Bare = collections.namedtuple("Bare", "a b")


def one_in_a_tuple(x: Float[Tensor, "n"]) -> tuple[Float[Tensor, "n"]]:
    return (x * 1,)


def bare_fields(x: Float[Tensor, "n"]) -> Bare:
    return Bare(x, x)


def written_number(x: opwright.Mutates[Float[Tensor, "n"]], k: opwright.Mutates[int]) -> None:
    x.add_(k)


def dictionary(x: Float[Tensor, "n"]) -> dict[str, Float[Tensor, "n"]]:
    return {"x": x}


def maybe(x: Float[Tensor, "n"], flag: bool | None = None) -> Float[Tensor, "n"]:
    return x * 1


def either(x: Float[Tensor, "n"] | Int64[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 1.0


@pytest.mark.parametrize(
    ("reference", "error", "text"),
    [
        (dictionary, AnnotationError, r"cannot be returned[^`]*`Float\[Tensor"),
        (maybe, AnnotationError, 'Literal."none", "true", "false".'),
        (either, AnnotationError, r"`x: Shaped\[Tensor"),
        (one_in_a_tuple, AnnotationError, "a tuple of one tensor"),
        (bare_fields, AnnotationError, "its field `a` has no annotation"),
        (written_number, AnnotationError, "`k`: only tensors can be written into"),
    ],
)
def test_refused_annotations(ns, reference, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        opwright.operator(f"{ns}::refused")(reference)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"data_dependent": ["k"]}, AxisError, "names `k`, which is not an axis of an output"),
        ({"data_dependent": ["n"]}, AxisError, "names `n`, which is an axis of an input"),
        ({"data_dependent": "num"}, DeclarationError, "takes a list of names"),
        ({"non_differentiable": "output"}, DeclarationError, "takes a list of names"),
    ],
)
def test_refused_options(ns, options: dict[str, Any], error: type[Exception], text: str) -> None:
    def twice(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    with pytest.raises(error, match=text):
        opwright.operator(f"{ns}::twice", **options)(twice)


def test_a_name_that_python_uses(ns) -> None:
    """PyTorch's parser of schemas raised its own error."""
    with pytest.raises(DeclarationError, match="Python uses the name `assert`"):
        opwright.operator(f"{ns}::assert")(one_in_a_tuple)


def test_infinite_defaults_are_still_refused(ns) -> None:
    def scaled(x: Float[Tensor, "n"], s: float = math.inf) -> Float[Tensor, "n"]:
        return x * s

    with pytest.raises(AnnotationError, match="does not fit"):
        opwright.operator(f"{ns}::scaled")(scaled)


FACTORIES = """
import torch
from jaxtyping import Float
from torch import Tensor
from opwright import operator

def make(captured):
    @operator("{ns}::made")
    def made(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return captured(x) if callable(captured) else x * captured
    return made

def times(k):
    return lambda x: x * k

def make_both(first, second):
    return make(first), make(second)

make_both({first}, {second})
"""


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [
        ("2", "3", True),
        ("2", "2", False),
        ("torch.relu", "torch.tanh", True),
        ("torch.relu", "torch.relu", False),
        ("lambda x: x + 1", "lambda x: x + 2", True),
        ("lambda x: x + 1", "lambda x: x + 1", False),
        ("times(2)", "times(3)", True),
        ("times(2)", "times(2)", False),
    ],
)
def test_a_factory_that_declares_one_name_with_two_values(ns, first: str, second: str, is_refused: bool) -> None:
    """The first operator computed what the second does, where the values are functions, or a function calls twice."""
    source = compile(FACTORIES.format(ns=ns, first=first, second=second), "factories.py", "exec")
    with pytest.raises(NameTakenError, match="another `captured`") if is_refused else contextlib.nullcontext():
        exec(source, {"__name__": "factories"})


PROGRAM = """
from jaxtyping import Float
from torch import Tensor
from opwright import operator

def test_one():
    @operator("{ns}::tested")
    def made(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 1

def test_two():
    @operator("{ns}::tested")
    def made(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

def main():
    test_one()
    test_two()

main()
"""


def test_a_program_may_declare_an_operator_in_each_of_its_functions(ns) -> None:
    exec(compile(PROGRAM.format(ns=ns), "program.py", "exec"), {"__name__": "program"})
