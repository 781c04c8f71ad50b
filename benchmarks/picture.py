"""Draws the pictures of the README and of the documentation's first page from the summary.

python benchmarks/picture.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from typing import NamedTuple

from summary import RESULTS, number, read

WIDTH, BAR, GAP, LEFT, TOP = 770, 9, 16, 262, 34  # in pixels
LONGEST = WIDTH - LEFT - 170  # a bar; its label follows
OURS, THEIRS, TEXT = "#2f6fde", "#a9b4c2", "#7a8594"  # to be read on white and on black
FONT = "font-family='system-ui, sans-serif' font-size='12'"


class Bar(NamedTuple):
    """A bar of a group.

    Attributes:
        size: its length, in any unit.
    """

    name: str
    size: float
    label: str
    is_ours: bool = False


class Picture(NamedTuple):
    """A picture of groups of bars.

    Attributes:
        groups: the bars by the title of their group; they are read from the summary.
        full: the size of the longest bar there can be; 0: the longest of each group.
    """

    file: str
    head: str
    about: str
    groups: Callable[[], dict[str, list[Bar]]]
    full: float = 0


class Pair(NamedTuple):
    """A figure of ours, and of whom it is beside.

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


TIMES = [
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

SHARES = [
    Pair("RMS norm, backward", "norm_cuda", "rms_norm bfloat16, backward: share of a copy, median of 4 shapes",
         "torch.compile", "compile"),
    Pair("add and RMS norm, backward", "norm_cuda",
         "add_rms_norm bfloat16, backward: share of a copy, median of 4 shapes", "torch.compile", "compile"),
    Pair("layer norm, backward", "norm_cuda", "layer_norm bfloat16, backward: share of a copy, median of 4 shapes",
         "torch.compile", "compile"),
    Pair("cross-entropy, forward and backward", "cross_entropy_cuda",
         "cross_entropy bfloat16 8192 x 128256, both: share of a copy", "torch.compile", "compile"),
    Pair("rotary embedding, backward", "rope_cuda",
         "rope bfloat16 4x32x8x4096x128 bhtd, backward: share of a copy", "torch.compile", "compile"),
    Pair("AdamW", "adamw_cuda", "AdamW bfloat16, 1 x 201 M: share of a copy", "fused=True", "fused"),
]  # fmt: skip

HARNESSES = ["opwright", "gradcheck", "assert_close", "OpInfo", "KernelBench", "opcheck"]


def rows_of_summary() -> dict[tuple[str, str], dict[str, str]]:
    return {(row["script"], row["figure"]): row for row in read()}


def times() -> dict[str, list[Bar]]:
    return {pair.title: _bars(pair, lambda value, unit: f"{number(float(f'{value:.2g}'))} {unit}") for pair in TIMES}


def shares() -> dict[str, list[Bar]]:
    return {pair.title: _bars(pair, lambda value, _: f"{100 * value:.0f} %") for pair in SHARES}


def harnesses() -> dict[str, list[Bar]]:
    rows, bars = rows_of_summary(), []
    for name in HARNESSES:
        row = rows["benchmarks/harnesses.py", f"mutants killed by {name}"]
        found, count = int(row["value"]), int(row["unit"].rpartition(" ")[2])
        is_ours = name == "opwright"
        bars.append(Bar("opwright verify" if is_ours else name, found / count, f"{found} of {count}", is_ours))
    return {"planted mistakes found": bars}


def _bars(pair: Pair, label: Callable[[float, str], str]) -> list[Bar]:
    rows = rows_of_summary()
    row = rows[f"benchmarks/{pair.script}.py", pair.figure]
    unit = row["unit"].partition("/")[0]
    ours, theirs = float(row["value"]), _rival(pair, row, rows)
    return [Bar("Opwright", ours, label(ours, unit), True), Bar(pair.rival, theirs, label(theirs, unit))]


def _rival(pair: Pair, row: dict[str, str], rows: dict[tuple[str, str], dict[str, str]]) -> float:
    beside = rows.get((row["script"], pair.beside))
    if beside is not None:
        return float(beside["value"])
    return float(re.search(rf"(?:^|; ){re.escape(pair.beside)} ([\d.]+)", row["beside"])[1])


PICTURES = [
    Picture("beside_pytorch.svg", "time; shorter is better",
            "Times of Opwright beside those of PyTorch, as in the table below", times),
    Picture("operators.svg", "share of the speed of a copy, bfloat16, NVIDIA H200; longer is better",
            "Operators of opwright_ops beside torch.compile, as shares of the speed of a copy", shares, 1),
    Picture("mistakes.svg", "wrong versions of bias_gelu, d_sigmoid and softmax; longer is better",
            "Wrong kernels that opwright verify and other harnesses find", harnesses, 1),
]  # fmt: skip


def draw(picture: Picture) -> str:
    """Returns a picture as SVG."""
    lines, y = [], TOP
    for title, bars in picture.groups().items():
        full = picture.full or max(bar.size for bar in bars)
        lines.append(f"<text x='{LEFT - 14}' y='{y + BAR + 5}' text-anchor='end' fill='{TEXT}'>{escape(title)}</text>")
        for bar in bars:
            length, color = LONGEST * bar.size / full, OURS if bar.is_ours else THEIRS
            lines.append(f"<rect x='{LEFT}' y='{y}' width='{length:.1f}' height='{BAR}' rx='2' fill='{color}'/>")
            text = escape(f"{bar.name} {bar.label}")
            lines.append(f"<text x='{LEFT + length + 8:.1f}' y='{y + BAR}' fill='{TEXT}'>{text}</text>")
            y += BAR + 5
        y += GAP
    head = f"<text x='{LEFT}' y='18' fill='{TEXT}'>{escape(picture.head)}</text>"
    size = f"viewBox='0 0 {WIDTH} {y}' width='{WIDTH}' height='{y}'"
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img' aria-label='{picture.about}' {FONT}>",
            head,
            *lines,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    for picture in PICTURES:
        (RESULTS / picture.file).write_text(draw(picture))
