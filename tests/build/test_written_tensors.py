"""Memory that operators write into: `out=` of any layout, tensors that share memory, sizes that 64 bits cannot hold."""

import itertools
import random
import subprocess

import pytest
import torch
from jaxtyping import Float, Int64
from kernel_head import HEAD
from torch import Tensor

from opwright import Mutates, operator
from opwright.backends.toolchain import GLUE_FLAGS, NATIVE
from opwright.build.glue import glue_text
from opwright.contract.memory import find_shared, overlaps_itself
from opwright.errors import KernelError, OutError, OverlapError, ShapeError

pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module")
def row_sums(ns):
    # Writes through pointers, as a kernel may that was promised contiguous outputs.
    @operator(f"{ns}::row_sums", cpu=HEAD + """
    template <typename T> void row_sums(View<const T, 2> x, View<T, 2> running, View<T, 1> total) {
      const int64_t n = x.size(1);
      for (int64_t i = 0; i < x.size(0); ++i) {
        T sum = 0;
        for (int64_t j = 0; j < n; ++j) running.data()[i * n + j] = sum += x(i, j);
        total.data()[i] = sum;
      }
    }
    OPWRIGHT_KERNEL(row_sums, float)""")  # fmt: skip
    def row_sums(x: Float[Tensor, "*batch n"]) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch"]]:
        return x.cumsum(-1), x.sum(-1)

    return row_sums


def call_out(entry, op, arguments, outs):
    if entry is op:
        return entry(*arguments, out=outs)
    return entry.out(*arguments, **{f"out{i}": out for i, out in enumerate(outs)})


# Each layout has room around it; the strided ones collapse into one dimension and do not, by turns.
LAYOUTS = {
    "dense": lambda: torch.full((3, 2, 4), 9.0),
    "columns before others": lambda: torch.full((3, 2, 9), 9.0)[..., :4],
    "columns after others": lambda: torch.full((3, 2, 9), 9.0)[..., 5:],
    "every other column": lambda: torch.full((3, 2, 8), 9.0)[..., ::2],
    "every other row": lambda: torch.full((3, 4, 4), 9.0)[:, ::2],
    "transposed": lambda: torch.full((4, 2, 3), 9.0).permute(2, 1, 0),
    "batch transposed": lambda: torch.full((2, 3, 4), 9.0).transpose(0, 1),
    "offset": lambda: torch.full((3 * 2 * 4 + 3,), 9.0)[3:].view(3, 2, 4),
    "as_strided": lambda: torch.full((100,), 9.0).as_strided((3, 2, 4), (3, 45, 10), 1),
}


# float64 has no kernel: the reference computes.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_out_is_written_and_nothing_else(row_sums, entries, layout, dtype):
    x = torch.randint(-4, 5, (3, 2, 4), generator=torch.Generator().manual_seed(0)).to(dtype)
    for entry in entries(row_sums):
        like = LAYOUTS[layout]()
        flat = torch.full((like.untyped_storage().nbytes() // 4,), 9.0, dtype=dtype)
        running = flat.as_strided(like.shape, like.stride(), like.storage_offset())
        total = torch.full((3, 5), 9.0, dtype=dtype)[:, 1:3]
        call_out(entry, row_sums, (x,), (running, total))
        assert torch.equal(running, x.cumsum(-1))
        assert torch.equal(total, x.sum(-1))
        around = torch.ones(flat.shape, dtype=torch.bool)
        around.as_strided(like.shape, like.stride(), like.storage_offset()).zero_()
        assert (flat[around] == 9).all()
        assert (total._base[:, [0, 3, 4]] == 9).all()


def test_overlapping_out_is_refused(row_sums, entries):
    x, total = torch.ones(2, 3), torch.zeros(2)
    for entry in entries(row_sums):
        for running in (torch.zeros(3).expand(2, 3), torch.zeros(5).as_strided((2, 3), (1, 1)),
                        torch.zeros(9).as_strided((2, 3), (2, 1))):  # fmt: skip
            with pytest.raises((OutError, RuntimeError), match="share memory"):
                call_out(entry, row_sums, (x,), (running, total))
            assert not running.any()
        # Two steps of unlike size that never meet.
        running = torch.zeros(9).as_strided((2, 3), (3, 2))
        call_out(entry, row_sums, (x,), (running, total))
        assert running.tolist() == [[1.0, 2.0, 3.0]] * 2


def test_tensors_of_out_that_share_memory_are_refused_by_every_entry(row_sums, entries):
    x = torch.ones(2, 3)
    for entry, dtype in itertools.product(entries(row_sums), (torch.float32, torch.float64)):
        both = torch.zeros(8, dtype=dtype)
        with pytest.raises((OutError, RuntimeError), match=r"(?s)two tensors of `?out=?`? share memory"):
            call_out(entry, row_sums, (x.to(dtype),), (both[:6].view(2, 3), both[5:7]))
        assert not both.any()


def test_out_of_another_shape_is_refused_by_every_entry(row_sums, entries):
    for entry, dtype in itertools.product(entries(row_sums), (torch.float32, torch.float64)):
        running = torch.zeros(4, 2, 3, dtype=dtype)  # the result would fit by broadcasting
        with pytest.raises((OutError, RuntimeError), match="shape"):
            call_out(entry, row_sums, (torch.ones(2, 3, dtype=dtype),), (running, torch.zeros(2, dtype=dtype)))
        assert not running.any()


@pytest.fixture(scope="module")
def twice(ns):
    @operator(f"{ns}::twice", cpu=HEAD + """
    template <typename T> void twice(View<const T, 2> x, View<T, 2> output) {
      for (int64_t i = 0; i < x.size(0); ++i)
        for (int64_t j = 0; j < x.size(1); ++j) output(i, j) = T(2) * x(i, j);
    }
    OPWRIGHT_KERNEL(twice, float)""")  # fmt: skip
    def twice(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return x * 2

    return twice


# PyTorch itself computes sums and products for up to 64 dimensions, and simple functions for any number. A buffer of
# the glue holds 64.
@pytest.mark.parametrize("ndim", [8, 25, 64, 65, 70, 100, 300])
def test_many_dimensions_and_more_than_a_kernel_can_have(twice, row_sums, entries, ndim):
    x = torch.arange(12.0).reshape(*[1] * (ndim - 3), 2, 2, 3)
    strided = torch.arange(24.0).reshape(*[1] * (ndim - 3), 2, 2, 6)[..., ::2].transpose(-2, -3)
    for entry in entries(twice):
        for given in (x, strided):
            assert torch.equal(entry(given), given + given)
    if ndim > 64:
        for out in (torch.empty_like(x), torch.empty(1)):
            with pytest.raises((KernelError, OutError, RuntimeError)):
                twice(x, out=out)
        with pytest.raises(RuntimeError, match="64 dims"):
            row_sums(x)


@pytest.fixture(scope="module")
def accumulate(ns):
    @operator(f"{ns}::accumulate", cpu=HEAD + """
    template <typename T> void accumulate(View<T, 1> sums, View<const T, 1> x, View<T, 1> last) {
      for (int64_t i = 0; i < x.size(0); ++i) sums(i) += (i ? sums(i - 1) : T(0)) + x(i);
      for (int64_t i = 0; i < x.size(0); ++i) last(i) = sums(x.size(0) - 1);
    }
    OPWRIGHT_KERNEL(accumulate, float)""")  # fmt: skip
    def accumulate(sums: Mutates[Float[Tensor, "n"]], x: Float[Tensor, "n"], last: Mutates[Float[Tensor, "n"]]) -> None:
        sums.copy_((sums + x).cumsum(0))
        last.fill_(sums[-1])

    return accumulate


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mutated_argument_that_shares_memory_is_refused(accumulate, entries, dtype):
    for entry in entries(accumulate):
        base, other = torch.arange(8.0, dtype=dtype), torch.zeros(4, dtype=dtype)
        for arguments in ((base[:4], base[:4], other), (base[:4], base[1:5], other), (base[1:5], base[:4], other),
                          (base[::2], base[1:5], other), (other, base[:4], other), (other, base[:4], base[3:7])):  # fmt: skip
            with pytest.raises((OverlapError, RuntimeError), match="share"):
                entry(*arguments)
        assert base.tolist() == list(range(8))
        assert not other.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neighbours_in_one_tensor_are_accepted(accumulate, entries, dtype):
    # Columns of one matrix lie between each other and have no element in common.
    for entry in entries(accumulate):
        base = torch.zeros(4, 3, dtype=dtype)
        base[:, 1] = torch.tensor([1.0, 2, 3, 4])
        entry(base[:, 0], base[:, 1], base[:, 2])
        assert base[:, 0].tolist() == [1.0, 3.0, 6.0, 10.0]
        assert base[:, 2].tolist() == [10.0] * 4


def test_shared_memory_is_named(accumulate):
    x = torch.ones(4)
    with pytest.raises(OverlapError, match=r"`sums` is written and shares memory with `x`[^`]*`?.*OPW109"):
        accumulate(x, x, torch.ones(4))


def bytes_of(tensor):
    """Returns the addresses of a tensor's elements, by the definition of strides."""
    sizes, steps = tensor.shape, tensor.stride()
    return [
        tensor.data_ptr() + tensor.element_size() * sum(i * s for i, s in zip(index, steps, strict=True))
        for index in itertools.product(*map(range, sizes))
    ]


def random_view(chance, base):
    ndim = chance.randint(0, 3)
    sizes = [chance.randint(0 if chance.random() < 0.05 else 1, 4) for _ in range(ndim)]
    steps = [chance.choice([0, 1, 1, 2, 3, 4, 5, 7, 8, 12, 16]) for _ in range(ndim)]
    reach = sum((n - 1) * s for n, s in zip(sizes, steps, strict=True) if n)
    return base.as_strided(sizes, steps, chance.randint(0, max(len(base) - 1 - max(reach, 0), 0)))


@pytest.mark.parametrize("seed", range(4))
def test_shared_memory_is_what_enumeration_says(seed):
    chance = random.Random(seed)
    base = torch.zeros(400)
    views = [base, base.view(torch.float64), base.view(torch.int16)]
    for _ in range(1500):
        one, other = random_view(chance, base), random_view(chance, chance.choice(views))
        addresses = bytes_of(one)
        assert overlaps_itself(one) == (len(set(addresses)) < len(addresses))
        first = {at + k for at in addresses for k in range(one.element_size())}
        second = {at + k for at in bytes_of(other) for k in range(other.element_size())}
        assert (find_shared([one, other], [True, False]) is not None) == bool(first & second)
        assert find_shared([one, other], [False, False]) is None


def test_kernels_and_references_refuse_the_same_views(accumulate):
    # The glue decides in C, calls of the reference in Python.
    chance = random.Random(0)
    base = torch.zeros(160)
    refused = 0
    for _ in range(400):
        size = chance.randint(1, 6)
        view, other = (base.as_strided((size,), (chance.randint(0, 6),), chance.randint(0, 40)) for _ in range(2))
        expected = overlaps_itself(view) or find_shared([view, other], [True, False]) is not None
        try:
            accumulate.operator.kernel(view, other, torch.zeros(size))
            is_refused = False
        except RuntimeError:
            is_refused = True
        assert is_refused == expected, (size, view.stride(), view.storage_offset(), other.stride())
        refused += is_refused
    assert 20 < refused < 380


@pytest.fixture(scope="module")
def sized(ns):
    @operator(f"{ns}::sized", cpu=HEAD + """
    template <typename T> void sized(View<const T, 1> x, int64_t k, int64_t s, View<T, 1> output, View<T, 1> rest) {
      for (int64_t i = 0; i < output.size(0); ++i) output(i) = x(i % x.size(0));
      for (int64_t i = 0; i < rest.size(0); ++i) rest(i) = 1;
    }
    OPWRIGHT_KERNEL(sized, float)""")  # fmt: skip
    def sized(x: Float[Tensor, "n"], k: int, s: int) -> tuple[Float[Tensor, "n*k"], Float[Tensor, "min(s//k,n)%7+1"]]:
        return x.repeat(k), x.new_ones(min(s // k, x.shape[0]) % 7 + 1)

    return sized


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sizes_that_exceed_64_bits_are_refused(sized, entries, dtype):
    x = torch.ones(4, dtype=dtype)
    for entry in entries(sized):
        assert [t.numel() for t in entry(x, 3, 2)] == [12, 1]
        assert [t.numel() for t in entry(x, 3, -1)] == [12, 7]  # rounded down, as in Python
        for k, s in ((2**62, 1), (2**62 + 1, 1), (2**61, 1), (2**63 - 1, 1), (-(2**63), 1), (-1, -(2**63)), (0, 1)):
            refusal = r"elements along an axis|has no size|divides by zero|would have size"
            with pytest.raises((ShapeError, RuntimeError), match=refusal):
                entry(x, k, s)


def test_more_elements_than_64_bits_count(ns):
    @operator(f"{ns}::huge", cpu=HEAD + """
    template <typename T> void huge(View<const T, 1> x, int64_t a, View<T, 3> output) { output(0, 0, 0) = x(0); }
    OPWRIGHT_KERNEL(huge, float)""")  # fmt: skip
    def huge(x: Float[Tensor, "n"], a: int) -> Float[Tensor, "a a a"]:
        return x[0].expand(a, a, a).clone()

    assert huge(torch.ones(1), 2).shape == (2, 2, 2)
    for a in (2**22, 2**31, 2**32, 2**62):
        with pytest.raises(KernelError, match="cannot allocate"):
            huge(torch.ones(1), a)


def test_empty_tensor_with_an_axis_that_exceeds_64_bits_is_refused(ns):
    # The axes of `*b` are one axis of the kernel's view, whose size was -2^63 or 0 for these shapes.
    @operator(f"{ns}::width", cpu=HEAD + """
    template <typename T> void width(View<const T, 2> x, View<int64_t, 1> output) { output(0) = x.size(1); }
    OPWRIGHT_KERNEL(width, float)""")  # fmt: skip
    def width(x: Float[Tensor, "n *b"]) -> Int64[Tensor, "1"]:
        return torch.tensor([x.shape[1:].numel()])

    assert width(torch.empty(0, 3, 4)).item() == 12
    assert width(torch.empty(0).as_strided((0, 3, 4), (1, 2**62, 2**62))).item() == 12
    for sizes in ((2**32, 2**31), (2**32, 2**32), (2**40, 2**40)):
        x = torch.empty(0).as_strided((0, *sizes), (1, sizes[1], 1))
        with pytest.raises(KernelError, match="more elements than 64 bits count"):
            width(x)


def test_strides_of_an_empty_tensor_do_not_reach_kernels(ns):
    # A kernel that adds `stride * size` to a pointer would overflow, although nothing is read.
    @operator(f"{ns}::strides", cpu=HEAD + """
    template <typename T> void strides(View<const T, 2> x, View<int64_t, 1> output) {
      output(0) = x.stride(0), output(1) = x.stride(1);
    }
    OPWRIGHT_KERNEL(strides, float)""")  # fmt: skip
    def strides(x: Float[Tensor, "n m"]) -> Int64[Tensor, "2"]:
        return torch.tensor(x.contiguous().stride())

    for sizes in ((0, 5), (5, 0), (0, 0)):
        for steps in ((2**62, 2**62), (0, 0), (1, 7)):
            x = torch.empty(0).as_strided(sizes, steps)
            assert strides(x).tolist() == [max(sizes[1], 1), 1]
    assert strides(torch.empty(3, 8)[:, ::2]).tolist() == [8, 2]


STEP = (
    HEAD
    + """
template <typename T> void step(View<T, 1> state, View<T, 1> output) {
  for (int64_t i = 0; i < state.size(0); ++i) state(i) += 1, output(i) = state(i) * 10;
}
OPWRIGHT_KERNEL(step, float)"""
)


@pytest.mark.parametrize("second", [STEP, None])
def test_out_is_checked_after_a_second_declaration_too(ns, second):
    """The first call after a swap, and each call without a kernel, took an `out` that overlaps."""

    def declare(kernel):
        @operator(f"{ns}::step", cpu=kernel)
        def step(state: Mutates[Float[Tensor, "n"]]) -> Float[Tensor, "n"]:
            state.add_(1)
            return state * 10

        return step

    declare(STEP)(torch.zeros(2))
    entry = getattr(torch.ops, ns).step
    for declaring in (True, False):
        if declaring:
            step = declare(second)
        memory = torch.zeros(4)
        with pytest.raises(RuntimeError, match="shares memory"):
            entry.out(memory[:2], out=memory[1:3])
        with pytest.raises(RuntimeError, match="share memory"):
            entry.out(torch.zeros(3), out=memory.as_strided((3,), (0,)))
        assert memory.tolist() == [0] * 4
        with pytest.raises(OutError):
            step(memory[:2], out=memory[1:3])
        assert entry.out(memory[:2], out=memory[2:]).tolist() == [10, 10]
        assert memory.tolist() == [1, 1, 10, 10]


@pytest.mark.parametrize("wrong", [0, 1])
def test_an_out_of_another_kind_is_refused(ns, row_sums, wrong):
    """It led the dispatcher to the same function again, without end."""
    entry, x = getattr(torch.ops, ns).row_sums, torch.ones(2, 3)
    for change in (lambda t: t.to("meta"), lambda t: t.to_sparse()):
        outs = [torch.zeros(2, 3), torch.zeros(2)]
        outs[wrong] = change(outs[wrong])
        with pytest.raises((OutError, RuntimeError)) as raised:
            entry.out(x, out0=outs[0], out1=outs[1])
        assert not isinstance(raised.value, RecursionError)
        with pytest.raises((OutError, RuntimeError)) as raised:
            row_sums(x, out=tuple(outs))
        assert not isinstance(raised.value, RecursionError)


def test_compiled_calls_hold_out_to_the_result(row_sums):
    """They broadcast into a larger `out`, and converted."""
    x = torch.ones(2, 3)
    compiled = torch.compile(lambda x, *outs: row_sums(x, out=outs), backend="aot_eager")
    for wrong in (torch.zeros(4, 2, 3), torch.zeros(2, 3, dtype=torch.int32)):
        with pytest.raises(OutError, match="must have the shape, dtype and device"):
            compiled(x, wrong, torch.zeros(2))
        assert not wrong.any()
    running, whole = compiled(x, torch.zeros(3, 2).t(), torch.zeros(4)[::2])
    assert (running.tolist(), whole.tolist()) == ([[1, 2, 3]] * 2, [3, 3])


def test_glue_compiles_without_warnings(sized, tmp_path):
    (tmp_path / "unit.c").write_text(glue_text([sized.operator.declaration], ["cpu"]))
    for source in (
        tmp_path / "unit.c",
        *(NATIVE / "src" / name for name in ("glue.c", "overlap.c", "direct.c", "probe.c", "level.c")),
    ):
        command = ["cc", *GLUE_FLAGS, "-Werror", "-I", str(NATIVE / "src"), "-c", str(source), "-o", "/dev/null"]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
