"""The verbs and flags of the command, and the text that lists them."""

import textwrap

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


def overview() -> str:
    """Returns the text of `opwright --help`, which answers at once because it needs no parser."""
    verbs = [_entry(name, text) for name, text in VERBS.items()]
    flags = [_entry(name, text) for name, text in FLAGS.items()]
    target = "TARGET is an importable module, a file, or a folder with op.py; with ::name, one operator of it."
    return "\n".join(
        [
            "Usage: opwright COMMAND [OPTIONS]",
            "",
            SUMMARY,
            "",
            "Commands:",
            *verbs,
            "",
            "Options of every command:",
            *flags,
            _entry("--version", "Print the version."),
            _entry("--install-completion", "Complete commands and options in this shell, or in bash, zsh or fish."),
            _entry("--cmake-dir", "Print the folder for CMake: cmake -Dopwright_DIR=FOLDER."),
            "",
            textwrap.fill(target, _WIDTH),
            "`opwright COMMAND --help` says more about one.",
        ]
    )


def _entry(name: str, text: str) -> str:
    indent = " " * _LABEL_WIDTH
    return textwrap.fill(
        text, _WIDTH, initial_indent=f"  {name:<20} ", subsequent_indent=indent, break_on_hyphens=False
    )
