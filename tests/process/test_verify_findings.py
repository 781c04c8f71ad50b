"""What verify finds in wrong callables, and the inputs, the oracle and the messages that it needs for it."""

from __future__ import annotations

import math
import sys
import threading
import time

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

import opwright
from opwright.cli.verify_command import print_record
from opwright.contract.sweep import Sweep
from opwright.verify import api
from opwright.verify.checks import Check
from opwright.verify.checks.finding import Finding, Skipped
from opwright.verify.compare import compare
from opwright.verify.oracle import expect
from opwright.verify.target import make_target


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * torch.erfc(-x / math.sqrt(2))


def samples():
    made = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        yield (torch.randn(17, 33, generator=made).to(dtype),)
        yield (torch.randn(4, 1001, generator=made).mul(5).to(dtype)[:, ::2],)


def cached(key):
    seen: dict = {}
    return lambda x: seen.setdefault(key(x.detach()), gelu(x).detach()).clone()


def buffered():
    buffers: dict = {}
    return lambda x: buffers.setdefault((x.shape, x.dtype), torch.empty_like(x)).copy_(gelu(x).detach())


def restored(x: Tensor) -> Tensor:
    result = gelu(x)
    x.neg_()
    x.neg_()
    return result


def later(x: Tensor) -> Tensor:
    result, made = gelu(x), torch.zeros_like(x)
    threading.Thread(target=lambda: (time.sleep(0.02), made.copy_(result))).start()
    return made


def scratch():
    memory: dict = {}

    def call(x: Tensor) -> Tensor:
        kept = memory.setdefault((x.shape, x.dtype), torch.empty_like(x))
        kept.copy_(gelu(x).detach())
        time.sleep(1e-5)
        return kept.clone()

    return call


def keeping():
    kept: list = []
    return lambda x: (kept.append(x.detach().clone()), gelu(x))[1]


class Lazy(torch.Tensor):
    pass


WRONG = {
    "a cache keyed by address": (lambda: cached(lambda x: x.data_ptr()), {"numerics", "fresh data"}),
    "a cache keyed by shape, ends and maximum": (
        lambda: cached(lambda x: (x.shape, float(x.flatten()[0]), float(x.flatten()[-1]), float(x.max()))),
        {"fresh data"},
    ),
    "one buffer for all calls": (buffered, {"determinism"}),
    "changed and restored": (lambda: restored, {"numerics"}),
    "later, from a thread": (lambda: later, {"numerics"}),
    "scratch memory shared by threads": (scratch, {"threads"}),
    "keeps its arguments": (keeping, {"leaks"}),
    "ends the process": (lambda: lambda x: sys.exit(0), {"numerics"}),
    "a subclass": (lambda: lambda x: gelu(x).as_subclass(Lazy), {"numerics"}),
    "seeds": (lambda: lambda x: (torch.manual_seed(time.time_ns()), gelu(x))[1], {"global state"}),
}


@pytest.mark.parametrize("kind", WRONG)
def test_seen_in_any_callable(kind: str) -> None:
    make, checks = WRONG[kind]
    record = opwright.verify(make(), reference=gelu, samples=samples, checks=checks)
    assert not record.passed
    assert checks & {failure.check for failure in record.failures}, record.failures


def test_the_right_callable_passes() -> None:
    record = opwright.verify(gelu, reference=lambda x: gelu(x), samples=samples)
    assert record.passed, record.failures
    outcomes = {check.name: check.outcome for check in record.checks}
    for name in ("guard bands", "fresh data", "global state", "threads", "leaks", "gradient layouts"):
        assert outcomes[name] == "passed", name


@pytest.mark.parametrize("kind", ["ignores strides of its gradient", "overwrites what it saved"])
def test_a_wrong_gradient_of_a_callable(kind: str) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x = x.detach().clone()
            return x * x

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            if kind == "ignores strides of its gradient" and not grad.is_contiguous():
                return ctx.x * grad
            result = 2 * ctx.x * grad
            if kind == "overwrites what it saved":
                ctx.x.zero_()
            return result

    record = opwright.verify(Square.apply, reference=lambda x: x * x, samples=[(torch.randn(5, 7),)])
    found = {failure.check for failure in record.failures}
    assert found == {"gradient layouts" if "strides" in kind else "repeated backward"}


def test_a_cache_keyed_by_the_address_of_whole_numbers() -> None:
    seen: dict = {}
    given = [(torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]]),)]
    record = opwright.verify(
        lambda x: seen.setdefault(x.data_ptr(), x.cumsum(-1)).clone(),
        reference=lambda x: x.cumsum(-1),
        samples=given,
        checks=["fresh data"],
    )
    (failure,) = record.failures
    assert "exchanged" in failure.message
    assert opwright.verify(
        lambda x: x.cumsum(-1), reference=lambda x: x.cumsum(-1), samples=given, checks=["fresh data"]
    ).passed


def test_one_tensor_for_two_arguments() -> None:
    """A kernel that writes to one while it reads the other, say."""

    def product(x: Tensor, y: Tensor) -> Tensor:
        return x * x * x if x is y else x * y

    given = [(torch.randn(5, 7), torch.randn(5, 7))]
    record = opwright.verify(product, reference=torch.mul, samples=given, checks=["numerics", "determinism"])
    (failure,) = record.failures
    assert failure.check == "determinism"
    assert "`x` and `y` are one tensor" in failure.message


def test_a_result_that_is_wrong_only_where_it_is_recorded() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2 + (0.01 if x.requires_grad else 0)

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def candidate(x: Tensor) -> Tensor:
        is_recorded = torch.is_grad_enabled() and x.requires_grad
        return Doubled.apply(x) if is_recorded else x * 2

    record = opwright.verify(
        candidate, reference=lambda x: x * 2, samples=[(torch.randn(5, 7),)], checks=["numerics", "gradient numerics"]
    )
    (failure,) = record.failures
    assert failure.check == "gradient numerics"
    assert "recorded for a gradient, `output`" in failure.message


# --- the oracle ----------------------------------------------------------------------------------------------


def judged(reference, candidate, x: Tensor):
    (expected,) = expect(lambda values: [reference(*values)], [x])
    return compare(candidate(x), expected)


def test_the_sign_of_a_zero_counts_where_it_follows_the_input() -> None:
    x = torch.tensor([-0.0, 0.0, 1.0, -200.0])
    assert judged(gelu, gelu, x).worst_ratio < 1
    assert "got 0, expected -0" in judged(gelu, lambda x: gelu(x) + 0.0, x).message
    # gelu(-200) is zero for want of smaller numbers: either sign will do.
    assert judged(gelu, lambda x: torch.where(x < -100, 0.0, gelu(x)), x).worst_ratio < 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_of_16_bits_are_rounded_to_nearest(dtype: torch.dtype) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)).to(dtype)

    def cut(x: Tensor) -> Tensor:
        exact = gelu(x.double())
        near = exact.to(dtype)
        return torch.where(near.double().abs() > exact.abs(), (near.view(torch.int16) - 1).view(dtype), near)

    assert judged(gelu, lambda x: gelu(x.float()).to(dtype), x).message == ""
    assert judged(gelu, gelu, x).message == ""  # rounds each intermediate result, up as often as down
    assert "nearer to 0" in judged(gelu, cut, x).message
    assert "nearer to 0" in judged(gelu, cut, x.view(4, 1024)).message  # each row has the same bias
    above = judged(gelu, lambda x: (gelu(x.float()).to(dtype).view(torch.int16) + 1).view(dtype), x)
    assert "farther from 0" in above.message


def test_the_oracle_leaves_float64_arguments_alone() -> None:
    """A reference that writes into its arguments must not change the case."""
    x = torch.ones(3, dtype=torch.float64)
    expect(lambda values: [values[0].add_(1)], [x])
    assert torch.equal(x, torch.ones(3, dtype=torch.float64))


# --- the sweep -----------------------------------------------------------------------------------------------


def scaled(x: Float[Tensor, "*batch n"], scale: Float[Tensor, "n"]) -> Float[Tensor, "*batch n"]:
    return torch.tanh(x) * scale


def squashed(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return torch.tanh(x)


def cases_of(name: str, reference, effort: str = "default", dtype: torch.dtype = torch.float32):
    contract = opwright.operator(f"verify_findings::{name}")(reference).operator.contract
    return list(Sweep(contract, effort=effort).cases(dtype))


@pytest.mark.parametrize("effort", ["default", "full"])
def test_every_kind_of_input_is_in_every_sweep(effort: str) -> None:
    cases = cases_of("swept", scaled, effort)
    large = [c.values for c in cases if min(t.numel() for t in c.values) and c.values[0].numel() > 65_536]
    assert any(
        all(t.is_contiguous() and t.data_ptr() % 64 == 0 and all(s % 8 == 0 for s in t.shape) for t in values)
        for values in large
    )
    assert any(math.prod(values[0].shape[:-1]) > 65_536 for values in large)
    assert any(x.is_contiguous() and not scale.is_contiguous() for x, scale in (c.values for c in cases))
    assert any(not x.is_contiguous() and scale.is_contiguous() for x, scale in (c.values for c in cases))
    for i in range(2):  # special in this one alone
        assert any(torch.isnan(c.values[i]).any() and torch.isfinite(c.values[1 - i]).all() for c in cases)


def test_special_values_have_room_without_named_axes() -> None:
    """Five elements took the first five of them only."""
    special = [c.values[0] for c in cases_of("roomy", squashed) if c.label == "special values"]
    assert special
    for x in special:
        assert {math.inf, -math.inf, torch.finfo(x.dtype).max, 750.0} <= set(x.tolist())


def test_every_finite_bfloat16_for_one_input() -> None:
    cases = cases_of("unary", squashed, dtype=torch.bfloat16)
    (case,) = [c for c in cases if c.label == "every value"]
    bits = case.values[0].flatten().view(torch.int16).unique()
    assert bits.numel() == 65_280
    assert torch.isfinite(case.values[0]).all()


def test_axes_are_long_where_the_reference_can_be_asked() -> None:
    @opwright.operator("verify_findings::gram")
    def gram(x: Float[Tensor, "n k"]) -> Float[Tensor, "n n"]:
        return x @ x.T

    @opwright.operator("verify_findings::scan")
    def scan(x: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        return torch.stack([x[: i + 1].sum(0) for i in range(len(x))])

    def long(operator) -> set[str]:
        return {case.label for case in make_target(operator, None, None).cases() if "long" in case.label}

    assert long(gram) == {"long k"}  # n by n are too many
    assert "long n" not in long(scan)  # minutes


# --- how failures are told -----------------------------------------------------------------------------------


def test_tensors_have_their_names_where_people_read_a_case(ns, capsys) -> None:
    """They were listed without: which of seven tensors is `f32[3]`?"""

    @opwright.operator(f"{ns}::affine")
    def affine(
        x: Float[Tensor, "n"], w: Float[Tensor, "n"] | None, rest: list[Float[Tensor, "n"]], shift: float = 0.0
    ) -> Float[Tensor, "n"]:
        return sum(rest, x if w is None else x * w) + shift

    x, one = torch.ones(3), torch.ones(1)

    def verify_only(text: str):
        samples = [(x, None, [x, x]), (one, one, [one], 0.5)]
        return opwright.verify(
            affine, reference=lambda x, w, rest, shift: x, samples=samples, checks=["numerics"], only=text
        )

    for text in ("f32[3] f32[3] f32[3] shift", "x=f32[3] rest[0]=f32[3] rest[1]=f32[3] shift"):
        record = verify_only(text)
        (failure,) = record.failures
        whole = "x=f32[3] rest[0]=f32[3] rest[1]=f32[3] shift=0.0 (sample 0)"
        assert failure.input.endswith(f", a part of {whole}")
        # What programs read is as it was.
        assert failure.case.endswith(", a part of f32[3] f32[3] f32[3] shift=0.0 (sample 0)")
        print_record(record)
        assert f" {failure.input}\n" in capsys.readouterr().out
    (failure,) = verify_only("w=").failures
    assert failure.input == "x=f32[1] w=f32[1] rest[0]=f32[1] shift=0.5 (sample 1)"
    assert failure.case == "f32[1] f32[1] f32[1] shift=0.5 (sample 1)"


def test_a_failure_is_shrunk_to_the_smallest_part() -> None:
    def zero_where_any_is_large(x: Tensor) -> Tensor:
        result = gelu(x)
        return torch.where((x > 2).any(), torch.zeros_like(x), result)

    x = torch.linspace(-3, 2.5, 60).view(6, 10)
    record = opwright.verify(zero_where_any_is_large, reference=gelu, samples=[(x,)], checks=["numerics"])
    (failure,) = record.failures
    assert failure.case.startswith("f32[1, 1] (sample 0), a part of f32[6, 10] (sample 0)")
    assert "worst at [0, 0]: got 0, expected 1.99122529" in failure.message
    assert "ulp where" in failure.message


def test_no_part_of_a_case_has_an_index_outside_of_its_axis() -> None:
    """The classes of ctc_loss became fewer than its labels, and it wrote beyond its table."""

    samples = [(torch.randn(6, 9), torch.tensor([1, 3, 2, 1, 3, 3]))]

    def read_anywhere(x: Tensor, labels: Tensor) -> Tensor:
        return x.flatten().take(labels % x.shape[1])

    record = opwright.verify(
        lambda *given: 2 * read_anywhere(*given), reference=read_anywhere, samples=samples, checks=["numerics"]
    )
    (failure,) = record.failures
    assert failure.case == "f32[1, 2] i64[1] (sample 0), a part of f32[6, 9] i64[6] (sample 0)"


def test_a_part_that_raises_another_error_is_not_that_failure() -> None:
    def refuse(x: Tensor) -> Tensor:
        raise TypeError("too large") if len(x) > 3 else ValueError("too small")

    record = opwright.verify(refuse, reference=gelu, samples=[(torch.ones(7),)], checks=["numerics"])
    (failure,) = record.failures
    assert failure.case == "f32[4] (sample 0), a part of f32[7] (sample 0)"
    assert failure.message.startswith("raised TypeError: too large")


def test_what_was_found_before_a_skip_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(target):
        yield Finding("a case", "it is wrong")
        raise Skipped("for the rest there is no time")

    monkeypatch.setitem(api.CHECKS, "numerics", Check(check, check))
    record = opwright.verify(gelu, reference=gelu, samples=samples, checks=["numerics"])
    assert [failure.message for failure in record.failures] == ["it is wrong"]


def test_quick_and_full_exclude_each_other() -> None:
    with pytest.raises(opwright.errors.CheckError, match="exclude"):
        opwright.verify(gelu, reference=gelu, samples=samples, quick=True, full=True)


def test_a_jump_that_rounding_decides_is_allowed_and_others_are_not() -> None:
    """A few elements lie so near to the edge that eight roundings at random leave one on its side."""

    def reference(values):
        z = values[0] * values[1] + values[2]
        return [torch.where(z > 1, 10 + z, z)]

    def compared(seed: int, edge: float) -> str:
        made = torch.Generator().manual_seed(seed)
        values = [torch.randn(2000, generator=made).bfloat16() for _ in range(3)]
        x, w, b = (value.float() for value in values)
        z = (x * w + b).bfloat16().float()
        (expected,) = expect(reference, values)
        return compare(torch.where(z > edge, 10 + z, z).bfloat16(), expected).message

    assert not any(compared(seed, 1.0) for seed in range(40))
    assert all(compared(seed, 1.05) for seed in range(3))
