"""Writes the source file by which a pack is linked into a program."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from opwright.errors import PackFileError

_TEXT = """\
/* {pack}: {size} bytes, SHA-256 {sha256}.
 * Written by `opwright pack embed`; compile it into the program, and there:
 *
 *   extern "C" const unsigned char {symbol}_begin[], {symbol}_end[];
 *   opwright::triton::load_pack({{{symbol}_begin, {symbol}_end}}, "{name}");
 */
__asm__(
    ".pushsection .rodata\\n"
    ".balign 64\\n"
    ".globl {symbol}_begin\\n"
    ".hidden {symbol}_begin\\n"
    "{symbol}_begin:\\n"
    ".incbin \\"{path}\\"\\n"
    ".globl {symbol}_end\\n"
    ".hidden {symbol}_end\\n"
    "{symbol}_end:\\n"
    ".byte 0\\n"
    ".popsection\\n");
"""


def embed_text(pack: Path, name: str | None = None) -> str:
    """Returns a C file that holds a pack, read-only, at a multiple of 64 bytes.

    The symbols are hidden: two libraries of one process may each have a pack of that name.

    Args:
        pack: The pack; the file is read when the C file is compiled.
        name: What the symbols are called after; the pack's name without its ending if left out.

    Raises:
        PackFileError: It cannot be read or is damaged, or its path cannot be written into an assembler's string.
    """
    from .build import read

    read(pack)
    content = pack.read_bytes()
    path = os.path.abspath(pack)
    if any(letter in path for letter in '\n\r"\\'):
        raise PackFileError(
            str(pack),
            "its path has a quote, a backslash or a line's end, which an assembler does not take",
            hint="move it",
        )
    called = re.sub(r"\W", "_", name or pack.name.split(".")[0], flags=re.ASCII)
    return _TEXT.format(
        # A comment cannot hold its own end.
        pack=pack.name.replace("*/", "* /"),
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        symbol=f"opwright_pack_{called}",
        name=called,
        path=path,
    )
