"""The commands: what goes to stdout, what to stderr, exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fork_server import run_opwright
from syrupy.assertion import SnapshotAssertion

from opwright.cli.overview import EXIT_CODES, VERBS, overview
from opwright.verify.checks import CHECKS

OPERATOR = '''
import torch
from jaxtyping import Float
from torch import Tensor
from opwright import operator

@operator("cli::{name}", cpu="""
#include <opwright/kernel.h>
template <typename T>
void {name}(opwright::View<const T, 1> x, opwright::View<T, 1> output) {{
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = T({expression});
}}
OPWRIGHT_KERNEL({name}, float, double)
""")
def {name}(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Three times x."""
    return x * 3
'''

TASK = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x * 3

def get_inputs():
    return [torch.rand(4)]
"""
CANDIDATE = """
import torch

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x * 3.01
"""


@pytest.fixture
def command(tmp_path: Path):
    (tmp_path / "good.py").write_text(OPERATOR.format(name="thrice", expression="x(i) * 3"))
    (tmp_path / "bad.py").write_text(OPERATOR.format(name="thrice", expression="x(i) * T(3.01)"))
    (tmp_path / "broken.py").write_text(OPERATOR.format(name="thrice", expression="y(i)"))
    (tmp_path / "empty.py").write_text("import torch\n")

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return run_opwright(*arguments, cwd=tmp_path, env={"CI": "1", **env})

    return run


def test_help(command, snapshot: SnapshotAssertion) -> None:
    assert command("--help").stdout == snapshot
    assert command().stdout == command("-h").stdout == command("--help").stdout


def test_help_in_a_narrow_terminal(command) -> None:
    """It ended with a traceback below 27 columns."""
    result = command("build", "--help", COLUMNS="20")
    assert result.returncode == 0
    assert "--push" in result.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("arguments", ["--help", "build --help", "cache dir"])
def test_a_full_disk_below_the_output(arguments: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "opwright", *arguments.split()]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "error: the output cannot be written: its disk is full; hint: `df -h`\n"


@pytest.mark.parametrize("arguments", ["--help", "explain", "verify --help", "--version"])
def test_a_reader_that_ends_early_leaves_no_traceback(arguments: str) -> None:
    """As with `opwright --help | head -1`, however much was read."""
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-c", "from opwright.cli import main; main()", *arguments.split()]
    done = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", ["--help", "explain", "verify --help", "--version"])
def test_a_closed_output_leaves_no_traceback(arguments: str) -> None:
    """As with `opwright --help >&-`."""
    program = [sys.executable, "-c", "from opwright.cli import main; main()", *arguments.split()]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *program], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_for_a_shell(command, shell: str, tmp_path: Path) -> None:
    done = command("--install-completion", HOME=str(tmp_path), SHELL=f"/usr/bin/{shell}")
    assert done.returncode == 0, done.stderr
    script = Path(done.stdout.strip())
    assert script.is_relative_to(tmp_path)
    assert all(word in script.read_text() for word in [*VERBS, "prune", "quick"])
    assert command("--install-completion", shell, HOME=str(tmp_path), SHELL="").stdout == done.stdout


def test_bash_completes_a_command_and_an_option(command, tmp_path: Path) -> None:
    script = command("--install-completion", "bash", HOME=str(tmp_path)).stdout.strip()
    for words, wanted in ((["opwright", "ver"], "verify"), (["opwright", "verify", "--qui"], "--quick")):
        asked = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _opwright; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", f". {script}; {asked}"], capture_output=True, text=True)
        assert done.stdout.split() == [wanted], done.stderr


def test_a_shell_without_completion_is_an_error(command, snapshot: SnapshotAssertion) -> None:
    done = command("--install-completion", "tcsh")
    assert done.returncode == 2
    assert done.stderr == snapshot


@pytest.mark.parametrize("verb", [*VERBS, "cache prune", "pack build"])
def test_help_of_a_command_fits_80_columns(command, verb: str) -> None:
    text = command(*verb.split(), "--help", COLUMNS="80").stdout
    assert text.startswith(f"Usage: opwright {verb}")
    assert f"$ opwright {verb}" in text
    assert max(map(len, text.splitlines())) <= 80
    uses_compiler = verb in ("build", "verify", "bench", "wheel", "doctor")
    assert ("--cxx STR" in text) == uses_compiler


def test_help_of_verify(command, snapshot: SnapshotAssertion) -> None:
    text = command("verify", "--help", COLUMNS="80").stdout
    assert text == snapshot
    assert f"The checks: {', '.join(CHECKS)}." in " ".join(text.split())


def test_exit_codes_are_in_the_help(command) -> None:
    """The help of a verb had its first sentence alone."""
    page = Path(__file__).parents[2].joinpath("docs/reference/commands.md").read_text()
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == [str(code) for code in EXIT_CODES]
    rows = re.findall(r"^\| `([a-z ]+?)(?: FILE)?` \|(.*)\|(.*)\|(.*)\|$", page, re.MULTILINE)
    assert len(rows) > 10
    for name in {name for name, *_ in rows}:
        text = " ".join(command(*name.split(), "--help").stdout.split())
        told = text.partition("Exit code ")[2].partition(" Examples:")[0]
        for i, code in enumerate("125", 1):
            is_listed = any(row[i].strip() for row in rows if row[0] == name)
            # Few say when they end with 2: all do so where the command line is wrong.
            assert is_listed if f"{code}:" in told else code == "2" or not is_listed, (name, code)


@pytest.mark.parametrize(
    ("verb", "usage"),
    [("build", "[TARGET]"), ("wheel", "[PROJECT]"), ("explain", "[CODE]"), ("pack record", "[COMMAND...]")],
)
def test_the_usage_names_optional_arguments(command, verb: str, usage: str) -> None:
    first = command(*verb.split(), "--help").stdout.partition("\n")[0]
    assert first == f"Usage: opwright {verb} [OPTIONS] {usage}"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("verify", "error: `opwright verify` needs TARGET\n\nhint: for example `opwright verify scale_shift.py`\n"),
        ("report", "error: `opwright report` needs RECORDS\n\nhint: for example `opwright report reports`\n"),
        ("verify x --nope", "error: unknown option: --nope\n\nhint: `opwright verify --help` lists the options\n"),
        (
            "cache size x",
            "error: `opwright cache size` does not take `x`\n\n"
            "hint: for example `opwright cache size` or `opwright cache size --bytes`; `opwright cache size --help`",
        ),
        (
            "new ops --op f",
            "error: `opwright new` does not take `f`\n\n"
            "hint: for example `opwright new my_ops` or `opwright new --op scale_shift`",
        ),
        ("pack build m.json", "error: `opwright pack build` needs --out\n\nhint: for example `opwright pack build "),
        ("verify x --cxxflags", "error: parameter --cxxflags requires an argument\n\nhint: "),
        ("nope", 'error: unknown command "nope"\n\nhint: `opwright --help` lists the commands\n'),
    ],
)
def test_a_wrong_command_line_says_what_to_type(command, line: str, says: str) -> None:
    result = command(*line.split())
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(says)


def test_a_misspelt_operator_or_check_is_answered_with_the_nearest(command) -> None:
    for words, hint in (
        (["list", "good.thrise"], "did you mean `good::thrice`?"),
        (["list", "good.py::thrise"], "did you mean `good.py::thrice`?"),
        (["list", "good.py::q"], "`opwright list good.py`"),
        (["verify", "good.py", "--check", "numeric"], "did you mean `numerics`?"),
    ):
        result = command(*words)
        assert (result.returncode, result.stderr.rpartition("hint: ")[2]) == (2, hint + "\n")


def test_list_and_inspect(command, snapshot: SnapshotAssertion) -> None:
    listed = command("list", "good.py")
    assert listed.returncode == 0
    assert listed.stdout == snapshot
    (fact,) = json.loads(command("list", "good.py", "--json").stdout)
    assert fact["name"] == "cli::thrice"
    assert fact["schema"] == "thrice(Tensor x) -> Tensor"
    inspected = command("inspect", "good.py::thrice").stdout
    assert "template <typename T> void thrice(View<const T, 1> x, View<T, 1> output)" in inspected
    assert "opwright_register" in command("inspect", "good.py", "--glue").stdout
    assert "OPWRIGHT_ENTRY_thrice" in command("inspect", "good.py", "--header").stdout
    assert command("inspect", "opwright_ops.softmax::softmax").stdout.count("triton.py") == 1


@pytest.mark.compiler
def test_the_summary_is_the_last_line_in_a_pipe(command, tmp_path: Path) -> None:
    """It was the first: stdout is buffered there, and stderr is not."""
    program = [sys.executable, "-c", "from opwright.cli import main; main()", "verify", "good.py", "--check", "copy"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(program, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("check ")
    assert lines[-1].startswith("Verified cli::thrice")


BACKWARD_WITHOUT_KERNEL = """
from jaxtyping import Float
from opwright import operator
from torch import Tensor

@operator("cli_backward::twice", cpu='''
#include <opwright/kernel.h>
using opwright::View;
template <typename T>
void twice(View<const T, 1> x, View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = T(2 * float(x(i)));
}
OPWRIGHT_KERNEL(twice, float, opwright::bfloat16)
''')
def twice(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2

@twice.backward
def twice_backward(grad_output):
    return grad_output * 2
"""


@pytest.mark.compiler
def test_a_backward_without_a_kernel_is_told(command, tmp_path: Path) -> None:
    """It has the file of the forward, and was shown as if it had a kernel there."""
    path = tmp_path / "pair.py"
    path.write_text(BACKWARD_WITHOUT_KERNEL)
    told = command("inspect", "pair.py").stdout
    forward, backward = (
        re.search("^kernels .*", each, re.MULTILINE)[0].split(None, 1)[1] for each in told.split("\n\n")
    )
    assert forward.replace(f"{path.resolve()}", "pair.py") == "cpu: pair.py (f32, bf16)"
    assert backward == "cpu: none (pair.py exports no `twice_backward`); the reference runs"
    verified = command("verify", "pair.py", "--check", "gradient numerics").stdout
    assert "note: `twice_backward` has no cpu kernel: its reference was checked\n" in verified
    assert "(cpu) on" in verified
    named = command("verify", "pair.py::twice_backward")
    assert (named.returncode, named.stdout) == (2, "")
    assert "hint: its checks are among those of `pair.py::twice`" in named.stderr


@pytest.mark.compiler
def test_build(command, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    first = command("build", "good.py", OPWRIGHT_CACHE_DIR=store)
    assert first.returncode == 0
    assert Path(first.stdout.strip()).is_file()
    assert "(0 cached)" in first.stderr
    again = command("--cache-dir", store, "build", "good.py")
    assert again.stdout == first.stdout
    assert "(1 cached)" in again.stderr
    source = OPERATOR.format(name="plain", expression="")
    (tmp_path / "plain.py").write_text(source[: source.index(", cpu=")] + source[source.index(")\ndef") :])
    plain = command("build", "plain.py", OPWRIGHT_CACHE_DIR=store)
    assert (plain.returncode, plain.stdout) == (5, "")
    assert "Nothing to build: there are no kernels" in plain.stderr
    (tmp_path / "plain.cpp").write_text("OPWRIGHT_KERNEL(plain, float)")
    where = 'looked for: cpu.cpp, cuda.cu and triton.py beside plain.py; `plain.cpp` there needs `cpu="plain.cpp"`'
    for verb in ("build", "inspect", "verify"):
        told = command(verb, "plain.py", *(("--check", "copy") if verb == "verify" else ()))
        assert where in told.stdout + told.stderr
    broken = command("build", "broken.py", OPWRIGHT_CACHE_DIR=store)
    assert broken.returncode == 2
    assert broken.stdout == ""
    assert "broken.py:" in broken.stderr
    assert "Traceback" not in broken.stderr


@pytest.mark.compiler
@pytest.mark.parametrize(
    "flags", [["--cxxflags", "-g -DFACTOR=3"], ["--cxxflags", "-DFACTOR=3"], ["--cxxflags=-DFACTOR=3"]]
)
@pytest.mark.parametrize("is_last", [True, False])
def test_compiler_flags_begin_with_a_hyphen(command, tmp_path: Path, flags: list[str], is_last: bool) -> None:
    (tmp_path / "flags.py").write_text(OPERATOR.format(name="thrice", expression="x(i) * FACTOR"))
    line = ["build", "flags.py", *flags] if is_last else [*flags, "build", "flags.py"]
    done = command(*line, OPWRIGHT_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr


@pytest.mark.compiler
@pytest.mark.parametrize("line", ["verify good.py", "verify good.py --in-process", "verify task.py", "bench good.py"])
def test_a_compiler_that_does_not_exist_is_an_error_alone(command, tmp_path: Path, line: str) -> None:
    """`verify` warned in each of its processes that the reference runs, and ended with the error after all checks."""
    (tmp_path / "task.py").write_text(TASK + CANDIDATE)
    done = command(*line.split(), "--cxx", "g++-99", OPWRIGHT_CACHE_DIR=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: `--cxx`: this compiler does not exist   [OPW201]")
    assert "Warning" not in done.stderr


@pytest.mark.compiler
def test_verify_exit_codes(command, tmp_path: Path) -> None:
    good = command("verify", "good.py", "--check", "numerics", "--out", "records")
    assert good.returncode == 0
    assert "Verified cli::thrice" in good.stdout
    bad = command("verify", "bad.py", "--check", "numerics")
    assert bad.returncode == 1
    assert "FAILED numerics" in bad.stdout
    broken = command("verify", "broken.py", "--check", "numerics").stdout
    assert broken.count("its kernel does not compile") == 1
    assert "while its kernels were built" in broken
    assert "its reference was checked" not in broken
    assert command("verify", "good.py", "--check", "nonsense").returncode == 2
    none = command("verify", "good.py", "--only", "no such case", "--check", "numerics")
    assert none.returncode == 5
    assert "contains 'no such case'" in none.stderr
    unwritable = command("verify", "good.py", "--out", "good.py/records")
    assert unwritable.returncode == 2
    assert unwritable.stdout == ""  # before any check
    record = json.loads((tmp_path / "records" / "thrice.verify.json").read_text())
    assert record["name"] == "cli::thrice"
    assert record["failures"] == []


@pytest.mark.compiler
@pytest.mark.parametrize("arguments", ["bad.py", "task.py", "task.py --candidate other.py"])
def test_the_command_that_repeats_a_failure_can_be_typed(command, tmp_path: Path, arguments: str) -> None:
    """It had a path with spaces as two arguments, and quotes around `numerics`."""
    folder = tmp_path / "it's my kernels"
    folder.mkdir()
    (tmp_path / "bad.py").rename(folder / "bad.py")
    (folder / "task.py").write_text(TASK if "other" in arguments else TASK + CANDIDATE)
    (folder / "other.py").write_text(CANDIDATE)
    given = [f"{folder}/{word}" if word.endswith(".py") else word for word in arguments.split()]
    first = command("verify", *given, "--check", "numerics", "--device", "cpu")
    (repeat,) = re.findall("^ *repeat +(opwright verify .*)$", first.stdout, re.M)
    assert repeat.endswith(" --check numerics --device cpu")
    _, *words = shlex.split(repeat)
    again = command(*words)
    assert (first.returncode, again.returncode, again.stderr) == (1, 1, "")
    assert again.stdout.splitlines()[-1].startswith("Failed ")
    assert f"repeat   {repeat}" in again.stdout


@pytest.mark.compiler
def test_targets(command, tmp_path: Path) -> None:
    (tmp_path / "made-1.0-py3-none-any.whl").touch()
    for target, text in {
        "no_such_module": "there is no such module",
        "::thrice": "it names no module or file",
        ".": "this folder has no `op.py`",
        "./nowhere.py": "there is no such file",
        "./god.py": "hint: there is `good.py`",
        "empty.py": "declares no operator",
        "good.py::nothing": "there is no operator `nothing`",
        "made-1.0-py3-none-any.whl": "it is not a Python file",
    }.items():
        result = command("list", target)
        assert result.returncode == 2
        assert text in result.stderr
        assert result.stdout == ""
        assert "Traceback" not in result.stderr


def test_a_folder_is_named_without_a_slash(command, tmp_path: Path) -> None:
    """Its other files are not imported: one that imports `op` would not find it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "op.py").write_text(OPERATOR.format(name="inner", expression=""))
    (tmp_path / "mine" / "use.py").write_text("from op import inner\n")
    assert "cli::inner" in command("list", "mine").stdout


@pytest.mark.parametrize("target", ["fresh", "fresh::scale_shift", "fresh.scale_shift"])
def test_a_project_that_is_not_installed_is_found_in_its_sources(command, tmp_path: Path, target: str) -> None:
    """The hint was `./fresh.py`, which is not there."""
    command("new", "fresh")
    result = run_opwright("inspect", target, cwd=tmp_path / "fresh")
    file = "src/fresh/scale_shift/op.py"
    hint = f"`pip install --no-build-isolation --editable .` installs `src/fresh`; or name a file of it: `{file}`"
    assert (result.returncode, result.stderr.rpartition("hint: ")[2]) == (2, hint + "\n")
    assert run_opwright("list", file, cwd=tmp_path / "fresh").returncode == 0


@pytest.mark.parametrize("verb", ["verify", "bench", "build", "list", "inspect"])
def test_an_empty_target_is_a_usage_error(command, verb: str) -> None:
    result = command(verb, "")
    assert (result.returncode, result.stdout) == (2, "")
    assert "error: a target is missing   [OPW302]\n\nhint: " in result.stderr


@pytest.mark.parametrize(
    "source", ["def f(:\n", "print(undefined)\n", "import absent_module\n", 'import sys\nsys.exit("usage")\n']
)
def test_a_failed_import_of_a_target_shows_the_lines_of_the_target_alone(
    command, source: str, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    (tmp_path / "target.py").write_text(source)
    result = command("list", "target.py")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.replace(str(tmp_path), "FOLDER").replace(sys.executable, "PYTHON") == snapshot


def test_what_is_installed_from_a_wheel_declares_nothing(command, tmp_path: Path) -> None:
    frozen = tmp_path / "frozen_ops" / "_opwright"
    frozen.mkdir(parents=True)
    (frozen.parent / "__init__.py").touch()
    (frozen / "__init__.py").touch()
    (frozen / "provenance.json").write_text("{}")
    (frozen / "library.so").write_bytes(b"")  # beside the modules, and none of them
    for target in ("frozen_ops", "frozen_ops::name"):
        failed = command("list", target)
        assert failed.returncode == 2
        assert "installed from a wheel" in failed.stderr
        assert "--wheel" in failed.stderr


def test_explain(command, snapshot: SnapshotAssertion) -> None:
    assert command("explain", "opw104").stdout == snapshot
    every = command("explain").stdout.splitlines()
    assert all(re.fullmatch(r"OPW\d{3}  .*\.", line) for line in every)  # a whole sentence each
    assert every[0].startswith("OPW000  ")  # what an error without an entry of its own ends with
    assert "its message says" in command("explain", "OPW000").stdout
    assert command("explain", "OPW999").returncode == 2


def test_doctor(command) -> None:
    healthy = command("doctor")
    assert healthy.returncode == 0
    assert "C++ compiler  ok" in healthy.stdout
    without = command("doctor", PATH="/nonexistent")
    assert without.returncode == 2
    assert "apt-get install g++" in without.stdout
    facts = json.loads(command("doctor", "--json").stdout)
    assert {f["subject"] for f in facts} >= {"torch", "C++ compiler", "cache"}


@pytest.mark.compiler
def test_bad_settings(command, tmp_path: Path) -> None:
    """What is wrong is named as it was given, also where nothing is built."""
    for flags, name, value, hint in (
        ("", "OPWRIGHT_JOBS", "many", "`OPWRIGHT_JOBS=2`"),
        ("", "OPWRIGHT_WITHOUT", "nonsense", "'compile_commands' | 'pch'"),
        ("", "OPWRIGHT_ARCH", "9x", "`OPWRIGHT_ARCH=90`"),
        ("", "OPWRIGHT_CXXFLAGS", '-g "-Dx', "as in a shell"),
        ("--jobs 0", "--jobs", "0", "`--jobs=2`"),
        ("--jobs=-3", "--jobs", "-3", "`--jobs=2`"),
        ("--arch 9x", "--arch", "9x", "`--arch=90` or `--arch=80,90a`"),
    ):
        env = {} if flags else {name: value}
        done = command("inspect", "good.py", *flags.split(), **env)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: `{name}`: ")
        assert "OPW303" in done.stderr
        assert f"got       '{value}'" in done.stderr or f"got  '{value}'" in done.stderr
        assert hint in done.stderr
    assert command("build", "good.py", "--cxx", "/no/such/compiler").returncode == 2
    assert command("frobnicate").returncode == 2


def test_a_module_of_a_package_means_its_own_operators(command) -> None:
    # Importing it imports its package first, which declares others.
    listed = command("list", "opwright_ops.d_sigmoid").stdout
    assert "opwright_ops::d_sigmoid" in listed
    assert "bias_gelu" not in listed


def test_the_overview_fits_80_columns() -> None:
    assert max(map(len, overview().splitlines())) <= 80
