"""The code of docs/guides/verify-anything.md runs, and its claims hold."""

from __future__ import annotations

import re
from pathlib import Path

import torch

GUIDE = Path(__file__).parents[3] / "docs/guides/verify-anything.md"


def test_the_code_of_the_guide_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    torch.manual_seed(0)
    namespace: dict = {"__name__": "guide"}
    for block in blocks:
        exec(block, namespace)  # its assertions are the test
