"""Wheels of operators: built without torch, used without Opwright."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

from opwright.package.audit import audit_wheel

pytestmark = pytest.mark.compiler

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


@operator("sample_ops::{name}")
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
    for name, factor in (("twice", 2), ("thrice", 3)):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text("")
        (package / name / "op.py").write_text(OP.format(name=name, factor=factor))
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
    env = {**os.environ, "PYTHONPATH": str(blocked), **environment}
    command = [
        sys.executable,
        "-m",
        "opwright",
        "wheel",
        str(project),
        "--output",
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    result = build(write_project(folder / "project"), folder / "dist")
    assert result.returncode == 0, result.stdout + result.stderr
    (found,) = (folder / "dist").iterdir()
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        folder,
        wheel,
    ]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def run(installed: Path):
    """Runs a program that has the wheel and torch, but neither Opwright nor what that needs."""

    def call(program: str, folder: Path = installed, code: int = 0) -> str:
        head = blocker("opwright", "jaxtyping", "platformdirs", "rich", "cyclopts", "elftools")
        text = f"{head}\nsys.path.insert(0, {str(folder)!r})\n{textwrap.dedent(program)}"
        result = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
        assert result.returncode == code, result.stderr
        return result.stdout if code == 0 else result.stderr

    return call


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
    env = {**os.environ, "PYTHONPATH": str(sources / "src")}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_verify_takes_the_kernels_of_a_wheel(wheel: Path, tmp_path: Path) -> None:
    # Mended since the wheel was made: the kernel there adds how often it was called.
    project = shutil.copytree(wheel.parents[1] / "project", tmp_path / "project")
    source = project / "src/sample_ops/twice/cpu.cpp"
    source.write_text(source.read_text().replace("scaled<float>(x(i, j)) + (calls() - 1)", "scaled(x(i, j))"))
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
        "it is no wheel of operators"
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
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-w", tmp_path, sdist]
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
    command = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-t", tmp_path / "editable"]
    subprocess.run([sys.executable, *command, "-e", project], check=True)  # no library, and no error


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
    assert build(project, tmp_path / "dist").returncode == 0
    (made,) = (tmp_path / "dist").iterdir()
    assert audit_wheel(made).passed
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "-t", tmp_path / "site", made], check=True)
    program = f"""{blocker("opwright", "jaxtyping")}
sys.path.insert(0, {str(tmp_path / "site")!r})
import sample_ops.several, sample_ops.marked, sample_ops.latin, sample_ops.fed
assert sample_ops.latin.TEXT == "é" and sample_ops.several.TEXT == sample_ops.marked.TEXT == "é\u2028"
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


def test_two_namespaces(tmp_path: Path) -> None:
    assert "one namespace" in broken(tmp_path, "twice/op.py", '"sample_ops::', '"others::')


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


def test_two_libraries_with_one_namespace(run, installed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(installed / "sample_ops", copy / "other_ops")
    for path in copy.rglob("*.py"):
        path.write_text(path.read_text().replace("sample_ops.", "other_ops."))
    text = run(f"import sample_ops; sys.path.insert(0, {str(copy)!r}); import other_ops", code=1)
    assert "PyTorch already has an operator of this name" in text
