"""Draws how the library was built: what ran when, and what each GPU kernel takes."""

from __future__ import annotations

from collections.abc import Sequence

from opwright.errors import plural
from opwright.quantities import BYTES, TIME, date, tick_with_unit, with_unit
from opwright.records import KernelUse
from opwright.report.cards import Card
from opwright.report.svg import Heading, Picture, Row, Table, draw_rows, linear, round_ticks

_MOST_REGISTERS = 255  # that a thread can have
_SHOWN = 24  # kernels; of more, those that spill or take the most registers


def draw_timeline(card: Card, name: str) -> Picture | None:
    """Draws the commands of the build, or returns None when nobody kept them."""
    build = card.build
    if build is None or not build.steps:
        return None
    limit = max(step.start + step.seconds for step in build.steps)
    if limit <= 0:
        return None
    rows: list[Row | Heading] = [
        Row(step.name, step.start, step.start + step.seconds, _time(step.seconds), style="c2") for step in build.steps
    ]
    longest = max(build.steps, key=lambda step: step.seconds)
    told = f"{plural(len(build.steps), 'command')} in {_time(limit)}; the longest is {longest.name} with {_time(longest.seconds)}."
    svg = draw_rows(
        name, f"{card.name}: build", told, rows, linear(limit), round_ticks(limit, lambda value: tick_with_unit(value * 1e6, TIME)), "time since the build began"
    )  # fmt: skip
    caption = (
        f"Built {date(build.built)} with {build.compiler}: {plural(len(build.operators), 'operator')}, "
        f"{with_unit(build.library_bytes, BYTES)}."
    )
    table = Table(["command", "began", "took"], [[s.name, _time(s.start), _time(s.seconds)] for s in build.steps])
    return Picture("Build", caption, [svg] if len(build.steps) > 1 else [], table=table)


def draw_kernels(card: Card, name: str) -> Picture | None:
    """Draws the registers and spills of GPU kernels, or returns None when there are none."""
    build = card.build
    if build is None or not build.kernels:
        return None
    rows: list[Row | Heading] = []
    ranked = sorted(build.kernels, key=lambda kernel: (-kernel.spill_bytes, -kernel.registers))
    shown = [kernel for kernel in build.kernels if kernel in ranked[:_SHOWN]]
    for architecture in dict.fromkeys(kernel.architecture for kernel in shown):
        rows.append(Heading(architecture))
        for kernel in (k for k in shown if k.architecture == architecture):
            spilled = f", {with_unit(kernel.spill_bytes, BYTES)} spilled" if kernel.spill_bytes else ""
            rows.append(
                Row(
                    kernel.kernel,
                    0.0,
                    float(kernel.registers),
                    f"{plural(kernel.registers, 'register')}{spilled}",
                    style="c0" if spilled else "c2",
                    is_hollow=bool(spilled),
                )
            )
    spilling = sum(kernel.spill_bytes > 0 for kernel in build.kernels)
    told = f"{plural(len(build.kernels), 'kernel')}, up to {max(k.registers for k in build.kernels)} registers; {spilling or 'none'} of them spill."
    ticks = [(float(value), str(value)) for value in (0, 32, 64, 96, 128, 168, _MOST_REGISTERS)]
    svg = draw_rows(
        name, f"{card.name}: registers", told, rows, linear(_MOST_REGISTERS), ticks, "registers of a thread"
    )
    caption = (
        f"Registers of a thread, of at most {_MOST_REGISTERS}. Outlined bars: registers ran out, and so many bytes of each "
        "thread go through memory."
    )
    if len(shown) == 1:
        return Picture("Registers and spills", told, [], table=_kernel_table(shown))
    if len(shown) < len(build.kernels):
        caption += f" Of {len(build.kernels)} kernels, the {len(shown)} that spill or take the most registers."
    return Picture("Registers and spills", caption, [svg], table=_kernel_table(shown))


def _kernel_table(kernels: Sequence[KernelUse]) -> Table:
    return Table(
        ["kernel", "architecture", "registers", "spilled", "stack", "shared memory"],
        [
            [k.kernel, k.architecture, str(k.registers), *(with_unit(b, BYTES) for b in (k.spill_bytes, k.stack_bytes, k.shared_bytes))]
            for k in kernels
        ],
    )  # fmt: skip


def _time(seconds: float) -> str:
    return with_unit(seconds * 1e6, TIME)
