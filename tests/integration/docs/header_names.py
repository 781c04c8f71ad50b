"""The public names of Opwright's C++ headers: what namespace `opwright` has outside of `detail`, and macros."""

from __future__ import annotations

import re
from pathlib import Path

HEADERS = Path(__file__).parents[3] / "src/opwright/native/include/opwright"
# math_tables.h and vec_simd.h are parts of math.h and vec.h.
PARTS = {"math_tables.h": "math.h", "vec_simd.h": "vec.h"}
_NAMED = re.compile(
    r"^(?:template <.*> )?"
    r"(?:(?:struct|class|enum class) (\w+)(?= |:|$)"
    r"|using (\w+) ="
    r"|(?:[\w:<>,*& ]+? )?(?:OPWRIGHT_INLINE |inline )?(?:constexpr )?(?:[\w:<>,]+[ *&]+)(\w+)(?=\(|(?:<.*>)? =|;))"
)


def names_of(header: Path) -> set[str]:
    """Returns the names that a header declares for kernels and programs."""
    text = re.sub(r"//.*|/\*.*?\*/", "", header.read_text())
    names = set(re.findall(r"^#define (OPWRIGHT_\w+)\(", text, re.MULTILINE))
    text = re.sub(r"^#.*?(?<!\\)$", "", text, flags=re.MULTILINE | re.DOTALL)
    depth, scopes, statement = 0, [], ""
    for token in re.split(r"([{};])", text):
        if token == "{":
            opened = " ".join(statement.split())
            found = re.search(r"namespace ([\w:]+)$", opened)
            if found:
                scopes.append((depth, found[1]))
            elif _is_public(scopes) and depth == len(scopes):
                names |= _names_in(opened)
            depth, statement = depth + 1, ""
        elif token == "}":
            depth, statement = depth - 1, ""
            if scopes and scopes[-1][0] == depth:
                scopes.pop()
        elif token == ";":
            if _is_public(scopes) and depth == len(scopes):
                names |= _names_in(" ".join(f"{statement};".split()))
            statement = ""
        else:
            statement += token
    return names


def _is_public(scopes: list[tuple[int, str]]) -> bool:
    names = [name for _, name in scopes]
    return bool(names) and names[0].startswith("opwright") and not any("detail" in name for name in names)


def _names_in(statement: str) -> set[str]:
    statement = re.sub(r"template <>.*| ?(?:__launch_bounds__|alignas)\((?:[^()]|\([^()]*\))*\)", "", statement)
    found = _NAMED.match(statement)
    return {name for name in found.groups() if name} - {"operator"} if found else set()


def public_names() -> dict[str, set[str]]:
    """Returns the public names by the header that a kernel includes."""
    found: dict[str, set[str]] = {}
    for header in sorted([*HEADERS.glob("*.h"), *HEADERS.glob("*.cuh"), *HEADERS.glob("triton/*.h")]):
        name = str(header.relative_to(HEADERS))
        found.setdefault(PARTS.get(name, name), set()).update(names_of(header))
    return {name: names for name, names in found.items() if names}


if __name__ == "__main__":
    for header, names in public_names().items():
        print(header, *sorted(names))
