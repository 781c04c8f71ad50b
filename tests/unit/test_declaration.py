"""Declarations that cannot be honoured fail at the declaration, at the author's line, with the fix."""

from __future__ import annotations

import enum
import functools
import itertools
import traceback
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from jaxtyping import Bool, Complex, Float, Float8e4m3fn, Float32, Int, Shaped
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

import opwright
from opwright import Mutates, errors, operator

_numbers = itertools.count()


def name(function: str) -> str:
    """A namespace of its own for each declaration: the registry belongs to the process."""
    return f"decl{next(_numbers)}::{function}"


def declared(reference, **kwargs):
    return operator(name(reference.__name__), **kwargs)(reference)


def message(error: pytest.ExceptionInfo) -> str:
    """The text without the place, which is another on every machine."""
    lines = [line for line in str(error.value).splitlines() if not line.strip().startswith("at ")]
    text = "\n".join(lines)
    for number in range(1000):
        text = text.replace(f"decl{number}::", "ns::")
    return text


def no_annotation_of_a_number(x: Float[Tensor, "n"], scale=1.5) -> Float[Tensor, "n"]:
    return x * scale


def no_annotation(x) -> Float[Tensor, "n"]:
    return x * 2


def bare_tensor(x: Tensor) -> Float[Tensor, "n"]:
    return x * 2


def unknown_type(x: Float[Tensor, "n"], y: str) -> Float[Tensor, "n"]:
    return x * 2


def complex_numbers(x: Complex[Tensor, "n"]) -> Complex[Tensor, "n"]:
    return x * 2


def no_result(x: Float[Tensor, "n"]):
    return x * 2


def star_args(*x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x[0] * 2


def optional_number(x: Float[Tensor, "n"], k: int | None = None) -> Float[Tensor, "n"]:
    return x * 2


class Way(enum.Enum):
    UP = "up"
    DOWN = "down"


def enumeration(x: Float[Tensor, "n"], way: Way = Way.UP) -> Float[Tensor, "n"]:
    return x * 2


def optional_choice(x: Float[Tensor, "n"], way: Literal["up", "down"] | None = None) -> Float[Tensor, "n"]:
    return x * 2


def choice_or_none(x: Float[Tensor, "n"], way: Literal["up", None] = None) -> Float[Tensor, "n"]:
    return x * 2


def whole_or_real(x: Float[Tensor, "n"], by: int | float = 1) -> Float[Tensor, "n"]:
    return x * by


def eight_bits(x: Float8e4m3fn[Tensor, "n"]) -> Float32[Tensor, "n"]:
    return x.float()


def literal_numbers(x: Float[Tensor, "n"], k: Literal[1, 2] = 1) -> Float[Tensor, "n"]:
    return x * 2


def bad_default(x: Float[Tensor, "n"], mode: Literal["a", "b"] = "c") -> Float[Tensor, "n"]:
    return x * 2


def broadcasting(x: Float[Tensor, "#n"]) -> Float[Tensor, "n"]:
    return x * 2


def two_variadics(x: Float[Tensor, "*a *b"]) -> Float[Tensor, "*a *b"]:
    return x * 2


def unreadable_axis(x: Float[Tensor, "n"]) -> Float[Tensor, "n+"]:
    return x * 2


def function_axis(x: Float[Tensor, "n"]) -> Float[Tensor, "f(n)"]:
    return x * 2


def unbound_output(x: Float[Tensor, "n"]) -> Float[Tensor, "m"]:
    return x * 2


def anonymous_output(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return x * 2


def unbound_family(x: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x.float()


def optional_family(x: Int[Tensor, "n"], weights: Float[Tensor, "n"] | None = None) -> Float[Tensor, "n"]:
    """Without weights, a call with `out=` and one in a compiled function raised a KeyError."""
    return x.float() if weights is None else x * weights


def two_unknowns(x: Float[Tensor, "a+b"]) -> Float[Tensor, "a"]:
    return x[:1]


def nothing_done(x: Float[Tensor, "n"]) -> None:
    return None


def no_tensor(k: int) -> Float32[Tensor, "k"]:
    return torch.zeros(k)


def random_numbers(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + torch.rand_like(x)


def dropout(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return torch.nn.functional.dropout(x, 0.5)


def depends_on_data(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x[x > 0]


def wrong_shape(x: Float[Tensor, "m n"]) -> Float[Tensor, "n"]:
    return x.sum(1)


def wrong_dtype(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x > 0


def wrong_count(x: Float[Tensor, "n"]) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    return x * 2


def other_axis(x: Float[Tensor, "*batch n"], weight: Float[Tensor, "m"]) -> Float[Tensor, "*batch n"]:
    return x * weight


def other_axes(x: Float[Tensor, "b n"], weight: Float[Tensor, "m"], bias: Float[Tensor, "k"]) -> Float[Tensor, "b n"]:
    return x * weight + bias


def other_variadic(x: Float[Tensor, "*batch n"], residual: Float[Tensor, "*b n"]) -> Float[Tensor, "*batch n"]:
    return torch.stack([x, residual]).sum(0)


def square(x: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    return x @ x


def returns_nothing(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]: ...
def writes_argument(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x.mul_(2).clone()


def writes_through_view(x: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    x[0].zero_()
    return x.clone()


def list_of_numbers(x: Float[Tensor, "n"], k: list[int]) -> Float[Tensor, "n"]:
    return x * 2


def pair_of_numbers(x: Float[Tensor, "n"], betas: tuple[float, float]) -> Float[Tensor, "n"]:
    return x * betas[0]


def list_of_results(x: Float[Tensor, "n"]) -> list[Float[Tensor, "n"]]:
    return [x * 2]


def any_number_of_results(x: Float[Tensor, "n"]) -> tuple[Float[Tensor, "n"], ...]:
    return (x * 2,)


def number_as_result(x: Float[Tensor, "n"]) -> float:
    return float(x.sum())


def optional_result(x: Float[Tensor, "n"]) -> Float[Tensor, "n"] | None:
    return x * 2


def tuple_of_tensors(x: tuple[Float[Tensor, "n"], ...]) -> Float[Tensor, "n"]:
    return x[0] * 2


def numpy_array(x: Float[np.ndarray, "n"]) -> Float[Tensor, "n"]:
    return x * 2


def misspelt_axis(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*bacth n"]:
    return x * 2


def unknown_batch(x: Float[Tensor, "n"]) -> Float[Tensor, "*batch n"]:
    return x * 2


REFUSED = {
    errors.AnnotationError: [
        no_annotation, no_annotation_of_a_number,
        bare_tensor, unknown_type, complex_numbers, no_result, star_args, optional_number,
        literal_numbers, bad_default, unbound_family, optional_family, nothing_done, no_tensor, list_of_numbers,
        pair_of_numbers, list_of_results, any_number_of_results, number_as_result, optional_result,
        tuple_of_tensors, numpy_array, enumeration, optional_choice, choice_or_none, whole_or_real, eight_bits,
    ],
    errors.AxisError: [
        broadcasting, two_variadics, unreadable_axis, function_axis, unbound_output, anonymous_output, two_unknowns,
        misspelt_axis, unknown_batch,
    ],
    errors.RandomnessError: [random_numbers, dropout],
    errors.DataDependentShapeError: [depends_on_data],
    errors.ReferenceError: [
        wrong_shape, wrong_dtype, wrong_count, returns_nothing, other_axis, other_axes, other_variadic, square,
    ],
    errors.UndeclaredMutationError: [writes_argument, writes_through_view],
}  # fmt: skip


def test_an_axis_without_quotes_is_shown_with_them() -> None:
    def unquoted(x: Float[Tensor, n]) -> Float[Tensor, "n"]:  # noqa: F821
        return x

    with pytest.raises(errors.AnnotationError, match="names `n`, which is not defined") as caught:
        declared(unquoted)
    assert caught.value.hint == '`Float[Tensor, "n"]`: axes are in quotes'


def grouped(q: Float[Tensor, "b h d"], k: Float[Tensor, "b g d"]) -> Float[Tensor, "b h d"]:
    return q * k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def convolved(x: Float[Tensor, "t"], kernel: Float[Tensor, "k"]) -> Float[Tensor, "t-k+1"]:
    return torch.nn.functional.conv1d(x[None], kernel[None, None])[0]


def in_pairs(x: Float[Tensor, "b n"]) -> Float[Tensor, "b n"]:
    return x.view(x.shape[0], -1, 2).flip(-1).reshape(x.shape)


def half_as_wide(x: Float[Tensor, "b n"], cos: Float[Tensor, "m"]) -> Float[Tensor, "b n"]:
    return torch.cat([half * cos for half in x.chunk(2, -1)], -1)


def definite(x: Float[Tensor, "n n"], y: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
    return torch.linalg.cholesky(x) @ y


def at_most(x: Float[Tensor, "n"], y: Float[Tensor, "m"]) -> Float[Tensor, "n"]:
    return x[: y.shape[0]].new_zeros(x.shape) + y[: x.shape[0]].sum() if y.shape[0] <= x.shape[0] else 1 / 0


@pytest.mark.parametrize("reference", [grouped, convolved, in_pairs, half_as_wide, definite, at_most])
def test_sizes_that_a_reference_takes_only_in_other_relations(reference) -> None:
    declared(reference)


def broadcast(x: Float[Tensor, "*batch n"], residual: Float[Tensor, "*b n"]) -> Float[Tensor, "*batch n"]:
    return x + residual


def product(x: Float[Tensor, "*batch m k"], y: Float[Tensor, "*b k n"]) -> Float[Tensor, "*batch m n"]:
    return x @ y


def as_many_elements(x: Float[Tensor, "*batch"], y: Float[Tensor, "*b"]) -> Float[Tensor, "*batch"]:
    return x + y.reshape(x.shape)


def as_many_axes(x: Float[Tensor, "*batch n"], y: Float[Tensor, "*b m"]) -> Float[Tensor, "*batch n"]:
    if x.ndim != y.ndim:
        raise ValueError("one axis for each")
    return x * y.sum()


def as_many_rows(x: Float[Tensor, "*batch n"], y: Float[Tensor, "*b n"]) -> Float[Tensor, "*batch n"]:
    return torch.cat([x, y], 1)[:, : x.shape[1]] if x.ndim > 1 else x


def for_each_head(x: Float[Tensor, "*batch n"], y: Float[Tensor, "*b n"]) -> Float[Tensor, "*batch n"]:
    return torch.stack([row + y.flatten(0, -2).sum(0) for row in x.unflatten(0, (y.shape[0], -1))]).view(x.shape)


@pytest.mark.parametrize("reference", [broadcast, product, as_many_elements, as_many_axes, as_many_rows, for_each_head])
def test_variadic_axes_that_a_reference_takes_where_they_differ(reference) -> None:
    declared(reference)


@pytest.mark.parametrize(
    ("error", "reference"), [(e, f) for e, fs in REFUSED.items() for f in fs], ids=lambda v: v.__name__
)
def test_refused(error: type[Exception], reference, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(error) as caught:
        declared(reference)
    assert message(caught) == snapshot
    # The author's own line is in the message, and nothing was registered.
    code = reference.__code__
    assert f"{code.co_filename}:{code.co_firstlineno}" in str(caught.value)


def test_the_traceback_ends_at_the_author() -> None:
    with pytest.raises(errors.RandomnessError) as caught:
        declared(random_numbers)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert len(traceback.extract_tb(caught.value.__traceback__)) <= 4


def test_names(snapshot: SnapshotAssertion) -> None:
    for wrong in ("plain", "a::b::c", "a::", "my ns::f", "ns::ß"):
        with pytest.raises(errors.DeclarationError, match="invalid operator name"):
            operator(wrong)(writes_argument)
    for keyword in ("new", "default", "register", "main"):  # such an operator could have no kernel
        with pytest.raises(errors.DeclarationError, match=f"C\\+\\+ uses the name `{keyword}`") as caught:
            operator(f"ns::{keyword}")(lambda_reference)
        assert caught.value.hint == f'`@operator("ns::{keyword}_op")`'
    with pytest.raises(errors.NameTakenError):
        operator("aten::mul")(lambda_reference)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("out", "`out` is the argument that every operator has"),
        ("_Bool", "a name is ASCII letters, digits and `_`, and starts with a letter"),
        ("ß", "a name is ASCII letters, digits and `_`, and starts with a letter"),
    ],
)
def test_names_that_no_argument_can_have(name: str, hint: str) -> None:
    source = f'def named({name}: Float[torch.Tensor, "n"]) -> Float[torch.Tensor, "n"]:\n    return {name}'
    made = {"Float": Float, "torch": torch}
    exec(source, made)
    with pytest.raises(errors.AnnotationError, match=f"`{name}` cannot be the name of an argument") as caught:
        declared(made["named"])
    assert caught.value.hint == hint


def test_the_hint_for_a_taken_name_is_another_one() -> None:
    """In the namespace `my_ops` it was the taken one."""
    torch.library.define("my_ops::taken_before", "(Tensor x) -> Tensor")
    with pytest.raises(errors.NameTakenError) as caught:
        operator("my_ops::taken_before")(lambda_reference)
    assert caught.value.hint == '`@operator("my_ops_2::taken_before")`'


def test_the_namespaces_that_pytorch_uses_are_refused(snapshot: SnapshotAssertion) -> None:
    """`aten::foo` was accepted, as there is no such operator."""
    with pytest.raises(errors.NameTakenError) as caught:
        operator("aten::foo")(lambda_reference)
    assert message(caught) == snapshot


def test_a_decorator_without_a_name(snapshot: SnapshotAssertion) -> None:
    """It once returned a decorator, and the first call of the "operator" was odd."""
    with pytest.raises(errors.DeclarationError) as caught:
        operator(lambda_reference)
    assert str(caught.value) == snapshot


def test_a_reference_that_runs_at_sizes_that_are_not_its_own() -> None:
    """The sizes that a declaration is tried with give a negative one here."""

    def rest(x: Float[Tensor, "n"], y: Float[Tensor, "m"]) -> Float[Tensor, "n-m"]:
        return x[y.shape[0] :] * y.sum()

    assert declared(rest)(torch.ones(5), torch.ones(2)).tolist() == [2.0, 2.0, 2.0]


def lambda_reference(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2


def test_kernels_beside_a_reference_with_decorators(tmp_path) -> None:
    """They were looked for beside the decorator's file."""
    (tmp_path / "cpu.cpp").write_text(KERNEL.replace("NAME", "twice"))
    file = tmp_path / "op.py"
    file.write_text("""import torch
from jaxtyping import Float, jaxtyped
from opwright import operator

@operator("beside_decorators::twice")
@jaxtyped(typechecker=None)
@torch.no_grad()
def twice(x: Float[torch.Tensor, "n"]) -> Float[torch.Tensor, "n"]:
    return x * 2

@twice.backward
@torch.no_grad()
def twice_backward(grad_output):
    return grad_output * 2
""")
    made: dict[str, Any] = {"__name__": "beside_decorators"}
    exec(compile(file.read_text(), file, "exec"), made)
    declaration = made["twice"].operator.declaration
    backward = made["twice_backward"].operator.declaration
    assert declaration.sources["cpu"].path == tmp_path / "cpu.cpp"
    assert (declaration.file, declaration.line) == (str(file), 5)
    assert (backward.file, backward.line) == (str(file), 11)


@pytest.mark.parametrize("reference", [functools.partial(lambda_reference), torch.exp, Way])
def test_a_reference_that_is_not_a_function(reference) -> None:
    with pytest.raises(errors.DeclarationError, match="a reference is a function, and this is an object of type"):
        operator(name("other"))(reference)
    with pytest.raises(errors.DeclarationError, match="a reference is a function, and this is an object of type"):
        declared(lambda_reference).backward(reference)


def test_an_argument_with_the_name_of_a_result(snapshot: SnapshotAssertion) -> None:
    """A kernel's glue did not compile; a backward took the argument for the gradient."""

    def copied(output: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return output.clone()

    def scaled(x: Float[Tensor, "n"], grad_output: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * grad_output

    with pytest.raises(errors.AnnotationError) as caught:
        declared(copied)
    assert message(caught) == snapshot
    f = declared(scaled)
    with pytest.raises(errors.BackwardError) as caught:

        @f.backward
        def scaled_backward(grad_output, x):
            return grad_output * x, grad_output

    assert message(caught) == snapshot


def test_a_missing_kernel_file_is_named() -> None:
    with pytest.raises(errors.KernelFileError, match=r"missing\.cpp"):
        declared(lambda_reference, cpu="missing.cpp")


def test_attention_and_dropout_that_draw_no_random_numbers() -> None:
    def attention(
        q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h m d"], v: Float[Tensor, "b h m d"]
    ) -> Float[Tensor, "b h n d"]:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def left_out(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return torch.nn.functional.dropout(torch.nn.functional.rrelu(x), 0.5, training=False)

    q, k, v = torch.randn(3, 1, 2, 4, 8)
    expected = (q @ k.mT / 8**0.5).softmax(-1) @ v
    torch.testing.assert_close(declared(attention)(q, k, v), expected)
    assert declared(left_out)(torch.ones(3)).tolist() == [1.0] * 3


def test_dropout_with_a_probability_of_0_by_default() -> None:
    def attention(q: Float[Tensor, "b h n d"], p: float = 0.0) -> Float[Tensor, "b h n d"]:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=p)

    def trained(x: Float[Tensor, "n"], train: bool = False) -> Float[Tensor, "n"]:
        return torch.nn.functional.rrelu(x, training=train)

    def never_true(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return torch.ops.aten.bernoulli.p(x, 0)

    for reference in (attention, trained, never_true):
        with pytest.raises(errors.RandomnessError, match="random=True"):
            declared(reference)


KERNEL = """
#include <opwright/kernel.h>
template <typename T>
void NAME(opwright::View<const T, 1> x, opwright::View<T, 1> output) {}
OPWRIGHT_KERNEL(NAME, float)
"""
MACRO = """
#define EXPORT(name) OPWRIGHT_KERNEL(name, float)
void random_numbers(opwright::View<const float, 1> x, opwright::View<float, 1> output) {}  // not lambda_reference()
EXPORT(random_numbers)
"""


def test_a_kernel_of_an_operator_that_draws_random_numbers(tmp_path, snapshot: SnapshotAssertion) -> None:
    own, other, backward = (
        KERNEL.replace("NAME", n) for n in ("random_numbers", "misnamed", "random_numbers_backward")
    )
    with pytest.raises(errors.DeclarationError) as caught:
        declared(random_numbers, random=True, cpu=own)
    assert message(caught) == snapshot
    file = tmp_path / "shared.cpp"
    file.write_text(own + backward)
    for kernel in (other, MACRO, file):
        with pytest.raises(errors.DeclarationError, match="has no kernel"):
            declared(random_numbers, random=True, cpu=kernel)
    drawn = declared(random_numbers, random=True, cpu=backward)
    assert drawn(torch.zeros(100)).std() > 0.2
    assert not drawn.operator.declaration.sources

    @drawn.backward
    def random_numbers_backward(grad_output, x):
        return torch.zeros_like(x)

    assert drawn.operator.backward_operator.declaration.sources


def positive(x: Float[Tensor, "n"]) -> Float[Tensor, "k"]:
    return x[x > 0]


def test_a_kernel_of_an_operator_with_sizes_that_depend_on_data(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(errors.DeclarationError) as caught:
        declared(positive, data_dependent=["k"], cpu=KERNEL.replace("NAME", "positive"))
    assert message(caught) == snapshot


def test_an_unknown_autocast_policy() -> None:
    with pytest.raises(errors.DeclarationError, match="promote"):
        declared(lambda_reference, autocast="widest")


def test_accepted_when_declared() -> None:
    noisy = declared(random_numbers, random=True)
    x = torch.zeros(100)
    torch.manual_seed(0)
    first = noisy(x)
    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(100)) or torch.equal(first, noisy(x)) or first.std() > 0.2

    chosen = declared(positive, data_dependent=["k"])
    assert chosen(torch.tensor([1.0, -1.0, 2.0])).tolist() == [1.0, 2.0]

    def add_one(x: Mutates[Float[Tensor, "n"]]) -> None:
        x.add_(1)

    y = torch.zeros(3)
    declared(add_one)(y)
    assert y.tolist() == [1.0, 1.0, 1.0]


def test_declaring_does_not_disturb_the_random_numbers() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    declared(random_numbers, random=True)
    declared(lambda_reference)
    assert torch.equal(torch.rand(3), expected)


def test_annotations_as_strings_and_local_names() -> None:
    """`from __future__ import annotations` holds in this file; names of the enclosing function count too."""
    Choice = Literal["up", "down"]  # noqa: N806

    @operator(name("shift"))
    def shift(
        x: Float[Tensor, "*s"], way: Choice = "up", mask: Bool[Tensor, "*s"] | None = None
    ) -> Float[Tensor, "*s"]:  # noqa: UP045
        return x + 1 if way == "up" else x - 1

    op = shift
    assert op(torch.zeros(2), "down").tolist() == [-1.0, -1.0]
    assert [p.kind for p in op.operator.contract.parameters] == ["tensor", "choice", "tensor"]
    assert op.operator.contract.parameters[2].optional


def test_a_named_tuple_with_local_names() -> None:
    """Its annotations are strings too, and were evaluated with the names of the module alone."""
    Vector = Float[Tensor, "n"]  # noqa: N806

    class Pair(NamedTuple):
        twice: Vector
        thrice: Vector

    def multiples(x: Vector) -> Pair:
        return Pair(x * 2, x * 3)

    found = operator(name("multiples"))(multiples)(torch.ones(1))
    assert (found.twice.item(), found.thrice.item()) == (2, 3)
    Pair.__annotations__["thrice"] = "Missing"
    with pytest.raises(errors.AnnotationError, match="the annotation names `Missing`, which is not defined"):
        operator(name("multiples"))(multiples)


def test_backward_signatures(snapshot: SnapshotAssertion) -> None:
    op = declared(lambda_reference)
    for wrong in (lambda grad_output, z: z, lambda x: x):
        with pytest.raises(errors.BackwardError) as caught:
            op.backward(wrong)
        assert message(caught) == snapshot

    def too_many(grad_output, x) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        return grad_output, grad_output

    with pytest.raises(errors.BackwardError, match="one gradient for each"):
        op.backward(too_many)


def test_backward_results(snapshot: SnapshotAssertion) -> None:
    def scaled(x: Float[Tensor, "*b n"], gate: Float[Tensor, "n"], beta: float = 1.0) -> Float[Tensor, "*b n"]:
        return x * gate * beta

    op = declared(scaled)
    for wrong in (
        lambda grad_output, x, gate, beta: (grad_output * gate * beta, grad_output * x * beta),
        lambda grad_output, x, gate, beta: (
            grad_output * gate * beta,
            (grad_output * x).sum_to_size(gate.shape).double(),
        ),
        lambda grad_output, gate, beta: (grad_output * gate * beta, None, None),
    ):
        with pytest.raises(errors.ReferenceError) as caught:
            op.backward(wrong)
        assert message(caught) == snapshot


def test_non_differentiable_outputs() -> None:
    def halves(x: Float[Tensor, "n"]) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        return x / 2, x * 3

    with pytest.raises(errors.DeclarationError, match=r"names `rest`(.|\n)*output0, output1(.|\n)*hint"):
        declared(halves, non_differentiable=["rest"])
    op = declared(halves, non_differentiable=["output1"])
    with pytest.raises(errors.BackwardError, match=r"`grad_output1`(.|\n)*hint: `def \w+\(grad_output0, x\)"):

        @op.backward
        def wrong(grad_output0, grad_output1, x):
            return grad_output0 / 2

    @op.backward
    def right(grad_output0, output1):
        return grad_output0 / 2 + 0 * output1

    x = torch.ones(2, requires_grad=True)
    first, second = op(x)
    assert not second.requires_grad
    assert torch.autograd.grad(first.sum(), x)[0].tolist() == [0.5, 0.5]


def test_public_names() -> None:
    for public in opwright.__all__:
        assert getattr(opwright, public) is not None
    assert set(dir(opwright)) == set(opwright.__all__)
    op = declared(lambda_reference)
    for attribute in ("backward", "samples", "sweep", "cost", "baseline", "operator"):
        assert hasattr(op, attribute)
    assert op.__name__ == "lambda_reference"


def test_families() -> None:
    def pick(x: Shaped[Tensor, "n"]) -> Shaped[Tensor, "n"]:
        return x.clone()

    op = declared(pick)
    for dtype in (torch.float16, torch.bool, torch.uint8, torch.int64):
        assert op(torch.ones(3).to(dtype)).dtype == dtype
