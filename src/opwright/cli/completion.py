"""opwright --install-completion"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from opwright.cli.parser import app
from opwright.errors import SettingError

_SHELLS = ("bash", "zsh", "fish")


def install(arguments: list[str]) -> int:
    """Installs the completion of commands and options for a shell, by default the one of SHELL; prints the file.

    Raises:
        SettingError: there is no completion for this shell.
    """
    shell = arguments[0] if arguments else Path(os.environ.get("SHELL", "")).name
    if len(arguments) > 1 or shell not in _SHELLS:
        raise SettingError(
            "--install-completion",
            "there is no completion for this shell",
            rows=[("got", repr(" ".join(arguments) or shell)), ("expected", " | ".join(_SHELLS))],
            hint="`opwright --install-completion bash`",
        )
    print(app.install_completion(shell=shell))
    print(f"Installed the completion for {shell}; it works in a new shell", file=sys.stderr)
    return 0
