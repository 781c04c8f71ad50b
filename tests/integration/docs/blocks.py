"""Runs the code blocks of a page as its reader would.

`python tests/integration/docs/blocks.py PAGE...` writes what they print now.

A block with a title is a file. The commands of a `console` block run in the folder of the files, and print what stands
below each; those of a `sh` block must succeed. Python without a title runs in one program for the page. It prints the
blocks of `text` that follow Python. A line `...` in shown output stands for any lines. Numbers with a unit of time or
speed may differ, and so may the error of a kernel that reads what is not its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(r'^```(\w*)(?: title="([^"\n]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_VARIABLE = re.compile(
    r"±?[\d.]+ ?(?:%|x|s|ms|us|MB|MiB|GB/s)(?![\w])|\d+ of the allowance.*|0x[0-9a-f]+"
    r"|more than [\d,]+ times the allowance$|infinite$"
)


class Block(NamedTuple):
    language: str
    title: str
    text: str


def blocks_of(text: str) -> list[Block]:
    """Returns the code blocks of a page."""
    return [Block(*found.groups("")) for found in _BLOCK.finditer(text)]


def commands_of(console: str) -> list[tuple[str, str]]:
    """Returns the commands of a block of `console`, with what each prints."""
    parts = re.split(r"^\$ ", console, flags=re.MULTILINE)
    return [tuple(f"{part}\n".split("\n", 1)) for part in parts if part]


def run_command(command: str, folder: Path, environment: dict[str, str], *, must_succeed: bool = False) -> str:
    """Returns what a command prints, without the ends of lines."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment | {"NO_COLOR": "1", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0 or not must_succeed, done.stdout
    return re.sub(r" +$", "", done.stdout, flags=re.MULTILINE).rstrip("\n").replace(f"{folder}/", "")


def matches(printed: str, shown: str) -> bool:
    """Whether output is what a page shows."""
    patterns = []
    for line in shown.rstrip("\n").split("\n"):
        if line == "...":
            patterns.append(r"(?:.*\n)*?")
            continue
        words = re.sub(r" +", " ", _VARIABLE.sub("\0", line)).strip()
        patterns.append(re.escape(words).replace("\0", r"[^\n]*?") + "\n")
    compared = "".join(re.sub(r" +", " ", line).strip() + "\n" for line in printed.split("\n"))
    return re.fullmatch("".join(patterns), compared) is not None


def write_files(text: str, folder: Path) -> None:
    """Writes the files of a page, without running anything."""
    for block in blocks_of(text):
        if block.title:
            (folder / block.title).write_text(block.text)


def run_page(text: str, folder: Path, environment: dict[str, str], *, runs_sh: bool = False) -> str:
    """Runs the blocks of a page in a folder; returns the page as it would be if it showed what was printed.

    Where what is shown matches, it stays.
    """
    program = ""

    def run(found: re.Match[str]) -> str:
        nonlocal program
        block, lines = Block(*found.groups("")), []
        if block.title:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text)
        elif block.language == "python":
            program += block.text
        elif block.language == "console":
            for command, shown in commands_of(block.text):
                printed = run_command(command, folder, environment)
                kept = shown.strip("\n") if matches(printed, shown) else printed
                lines += [f"$ {command}", *([kept] if kept else [])]
            return "```console\n" + "\n".join(lines) + "\n```"
        elif block.language == "sh" and runs_sh:
            run_command(f"set -e\n{block.text}", folder, environment, must_succeed=True)
        elif block.language == "text" and program:
            (folder / "program.py").write_text(program)
            printed = run_command("python program.py", folder, environment)
            return found[0] if matches(printed, block.text) else f"```text\n{printed}\n```"
        return found[0]

    shown = _BLOCK.sub(run, text)
    if program and not (folder / "program.py").exists():
        (folder / "program.py").write_text(program)
        run_command("python program.py", folder, environment, must_succeed=True)
    return shown


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as base:
        for name in sys.argv[1:]:
            Path(name).write_text(run_page(Path(name).read_text(), Path(base), dict(os.environ)))
