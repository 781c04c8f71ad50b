"""The parameters of a kernel as its author wrote them, beside those that its contract wants."""

from __future__ import annotations

import re

_OPEN, _CLOSE = "(<{[", ")>}]"


def line_of_function(text: str, name: str) -> int:
    """Returns the line on which the last function of a name is declared, from 1; 0 where there is none."""
    found = list(re.finditer(_function(name), text))
    return text.count("\n", 0, found[-1].start()) + 1 if found else 0


def tell_difference(text: str, name: str, signature: str) -> str:
    """Returns how the first function of a name in a text differs from a signature, if in one parameter; else "".

    Types are compared as they are written, so of a signature that differs in several nothing can be told: they may be
    other names of the right types.
    """
    written, wanted = parameters_of(text, name), parameters_of(signature, name)
    if written is None or wanted is None:
        return ""
    own, right = [_type_of(p) for p in written], [_type_of(p) for p in wanted]
    if len(own) == len(right):
        others = [i for i in range(len(own)) if own[i] != right[i]]
        return f"`{written[others[0]]}` must be `{wanted[others[0]]}`" if len(others) == 1 else ""
    if len(own) + 1 == len(right):
        lost = next(i for i in range(len(right)) if own[i : i + 1] != right[i : i + 1])
        return f"`{wanted[lost]}` is missing" if own == right[:lost] + right[lost + 1 :] else ""
    if len(own) == len(right) + 1:
        more = next(i for i in range(len(own)) if own[i : i + 1] != right[i : i + 1])
        return f"`{written[more]}` is one too many" if right == own[:more] + own[more + 1 :] else ""
    return ""


def parameters_of(text: str, name: str) -> list[str] | None:
    """Returns the parameters of the first function of a name, with single spaces; None where there is none."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    found = re.search(_function(name), text)
    if found is None:
        return None
    parts, depth = [""], 1
    for character in text[found.end() :]:
        depth += (character in _OPEN) - (character in _CLOSE)
        if not depth:
            return [" ".join(part.partition("=")[0].split()) for part in parts if part.strip()]
        if character == "," and depth == 1:
            parts.append("")
        else:
            parts[-1] += character
    return None


def _function(name: str) -> str:
    return rf"\bvoid\s+{name}\s*\("


def _type_of(parameter: str) -> str:
    """Returns the type of a parameter without spaces, namespaces that are optional, and its name."""
    named = re.fullmatch(r"(.*[\s&*>])\w+", parameter)
    return re.sub(r"\s|(?:::)?\b(?:opwright|std)::", "", named[1] if named else parameter)
