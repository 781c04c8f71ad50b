"""Calls on distributed tensors: simulated ranks against one process, and PyTorch's own validator."""

from __future__ import annotations

import itertools

import opwright_ops
import pytest
import sharded_operators as ops
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from simulated_ranks import hold, partial, ranks, spread, whole
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import opwright
from opwright.contract.sweep import Sweep
from opwright.dispatch import kernels, registry
from opwright.dispatch.reference import tensors_in
from opwright.dispatch.sharding_rules import signature_of
from opwright.errors import AxisError, NotDifferentiableError, OutError, ShapeError, ShardingError
from opwright.verify.checks import sharding as check
from opwright.verify.target import make_target

pytestmark = pytest.mark.compiler
R, S0, S1, S2, P = Replicate(), Shard(0), Shard(1), Shard(2), Partial()


def needing(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def exchange():
    """Plants a function of `@name.exchange` for the time of a test."""
    planted = []

    def plant(function, on_shards):
        planted.append(function.operator)
        function.exchange("n")(on_shards)
        return function

    yield plant
    for operator in planted:
        operator.exchange_of = None
        operator.plans.clear()


def normalize(mean_square, x, w, eps):
    return x * torch.rsqrt(mean_square + eps)[..., None] * w


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of the LSTM take half a minute to compile, and rules are the same without them."""
    monkeypatch.setattr(kernels, "ensure_loaded", lambda operator, device: False)


# How many rows an utterance has depends on the data, so the batch cannot be cut.
WHOLE = {f"opwright_ops::transducer_{name}" for name in ("columns", "join", "lattice")}
# The validator calls again and again on arguments that `lstm_step` writes into.
OWN = sorted(n for n, o in registry.operators.items() if n.startswith("opwright_ops::") and not o.contract.mutated)


@pytest.mark.parametrize("name", OWN)
def test_every_rule_of_opwright_ops_by_pytorch(name, without_kernels) -> None:
    """Forward operators and backward ones, on even shards: the validator knows no others."""
    from torch.distributed.tensor._ops.strategy_validation import validate_aten_combination

    operator = registry.operators[name]
    values = even_case(operator)
    positional = sum(not p.keyword_only for p in operator.contract.parameters)
    args = tuple(values[:positional])
    kwargs = {p.name: v for p, v in zip(operator.contract.parameters, values, strict=True) if p.keyword_only}
    made = operator.arguments.pass_to(operator.function, values)
    signature = signature_of(operator.contract, values)
    rules = operator.rules.offer(signature, list(tensors_in(values)))
    absent = [o.gradient_of in signature.absent for o in operator.contract.outputs]
    assert len(rules) > 1 or name in WHOLE
    with ranks(2) as mesh:
        for rule in rules:
            assert all(p == R for p, is_absent in zip(rule.outputs, absent, strict=True) if is_absent)
            wanted = made if isinstance(made, torch.Tensor) else list(made)
            verdict = validate_aten_combination(
                operator.public, args, kwargs, wanted, (rule.inputs, rule.outputs), 2, mesh
            )
            assert verdict == (True, ""), rule.describe(signature)


def even_case(operator):
    """Returns arguments whose sharded axes are even."""
    target = make_target(operator.function, None, None)
    if not target.has_samples:
        sweep = Sweep(operator.contract, forward=target.forward())
        return sweep.make("even", torch.float64, sweep.base_sizes((4, 6, 8)), (2, 4), sweep.option_sets()[0]).values
    values = list(target.small_cases(torch.float64)[0].values)
    rules = operator.rules.offer(signature_of(operator.contract, values), list(tensors_in(values)))
    for rule in rules:
        placements = signature_of(operator.contract, values).arrange(rule.inputs)
        values = [
            torch.cat([v, v], p.dim) if isinstance(p, Shard) else v for v, p in zip(values, placements, strict=True)
        ]
    return values


@pytest.mark.parametrize(
    "function",
    [opwright_ops.d_sigmoid, opwright_ops.softmax, opwright_ops.bias_gelu, ops.scale, ops.affine, ops.rms_norm],
    ids=lambda f: f.__name__,
)
def test_no_rule_is_missing(function) -> None:
    """All placements of two ranks: those that the validator finds right are those that are offered."""
    from torch.distributed.tensor._ops.strategy_validation import validate_aten_combination

    operator = function.operator
    shapes = [(4, 6), (6,)][: len(operator.contract.tensors)]
    tensors = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    values = operator.normalize(*tensors)
    positional = sum(not p.keyword_only for p in operator.contract.parameters)
    args = tuple(values[:positional])
    kwargs = {p.name: v for p, v in zip(operator.contract.parameters, values, strict=True) if p.keyword_only}
    choices = [[R, P, *map(Shard, range(t.ndim))] for t in tensors]
    made = operator.arguments.pass_to(operator.function, values)
    rules = operator.rules.offer(signature_of(operator.contract, values), tensors)
    with ranks(2) as mesh:
        right = set()
        for *inputs, output in itertools.product(*choices, choices[0]):
            combination = tuple(inputs), (output,)
            if validate_aten_combination(operator.public, args, kwargs, made, combination, 2, mesh)[0]:
                right.add(combination)
    assert {(rule.inputs, rule.outputs) for rule in rules} == right


class TestOneAxis:
    """Three ranks: shards are uneven, some of them empty."""

    @pytest.mark.parametrize("approximate", ["none", "tanh"])
    def test_bias_gelu(self, approximate) -> None:
        x, b = needing(7, 2, 5), needing(5)
        with ranks(3) as mesh:
            run = opwright_ops.bias_gelu
            assert hold(run, [x, b], [[S0], [R]], mesh, approximate=approximate) == [(S0,), (S0,), (P,)]
            assert hold(run, [x, b], [[S1], [R]], mesh, approximate=approximate) == [(S1,), (S1,), (P,)]
            assert hold(run, [x, b], [[R], [S0]], mesh, approximate=approximate) == [(S2,), (S2,), (S0,)]
            assert hold(run, [x, b], [[R], [R]], mesh, approximate=approximate) == [(R,)] * 3

    def test_a_reduced_axis_is_gathered(self) -> None:
        with ranks(3) as mesh:
            assert hold(ops.rms_norm, [needing(4, 5), needing(5)], [[S1], [S0]], mesh)[0] == (R,)

    def test_columns_and_rows_of_a_weight(self) -> None:
        x, w, b = needing(4, 7), needing(5, 7), needing(5)
        with ranks(3) as mesh:
            run = opwright_ops.matmul_bias_gelu
            assert hold(run, [x, w, b], [[R], [S0], [S0]], mesh) == [(S1,), (P,), (S0,), (S0,)]
            assert hold(run, [x, w, b], [[S1], [S1], [R]], mesh)[0] == (R,)
            assert hold(ops.matmul, [x, w], [[S1], [S1]], mesh) == [(P,), (S1,), (S1,)]

    def test_lstm(self, without_kernels) -> None:
        tensors = [needing(3, 5, 6), needing(16, 6), needing(16, 4), needing(16)]

        def run(x, w_ih, w_hh, b):
            return opwright_ops.lstm(x, None, None, w_ih, w_hh, b)[:3]

        with ranks(3) as mesh:
            found = hold(run, tensors, [[S1], [R], [R], [R]], mesh)
            assert found == [(S1,), (S0,), (S0,), (S1,), (P,), (P,), (P,)]
            assert hold(run, tensors, [[S2], [S1], [R], [R]], mesh)[0] == (R,)

    def test_softmax_along_any_axis(self) -> None:
        from opwright_ops.softmax import softmax

        with ranks(2) as mesh:
            for dim, shard in itertools.product(range(-3, 3), range(3)):
                found = hold(softmax, [needing(4, 3, 6)], [[Shard(shard)]], mesh, dim=dim)
                if shard != dim % 3:
                    assert found == [(Shard(shard),)] * 2
            assert hold(softmax, [torch.tensor(0.5, requires_grad=True)], [[R]], mesh) == [(R,), (R,)]

    def test_an_exchange(self, exchange) -> None:
        exchange(
            ops.rms_norm, lambda ranks, x, w, eps: normalize(ranks.sum(x.square().sum(-1)) / ranks.size, x, w, eps)
        )
        x, w = needing(4, 5), needing(5)
        with ranks(3) as mesh:
            assert hold(ops.rms_norm, [x, w], [[S1], [S0]], mesh)[0] == (S1,)
            assert hold(ops.rms_norm, [x, w], [[S1], [R]], mesh)[0] == (S1,)
            assert hold(ops.rms_norm, [x, w], [[S0], [S0]], mesh)[0] == (S0,)
            assert hold(ops.rms_norm, [x, w], [[R], [S0]], mesh)[0] == (R,)  # a weight alone shards nothing

    def test_a_maximum(self) -> None:
        with ranks(2) as mesh:
            found = hold(ops.largest, [needing(3, 6)], [[S1]], mesh)
        assert found == [(Partial("max"),), (S1,), (R,)]

    def test_a_maximum_of_nothing_is_not_taken(self) -> None:
        with ranks(3) as mesh:
            assert hold(ops.largest, [torch.randn(3, 4)], [[S1]], mesh)[0] == (R,)  # 2, 2, 0 elements

    def test_lists_and_optional_tensors(self) -> None:
        x, y, w = needing(4, 5), needing(4, 5), needing(5)
        with ranks(3) as mesh:
            found = hold(lambda x, y, w: ops.add_all([x, y], w), [x, y, w], [[S0], [S0], [R]], mesh)
            assert found == [(S0,), (S0,), (S0,), (P,)]
            assert hold(ops.optional, [x], [[S1]], mesh, power=2) == [(S1,), (S1,)]
            found = hold(lambda x, m: ops.optional(x, mask=m), [x, y], [[S1], [S1]], mesh)
            assert found == [(S1,)] * 3

    def test_sums_that_are_still_to_be_taken(self) -> None:
        parts, w = [torch.randn(4, 5) for _ in range(3)], torch.randn(5)
        with ranks(3) as mesh, torch.no_grad():
            x, w_there = partial(parts, mesh, P), spread(w, mesh, R)
            scaled, shifted = ops.scale(x, w_there), ops.affine(x, w_there)
            assert scaled.placements == (P,)
            assert shifted.placements != (P,)
            torch.testing.assert_close(whole(scaled), sum(parts) * w)
            torch.testing.assert_close(whole(shifted), sum(parts) * w + 1)


def test_two_axes() -> None:
    x, b, w = needing(4, 3, 6), needing(6), needing(5, 6)
    with ranks(2, 2) as mesh:
        found = hold(opwright_ops.bias_gelu, [x, b], [[S0, S2], [R, S0]], mesh)
        assert found == [(S0, S2), (S0, S2), (P, S0)]
        found = hold(opwright_ops.bias_gelu, [x, b], [[S0, S0], [R, R]], mesh)
        assert found == [(S0, S0), (S0, S0), (P, P)]
        assert hold(ops.matmul, [x, w], [[S0, S2], [R, S1]], mesh) == [(S0, P), (S0, S2), (P, S1)]
        assert hold(ops.largest, [x], [[S0, S2]], mesh)[-1] == (S0, R)
        found = hold(ops.total, [x], [[S0, S2]], mesh)
        assert found[-1] == (S0, S2)


def test_second_gradients() -> None:
    x, w = needing(4, 6), needing(6)

    def second(x, w, function):
        first = torch.autograd.grad(function(x, w).square().sum(), [x, w], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [x, w])

    with ranks(2) as mesh:
        for function in (opwright_ops.bias_gelu, ops.rms_norm):
            got = second(spread(x, mesh, S0), spread(w, mesh, R), function)
            for g, wanted in zip(got, second(x, w, function), strict=True):
                torch.testing.assert_close(whole(g), wanted)


class TestMutation:
    @pytest.mark.parametrize("placements", [(S0, S1), (R, S0), (R, R)], ids=str)
    def test_in_place(self, placements) -> None:
        a, v = torch.randn(5, 4), torch.randn(5, 4)
        with ranks(2, 2) as mesh, torch.no_grad():
            there = spread(a, mesh, *placements)
            version = there._version
            assert ops.halve_and_add_(there, spread(v, mesh, R, S1)) is None
            torch.testing.assert_close(whole(there), a / 2 + v)
            assert there.placements == placements
            assert there._version > version

    def test_into_what_all_ranks_share(self) -> None:
        a, v = torch.randn(6), torch.randn(5, 6)
        with ranks(3) as mesh, torch.no_grad():
            for placement, other in ((R, S0), (S0, S0)):
                there = spread(a, mesh, placement)
                ops.collect_(there, spread(v, mesh, other))
                torch.testing.assert_close(whole(there), a + v.sum(0))

    def test_what_cannot_be_moved(self) -> None:
        with ranks(2) as mesh, torch.no_grad():
            a = partial([torch.randn(4)] * 2, mesh, P)
            with pytest.raises(ShardingError, match=r"writes into `a`, which cannot be moved") as refused:
                ops.halve_and_add_(a, spread(torch.randn(4), mesh, S0))
        assert "a.redistribute(placements=[Replicate()])" in str(refused.value)

    def test_out(self) -> None:
        x, b = torch.randn(6, 4), torch.randn(4)
        with ranks(2) as mesh, torch.no_grad():
            there = spread(torch.empty(6, 4), mesh, S1)
            given = spread(x, mesh, S0), spread(b, mesh, R)
            assert opwright_ops.bias_gelu(*given, out=there) is there
            torch.testing.assert_close(whole(there), opwright_ops.bias_gelu(x, b))
            with pytest.raises(OutError):
                opwright_ops.bias_gelu(*given, out=spread(torch.empty(6, 5), mesh, S0))

    def test_a_gradient_is_refused_as_ever(self) -> None:
        with ranks(2) as mesh, pytest.raises(NotDifferentiableError):
            ops.halve_and_add_(spread(torch.randn(4), mesh, R), spread(needing(4).float(), mesh, R))


class TestRefused:
    def refusal(self, function, *placed):
        with ranks(2) as mesh, torch.no_grad(), pytest.raises(Exception) as refused:
            function(*(spread(t, mesh, p) if p else t for t, p in placed))
        return refused.value

    def test_a_plain_tensor_among_distributed_ones(self) -> None:
        error = self.refusal(opwright_ops.bias_gelu, (torch.randn(4, 6), S0), (torch.randn(6), None))
        assert isinstance(error, ShardingError)
        assert str(error).splitlines() == [
            "`bias_gelu`: `bias` is a plain tensor among distributed ones   [OPW111]",
            "",
            "  input  DTensor",
            "  bias   Tensor",
            "",
            "hint: `distribute_tensor(bias, mesh, [Replicate()])`, if it is the same on every rank",
        ]

    def test_random_numbers_and_sizes_that_depend_on_data(self) -> None:
        assert "it draws random numbers" in str(self.refusal(ops.noise, (torch.randn(4), S0)))
        assert "depends on the data" in str(self.refusal(ops.nonzero, (torch.randn(4), S0)))

    def test_a_broken_contract_names_the_whole_shapes(self) -> None:
        error = self.refusal(opwright_ops.bias_gelu, (torch.randn(4, 6), S0), (torch.randn(5), R))
        assert isinstance(error, ShapeError)
        assert "f32[4, 6]" in str(error)

    def test_two_meshes(self) -> None:
        with ranks(2, 2) as mesh, torch.no_grad():
            x, b = spread(torch.randn(4, 6), mesh, S0, R), torch.randn(6)
            other = spread(b, init_device_mesh("cpu", (4,)), R)
            with pytest.raises(ShardingError, match="on different meshes"):
                opwright_ops.bias_gelu(x, other)


class TestCompile:
    """The operator stays one node; a backward with kernels likewise."""

    def graphs(self, function, *tensors):
        names = []

        def keep(module, inputs):
            names.append([str(n.target) for n in module.graph.nodes if n.op == "call_function"])
            return make_boxed_func(module.forward)

        torch._dynamo.reset()
        result = torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*tensors)
        return names, result

    @pytest.fixture
    def mesh(self):
        dist.init_process_group("fake", rank=0, world_size=2)
        yield init_device_mesh("cpu", (2,))
        dist.destroy_process_group()

    def test_the_operator_is_one_node(self, mesh) -> None:
        x, b = distribute_tensor(needing(4, 6), mesh, [S0]), distribute_tensor(needing(6), mesh, [R])
        x, b = (t.detach().requires_grad_() for t in (x, b))
        names, y = self.graphs(lambda x, b: opwright_ops.bias_gelu(x, b) + 1, x, b)
        assert names == [["opwright_ops.bias_gelu.default", "aten.add.Tensor"]]
        torch.testing.assert_close(y.to_local(), opwright_ops.bias_gelu(x, b).to_local() + 1)
        y.sum().backward()
        assert names[1][0] == "opwright_ops.bias_gelu_backward.default"
        eager = [t.detach().requires_grad_() for t in (x, b)]
        opwright_ops.bias_gelu(*eager).sum().backward()
        for compiled, wanted in zip((x, b), eager, strict=True):
            assert compiled.grad.placements == wanted.grad.placements
            torch.testing.assert_close(compiled.grad.to_local(), wanted.grad.to_local())

    def test_nothing_decomposes_it_elsewhere(self, mesh) -> None:
        opwright_ops.bias_gelu(
            distribute_tensor(torch.randn(4, 6), mesh, [S0]), DTensor.from_local(torch.randn(6), mesh)
        )
        assert torch.ops.opwright_ops.bias_gelu.default not in torch._decomp.decomposition_table

        class Module(torch.nn.Module):
            def forward(self, x, b):
                return opwright_ops.bias_gelu(x, b)

        program = torch.export.export(Module(), (torch.randn(4, 6), torch.randn(6))).run_decompositions()
        names = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
        assert names == ["opwright_ops.bias_gelu.default"]


class TestVerify:
    @pytest.fixture
    def declare(self):
        """Plants a rule for the time of a test."""
        planted = []

        def plant(function, *rules):
            planted.append(function.operator)
            function.sharding(lambda *arguments, **options: list(rules))
            return function

        yield plant
        for operator in planted:
            operator.sharding_rules = None

    def failure(self, function):
        record = opwright.verify(function, checks=["sharding"], isolated=False, quick=True)
        return record.failures[0] if record.failures else None

    def test_right_rules_pass(self, declare, without_kernels) -> None:
        assert self.failure(registry.operators["opwright_ops::lstm_step"].function) is None
        assert self.failure(ops.rms_norm) is None
        assert self.failure(declare(ops.outer, ({"x": S0}, S0), ({"y": S0}, S1), ({"x": P}, P))) is None

    def test_a_backward_of_pytorch_that_takes_no_empty_shard(self, declare) -> None:
        assert self.failure(declare(ops.shuffle, ({"x": S0}, S0))) is None
        assert self.failure(declare(ops.shuffle, ({"x": S0}, S1))) is not None

    def test_a_sharded_reduction(self, declare) -> None:
        found = self.failure(declare(ops.rms_norm, ({"x": S2, "w": S0}, S2)))
        assert found.case.startswith("f64[1, 2, 2] f64[2] ")  # one element in a shard would be its own mean
        assert found.message.startswith(
            "`output` is not what one process gives from shards of `x` along dimension 2 and of `w` along dimension 0"
        ), found.message

    def test_a_sum_of_a_nonlinear_operator(self, declare) -> None:
        found = self.failure(declare(ops.total_of_exp, ({"x": P}, P)))
        assert found.case.startswith("f64[1] ")
        assert "the operator is not linear in `x`" in found.message

    def test_swapped_axes(self, declare) -> None:
        found = self.failure(declare(ops.outer, ({"x": S0}, S1)))
        assert found.message.startswith("no `output` can be made from shards of `x` along dimension 0"), found.message

    def test_a_promise_that_is_not_kept(self) -> None:
        """The contract says that entries of `*batch` are independent; the reference says otherwise."""
        found = self.failure(ops.over_the_batch)
        assert "from shards of `x` along dimension 0" in found.message

    @pytest.mark.parametrize("name", [n for n in OWN if registry.operators[n].exchange_of is not None])
    def test_right_exchanges_pass(self, name) -> None:
        assert self.failure(registry.operators[name].function) is None

    @pytest.mark.parametrize(
        ("on_shards", "says"),
        [
            (lambda ranks, x, w, eps: normalize(x.square().mean(-1), x, w, eps), "`output` is not what one process"),
            (
                lambda ranks, x, w, eps: normalize(ranks.sum(x.square().mean(-1)) / 3, x, w, eps),
                "`output` is not what one process",  # shards are uneven
            ),
            (
                lambda ranks, x, w, eps: normalize(ranks.sum(x).sum(-1), x, w, eps),
                "the ranks exchange different things",
            ),
            (
                lambda ranks, x, w, eps: x if ranks.start else normalize(ranks.sum(x.sum(-1)), x, w, eps),
                "some ranks exchange numbers more often than others",
            ),
        ],
        ids=["own shards", "mean of means", "shards themselves", "not all"],
    )
    def test_wrong_exchanges(self, exchange, monkeypatch: pytest.MonkeyPatch, on_shards, says) -> None:
        monkeypatch.setattr(check, "_MAX_WAIT_S", 1)
        found = self.failure(exchange(ops.rms_norm, on_shards))
        assert "x Shard(2), w Shard(0) -> output Shard(2), exchanging among 3 ranks" in found.case
        assert says in found.message

    def test_an_exchange_along_no_axis(self) -> None:
        with pytest.raises(AxisError, match="no tensor argument has an axis `k`"):
            ops.rms_norm.exchange("k")

    def test_what_has_no_rules_is_skipped(self) -> None:
        (check,) = opwright.verify(ops.nonzero, checks=["sharding"], isolated=False).checks
        assert (check.outcome, check.reason) == ("skipped", "sizes depend on data")
