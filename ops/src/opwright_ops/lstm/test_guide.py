"""The code blocks of docs/guides/lstm.md run, and print what is shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from opwright_ops.lstm import LSTM

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "lstm.md"


@pytest.mark.skipif(not GUIDE.exists(), reason="installed without the guide")
def test_blocks(capsys) -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    exec("\n".join(text for language, text in blocks if language == "python"), {})
    assert capsys.readouterr().out == "".join(text for language, text in blocks if not language)


@pytest.mark.skipif(not GUIDE.exists(), reason="installed without the guide")
def test_every_option_is_in_the_table() -> None:
    options = list(LSTM.__init__.__kwdefaults__)
    assert re.findall(r"^\| `(\w+)=", GUIDE.read_text(), re.MULTILINE) == options
