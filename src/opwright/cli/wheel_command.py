"""opwright wheel"""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from opwright.cli.console import say

wheel_app = App(name="wheel")


@wheel_app.default
def build_wheel(project: Path = Path("."), *, output: Path = Path("dist"), isolation: bool = True) -> int:
    """Build the wheel of the project in this folder: one for every torch, Python and GPU.

    Needs a C++ compiler, nvcc where there are CUDA kernels, and neither torch nor a GPU.

    Args:
        project: The folder with pyproject.toml.
        output: Where the wheel goes.
        isolation: Install the build's requirements in an environment of their own. --no-isolation: use
            what is installed here.
    """
    from opwright.package.build import build_project

    path = build_project(project, output, isolation)
    say(f"{path}  {path.stat().st_size / 1e6:.2f} MB")
    return 0
