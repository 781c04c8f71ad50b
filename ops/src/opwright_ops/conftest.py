"""Fixtures of the operators' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs a test on each device: tensors are made there where nothing else is said."""
    if request.param == "cpu":
        yield "cpu"
        return
    monkeypatch.setenv("OPWRIGHT_REQUIRE_KERNELS", "1")  # the reference would give the right values too
    with torch.device(request.param):
        yield request.param
