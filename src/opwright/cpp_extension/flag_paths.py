"""The files and directories that flags of compilers and linkers name."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path


def linked_files(flags: Sequence[str]) -> list[Path]:
    """Returns the files whose content a link with these flags depends on: those named by a path, and static `-l`s.

    Of a shared library that `-l` names, a link takes no content.
    """
    words = [word for flag in flags for word in dict.fromkeys([flag, *re.split("[,=@]", flag)])]
    found = [word for word in words if os.path.isabs(word) and os.path.isfile(word)]
    folders = [after for flag, after in itertools.pairwise(flags) if flag == "-L"]
    folders += [flag[2:] for flag in flags if flag.startswith("-L")]
    is_static = any(re.search(r"-B?static\b", flag) for flag in flags)
    for name in [flag[2:] for flag in flags if flag.startswith("-l")]:
        names = (
            [name[1:]] if name.startswith(":") else [f"lib{name}.a"] if is_static else [f"lib{name}.so", f"lib{name}.a"]
        )
        places = [os.path.join(folder, each) for folder in folders if folder for each in names]
        first = next(filter(os.path.isfile, places), "")
        found += [first] if first and not first.endswith(f"/lib{name}.so") else []
    return [Path(path) for path in dict.fromkeys(found)]
