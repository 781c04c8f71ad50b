"""A benchmark in a moment: verify is content, and the machine has limits that nothing passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import opwright
from opwright.bench import api
from opwright.records import Check, Limits, Machine, VerifyRecord

HERE = Machine("CPU", 1, "", "Linux", "3", "2", "g++", 0.0)
PASSED = VerifyRecord("elsewhere", [Check("numerics", "passed")], [], ["callable"], HERE, 0.0, 0.0)
QUICK = Limits(1e6, 1e6, 1e6, {"f32": 1e9}, 1.0, None, 1, 0.0)


def reference(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x) * w


@pytest.fixture(autouse=True)
def verified_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify finds most impostors by itself: here they have deceived it."""
    monkeypatch.setattr(api, "verify", lambda *args, **kwargs: PASSED)
    monkeypatch.setattr(api, "limits_of", lambda place, machine, again=False: QUICK)
    monkeypatch.setattr(api, "measure_limits_again", lambda place, machine, known: known)


def bench(candidate: Any, **options: Any) -> Any:
    samples = [(torch.randn(40, 30), torch.randn(30))]
    options = {"reference": reference, "samples": samples, "directions": ["forward"], "seconds": 0.0} | options
    return opwright.bench(candidate, [], **options)
