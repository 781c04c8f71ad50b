"""A person at a terminal is told why a call takes long, and nobody else is."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import sys
import termios
import time

import pytest

from opwright.build.announce import announce, announced
from opwright.cli import console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "ci", "seconds", "says"),
    [
        (Terminal, "", 0.2, "opwright: compiling scale_shift for cpu\n"),
        (Terminal, "", 0.0, ""),
        (Terminal, "1", 0.2, ""),
        (io.StringIO, "", 0.2, ""),
    ],
    ids=["long", "short", "CI", "no terminal"],
)
def test_what_takes_long_is_announced(
    stream: type, ci: str, seconds: float, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setenv("CI", ci)
    with announced("compiling scale_shift for cpu", after_seconds=0.05):
        time.sleep(seconds)
    time.sleep(0.1)
    assert sys.stderr.getvalue() == says


@pytest.mark.parametrize(
    ("stream", "ci", "says"), [(Terminal, "", "opwright: now\n"), (Terminal, "1", ""), (io.StringIO, "", "")]
)
def test_what_goes_on_in_the_background_is_announced_at_once(
    stream: type, ci: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setenv("CI", ci)
    announce("now")
    assert sys.stderr.getvalue() == says


def test_an_error_inside_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("CI", "")
    with pytest.raises(ValueError, match="inside"), announced("compiling", after_seconds=0.05):
        raise ValueError("inside")
    time.sleep(0.1)
    assert sys.stderr.getvalue() == ""


def test_a_line_of_progress_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of operators were cut at 200 columns; what a terminal wraps is not cleared."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console, "_QUIET_SECONDS", -1)
    main, side = pty.openpty()
    with os.fdopen(side, "w") as terminal:
        for columns, written in ((20, 19), (500, 310)):
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            console.Progress("Building", terminal).update("x" * 300)
            assert len(os.read(main, 1000).decode().removeprefix("\r\x1b[K")) == written
    os.close(main)
