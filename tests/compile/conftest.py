"""Operators with inline C++ kernels: what the tests of this folder share."""

import contextlib
import sys
import uuid

import pytest
import torch

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def ns():
    """Returns a namespace of operators that no other test uses: the registry is process-wide."""
    return f"t{uuid.uuid4().hex[:10]}"


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch):
    """A module that is written again within a second, at the same length, would be taken for the one before."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def strided(tensor):
    """Returns an equal tensor with gaps and, from two axes on, with the last two in the other order."""
    if tensor.ndim == 0:
        return torch.stack([tensor, tensor])[1]
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1, dtype=tensor.dtype)
    wide[..., 1::2] = tensor
    view = wide[..., 1::2]
    if tensor.ndim > 1:
        view = view.mT.clone(memory_format=torch.contiguous_format).mT
    assert torch.equal(view, tensor)
    return view


def _relaid(value, relay):
    if isinstance(value, list):
        return [_relaid(item, relay) for item in value]
    return relay(value) if isinstance(value, torch.Tensor) else value


def _plain(value):
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    return (value.double() if value.is_floating_point() else value).numpy()


@contextlib.contextmanager
def reference_runs(op):
    """Yields a list that grows by one entry whenever the reference stands in for the kernel."""
    runs, reference = [], op.operator.reference
    original = reference.run

    def counted(values):
        runs.append(1)
        return original(values)

    reference.run = counted
    try:
        yield runs
    finally:
        reference.run = original


@pytest.fixture(scope="session")
def count_reference():
    return reference_runs


@pytest.fixture(scope="session")
def entries():
    """Returns the two ways to call an operator: its Python function and `torch.ops`."""

    def both(op):
        declared = op.operator.declaration
        return op, getattr(getattr(torch.ops, declared.namespace), declared.name)

    return both


@pytest.fixture(scope="session")
def check(entries):
    """Returns a check of one operator against numpy, exact: through both entries, in every dtype and layout.

    `make(dtype)` gives the arguments, small whole numbers, so that no dtype has to round; `expected`
    gets them as numpy arrays. Dtypes outside `compiled` must run the reference, the others must not.
    """

    def run(op, make, expected, *, dtypes=FLOATS, compiled=FLOATS, out_dtypes=None, **options):
        for dtype in dtypes:
            args = make(dtype)
            wanted = expected(*map(_plain, args))
            wanted = wanted if isinstance(wanted, tuple) else (wanted,)
            for entry in entries(op):
                for relay in (lambda t: t, strided):
                    with reference_runs(op) as runs:
                        got = entry(*_relaid(args, relay), **options)
                    assert bool(runs) == (dtype not in compiled), f"{dtype}: {len(runs)} reference runs"
                    got = tuple(got) if isinstance(got, (tuple, list)) else (got,)
                    assert [g.dtype for g in got] == list(out_dtypes or [dtype] * len(wanted))
                    for g, w in zip(got, wanted, strict=True):
                        assert g.is_contiguous()
                        torch.testing.assert_close(g.double(), torch.as_tensor(w).double(), rtol=0, atol=0)

    return run


@pytest.fixture
def whole():
    """Returns a maker of tensors of small whole numbers, the same in every run."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape, dtype=torch.float32, low=-4, high=5):
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    return make
