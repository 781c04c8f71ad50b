"""Verifies the kernels of a wheel of opwright_ops in this environment: this torch, this Python, this machine.

    python benchmarks/wheel_environments.py WHEEL [bias_gelu d_sigmoid ...]

Run it where the toolkit can be imported, once for each environment; all operators unless some are named. The wheel
itself is also imported where the toolkit is not. Replaces the rows of this environment in the summary.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from summary import Figure, update, write_raw

# Without the folders that the toolkit lies in, and the editable installs.
ALONE = """
import sys, time
sys.path.insert(0, sys.argv[1])
import torch
start = time.process_time()
import opwright_ops
seconds = time.process_time() - start
device = "cuda" if torch.cuda.is_available() else "cpu"
x, bias = torch.randn(64, 128, device=device, requires_grad=True), torch.randn(128, device=device)
torch.testing.assert_close(opwright_ops.bias_gelu(x, bias), torch.nn.functional.gelu(x + bias))
opwright_ops.bias_gelu(x, bias).sum().backward()
assert opwright_ops.bias_gelu.operator.__module__.startswith("opwright_ops._opwright")
assert "opwright" not in sys.modules
print(1e3 * seconds)
"""


def figures(row: dict[str, Any]) -> list[Figure]:
    operators = row["operators"]
    wrong = [name for name, found in operators.items() if not found["passed"]]
    cases = f"{sum(found['cases'] for found in operators.values())} cases"
    passed = len(operators) - len(wrong)
    failed = f"; failed: {', '.join(wrong)}" if wrong else ""
    return [
        Figure("operators that pass verify", passed, f"operators of {len(operators)}", beside=cases + failed),
        Figure("import, beyond torch's", row["import ms"], "ms"),
    ]


def environment_of(row: dict[str, Any]) -> str:
    return f"{row['device']}, torch {row['torch']}, Python {row['python']}"


def main(wheel: Path, names: list[str]) -> None:
    import opwright_ops
    import torch

    from opwright.package.trial import use_wheel
    from opwright.target import find_operators
    from opwright.verify.api import verify

    with tempfile.TemporaryDirectory() as folder:
        install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder, str(wheel)]
        subprocess.run([sys.executable, *install], check=True)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, "-c", ALONE, folder]
        times = [float(subprocess.run(command, check=True, env=env, capture_output=True).stdout) for _ in range(5)]
    operators = [o for o in find_operators("opwright_ops") if not names or o.declaration.name in names]
    use_wheel(wheel, operators)
    assert opwright_ops.__file__  # the sources, not what was installed
    row = {
        "wheel": wheel.name,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "glibc": platform.libc_ver()[1],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "import ms": round(min(times), 1),
        "operators": {},
    }
    for operator in operators:
        record = verify(operator.function)
        cases = sum(check.cases for check in record.checks)
        row["operators"][operator.declaration.name] = {
            "passed": record.passed, "cases": cases, "backends": record.backends
        }  # fmt: skip
        print(operator.declaration.name, row["operators"][operator.declaration.name], flush=True)
    environment = environment_of(row)
    write_raw(f"wheel_environments_{environment.replace(', ', '_').replace(' ', '_')}", row)
    update(__file__, figures(row), environment, group=environment)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
