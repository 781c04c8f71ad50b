"""The command `opwright`. One module per verb; torch is imported by the verbs that need it, when they run."""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from opwright.cli.overview import overview
from opwright.errors import OpwrightError


def main() -> None:
    """Runs the command line.

    The exit codes are those of `opwright.cli.overview.EXIT_CODES`.
    """
    _open_standard_streams()
    try:
        code = _run(sys.argv[1:])
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError) and (error.errno != errno.ENOSPC or error.filename):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is written when Python ends
        code = 0
        if error.errno == errno.ENOSPC:
            print("error: the output cannot be written: its disk is full; hint: `df -h`", file=sys.stderr)
            code = 2
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # which rich turns into an end with status 1
            raise
        code = 0
    if code is not None:
        sys.exit(code)


def run() -> NoReturn:
    """Runs the command line and ends the process, without freeing the objects of PyTorch, which takes a second."""
    code: str | int | None = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    if not isinstance(code, int) or "torch" not in sys.modules:
        sys.exit(code)
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _open_standard_streams() -> None:
    """Opens those that were closed, as by `>&-`: else the next file that is opened gets their number and the output."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


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
        return app.meta(arguments, exit_on_error=False, print_error=False, result_action="return_value") or 0
    except CycloptsError as error:
        from opwright.cli.help import usage_error

        print(f"error: {usage_error(error)}", file=sys.stderr)
        return 2
    except OpwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
