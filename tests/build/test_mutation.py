"""Operators whose kernels write into their arguments."""

import pytest
import torch
from jaxtyping import Float, Int
from kernel_head import HEAD
from torch import Tensor

from opwright import Mutates, operator
from opwright.errors import KernelError, NotDifferentiableError

pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module")
def bump(ns):
    @operator(f"{ns}::bump", cpu=HEAD + """
    template <typename T> void bump(View<T, 2> x, View<const T, 1> by) {
      for (int64_t i = 0; i < x.size(0); ++i)
        for (int64_t j = 0; j < x.size(1); ++j) x(i, j) += by(j);
    }
    OPWRIGHT_KERNEL(bump, float)""")  # fmt: skip
    def bump(x: Mutates[Float[Tensor, "*batch n"]], by: Float[Tensor, "n"]) -> None:
        x += by

    return bump


# float64 has no kernel: the reference writes.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_written_and_noticed(bump, entries, count_reference, dtype):
    for entry in entries(bump):
        x, by = torch.zeros(2, 3, dtype=dtype), torch.tensor([1, 2, 3], dtype=dtype)
        version, by_version = x._version, by._version
        with count_reference(bump) as runs:
            assert entry(x, by) is None
        assert bool(runs) == (dtype == torch.float64)
        assert x.tolist() == [[1.0, 2.0, 3.0]] * 2
        assert x._version > version
        assert by._version == by_version


# One view that the kernel can write through directly, two that it cannot because *batch does not collapse.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("view", [
    lambda base: base[0, 0],
    lambda base: base[:, :, 1:],
    lambda base: base.transpose(0, 1)[..., ::2],
], ids=["offset", "sliced", "transposed"])  # fmt: skip
def test_written_through_views(bump, entries, dtype, view):
    for entry in entries(bump):
        base = torch.zeros(2, 3, 4, 5, dtype=dtype)
        target = view(base)
        version = base._version
        entry(target, torch.ones(target.shape[-1], dtype=dtype))
        assert target.unique().tolist() == [1.0]
        assert base.sum() == target.numel()
        assert base._version > version


def test_autograd_notices_the_change(bump, entries):
    for entry in entries(bump):
        weight = torch.ones(2, 3, requires_grad=True)
        x = torch.ones(2, 3)
        loss = (weight * x).sum()
        entry(x, torch.ones(3))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_gradients_are_refused(bump, entries):
    for entry in entries(bump):
        x = torch.zeros(2, 3)
        with pytest.raises(NotDifferentiableError, match="no_grad"):
            entry(x, torch.ones(3, requires_grad=True))
        assert x.sum() == 0
        # As the hint says. A leaf that wants a gradient is written as PyTorch's own in-place operators do.
        parameter = torch.nn.Parameter(torch.zeros(2, 3))
        with torch.no_grad():
            entry(parameter, torch.ones(3, requires_grad=True))
        assert parameter.sum() == 6


def test_mutation_in_inference_mode(bump, entries):
    for entry in entries(bump):
        with torch.inference_mode():
            x = torch.zeros(1, 3)
            entry(x, torch.ones(3))
        assert x.tolist() == [[1.0] * 3]


@pytest.fixture(scope="module")
def momentum(ns):
    # Results and writes, an optional and a list of written tensors, a converted dtype.
    @operator(f"{ns}::momentum", cpu=HEAD + """
    template <typename T>
    void momentum(View<const T, 1> g, View<T, 1> buffer, View<T, 1> peak, List<View<T, 1>> copies,
                  View<int64_t, 1> steps, double decay, View<T, 0> norm) {
      T sum = 0;
      for (int64_t i = 0; i < g.size(0); ++i) {
        buffer(i) = T(decay) * buffer(i) + g(i);
        sum += buffer(i) * buffer(i);
        if (peak.defined() && buffer(i) > peak(i)) peak(i) = buffer(i);
        for (auto& copy : copies) copy(i) = buffer(i);
      }
      steps(0) += 1;
      norm() = sum;
    }
    OPWRIGHT_KERNEL(momentum, float)""")  # fmt: skip
    def momentum(
        g: Float[Tensor, "n"],
        buffer: Mutates[Float[Tensor, "n"]],
        peak: Mutates[Float[Tensor, "n"]] | None,
        copies: Mutates[list[Float[Tensor, "n"]]],
        steps: Mutates[Int[Tensor, "1"]],
        *,
        decay: float = 0.5,
    ) -> Float[Tensor, ""]:
        buffer.mul_(decay).add_(g)
        if peak is not None:
            torch.maximum(peak, buffer, out=peak)
        for copy in copies:
            copy.copy_(buffer)
        steps += 1
        return (buffer * buffer).sum()

    return momentum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("has_peak", [True, False])
def test_results_and_writes(momentum, entries, dtype, steps_dtype, has_peak):
    for entry in entries(momentum):
        g = torch.tensor([1.0, -2.0], dtype=dtype)
        buffer = torch.tensor([[2.0, 9.0], [4.0, 9.0]], dtype=dtype)[:, 0]
        peak = torch.zeros(2, dtype=dtype) if has_peak else None
        copies = [torch.full((2,), 7.0, dtype=dtype) for _ in range(2)]
        steps = torch.tensor([41], dtype=steps_dtype)
        written = [buffer, *copies, steps, *([peak] if has_peak else [])]
        versions = [t._version for t in written]
        norm = entry(g, buffer, peak, copies, steps)
        assert norm.dtype == dtype
        assert norm == 4.0
        assert buffer.tolist() == [2.0, 0.0]
        assert [c.tolist() for c in copies] == [[2.0, 0.0]] * 2
        assert steps.tolist() == [42]
        assert steps.dtype == steps_dtype
        assert not has_peak or peak.tolist() == [2.0, 0.0]
        assert all(t._version > v for t, v in zip(written, versions, strict=True))


def test_mutation_in_a_compiled_function(bump):
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def twice(x, by):
        y = x * 1
        bump(y, by)
        bump(x, by)
        return y + x

    x = torch.zeros(2, 3)
    assert twice(x, torch.ones(3)).tolist() == [[2.0] * 3] * 2
    assert x.tolist() == [[1.0] * 3] * 2
    x = torch.zeros(4, 5)[:, 1:]
    assert twice(x, torch.ones(4)).unique().tolist() == [2.0]
    assert x.unique().tolist() == [1.0]


def test_mutation_under_vmap(bump, entries):
    for entry in entries(bump):
        x, by = torch.zeros(4, 2, 3), torch.arange(12.0).reshape(4, 3)
        torch.vmap(lambda x, by, entry=entry: (entry(x, by), x)[1])(x, by)
        assert torch.equal(x, by[:, None].expand(4, 2, 3))


def test_write_into_an_expanded_tensor_is_refused(bump, entries):
    # A written tensor whose elements share memory cannot be written element by element.
    for entry in entries(bump):
        x = torch.zeros(1, 3).expand(2, 3)
        with pytest.raises(Exception, match=r"(?i)memory|overlap|expand"):
            entry(x, torch.ones(3))


def test_refused_call_leaves_the_tensors_of_a_list(ns):
    """The reference is asked whether it raises an IndexError, on copies."""

    @operator(f"{ns}::add_to_all", cpu=HEAD + """
    template <typename T>
    void add_to_all(List<View<T, 1>> tensors, int64_t by) {
      opwright::check(by >= 0, "`by` must not be negative");
      for (auto& tensor : tensors) tensor(0) += T(by);
    }
    OPWRIGHT_KERNEL(add_to_all, float)""")  # fmt: skip
    def add_to_all(tensors: Mutates[list[Float[Tensor, "n"]]], by: int) -> None:
        for tensor in tensors:
            tensor += by

    tensors = [torch.ones(1), torch.ones(1)]
    with pytest.raises(KernelError, match="`by` must not be negative"):
        add_to_all(tensors, -1)
    assert [t.item() for t in tensors] == [1.0, 1.0]


def test_autocast_follows_a_list_that_is_written(ns):
    @operator(f"{ns}::add_each", autocast="lower")
    def add_each(tensors: Mutates[list[Float[Tensor, "n"]]], by: Float[Tensor, "n"]) -> None:
        for tensor in tensors:
            tensor += by

    tensors = [torch.ones(2, dtype=torch.float64)]
    with torch.autocast("cpu", torch.bfloat16):
        add_each(tensors, torch.ones(2))
    assert tensors[0].tolist() == [2.0, 2.0]


def test_an_argument_named_result_is_known_to_be_written(ns):
    """Autograd did not notice the write, and the gradient of an earlier call was wrong."""

    @operator(f"{ns}::add_to", cpu=HEAD + """
    template <typename T> void add_to(View<T, 1> result, View<const T, 1> y) {
      for (int64_t i = 0; i < y.size(0); ++i) result(i) += y(i);
    }
    OPWRIGHT_KERNEL(add_to, float)""")  # fmt: skip
    def add_to(result: Mutates[Float[Tensor, "n"]], y: Float[Tensor, "n"]) -> None:
        result += y

    x, w = torch.ones(2), torch.ones(2, requires_grad=True)
    loss = (w * x).sum()
    add_to(x, torch.ones(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
