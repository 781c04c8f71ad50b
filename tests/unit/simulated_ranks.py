"""Several ranks in one process, by PyTorch's own simulation."""

from __future__ import annotations

import contextlib
import itertools
import math

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


@contextlib.contextmanager
def ranks(*shape):
    """Yields a mesh of this shape."""
    dist.init_process_group("fake", rank=0, world_size=math.prod(shape))
    try:
        with LocalTensorMode(math.prod(shape)):
            yield init_device_mesh("cpu", shape)
    finally:
        dist.destroy_process_group()


def spread(tensor, mesh, *placements):
    """Returns a tensor distributed over a mesh, a leaf that needs a gradient if the tensor does.

    Each rank has memory of its own: `distribute_tensor` would give all simulated ranks the same.
    """
    parts = {}
    for rank, place in enumerate(itertools.product(*map(range, mesh.shape))):
        part = tensor.detach()
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                pieces = part.chunk(mesh.size(axis), placement.dim)
                empty = part.narrow(placement.dim, 0, 0)
                part = pieces[place[axis]] if place[axis] < len(pieces) else empty
        parts[rank] = part.clone()
    made = DTensor.from_local(
        LocalTensor(parts), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )
    return made.requires_grad_(tensor.requires_grad)


def partial(parts, mesh, placement):
    """Returns what is the sum of one part of each rank."""
    return DTensor.from_local(LocalTensor(dict(enumerate(parts))), mesh, [placement], run_check=False)


def whole(tensor):
    """Returns what a distributed tensor stands for."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.reconcile() if hasattr(full, "reconcile") else full.detach()


def hold(function, tensors, placements, mesh, **options):
    """Asserts that a call on distributed tensors gives the results and gradients of one process.

    Returns:
        The placements of the results, then those of the gradients.
    """
    alone = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    apart = [spread(t, mesh, *p) for t, p in zip(tensors, placements, strict=True)]
    wanted, got = function(*alone, **options), function(*apart, **options)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    got = got if isinstance(got, tuple) else (got,)
    found = [g.placements for g in got]
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(whole(g), w.detach())
    needed = [i for i, t in enumerate(alone) if t.requires_grad]
    if needed:
        for results in (wanted, got):
            sum((k + 1) * r.square().sum() for k, r in enumerate(results) if r.requires_grad).backward()
        for i in needed:
            torch.testing.assert_close(whole(apart[i].grad), alone[i].grad, rtol=1e-4, atol=1e-4)
            found.append(apart[i].grad.placements)
    return found
