"""opwright build"""

from __future__ import annotations

import time

from cyclopts import App

from opwright.cli.console import print_json, progress, say

build_app = App(name="build")


@build_app.default
def build_operators(target: str, *, json: bool = False) -> int:
    """Build the kernels of TARGET ahead of their first call.

    Args:
        target: A module, a file, or either with ::name.
        json: Print where the libraries are, as JSON.
    """
    from opwright.cli.target import find_operators
    from opwright.dispatch import kernels

    started = time.perf_counter()
    built, cached, libraries = 0, 0, []
    keys = {
        kernels.unit_key(operator.declaration, backend)
        for operator in find_operators(target)
        for backend in kernels.BACKENDS
    } - {None}
    for key in sorted(keys):
        with progress("Building") as line:
            line.update(" ".join(d.name for d in kernels.unit_of(key)))
            library, is_new = kernels.build(key)
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
