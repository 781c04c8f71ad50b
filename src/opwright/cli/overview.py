"""The verbs and flags of the command, and the text that lists them."""

import textwrap
from collections.abc import Mapping

_WIDTH, _LABEL_WIDTH = 80, 23
SUMMARY = "Write a PyTorch operator once: build it, check it, measure it."
VERBS = {
    "new": "Write a project, or with --op an operator of one.",
    "list": "List the operators of TARGET.",
    "build": "Build the kernels of TARGET ahead of their first call.",
    "verify": "Check whether the operators of TARGET are right.",
    "bench": "Measure how fast the operators of TARGET are.",
    "report": "Write one HTML page from the records of verify and bench.",
    "inspect": "Show the contract, schema and generated code of an operator.",
    "wheel": "Build the wheel of a project: one for every torch, Python and GPU.",
    "pack": "Packs of Triton kernels: record, build, list, verify, diff, tune, embed.",
    "doctor": "Say what is there, what is missing, and how to get it.",
    "explain": "Explain an error code, such as OPW104.",
    "cache": "The cache of builds: dir, size, prune, clean.",
}
FLAGS = {
    "--cache-dir": "Where builds are kept (OPWRIGHT_CACHE_DIR).",
    "--cxx": "The C++ compiler (OPWRIGHT_CXX).",
    "--cxxflags": "Compiler flags after Opwright's own (OPWRIGHT_CXXFLAGS).",
    "--arch": "GPU architectures to compile for (OPWRIGHT_ARCH).",
    "--jobs": "Compilers at a time (OPWRIGHT_JOBS).",
    "--require-kernels": "A kernel that cannot be built is an error (OPWRIGHT_REQUIRE_KERNELS).",
}
# What the commands that take one call it, and what it may be.
TARGET = "A Python file, a folder with op.py, or an importable module; with ::name, one operator of it."
_WITHOUT_COMMAND = {
    "--version": "Print the version.",
    "--install-completion": "Complete commands and options in this shell, or in bash, zsh or fish.",
    "--cmake-dir": "Print the folder for CMake: cmake -Dopwright_DIR=FOLDER.",
}
# docs/reference/commands.md lists the exit codes of each command.
EXIT_CODES = {
    0: "The command did its work and found nothing wrong.",
    1: "It found something wrong, such as a failed check.",
    2: "It could not do its work: wrong usage, or something is missing or broken.",
    5: "There was nothing to do, such as a TARGET without kernels to build.",
    130: "Ctrl-C ended it.",
}


def overview() -> str:
    """Returns the text of `opwright --help`, which answers at once because it needs no parser."""
    target = textwrap.fill(f"TARGET is {TARGET[:1].lower()}{TARGET[1:]}", _WIDTH)
    return "\n".join(
        [
            "Usage: opwright COMMAND [OPTIONS]",
            "",
            SUMMARY,
            "",
            target,
            "",
            *_section("Commands", VERBS),
            *_section("Options of every command", FLAGS),
            *_section("Options without a command", _WITHOUT_COMMAND),
            *_section("Exit codes", EXIT_CODES),
            "`opwright COMMAND --help` says more about one.",
        ]
    )


def _section(title: str, entries: Mapping[str, str] | Mapping[int, str]) -> list[str]:
    indent = " " * _LABEL_WIDTH
    wrapper = textwrap.TextWrapper(_WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    lines = [f"{title}:"]
    for name, text in entries.items():
        wrapper.initial_indent = f"  {name:<20} "
        lines.append(wrapper.fill(text))
    return [*lines, ""]
