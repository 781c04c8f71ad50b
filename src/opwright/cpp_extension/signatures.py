"""The declarations of functions, read from C++, where they are simple enough to be sure of them.

They let generated bindings be compiled apart from the functions: side by side with them, and not again when
only a body changes. Whatever is not certain is refused: bindings are then compiled with the source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from opwright.cpp_extension.headers import without_comments

_TENSOR = r"(?:::)?(?:torch|at)::Tensor"
_SCALAR = r"(?:void|bool|int|long|long long|unsigned|float|double|size_t|(?:std::)?u?int(?:8|16|32|64)_t|std::string|c10::string_view)"
_OPTIONAL = r"(?:std|c10|torch|at)::optional"
_ATOM = rf"(?:{_TENSOR}|{_SCALAR}|(?:c10|at|torch)::(?:ScalarType|Device|IntArrayRef|Scalar))"
_INNER = rf"(?:{_ATOM}|(?:{_OPTIONAL}|std::vector)\s*<\s*{_ATOM}\s*>)"
_TYPE = rf"(?:{_INNER}|(?:{_OPTIONAL}|std::vector|std::tuple|std::pair)\s*<\s*{_INNER}(?:\s*,\s*{_INNER})*\s*>)"
_VALUE = rf"(?:const\s+)?{_TYPE}(?:\s+const)?\s*&?"
_PARAMETER = re.compile(rf"(?P<type>{_VALUE})(?:(?<=[>&\s])|\s)\s*\w*\s*(?:=[^,(){{}};\"]*)?")
# Names that macros of the source must leave alone.
_WORDS = re.compile(r"#\s*(define|undef)\s+(\w+)")
_USED = re.compile(r"\w+")


def declarations(text: str, functions: Iterable[str]) -> list[str] | None:
    """Returns one declaration for each function, or None where a source does not allow it."""
    plain = _without_strings(without_comments(text))
    if re.search(r"^\s*#\s*(if|include\s*[^\s<\"])", plain, re.MULTILINE):
        return None  # what is compiled depends on more than the text
    macros = {found[2] for found in _WORDS.finditer(plain)}
    outside = _at_file_scope(plain)
    if outside is None:
        return None
    found = []
    for function in functions:
        declaration = _declaration(outside, function)
        if declaration is None or macros & set(_USED.findall(declaration)):
            return None
        found.append(declaration)
    return found


def _declaration(text: str, function: str) -> str | None:
    """Returns the declaration of a function that is defined or declared at file scope, in one way only."""
    if not re.fullmatch(r"[A-Za-z_]\w*", function):
        return None
    found = set()
    for match in re.finditer(rf"(?:^|[;}}{{\n])\s*({_VALUE})\s*\b{function}\s*\(([^()]*)\)\s*(?=[;{{])", text):
        parameters = [p.strip() for p in _split(match[2])]
        types = [m["type"] for p in parameters if (m := _PARAMETER.fullmatch(f"{p} "))]
        if len(types) < len(parameters):
            return None
        found.add(f"{_plain(match[1])} {function}({', '.join(map(_plain, types))});")
    mentions = len(re.findall(rf"\b{function}\s*\(", text))
    matches = len(re.findall(rf"\b{function}\s*\([^()]*\)\s*[;{{]", text))
    return found.pop() if len(found) == 1 and mentions == matches else None


def _plain(type_: str) -> str:
    """Returns a type in the words of the headers that bindings have."""
    type_ = re.sub(r"\s+", " ", type_).strip()
    type_ = re.sub(r"\b(c10|torch|at)::optional\b", "std::optional", type_)
    type_ = re.sub(r"(::)?\btorch::(?=Tensor\b|ScalarType|Device|IntArrayRef|Scalar)", "at::", type_)
    return type_


def _split(parameters: str) -> list[str]:
    """Splits at commas outside of angle brackets."""
    parts, depth = [""], 0
    for letter in parameters:
        depth += (letter == "<") - (letter == ">")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def _at_file_scope(text: str) -> str | None:
    """Returns a source with the insides of all braces left out; None where namespaces or unbalanced braces are."""
    if re.search(r"\bnamespace\b|\busing\b|\btypedef\b|\bextern\b|\btemplate\b", text):
        return None
    kept, depth = [], 0
    for letter in text:
        if letter == "}":
            depth -= 1
            if depth < 0:
                return None
        if depth == 0 or (letter == "{" and depth == 0):
            kept.append(letter)
        if letter == "{":
            depth += 1
    return "".join(kept) if depth == 0 else None


def _without_strings(text: str) -> str:
    return re.sub(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', '""', text)
