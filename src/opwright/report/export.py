"""Writes the pictures as files of their own: SVG, which needs nothing, and PNG."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from html import unescape
from importlib.resources import files
from pathlib import Path

from opwright import __version__
from opwright.errors import RecordError
from opwright.quantities import date
from opwright.records import Record
from opwright.report.cards import collect_cards
from opwright.report.pictures import draw_all, slug_of
from opwright.report.svg import element, shorten, text

_PNG_SCALE = 2.0  # for screens with two pixels in one
_ABOVE, _BELOW = 42.0, 24.0  # pixels for the heading and for the origin
_HEADING_LETTER, _LETTER = 8.2, 5.9  # their widths, on the generous side


@dataclass(frozen=True)
class File:
    """A picture that was written.

    Attributes:
        operator: whose it is, with the machine where that has to be said.
        told: what it shows, in words.
    """

    path: Path
    operator: str
    told: str


def write_svg(records: Sequence[Record], folder: Path) -> list[File]:
    """Writes each picture as `<operator>-<picture>.svg`, with its own colours for light and dark.

    Raises:
        RecordError: there are no records.
    """
    return _write(records, folder, "svg", str.encode, is_dark_too=True)


def write_png(records: Sequence[Record], folder: Path) -> list[File]:
    """Writes each picture as `<operator>-<picture>.png`, in the light colours.

    Raises:
        RecordError: there are no records, or vl-convert is not installed.
    """
    try:
        import vl_convert  # pyright: ignore[reportMissingImports]: of the extra `report`
    except ImportError:
        raise RecordError(
            "report --png",
            "PNG files are made by vl-convert, which is not installed",
            hint="`pip install vl-convert-python`, or `opwright report --svg FOLDER`, which needs nothing",
        ) from None
    return _write(records, folder, "png", lambda svg: vl_convert.svg_to_png(svg, scale=_PNG_SCALE), is_dark_too=False)


def _write(
    records: Sequence[Record], folder: Path, ending: str, convert: Callable[[str], bytes], *, is_dark_too: bool
) -> list[File]:
    cards = collect_cards(records)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[File] = []
    for index, card in enumerate(cards, start=1):
        # The number keeps apart an operator on two machines, and names that differ in their signs alone.
        several = sum(slug_of(other) == slug_of(card) for other in cards) > 1
        slug = slug_of(card) + (f"-{index}" if several else "")
        operator = card.name + (f" on {card.place}" if len({other.place for other in cards}) > 1 else "")
        origin = f"{card.place}, PyTorch {card.machine.torch}, {date(card.created)[:10]}, Opwright {__version__}"
        for kind, picture in draw_all(card, slug).items():
            heading = f"{card.name}: {picture.title[0].lower()}{picture.title[1:]}"
            for i, svg in enumerate(picture.svg, start=1):
                number = f"-{i}" if len(picture.svg) > 1 else ""
                path = folder / f"{slug}-{kind}{number}.{ending}"
                path.write_bytes(convert(stand_alone(svg, heading, origin, is_dark_too=is_dark_too)))
                written.append(File(path, operator, f"{heading}. {_description(svg)}"))
    return written


def _description(svg: str) -> str:
    found = re.search(r"<desc[^>]*>([^<]*)</desc>", svg)
    return unescape(unescape(found[1])) if found else ""


def stand_alone(svg: str, heading: str, origin: str, *, is_dark_too: bool) -> str:
    """Returns a drawing of the page as a file of its own: with its styles, every colour written out.

    Args:
        heading: what is written above it: out of the page nobody knows what it is of.
        origin: what is written below it: where it was measured.
    """
    light, dark = _rules()
    style = light + (f"@media (prefers-color-scheme: dark) {{\n{dark}}}\n" if is_dark_too else "")
    found = re.match(r'<svg viewBox="0 0 ([\d.]+) ([\d.]+)" width="[\d.]+" height="[\d.]+"', svg)
    assert found is not None
    width, height = float(found[1]), float(found[2])
    tall = height + _ABOVE + _BELOW
    size = f'viewBox="0 {-_ABOVE:g} {width:g} {tall:g}" width="{width:g}" height="{tall:g}"'
    head, _, rest = svg[found.end() :].partition(">")
    added = [
        element("style", style),
        element("rect", class_="page", y=-_ABOVE, width="100%", height="100%"),
        text(8, 24 - _ABOVE, shorten(heading, int(width / _HEADING_LETTER)), class_="heading"),
        text(8, height + 14, shorten(origin, int(width / _LETTER)), class_="tick"),
    ]
    return f'<svg {size}{head} xmlns="http://www.w3.org/2000/svg">{"".join(added)}{rest}\n'


@cache
def _rules() -> tuple[str, str]:
    """Returns the rules of drawings from the page's style sheet, in the light and in the dark colours."""
    sheet = (files("opwright.report") / "templates" / "style.css").read_text()
    light, dark = (
        [dict(re.findall(r"(--\w+): ([^;]+);", block)) for block in re.findall(r":root \{([^}]*)\}", sheet)]
    )[:2]
    rules = [line for line in sheet.splitlines() if line.startswith(("svg ", ".c0 {", ".c3 {"))]
    rules.append("svg text { font-family: var(--sans); }")
    rules.append("svg .page { fill: var(--card); }")
    rules.append("svg .heading { font-weight: 600; font-size: 15px; }")

    def with_colours(colours: dict[str, str]) -> str:
        written = re.sub(r"var\((--\w+)\)", lambda found: colours[found[1]], "\n".join(rules))
        return written.replace("svg ", "") + "\n"

    return with_colours(light), with_colours(light | dark)
