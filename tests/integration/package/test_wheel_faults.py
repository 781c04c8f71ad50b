"""Wheels of operators: what goes wrong in a build, and what in an installation."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sample_wheels import blocker, build, write_project

from opwright.package.audit import audit_wheel

pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module")
def wheel(sample_wheel: Path) -> Path:
    """That of the small project, in place of that of opwright_ops."""
    return sample_wheel


# --- what goes wrong in a build ----------------------------------------------------------------------------


def broken(tmp_path: Path, file: str, old: str, new: str) -> str:
    """Returns what the build of a project with one change says; it leaves no wheel."""
    project = write_project(tmp_path / "project")
    path = project / "src/sample_ops" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    result = build(project, tmp_path / "dist")
    assert result.returncode != 0
    assert not list(tmp_path.glob("dist/*"))
    return result.stdout + result.stderr


def test_options_that_are_not_what_they_should_be(wheel: Path, tmp_path: Path) -> None:
    for i, (line, text) in enumerate(
        [
            ('architecture = ["90"]', "there is no option `architecture`"),
            ('architectures = "90"', "`architectures` is a list of names"),
            ('architectures = ["sm_90"]', "`architectures` is a list of names"),
            ("levels = [2]", "`levels` is a list of names"),
            ('package = "nope"', "it is not clear which package has the operators"),
        ]
    ):
        project = shutil.copytree(wheel.parents[1] / "project", tmp_path / str(i))
        settings = (project / "pyproject.toml").read_text()
        (project / "pyproject.toml").write_text(settings.replace("architectures = []", line))
        result = build(project, tmp_path / "dist")
        assert result.returncode != 0
        assert text in result.stderr, result.stderr
        assert not list((tmp_path).glob("dist/*"))


def test_modules_of_every_shape(wheel: Path, tmp_path: Path) -> None:
    project = shutil.copytree(wheel.parents[1] / "project", tmp_path / "project")
    package = project / "src/sample_ops"
    several = 'import os; from opwright import operator; from jaxtyping import Float; TEXT = "é\u2028"\n'
    for name, data in {
        "several": several.encode(),
        "marked": b"\xef\xbb\xbf" + several.encode(),
        "latin": "# -*- coding: latin-1 -*-\nfrom opwright import (\n    operator,\n)\nTEXT = 'é'\n".encode("latin-1"),
        "fed": b"X = 1\n\x0cfrom opwright import operator\nTEXT = ''\n",
    }.items():
        (package / f"{name}.py").write_bytes(data)
    (package / "a,b.csv").write_text("1,2\n")
    (package / ".ipynb_checkpoints").mkdir()  # cannot be imported
    # Only the backward has a kernel.
    backward = "@twice.backward\ndef twice_backward(grad_output, x):\n    return 2 * grad_output\n"
    (package / "twice/op.py").write_text(f"{(package / 'twice/op.py').read_text()}\n\n{backward}")
    (package / "twice/cpu.cpp").write_text("""
        #include <opwright/kernel.h>
        // OPWRIGHT_KERNEL(twice, float)
        template <typename T> void twice_backward(opwright::View<const T, 2> grad_output, opwright::View<const T, 2> x,
                                                  opwright::View<T, 2> output) { output(0, 0) = 7; }
        OPWRIGHT_KERNEL(twice_backward, float)
    """)
    shutil.copy(package / "twice/op.py", package / ".ipynb_checkpoints/op-checkpoint.py")
    assert build(project, tmp_path / "dist").returncode == 0
    (made,) = (tmp_path / "dist").iterdir()
    assert audit_wheel(made).passed
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            "-t",
            tmp_path / "site",
            made,
        ],
        check=True,
    )
    program = f"""{blocker("opwright", "jaxtyping")}
sys.path.insert(0, {str(tmp_path / "site")!r})
import sample_ops.several, sample_ops.marked, sample_ops.latin, sample_ops.fed
assert sample_ops.latin.TEXT == "é" and sample_ops.several.TEXT == sample_ops.marked.TEXT == "é\u2028"
import torch
x = torch.ones(1, 1, requires_grad=True)
sample_ops.twice(x).backward()
assert x.grad == 7
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_math_functions_of_an_old_glibc(wheel: Path, tmp_path: Path) -> None:
    project = shutil.copytree(wheel.parents[1] / "project", tmp_path / "project")
    source = project / "src/sample_ops/twice/cpu.cpp"
    calls = "std::exp(value) + std::pow(value, T(2)) + std::log(value) + std::tanh(value) + std::sin(value) + std::erf(value)"
    source.write_text(source.read_text().replace("value * T(2.0f)", calls).replace("value * T(2f)", calls))
    source.write_text(source.read_text().replace("return value * ", f"return {calls} + 0 * "))
    assert build(project, tmp_path / "dist").returncode == 0
    (made,) = (tmp_path / "dist").iterdir()
    assert "manylinux_2_28" in made.name
    assert audit_wheel(made).passed


def test_an_operator_without_a_kernel_is_remarked(wheel: Path, tmp_path: Path) -> None:
    project = shutil.copytree(wheel.parents[1] / "project", tmp_path / "project")
    (project / "src/sample_ops/twice/cpu.cpp").unlink()
    assert build(project, tmp_path / "dist").returncode == 0
    (made,) = (tmp_path / "dist").iterdir()
    assert any("sample_ops::twice have no kernel in it" in remark for remark in audit_wheel(made).remarks)


def test_a_kernel_that_does_not_compile(tmp_path: Path) -> None:
    text = broken(tmp_path, "twice/cpu.cpp", "++calls();", "++calls()")
    assert "cpu.cpp:8" in text
    assert "OPW202" in text
    assert "Traceback" not in text


def test_a_source_that_is_saved_while_it_is_compiled(tmp_path: Path) -> None:
    """The wheel named the text after the edit as the one that its kernels are made from."""
    project, compiler = write_project(tmp_path / "project"), tmp_path / "c++"
    source = project / "src/sample_ops/twice/cpu.cpp"
    compiler.write_text(
        f'#!/bin/sh\ng++ "$@" || exit\ncase "$*" in *twice/cpu.cpp*) echo "// edited" >> {source};; esac\n'
    )
    compiler.chmod(0o755)
    result = build(project, tmp_path / "dist", OPWRIGHT_CXX=str(compiler))
    assert result.returncode != 0
    assert "a source changed while the wheel was built" in result.stderr
    assert str(source) in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.glob("dist/*"))
    assert build(project, tmp_path / "dist").returncode == 0


def test_two_namespaces(tmp_path: Path) -> None:
    text = broken(tmp_path, "twice/op.py", '"sample_ops::', '"others::')
    assert "one namespace" in text
    assert 'write `@operator("sample_ops::twice")`, or make a project of each' in text


def test_a_module_that_needs_what_is_not_there(tmp_path: Path) -> None:
    text = broken(tmp_path, "twice/op.py", "import opwright\n", "import opwright\nimport not_there\n")
    assert "No module named 'not_there'" in text
    assert "[build-system]" in text


def test_an_unknown_level(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project")
    settings = project / "pyproject.toml"
    settings.write_text(settings.read_text() + 'levels = ["v3", "v5"]\n')
    result = build(project, tmp_path / "dist")
    assert result.returncode != 0
    assert "no such levels" in result.stdout + result.stderr


def test_no_operators(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project")
    for name in ("twice", "thrice"):
        shutil.rmtree(project / "src/sample_ops" / name)
    (project / "src/sample_ops/__init__.py").write_text("")
    result = build(project, tmp_path / "dist")
    assert "declares no operator" in result.stdout + result.stderr


def test_no_project(tmp_path: Path) -> None:
    result = build(tmp_path / "nothing", tmp_path / "dist")
    assert "no pyproject.toml" in result.stdout + result.stderr


# --- what goes wrong in an installation -----------------------------------------------------------------------


def test_an_old_torch(run) -> None:
    text = run(
        """
        import torch, sample_ops
        torch.__version__ = "2.9.1+cpu"
        sample_ops.twice(torch.ones(2, 3))
        """,
        code=1,
    )
    assert "it needs a newer torch" in text
    assert "2.9.1+cpu" in text
    assert "2.11 or newer" in text
    assert "pip install 'torch>=2.11'" in text


def changed(installed: Path, tmp_path: Path, **changes: object) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(installed, copy)
    path = copy / "sample_ops/_opwright/provenance.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return copy


CALL = "import torch, sample_ops; sample_ops.twice(torch.ones(2, 3))"


def test_another_platform(run, installed: Path, tmp_path: Path) -> None:
    text = run(CALL, changed(installed, tmp_path, machine="riscv64"), code=1)
    assert "this wheel is for another platform" in text
    assert "Linux riscv64" in text


def test_a_damaged_library(run, installed: Path, tmp_path: Path) -> None:
    copy = changed(installed, tmp_path)
    library = copy / "sample_ops/_opwright/library.so"
    library.write_bytes(library.read_bytes()[:5000])
    text = run(CALL, copy, code=1)
    assert "its library is damaged" in text
    assert "pip install --force-reinstall --no-deps sample-ops" in text


def test_a_symbol_that_torch_has_not(run, installed: Path, tmp_path: Path) -> None:
    copy = changed(installed, tmp_path)
    library = copy / "sample_ops/_opwright/library.so"
    data = library.read_bytes()
    assert b"aoti_torch_library_def" in data
    library.write_bytes(data.replace(b"aoti_torch_library_def\0", b"aoti_torch_library_dex\0"))
    text = run(CALL, copy, code=1)
    assert "its library cannot be loaded" in text
    assert "aoti_torch_library_dex" in text
    assert "torch here" in text
    assert "2.11 or newer" in text


def test_files_of_another_build(run, installed: Path, tmp_path: Path) -> None:
    copy = changed(installed, tmp_path)
    path = copy / "sample_ops/twice/op.py"
    path.write_text(path.read_text().replace("x: Float", "y: Float").replace("return x *", "return y *"))
    assert "of another build than its library" in run(CALL, copy, code=1)


def test_files_of_another_build_of_an_operator_that_is_not_called_first(run, installed: Path, tmp_path: Path) -> None:
    copy = changed(installed, tmp_path)
    path = copy / "sample_ops/thrice/op.py"
    path.write_text(
        path.read_text().replace('x: Float[Tensor, "*batch n"])', 'x: Float[Tensor, "*batch n"], a: int = 1)')
    )
    call = f"{CALL}; sample_ops.thrice(torch.ones(2, 3))"
    assert "of another build than its library" in run(call, copy, code=1)
    (copy / "sample_ops/__init__.py").write_text("")
    call = "import torch; from sample_ops.twice.op import twice; twice(torch.ones(2, 3)); import sample_ops.thrice.op"
    assert "of another build than its library" in run(call, copy, code=1)


def test_two_libraries_with_one_namespace(run, installed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(installed / "sample_ops", copy / "other_ops")
    for path in copy.rglob("*.py"):
        path.write_text(path.read_text().replace("sample_ops.", "other_ops."))
    text = run(f"import sample_ops; sys.path.insert(0, {str(copy)!r}); import other_ops", code=1)
    assert "PyTorch already has an operator of this name" in text
