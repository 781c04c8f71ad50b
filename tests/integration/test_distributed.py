"""Operators on distributed tensors: two processes give what one process gives, and wrong rules are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

import opwright
from opwright.records import VerifyRecord

PROGRAM = '''
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from opwright import Mutates, operator
from opwright.errors import ShardingError

dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
mesh = init_device_mesh("cpu", (2,))

@operator("dist::shift_gelu", cpu="""
#include <opwright/kernel.h>
template <typename T>
void shift_gelu(opwright::View<const T, 2> input, opwright::View<const T, 1> bias, opwright::View<T, 2> output) {
  for (int64_t i = 0; i < input.size(0); ++i)
    for (int64_t j = 0; j < input.size(1); ++j) {
      const T z = input(i, j) + bias(j);
      output(i, j) = z * T(0.5) * (T(1) + std::erf(z * T(0.70710678118654752)));
    }
}
OPWRIGHT_KERNEL(shift_gelu, float, double)
""")
def shift_gelu(input: Float[Tensor, "*batch n"], bias: Float[Tensor, "n"]) -> Float[Tensor, "*batch n"]:
    return F.gelu(input + bias)

@operator("dist::normalize")
def normalize(input: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    return input / input.square().sum(-1, keepdim=True).sqrt()

@operator("dist::accumulate")
def accumulate(sum: Mutates[Float[Tensor, "n"]], x: Float[Tensor, "n"]) -> None:
    sum.add_(x)

@operator("dist::add_all")
def add_all(xs: list[Float[Tensor, "n"]]) -> Float[Tensor, "n"]:
    return sum(xs)

torch.manual_seed(0)
x, bias, seed = torch.randn(5, 6).double(), torch.randn(6).double(), torch.randn(5, 6).double()

def call(function, tensors, placements):
    """Returns the result and the gradients of distributed tensors, whole, and the placement of the result."""
    given = [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(tensors, placements)]
    output = function(*given)
    output.backward(distribute_tensor(seed, mesh, [Replicate()]))
    return [output.full_tensor().detach(), *(t.grad.full_tensor() for t in given)], output.placements[0]

def call_whole(function, tensors):
    given = [t.clone().requires_grad_() for t in tensors]
    output = function(*given)
    output.backward(seed)
    return [output.detach(), *(t.grad for t in given)]

# Rows of five on two ranks are uneven. Entries of n are apart in one operator, not in the other.
for function in (shift_gelu, torch.ops.dist.shift_gelu):
    for placements, expected in (
        ((Shard(0), Replicate()), Shard(0)), ((Shard(1), Shard(0)), Shard(1)), ((Replicate(), Replicate()), Replicate()),
    ):
        got, placed = call(function, (x, bias), placements)
        assert placed == expected, (placements, placed)
        torch.testing.assert_close(got, call_whole(lambda a, b: F.gelu(a + b), (x, bias)))
for placement, expected in ((Shard(0), Shard(0)), (Shard(1), None)):
    got, placed = call(normalize, (x,), (placement,))
    assert placed == expected or (expected is None and placed != Shard(1)), (placement, placed)
    torch.testing.assert_close(got, call_whole(lambda a: F.normalize(a, dim=-1, eps=0), (x,)))

total = distribute_tensor(torch.zeros(6).double(), mesh, [Shard(0)])
accumulate(total, distribute_tensor(bias, mesh, [Replicate()]))
assert total.placements == (Shard(0),)
torch.testing.assert_close(total.full_tensor(), bias)
total = distribute_tensor(torch.zeros(6).double(), mesh, [Replicate()])
for _ in range(2):
    accumulate(total, distribute_tensor(bias, mesh, [Replicate()]))
torch.testing.assert_close(total.to_local(), 2 * bias)
pair = tuple(distribute_tensor(t, mesh, [Shard(0)]) for t in (bias, x[0]))
for _ in range(2):  # the second call took a plan of the first, whose key held the tensors
    torch.testing.assert_close(add_all(pair).full_tensor(), bias + x[0])
with torch.no_grad():
    made = distribute_tensor(torch.zeros(5, 6).double(), mesh, [Shard(1)])
    rows = distribute_tensor(x, mesh, [Shard(0)])
    shift_gelu(rows, distribute_tensor(bias, mesh, [Replicate()]), out=made)
torch.testing.assert_close(made.full_tensor(), F.gelu(x + bias))
try:
    shift_gelu(rows, bias)
except ShardingError as error:
    assert "`bias` is a plain tensor among distributed ones" in str(error), error
else:
    raise AssertionError("a plain tensor was taken")

# FSDP2: each rank has half of the batch and half of each parameter.
class Model(nn.Module):
    def __init__(self, activate):
        super().__init__()
        self.linear, self.bias, self.activate = nn.Linear(6, 4, bias=False), nn.Parameter(torch.ones(4)), activate

    def forward(self, x):
        return self.activate(self.linear(x), self.bias)

def train(model, batch, scale):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        (model(batch).square().sum() * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]

batch = torch.randn(8, 6)
torch.manual_seed(1)
alone = train(Model(lambda x, b: F.gelu(x + b)), batch, 0.1)
torch.manual_seed(1)
sharded = Model(shift_gelu)
fully_shard(sharded, mesh=mesh)
mine = batch.chunk(2)[int(sys.argv[1])]
# FSDP divides the sum of the gradients by the number of ranks.
torch.testing.assert_close(train(sharded, mine, 0.2), alone)

# An optimizer whose step writes into the shards: even, uneven and empty ones, and parameters that all ranks have.
from opwright_ops import AdamW

def step(optimizer_class, features, dtype=torch.float32, **options):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, features), nn.Linear(features, 3)).to(dtype)
    fully_shard(model[0], mesh=mesh)
    for name, parameter in list(model[1].named_parameters()):
        model[1].register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    for _ in range(3):
        hidden = model[0](batch.to(dtype)[:, :6])
        hidden = DTensor.from_local(hidden, mesh, [Replicate()])
        model[1](hidden).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() for p in model.parameters()], model[1].weight.to_local()

for features in (4, 5, 1):
    for options in ({}, {"amsgrad": True, "maximize": True}):
        (found, _), (expected, _) = (step(each, features, **options) for each in (AdamW, torch.optim.AdamW))
        torch.testing.assert_close(found, expected)
_, here = step(AdamW, 1, torch.bfloat16, stochastic_rounding=True)
both = [torch.empty_like(here) for _ in range(2)]
dist.all_gather(both, here)
assert torch.equal(*both)
dist.destroy_process_group()
'''


@pytest.mark.compiler
def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    command = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(meeting)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0][-3000:] + outputs[1][-3000:]


def verify(function) -> VerifyRecord:
    return opwright.verify(function, checks=["sharding"], devices=["cpu"])


def declare_outer(ns: str):
    @opwright.operator(f"{ns}::outer")
    def outer(x: Float[Tensor, "m"], y: Float[Tensor, "n"]) -> Float[Tensor, "m n"]:
        return x[:, None] * y

    return outer


def test_derived_rules_are_right(ns: str) -> None:
    assert verify(declare_outer(ns)).passed


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (lambda x, y: [({"x": Shard(0)}, Shard(1))], "x Shard(0), y Replicate -> output Shard(1)"),
        (lambda x, y: [({"x": Partial(), "y": Partial()}, Partial())], "not linear in `x` and `y`"),
        (lambda x, y: [({"x": Shard(0), "y": Shard(0)}, Shard(0))], "y Shard(0)"),
    ],
    ids=["swapped axis", "not linear", "both sharded"],
)
def test_a_wrong_rule_of_the_author_is_found(ns: str, rule, says: str) -> None:
    outer = declare_outer(f"{ns}w")
    outer.sharding(rule)
    record = verify(outer)
    assert not record.passed
    assert says in f"{record.failures[0].case}: {record.failures[0].message}"


def test_a_sharded_reduction_is_found(ns: str) -> None:
    @opwright.operator(f"{ns}::total")
    def total(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
        return x.square().sum(-1)

    total.sharding(lambda x: [({"x": Shard(x.ndim - 1)}, Partial("max"))])
    assert not verify(total).passed
    total.sharding(lambda x: [({"x": Shard(x.ndim - 1)}, Partial())])
    assert verify(total).passed
