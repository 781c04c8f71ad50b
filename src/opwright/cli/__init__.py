"""The command `opwright`. One module per verb; torch is imported by the verbs that need it, when they run."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from opwright.cli.overview import overview
from opwright.errors import OpwrightError


def main() -> None:
    """Runs the command line.

    Exit codes: 0 fine, 1 the thing under test failed, 2 usage or environment, 5 nothing ran.
    """
    if sys.argv[1:] in ([], ["--help"], ["-h"]):
        print(overview())
        return
    if sys.argv[1:] == ["--cmake-dir"]:
        print(Path(__file__).resolve().parents[1] / "cmake")
        return
    from cyclopts import CycloptsError

    from opwright.cli.parser import app

    try:
        sys.exit(app.meta(exit_on_error=False, print_error=False, result_action="return_value") or 0)
    except CycloptsError as error:
        from opwright.cli.help import usage_error

        print(f"error: {usage_error(error)}", file=sys.stderr)
        sys.exit(2)
    except OpwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
