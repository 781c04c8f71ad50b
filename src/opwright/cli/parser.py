"""The parser of the command line: verbs, and the options that all of them have."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from opwright import __version__, settings
from opwright.cli.overview import FLAGS, SUMMARY, VERBS

app = App(name="opwright", help=SUMMARY, version=__version__, help_formatter="plain", help_format="plaintext")
app.suppress_keyboard_interrupt = app.meta.suppress_keyboard_interrupt = False  # `main` says what happened
for _verb, _text in VERBS.items():
    app.command(f"opwright.cli.{_verb}_command:{_verb}_app", name=_verb, help=_text)


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    cache_dir: Annotated[str | None, Parameter(help=FLAGS["--cache-dir"])] = None,
    cxx: Annotated[str | None, Parameter(help=FLAGS["--cxx"])] = None,
    cxxflags: Annotated[str | None, Parameter(help=FLAGS["--cxxflags"], allow_leading_hyphen=True)] = None,
    arch: Annotated[str | None, Parameter(help=FLAGS["--arch"])] = None,
    jobs: Annotated[int | None, Parameter(help=FLAGS["--jobs"])] = None,
    require_kernels: Annotated[bool, Parameter(negative="", help=FLAGS["--require-kernels"])] = False,
) -> int:
    """Turns the options into the settings that they are twins of, and runs the verb."""
    given = {
        "--cache-dir": cache_dir,
        "--cxx": cxx,
        "--cxxflags": cxxflags,
        "--arch": arch,
        "--jobs": jobs,
        "--require-kernels": "1" if require_kernels else None,
    }
    for flag, value in given.items():
        if value is not None:
            settings.give(flag, str(value))
    settings.check()
    return app(tokens, exit_on_error=False, print_error=False, result_action="return_value") or 0
