"""Operators with kernels in PyTorch's systems: compile, export, functorch, modes of autograd, subclasses."""

import pytest
import torch
from jaxtyping import Float, Int, Int64
from kernel_head import HEAD
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from opwright import Mutates, operator

pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module")
def scaled(ns):
    """sin(x) * w, with a declared backward: *batch leads in x, w has none."""

    @operator(f"{ns}::scaled", cpu=HEAD + """
    template <typename T>
    void scaled(View<const T, 2> x, View<const T, 1> w, double gain, View<T, 2> output) {
      for (int64_t i = 0; i < x.size(0); ++i)
        for (int64_t j = 0; j < x.size(1); ++j) output(i, j) = T(std::sin(x(i, j)) * w(j) * T(gain));
    }
    template <typename T>
    void scaled_backward(View<const T, 2> grad_output, View<const T, 2> x, View<const T, 1> w, double gain,
                         View<T, 2> grad_x, View<T, 1> grad_w) {
      for (int64_t j = 0; j < x.size(1); ++j) grad_w(j) = 0;
      for (int64_t i = 0; i < x.size(0); ++i)
        for (int64_t j = 0; j < x.size(1); ++j) {
          grad_x(i, j) = T(grad_output(i, j) * std::cos(x(i, j)) * w(j) * T(gain));
          grad_w(j) += T(grad_output(i, j) * std::sin(x(i, j)) * T(gain));
        }
    }
    OPWRIGHT_KERNEL(scaled, float, double)
    OPWRIGHT_KERNEL(scaled_backward, float, double)""")  # fmt: skip
    def scaled(x: Float[Tensor, "*batch n"], w: Float[Tensor, "n"], *, gain: float = 2.0) -> Float[Tensor, "*batch n"]:
        return torch.sin(x) * w * gain

    @scaled.backward
    def scaled_backward(grad_output, x, w, *, gain=2.0):
        rows = (grad_output * torch.sin(x)).reshape(-1, x.shape[-1]).sum(0)
        return grad_output * torch.cos(x) * w * gain, rows * gain

    return scaled


def plain_scaled(x, w, *, gain=2.0):
    return torch.sin(x) * w * gain


@pytest.fixture(scope="module")
def mixed(ns):
    """Every kind at once, with a derived gradient: optional, list, index, option, two outputs."""

    @operator(f"{ns}::mixed", cpu=HEAD + """
    template <typename T>
    void mixed(View<const T, 2> x, View<const int64_t, 1> index, View<const T, 1> b,
               List<View<const T, 1>> ws, int64_t k, View<T, 2> picked, View<T, 1> windows) {
      for (int64_t i = 0; i < picked.size(0); ++i)
        for (int64_t j = 0; j < x.size(1); ++j) {
          picked(i, j) = x(index(i), j) * x(index(i), j) + (b.defined() ? b(j) : T(0));
          for (const auto& w : ws) picked(i, j) *= w(j);
        }
      for (int64_t j = 0; j < windows.size(0); ++j) {
        windows(j) = 0;
        for (int64_t i = 0; i < k; ++i) windows(j) += x(0, j + i);
      }
    }
    OPWRIGHT_KERNEL(mixed, float, double)""")  # fmt: skip
    def mixed(
        x: Float[Tensor, "m n"],
        index: Int[Tensor, "r"],
        b: Float[Tensor, "n"] | None,
        ws: list[Float[Tensor, "n"]],
        k: int = 2,
    ) -> tuple[Float[Tensor, "r n"], Float[Tensor, "n-k+1"]]:
        return plain_mixed(x, index, b, ws, k)

    return mixed


def plain_mixed(x, index, b, ws, k=2):
    picked = x[index.long()] ** 2
    picked = picked if b is None else picked + b
    for w in ws:
        picked = picked * w
    return picked, x[0].unfold(0, k, 1).sum(-1)


def scaled_arguments(rows=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rows)
    return [
        torch.randn(rows, 3, dtype=dtype, generator=generator).requires_grad_(),
        torch.randn(3, dtype=dtype, generator=generator).requires_grad_(),
    ]


def mixed_arguments(rows=4, count=2, has_b=True):
    generator = torch.Generator().manual_seed(rows)

    def make(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    index = torch.randint(0, rows, (3,), generator=generator, dtype=torch.int32)
    return [make(rows, 5), index, make(5) if has_b else None, [make(5) for _ in range(count)]]


# --- torch.compile, torch.export, fake tensors --------------------------------------------------------


def gradients_of(function, args):
    flat = [t for a in args for t in (a if isinstance(a, list) else [a]) if t is not None]
    leaves = [t for t in flat if t.is_floating_point()]
    outputs = function(*args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return outputs, torch.autograd.grad(sum(o.square().sum() for o in outputs), leaves)


def test_compile_with_gradients(scaled, entries):
    for entry in entries(scaled):
        compiled = torch.compile(
            lambda x, w, entry=entry: entry(x * 1, w, gain=0.5) + 1,
            fullgraph=True,
            dynamic=True,
            backend="aot_eager",
        )
        for rows in (2, 5, 1):
            args = scaled_arguments(rows)
            wanted = gradients_of(lambda x, w: plain_scaled(x, w, gain=0.5) + 1, args)
            torch.testing.assert_close(gradients_of(compiled, args), wanted)


def test_compile_with_every_kind_of_argument(mixed, entries):
    for entry in entries(mixed):
        compiled = torch.compile(
            lambda *args, entry=entry: entry(*args), fullgraph=True, dynamic=True, backend="aot_eager"
        )
        for rows, count, has_b in ((4, 2, True), (6, 2, True), (4, 0, True), (4, 1, False)):
            args = mixed_arguments(rows, count, has_b)
            torch.testing.assert_close(gradients_of(compiled, args), gradients_of(plain_mixed, args))


def test_export(scaled, entries):
    rows = torch.export.Dim("rows", min=2, max=64)
    for entry in entries(scaled):

        class Model(torch.nn.Module):
            def forward(self, x, w, entry=entry):
                return entry(x, w) + 1

        x, w = (t.detach() for t in scaled_arguments(3))
        exported = torch.export.export(Model(), (x, w), dynamic_shapes={"x": {0: rows}, "w": None})
        assert any("scaled" in str(node.target) for node in exported.graph.nodes)
        x, w = (t.detach() for t in scaled_arguments(7))
        torch.testing.assert_close(exported.module()(x, w), plain_scaled(x, w) + 1)
        lowered = exported.run_decompositions()
        torch.testing.assert_close(lowered.module()(x, w), plain_scaled(x, w) + 1)


def test_fake_and_meta_tensors(mixed, entries):
    for entry in entries(mixed):
        args = [a.detach() if isinstance(a, Tensor) else a for a in mixed_arguments()]
        real = entry(*args[:3], [])
        meta = entry(*(a.to("meta") for a in args[:3]), [])
        with FakeTensorMode() as mode:
            fake = entry(*(mode.from_tensor(a) for a in args[:3]), [])
        for r, m, f in zip(real, meta, fake, strict=True):
            assert (m.shape, m.dtype, m.stride(), m.device.type) == (r.shape, r.dtype, r.stride(), "meta")
            assert (f.shape, f.dtype, f.stride(), f.device.type) == (r.shape, r.dtype, r.stride(), "cpu")
        with pytest.raises(ValueError, match="index"):
            entry(args[0].to("meta"), torch.zeros(2, 2, dtype=torch.int32, device="meta"), None, [])


def test_meta_tensors_of_a_reference_that_reads_its_data(ns, entries):
    """The reference ran, where the operator's Meta kernel knows the answer."""

    @operator(f"{ns}::clipped")
    def clipped(
        x: Float[Tensor, "*s n"], y: Float[Tensor, "*s n"]
    ) -> tuple[Float[Tensor, "*s n"], Int64[Tensor, "*s"]]:
        return x.clamp(max=float(y.max())), x.argmax(-1)

    for entry in entries(clipped):
        for x in (torch.empty(2, 3, device="meta"), torch.empty(3, 2, device="meta", requires_grad=True).mT):
            y, i = entry(x, torch.empty(2, 3, device="meta"))
            assert (y.device, y.shape, y.stride(), y.dtype) == (x.device, (2, 3), (3, 1), x.dtype)
            assert (i.device, i.shape, i.dtype, y.requires_grad) == (x.device, (2,), torch.int64, x.requires_grad)
        with pytest.raises(ValueError, match="`y` must have"):
            entry(x, torch.empty(2, 4, device="meta"))
    given = torch.empty(2, 3, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    assert clipped(x.detach(), x.detach(), out=given)[0] is given[0]


# --- functorch ---------------------------------------------------------------------------------------


def functorch_cases():
    x, w = (t.detach() for t in scaled_arguments(4))
    xs, ws = torch.stack([x, 2 * x, 3 * x]), torch.stack([w, -w, 0 * w])
    func = torch.func
    total = lambda f: lambda *a: f(*a).square().sum()  # noqa: E731
    return {
        "vmap over *batch": lambda f: torch.vmap(f, (0, None))(xs, w),
        "vmap over another dim": lambda f: torch.vmap(f, (1, None), out_dims=1)(xs, w),
        "vmap over the argument without *batch": lambda f: torch.vmap(f, (None, 0))(x, ws),
        "vmap over both": lambda f: torch.vmap(f)(xs, ws),
        "nested vmap": lambda f: torch.vmap(torch.vmap(f, (0, None)), (0, None))(xs, w),
        "nested vmap over one, then the other": lambda f: torch.vmap(torch.vmap(f, (None, 0)), (0, None))(xs, ws),
        "vmap of no rows": lambda f: torch.vmap(f, (0, None))(xs[:0].reshape(3, 0, 3), w),
        "vmap in chunks": lambda f: torch.vmap(f, (0, None), chunk_size=2)(xs, w),
        "grad": lambda f: func.grad(total(f), (0, 1))(x, w),
        "grad of grad": lambda f: func.grad(lambda x: func.grad(total(f))(x, w).sin().sum())(x),
        "jacrev": lambda f: func.jacrev(f, (0, 1))(x, w),
        "jacfwd": lambda f: func.jacfwd(f, (0, 1))(x, w),
        "hessian": lambda f: func.hessian(total(f))(x, w),
        "jacrev of jacrev": lambda f: func.jacrev(func.jacrev(total(f), 1), 0)(x, w),
        "jvp": lambda f: func.jvp(f, (x, w), (x.cos(), w.cos())),
        "vjp": lambda f: func.vjp(f, x, w)[1](x),
        "vmap of grad": lambda f: torch.vmap(func.grad(total(f), (0, 1)), (0, None))(xs, w),
        "vmap of grad over both": lambda f: torch.vmap(func.grad(total(f), (0, 1)))(xs, ws),
        "grad of vmap": lambda f: func.grad(lambda x: torch.vmap(f, (0, None))(x, w).square().sum())(xs),
        "functional_call": lambda f: func.grad_and_value(total(f))(x, w),
        "linearize": lambda f: func.linearize(f, x, w)[1](x.cos(), w.cos()),
    }


@pytest.mark.parametrize("case", list(functorch_cases()))
def test_functorch(scaled, entries, case):
    call = functorch_cases()[case]
    for entry in entries(scaled):
        torch.testing.assert_close(call(entry), call(plain_scaled))


def test_functorch_with_every_kind_of_argument(mixed, entries):
    x, index, b, ws = mixed_arguments()
    x, b, ws = x.detach(), b.detach(), [w.detach() for w in ws]
    for entry in entries(mixed):
        for call in (
            lambda f: torch.vmap(lambda x, b: f(x, index, b, ws))(torch.stack([x, -x]), torch.stack([b, -b])),
            lambda f: torch.vmap(lambda w: f(x, index, b, [w, ws[0]]))(torch.stack(ws)),
            lambda f: torch.vmap(lambda i: f(x, i, None, []))(torch.stack([index, 3 - index])),
            lambda f: torch.func.grad(lambda w: f(x, index, b, [ws[0], w])[0].sum())(ws[1]),
            lambda f: torch.func.jacfwd(lambda x: f(x, index, b, ws))(x),
        ):
            torch.testing.assert_close(call(entry), call(plain_mixed))


def test_vmap_where_the_variadic_axis_is_elsewhere(ns, entries):
    # *batch is bound by three arguments, in front, behind and in a list; only one of them is batched.
    @operator(f"{ns}::spread", cpu=HEAD + """
    template <typename T>
    void spread(View<const T, 2> x, View<const T, 2> y, List<View<const T, 1>> zs, View<T, 2> output) {
      for (int64_t i = 0; i < x.size(0); ++i)
        for (int64_t j = 0; j < x.size(1); ++j) {
          output(i, j) = x(i, j) - y(j, i);
          for (const auto& z : zs) output(i, j) += z(i);
        }
    }
    OPWRIGHT_KERNEL(spread, float)""")  # fmt: skip
    def spread(
        x: Float[Tensor, "*batch n"], y: Float[Tensor, "n *batch"], zs: list[Float[Tensor, "*batch"]]
    ) -> Float[Tensor, "*batch n"]:
        return plain(x, y, zs)

    def plain(x, y, zs):
        x = x - y.movedim(0, -1)
        for z in zs:
            x = x + z[..., None]
        return x

    x, y, z = torch.randn(4, 2, 3), torch.randn(4, 3, 2), torch.randn(4, 2)
    for entry in entries(spread):
        for call in (
            lambda f: torch.vmap(lambda x: f(x, y[0], [z[0]]))(x),
            lambda f: torch.vmap(lambda x: f(x, y[0], []))(x),
            lambda f: torch.vmap(lambda y: f(x[0], y, [z[0]]))(y),
            lambda f: torch.vmap(lambda z: f(x[0], y[0], [z, z]))(z),
            lambda f: torch.vmap(lambda x, y, z: f(x, y, [z]))(x, y, z),
        ):
            torch.testing.assert_close(call(entry), call(plain))


# --- modes of autograd ----------------------------------------------------------------------


def test_inference_mode_and_no_grad(scaled, entries):
    x, w = scaled_arguments()
    for entry in entries(scaled):
        with torch.no_grad():
            assert not entry(x, w).requires_grad
        with torch.inference_mode():
            result = entry(x, w)
            assert result.is_inference()
        torch.testing.assert_close(result, plain_scaled(x, w).detach(), check_device=False)


# --- subclasses --------------------------------------------------------------------------------------


class Named(torch.Tensor):
    """Counts the functions that it takes part in; results are Named, too."""

    seen = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Named.seen += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Doubled(torch.Tensor):
    """Stands for twice the tensor that it holds."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda t: t.held * 2, (args, kwargs or {}))
        return func(*args, **kwargs)


def test_subclasses(scaled, entries):
    x, w = (t.detach() for t in scaled_arguments())
    for entry in entries(scaled):
        before = Named.seen
        result = entry(x.as_subclass(Named), w)
        assert Named.seen > before
        assert isinstance(result, Named)
        torch.testing.assert_close(result.as_subclass(torch.Tensor), plain_scaled(x, w))
        torch.testing.assert_close(entry(Doubled(x), w), plain_scaled(2 * x, w))
        torch.testing.assert_close(entry(x, Doubled(w)), plain_scaled(x, 2 * w))


def test_checkpoint(scaled, entries):
    for entry in entries(scaled):
        for use_reentrant in (True, False):
            args = scaled_arguments()
            wanted = gradients_of(plain_scaled, args)
            for arg in args:
                arg.grad = None
            output = checkpoint(lambda x, w, entry=entry: entry(x, w), *args, use_reentrant=use_reentrant)
            output.square().sum().backward()
            got = (output,), tuple(arg.grad for arg in args)
            torch.testing.assert_close(got, wanted)


def test_opcheck(scaled, mixed, ns):
    @operator(f"{ns}::fill")
    def fill(x: Mutates[Float[Tensor, "*s"]], value: float) -> None:
        x.fill_(value)

    for op, args in (
        (scaled, scaled_arguments()),
        (mixed, mixed_arguments()),
        (mixed, mixed_arguments(count=0, has_b=False)),
        (fill, [torch.zeros(2, 3), 2.0]),
    ):
        result = torch.library.opcheck(op.operator.public, args)
        assert set(result.values()) == {"SUCCESS"}
