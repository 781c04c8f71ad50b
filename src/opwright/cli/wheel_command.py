"""opwright wheel"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from opwright.cli.console import say
from opwright.cli.help import Out, make_app

wheel_app = make_app("wheel")


@wheel_app.default
def build_wheel(
    project: Path = Path("."),
    *,
    output: Out = Path("dist"),
    isolation: Annotated[bool, Parameter(negative="--no-isolation")] = True,
    check: bool = False,
) -> int:
    """Build the wheel of the project in this folder: one for every torch, Python and GPU.

    Needs a C++ compiler, nvcc where there are CUDA kernels, and neither torch nor a GPU. The wheel is examined.

    Exit code 1: the wheel would not work where its name promises that it does; 2: a kernel does not compile.

    Args:
        project: The folder with pyproject.toml; with --check, a wheel.
        check: Build nothing: examine a wheel, whoever made it.
        output: Where the wheel goes.
        isolation: Install the build's requirements in an environment of their own. --no-isolation: use
            what is installed here.
    """
    from opwright.package.audit import audit_wheel
    from opwright.package.build import build_project

    path = project if check else build_project(project, output, isolation)
    audit = audit_wheel(path)
    if check:
        width = max(len(name) for name, _ in audit.facts)
        for name, value in audit.facts:
            say(f"{name:<{width}}  {value}")
    else:
        say(f"{path}  {path.stat().st_size / 1e6:.2f} MB")
    for kind, texts in (("problem", audit.problems), ("remark", audit.remarks)):
        for text in texts:
            say(f"{kind}: {text}")
    return 0 if audit.passed else 1
