"""A small project of two operators, and how its wheel is built."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import opwright

TOOLKIT = Path(opwright.__file__).parents[1]  # the one under test, wherever it lies
PYPROJECT = """
[build-system]
requires = ["hatchling", "opwright"]
build-backend = "hatchling.build"
[project]
name = "sample-ops"
version = "1.0"
dependencies = ["torch>=2.11"]
[tool.hatch.build.targets.wheel]
packages = ["src/sample_ops"]
[tool.hatch.build.targets.wheel.hooks.opwright]
architectures = []
"""
OP = """
import torch
from jaxtyping import Float
from torch import Tensor, nn

import opwright
from opwright import operator


@operator("sample_ops::{name}"{promises})
def {name}(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    return x * {factor}


class Layer(nn.Module):
    def forward(self, x):
        return {name}(x)


HALF = torch.finfo(torch.float32).eps / 2  # of a stand-in where the wheel is built
IS_NEW = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
TABLE = torch.ones(4) @ torch.ones(4)
TEXT = f"{{torch.__version__}} {{-torch.inf:.1f}} {{float(torch.pi) % 2}} {{isinstance(TABLE, torch.device)}}"
LAYER = Layer().eval()
opwright  # the module itself is imported too
"""
# Both folders have a `scaled`, which must not be merged, and state of an inline function.
KERNEL = """
#include <opwright/kernel.h>
using opwright::View;
inline int& calls() {{ static int count = 0; return count; }}
template <typename T> T scaled(T value) {{ return value * T({factor}.0f); }}
template <typename T>
void {name}(View<const T, 2> x, View<T, 2> output) {{
  ++calls();
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t j = 0; j < x.size(1); ++j) output(i, j) = scaled<float>(x(i, j)) + (calls() - 1);
}}
OPWRIGHT_KERNEL({name}, float, double)
"""


def write_project(folder: Path) -> Path:
    package = folder / "src/sample_ops"
    (folder / "pyproject.toml").parent.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    promises = ', random=False, autocast="lower", deterministic=False, precision=opwright.Factor(2, "a sum")'
    for name, factor, promised in (("twice", 2, ""), ("thrice", 3, promises)):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text("")
        (package / name / "op.py").write_text(OP.format(name=name, factor=factor, promises=promised))
        (package / name / "cpu.cpp").write_text(KERNEL.format(name=name, factor=factor))
        (package / name / "test_op.py").write_text("import pytest\n")
    (package / "__init__.py").write_text(
        "from sample_ops.thrice.op import thrice as thrice\nfrom sample_ops.twice.op import twice as twice\n"
    )
    return folder


def build(project: Path, output: Path, **environment: str) -> subprocess.CompletedProcess:
    """Builds a wheel in a process that has no torch."""
    blocked = project.parent / "without_torch"
    blocked.mkdir(exist_ok=True)
    (blocked / "sitecustomize.py").write_text(blocker("torch"))
    env = {**os.environ, "PYTHONPATH": f"{blocked}{os.pathsep}{TOOLKIT}", **environment}
    command = [
        sys.executable,
        "-m",
        "opwright",
        "wheel",
        str(project),
        "--out",
        str(output),
        "--no-isolation",
    ]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


def blocker(*names: str) -> str:
    """Returns a program without which modules of these names cannot be imported."""
    return textwrap.dedent(f"""
        import sys
        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {names!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Blocker())
    """)
