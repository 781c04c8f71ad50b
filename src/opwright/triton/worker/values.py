"""VALUE texts: constexpr arguments, defaults and options as a key of a kernel writes them, both ways."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .errors import WorkerError

DTYPES = frozenset(
    "void int1 int8 int16 int32 int64 uint1 uint8 uint16 uint32 uint64 "
    "fp8e4nv fp8e4b15 fp8e4b8 fp8e5 fp8e5b16 fp16 bf16 fp32 fp64".split()
)
_WORDS = {
    "True": True,
    "False": False,
    "None": None,
    "inf": math.inf,
    "-inf": -math.inf,
    "nan": math.nan,
}
_WORD = re.compile(r"[A-Za-z_]\w*")
_NUMBER = re.compile(r"-?(?:inf\b|\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
_ESCAPED = re.compile(r'["\\\x00-\x1f]')
_FUNCTION = re.compile(r"@([^\W\d]\w*(?:\.[^\W\d]\w*)*)")


@dataclass(frozen=True)
class Dtype:
    """A Triton dtype by its name."""

    name: str


@dataclass(frozen=True)
class Function:
    """A JIT function of the kernel's module by its name, dotted for an attribute."""

    name: str


class Scanner:
    """Reads the text of a class or a value from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def error(self, expected: str) -> WorkerError:
        rest = self.text[self.at :]
        found = f"at `{rest}`" if rest else "at its end"
        return WorkerError("request", f"`{self.text}` cannot be read: {found} expected {expected}.")

    def take(self, token: str) -> bool:
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        return True

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def end(self) -> None:
        if self.at != len(self.text):
            raise self.error("nothing more")

    def items(self, read: Any) -> tuple[Any, ...]:
        """Reads `A, B)` or `A,)`, after the opening parenthesis."""
        found: list[Any] = []
        while not self.take(")"):
            found.append(read(self))
            if self.take(",)"):
                if len(found) != 1:
                    raise self.error("`)`, for only a tuple of one ends in a comma")
                break
            if not self.take(", ") and self.text[self.at : self.at + 1] != ")":
                raise self.error("`, ` or `)`")
        return tuple(found)


def scan_value(scanner: Scanner) -> Any:
    """Reads one value; dtypes and functions come as `Dtype` and `Function`."""
    text, at = scanner.text, scanner.at
    if text.startswith('"', at):
        try:
            value, scanner.at = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            raise scanner.error("a JSON string") from None
        return value
    if scanner.take("("):
        return scanner.items(scan_value)
    if found := scanner.match(_FUNCTION):
        return Function(found[1])
    if found := scanner.match(_NUMBER):
        number = found[0]
        return int(number) if number.lstrip("-").isdigit() else float(number)
    if found := scanner.match(_WORD):
        if found[0] in _WORDS:
            return _WORDS[found[0]]
        if found[0] in DTYPES:
            return Dtype(found[0])
        scanner.at = at
    raise scanner.error('a value: 1, 0.5, True, None, "text", fp16, @function or (1, 2)')


def _escape(found: re.Match[str]) -> str:
    return f"\\{found[0]}" if found[0] in '"\\' else f"\\u{ord(found[0]):04x}"


def parse_value(text: str) -> Any:
    """Returns the value that a text stands for.

    Raises:
        WorkerError: The text is not a value, or not written as `write_value` writes it.
    """
    scanner = Scanner(text)
    value = scan_value(scanner)
    scanner.end()
    if write_value(value) != text:
        raise WorkerError("request", f"`{text}` must be written as `{write_value(value)}`.")
    return value


def write_value(value: Any) -> str:
    """Returns the text of a value.

    Raises:
        ValueError: The value has no text.
    """
    if isinstance(value, (bool, type(None))):
        return repr(value)
    if type(value) in (int, float):
        return repr(value)
    if isinstance(value, str):
        return f'"{_ESCAPED.sub(_escape, value)}"'
    if isinstance(value, (tuple, list)):
        inner = ", ".join(write_value(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, Dtype):
        return value.name
    if isinstance(value, Function):
        return f"@{value.name}"
    raise ValueError(f"a {type(value).__name__} cannot be written into a key")


def from_python(value: Any, module: Any) -> Any:
    """Returns what `write_value` takes for an object of the author's: constexprs unwrapped, dtypes and functions named.

    Raises:
        ValueError: The object has no text.
    """
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    if isinstance(value, tl.constexpr):
        return from_python(value.value, module)
    if isinstance(value, (tuple, list)):
        return tuple(from_python(item, module) for item in value)
    if type(value) is tl.dtype:
        return Dtype(value.name)
    if isinstance(value, JITFunction):
        for name, found in vars(module).items():
            if found is value:
                return Function(name)
            if isinstance(found, ModuleType) and getattr(found, value.__name__, None) is value:
                return Function(f"{name}.{value.__name__}")
        raise ValueError(f"`{value.__name__}` is not a name of the module")
    return value


def to_python(value: Any, module: Any) -> Any:
    """Returns the object that Triton takes for a parsed value.

    Raises:
        WorkerError: The module has no JIT function of that name.
    """
    import triton.language as tl
    from triton.runtime.jit import JITCallable

    if isinstance(value, tuple):
        return tuple(to_python(item, module) for item in value)
    if isinstance(value, Dtype):
        return tl.dtype(value.name)
    if isinstance(value, Function):
        found = module
        for part in value.name.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, JITCallable):
            what = "has no such name" if found is None else f"has a {type(found).__name__} there"
            raise WorkerError(
                "argument",
                f"`@{value.name}` must name a JIT function of the kernel's module; `{module.__file__}` {what}.",
                file=module.__file__,
            )
        return found
    return value
