"""The text of `opwright COMMAND --help`: a sentence, examples, arguments, options, settings."""

from __future__ import annotations

import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnusedCliTokensError
from cyclopts.help import HelpEntry, HelpPanel
from rich.console import Console, ConsoleOptions

from opwright.cli.overview import FLAGS, TARGET

Target = Annotated[str, Parameter(help=TARGET)]
# What every command calls the file or folder that it writes; the first name is the one that help shows.
Out = Annotated[Path, Parameter(name=("--out", "--output"))]

_MIN_WIDTH, _MAX_WIDTH, _LABEL_WIDTH = 12, 100, 22
_BUILD = tuple(FLAGS)
# The settings that a command uses.
_SETTINGS: dict[str, tuple[str, ...]] = {
    "build": _BUILD,
    "verify": _BUILD,
    "bench": _BUILD,
    "wheel": _BUILD,
    "doctor": ("--cache-dir", "--cxx", "--arch"),
    "pack build": ("--cache-dir", "--arch", "--jobs"),
    "pack tune": ("--cache-dir", "--jobs"),
    **dict.fromkeys(("cache", "cache clean", "cache dir", "cache prune", "cache size"), ("--cache-dir",)),
}
_EXAMPLES = {
    "new": ("opwright new my_ops", "opwright new --op scale_shift"),
    "list": ("opwright list opwright_ops", "opwright list scale_shift.py --json"),
    "build": ("opwright build", "opwright build scale_shift.py --out reports"),
    "verify": ("opwright verify scale_shift.py", "opwright verify opwright_ops.softmax::softmax --out reports"),
    "bench": ("opwright bench scale_shift.py", "opwright bench scale_shift.py --axis n=1024,4096 --dtype bf16"),
    "report": ("opwright report reports", "opwright report reports --out page.html --svg pictures"),
    "inspect": ("opwright inspect scale_shift.py", "opwright inspect scale_shift.py --header --backend cuda"),
    "wheel": ("opwright wheel", "opwright wheel --check dist/my_ops-*.whl"),
    "pack": ("opwright pack record -- python serve.py", "opwright pack build manifest.json --out app.opk"),
    "pack list": ("opwright pack list app.opk", "opwright pack list app.opk --json"),
    "pack diff": ("opwright pack diff old.opk new.opk",),
    "pack embed": ("opwright pack embed app.opk --out app_pack.c",),
    "pack tune": ("opwright pack tune manifest.json --out app.opk",),
    "pack verify": ("opwright pack verify app.opk", "opwright pack verify app.opk --root ."),
    "doctor": ("opwright doctor", "opwright doctor build/_C.so"),
    "explain": ("opwright explain OPW104", "opwright explain"),
    "cache": ("opwright cache size", "opwright cache prune --days 7", "opwright cache prune --max-size 500MB"),
    "cache clean": ("opwright cache clean", "opwright cache clean --cache-dir /tmp/builds"),
    "cache dir": ("opwright cache dir", "ls $(opwright cache dir)"),
    "cache size": ("opwright cache size", "opwright cache size --bytes"),
}


def make_app(name: str) -> App:
    """Returns the app of a command, with its help."""
    formatter = _Formatter()
    # Only a flag that is on by default has an opposite.
    formatter.app = App(
        name=name, help_formatter=formatter, help_format="plaintext", default_parameter=Parameter(negative="")
    )
    return formatter.app


def usage_error(error: CycloptsError) -> str:
    """Returns the text for a command line that does not fit a command, with what to type."""
    command = " ".join(["opwright", *(error.command_chain or ())])
    text = " ".join(str(error).split()).partition(" Available commands:")[0].rstrip(".")
    hint = f"`{command} --help` lists the {'options' if error.command_chain else 'commands'}"
    all_examples = dict.fromkeys(itertools.chain.from_iterable(_EXAMPLES.values()))
    examples = [e for e in all_examples if f"{e} ".startswith(f"{command} ")]
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        text = f"`{command}` does not take `{error.unused_tokens[0]}`"
        hint = f"for example {' or '.join(f'`{e}`' for e in examples[:2])}; {hint}" if examples else hint
    if isinstance(error, MissingArgumentError) and error.argument is not None and not _is_given(error):
        name, is_positional = error.argument.name, error.argument.index is not None
        text = f"`{command}` needs {name.removeprefix('--').upper() if is_positional else name}"
        hint = f"for example `{examples[0]}`" if examples else hint
    return f"{text[:1].lower()}{text[1:]}\n\nhint: {hint}"


def _is_given(error: MissingArgumentError) -> bool:
    """Returns whether an option was given, without its value."""
    return error.argument is not None and error.argument.name in (error.root_input_tokens or ())


class _Formatter:
    """Prints the parts of a help text, in the order in which cyclopts calls it: usage, description, panels."""

    app: App
    command = ""  # with its subcommand, as in "cache size"

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        _, *words = _plain(usage).removeprefix("Usage: ").split()
        self.command = " ".join(itertools.takewhile(lambda word: word.isalpha() and word.islower(), words))
        words = list(itertools.chain.from_iterable(self._optional() if "[ARGS" in word else [word] for word in words))
        _print(console, " ".join(["Usage: opwright", *words]), "")

    def _optional(self) -> Iterator[str]:
        """Yields the names of optional arguments; cyclopts has `[ARGS]` for all of them."""
        command = self._function()
        for parameter in inspect.signature(command).parameters.values() if command is not None else ():
            if parameter.kind is parameter.VAR_POSITIONAL:
                yield f"[{parameter.name.upper()}...]"
            elif parameter.kind is not parameter.KEYWORD_ONLY and parameter.default is not parameter.empty:
                yield f"[{parameter.name.upper()}]"

    def _function(self) -> Callable[..., Any] | None:
        """Returns the function of the command; None if it only has commands of its own."""
        app = self.app
        for name in self.command.split()[1:]:
            app = app[name]
        return app.default_command

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        # The parser knows the first sentence of a verb only, so that it need not import its module.
        text = inspect.getdoc(self._function()) if self._function() is not None else _plain(description)
        for paragraph in (text or "").partition("\n\nArgs:")[0].split("\n\n"):
            _print(console, *_filled(paragraph, _width_of(console)), "")
        of_verb = _EXAMPLES.get(self.command.split(" ")[0], ())
        examples = _EXAMPLES.get(self.command) or [each for each in of_verb if self.command in each]
        if examples:
            _print(console, "Examples:", *(f"  $ {example}" for example in examples), "")

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        used = _SETTINGS.get(self.command, ())
        entries = [entry for entry in panel.entries if not {"--help", "--version"} & set(entry.positive_names)]
        settings = [entry for entry in entries if set(entry.positive_names) & set(FLAGS)]
        own = [entry for entry in entries if entry not in settings]
        if panel.format == "command":
            return self._print_entries(console, "Commands", own)
        self._print_entries(console, "Arguments", (entry for entry in own if entry.positional_label))
        self._print_entries(console, "Options", (entry for entry in own if not entry.positional_label))
        self._print_entries(console, "Settings", (entry for entry in settings if entry.positive_names[0] in used))

    @staticmethod
    def _print_entries(console: Console, title: str, entries: Iterable[HelpEntry]) -> None:
        lines: list[str] = []
        for entry in entries:
            label = f"  {_label_of(entry)}"
            described = _filled(_description_of(entry), _width_of(console) - _LABEL_WIDTH - 4) or [""]
            if len(label) > _LABEL_WIDTH + 2:
                lines.append(label)
                label = ""
            for line in described:
                lines.append(f"{label:<{_LABEL_WIDTH + 4}}{line}".rstrip())
                label = ""
        if lines:
            _print(console, f"{title}:", *lines, "")


def _label_of(entry: HelpEntry) -> str:
    names = (entry.positional_label,) if entry.positional_label else (*entry.positive_names[:1], *entry.negative_names)
    return ", ".join(names) + (f" {entry.metavar}" if entry.metavar and not entry.positional_label else "")


def _description_of(entry: HelpEntry) -> str:
    text = _plain(entry.description)
    if entry.default in (None, "False", "True", "''", '""', ""):
        return text
    return f"{text} [default: {entry.default}]"


def _plain(text: Any) -> str:
    plain = getattr(text, "plain", None)
    if plain is None and hasattr(text, "__rich_console__"):
        console = Console(width=1000, no_color=True, force_terminal=False)
        with console.capture() as capture:
            console.print(text, end="")
        plain = capture.get()
    return " ".join(str(plain if plain is not None else text or "").split())


def _filled(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, _MIN_WIDTH), break_long_words=False, break_on_hyphens=False)


def _width_of(console: Console) -> int:
    return min(console.width, _MAX_WIDTH)


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)
