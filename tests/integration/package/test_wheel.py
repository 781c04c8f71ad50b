"""Wheels of operators: built without torch, used without Opwright."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from sample_wheels import TOOLKIT, build, write_project

from opwright.package.audit import audit_wheel
from opwright.package.library import _aliases

pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module")
def wheel(sample_wheel: Path) -> Path:
    """That of the small project, in place of that of opwright_ops."""
    return sample_wheel


def test_its_name_and_contents(wheel: Path) -> None:
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, version, python, abi) == ("sample_ops", "1.0", "py3", "none")
    assert platform.startswith("manylinux_2_")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        made = json.loads(archive.read("sample_ops/_opwright/provenance.json"))
    assert not [n for n in names if n.endswith((".cpp", ".cu", ".h")) or "test_" in n]
    assert made["levels"] == ["v2", "v3", "v4"] or made["machine"] != "x86_64"
    assert set(made["operators"]) == {"sample_ops::twice", "sample_ops::thrice"}
    assert made["sources"].keys() == {"sample_ops/twice/cpu.cpp", "sample_ops/thrice/cpu.cpp"}


def test_it_has_no_problems(wheel: Path) -> None:
    audit = audit_wheel(wheel)
    assert audit.passed, audit.problems
    facts = dict(audit.facts)
    assert facts["minimum torch"] == "2.11"
    assert facts["GPU kernels"] == "none"
    assert "its stable ABI" in facts["  of torch"]


def test_operators_without_opwright(run) -> None:
    run("""
        import torch, sample_ops
        from sample_ops.twice.op import Layer
        x = torch.arange(6.0).view(2, 3)
        # Kernels, not references: each counts its own calls, although both have a `calls` and a `scaled`.
        for i in range(3):
            assert torch.equal(sample_ops.twice(x), 2 * x + i), i
        assert torch.equal(sample_ops.thrice(x), 3 * x)
        assert torch.equal(torch.ops.sample_ops.thrice(x), 3 * x + 1)
        assert torch.equal(sample_ops.twice(x.half()), 2 * x.half())  # the reference
        y = x.clone().requires_grad_()
        sample_ops.thrice(y).sum().backward()
        assert torch.equal(y.grad, torch.full_like(y, 3))
        compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
        assert compiled(x).shape == x.shape
        assert torch.vmap(sample_ops.twice)(x).shape == x.shape
    """)


def test_plain_calls_bypass_the_dispatcher(run) -> None:
    run("""
        import torch, sample_ops
        x = torch.arange(6.0).view(2, 3)
        for _ in range(2):  # loads; finds out what direct calls need
            sample_ops.twice(x)
        assert torch.equal(sample_ops.twice.operator.registration.direct.call(x), 2 * x + 2)
    """)


def test_operators_that_are_declared_after_the_first_call(run, installed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(installed, tmp_path / "copy")
    (copy / "sample_ops/__init__.py").write_text("")
    run(
        """
        import torch
        from sample_ops.twice.op import twice
        x = torch.arange(6.0).view(2, 3)
        assert torch.equal(twice(x), 2 * x)
        from sample_ops.thrice.op import thrice
        for i in range(3):
            assert torch.equal(thrice(x), 3 * x + i), i
        assert torch.equal(thrice.operator.registration.direct.call(x), 3 * x + 3)
        """,
        copy,
    )


def test_a_call_that_needs_a_gradient_runs_the_kernel(run) -> None:
    """Without `@name.backward` the reference computed it: a wheel has no sources, by which kernels were told."""
    run("""
        import torch, sample_ops
        x = torch.arange(6.0).view(2, 3)
        for call in (sample_ops.thrice, torch.ops.sample_ops.thrice):
            y = x.clone().requires_grad_()
            calls = (sample_ops.thrice(x) - 3 * x)[0, 0]  # the kernel adds how often it was called before
            out = call(y)
            assert torch.equal(out, 3 * x + calls + 1)
            (out * out.detach()).sum().backward()
            assert torch.equal(y.grad, 3 * out)
            (grad,) = torch.autograd.grad(call(y).square().sum(), y, create_graph=True)
            assert torch.equal(torch.autograd.grad(grad.sum(), y)[0], torch.full_like(y, 18))
        half = x.half().requires_grad_()  # which has no kernel
        sample_ops.thrice(half).sum().backward()
        assert torch.equal(half.grad, torch.full_like(half, 3))
    """)


def test_a_program_without_the_package_defines_its_operators(run, installed: Path) -> None:
    library = installed / "sample_ops/_opwright/library.so"
    program = f"""
        import ctypes, torch
        define = ctypes.CDLL({str(library)!r}).opwright_define
        print(define(), define(), torch.ops.sample_ops.twice(torch.ones(1, 2)).tolist())
    """
    assert run(program) == "0 0 [[2.0, 2.0]]\n"


def test_a_program_with_python_is_told_that_its_operators_are_defined(run) -> None:
    """The second call reported success, and references no longer ran."""
    run("""
        import torch, sample_ops
        from sample_ops._opwright.dispatch import kernels
        x = torch.arange(6.0).view(2, 3)
        assert torch.equal(sample_ops.twice(x), 2 * x)
        assert [kernels._library().opwright_define() for _ in range(2)] == [1, 1]
        assert torch.equal(sample_ops.twice(x), 2 * x + 1)
        assert torch.equal(sample_ops.twice(x.half()), 2 * x.half())  # the reference
    """)


def test_every_level(run) -> None:
    run("""
        import torch, sample_ops
        from sample_ops._opwright.dispatch import kernels
        library, x = kernels._library(), torch.ones(2, 3)
        best = library.opwright_level().decode()
        levels = kernels.provenance()["levels"]
        for level in levels[: levels.index(best) + 1]:
            assert library.opwright_register(f"cpu_{level}".encode()) == 0
            assert sample_ops.twice(x)[0, 0] == 2  # each level has its own `calls`
            library.opwright_unregister(f"cpu_{level}".encode())
    """)


def test_a_special_level_takes_the_kernels_of_the_nearest_one() -> None:
    """On machines with AMX, kernels for AVX512_BF16 were left out."""
    names = {"cpu_v4": ("one", "two"), "cpu_v4bf16": ("one",), "cpu_v4amx": ("three",)}
    entries = {variant: {f"opwright_{variant}_{name}" for name in held} for variant, held in names.items()}
    flags = _aliases(entries, ["v3", "v4", "v4bf16", "v4amx"])
    assert set(flags) == {
        "-Wl,--defsym=opwright_cpu_v4bf16_two=opwright_cpu_v4_two",
        "-Wl,--defsym=opwright_cpu_v4amx_one=opwright_cpu_v4bf16_one",
        "-Wl,--defsym=opwright_cpu_v4amx_two=opwright_cpu_v4_two",
    }


def verify(wheel: Path, *options: str, project: Path | None = None) -> subprocess.CompletedProcess:
    sources = project or wheel.parents[1] / "project"
    command = [
        sys.executable,
        "-m",
        "opwright",
        "verify",
        "sample_ops.twice.op",
        "--wheel",
        str(wheel),
        *options,
    ]
    env = {**os.environ, "PYTHONPATH": f"{sources / 'src'}{os.pathsep}{TOOLKIT}"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_verify_takes_the_kernels_of_a_wheel(wheel: Path, tmp_path: Path) -> None:
    # Mended since the wheel was made: the kernel there adds how often it was called.
    project = shutil.copytree(wheel.parents[1] / "project", tmp_path / "project")
    source = project / "src/sample_ops/twice/cpu.cpp"
    source.write_text(source.read_text().replace("scaled<float>(x(i, j)) + (calls() - 1)", "scaled(x(i, j))"))
    # The other operator is declared after the kernels of the wheel were registered.
    (source.parents[1] / "__init__.py").write_text("")
    with (source.parent / "op.py").open("a") as op:
        op.write("@twice.samples\ndef _samples():\n    import sample_ops.thrice.op\n    yield (torch.ones(2, 3),)\n")
    for options in ((), ("--level", "v2")):
        found = verify(wheel, "--check", "numerics", *options, project=project)
        assert found.returncode == 1, found.stdout + found.stderr
        assert "FAILED numerics" in found.stdout
    mended = build(project, tmp_path / "dist")
    assert mended.returncode == 0, mended.stderr
    (new,) = (tmp_path / "dist").iterdir()
    found = verify(new, "--check", "numerics", project=project)
    assert found.returncode == 0, found.stdout + found.stderr


def test_verify_refuses_a_wheel_of_other_sources(wheel: Path, tmp_path: Path) -> None:
    project = shutil.copytree(wheel.parents[1] / "project", tmp_path / "project")
    op = project / "src/sample_ops/twice/op.py"
    op.write_text(
        op.read_text().replace(
            'twice(x: Float[Tensor, "*batch n"])', 'twice(x: Float[Tensor, "*batch n"], times: int = 1)'
        )
    )
    found = verify(wheel, project=project)
    assert found.returncode != 0
    assert "the wheel was made from other sources" in found.stderr
    assert "times" in found.stderr
    found = verify(wheel, "--level", "v9")
    assert "its CPU kernels for `v9` cannot run here" in found.stderr
    found = verify(Path(__file__))
    assert (
        "it is not a wheel of operators"
        in found.stderr + verify(Path(__file__), project=wheel.parents[1] / "project").stderr
    )


def test_two_builds_are_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    result = build(write_project(tmp_path / "elsewhere"), tmp_path / "dist", OPWRIGHT_JOBS="1")
    assert result.returncode == 0, result.stderr
    (again,) = (tmp_path / "dist").iterdir()
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


SETUP = """
from setuptools import find_packages, setup
from opwright.package.setuptools import wheel_commands
setup(
    name="sample-ops", version="1.0", packages=find_packages("src"), package_dir={"": "src"},
    cmdclass=wheel_commands(architectures=[], levels=["v2"]),
)
"""


def test_a_wheel_of_a_source_distribution(wheel: Path, tmp_path: Path) -> None:
    project = shutil.copytree(wheel.parents[1] / "project", tmp_path / "project")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path], cwd=project, check=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "-w",
        tmp_path,
        sdist,
    ]
    subprocess.run(command, check=True)
    (made,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(made) as ours, zipfile.ZipFile(wheel) as theirs:
        name = "sample_ops/_opwright/library.so"
        assert ours.read(name) == theirs.read(name)


def test_a_wheel_for_another_machine(wheel: Path, tmp_path: Path) -> None:
    compiler = "aarch64-linux-gnu-g++"
    if not shutil.which(compiler):
        pytest.skip(f"there is no {compiler}")
    project = shutil.copytree(wheel.parents[1] / "project", tmp_path / "project")
    result = build(project, tmp_path / "dist", CXX=compiler)
    assert result.returncode == 0, result.stdout + result.stderr
    (made,) = (tmp_path / "dist").iterdir()
    assert made.name.endswith("manylinux_2_28_aarch64.whl")
    assert audit_wheel(made).passed


def test_a_project_with_a_setup_py(run, tmp_path: Path) -> None:
    project = write_project(tmp_path / "project")
    (project / "setup.py").write_text(SETUP)
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools", "opwright"]\nbuild-backend = "setuptools.build_meta"\n'
    )
    result = build(project, tmp_path / "dist")
    assert result.returncode == 0, result.stdout + result.stderr
    (found,) = (tmp_path / "dist").iterdir()
    assert found.name.startswith("sample_ops-1.0-py3-none-manylinux_2_")
    with zipfile.ZipFile(found) as archive:
        assert json.loads(archive.read("sample_ops/_opwright/provenance.json"))["levels"] == ["v2"]
        archive.extractall(tmp_path / "installed")
    run(
        """
        import torch, sample_ops
        from sample_ops._opwright.dispatch import kernels
        assert kernels._library().opwright_level() == b"v2"  # of those that there are, not of those that could be
        assert torch.equal(sample_ops.thrice(torch.ones(2, 3)), torch.full((2, 3), 3.0))
        assert kernels.is_loaded(sample_ops.thrice.operator, "cpu")
    """,
        folder=tmp_path / "installed",
    )
    subprocess.run([sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path], cwd=project, check=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert "sample_ops-1.0/src/sample_ops/twice/cpu.cpp" in archive.getnames()
    command = [
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "-t",
        tmp_path / "editable",
    ]
    subprocess.run([sys.executable, *command, "-e", project], check=True)  # no library, and no error
