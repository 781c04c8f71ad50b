"""Any callable: what may be given as a candidate, with which arguments, and what is found."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn

import opwright
from opwright.errors import CheckError, DeclarationError
from opwright.verify.callables import flatten
from opwright.verify.formulas import _attention, oracle_formulas
from opwright.verify.target import make_target


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def rows() -> list[tuple[Tensor, ...]]:
    """As public harnesses draw them: in [0, 1)."""
    return [(torch.rand(16, 33),), (torch.rand(4, 100),)]


def failed(record) -> set[str]:
    return {failure.check for failure in record.failures}


def wide_rows():
    """Negative and large numbers too, in two dtypes, and not contiguous."""
    for dtype in (torch.float32, torch.bfloat16):
        yield (torch.randn(17, 33).to(dtype),)
        yield (torch.randn(4, 1001).mul(5).to(dtype)[:, ::2],)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


class WrongBackward(Square):
    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 2.001 * grad * ctx.saved_tensors[0]


class Scaler:
    def __init__(self, by: float) -> None:
        self.by = by

    def scale(self, x: Tensor) -> Tensor:
        return x * self.by


@dataclasses.dataclass
class Pair:
    whole: Tensor
    half: Tensor | None


def grouped_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two heads of the query for each of the key."""
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def runs(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `torch.unique_consecutive`, which has no gradient."""
    starts = torch.cat([x.new_ones(min(len(x), 1)) > 0, x[1:] != x[:-1]]).nonzero()[:, 0]
    return x[starts], torch.diff(starts, append=torch.tensor([len(x)]))


def with_noise(x: Tensor, generator: torch.Generator) -> Tensor:
    return x + torch.randn(x.shape, generator=generator).to(x.dtype)


RIGHT = {
    "heads in groups": (
        grouped_attention,
        functools.partial(F.scaled_dot_product_attention, enable_gqa=True),
        [(torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8))],
    ),
    "a reference without a gradient": (
        runs,
        functools.partial(torch.unique_consecutive, return_counts=True),
        [(torch.randint(3, (50,)).double(),)],
    ),
    "a generator": (with_noise, with_noise, [(torch.rand(5, 17), torch.Generator().manual_seed(3))]),
    "a function of PyTorch": (F.gelu, F.gelu, rows),
    "torch.ops": (torch.ops.aten.silu, F.silu, rows),
    "an overload": (torch.ops.aten.silu.default, F.silu, rows),
    "functools.partial": (functools.partial(F.softmax, dim=-1), lambda x: x.softmax(-1), rows),
    "a bound method": (Scaler(3.0).scale, lambda x: x * 3, rows),
    "torch.autograd.Function": (Square, lambda x: x * x, rows),
    "a compiled function": (torch.compile(lambda x: x * 2 + 1, backend="eager"), lambda x: x * 2 + 1, rows),
    "a generator of samples": (torch.exp, torch.exp, lambda: iter(rows())),
    "exp": (torch.exp, torch.exp, wide_rows),
    "softmax": (lambda x: F.softmax(x, -1), lambda x: torch.exp(x - x.logsumexp(-1, keepdim=True)), wide_rows),
    "layer norm": (
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt(),
        wide_rows,
    ),
    "sum": (lambda x: x.sum(0), lambda x: x.sum(0), wide_rows),
    "matmul": (lambda x: x @ x.mT, lambda x: torch.einsum("ij,kj->ik", x, x), wide_rows),
    "sigmoid": (torch.sigmoid, lambda x: 1 / (1 + torch.exp(-x)), wide_rows),
    "integers": (lambda x: x.cumsum(0), lambda x: x.cumsum(0), lambda: [(torch.arange(9),)]),
    "booleans": (torch.logical_not, lambda x: ~x, lambda: [(torch.rand(9) > 0.5,)]),
    "complex numbers": (torch.fft.fft, torch.fft.fft, lambda: [(torch.randn(5, 8, dtype=torch.complex64),)]),
    "tensors in lists": (
        lambda tensors, *, scale: {"sum": sum(tensors) * scale["by"], "nothing": None},
        lambda tensors, *, scale: {"nothing": None, "sum": sum(tensors) * scale["by"]},
        lambda: [(([torch.rand(3, 5), torch.rand(3, 5)],), {"scale": {"by": torch.rand(5)}})],
    ),
    "a dataclass": (lambda x: Pair(x * 2, None), lambda x: Pair(x + x, None), rows),
    "several outputs": (lambda x: torch.sort(x, stable=True), lambda x: torch.sort(x, stable=True), rows),
    "a number": (lambda x: x.numel(), lambda x: x.numel(), rows),
    "in place, as its reference": (lambda x: x.mul_(2), lambda x: x.mul_(2), rows),
    "a view, as its reference": (lambda x: x.view(-1), lambda x: x.reshape(-1), lambda: [(torch.rand(4, 6),)]),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_what_is_right_passes(kind: str) -> None:
    candidate, reference, samples = RIGHT[kind]
    samples = samples() if kind == "a generator of samples" else samples
    record = opwright.verify(candidate, reference=reference, samples=samples, expand="view" not in kind)
    assert record.passed, record.failures
    assert {"numerics", "determinism"} <= {c.name for c in record.checks if c.outcome == "passed"}


def polynomial(x: Tensor) -> Tensor:
    """Near GELU on [0, 1), far from it elsewhere."""
    return 0.0002 + x * (0.4952 + x * (0.4276 + x * (-0.0447 + x * -0.0367)))


class PointerCache:
    def __init__(self) -> None:
        self.seen: dict[tuple, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        return self.seen.setdefault((x.data_ptr(), x.shape), F.gelu(x))


class OneBuffer:
    """Writes to memory that all its calls share: what one thread returns another overwrites."""

    def __init__(self) -> None:
        self.buffer = torch.empty(16 * 33 * 100)

    def __call__(self, x: Tensor) -> Tensor:
        out = self.buffer[: x.numel()].view(x.shape)
        out.copy_(x)
        for _ in range(200):
            out.add_(0.0)
        return F.gelu(out)


def last_row_unwritten(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:-1] = F.gelu(x[:-1])
    return out


def contiguous_only(x: Tensor) -> Tensor:
    return F.gelu(x.as_strided(x.shape, (x.shape[1], 1), 0))


WRONG = {
    "in-range polynomial": (polynomial, "numerics"),
    "tanh form": (lambda x: F.gelu(x, approximate="tanh"), "numerics"),
    "negative numbers": (lambda x: torch.where(x < 0, 0, F.gelu(x)), "numerics"),
    "large numbers": (lambda x: torch.where(x.abs() > 50, 0, F.gelu(x)), "numerics"),
    "strides ignored": (contiguous_only, "numerics"),
    "mutates its input": (lambda x: F.gelu(x.mul_(1.0).add_(1e-7)), "numerics"),
    "another dtype": (lambda x: F.gelu(x).double(), "numerics"),
    "another shape": (lambda x: F.gelu(x)[:1], "numerics"),
    "one output more": (lambda x: (F.gelu(x), x + 1), "numerics"),
    "raises": (lambda x: 1 / 0, "numerics"),
    "drawn at random": (lambda x: F.gelu(x) + 1e-3 * torch.rand_like(x), "determinism"),
    "cached by pointer": (PointerCache(), "determinism"),
    "one buffer for all threads": (OneBuffer(), "threads"),
    "a row unwritten": (last_row_unwritten, "outputs written"),
    "no gradient": (lambda x: F.gelu(x.detach()), "gradient numerics"),
    "fails to compile": (lambda x: F.gelu(x) if not torch.compiler.is_compiling() else x, "compile"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_found(kind: str) -> None:
    candidate, check = WRONG[kind]
    samples = [(x.requires_grad_(kind == "no gradient"),) for (x,) in rows()]
    record = opwright.verify(candidate, reference=F.gelu, samples=samples, checks=[check])
    assert failed(record) == {check}


def test_axes_that_are_not_one_in_memory_are_found() -> None:
    def append(cache: Tensor, new: Tensor, length: int) -> Tensor:
        cache[:, :, length : length + new.shape[2]] = new
        return cache.clone()

    def append_to_heads(cache: Tensor, new: Tensor, length: int) -> Tensor:
        heads = cache.reshape(-1, *cache.shape[2:])  # a copy, of a part of a cache
        heads[:, length : length + new.shape[2]] = new.reshape(-1, *new.shape[2:])
        return cache.clone()

    samples = [(torch.randn(2, 3, 8, 4), torch.randn(2, 3, 2, 4), 3)]
    assert failed(opwright.verify(append_to_heads, reference=append, samples=samples, checks=["numerics"]))
    assert opwright.verify(append, reference=append, samples=samples, checks=["numerics"]).passed


def test_axes_of_equal_size_in_a_sample_are_tried_apart() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, last: int) -> Tensor:
        scores = q @ k.mT
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool)
        return scores.masked_fill(ones.triu(1 + last * (k.shape[1] - q.shape[1])), -math.inf).softmax(-1) @ v

    def argmax_2d(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        at = x.flatten(1).argmax(-1)
        return at // x.shape[axis], at % x.shape[axis]

    for function, wrong, samples in (
        (functools.partial(attend, last=1), functools.partial(attend, last=0), [(torch.randn(2, 7, 4),) * 3]),
        (functools.partial(argmax_2d, axis=2), functools.partial(argmax_2d, axis=1), [(torch.randn(3, 6, 6),)]),
    ):
        verify = functools.partial(opwright.verify, reference=function, samples=samples, checks=["numerics"])
        assert verify(function).passed
        assert failed(verify(wrong)) == {"numerics"}
        assert verify(wrong, expand=False).passed


def test_what_a_reference_refuses_when_it_is_rounded_is_undecided() -> None:
    def quantile(x: Tensor) -> Tensor:
        return torch.quantile(x, 0.48, -1)

    def less_precise(x: Tensor) -> Tensor:
        return quantile(x) * (1 + 200 * torch.finfo(x.dtype).eps)

    x = torch.randn(9, 67)
    x[0, 3] = math.nan  # PyTorch takes the last of a row that holds NaN: a rounded rank is behind the end
    for candidate, outcome in (
        (quantile, "passed"),
        (less_precise, "undecided"),
        (lambda x: x.median(-1)[0], "failed"),
    ):
        record = opwright.verify(candidate, reference=quantile, samples=[(x,)], expand=False, checks=["numerics"])
        assert [check.outcome for check in record.checks] == [outcome], record.failures


def convolved(x: Tensor, taps: Tensor) -> Tensor:
    """The first results of a convolution, each a sum of products."""
    return F.conv1d(x[:, None], taps.flip(-1)[None, None], padding=len(taps) - 1)[:, 0, : x.shape[-1]]


def convolved_by_fft(x: Tensor, taps: Tensor) -> Tensor:
    n = x.shape[-1] + len(taps) - 1
    return torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(taps, n), n)[:, : x.shape[-1]]


def convolved_by_fft_without_padding(x: Tensor, taps: Tensor) -> Tensor:
    n = x.shape[-1]
    return torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(taps, n), n)


def test_an_fft_is_right_as_reference_and_with_its_precision_as_candidate() -> None:
    samples = [(torch.randn(4, 300), torch.randn(64)), (torch.randn(2, 90).double(), torch.randn(40).double())]
    verify = functools.partial(opwright.verify, samples=samples, checks=["numerics", "fresh data"])
    assert verify(convolved, reference=convolved_by_fft).passed
    of_largest = opwright.Factor(2, "an FFT", of_largest=True)
    record = verify(convolved_by_fft, reference=convolved, precision=of_largest)
    assert record.passed, record.failures
    assert any("an FFT" in note for note in record.notes)
    assert not verify(convolved_by_fft, reference=convolved, precision=opwright.Factor(2, "an FFT")).passed
    assert not verify(convolved_by_fft_without_padding, reference=convolved, precision=of_largest).passed


def test_the_precision_of_an_operator_is_declared_with_it() -> None:
    from opwright_ops import bias_gelu

    with pytest.raises(CheckError, match="an operator declares its own"):
        opwright.verify(bias_gelu, precision="tf32")
    with pytest.raises(DeclarationError, match="unknown precision"):
        opwright.verify(F.gelu, reference=F.gelu, samples=rows(), precision="bf16")


def test_graph_breaks_of_a_candidate_are_not_logged(capfd: pytest.CaptureFixture[str]) -> None:
    def relu(x: Tensor) -> Tensor:
        return torch.relu(x) if bool((x < 0).any()) else x.clone()

    assert opwright.verify(relu, reference=torch.relu, samples=rows(), checks=["compile"]).passed
    assert "Graph break" not in capfd.readouterr().err


def test_a_callable_needs_a_reference() -> None:
    with pytest.raises(CheckError, match="samples"):
        opwright.verify(F.gelu)


@pytest.mark.parametrize("kind", ["negative numbers", "large numbers", "strides ignored"])
def test_the_samples_alone_do_not_show_it(kind: str) -> None:
    """That is what the derived inputs are for."""
    candidate, _ = WRONG[kind]
    assert opwright.verify(candidate, reference=F.gelu, samples=rows, expand=False, checks=["numerics"]).passed


def test_the_polynomial_passes_where_harnesses_look() -> None:
    """On [0, 1), with a tolerance of 1e-2 as for 16-bit types."""
    for (x,) in rows():
        torch.testing.assert_close(polynomial(x), F.gelu(x), atol=1e-2, rtol=1e-2)
    assert float((polynomial(torch.tensor(-3.0)) - F.gelu(torch.tensor(-3.0))).abs()) > 0.1


def test_a_reference_that_cancels_does_not_accuse_who_does_not() -> None:
    """F.gelu is 1 + erf: in float64 it is off by 2 % at -8, and 0 at -9, where erfc still has all its digits."""
    samples, checks = [(torch.linspace(-12, 5, 400),)], ["numerics", "gradient numerics", "compile"]
    stable = {
        "none": lambda x: 0.5 * x * torch.erfc(-x / math.sqrt(2)),
        "tanh": lambda x: x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    }
    for form, candidate in stable.items():
        reference = functools.partial(F.gelu, approximate=form)
        record = opwright.verify(candidate, reference=reference, samples=samples, expand=False, checks=checks)
        assert record.passed, (form, record.failures)


def test_a_wrong_backward() -> None:
    options = {"reference": lambda x: x * x, "samples": rows, "checks": ["gradient numerics"]}
    assert failed(opwright.verify(WrongBackward, **options)) == {"gradient numerics"}


# --- derived inputs --------------------------------------------------------------------------------------------


def cases_of(reference, samples, **options) -> list:
    return make_target(reference, reference, samples, **options).cases()


def test_samples_come_first_as_they_are() -> None:
    given = rows()
    cases = cases_of(F.gelu, given)
    assert [case.label for case in cases[:2]] == ["sample 0", "sample 1"]
    assert all(case.values[0] is x for case, (x,) in zip(cases, given, strict=False))
    assert len(cases) > 15
    assert len(cases_of(F.gelu, given, expand=False)) == 2


def test_derived_inputs_stay_where_the_reference_is_defined() -> None:
    """No negative number for a logarithm, no probability above 1; whole numbers are never changed."""
    for case in cases_of(torch.log, rows):
        assert bool((case.values[0] > 0).all()) or case.label.endswith(("infinities and NaN", "one NaN"))
    probabilities = [(torch.rand(7, 5), torch.rand(7, 5))]
    for case in cases_of(F.binary_cross_entropy, probabilities):
        assert float(case.values[0].min()) >= 0
        assert float(case.values[0].max()) <= 1
    mask = torch.tensor([0.0, 1.0, 1.0, 0.0])
    for case in cases_of(lambda x, mask, index: (x * mask)[index], [(torch.rand(4), mask, torch.arange(3))]):
        assert set(case.values[1].tolist()) <= {0.0, 1.0}
        assert case.values[2].tolist() == [0, 1, 2]


def test_layouts_hold_the_same_numbers() -> None:
    (x,) = rows()[0]
    for case in cases_of(torch.exp, [(x,)]):
        if case.label in ("sample 0, transposed", "sample 0, sliced", "sample 0, offset"):
            assert torch.equal(case.values[0], x)
            assert not case.values[0].is_contiguous() or case.values[0].storage_offset()


# --- modules ---------------------------------------------------------------------------------------------------


class Affine(nn.Module):
    def __init__(self, factor: float = 1.0, name: str = "weight") -> None:
        super().__init__()
        self.factor, self.name = factor, name
        setattr(self, name, nn.Parameter(torch.randn(33)))

    def forward(self, x: Tensor) -> Tensor:
        return x * getattr(self, self.name) * self.factor


def test_modules_share_the_parameters_of_the_reference() -> None:
    candidate, reference = Affine(), Affine()
    before = candidate.weight.clone()
    samples = rows()[:1]
    record = opwright.verify(candidate, reference=reference, samples=samples)
    assert record.passed, record.failures
    assert torch.equal(candidate.weight, before)  # a copy was judged
    options = {"reference": reference, "samples": samples, "checks": ["numerics"]}
    assert failed(opwright.verify(Affine(1.001), **options)) == {"numerics"}


def test_a_part_of_a_failing_case_fails_in_the_same_way() -> None:
    """Of one number the unbiased variance is NaN: a smaller case, and another mistake."""

    def unbiased(x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()

    options = {"reference": lambda x: F.layer_norm(x, x.shape[-1:]), "samples": [(torch.randn(8, 64),)]}
    (failure,) = opwright.verify(unbiased, checks=["numerics"], **options).failures
    assert "a part of" in failure.case
    assert "nan" not in failure.message


def test_a_call_that_writes_into_nothing_is_not_a_finding() -> None:
    """Versions count up though nothing is written, and the message spoke of an argument that was restored."""

    def add(x: Tensor, b: Tensor) -> Tensor:
        return x + b if x.numel() else b.expand_as(x).add_(x).clone()

    samples = [(torch.randn(4, 9), torch.randn(9)), (torch.randn(4, 0), torch.randn(0))]
    record = opwright.verify(add, reference=torch.add, samples=samples, checks=["numerics"])
    assert record.passed, record.failures


def test_right_results_of_a_callable_need_no_runs_that_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight for each were most of the time: of 1,024 by 1,024 distances they took half a minute a check."""
    runs = []
    monkeypatch.setattr("opwright.verify.oracle.round_at_random", lambda *args: runs.append(args))
    checks = ["determinism", "gradient numerics", "second gradients", "gradient layouts"]
    samples = [(torch.rand(16, 33), torch.rand(16, 33))]
    record = opwright.verify(lambda x, y: x.mul(y), reference=torch.mul, samples=samples, checks=checks, isolated=False)
    assert [c.outcome for c in record.checks] == ["passed"] * 4
    assert not runs


def test_a_gradient_of_a_parameter_is_compared() -> None:
    class NoGradient(Affine):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight.detach()

    options = {"reference": Affine(), "samples": rows()[:1], "checks": ["gradient numerics"]}
    assert failed(opwright.verify(NoGradient(), **options)) == {"gradient numerics"}


@pytest.mark.parametrize(("candidate", "text"), [
    (lambda: Affine(name="scale"), "`weight` is missing; `scale` is not the reference's"),
    (lambda: nn.ParameterDict(), "`weight` is missing"),
])  # fmt: skip
def test_other_parameters_are_told(candidate, text: str) -> None:
    made = candidate()
    made.forward = getattr(made, "forward", None) if isinstance(made, Affine) else (lambda x: x)
    record = opwright.verify(made, reference=Affine(), samples=rows()[:1], checks=["numerics"])
    assert text in record.failures[0].message


def test_the_mode_of_a_module_is_kept_and_its_buffers_are_compared() -> None:
    class Frozen(nn.BatchNorm1d):
        """Normalizes as in training, and leaves its statistics alone."""

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, None, None, self.weight, self.bias, training=True)

    samples = [(torch.randn(64, 33),)]
    options = {"samples": samples, "checks": ["numerics"], "expand": False}
    for candidate, reference, passes in (
        (nn.BatchNorm1d(33).eval(), nn.BatchNorm1d(33).eval(), True),
        (nn.BatchNorm1d(33), nn.BatchNorm1d(33).eval(), False),
        (Frozen(33), nn.BatchNorm1d(33), False),
    ):
        assert opwright.verify(candidate, reference=reference, **options).passed is passes


def test_a_module_with_integers_only_is_compared_in_float64() -> None:
    """Its parameters are what there is to compute with."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(10, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))

    samples = [(torch.arange(8),)]
    assert opwright.verify(make(), reference=make(), samples=samples, checks=["numerics", "gradient numerics"]).passed
    target = make_target(make(), make(), samples)
    case = target.cases()[0]
    doubled = [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in case.values]
    assert target.reference(doubled)[0].dtype == torch.float64


# --- results ---------------------------------------------------------------------------------------------------


def test_results_are_flattened_by_key() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert flatten({"y": [a, (b, None)], "x": Pair(c, None)}) == (
        [c, None, a, b, None],
        ["['x'].whole", "['x'].half", "['y']", "['y']", "['y']"],
        ["['x'].whole", "['x'].half", "['y'][0]", "['y'][1][0]", "['y'][1][1]"],
    )
    outputs, _, _ = flatten((True, 3, math.pi, "text"))
    assert [o.dtype for o in outputs] == [torch.bool, torch.int64, torch.float32]


def test_other_keys_are_found() -> None:
    record = opwright.verify(
        lambda x: {"b": x}, reference=lambda x: {"a": x.clone()}, samples=rows, checks=["numerics"]
    )
    assert "returned 1 output under ['b'], expected 1 output under ['a']" in record.failures[0].message


# --- the oracle's own formulas ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_gelu_in_the_oracle_has_all_its_digits(form: str) -> None:
    """Against 50 digits, where PyTorch's own float64 has none left."""
    mpmath = pytest.importorskip("mpmath")

    def exact(v):
        if form == "none":
            return v / 2 * mpmath.erfc(-v / mpmath.sqrt(2))
        return v / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (v + mpmath.mpf("0.044715") * v**3)))

    points = [-9.0, -8.0, -5.0, -1.0, -1e-3, 0.5, 3.0]
    with mpmath.workdps(120):
        values = torch.tensor([float(exact(mpmath.mpf(v))) for v in points], dtype=torch.float64)
        slopes = torch.tensor([float(mpmath.diff(exact, mpmath.mpf(v))) for v in points], dtype=torch.float64)
    x = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    with oracle_formulas():
        found = F.gelu(x, approximate=form)
        found.sum().backward()
    torch.testing.assert_close(found.detach(), values, rtol=1e-12, atol=0)
    torch.testing.assert_close(x.grad, slopes, rtol=1e-12, atol=0)
    assert not torch.allclose(F.gelu(x.detach(), approximate=form), values, rtol=1e-3, atol=0)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.ones(7, 9)}, {"scale": 0.3}])
def test_attention_step_by_step_is_attention(options: dict) -> None:
    query, key, value = (torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (7, 9, 9))
    options = {k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()}
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for found, wanted in zip(
        _attention(query, key, value, **options), operator(query, key, value, **options), strict=True
    ):
        torch.testing.assert_close(found, wanted)


class SparseBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(3).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.edges @ x


UNDENSE = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "complex and sparse": lambda: torch.eye(3, dtype=torch.complex64).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
    "mkldnn": lambda: torch.eye(3).to_mkldnn(),
    "meta": lambda: torch.empty(3, 3, device="meta"),
}


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of layouts that are in beta or deprecated
@pytest.mark.parametrize("kind", UNDENSE)
def test_a_sample_without_strides_or_data_is_refused_with_what_to_give(kind: str, snapshot: SnapshotAssertion) -> None:
    samples = [([UNDENSE[kind]()],)]
    for check in (opwright.verify, opwright.bench):
        with pytest.raises(CheckError) as caught:
            check(lambda parts: parts[0] * 2, reference=lambda parts: parts[0] * 2, samples=samples)
        assert str(caught.value) == snapshot(name=kind)


def test_a_module_with_a_sparse_buffer_is_refused_with_what_to_give(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(CheckError) as caught:
        opwright.verify(SparseBuffer(), reference=SparseBuffer(), samples=[(torch.eye(3),)])
    assert str(caught.value) == snapshot


def test_the_advice_for_a_sparse_sample_works() -> None:
    def scale(x: Tensor, factor: float) -> Tensor:
        return x.to_sparse() * factor

    for factor, passes in ((2.0, True), (2.01, False)):
        record = opwright.verify(
            lambda x, factor=factor: scale(x, factor),
            reference=lambda x: scale(x, 2.0),
            samples=[(torch.eye(3),)],
            checks=["numerics"],
        )
        assert record.passed == passes, record.failures
