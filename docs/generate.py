"""Writes the pages of the site into build/docs: those of the checkout, and those that follow from the code.

`make docs` runs it before the site is built. Generated are the reference (Python, commands, errors, records,
environment variables), a page for each operator and each example, and llms.txt.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
SITE = ROOT / "build" / "docs"  # or the folder that is named
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".cpp": "cpp", ".h": "cpp", ".cu": "cuda", ".toml": "toml", ".json": "json"}

# The modules of the Python API, and where a name is defined if that is not where it is imported from.
MODULES = {
    "opwright": "Declaring, checking and measuring operators.",
    "opwright.testing": "Tests with pytest and Hypothesis: [Test with pytest](../guides/testing.md).",
    "opwright.bench": "Beside `opwright.bench` itself, which is above.",
    "opwright.cpp_extension": "The drop-in for `torch.utils.cpp_extension`: "
    "[Existing extensions](../guides/existing-extensions.md). Every other name of PyTorch's module is there too.",
    "opwright_ops": "Functions, modules and an optimizer. The [operators](../operators/index.md) that they call have "
    "pages of their own.",
    "opwright.package.setuptools": "For a `setup.py`: [Ship a wheel](../guides/ship-a-wheel.md).",
}
METHODS = {"Operator": ("backward", "samples", "sweep", "cost", "baseline", "sharding", "exchange")}


def repository_pages() -> dict[Path, Path]:
    """Returns the pages that lie in the checkout, and their places on the site."""
    pages = {path: path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    pages[ROOT / "docs/README.md"] = Path("index.md")
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        pages[ROOT / name] = Path("policies", name.lower())
    pages[ROOT / "README.md"] = Path("index.md")
    pages[ROOT / "benchmarks/README.md"] = Path("benchmarks/index.md")
    pages[ROOT / "examples/README.md"] = Path("examples/index.md")
    for path in (ROOT / "examples").rglob("*/README.md"):
        pages[path] = Path("examples", f"{path.parent.relative_to(ROOT / 'examples')}.md".replace("/", "-"))
    for path in (ROOT / "ops/src/opwright_ops").glob("*/NOTES.md"):
        # Where a folder has several operators, the notes are on the page of the first.
        first = re.search(r'@operator\("opwright_ops::(\w+)"', (path.parent / "op.py").read_text())
        pages[path] = Path("operators", f"{first[1]}.md")
    return pages


PAGES = repository_pages()


def relink(text: str, source: Path, page: Path) -> str:
    """Returns the text of a file of the checkout with its links as they are from a page of the site."""

    def place(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / found[1]))
        target = target / "README.md" if target.is_dir() else target
        wanted = PAGES.get(target)
        if wanted is None and target.is_relative_to(ROOT / "docs"):
            wanted = target.relative_to(ROOT / "docs")  # generated
        elif wanted is None:
            wanted = Path("files", target.relative_to(ROOT))
            (SITE / wanted).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, SITE / wanted)
        return f"]({os.path.relpath(wanted, page.parent)}{found[2] or ''})"

    parts = FENCED.split(text)
    return "".join(part if i % 2 else LINK.sub(place, part) for i, part in enumerate(parts))


def write(page: Path | str, text: str) -> None:
    file = SITE / page
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text.rstrip() + "\n")


def fence(text: str, language: str = "") -> str:
    """Returns a code block."""
    return f"```{language}\n{text.rstrip()}\n```\n"


def write_pages() -> None:
    """Writes the pages of the checkout."""
    from record_fields import page as with_fields

    for source, page in PAGES.items():
        if source.name == "NOTES.md" or source == ROOT / "README.md":
            continue
        text = source.read_text()
        if page == Path("reference/records.md"):
            text = with_fields(text)
        if page == Path("index.md"):
            measured = re.search(r"^## Measured\n\n(.*?)\n\n(?=^## )", (ROOT / "README.md").read_text(), re.M | re.S)
            text = text.replace(
                "The [README](../README.md#measured) has the table.", measured[1].replace("](", "](../")
            )
        write(page, relink(text, source, page) + example_files(source))


def example_files(readme: Path) -> str:
    """Returns the files beside the README of an example, as code."""
    folder = readme.parent
    if readme.name != "README.md" or not folder.is_relative_to(ROOT / "examples") or folder == ROOT / "examples":
        return ""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != readme and path.suffix != ".pyc"]
    files = [path for path in files if next(p for p in path.parents if (p / "README.md").exists()) == folder]
    blocks = [f"### `{path.relative_to(folder)}`\n\n{fence(path.read_text(), language_of(path))}" for path in files]
    return "\n## Files\n\n" + "\n".join(blocks) if blocks else ""


def language_of(path: Path) -> str:
    return "cmake" if path.name == "CMakeLists.txt" else LANGUAGES.get(path.suffix, "")


# --- reference ----------------------------------------------------------------------------------------


def write_python() -> None:
    """Writes the directives from which mkdocstrings makes the reference of the Python API."""
    lines = ["# Python", "", "Everything here is public; whatever is not here may change in any release.", ""]
    for name, about in MODULES.items():
        lines += [f"## `{name}`", "", about, ""]
        for member in public_names(name):
            home = home_of(name, member)
            lines += [f'<span id="{name}.{member}"></span>', "", f"::: {home}"]
            lines += ["    options:", f"      heading: {name}.{member}", f"      toc_label: {member}"]
            if methods := METHODS.get(member):
                lines += [f"      members: [{', '.join(methods)}]"]
            lines += [""]
    write("reference/python.md", "\n".join(lines))


def public_names(name: str) -> list[str]:
    """Returns the public names of a module that have an entry of their own; records and errors have pages."""
    if name == "opwright.bench":
        return ["where_a_call_goes"]
    if name == "opwright.package.setuptools":  # needs a newer setuptools than some environments have
        return ["wheel_commands"]
    if name == "opwright.cpp_extension":  # its `__all__` is that of PyTorch's module
        return ["load", "load_inline", *importlib.import_module(name)._OWN]
    if name == "opwright_ops":
        module = importlib.import_module(name)
        found = [(each, getattr(module, each)) for each in module.__all__]
        return [each for each, value in found if not hasattr(value, "operator") or value.operator.function is not value]
    return [each for each in importlib.import_module(name).__all__ if each not in ("__version__", "errors")]


def home_of(name: str, member: str) -> str:
    """Returns where a public name is defined."""
    if name == "opwright.package.setuptools":
        return f"{name}.{member}"
    module = importlib.import_module(name)
    if name == "opwright.testing":  # one of its modules needs Hypothesis
        return f"{module._HOMES[member]}.{member}"
    found = getattr(module, member)
    if inspect.ismodule(found):
        found = found.__wrapped__  # a package that can be called
    if hasattr(found, "__qualname__"):
        return f"{found.__module__}.{found.__qualname__}"
    own = name == "opwright.cpp_extension"
    return f"{name}.{module._OWN[member]}.{member}" if own else f"{module._HOMES[member]}.{member}"


def write_commands() -> None:
    """Writes the help of every command, as it is printed."""
    from opwright.cli.overview import VERBS

    text, _, _ = (ROOT / "docs/reference/commands.md").read_text().partition("`make docs`")
    lines = [text + "## `opwright`", "", fence(help_of(), "text")]
    for verb, about in VERBS.items():
        lines += [f"## `opwright {verb}`", "", about, "", fence(help_of(verb), "text")]
        _, _, commands = help_of(verb).partition("\nCommands:\n")
        for name in re.findall(r"^  (\w+) ", commands.partition("\n\n")[0], re.MULTILINE):
            lines += [f"### `opwright {verb} {name}`", "", fence(help_of(verb, name), "text")]
    write("reference/commands.md", "\n".join(lines))


def help_of(*words: str) -> str:
    """Returns what `opwright WORDS --help` prints."""
    from opwright.cli import main

    arguments, sys.argv = sys.argv, ["opwright", *words, "--help"]
    columns, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "90"
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            main()
        return printed.getvalue().strip("\n")
    finally:
        sys.argv = arguments
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)


def write_errors() -> None:
    """Writes what `opwright explain` says about every error."""
    from opwright import errors

    groups = {
        errors.DeclarationError: "Declarations",
        errors.ContractError: "Calls",
        errors.BuildError: "Builds",
        errors.KernelError: "Kernels",
        errors.CheckError: "verify, bench and the commands",
    }
    lines = [
        "# Errors",
        "",
        "`opwright explain OPW104` prints the section of an error. All are classes of `opwright.errors`, derived from "
        "`OpwrightError`, and most are also a `TypeError`, `ValueError` or `RuntimeError`.",
        "",
        "## OPW000: `OpwrightError` {#opw000}",
        "",
        _prose(errors.OpwrightError),
        "",
    ]
    for base, title in groups.items():
        lines += [f"## {title}", "", f"`{base.__name__}`: {_prose(base)}", ""]
        for code, error in errors.all_errors().items():
            if issubclass(error, base) and "code" in vars(error):
                also = [each.__name__ for each in error.__mro__ if each.__module__ == "builtins"][:1]
                lines += [f"### {code}: `{error.__name__}` {{#{code.lower()}}}", "", _prose(error), ""]
                if error is not base and also not in (["Exception"], []):
                    lines += [f"It is also a `{also[0]}`.", ""]
    write("reference/errors.md", "\n".join(lines))


def _prose(documented: object) -> str:
    return re.sub(r"(?<!\n)\n(?![\n*-])", " ", inspect.getdoc(documented) or "")


def write_environment() -> None:
    """Writes the environment variables that `opwright.settings` lists."""
    from opwright import settings

    _, _, table = (settings.__doc__ or "").partition("\n\n")
    entries = re.split(r"\n(?=OPWRIGHT_)", table.strip())
    lines = [
        "# Environment variables",
        "",
        "Most are twins of a flag; a flag wins.",
        "",
        "| variable | flag | meaning |",
        "| --- | --- | --- |",
    ]
    for entry in entries:
        name, flag, meaning = re.split(r"\s{2,}", " ".join(entry.splitlines()[:1]), maxsplit=2)
        rest = " ".join(line.strip() for line in entry.splitlines()[1:])
        shown = flag if flag == "none" else f"`{flag}`"
        lines.append(f"| `{name}` | {shown} | {f'{meaning} {rest}'.strip()} |")
    lines += ["", "Variables of others that Opwright reads:", "", "| variable | meaning |", "| --- | --- |"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in OTHERS.items()]
    write("reference/environment.md", "\n".join(lines))


OTHERS = {
    "CXX": "the C++ compiler, where `OPWRIGHT_CXX` names none",
    "MAX_JOBS": "compilers running at the same time, where `OPWRIGHT_JOBS` is not set",
    "CUDA_HOME": "the CUDA toolkit, before PATH and Python's packages",
    "TORCH_CUDA_ARCH_LIST": "GPU architectures of extensions, as PyTorch reads it",
    "NVCC_APPEND_FLAGS": "flags that nvcc adds by itself",
    "NO_COLOR": "set: no colour",
}


# --- operators ----------------------------------------------------------------------------------------


def write_operators() -> None:
    """Writes a page for each operator of `opwright_ops`, from its contract, its reference and its NOTES.md."""
    from opwright.target import find_operators

    rows = ["| operator | it computes | kernels |", "| --- | --- | --- |"]
    for operator in find_operators("opwright_ops"):
        declaration = operator.declaration
        about = inspect.getdoc(declaration.reference) or ""
        rows.append(
            f"| [`{declaration.name}`]({declaration.name}.md) | {about.splitlines()[0]} | "
            f"{', '.join(declaration.sources)} |"
        )
        write(f"operators/{declaration.name}.md", "\n".join(operator_page(operator)))
    # In a checkout a name leads to its source, on the site to its entry.
    linked = r"(\[`(?:opwright_ops\.)?(\w+)[^]]*\])\(\.\./\.\./ops/src/[^)]*\)"
    text = (ROOT / "docs/operators/index.md").read_text()
    text = re.sub(linked, r"\1(../reference/python.md#opwright_ops.\2)", text)
    write(
        "operators/index.md",
        relink(text, ROOT / "docs/operators/index.md", Path("operators/index.md"))
        + "\n## All operators\n\n"
        + "\n".join(rows),
    )


def operator_page(operator) -> Iterator[str]:
    """Yields the lines of an operator's page."""
    from opwright.contract.schema import schema_of

    declaration, contract = operator.declaration, operator.contract
    name, folder = declaration.name, Path(declaration.file).parent
    yield f"# {name}\n"
    yield from docstring_parts(inspect.getdoc(declaration.reference) or "")
    home = "opwright_ops" if name in vars(importlib.import_module("opwright_ops")) else f"opwright_ops.{folder.name}.op"
    yield "\n" + fence(f"from {home} import {name}", "python")
    yield "## Signature\n\n| argument | type | default |\n| --- | --- | --- |"
    for parameter in contract.parameters:
        default = (
            ""
            if repr(parameter.default).startswith("<") or "MISSING" in repr(parameter.default)
            else (f"`{parameter.default!r}`")
        )
        kind = str(parameter).replace("|", r"\|") + (r" \| None" if parameter.optional else "")
        yield f"| `{parameter.name}` | `{kind}`{', written into' if parameter.mutated else ''} | {default} |"
    yield "\n| output | type |\n| --- | --- |"
    yield from (f"| `{output.name}` | `{output.type}` |" for output in contract.outputs)
    yield f"\nSchema:\n\n{fence(schema_of(contract, declaration.qualified_name), 'text')}"
    yield "## Kernels\n\n| backend | dtypes of its kernel; the reference runs the others |\n| --- | --- |"
    for backend, source in declaration.sources.items():
        yield f"| `{backend}` | {kernel_dtypes(Path(source.origin), name)} |"
    backward = operator.backward_operator
    kind = "derived from the reference" if backward is None else f"`{backward.declaration.name}`, declared"
    promises = [] if declaration.deterministic else ["results may differ in the last bits from call to call"]
    promises += [f"precision: {declaration.precision}"] if declaration.precision else []
    promises += ["Batch invariant: a row has the same bits in every batch."] if declaration.batch_invariant else []
    yield f"\nGradient: {kind}. Autocast: {declaration.autocast or 'none'}. {'; '.join(promises)}\n"
    yield f"## Reference\n\n{fence(inspect.getsource(declaration.reference), 'python')}"
    notes = folder / "NOTES.md"
    if PAGES[notes] == Path("operators", f"{name}.md"):
        _, _, text = notes.read_text().partition("\n")
        yield "## Derivations and measurements\n"
        yield relink(re.sub(r"^(#+) ", r"#\1 ", text, flags=re.MULTILINE), notes, PAGES[notes])
    else:
        page = PAGES[notes]
        yield f"Derivations and measurements: [{page.stem}]({page.name}#derivations-and-measurements).\n"


def docstring_parts(text: str) -> Iterator[str]:
    """Yields a docstring with its sections as paragraphs and lists."""
    for part in re.split(r"\n\n(?=\w+:\n)", text):
        title, _, body = part.partition(":\n")
        if not re.fullmatch(r"\w+", title):
            yield part + "\n"
        elif title == "Args":
            entries = re.split(r"\n(?=\w+(?:, \w+)*:)", inspect.cleandoc("\n" + body))
            yield from ("* `{}`: {}".format(*" ".join(entry.split()).split(": ", 1)) for entry in entries)
            yield ""
        else:
            yield f"**{title}.** {' '.join(body.split())}\n"


def kernel_dtypes(source: Path, name: str) -> str:
    """Returns the dtypes that a file of kernels exports an operator for."""
    text = source.read_text()
    if source.suffix == ".py":
        listed = re.search(r"^DTYPES = \(([^)]*)\)", text, re.MULTILINE)
        return ", ".join(re.findall(r'"(\w+)"', listed[1])) if listed else "those of the contract"
    exported = re.search(rf"OPWRIGHT_KERNEL\({name},([^)]*)\)", text)
    return ", ".join(word.strip().removeprefix("opwright::") for word in exported[1].split(",")) if exported else "none"


# --- llms.txt -------------------------------------------------------------------------------------------


def write_llms() -> None:
    """Writes the index of the site for language models, from the navigation."""
    readme = (ROOT / "README.md").read_text()
    _, summary, who = readme.split("\n\n")[:3]
    lines = [
        "# Opwright",
        "",
        "> " + " ".join(summary.split()),
        "",
        " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)|\*\*", r"\1", who).split()),
        "",
    ]
    for title, pages in navigation().items():
        lines += [f"## {title}", ""]
        for page in pages:
            heading = re.search(r"^# (.*)", (SITE / page).read_text(), re.MULTILINE)
            lines.append(f"- [{heading[1].strip('`')}]({page.removesuffix('.md').removesuffix('index')})")
        lines.append("")
    (SITE / "llms.txt").write_text("\n".join(lines))


def navigation() -> dict[str, list[str]]:
    """Returns the pages of mkdocs.yml by the tab that they are in."""
    import yaml

    def pages(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values() if isinstance(entry, dict) else entry:
                yield from pages(value)

    entries = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return {title: list(pages(value)) for entry in entries for title, value in entry.items()}


def main() -> None:
    global SITE
    SITE = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else SITE
    shutil.rmtree(SITE, ignore_errors=True)
    write_pages()
    write_python()
    write_commands()
    write_errors()
    write_environment()
    write_operators()
    write_llms()


if __name__ == "__main__":
    main()
