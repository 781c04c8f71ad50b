"""Operators that are right, of kinds that verify once took for wrong or left unchecked."""

from __future__ import annotations

import itertools
import re
import warnings
from typing import Annotated

import pytest
import torch
from jaxtyping import Float, Float32, Float64, Int, Int8, Int64
from torch import Tensor

from opwright import Index, Range, bench, operator, verify
from opwright.cli.verify_command import print_record
from opwright.contract.sweep import Sweep
from opwright.errors import CheckError
from opwright.isolation import hide_warnings_of_pytorch
from opwright.verify.inputs.boundaries import negative_cases
from opwright.verify.target import make_target


def outcomes(target, *checks: str) -> dict[str, str]:
    record = verify(target, checks=checks, quick=True)
    return {check.title: check.outcome for check in record.checks} | {f.check: f.message for f in record.failures}


def test_sizes_that_the_reference_refuses_are_not_compiled(ns) -> None:
    """The window may not be longer than the row; the sizes in the order of the table are."""

    @operator(f"{ns}::windows")
    def windows(x: Float[Tensor, "*batch t"], w: Float[Tensor, "k"]) -> Float[Tensor, "*batch t-k+1"]:
        return (x.unfold(-1, w.shape[0], 1) * w).sum(-1)

    labels = [case.label for case in make_target(windows, None, None).cases()]
    assert labels.count("base") == 4  # in each dtype
    assert outcomes(windows, "compile", "gradients") == {"compile": "passed", "gradients": "passed"}

    @operator(f"{ns}::shorter")
    def shorter(x: Float[Tensor, "t"], w: Float[Tensor, "k"]) -> Float[Tensor, "k-t"]:
        return w[x.shape[0] :] * x.sum()

    assert outcomes(shorter, "compile", "gradients") == {"compile": "passed", "gradients": "passed"}


def test_a_batch_as_long_as_a_fixed_axis_is_no_reason_to_compile_again(ns) -> None:
    @operator(f"{ns}::complex_mul")
    def complex_mul(a: Float[Tensor, "*s 2"], b: Float[Tensor, "*s 2"]) -> Float[Tensor, "*s 2"]:
        (ar, ai), (br, bi) = a.unbind(-1), b.unbind(-1)
        return torch.stack([ar * br - ai * bi, ar * bi + ai * br], -1)

    assert outcomes(complex_mul, "compile") == {"compile": "passed"}


def test_outputs_of_int8_and_float32(ns) -> None:
    """Finite differences through float32 see nothing, and opcheck adds a float to an integer in place."""

    @operator(f"{ns}::quantize")
    def quantize(x: Float[Tensor, "*batch n"]) -> tuple[Int8[Tensor, "*batch n"], Float32[Tensor, "*batch"]]:
        scale = x.float().abs().amax(-1) / 127
        return (x.float() / scale.unsqueeze(-1)).round().to(torch.int8), scale

    found = outcomes(quantize, "gradients", "second gradients", "gradient numerics", "opcheck")
    assert found == {
        "gradients": "skipped",
        "second gradients": "skipped",
        "gradient numerics": "passed",
        "opcheck": "passed",
    }

    @operator(f"{ns}::dequantize")
    def dequantize(
        q: Int8[Tensor, "*batch n"], scale: Float32[Tensor, "*batch"], x: Float[Tensor, "*batch n"]
    ) -> Float[Tensor, "*batch n"]:
        return x + q * scale.unsqueeze(-1).to(x.dtype)

    assert outcomes(dequantize, "gradients") == {"gradients": "passed"}  # of x alone


def test_an_operator_of_lists_alone(ns) -> None:
    @operator(f"{ns}::total")
    def total(tensors: list[Float[Tensor, "n"]]) -> Float[Tensor, "n"]:
        return torch.stack(tensors).sum(0)

    found = outcomes(total, "autocast", "refusals")
    assert found == {"autocast": "passed", "refusals": "passed"}


def test_an_operator_of_integers_alone_is_checked_like_any_other(ns) -> None:
    @operator(f"{ns}::both_bits")
    def both_bits(a: Int[Tensor, "*s"], b: Int[Tensor, "*s"]) -> Int[Tensor, "*s"]:
        return a & b

    checks = ("refusals", "vmap", "opcheck", "export")
    assert outcomes(both_bits, *checks) == dict.fromkeys(checks, "passed")


def test_a_random_operator_writes_what_it_returns(ns) -> None:
    @operator(f"{ns}::noisy", random=True)
    def noisy(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return x + torch.rand_like(x)

    assert outcomes(noisy, "outputs written") == {"outputs written": "passed"}


FIRST_ENTRIES = """
#include <opwright/kernel.h>
template <typename T>
void first_entries(opwright::View<const T, 2> x, int64_t k, opwright::View<T, 2> output) {
  for (int64_t i = 0; i < output.size(0); ++i)
    for (int64_t j = 0; j < k; ++j) output(i, j) = j < x.size(1) ? x(i, j) : T(0);
}
OPWRIGHT_KERNEL(first_entries, float)
"""


@pytest.mark.compiler
def test_a_reference_that_breaks_its_contract_is_named_and_not_the_kernel(ns) -> None:
    @operator(f"{ns}::first_entries", cpu=FIRST_ENTRIES)
    def first_entries(x: Float[Tensor, "t n"], k: Annotated[int, Range(1, 2)] = 2) -> Float[Tensor, "t k"]:
        return x[:, :k].clone()

    said = '`output`: the reference returns the shape [1, 1], and its annotation `Float[Tensor, "t k"]` says [1, 2]'
    found = outcomes(first_entries, "outputs written", "numerics")
    assert [text.startswith(said) for text in found.values()] == [True, True], found


IGNORING = """
#include <opwright/kernel.h>
template <typename T>
void stepped(opwright::View<const T, 1> x, int64_t by, opwright::View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i) + T(BY);
}
OPWRIGHT_KERNEL(stepped, double)
"""


@pytest.mark.compiler
@pytest.mark.parametrize(("by", "outcome"), [("by", "passed"), ("3", "failed")])
def test_a_kernel_that_ignores_an_integer_is_found(ns, by: str, outcome: str) -> None:
    @operator(f"{ns}::stepped", cpu=IGNORING.replace("BY", by))
    def stepped(x: Float[Tensor, "*s"], by: int = 3) -> Float[Tensor, "*s"]:
        return x + by

    assert outcomes(stepped, "numerics")["numerics"].startswith("`output`" if outcome == "failed" else outcome)


def test_each_option_is_tried_alone_however_many_there_are(ns) -> None:
    @operator(f"{ns}::many")
    def many(
        x: Float[Tensor, "n"], a: bool = False, b: bool = True, c: int = -1, d: float = 1.0, e: bool = False, f: int = 4
    ) -> Float[Tensor, "n"]:
        return x

    sets = Sweep(many.operator.contract, effort="full").option_sets()
    usual = sets[0]
    assert usual == {"a": False, "b": True, "c": -1, "d": 1.0, "e": False, "f": 4}
    alone = [{**usual, **other} for other in ({"a": True}, {"b": False}, {"c": -2}, {"d": 0.83}, {"e": True}, {"f": 5})]
    assert sets[1:7] == alone
    assert len(sets) == 16 == len({tuple(each.items()) for each in sets})
    fewer = Sweep(many.operator.contract).option_sets()
    assert fewer[:7] == sets[:7]
    assert len(fewer) < 16
    for (a, one), (b, other) in itertools.combinations(
        {k: [usual[k], v] for e in alone for k, v in e.items() if v != usual[k]}.items(), 2
    ):
        met = {(each[a], each[b]) for each in fewer}
        assert met == set(itertools.product(one, other)), (a, b)


def test_nothing_to_verify_on_is_said(ns) -> None:
    def declared(samples):
        @operator(f"{ns}::taken{len(names)}")
        def taken(x: Float[Tensor, "r n"], y: Int64[Tensor, "k"]) -> Float[Tensor, "k n"]:
            return x[y]

        names.append(taken)
        taken.samples(samples)
        return taken

    names: list = []
    x = torch.randn(5, 4)
    for samples, said in (
        (lambda: [(x, torch.tensor([7]))], r"(?s)takes none of its samples.*IndexError: index 7 is out of bounds"),
        (lambda: [], "there are no samples"),
        (lambda: [(x, torch.tensor([1])), x], "its sample 1 is against its contract: `y` has the wrong type"),
        (lambda: [(x, x)], "its sample 0 is against its contract: `y` must have a dtype"),
    ):
        target = declared(samples)
        for judge in (verify, bench):
            with pytest.raises(CheckError, match=said):
                judge(target)

    @operator(f"{ns}::refusing")
    def refusing(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        if not torch.compiler.is_compiling() and isinstance(x, torch.Tensor) and x.device.type != "meta":
            raise ValueError("nothing is right")
        return x.clone()

    with pytest.raises(CheckError, match=r"(?s)takes none of its inputs, as they follow.*ValueError: nothing is right"):
        verify(refusing)

    @operator(f"{ns}::misspelt")
    def misspelt(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return tensor.exp(x)  # noqa: F821

    with pytest.raises(CheckError, match=r"(?s)NameError: name 'tensor' is not defined.*correct the reference"):
        verify(misspelt)


def test_inputs_that_the_reference_refuses_are_counted_in_a_note(ns, capsys) -> None:
    """They were dropped, and nothing said so."""

    @operator(f"{ns}::largest")
    def largest(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
        return x.amax(-1)

    @operator(f"{ns}::of_samples")
    def of_samples(x: Float[Tensor, "n"]) -> Float[Tensor, ""]:
        return x.amax(-1)

    of_samples.samples(lambda: [(torch.ones(0),), (torch.ones(3),)])
    record = verify(largest, quick=True, checks=["numerics"])
    # An empty axis has no largest element: one input in each of four dtypes.
    (note,) = record.notes
    assert re.fullmatch(
        r"the reference of `largest` refuses 4 of \d+ inputs, so nothing is checked on them \(first: x=f32\[2, 3, 0\] "
        r"\(empty n\): IndexError: amax\(\).*\); declare a domain, or `@largest.samples`",
        note,
    )
    assert record.passed
    print_record(record)
    assert f"note: {note}\n" in capsys.readouterr().out
    (note,) = verify(of_samples, checks=["numerics"]).notes
    assert "refuses 4 of 20 inputs" in note
    assert "(first: x=f32[0] (sample 0): IndexError: amax" in note


def test_a_reference_with_another_shape_for_an_empty_input_takes_no_such_input(ns) -> None:
    """Of no channels, F.conv1d returns none, in place of zeros in the channels of its weight."""

    @operator(f"{ns}::correlate")
    def correlate(x: Float[Tensor, "b c t"], w: Float[Tensor, "o c k"]) -> Float[Tensor, "b o t-k+1"]:
        return torch.nn.functional.conv1d(x, w)

    record = verify(correlate, quick=True, checks=["outputs written", "numerics"])
    assert record.passed, record.failures
    (note,) = record.notes
    assert "(empty c): it returns [7, 0, 3] for `output`, where its annotation says [7, 11, 3])" in note


def test_a_warning_is_not_a_finding_where_warnings_are_errors(ns) -> None:
    @operator(f"{ns}::warning")
    def warning(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        warnings.warn("as PyTorch may", UserWarning)
        return 2 * x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert outcomes(warning, "numerics", "determinism") == {"numerics": "passed", "determinism": "passed"}


@pytest.mark.compiler
def test_what_does_not_compile_is_told_once(ns, capsys) -> None:
    @operator(f"{ns}::stepped", cpu=IGNORING.replace("BY", "nothing known"))
    def stepped(x: Float[Tensor, "*s"], by: int = 3) -> Float[Tensor, "*s"]:
        return x + by

    record = verify(stepped, quick=True)
    (failure,) = record.failures
    assert "its kernel does not compile" in failure.message
    assert {c.reason for c in record.checks if c.outcome == "skipped"} == {"its kernels cannot be built or loaded"}
    print_record(record)
    said = capsys.readouterr().out
    assert said.startswith(
        "\nFAILED outputs written\n  case   while its kernels were built\n  found  `stepped`: its kernel"
    )


_RUNNING_SUM = """
#include <opwright/kernel.h>
using opwright::View;
template <typename T> void running(View<const T, 2> x, View<T, 2> output) {
  for (int64_t i = 0; i < x.size(0); ++i) {
    T sum = 0;
    for (int64_t j = 0; j < LAST; ++j) WHAT;
  }
}
OPWRIGHT_KERNEL(running, float, double)
"""


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("last", "what", "check", "message", "pattern"),
    [
        ("x.size(1) - 1", "output(i, j) = sum += x(i, j)", "outputs written", "1 of 1 element is not written",
         "only index 6 of 7 along axis 0 of x=f32[7] (no batch axes)"),
        ("x.size(1)", "{ sum += x(i, j); output(i, j) = sum + 0 * x(i, j + 1); }", "guard bands",
         "it reads outside of them", ""),
    ],
    ids=["a row too short", "a read too far"],
)  # fmt: skip
def test_the_first_failure_is_the_cause(ns, last, what, check, message, pattern, capsys) -> None:
    source = _RUNNING_SUM.replace("LAST", last).replace("WHAT", what)

    @operator(f"{ns}::running", cpu=source)
    def running(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return x.cumsum(-1)

    record = verify(running, quick=True, checks=["outputs written", "determinism", "numerics", "guard bands"])
    first, *others = record.failures
    assert first.check == check
    assert message in first.message
    assert first.pattern == pattern
    assert others
    print_record(record)
    *_, also, last_line = capsys.readouterr().out.splitlines()
    assert also == f"Also failed, perhaps for the same reason: {', '.join(other.check for other in others)}"
    assert last_line == "`--check NAME` shows one of them"


def test_a_reference_that_takes_no_strides_or_no_float64_is_named(ns) -> None:
    """With a kernel of its own it is the oracle that needs it, and one refusal does not end the check."""

    @operator(f"{ns}::turned")
    def turned(x: Float[Tensor, "n 2"]) -> Float[Tensor, "n 2"]:
        return torch.stack((-x.view(-1)[1::2], x.view(-1)[::2]), -1)

    @operator(f"{ns}::turned_by_i")
    def turned_by_i(x: Float32[Tensor, "n 2"]) -> Float32[Tensor, "n 2"]:
        return torch.view_as_real(torch.view_as_complex(x.contiguous()) * 1j).clone()  # of an even offset only

    @operator(f"{ns}::weighted")
    def weighted(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * torch.dot(x, torch.ones(x.shape[0], dtype=torch.float32))

    layout = "for a tensor laid out like this: a reference must take any strides and offsets; copy with `x.clone("
    for function, text in (
        (turned, layout),
        (turned_by_i, layout),
        (weighted, "for the same values in float64: a reference takes the dtype of its arguments"),
    ):
        record = verify(function, quick=True, checks=["numerics"])
        (failure,) = record.failures
        assert failure.message.startswith("raised RuntimeError: ")
        assert f", in its reference, {text}" in failure.message
        assert record.checks[0].cases > 5


def test_where_pytorch_computes_its_own_mistakes_are_not_the_operators() -> None:
    """With AMX, a NaN spreads in PyTorch's products of bfloat16 matrices, each time to other rows: as it does here."""
    calls = itertools.count()

    def spread(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.bfloat16 or not x.isnan().any():
            return x
        x = x.clone()
        x.view(-1)[next(calls) * 7919 % x.numel()] = torch.nan
        return x

    @operator("verify_operators::without_kernel")
    def without_kernel(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return spread(x) + 0

    record = verify(without_kernel, checks=["numerics", "boundaries", "fresh data"])
    assert record.passed, record.failures


def test_gradients_of_an_operator_of_float64_alone(ns) -> None:
    @operator(f"{ns}::squared")
    def squared(x: Float64[Tensor, "n"]) -> Float64[Tensor, "n"]:
        return x * x

    squared.samples(lambda: [(torch.linspace(-1, 1, 7, dtype=torch.float64),)])
    found = outcomes(squared, "gradients", "gradient numerics")
    assert found == {"gradients": "passed", "gradient numerics": "passed"}


def test_a_wrong_gradient_of_a_large_sample_costs_no_whole_jacobian(ns) -> None:
    """gradcheck computed the whole Jacobian for its error text, and printed dots for the middle of a long one."""

    @operator(f"{ns}::squares")
    def squares(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * x

    @squares.backward
    def _(grad_output: Float[Tensor, "n"], x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return 3 * grad_output * x

    for size in (20_000, 60):
        samples = [(torch.linspace(1, 2, size, dtype=torch.float64),)]
        record = verify(squares, samples=samples, checks=["gradients"], memory_bytes=2**30)
        (failure,) = record.failures
        text = "when element 0 of `x` changes, element 0 of `output` changes at a rate of 2; the gradient says 3"
        assert text in failure.message


def test_a_reference_without_a_second_gradient_is_no_finding(ns) -> None:
    """PyTorch differentiates `multi_margin_loss` once only; what raises in a kernel's own backward is a finding."""

    @operator(f"{ns}::margins")
    def margins(scores: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
        first = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
        return torch.nn.functional.multi_margin_loss(scores, first, reduction="none")

    record = verify(margins, quick=True, checks=["gradients", "second gradients"])
    assert [check.outcome for check in record.checks] == ["passed", "skipped"]
    assert record.checks[1].reason.startswith("the reference has no second gradient: ")
    assert "multi_margin_loss_backward" in record.checks[1].reason

    @operator(f"{ns}::squared_sum")
    def squared_sum(x: Float[Tensor, "n"]) -> Float[Tensor, ""]:
        return (x * x).sum()

    @squared_sum.backward
    def _(grad_output: Float[Tensor, ""], x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        if x.requires_grad:
            raise RuntimeError("no derivative of this")
        return 2 * grad_output * x

    assert outcomes(squared_sum, "second gradients")["second gradients"].endswith("no derivative of this")


def test_a_reference_without_a_derivative_in_pytorch_is_no_finding(ns) -> None:
    """Six checks raised NotImplementedError, and numerics found 6 numbers where it had moved a negative zero."""

    @operator(f"{ns}::distinct", data_dependent=["k"])
    def distinct(x: Float[Tensor, "n"]) -> Float[Tensor, "k"]:
        return torch.unique(x)

    found = outcomes(distinct, "numerics", "gradient numerics", "gradient layouts", "compile", "threads", "leaks")
    gradients = dict.fromkeys(("gradient numerics", "gradient layouts"), "skipped")
    assert found == dict.fromkeys(("numerics", "compile", "threads", "leaks"), "passed") | gradients
    record = bench(distinct, ["eager"], seconds=0.1, dtypes=[torch.float32])
    assert {m.direction for m in record.measurements} == {"forward"}
    assert record.left_out == ["backward: the derivative for '_unique2' is not implemented."]


def test_numerics_has_negative_integers_where_they_are_not_indices(ns) -> None:
    """bench asks `numerics` before it measures, so a wrong result for negative integers must be found there."""

    @operator(f"{ns}::floor_div")
    def floor_div(a: Int64[Tensor, "*s"], by: Annotated[int, Range(1, 1000)] = 7) -> Int64[Tensor, "*s"]:
        return torch.div(a, by, rounding_mode="floor")

    def truncated(a: Tensor, by: int) -> Tensor:
        return torch.div(a, by, rounding_mode="trunc")

    assert verify(floor_div, quick=True, checks=["numerics"]).passed
    (failure,) = verify(floor_div, reference=truncated, quick=True, checks=["numerics"]).failures
    assert "(a on both sides of 0)" in failure.case

    def labels(annotation) -> list[str]:
        def taken(a: annotation, x: Float[Tensor, "n"]) -> Float[Tensor, "m"]:
            return x[a]

        made = make_target(operator(f"{ns}::taken{next(numbers)}")(taken), None, None)
        return [case.label for case in negative_cases(made)]

    numbers = itertools.count()
    assert labels(Int64[Tensor, "m"]) == []  # indices, as the reference says
    assert labels(Annotated[Int64[Tensor, "m"], Index("n")]) == []


def test_a_reference_that_cannot_be_compiled_is_no_finding(ns) -> None:
    """PyTorch says so of the reference alone with another type of error than of the operator."""

    @operator(f"{ns}::kept")
    def kept(x: Float[Tensor, "n d"], rows: Int64[Tensor, "s"]) -> Float[Tensor, "s d"]:
        is_there = rows.abs() < x.shape[0]
        taken = rows if bool(is_there.all()) else rows * is_there
        return x.new_zeros(rows.shape[0], x.shape[1]) + (x[taken] if x.shape[0] else 0)

    assert outcomes(kept, "compile")["compile"] in ("passed", "skipped")


def test_warnings_of_pytorch_on_inputs_that_a_check_makes_are_hidden() -> None:
    """A variance of one number was told six times."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.ones(1).var()
        hide_warnings_of_pytorch()
        torch.zeros(1).var()
        warnings.warn("of the reference", UserWarning, stacklevel=1)
    assert ["degrees of freedom" in str(each.message) for each in told] == [True, False]
