"""The files and directories that flags of compilers and linkers name."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

_HEADERS = ("-include", "-imacros")  # looked for in the current directory, then where others are
_OPTIONS = ("-I", "-L", "-isystem", "-iquote", "-idirafter", *_HEADERS)
_WITH_FILES = ("-Wl,", "-T", "@")
_SEPARATORS = re.compile(r"(^-T(?=.)|[,=@])")
# Options of linkers with a name or an output behind them.
_NAMES = re.compile(
    r"-(o|x|z|m|e|u|h|y)|"
    r"--?(soname|entry|undefined|wrap|defsym|init|fini|trace-symbol|exclude-libs|Map|dependency-file)"
)


def absolute(flags: Sequence[str], folder: str) -> list[str]:
    """Returns flags that name paths from a directory, for compilers that run in another one."""
    found: list[str] = []
    for before, flag in zip(["", *flags], flags, strict=False):
        option = next((option for option in _OPTIONS if flag.startswith(option)), "")
        if before in _OPTIONS and not flag.startswith("-"):
            found.append(_absolute(before, flag, folder))
        elif option and flag != option:
            found.append(option + _absolute(option, flag[len(option) :], folder))
        else:
            found.append(flag)
    return found


def _absolute(option: str, path: str, folder: str) -> str:
    full = os.path.join(folder, path)
    if path.startswith(("=", "$")) or (option in _HEADERS and not os.path.isfile(full)):
        return path
    return full


def absolute_in_link(flags: Sequence[str], folder: str) -> list[str]:
    """Returns flags of a link that name paths from a directory, as `absolute`.

    A word that is the path of a file in it is that file, also inside `-Wl,--version-script=cap.map`.
    """
    found: list[str] = []
    option = ""  # the one that a word may be the value of
    for flag in absolute(flags, folder):
        is_whole = not flag.startswith("-") and os.path.isfile(os.path.join(folder, flag))
        words = [flag] if is_whole or not flag.startswith(_WITH_FILES) else _SEPARATORS.split(flag)
        for i, word in enumerate(words):
            if _NAMES.fullmatch(option) or not os.path.isfile(os.path.join(folder, word)):
                option = option if word in (",", "=", "@", "", "-Xlinker") else word
            else:
                words[i], option = os.path.join(folder, word), ""
        found.append("".join(words))
    return found


def linked_files(flags: Sequence[str]) -> list[Path]:
    """Returns the files whose content a link with these flags depends on: those named by a path, and static `-l`s.

    Of a shared library that `-l` names, a link takes no content.
    """
    words = [word for flag in flags for word in dict.fromkeys([flag, *_SEPARATORS.split(flag)])]
    found = [word for word in words if os.path.isabs(word) and os.path.isfile(word)]
    folders = [after for flag, after in itertools.pairwise(flags) if flag == "-L"]
    folders += [flag[2:] for flag in flags if flag.startswith("-L")]
    endings = ["a"] if any(re.search(r"-B?static\b", flag) for flag in flags) else ["so", "a"]
    for name in [flag[2:] for flag in flags if flag.startswith("-l")]:
        names = [name[1:]] if name.startswith(":") else [f"lib{name}.{ending}" for ending in endings]
        places = [os.path.join(folder, each) for folder in folders if folder for each in names]
        first = next(filter(os.path.isfile, places), "")
        found += [first] if first and not first.endswith(f"/lib{name}.so") else []
    return [Path(path) for path in dict.fromkeys(found)]
