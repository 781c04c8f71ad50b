"""Draws the picture of the README from the summary: times beside those of PyTorch, for builds, calls and kernels.

python benchmarks/picture.py
"""

from __future__ import annotations

import re
from html import escape
from typing import NamedTuple

from summary import RESULTS, number, read

PICTURE = RESULTS / "beside_pytorch.svg"
WIDTH, BAR, ROW, LEFT, TOP = 770, 9, 44, 262, 34  # in pixels
LONGEST = WIDTH - LEFT - 170  # a bar; its label follows
OURS, THEIRS, TEXT = "#2f6fde", "#a9b4c2", "#7a8594"  # to be read on white and on black
FONT = "font-family='system-ui, sans-serif' font-size='12'"


class Pair(NamedTuple):
    """A row of the picture: a figure of ours, and of whom it is beside.

    Attributes:
        figure: the row of the summary.
        rival: its name in the picture.
        beside: where its figure is: a row of the summary, or a name in the column `beside` of ours.
    """

    title: str
    script: str
    figure: str
    rival: str
    beside: str


PAIRS = [
    Pair("first build of a kernel", "toolkit", "cold build, d_sigmoid inline",
         "load_inline", "cold build, torch load_inline"),
    Pair("one source of ten edited", "extensions", "one of ten changed, opwright",
         "cpp_extension", "one of ten changed, torch"),
    Pair("call", "toolkit", "call, opwright", "custom_op", "call, custom_op"),
    Pair("call that records a gradient", "toolkit", "call, opwright, gradient",
         "custom_op", "call, custom_op, gradient"),
    Pair("bias + GELU, bf16[8192, 4096], H200", "bias_gelu_cuda",
         "bf16[8192, 4096] bf16[4096] approximate='tanh', forward", "torch.compile", "compile"),
    Pair("LSTM step, bf16, H=1024, B=32, H200", "lstm_cuda", "bfloat16 H=1024 B=32 T=1024, forward",
         "cuDNN", "nn.LSTM"),
]  # fmt: skip


def draw() -> str:
    """Returns the picture as SVG. Each row has a scale of its own: the longer bars are all of one length."""
    rows = {(row["script"], row["figure"]): row for row in read()}
    lines = []
    for i, pair in enumerate(PAIRS):
        row = rows[f"benchmarks/{pair.script}.py", pair.figure]
        unit = row["unit"].partition("/")[0]
        ours, theirs = float(row["value"]), _rival(pair, row, rows)
        longest, y = max(ours, theirs), TOP + i * ROW
        lines.append(
            f"<text x='{LEFT - 14}' y='{y + BAR + 5}' text-anchor='end' fill='{TEXT}'>{escape(pair.title)}</text>"
        )
        for at, (name, value, color) in enumerate((("Opwright", ours, OURS), (pair.rival, theirs, THEIRS))):
            top, length = y + at * (BAR + 5), LONGEST * value / longest
            label = f"{name} {number(float(f'{value:.2g}'))} {unit}"
            lines.append(f"<rect x='{LEFT}' y='{top}' width='{length:.1f}' height='{BAR}' rx='2' fill='{color}'/>")
            lines.append(f"<text x='{LEFT + length + 8:.1f}' y='{top + BAR}' fill='{TEXT}'>{escape(label)}</text>")
    height = TOP + len(PAIRS) * ROW
    head = f"<text x='{LEFT}' y='18' fill='{TEXT}'>time; shorter is better</text>"
    about = "Times of Opwright beside those of PyTorch, as in the table below"
    size = f"viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}'"
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img' aria-label='{about}' {FONT}>",
            head,
            *lines,
            "</svg>\n",
        ]
    )


def _rival(pair: Pair, row: dict[str, str], rows: dict[tuple[str, str], dict[str, str]]) -> float:
    beside = rows.get((row["script"], pair.beside))
    if beside is not None:
        return float(beside["value"])
    return float(re.search(rf"(?:^|; ){re.escape(pair.beside)} ([\d.]+)", row["beside"])[1])


if __name__ == "__main__":
    PICTURE.write_text(draw())
