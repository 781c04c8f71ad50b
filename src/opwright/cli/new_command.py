"""opwright new"""

from __future__ import annotations

from pathlib import Path

from opwright.cli.console import say
from opwright.cli.help import make_app

new_app = make_app("new")


@new_app.default
def new(name: str, *, op: bool = False) -> int:
    """Write a project that works as it stands: an operator with kernels and tests, and what a wheel needs.

    Args:
        name: The name of the project and of its new folder; with --op, of an operator for the project in this folder.
        op: Add an operator.
    """
    from opwright.package.new import enclosing_project, new_operator, new_project

    here = Path(".")
    for path in new_operator(name, here) if op else new_project(name, here):
        say(str(path))
    if op:
        operator = name.rpartition("/")[2]
        say("note: write both kernels, or delete cpu.cpp or cuda.cu: a wheel compiles each that is there")
        say(f"next: opwright verify {path.parent / 'op.py'}::{operator}")
    else:
        around = enclosing_project(here)
        if around is not None:
            say(f"warning: `{name}` was written into another project: {around / 'pyproject.toml'}")
            say(f"hint: move `{name}` out of it; `opwright new --op NAME` adds an operator to a project")
        say(f"next: cd {name} && opwright verify src/{name.replace('-', '_')}/scale_shift/op.py")
    return 0
