"""opwright build"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cyclopts import App

from opwright.cli.console import print_json, progress, say
from opwright.errors import NoNvccError

if TYPE_CHECKING:
    from opwright.build.load import Library

build_app = App(name="build")


@build_app.default
def build_operators(target: str, *, json: bool = False) -> int:
    """Build the kernels of TARGET ahead of their first call: those of all backends into one library.

    CUDA kernels are compiled for --arch, else for the GPUs present, else for sm_80 and sm_90, with PTX of
    the newest. Without nvcc only the others are built.

    Args:
        target: A module, a file, or either with ::name.
        json: Print where the libraries are, as JSON.
    """
    from opwright.cli.target import find_operators
    from opwright.dispatch import kernels

    started = time.perf_counter()
    built, cached, libraries = 0, 0, []
    for keys in kernels.libraries_of(find_operators(target)):
        with progress("Building") as line:
            line.update(" ".join(d.name for d in kernels.unit_of(keys[0])))
            made = _build(keys)
        if made is None:
            continue
        library, is_new = made
        built, cached = built + is_new, cached + (not is_new)
        libraries.append(
            {
                "operators": library.entry.record.operators,
                "library": str(library.entry.library),
                "built": is_new,
                "seconds": library.entry.record.seconds,
            }
        )
    if json:
        print_json(libraries)
    else:
        for library in libraries:
            print(library["library"])
    count = built + cached
    noun = "library" if count == 1 else "libraries"
    say(f"Built {count} {noun} in {time.perf_counter() - started:.2f} s ({cached} cached)")
    return 0 if count else 5


def _build(keys: tuple[tuple, ...]) -> tuple[Library, bool] | None:
    """Builds one library; without nvcc, the part of it that needs none, if there is one."""
    from opwright import settings
    from opwright.dispatch import kernels

    try:
        return kernels.build(*keys)
    except NoNvccError as error:
        if settings.require_kernels() or settings.architectures():
            raise
        say(f"left out the CUDA kernels of {error.subject}: {error.rule}; hint: {error.hint}")
    others = [key for key in keys if key[1] != "cuda"]
    return kernels.build(*others) if others else None
