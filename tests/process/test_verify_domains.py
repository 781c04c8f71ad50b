"""Verify with domains, without them where the reference gives NaN or refuses indices, and with sums in any order."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import pytest
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

import opwright
from opwright import Factor, Index, Mutates, NonNegative, Positive, Probability, Range
from opwright.errors import CheckError, DeclarationError, KernelError, OutOfBoundsError

pytestmark = pytest.mark.compiler

CALLS = ("numerics", "boundaries", "fresh data")


def failure_of(function, *checks: str) -> str:
    """Returns the first failure of an operator, "" if there is none; of all checks on few inputs, if none is named."""
    return first_failure(opwright.verify(function, checks=checks or None, quick=not checks))


def first_failure(record) -> str:
    assert record.passed == (not record.failures)
    return "".join(f"{f.check}: {f.case}: {f.message}" for f in record.failures[:1])


# --- floating-point domains --------------------------------------------------------------------------------

ENTROPY = """
#include <cmath>
#include <opwright/kernel.h>
template <typename T>
void entropy(opwright::View<const T, 1> p, opwright::View<T, 1> output) {
  for (int64_t i = 0; i < p.size(0); ++i) {
    const T x = p(i);
    output(i) = VALUE;
  }
}
OPWRIGHT_KERNEL(entropy, float, double)
"""
RIGHT = "-x * std::log(x)"
VALUES = {
    "right": (RIGHT, ""),
    "garbage outside": (f"x > 0 && x <= 1 ? {RIGHT} : T(7)", ""),
    "wrong at one": (f"x == 1 ? T(7) : {RIGHT}", "numerics"),
    "wrong for denormal numbers": (f"x < T(1e-38) ? T(7) : {RIGHT}", "numerics"),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_outside_of_a_domain_are_left_out_and_its_ends_are_tried(ns, kind: str) -> None:
    value, verdict = VALUES[kind]

    @opwright.operator(f"{ns}_{list(VALUES).index(kind)}::entropy", cpu=ENTROPY.replace("VALUE", value))
    def entropy(p: Annotated[Float[Tensor, "n"], Range(1e-45, 1)]) -> Float[Tensor, "n"]:
        return -p * p.log()

    found = failure_of(entropy, *CALLS)
    assert found.partition(":")[0] == verdict, found


def test_without_a_domain_a_kernel_is_held_to_the_reference_outside_of_it(ns) -> None:
    @opwright.operator(f"{ns}_free::entropy", cpu=ENTROPY.replace("VALUE", f"x >= 0 ? {RIGHT} : T(7)"))
    def entropy(p: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return -p * p.log()

    record = opwright.verify(entropy, checks=["numerics"])
    assert "got 7, expected nan" in record.failures[0].message
    assert record.notes == [
        'the reference gives NaN for negative `p`: declare `Annotated[Float[Tensor, "n"], Positive]`, or samples'
    ]


@opwright.operator("verify_domains::nll")
def nll(
    p: Annotated[Float[Tensor, "b c"], Probability], target: Annotated[Int64[Tensor, "b"], Index("c")]
) -> Float[Tensor, "b"]:
    return -(p.gather(1, target[:, None])[:, 0] + 1e-3).log()


def test_probabilities_and_labels_pass_every_check() -> None:
    assert failure_of(nll) == ""


def test_a_sample_outside_of_a_domain_is_an_error() -> None:
    with pytest.raises(
        CheckError, match=r"its sample 0 is against its contract: `p` is not within Probability\s+(?s:.*)0 to 1.5"
    ):
        opwright.verify(nll, samples=[(torch.tensor([[0.0, 1.5]]), torch.tensor([1]))])
    with pytest.raises(CheckError, match=r'`target` is not within Index\("c"\)'):
        opwright.verify(nll, samples=[(torch.tensor([[0.0, 0.5]]), torch.tensor([-1]))])


# --- an optimizer step -------------------------------------------------------------------------------------


def adam_step(param, grad, exp_avg, exp_avg_sq, lr):
    exp_avg.mul_(0.9).add_(grad, alpha=0.1)
    exp_avg_sq.mul_(0.999).addcmul_(grad, grad, value=0.001)
    param.sub_(lr * exp_avg / (exp_avg_sq.sqrt() + 1e-8))


@opwright.operator("verify_domains::adam", autocast=None)
def adam(
    param: Mutates[Float[Tensor, "n"]],
    grad: Float[Tensor, "n"],
    exp_avg: Mutates[Float[Tensor, "n"]],
    exp_avg_sq: Mutates[Float[Tensor, "n"]],
    lr: float = 1e-3,
) -> None:
    adam_step(param, grad, exp_avg, exp_avg_sq, lr)


@opwright.operator("verify_domains::adam_of_new")
def adam_of_new(
    param: Float[Tensor, "n"], grad: Float[Tensor, "n"], exp_avg_sq: Float[Tensor, "n"], lr: float = 1e-3
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    square = exp_avg_sq * 0.999 + grad * grad * 0.001
    return param - lr * grad / (square.sqrt() + 1e-8), square


@pytest.mark.parametrize("step", [adam, adam_of_new], ids=["in place", "of new tensors"])
def test_a_reference_that_gives_nan_for_negative_squares_passes_with_a_note(step) -> None:
    """It failed numerics ("got -373.25, expected nan") and opcheck, which takes NaN for unequal to itself."""
    record = opwright.verify(step, quick=True)
    assert record.failures == []
    assert record.notes == [
        'the reference gives NaN for negative `exp_avg_sq`: declare `Annotated[Float[Tensor, "n"], NonNegative]`, or samples'
    ]


ADAM = """
#include <cmath>
#include <opwright/kernel.h>
template <typename T>
void adam(opwright::View<T, 1> param, opwright::View<const T, 1> grad, opwright::View<T, 1> exp_avg,
          opwright::View<T, 1> exp_avg_sq, double lr) {
  for (int64_t i = 0; i < param.size(0); ++i) {
    exp_avg(i) = T(0.9) * exp_avg(i) + T(0.1) * grad(i);
    exp_avg_sq(i) = T(0.999) * exp_avg_sq(i) + T(0.001) * grad(i) * grad(i);
    param(i) -= T(lr) * exp_avg(i) / (ROOT);
  }
}
OPWRIGHT_KERNEL(adam, float, double)
"""


@pytest.mark.parametrize(
    ("root", "verdict"),
    [
        ("std::sqrt(std::abs(exp_avg_sq(i))) + T(1e-8)", ""),  # of what is never negative
        (
            "std::sqrt(exp_avg_sq(i)) + (exp_avg_sq(i) == 0 ? T(1e-6) : T(1e-8))",
            "numerics",
        ),  # and the gradient is zero
    ],
    ids=["another formula outside", "wrong at zero"],
)
def test_a_step_with_a_declared_domain(ns, root: str, verdict: str) -> None:
    @opwright.operator(
        f"{ns}_adam_{'wrong' if verdict else 'right'}::adam", cpu=ADAM.replace("ROOT", root), autocast=None
    )
    def declared(
        param: Mutates[Float[Tensor, "n"]],
        grad: Float[Tensor, "n"],
        exp_avg: Mutates[Float[Tensor, "n"]],
        exp_avg_sq: Mutates[Annotated[Float[Tensor, "n"], NonNegative]],
        lr: Annotated[float, Positive] = 1e-3,
    ) -> None:
        adam_step(param, grad, exp_avg, exp_avg_sq, lr)

    record = opwright.verify(declared, checks=CALLS)
    assert first_failure(record).partition(":")[0] == verdict, record.failures
    assert record.notes == []


# --- indices -----------------------------------------------------------------------------------------------


@opwright.operator("verify_domains::gather")
def gather(input: Float[Tensor, "n d"], index: Int64[Tensor, "m"]) -> Float[Tensor, "m d"]:
    return input[index, ...]


@gather.backward
def gather_backward(grad_output, input, index):
    return torch.zeros_like(input).index_put((index,), grad_output, accumulate=True)


@opwright.operator("verify_domains::embedding")
def embedding(table: Float[Tensor, "n d"], index: Annotated[Int64[Tensor, "*s"], Index("n")]) -> Float[Tensor, "*s d"]:
    return table[index]


@pytest.mark.parametrize("op", [gather, embedding], ids=["gather", "embedding"])
def test_operators_with_indices_pass_every_check(op) -> None:
    """PyTorch adds the gradients of one row in any order; an index without axes cannot be traced by opcheck."""
    record = opwright.verify(op, quick=True)
    assert record.failures == []
    cases = {c.name: c.cases for c in record.checks}
    assert cases["opcheck"]
    assert cases["numerics"] > 50


ROWS = """
#include <opwright/kernel.h>
template <typename T>
void rows(opwright::View<const T, 2> table, opwright::View<const int64_t, 1> index, opwright::View<T, 2> output) {
  const int64_t n = table.size(0);
  for (int64_t i = 0; i < index.size(0); ++i) {
    int64_t row = index(i);
    opwright::check(0 <= row && row < n, "index out of bounds");
    ROW;
    for (int64_t j = 0; j < table.size(1); ++j) output(i, j) = table(row, j);
  }
}
OPWRIGHT_KERNEL(rows, float)
"""


@pytest.mark.parametrize(
    ("row", "verdict"),
    [("", ""), ("if (row == n - 1) row = 0", "numerics"), ("if (row >= 40000) row = 0", "boundaries")],
)
def test_negative_indices_are_left_out_where_the_domain_says_so(ns, row: str, verdict: str) -> None:
    @opwright.operator(f"{ns}_rows_{len(row)}::rows", cpu=ROWS.replace("ROW;", f"{row};"))
    def rows(table: Float[Tensor, "n d"], index: Annotated[Int64[Tensor, "m"], Index("n")]) -> Float[Tensor, "m d"]:
        return table[index]

    found = failure_of(rows, "numerics", "boundaries")
    assert found.partition(":")[0] == verdict, found


def error_of(call) -> str:
    """Returns the exception of a call unless it is an IndexError; "" otherwise."""
    try:
        call()
    except IndexError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def paths_of(op, table: Tensor, index: Tensor):
    """Yields the ways to an operator of a table and indices, each with a call."""
    leaf, entry = (
        table.clone().requires_grad_(),
        getattr(getattr(torch.ops, op.operator.declaration.namespace), op.__name__),
    )
    yield "eager", lambda: op(table, index)
    yield "no kernel for the dtype", lambda: op(table.double(), index)
    yield "gradient", lambda: op(leaf, index)
    yield "torch.ops", lambda: entry(table, index)
    yield "torch.ops, gradient", lambda: entry(leaf, index)
    yield "vmap of indices", lambda: torch.vmap(op, (None, 0))(table, torch.stack([index, index]))
    yield "vmap of tables", lambda: torch.vmap(op, (0, None))(torch.stack([table, table]), index)
    yield "torch.func.grad", lambda: torch.func.grad(lambda t: op(t, index).sum())(table)
    yield "jvp", lambda: torch.func.jvp(lambda t: op(t, index), (table,), (table,))
    yield "compile", lambda: torch.compile(op, backend="eager")(table, index)
    yield "compile, gradient", lambda: torch.compile(op, backend="aot_eager")(leaf, index)
    yield "out", lambda: op(table, index, out=table.new_empty(len(index), table.shape[1]))


@pytest.mark.parametrize("kernel", [None, ROWS.replace("ROW;", "")], ids=["reference", "kernel"])
@pytest.mark.parametrize("gathers", [False, True], ids=["indexing", "gather"])
def test_an_index_out_of_bounds_is_an_index_error_on_every_path(ns, kernel: str | None, gathers: bool) -> None:
    """`torch.gather` raises a RuntimeError: so did the reference, and the operator wherever it runs that."""

    @opwright.operator(f"{ns}_{'kernel' if kernel else 'reference'}_{gathers}::rows", cpu=kernel)
    def rows(table: Float[Tensor, "n d"], index: Int64[Tensor, "m"]) -> Float[Tensor, "m d"]:
        return table.gather(0, index[:, None].expand(-1, table.shape[1])) if gathers else table[index]

    table = torch.randn(4, 3)
    wrong = {path: raised for path, call in paths_of(rows, table, torch.tensor([0, 9])) if (raised := error_of(call))}
    assert wrong == {}
    if gathers:
        with pytest.raises(OutOfBoundsError, match=r"`rows`: index 9 is out of bounds for dimension 0 with size 4"):
            rows(table.double(), torch.tensor([0, 9]))


# --- sums in any order -------------------------------------------------------------------------------------

SUM = """
#include <opwright/kernel.h>
template <typename T>
void total(opwright::View<const T, 2> x, opwright::View<T, 1> output) {
  static int calls = 0;
  const bool is_turned = ++calls % 2;
  for (int64_t i = 0; i < x.size(0); ++i) {
    T sum = 0;
    for (int64_t j = 0; j < x.size(1); ++j) sum += x(i, is_turned ? x.size(1) - 1 - j : j);
    output(i) = RESULT;
  }
}
OPWRIGHT_KERNEL(total, float, double)
"""


def make_total(namespace: str, result: str, deterministic: bool):
    @opwright.operator(f"{namespace}::total", cpu=SUM.replace("RESULT", result), deterministic=deterministic)
    def total(x: Float[Tensor, "m n"]) -> Float[Tensor, "m"]:
        return x.sum(1)

    return total


@pytest.mark.parametrize(
    ("result", "deterministic", "verdict"),
    [
        ("sum", True, "determinism"),
        ("sum", False, ""),
        ("is_turned ? sum * T(1.001) : sum", False, "numerics"),
        ("calls % 64 < 32 ? sum : sum * T(1.001)", False, "determinism"),
    ],
    ids=["undeclared", "declared", "wrong every other time", "wrong in some calls"],
)
def test_sums_in_any_order_are_held_to_the_allowance(ns, result: str, deterministic: bool, verdict: str) -> None:
    op = make_total(f"{ns}_{len(result)}_{deterministic}", result, deterministic)
    checks = (
        ("determinism",)
        if verdict == "determinism"
        else ("guard bands", "determinism", "threads", "compile")
        if not verdict or deterministic
        else ("numerics",)
    )
    found = failure_of(op, *checks)
    assert found.partition(":")[0] == verdict, found


# --- batch invariance --------------------------------------------------------------------------------------

MEANS = """
#include <opwright/kernel.h>
template <typename T>
void means(opwright::View<const T, 2> x, opwright::View<T, 1> output) {
  const int64_t rows = x.size(0), n = x.size(1);
  const bool is_turned = TURNED;
  for (int64_t i = 0; i < rows; ++i) {
    T sum = 0;
    for (int64_t j = 0; j < n; ++j) sum += x(i, is_turned ? n - 1 - j : j);
    output(i) = sum / T(n);
  }
}
OPWRIGHT_KERNEL(means, float, double)
"""


@pytest.mark.parametrize(
    ("turned", "batch_invariant", "verdict"),
    [
        ("false", True, ""),
        ("rows > 1", True, "independence"),
        ("rows % 2", True, "independence"),
        ("rows % 2", False, ""),
    ],
    ids=["invariant", "another order for one row", "another order for odd counts", "not declared"],
)
def test_an_order_of_sums_that_follows_from_the_batch(ns, turned: str, batch_invariant: bool, verdict: str) -> None:
    name = f"{ns}_{turned.strip('% 12>').replace(' ', '')}_{batch_invariant}::means"

    @opwright.operator(name, cpu=MEANS.replace("TURNED", turned), batch_invariant=batch_invariant)
    def means(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
        return x.mean(-1)

    found = failure_of(means, "numerics", "independence")
    assert found.partition(":")[0] == verdict, found
    assert not verdict or "have different bits in a call on them alone" in found


@pytest.mark.parametrize(("divisor", "verdict"), [("n", ""), ("(n + (rows > 4 ? 1e-3 : 0))", "independence")])
def test_a_result_that_depends_on_the_batch(ns, divisor: str, verdict: str) -> None:
    source = MEANS.replace("TURNED", "false").replace("T(n)", f"T({divisor})")

    @opwright.operator(f"{ns}_{len(divisor)}::means", cpu=source)
    def means(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
        return x.mean(-1)

    found = failure_of(means, "independence")
    assert found.partition(":")[0] == verdict, found


def of_the_others(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True) if x.ndim > 1 else x


def of_the_place(x: Tensor) -> Tensor:
    return x * torch.arange(1, x[..., 0].numel() + 1).view(*x.shape[:-1], 1)


@pytest.mark.parametrize("compute", [of_the_others, of_the_place])
def test_a_reference_whose_entries_depend_on_the_batch(ns, compute) -> None:
    """It passed, and torch.vmap of the operator gave other results than a loop."""

    @opwright.operator(f"{ns}_{compute.__name__}::centred")
    def centred(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return compute(x)

    found = first_failure(opwright.verify(centred, checks=["independence"], quick=True))
    assert "the reference gives entries 1.. of `*batch` other results when called on them alone" in found, found


def test_products_that_pytorch_rounds_otherwise_in_a_part_of_the_batch(ns) -> None:
    """Its product of matrices in bfloat16 adds up in another order for fewer rows."""

    @opwright.operator(f"{ns}::product")
    def product(x: Float[Tensor, "*batch k"], weight: Float[Tensor, "n k"]) -> Float[Tensor, "*batch n"]:
        return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight))

    assert failure_of(product, "independence") == ""


def test_batch_invariance_needs_a_variadic_axis(ns) -> None:
    with pytest.raises(DeclarationError, match="entries of a variadic axis, and no output has one"):

        @opwright.operator(f"{ns}::total", batch_invariant=True)
        def total(x: Float[Tensor, "n"]) -> Float[Tensor, ""]:
            return x.sum()


# --- precision ---------------------------------------------------------------------------------------------

PRODUCT = """
#include <cstring>
#include <opwright/kernel.h>
template <typename T>
T rounded(T x) {
  if constexpr (sizeof(T) == 4) {  // to TF32: ten bits behind the leading one
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t nearest = (bits + HALF) & ~0x1fffu;
    if ((bits & 0x7f800000u) != 0x7f800000u)  // the largest numbers are cut off: they would become infinite
      bits = (nearest & 0x7f800000u) == 0x7f800000u ? bits & ~0x1fffu : nearest;
    std::memcpy(&x, &bits, 4);
  }
  return x;
}
template <typename T>
void product(opwright::View<const T, 2> a, opwright::View<const T, 2> b, opwright::View<T, 2> output) {
  for (int64_t i = 0; i < a.size(0); ++i)
    for (int64_t j = 0; j < b.size(1); ++j) {
      double sum = 0;
      for (int64_t k = 0; k < a.size(1); ++k) sum += double(rounded(a(i, k))) * double(rounded(b(k, j)));
      output(i, j) = T(sum SCALE);
    }
}
OPWRIGHT_KERNEL(product, float, double)
"""


@pytest.mark.parametrize(
    ("half", "scale", "precision", "verdict"),
    [
        ("0x1000u", "", None, "numerics"),
        ("0x1000u", "", "tf32", ""),
        ("0u", "", "tf32", ""),  # cut off, as the hardware does
        ("0x1000u", "* (1 + 1.0 / 64)", "tf32", "numerics"),
        ("0x1000u", "", Factor(2**20, "products in TF32"), ""),
        ("0x1000u", "", Factor(2, "too small a factor"), "numerics"),
    ],
)
def test_a_declared_precision_widens_the_allowance(ns, half: str, scale: str, precision, verdict: str) -> None:
    namespace = f"{ns}_{abs(hash((half, scale, str(precision))))}"

    @opwright.operator(
        f"{namespace}::product", cpu=PRODUCT.replace("HALF", half).replace("SCALE", scale), precision=precision
    )
    def product(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
        return a @ b

    record = opwright.verify(product, checks=["numerics"])
    assert first_failure(record).partition(":")[0] == verdict, record.failures
    assert record.notes == {
        None: [],
        "tf32": ['declared `precision="tf32"`: products of float32 matrices may be rounded as in TF32'],
    }.get(precision, [f"declared `precision`: results may err {precision}"])


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(DeclarationError, match="unknown precision 'bf16x3'"):

        @opwright.operator("verify_domains::unknown", precision="bf16x3")
        def unknown(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
            return x + 1


# --- two dtypes in one operator ----------------------------------------------------------------------------


def guide_block(language: str, holding: str) -> str:
    text = (Path(__file__).parents[2] / "docs/guides/write-an-operator.md").read_text()
    return next(block for block in text.split(f"```{language}\n")[1:] if holding in block).partition("```")[0]


@pytest.fixture(scope="module")
def sgd(ns, tmp_path_factory):
    """The optimizer of the guide: parameters in bfloat16, state in float32."""
    folder = tmp_path_factory.mktemp("sgd")
    (folder / "cpu.cpp").write_text(guide_block("cpp", "void sgd("))
    head = "from jaxtyping import Float, Float32\nfrom torch import Tensor\nfrom opwright import Mutates, operator\n"
    source = head + guide_block("python", "def sgd(").replace("my_ops", f"{ns}_guide")
    (folder / "op.py").write_text(source)
    spec = importlib.util.spec_from_file_location(f"{ns}_sgd", folder / "op.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.sgd


def test_the_optimizer_of_the_guide_updates_bfloat16_with_a_float32_state(sgd) -> None:
    param, grad, momentum = (
        torch.tensor([1.0, -2.0]).bfloat16(),
        torch.tensor([0.5, 8.0]).bfloat16(),
        torch.tensor([0.0, 1.0]),
    )
    sgd(param, grad, momentum, lr=0.5)
    assert momentum.tolist() == pytest.approx([0.5, 8.9])
    assert param.tolist() == [0.75, -6.4375]  # -6.45 in bfloat16
    with pytest.raises(TypeError, match="`grad` must have the dtype of `param`"):
        sgd(param, grad.float(), momentum)
    with pytest.raises(TypeError, match="`momentum` must have a dtype of `Float32`"):
        sgd(param, grad, momentum.bfloat16())
    record = opwright.verify(sgd, quick=True)
    assert record.failures == []
    assert record.backends == ["cpu"]


@opwright.operator("verify_domains::scaled")
def scaled(x: Float[Tensor, "*b n"], scale: Float32[Tensor, "n"]) -> Float[Tensor, "*b n"]:
    return (x * scale).to(x.dtype)


def test_autocast_leaves_a_single_dtype_out_of_its_policy() -> None:
    """The check took the float32 of `scale` for one that `x` is promoted to."""
    assert failure_of(scaled, "autocast", "vmap", "gradients", "gradient numerics", "opcheck") == ""


# --- every input -------------------------------------------------------------------------------------------

INVERSE = """
#include <opwright/kernel.h>
template <typename T>
void inverse(opwright::View<const T, 1> x, opwright::View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) {
    opwright::check(x(i) >= 5 && x(i) <= 10, "outside of its domain");
    output(i) = 1 / x(i);
  }
}
OPWRIGHT_KERNEL(inverse, float, double)
"""


def test_no_check_gives_a_kernel_a_value_outside_of_its_domain(ns) -> None:
    @opwright.operator(f"{ns}_inverse::inverse", cpu=INVERSE)
    def inverse(x: Annotated[Float[Tensor, "n"], Range(5, 10)]) -> Float[Tensor, "n"]:
        return 1 / x

    assert failure_of(inverse) == ""
    with pytest.raises(KernelError, match="outside of its domain"):
        inverse(torch.tensor([4.0]))
