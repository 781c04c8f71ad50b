"""What each step of the migration gains: prints a table.

    python measure.py [STEP ...]

Every build runs in a process of its own, with caches that are empty at first; the import of torch and Opwright
is not counted. Calls: the least of 50 loops, one thread.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path

HERE = Path(__file__).resolve().parent
STEPS = {"before": "before/d_sigmoid.py", "step1": "step1/d_sigmoid.py", "after": "after/op.py"}
ROWS = {
    "lines": "lines written, Python and C++",
    "first": "first build, s",
    "again": "the same in another process, s",
    "edited": "after an edit of the C++ source, s",
    "edited again": "after another edit, a minute later, s",
    "call_us": "call, 1 element, no gradient, us",
    "gradient_us": "call and backward, 1 element, us",
    "large_us": "call, 1,048,576 elements, us",
    "torch.compile(fullgraph=True)": "`torch.compile(fullgraph=True)`",
    "gradient": "gradient",
    "second gradient": "second gradient",
    "vmap": "`torch.vmap`",
    "float16": "float16",
    "export": "`torch.export`",
}
FORMULA = "return e / ((1 + e) * (1 + e));"
EDITS = {"edited": "return e / (1 + 2 * e + e * e);", "edited again": "return e / (e * e + 2 * e + 1);"}


def load_step(file):
    """Returns the step's function and the seconds until its first result, which is checked."""
    import importlib.util

    import jaxtyping  # noqa: F401
    import torch
    import torch.utils.cpp_extension

    import opwright.cpp_extension
    import opwright.dispatch.kernels  # noqa: F401
    from opwright import operator  # noqa: F401

    z = torch.linspace(-4, 4, 101)
    start = time.perf_counter()
    spec = importlib.util.spec_from_file_location("step", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["step"] = module
    spec.loader.exec_module(module)
    result = module.d_sigmoid(z)
    seconds = time.perf_counter() - start
    s = torch.sigmoid(z)
    torch.testing.assert_close(result, s * (1 - s))
    return module.d_sigmoid, seconds


def measure_calls(function):
    import torch

    def least_us(call, number):
        call()
        return min(timeit.repeat(call, number=number, repeat=50)) / number * 1e6

    torch.set_num_threads(1)
    one, large = torch.randn(1), torch.randn(1 << 20)
    leaf = torch.randn(1, requires_grad=True)
    return {
        "call_us": least_us(lambda: function(one), 2_000),
        "gradient_us": least_us(lambda: torch.autograd.grad(function(leaf), leaf), 500),
        "large_us": least_us(lambda: function(large), 5),
    }


def measure_features(function):
    """Returns what of PyTorch works with the function, by trying."""
    import torch

    def compiles():
        compiled = torch.compile(lambda z: function(z) + 1, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(z), function(z) + 1)

    def has_gradient():
        assert torch.autograd.gradcheck(function, z.clone().requires_grad_())

    def has_second_gradient():
        assert torch.autograd.gradgradcheck(function, z.clone().requires_grad_())

    def maps():
        torch.testing.assert_close(torch.vmap(function)(z), function(z))

    def takes_float16():
        torch.testing.assert_close(function(z.half()), function(z.half().double()).half())

    def exports():
        module = torch.nn.Module()
        module.forward = function
        exported = torch.export.export(module, (z,))
        torch.testing.assert_close(exported.module()(z), function(z))

    z = torch.randn(3, 5, dtype=torch.float64)
    tried = {
        "torch.compile(fullgraph=True)": compiles,
        "gradient": has_gradient,
        "second gradient": has_second_gradient,
        "vmap": maps,
        "float16": takes_float16,
        "export": exports,
    }
    return {name: _works(attempt) for name, attempt in tried.items()}


def _works(attempt):
    try:
        attempt()
    except Exception as error:
        print(f"{attempt.__name__}: {error}", file=sys.stderr)
        return False
    return True


def measure_step(step):
    """Returns the figures of one step, measured on a copy of its folder."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # headers may still be precompiled there
        folder = Path(name) / step
        shutil.copytree(HERE / step, folder)
        written = [*folder.glob("*.py"), *folder.glob("*.cpp")]
        lines = [line for path in written for line in path.read_text().splitlines() if line.strip()]
        figures = {"lines": len(lines)}
        caches = {"TORCH_EXTENSIONS_DIR": f"{name}/torch", "OPWRIGHT_CACHE_DIR": f"{name}/store"}

        def run(*what):
            command = [sys.executable, __file__, "--in-process", str(Path(name) / STEPS[step]), *what]
            output = subprocess.run(
                command, env={**os.environ, **caches}, check=True, stdout=subprocess.PIPE, text=True
            ).stdout
            return json.loads(output.splitlines()[-1])

        figures["first"] = run()["seconds"]
        figures |= run("all")
        figures["again"] = figures.pop("seconds")
        (source,) = folder.glob("*.cpp")
        text = source.read_text()
        for row, formula in EDITS.items():
            if row == "edited again" and step != "after":
                time.sleep(60)  # in which `opwright.cpp_extension` precompiles PyTorch's headers
            source.write_text(text.replace(FORMULA, formula))
            figures[row] = run()["seconds"]
        return figures


def _cell(value):
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int) else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def main():
    steps = sys.argv[1:] or list(STEPS)
    figures = {step: measure_step(step) for step in steps}
    print("| |", " | ".join(steps), "|")
    print("| --- |", " | ".join("---" for _ in steps), "|")
    for row, title in ROWS.items():
        print(f"| {title} |", " | ".join(_cell(figures[step][row]) for step in steps), "|")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-process"]:
        function, seconds = load_step(sys.argv[2])
        found = measure_calls(function) | measure_features(function) if "all" in sys.argv else {}
        print(json.dumps({"seconds": seconds, **found}))
    else:
        main()
