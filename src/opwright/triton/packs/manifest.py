"""Manifests: which keys of which kernels a pack is to hold.

    {
      "architectures seen": [90],
      "kernels": [
        {"file": "kernels/add.py", "function": "add", "args": ["*fp32:16", "i32", "=1024"], "options": {"num_warps": 8}}
      ]
    }

One line for each kernel, sorted, so that two of them can be compared and merged as text. Files are relative to the
manifest's folder.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opwright.errors import ManifestError

from ..worker.classes import parse_class
from ..worker.compile import write_key
from ..worker.errors import WorkerError
from ..worker.values import Dtype, Function, parse_value

_FIELDS = ("file", "function", "args", "options", "tune")
_SEEN = "architectures seen"
_EXAMPLE = '{"file": "add.py", "function": "add", "args": ["*fp32:16", "i32", "=1024"], "options": {"num_warps": 8}}'


@dataclass(frozen=True)
class KernelEntry:
    """One kernel key of a manifest.

    Attributes:
        file: The kernel's file, absolute.
        function: The JIT function.
        args: One class for each of its parameters; None if only `tune` says what is to be compiled.
        options: Names and values of the options that were given, sorted by name.
        tune: What its configurations are measured on.
        line: The manifest's line, 0 if it comes from elsewhere.
    """

    file: str
    function: str
    args: tuple[str, ...] | None
    options: tuple[tuple[str, Any], ...] = ()
    tune: tuple[dict[str, Any], ...] = ()
    line: int = 0

    @property
    def key(self) -> str | None:
        """The text of the key."""
        return None if self.args is None else write_key(list(self.args), dict(self.options))

    @property
    def identity(self) -> tuple[str, str, str]:
        """What makes two entries one."""
        without_args = f"tune; {write_key([], dict(self.options))}"
        return self.file, self.function, without_args if self.args is None else str(self.key)


@dataclass(frozen=True)
class Manifest:
    """The keys of a manifest, and the architectures that they were recorded on."""

    path: Path
    entries: tuple[KernelEntry, ...] = ()
    architectures: tuple[int, ...] = ()

    @property
    def folder(self) -> str:
        """The folder that its files are relative to."""
        return os.path.dirname(os.path.abspath(self.path))

    def place(self, entry: KernelEntry) -> str:
        """Returns where an entry stands, as `manifest.json:4`."""
        return f"{self.path}:{entry.line}"

    def merged(self, entries: Iterable[KernelEntry], architectures: Iterable[int]) -> Manifest:
        """Returns this manifest with the entries that it has not; those that it has stay as they are."""
        known = {entry.identity: entry for entry in self.entries}
        for entry in entries:
            known.setdefault(entry.identity, entry)
        seen = {*self.architectures, *architectures}
        ordered = sorted(known.values(), key=lambda entry: (self.name_of(entry.file), *entry.identity[1:]))
        return replace(self, entries=tuple(ordered), architectures=tuple(sorted(seen)))

    def name_of(self, file: str) -> str:
        """Returns a file as the manifest names it: relative, unless only the root is above both."""
        above = os.path.commonpath([self.folder, file])
        return file if above == os.path.sep else os.path.relpath(file, self.folder)

    def name_in_pack(self, file: str) -> str:
        """Returns a kernel's file as a pack names it: the runtime compares the ends of paths, so without `..`."""
        name = self.name_of(file)
        while name.startswith(os.pardir + os.path.sep):
            name = name[len(os.pardir) + 1 :]
        return name

    def write(self) -> None:
        """Writes the manifest, whole or not at all."""
        lines = ",\n    ".join(json.dumps(self._line(entry), ensure_ascii=False) for entry in self.entries)
        kernels = f"[\n    {lines}\n  ]" if lines else "[]"
        text = f'{{\n  "{_SEEN}": {json.dumps(list(self.architectures))},\n  "kernels": {kernels}\n}}\n'
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(name, 0o644)
            os.replace(name, self.path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise

    def _line(self, entry: KernelEntry) -> dict[str, Any]:
        line: dict[str, Any] = {"file": self.name_of(entry.file), "function": entry.function}
        if entry.args is not None:
            line["args"] = list(entry.args)
        if entry.options:
            line["options"] = dict(entry.options)
        if entry.tune:
            line["tune"] = list(entry.tune)
        return line


def read_manifest(path: Path, *, needs_files: bool = True) -> Manifest:
    """Reads a manifest and checks what can be checked without Triton.

    Args:
        path: The file.
        needs_files: Whether the kernels' files must be there.

    Raises:
        ManifestError: It cannot be read, or an entry names a missing file or no class.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ManifestError(
            str(path),
            f"the manifest cannot be read: {error.strerror}",
            hint=f"`opwright pack record --out {path} -- COMMAND` writes one",
        ) from error
    except UnicodeDecodeError as error:
        raise ManifestError(str(path), f"is not a manifest: it is not UTF-8, at byte {error.start}") from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        place = f"{path}:{getattr(error, 'lineno', 1)}"
        raise ManifestError(place, f"is not JSON: {getattr(error, 'msg', error)}") from error
    reader = _Reader(path, text, needs_files)
    return reader.read(document)


class _Reader:
    def __init__(self, path: Path, text: str, needs_files: bool) -> None:
        self.path, self.text, self.needs_files = path, text, needs_files
        self.folder = os.path.dirname(os.path.abspath(path))
        self.line = 1

    def error(self, rule: str, *rows: tuple[str, ...], hint: str = "") -> ManifestError:
        return ManifestError(f"{self.path}:{self.line}", rule, rows=rows, hint=hint)

    def read(self, document: Any) -> Manifest:
        if not isinstance(document, dict) or not isinstance(document.get("kernels"), list):
            raise self.error("is not a manifest: it has no list `kernels`", hint=f'{{"kernels": [{_EXAMPLE}]}}')
        for name in document.keys() - {"kernels", _SEEN}:
            raise self.error(f"has a field `{name}`", ("expected", f'"kernels", "{_SEEN}"'))
        seen = document.get(_SEEN, [])
        if not isinstance(seen, list) or not all(type(arch) is int for arch in seen):
            raise self.error(
                f'`"{_SEEN}"` must be a list of numbers', ("got", json.dumps(seen)), ("expected", "[80, 90]")
            )
        found: dict[tuple[str, str, str], KernelEntry] = {}
        for line, item in _lines_of(self.text, document):
            self.line = line
            entry = self.entry(item)
            found.setdefault(entry.identity, entry)
        return Manifest(self.path, tuple(found.values()), tuple(sorted(set(seen))))

    def entry(self, item: Any) -> KernelEntry:
        if not isinstance(item, dict):
            raise self.error("a kernel must be an object", ("got", json.dumps(item)[:60]), ("expected", _EXAMPLE))
        for name in item.keys() - set(_FIELDS):
            raise self.error(f"a kernel has no field `{name}`", ("expected", ", ".join(_FIELDS)))
        for name in ("file", "function"):
            if not isinstance(item.get(name), str) or not item[name]:
                raise self.error(
                    f"`{name}` must be a text",
                    ("got", json.dumps(item.get(name))),
                    ("expected", _EXAMPLE),
                )
        if "args" not in item and not item.get("tune"):
            raise self.error("a kernel must have `args`, or `tune`", ("expected", _EXAMPLE))
        file = os.path.normpath(os.path.join(self.folder, item["file"]))
        if self.needs_files and not os.path.isfile(file):
            raise self.error(
                f"`{item['file']}` is not there",
                ("looked for", file),
                hint="a manifest's files are relative to its own folder",
            )
        args = self.args(item["args"]) if "args" in item else None
        options, tune = self.options(item.get("options", {})), self.tune(item.get("tune", []))
        return KernelEntry(file, item["function"], args, options, tune, self.line)

    def args(self, args: Any) -> tuple[str, ...]:
        if not isinstance(args, list) or not all(isinstance(text, str) for text in args):
            raise self.error(
                "`args` must be a list of texts, one class for each parameter",
                ("got", json.dumps(args)),
                ("expected", '["*fp32:16", "i32", "=1024"]'),
            )
        for index, text in enumerate(args):
            try:
                parse_class(text)
            except WorkerError as error:
                raise self.error(
                    f"argument {index + 1} is not a class: {error.message}", ("got", json.dumps(text))
                ) from None
        return tuple(args)

    def options(self, options: Any) -> tuple[tuple[str, Any], ...]:
        if not isinstance(options, dict):
            raise self.error(
                "`options` must be an object",
                ("got", json.dumps(options)),
                ("expected", '{"num_warps": 8}'),
            )
        found = tuple((name, option_value(value)) for name, value in sorted(options.items()))
        try:
            write_key([], dict(found))
        except WorkerError as error:
            raise self.error(error.message, ("expected", '{"num_warps": 8}')) from None
        return found

    def tune(self, tune: Any) -> tuple[dict[str, Any], ...]:
        expected = '[{"arguments": {"x": {"shape": [4096], "dtype": "fp16"}, "n": 4096}, "grid": "grid"}]'
        if not isinstance(tune, list):
            raise self.error("`tune` must be a list", ("got", json.dumps(tune)), ("expected", expected))
        for case in tune:
            if (
                not isinstance(case, dict)
                or not isinstance(case.get("arguments"), dict)
                or case.keys() - {"arguments", "grid"}
                or not isinstance(case.get("grid", ""), str)
            ):
                raise self.error(
                    "`tune` lists objects of `arguments`, and of `grid` if need be",
                    ("got", json.dumps(case)),
                    ("expected", expected),
                )
            for name, value in case["arguments"].items():
                self.tune_value(name, value)
        return tuple(tune)

    def tune_value(self, name: str, value: Any) -> None:
        try:
            if isinstance(value, dict) and value.keys() == {"value"} and isinstance(value["value"], str):
                parse_value(value["value"])
                return
            if isinstance(value, dict) and value.keys() == {"shape", "dtype"}:
                shape = value["shape"]
                parse_class(f"*{value['dtype']}")
                if isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape):
                    return
            elif value is None or isinstance(value, (bool, int, float, str)):
                return
        except WorkerError as error:
            raise self.error(f"`tune` gives `{name}` no value: {error.message}") from None
        raise self.error(
            f"`tune` gives `{name}` neither a number nor a tensor",
            ("got", json.dumps(value)),
            ("expected", '4096, {"shape": [4096], "dtype": "fp16"} or {"value": "fp16"}'),
        )


def option_value(value: Any) -> Any:
    """Returns an option's value; the text of one, as the runtime records it, stands for it too."""
    if isinstance(value, list):
        return tuple(option_value(item) for item in value)
    if not isinstance(value, str):
        return value
    try:
        found = parse_value(value)
    except WorkerError:
        return value
    return value if isinstance(found, (Dtype, Function)) else found


def _lines_of(text: str, document: dict[str, Any]) -> list[tuple[int, Any]]:
    """Returns the kernels of a manifest with the lines that they begin in. The text is known to be JSON."""
    decoder, at = json.JSONDecoder(), text.index("{") + 1
    starts: list[int] = []

    def skip(at: int) -> int:
        while text[at] in " \t\r\n,:":
            at += 1
        return at

    while text[at := skip(at)] != "}":
        name, at = decoder.raw_decode(text, at)
        at = skip(at)
        if name != "kernels":
            _, at = decoder.raw_decode(text, at)
            continue
        starts, at = [], at + 1  # of two of one name the later one counts
        while text[at := skip(at)] != "]":
            starts.append(text.count("\n", 0, at) + 1)
            _, at = decoder.raw_decode(text, at)
        at += 1
    return list(zip(starts, document["kernels"]))
