"""The code blocks of docs.

Each runs here or in the test that `RUN_ELSEWHERE` names, is in a file that is built, is parsed by what it is for, or
stands in `NOT_RUN` with the reason.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import tomllib
from blocks import Block, blocks_of, commands_of, matches, run_page, write_files

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
TUTORIAL = ["start/first-operator.md", "start/gradient.md"]
RUN_HERE = ["concepts/contract.md", "concepts/oracle.md", "coming-from/torch-library.md"]

# Languages ("" for blocks without one) of a page, and the test that treats its blocks.
RUN_ELSEWHERE = {
    "guides/cuda.md": {"cuda": "tests/integration/test_cuda_build.py"},
    "guides/lstm.md": {"python": "ops/src/opwright_ops/lstm/test_guide.py", "": "ops/src/opwright_ops/lstm/test_guide.py"},
    "guides/report.md": {"console": "tests/process/test_report_export.py"},
    "guides/testing.md": dict.fromkeys(("python", "console", ""), "tests/integration/test_testing.py"),
    "guides/triton-from-cpp.md": dict.fromkeys(("cpp", "cmake", "python"), "tests/integration/triton/test_cmake.py"),
    "guides/verify-anything.md": {"python": "tests/integration/docs/test_verify_guide.py"},
}  # fmt: skip

# What the Python of a guide takes for granted, with a test for the end of it.
PRELUDES = {
    "guides/write-an-operator.md": """
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from opwright import Mutates, operator
@operator("my_ops::d_sigmoid")
def d_sigmoid(z: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return torch.sigmoid(z) * torch.sigmoid(-z)
@operator("my_ops::softmax")
def softmax(x: Float[Tensor, "*s n"]) -> Float[Tensor, "*s n"]:
    return torch.softmax(x, -1)
@operator("my_ops::gather_rows")
def gather_rows(table: Float[Tensor, "n m"], index: Int64[Tensor, "k"]) -> Float[Tensor, "k m"]:
    return table[index]
""",
    "guides/existing-extensions.md": "",
    "guides/distributed.md": "",
    "guides/bench.md": "import functools, opwright\nopwright.bench = functools.partial(opwright.bench, seconds=1)\n",
    "reference/records.md": """
import sys
from pathlib import Path
sys.path.insert(0, "{unit}")
from report_cases import make_bench
from opwright.records.files import save
save(make_bench(), Path("reports/bias_gelu.bench.json"))
""",
}

# The beginning of a block that nothing runs, and why.
NOT_RUN = {
    "git clone REPOSITORY": "tests/integration/test_readme.py installs a checkout with the packages that are there",
    "pip wheel --no-deps": "tests/integration/test_readme.py installs a checkout with the packages that are there",
    "$ opwright doctor\n": "the output of one machine; tests/process/test_doctor_environment.py",
    "$ opwright doctor torchvision": "needs another project's library; tests/integration/test_doctor_library.py",
    "forward: 2.05x slower": "figures of one machine; tests/process/test_bench_command.py has the form",
    "backward: 1.50x slower": "figures of one machine; tests/process/test_bench_command.py has the form",
    "forward: 1.61x faster": "figures of one machine; tests/process/test_bench_command.py has the form",
    "forward: 4.29x faster": "figures of one machine; tests/process/test_bench_command.py has the form",
    "error: `my_ops::scale`: it did not return": "takes two minutes; tests/integration/test_bench_faults.py",
    "my_ops::scale against main": "figures of one machine; tests/unit/test_bench_comparison.py has the form",
    "opwright bench my_ops.py --devices": "needs GPUs; tests/process/test_bench_command.py and test_bench.py",
    "part        us": "figures of one machine; tests/build/test_call_split.py has the form",
    "git clone": "needs a network; benchmarks/harnesses.py has an hour of its own",
    "note: the reference gives NaN": "tests/process/test_verify_domains.py",
    "note: the reference of `largest` refuses": "tests/process/test_verify_operators.py",
    "Verified my_ops::momentum": "tests/process/test_verify_words.py has the form",
    "FAILED numerics": "tests/process/test_verify_words.py has the form",
    "# my_ops/softmax/triton.py": "tests/integration/triton/test_translate.py has such files",
    'softmax = operator("my_ops::softmax")': "needs a GPU; the reference is the reader's",
    "extern \"C\" const unsigned char": "tests/integration/triton/test_pack_manifest.py embeds a pack",
    "$ opwright pack list app.opk": "needs Triton; tests/integration/triton/test_pack_build.py",
    "`linear_kernel` (guide.py:13)": "tests/integration/triton/test_runtime_faults.py has such texts",
    "using namespace opwright;  // <opwright/tensor.h>; x is": "ops/src/opwright_ops/lstm/test_step.py has the call",
    "find_package(opwright CONFIG REQUIRED)  # -Dopwright_DIR": "examples/operators_from_cpp has the same for opwright_ops",
    "$ opwright wheel --no": "tests/integration/package/test_wheel.py",
    "opwright verify op.py --device cuda": "needs a GPU",
    '$ pip install "opwright[remote]"': "needs a bucket; tests/integration/test_remote_store.py has one of its own",
    "$ openssl genpkey": "tests/integration/test_remote_store.py makes such keys",
    "cd my-ops\npip": "tests/integration/package/test_new.py runs the same commands of the project's own README",
    "opwright wheel --no-isolation": "tests/integration/package/test_new.py runs the same commands of the project's own README",
}  # fmt: skip


@pytest.fixture(scope="module")
def own(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a fresh environment, with a store in which nothing is built."""
    # Unbuffered, since a page shows both streams of a command in the order of their lines.
    return environment | {"OPWRIGHT_CACHE_DIR": str(tmp_path_factory.mktemp("pages")), "PYTHONUNBUFFERED": "1"}


@pytest.mark.compiler
def test_the_tutorial_does_what_it_shows(own: dict[str, str], tmp_path: Path) -> None:
    for name in TUTORIAL:
        assert run_page(PAGES[name], tmp_path, own) == PAGES[name]


@pytest.mark.compiler
@pytest.mark.slow
def test_the_commands_that_show_no_output_succeed(own: dict[str, str], tmp_path: Path) -> None:
    run_page(PAGES["start/first-operator.md"], tmp_path, own, runs_sh=True)
    assert (tmp_path / "opwright-report.html").exists()


@pytest.mark.compiler
@pytest.mark.nvcc
def test_the_page_of_the_cuda_kernel_does_what_it_shows(own: dict[str, str], tmp_path: Path) -> None:
    write_files(PAGES["start/first-operator.md"], tmp_path)
    name = "start/cuda-kernel.md"
    assert run_page(PAGES[name], tmp_path, own) == PAGES[name]


@pytest.mark.parametrize("name", [*RUN_HERE, "start/ship.md"])
def test_a_page_does_what_it_shows(name: str, own: dict[str, str], tmp_path: Path) -> None:
    assert run_page(PAGES[name], tmp_path, own) == PAGES[name]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "bench" in name else []) for name in PRELUDES]
)
def test_the_python_of_a_guide_runs(name: str, own: dict[str, str], tmp_path: Path) -> None:
    python = "".join(f"```python\n{block.text}```\n" for block in blocks_of(PAGES[name]) if block.language == "python")
    prelude = PRELUDES[name].replace("{unit}", str(ROOT / "tests/unit"))
    run_page(f"```python\n{prelude}```\n{python}", tmp_path, own)


@pytest.mark.parametrize("name", [name for name, text in PAGES.items() if blocks_of(text)])
def test_every_block_is_covered(name: str) -> None:
    uncovered = [block.text for block in blocks_of(PAGES[name]) if not is_covered(name, block)]
    assert uncovered == []


def is_covered(name: str, block: Block) -> bool:
    if any(block.text.startswith(beginning) for beginning in NOT_RUN):
        return True
    if name in (*TUTORIAL, *RUN_HERE, "start/cuda-kernel.md", "start/ship.md"):
        return block.language in ("console", "python", "text", "sh") or bool(block.title)
    elsewhere = RUN_ELSEWHERE.get(name, {}).get(block.language)
    if elsewhere:
        return Path(name).name in (ROOT / elsewhere).read_text()
    if block.language == "python" and name in PRELUDES:
        return True
    if block.language in ("toml", "json", "yaml"):
        return parses(block)
    commands = re.findall(r"^(?:\$ )?(\S.*)", block.text, re.MULTILINE)
    if block.language in ("sh", "console", "") and all(is_command(command) for command in commands):
        return True
    return block.language in ("cpp", "cmake", "cuda") and lines_of(block.text) <= built_lines()


def parses(block: Block) -> bool:
    if block.language == "yaml":
        return block.text.startswith("- run: ") and is_command(block.text.removeprefix("- run: ").strip())
    return bool(tomllib.loads(block.text) if block.language == "toml" else json.loads(block.text))


def is_command(line: str) -> bool:
    """Whether each part of a line is a command of Opwright with options that it has, or a program of the reader's."""
    for part in re.sub(r"#.*|\$\(.*?\)", "", line).split(" -- "):
        words = [word for word in shlex.split(part) if not re.fullmatch(r"[A-Z_]+=.*", word)]
        if words[:1] == ["opwright"]:
            parse(words[1:])
        elif words[:1] not in (["cmake"], ["./serve"], ["build/vector_add"]):
            return False
    return True


def parse(words: list[str]) -> None:
    """Parses a command line; one that no command takes is an exception."""
    from opwright.cli.overview import FLAGS
    from opwright.cli.parser import app

    while found := [i for i, word in enumerate(words) if word in FLAGS]:  # which every command has
        words = words[: found[0]] + words[found[0] + 2 :]
    if words[:2] == ["pack", "record"]:
        words = [*words, "--", "true"]
    app.parse_args(words, exit_on_error=False, print_error=False)


def lines_of(text: str) -> set[str]:
    return {" ".join(line.split()) for line in text.splitlines()} - {""}


def built_lines() -> set[str]:
    """Returns the lines of the files that tests build or run."""
    folders = [ROOT / "tests", ROOT / "examples"]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".txt", ".cu")]
    # The kernels of this guide are built by test_team.py and test_verify_domains.py.
    guide = (DOCS / "guides/write-an-operator.md").read_text()
    return lines_of("\n".join([*(path.read_text() for path in files), guide]))


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_to_a_file_of_the_checkout(name: str) -> None:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", PAGES[name], flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", text)
    assert [target for target in targets if not (DOCS / name).parent.joinpath(target).exists()] == []
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*\.md)#([^)\s]+)\)", text):
        headings = re.findall(r"^#+ (.*)", (DOCS / name).parent.joinpath(target).read_text(), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings], target


def test_each_reason_is_for_a_block_that_is_there() -> None:
    texts = [block.text for text in PAGES.values() for block in blocks_of(text)]
    assert [beginning for beginning in NOT_RUN if not any(text.startswith(beginning) for text in texts)] == []


def test_a_page_that_shows_something_else_is_noticed(tmp_path: Path) -> None:
    page = '```python title="a.py"\nprint(6 * 7, "in 0.5 s")\n```\n\n```console\n$ python a.py\n42 in 1.7 s\n```\n'
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    assert run_page(page, tmp_path, environment) == page
    assert "42 in 0.5 s" in run_page(page.replace("42 in", "43 in"), tmp_path, environment)
    assert matches("a\nb\nc 1.5x", "a\n...\nc 2.5x")
    assert not matches("a\nb\nc", "a\nc")
    assert commands_of("$ a\nb\n$ c\n") == [("a", "b\n\n"), ("c", "\n")]


def test_a_command_line_that_no_command_takes_is_noticed() -> None:
    from cyclopts import CycloptsError

    assert is_command("opwright verify op.py --quick  # in seconds")
    assert not is_command("rm -rf x")
    with pytest.raises(CycloptsError):
        is_command("opwright verify op.py --quickly")
