"""`AdamW` against torch.optim.AdamW, which shares no code with it."""

from __future__ import annotations

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import opwright
from opwright_ops.adamw import AdamW
from opwright_ops.adamw.op import adamw_, adamw_bfloat16_state_, adamw_float32_state_, random_bits

# Each test runs on a CPU and on a GPU.
pytestmark = pytest.mark.usefixtures("device")

# No elements, one, beside vectors, more than a chunk of a thread.
SHAPES = [(0,), (), (3,), (7, 11), (64, 33), (9000,)]


def parameters(dtype: torch.dtype = torch.float32, shapes: list[Any] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def run(make: Any, params: list[nn.Parameter], steps: int = 5) -> Any:
    optimizer = make(params)
    for i in range(steps):
        give_gradients(params, i)
        optimizer.step()
    return optimizer


def assert_same(mine: list[nn.Parameter], optimizer: Any, theirs: list[nn.Parameter], other: Any, eps: float) -> None:
    """Compares parameters and states. Each of a few steps rounds each of them a few times."""
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=20 * eps, atol=2 * eps)
        kept, wanted = optimizer.state[a], other.state[b]
        assert list(kept) == list(wanted)
        assert kept["step"] == wanted["step"]
        assert kept["step"].dtype == wanted["step"].dtype
        for name in list(wanted)[1:]:
            torch.testing.assert_close(kept[name], wanted[name], rtol=20 * eps, atol=2 * eps)


OPTIONS = [
    {},
    {"amsgrad": True},
    {"maximize": True},
    {"capturable": True},
    {"lr": torch.tensor(3e-2)},
    {"lr": torch.tensor(3e-2), "capturable": True, "amsgrad": True},
    {"lr": 0.1, "betas": (0.5, 0.75), "eps": 1e-3, "weight_decay": 0.5},
    {"betas": (0.0, 0.9), "weight_decay": 0.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_against_pytorch(dtype: torch.dtype, options: dict[str, Any]) -> None:
    mine, theirs = parameters(dtype), parameters(dtype)
    optimizer = run(lambda params: AdamW(params, **options), mine)
    # PyTorch refuses capturable=True on a CPU; it does not change the result.
    others = {name: value for name, value in options.items() if name != "capturable"}
    other = run(lambda params: torch.optim.AdamW(params, **others), theirs)
    # With a tensor as rate and numbers of steps in float32, factors are rounded to float32.
    is_narrow = options.get("capturable") or isinstance(options.get("lr"), Tensor)
    eps = torch.finfo(torch.float32 if is_narrow else dtype).eps
    assert_same(mine, optimizer, theirs, other, eps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_16_bits_are_rounded_once(dtype: torch.dtype, amsgrad: bool) -> None:
    """A step in float64 from the same values, and one rounding; float32 may tip a result between two neighbours."""
    mine = parameters(dtype)
    optimizer = run(lambda params: AdamW(params, lr=0.01, amsgrad=amsgrad), mine, steps=3)
    exact = [nn.Parameter(p.detach().double()) for p in mine]
    other = torch.optim.AdamW(exact, lr=0.01, amsgrad=amsgrad)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # the tensors `step` would be shared
    give_gradients(mine, 9)
    for p, q in zip(mine, exact, strict=True):
        q.grad = p.grad.double()
    optimizer.step()
    other.step()
    for p, q in zip(mine, exact, strict=True):
        for found, wanted in (
            (p, q),
            *((optimizer.state[p][n], other.state[q][n]) for n in list(optimizer.state[p])[1:]),
        ):
            half_ulp = torch.finfo(dtype).eps / 2 * wanted.abs() + torch.finfo(dtype).smallest_normal * 2**-8
            scale = wanted.abs() + 1  # values are of size 1 before they cancel
            assert (
                (found.double() - wanted).abs() <= half_ulp * 1.001 + 8 * torch.finfo(torch.float32).eps * scale
            ).all()


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)],
)  # fmt: skip
def test_states_in_another_type(dtype: torch.dtype, state_dtype: torch.dtype, amsgrad: bool) -> None:
    mine = parameters(dtype)
    optimizer = run(lambda params: AdamW(params, lr=0.01, state_dtype=state_dtype, amsgrad=amsgrad), mine)
    theirs = [nn.Parameter(p.detach().float()) for p in parameters(dtype)]
    other = torch.optim.AdamW(theirs, lr=0.01, amsgrad=amsgrad)
    for i in range(5):
        give_gradients(mine, i)
        for p, q in zip(mine, theirs, strict=True):
            q.grad = p.grad.float()
        other.step()
    for p, q in zip(mine, theirs, strict=True):
        for name, wanted in list(other.state[q].items())[1:]:
            found = optimizer.state[p][name]
            assert found.dtype == state_dtype
            # Five roundings of values no larger than the largest gradient, squared for the second.
            eps = 5 * torch.finfo(state_dtype).eps
            torch.testing.assert_close(found.float(), wanted, rtol=eps, atol=eps * 0.1)
        steps = 5 * 0.01 * 1.2  # the farthest that five steps go
        eps = 5 * torch.finfo(dtype).eps / 2 * (q.detach().abs() + steps) + 5 * torch.finfo(state_dtype).eps * steps
        assert ((p.float() - q).abs() <= eps + 1e-6).all()


def test_several_groups_and_types() -> None:
    def make(optimizer: Any, params: list[nn.Parameter]) -> Any:
        return optimizer(
            [{"params": params[:3], "lr": 0.1}, {"params": params[3:], "weight_decay": 0.0, "amsgrad": True}]
        )

    def mixed() -> list[nn.Parameter]:
        return [*parameters(), *parameters(torch.float64)]

    mine, theirs = mixed(), mixed()
    optimizer, other = run(lambda p: make(AdamW, p), mine), run(lambda p: make(torch.optim.AdamW, p), theirs)
    assert_same(mine, optimizer, theirs, other, torch.finfo(torch.float32).eps)


def test_parameters_without_gradients_are_skipped() -> None:
    mine, theirs = parameters(), parameters()
    pairs = [(mine, AdamW(mine)), (theirs, torch.optim.AdamW(theirs))]
    for params, optimizer in pairs:
        for i in range(6):
            give_gradients(params, i)
            params[i].grad = None
            optimizer.step()
    assert_same(mine, pairs[0][1], theirs, pairs[1][1], torch.finfo(torch.float32).eps)
    untouched = nn.Parameter(torch.ones(3))
    optimizer = AdamW([untouched])
    optimizer.step()
    assert untouched.tolist() == [1.0] * 3
    assert not optimizer.state_dict()["state"]


def test_a_closure() -> None:
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer = AdamW([weight], lr=0.5, weight_decay=0.0)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = weight.square().sum()
        value.backward()
        return value

    assert optimizer.step(loss) == 9.0
    torch.testing.assert_close(weight.detach(), torch.tensor([2.5]))  # the first step is as long as the rate


def test_any_order_in_memory() -> None:
    def make() -> list[nn.Parameter]:
        images, matrix, wide = torch.randn(4, 3, 5, 6), torch.randn(7, 8), torch.randn(6, 10)
        return [
            nn.Parameter(images.to(memory_format=torch.channels_last)),
            nn.Parameter(matrix.t()),
            nn.Parameter(wide[:, ::2]),
        ]

    torch.manual_seed(0)
    mine = make()
    torch.manual_seed(0)
    theirs = make()
    optimizer = run(AdamW, mine)
    assert mine[0].is_contiguous(memory_format=torch.channels_last)
    assert_same(mine, optimizer, theirs, run(torch.optim.AdamW, theirs), torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("capturable", [False, True])
def test_state_dicts_both_ways(amsgrad: bool, capturable: bool) -> None:
    mine, theirs = parameters(), parameters()
    optimizer = run(lambda p: AdamW(p, amsgrad=amsgrad, capturable=capturable), mine)
    other = run(lambda p: torch.optim.AdamW(p, amsgrad=amsgrad), theirs)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    into_theirs, into_mine = torch.optim.AdamW(theirs, amsgrad=amsgrad), AdamW(mine, amsgrad=amsgrad)
    into_theirs.load_state_dict(torch.load(file, weights_only=True))
    into_mine.load_state_dict(other.state_dict())
    for group in into_theirs.param_groups:
        group["capturable"] = False  # which PyTorch refuses on a CPU
    for params, one in ((mine, into_mine), (theirs, into_theirs)):
        give_gradients(params, 7)
        one.step()
    assert into_mine.state[mine[2]]["step"] == 6
    assert_same(mine, into_mine, theirs, into_theirs, torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_states_of_other_implementations(kind: type[torch.optim.Adam], options: dict[str, bool]) -> None:
    weight = nn.Parameter(torch.ones(3))
    mine, theirs = AdamW([weight]), torch.optim.AdamW([weight])
    given = run(lambda params: kind(params, weight_decay=1e-2, **options), [nn.Parameter(torch.ones(3))]).state_dict()
    for optimizer in (mine, theirs):
        optimizer.load_state_dict(given)
        assert optimizer.param_groups[0]["decoupled_weight_decay"] is True


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # it then saves the state of one process
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("saved_by", [AdamW, torch.optim.AdamW])
@pytest.mark.parametrize("loaded_by", [AdamW, torch.optim.AdamW])
def test_distributed_checkpoints_both_ways(tmp_path: Path, saved_by: type, loaded_by: type) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(3, 4) for _ in range(2)]
    optimizers = [kind(model.parameters(), lr=0.1) for kind, model in zip((saved_by, loaded_by), models, strict=True)]

    def take_step(at: int) -> None:
        optimizers[at].zero_grad()
        models[at](torch.ones(2, 3)).square().sum().backward()
        optimizers[at].step()

    take_step(0)
    checkpoint.save({"model": models[0].state_dict(), "optimizer": optimizers[0].state_dict()}, checkpoint_id=tmp_path)
    take_step(1)  # makes states to load into
    loaded = {"model": models[1].state_dict(), "optimizer": optimizers[1].state_dict()}
    checkpoint.load(loaded, checkpoint_id=tmp_path, planner=checkpoint.DefaultLoadPlanner(allow_partial_load=True))
    optimizers[1].load_state_dict(loaded["optimizer"])
    take_step(0)
    take_step(1)
    for found, wanted in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_loaded_states_keep_their_type() -> None:
    """PyTorch's own load_state_dict would round them to the type of the parameter."""
    params = parameters(torch.bfloat16)
    optimizer = run(lambda p: AdamW(p, state_dtype=torch.float32), params)
    for again in (AdamW(params, state_dtype=torch.float32), AdamW(params)):
        again.load_state_dict(optimizer.state_dict())
        for param in params:
            assert torch.equal(again.state[param]["exp_avg"], optimizer.state[param]["exp_avg"])
    twin = copy.deepcopy(optimizer)
    assert torch.equal(
        next(iter(twin.state.values()))["exp_avg_sq"], next(iter(optimizer.state.values()))["exp_avg_sq"]
    )


# --- stochastic rounding -----------------------------------------------------------------------------


def rounded(seed: int, steps: int = 3, threads: int | None = None, **options: Any) -> list[Tensor]:
    torch.manual_seed(seed)
    params = parameters(torch.bfloat16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or before)
        optimizer = run(lambda p: AdamW(p, lr=1e-3, stochastic_rounding=True, **options), params, steps)
    finally:
        torch.set_num_threads(before)
    return [*(p.detach() for p in params), *(optimizer.state[p]["exp_avg"] for p in params)]


@pytest.mark.parametrize(
    "options", [{}, {"state_dtype": torch.float32}, {"amsgrad": True}, {"capturable": True}], ids=str
)
def test_the_same_bits_from_the_same_seed(options: dict[str, Any]) -> None:
    one = rounded(0, **options)
    assert all(torch.equal(a, b) for a, b in zip(one, rounded(0, threads=1, **options), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, rounded(1, **options), strict=True))
    if options == {"capturable": True}:
        assert all(torch.equal(a, b) for a, b in zip(one, rounded(0), strict=True))


def test_a_loaded_state_goes_on_with_the_same_numbers() -> None:
    torch.manual_seed(0)
    params = parameters(torch.bfloat16)
    optimizer = run(lambda p: AdamW(p, stochastic_rounding=True), params, steps=2)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    again = AdamW(others, stochastic_rounding=True)  # with another seed of its own
    again.load_state_dict(optimizer.state_dict())
    for each, one in ((params, optimizer), (others, again)):
        give_gradients(each, 5)
        one.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@pytest.mark.parametrize("value", [1.0 + 2.0**-9, -(1.0 + 2.0**-12), 3.0 - 2.0**-10])
def test_rounding_is_unbiased(value: float) -> None:
    """The mean of n roundings to neighbours an ulp apart.

    By Hoeffding's inequality it is farther from the value than ulp * sqrt(ln(2 / p) / 2n) with probability p at most.
    """
    count = 1 << 20
    start = torch.tensor(value).bfloat16()  # a neighbour, from which a step leads to the value
    param = torch.full((count,), start.item(), dtype=torch.bfloat16)
    zero, one = torch.zeros(count), torch.ones(count)
    # exp_avg / (sqrt(exp_avg_sq) + eps) is 1 / 1 with these: the step is `start - value`, within a rounding of float32.
    adamw_float32_state_(
        [param], [zero.bfloat16()], [one], [one.clone()], [], [], lr=1.0, step=1, beta1=0.0, beta2=0.0, eps=1.0,
        weight_decay=1 - value / start.item(), stochastic_rounding=True, seed=1,
    )  # fmt: skip
    ulp = 2.0 ** (math.floor(math.log2(abs(value))) - 7)
    assert 1 < param.unique().numel() <= 2
    assert (param.double() - value).abs().max() < ulp
    bound = ulp * math.sqrt(math.log(2 / 1e-9) / (2 * count)) + 2 * torch.finfo(torch.float32).eps * abs(value)
    assert abs(param.double().mean().item() - value) <= bound


def test_small_steps_are_not_lost() -> None:
    """Steps of 1/20 of an ulp: to nearest the weight would stay where it is."""
    weight = nn.Parameter(torch.full((4096,), 1.0, dtype=torch.bfloat16))
    torch.manual_seed(0)
    optimizer = AdamW([weight], lr=2.0**-8 / 20, weight_decay=0.0, stochastic_rounding=True, state_dtype=torch.float32)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    # Below 1 an ulp is 2^-8. The steps of one element are independent, each off by less than an ulp.
    bound = 2.0**-8 * math.sqrt(100 * math.log(2 / 1e-9) / (2 * 4096))
    assert abs(weight.double().mean().item() - (1 - 100 * 2.0**-8 / 20)) <= bound


def test_random_bits_are_uniform_and_independent() -> None:
    """Each bit is set for half of the elements, and so is each bit of the exclusive or of two related draws."""
    count = 1 << 20
    device = torch.device("cpu")
    base = random_bits(count, 7, 1, 0, 0, device)
    others = [
        *(random_bits(count, 7, 1, 0, stream, device) for stream in (1, 2, 3)),
        random_bits(count, 7, 2, 0, 0, device),
        random_bits(count, 7, 1, 1, 0, device),
        random_bits(count, 8, 1, 0, 0, device),
        random_bits(count, 7 + (1 << 32), 1, 0, 0, device),
        base.roll(1),
        base.roll(2),
        base.roll(256),
    ]
    # Hoeffding again; one in 10^9 for each of 16 * 11 bits.
    bound = math.sqrt(math.log(2 / 1e-9) / (2 * count))
    for bits in (base, *(base ^ other for other in others)):
        for bit in range(16):
            assert abs((bits >> bit & 1).double().mean().item() - 0.5) <= bound
    assert base.max() < 1 << 16
    assert base.min() >= 0


@pytest.mark.compiler
def test_the_kernel_draws_what_the_reference_draws() -> None:
    """Also where rounding falls between two neighbours by a hair: at most one element in 10,000 differs."""
    torch.manual_seed(0)
    for op, dtype in ((adamw_, torch.bfloat16), (adamw_float32_state_, torch.float32)):
        lists = [[torch.randn(70_001).bfloat16(), torch.randn(5).bfloat16()] for _ in range(2)]
        lists += [[t.abs().to(dtype) for t in lists[0]] for _ in range(2)]
        results = []
        for call in (op, op.operator.declaration.reference):
            given = [[t.clone() for t in each] for each in lists]
            call(*given, [], [], step=3, stochastic_rounding=True, seed=2**40 + 3, first=2)
            results.append([t for i in (0, 2, 3) for t in given[i] if t.dtype == torch.bfloat16])
        for found, wanted in zip(*results, strict=True):
            assert (found != wanted).sum() <= found.numel() / 10_000


@pytest.mark.compiler
@pytest.mark.parametrize("capturable", [False, True])
def test_a_compiled_step_is_one_graph(capturable: bool, device: str) -> None:
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(n, device=device)) for n in (5, 700)]
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer = AdamW(params, lr=1e-2, capturable=capturable)
        optimizer.step()
        step = torch.compile(optimizer.step, fullgraph=True) if is_compiled else optimizer.step
        for _ in range(3):
            step()
        found.append([*params, *(optimizer.state[param]["step"] for param in params)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)


def test_a_step_on_another_device_is_traced() -> None:
    """The steps of a step that is not capturable are on the CPU; as on a GPU, so on the device `meta`."""
    params = [nn.Parameter(torch.empty(n, device="meta")) for n in (5, 700)]
    for param in params:
        param.grad = torch.empty_like(param)
    optimizer = AdamW(params, lr=1e-2)
    optimizer.step()
    torch.compile(optimizer.step, fullgraph=True, backend="eager")()
    assert {optimizer.state[param]["step"].item() for param in params} == {2.0}


def test_a_gradient_whose_square_is_infinite() -> None:
    """What of it is added to the state is not."""
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.full((3,), 1e20)
    optimizer = AdamW([param])
    optimizer.step()
    torch.testing.assert_close(optimizer.state[param]["exp_avg_sq"], torch.full((3,), 1e37))


def test_nan_stays_in_stochastic_rounding() -> None:
    weight = nn.Parameter(torch.tensor([math.nan, 1.0, math.inf], dtype=torch.bfloat16))
    weight.grad = torch.tensor([1.0, math.nan, 1.0], dtype=torch.bfloat16)
    AdamW([weight], stochastic_rounding=True).step()
    assert weight.isnan().tolist() == [True, True, False]
    assert weight[2] == math.inf


# --- refusals ----------------------------------------------------------------------------------------


def test_refusals() -> None:
    weight = nn.Parameter(torch.ones(3))
    for options, message in (
        ({"lr": -1.0}, "`lr` must be at least 0"),
        ({"lr": torch.ones(2)}, "`lr` must be one number"),
        ({"eps": -1.0}, "`eps`"),
        ({"betas": (1.0, 0.9)}, r"`betas\[0\]`"),
        ({"betas": (0.9, 1.0)}, r"`betas\[1\]`"),
        ({"betas": (0.9,)}, "`betas` must be two numbers"),
        ({"betas": 0.9}, "`betas` must be two numbers"),
        ({"weight_decay": -1.0}, "`weight_decay`"),
    ):
        with pytest.raises(ValueError, match=message):
            AdamW([weight], **options)
    for param, options, message in (
        (weight, {"state_dtype": torch.int32}, "`state_dtype`"),
        (nn.Parameter(torch.ones(3, dtype=torch.complex64)), {}, "must be floating-point"),
        (
            nn.Parameter(torch.ones(3).half()),
            {"state_dtype": torch.bfloat16},
            "cannot have states in torch.bfloat16",
        ),
        (nn.Parameter(torch.ones(3).half()), {"stochastic_rounding": True}, "which rounds bfloat16"),
    ):
        with pytest.raises(TypeError, match=message):
            AdamW([param], **options)
    for name in ("lr", "eps", "weight_decay"):
        with pytest.raises(TypeError, match=f"`{name}` must be a number"):
            AdamW([weight], **{name: "0.1"})
    for option in ({"differentiable": True}, {"decoupled_weight_decay": False}):
        optimizer = AdamW([nn.Parameter(torch.ones(3))])
        with pytest.raises(TypeError, match=f"`{next(iter(option))}` is not supported in a group"):
            optimizer.add_param_group({"params": [weight], **option})
        assert len(optimizer.param_groups) == 1
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        AdamW(table.parameters()).step()


def test_frozen_parameters_of_any_type() -> None:
    codes = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    phases = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
    weight = nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight, codes, phases], lr=0.1)
    weight.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), 1 - 0.1 * 0.01 - 0.1))
    assert list(optimizer.state) == [weight]
    phases.requires_grad_().grad = torch.ones_like(phases)
    with pytest.raises(TypeError, match="must be floating-point"):
        optimizer.step()


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"fused": False, "foreach": False}], ids=str)
def test_options_that_choose_among_the_implementations_of_pytorch(options: dict[str, bool]) -> None:
    weights = [[nn.Parameter(torch.ones(3))] for _ in range(3)]
    made = AdamW(weights[0], **options), AdamW([{"params": weights[1], **options}]), AdamW(weights[2])
    for optimizer, (weight,) in zip(made, weights, strict=True):
        weight.grad = torch.ones(3)
        optimizer.step()
    assert torch.equal(weights[0][0], weights[2][0])
    assert torch.equal(weights[1][0], weights[2][0])
    torch.optim.AdamW(weights[2]).load_state_dict(made[0].state_dict())


def test_fake_tensors() -> None:
    """PyTorch estimates memory with them. They have no values, so the number of steps cannot be read."""
    with FakeTensorMode():
        model = nn.Linear(3, 2)
        optimizer = AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(1, 3)).sum().backward()
            optimizer.step()
        assert optimizer.state[model.weight]["exp_avg"].shape == (2, 3)


def test_a_group_that_rounds_at_random_has_a_seed() -> None:
    weights = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(3)]

    def seeds_from(seed: int) -> list[int]:
        torch.manual_seed(seed)
        groups = [{"params": [weight], "stochastic_rounding": i > 0} for i, weight in enumerate(weights)]
        return [group["seed"] for group in AdamW(groups).param_groups]

    assert seeds_from(0)[0] == 0
    assert seeds_from(0)[1] == seeds_from(0)[2] != 0
    assert seeds_from(0)[1] != seeds_from(1)[1]


@pytest.mark.compiler
@pytest.mark.parametrize(
    "op", [adamw_, adamw_float32_state_, adamw_bfloat16_state_], ids=["same", "float32", "bfloat16"]
)
def test_verify(op: Any, device: str) -> None:
    with torch.device("cpu"):
        record = opwright.verify(op, devices=[device])
    assert record.passed, record.failures
    assert device in record.backends


def test_hooks_of_load_state_dict() -> None:
    """What hooks before and behind the loading change is what is loaded."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW([param])
    param.grad = torch.ones(2)
    optimizer.step()
    state = optimizer.state_dict()

    def change(_: Any, given: Any) -> Any:
        return {**given, "state": {0: {**given["state"][0], "exp_avg": torch.full((2,), 7.0)}}}

    before = optimizer.register_load_state_dict_pre_hook(change)
    optimizer.load_state_dict(state)
    assert optimizer.state[param]["exp_avg"].tolist() == [7, 7]
    before.remove()
    optimizer.register_load_state_dict_post_hook(lambda made: made.state[param]["exp_avg"].fill_(9))
    optimizer.load_state_dict(state)
    assert optimizer.state[param]["exp_avg"].tolist() == [9, 9]


def test_a_state_of_another_shape_is_refused() -> None:
    small, large = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4, 4))
    optimizer = AdamW([small])
    small.grad = torch.ones(4)
    optimizer.step()
    with pytest.raises(ValueError, match="`state_dict` is of a parameter of another shape"):
        (other := AdamW([large])).load_state_dict(optimizer.state_dict())
    assert not other.state[large]
