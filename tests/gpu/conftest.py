"""Operators with inline CUDA kernels: what the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if "tests/gpu/" not in str(item.path).replace("\\", "/"):
            continue
        item.add_marker(pytest.mark.gpu)
        if count == 0:
            item.add_marker(pytest.mark.skip(reason="no GPU, or a torch without CUDA"))
        elif item.get_closest_marker("two_gpus") and count < 2:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs, there is one"))


@pytest.fixture(autouse=True)
def _large_memory_returned() -> Iterator[None]:
    """Gives back what a test of large tensors leaves in PyTorch's cache: other processes test on this GPU."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _kernels_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a kernel that cannot be built a failure: the reference would give the right values too."""
    monkeypatch.setenv("OPWRIGHT_REQUIRE_KERNELS", "1")
