"""The command `opwright`. One module per verb; torch is imported by the verbs that need it, when they run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from opwright import __version__
from opwright.errors import OpwrightError

app = App(
    name="opwright",
    help="Write a PyTorch operator once: build it, check it, measure it.",
    version=__version__,
)
for _verb, _help in {
    "list": "List the operators of TARGET.",
    "build": "Build the kernels of TARGET ahead of their first call.",
    "verify": "Check whether the operators of TARGET are right.",
    "bench": "Measure how fast the operators of TARGET are.",
    "report": "Write one HTML page from the records of verify and bench.",
    "inspect": "Show the contract, schema and generated code of an operator.",
    "doctor": "Say what is there, what is missing, and how to get it.",
    "explain": "Explain an error code, such as OPW104.",
    "cache": "The store of builds: dir, size, prune, clean.",
}.items():
    app.command(f"opwright.cli.{_verb}_command:{_verb}_app", name=_verb, help=_help)


@app.meta.default
def _launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    cache_dir: Annotated[Path | None, Parameter(help="Where builds are kept (OPWRIGHT_CACHE_DIR).")] = None,
    cxx: Annotated[str | None, Parameter(help="The C++ compiler (OPWRIGHT_CXX).")] = None,
    cxxflags: Annotated[str | None, Parameter(help="Flags after Opwright's own (OPWRIGHT_CXXFLAGS).")] = None,
    jobs: Annotated[int | None, Parameter(help="Compilers at a time (OPWRIGHT_JOBS).")] = None,
    require_kernels: Annotated[
        bool, Parameter(negative="", help="A kernel that cannot be built is an error (OPWRIGHT_REQUIRE_KERNELS).")
    ] = False,
) -> int:
    given = {
        "OPWRIGHT_CACHE_DIR": cache_dir,
        "OPWRIGHT_CXX": cxx,
        "OPWRIGHT_CXXFLAGS": cxxflags,
        "OPWRIGHT_JOBS": jobs,
        "OPWRIGHT_REQUIRE_KERNELS": "1" if require_kernels else None,
    }
    os.environ.update({name: str(value) for name, value in given.items() if value is not None})
    return app(tokens, exit_on_error=False, print_error=True, result_action="return_value") or 0


def main() -> None:
    """Runs the command line. Exit codes: 0 fine, 1 the thing under test failed, 2 usage or environment, 5 nothing ran."""
    from cyclopts import CycloptsError

    try:
        sys.exit(app.meta(exit_on_error=False, print_error=True, result_action="return_value") or 0)
    except CycloptsError:
        sys.exit(2)
    except OpwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(0)
