"""The command `opwright`. One module per verb; torch is imported by the verbs that need it, when they run."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from opwright.errors import OpwrightError

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
    "cache": "The store of builds: dir, size, prune, clean.",
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
    verbs = [f"  {name:<20} {text}" for name, text in VERBS.items()]
    flags = [f"  {name:<20} {text}" for name, text in FLAGS.items()]
    target = "TARGET is an importable module, a file, or either with ::name for one operator of it."
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
            f"  {'--version':<20} Print the version.",
            f"  {'--install-completion':<20} Complete commands and options in this shell, or in bash, zsh or fish.",
            f"  {'--cmake-dir':<20} Print the folder for CMake: cmake -Dopwright_DIR=FOLDER.",
            "",
            target,
            "`opwright COMMAND --help` says more about one.",
        ]
    )


def main() -> None:
    """Runs the command line.

    Exit codes: 0 fine, 1 the thing under test failed, 2 usage or environment, 5 nothing ran.
    """
    try:
        code = _run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is written when Python ends
        code = 0
    if code is not None:
        sys.exit(code)


def _run(arguments: list[str]) -> int | None:
    """Returns the exit code; None where the answer is a text that needs no parser."""
    if arguments in ([], ["--help"], ["-h"]):
        print(overview())
        return None
    if arguments == ["--cmake-dir"]:
        print(Path(__file__).resolve().parents[1] / "cmake")
        return None
    from cyclopts import CycloptsError

    from opwright.cli.parser import app

    try:
        if arguments[0] == "--install-completion":
            from opwright.cli.completion import install

            return install(arguments[1:])
        return app.meta(exit_on_error=False, print_error=False, result_action="return_value") or 0
    except CycloptsError as error:
        from opwright.cli.help import usage_error

        print(f"error: {usage_error(error)}", file=sys.stderr)
        return 2
    except OpwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
