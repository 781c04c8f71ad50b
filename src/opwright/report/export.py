"""Writes the pictures as files of their own: SVG, which needs nothing, and PNG."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from opwright.errors import RecordError
from opwright.records import Record
from opwright.report.cards import collect_cards
from opwright.report.pictures import draw_all, slug_of
from opwright.report.svg import element

_PNG_SCALE = 2.0  # for screens with two pixels in one


def write_svg(records: Sequence[Record], folder: Path) -> list[Path]:
    """Writes each picture as `<operator>-<picture>.svg`, with its own colours for light and dark.

    Raises:
        RecordError: there are no records.
    """
    return _write(records, folder, "svg", lambda svg: stand_alone(svg).encode())


def write_png(records: Sequence[Record], folder: Path) -> list[Path]:
    """Writes each picture as `<operator>-<picture>.png`, in the light colours.

    Raises:
        RecordError: there are no records, or vl-convert is not installed.
    """
    try:
        import vl_convert
    except ImportError:
        raise RecordError(
            "report --png",
            "PNG files are made by vl-convert, which is not installed",
            hint="`pip install vl-convert-python`, or `opwright report --svg FOLDER`, which needs nothing",
        ) from None
    return _write(
        records, folder, "png", lambda svg: vl_convert.svg_to_png(stand_alone(svg, is_dark_too=False), scale=_PNG_SCALE)
    )


def _write(
    records: Sequence[Record], folder: Path, ending: str, convert: Callable[[str], bytes]
) -> list[Path]:
    cards = collect_cards(records)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for index, card in enumerate(cards, start=1):
        # The number keeps apart an operator on two machines.
        several = sum(other.name == card.name for other in cards) > 1
        slug = slug_of(card) + (f"-{index}" if several else "")
        for kind, picture in draw_all(card, slug).items():
            for i, svg in enumerate(picture.svg, start=1):
                number = f"-{i}" if len(picture.svg) > 1 else ""
                path = folder / f"{slug}-{kind}{number}.{ending}"
                path.write_bytes(convert(svg))
                written.append(path)
    return written


def stand_alone(svg: str, is_dark_too: bool = True) -> str:
    """Returns a drawing of the page as a file of its own: with its styles, every colour written out."""
    light, dark = _rules()
    style = light + (f"@media (prefers-color-scheme: dark) {{\n{dark}}}\n" if is_dark_too else "")
    head, _, rest = svg.partition(">")
    page = element("rect", class_="page", width="100%", height="100%")
    return f'{head} xmlns="http://www.w3.org/2000/svg">{element("style", style)}{page}{rest}\n'


@cache
def _rules() -> tuple[str, str]:
    """Returns the rules of drawings from the page's style sheet, in the light and in the dark colours."""
    text = files("opwright.report").joinpath("templates", "style.css").read_text()
    light, dark = ([dict(re.findall(r"(--\w+): ([^;]+);", block)) for block in re.findall(r":root \{([^}]*)\}", text)])[:2]
    rules = [line for line in text.splitlines() if line.startswith(("svg ", ".c0 {", ".c3 {"))]
    rules.append("svg text { font-family: var(--sans); }")
    rules.append("svg .page { fill: var(--card); }")

    def with_colours(colours: dict[str, str]) -> str:
        written = re.sub(r"var\((--\w+)\)", lambda found: colours[found[1]], "\n".join(rules))
        return written.replace("svg ", "") + "\n"

    return with_colours(light), with_colours(light | dark)
