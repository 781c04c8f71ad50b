"""A compiler's output, reduced to what its reader needs: the first error at the author's own line."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from opwright.errors import CompileError

if TYPE_CHECKING:
    from opwright.build.compile import Request
    from opwright.spec.declaration import Source

_MESSAGE = re.compile(
    r"^(?P<file>[^\s:][^:\n]*):(?P<line>\d+):(?:(?P<column>\d+):)? (?P<kind>[a-z ]+): (?P<text>.*)$"
)
_EXPORT = re.compile(r"^>.*OPWRIGHT_KERNEL\(\s*(\w+)")
_HELP = [
    (r"cannot convert .*(half|bfloat16)", "compute in `opwright::compute_t<T>`, and convert with `T(value)`"),
    (r"No such file or directory", "includes are found beside the source and in Opwright's own headers"),
    (r"torch/|ATen/|c10/", "kernels see no PyTorch header; host code includes <opwright/tensor.h>"),
]


def compile_error(request: Request, step: str, output: str, log: str) -> CompileError:
    """Returns the error for a failed step of a build; the full log is kept in a file that it names."""
    log_path = _keep(log, request.unit[0].name)
    sources = {source.origin: source for source in request.sources}
    messages = [m for m in map(_MESSAGE.match, output.splitlines()) if m]
    errors = [m for m in messages if "error" in m["kind"]]
    name = request.unit[0].name
    if not errors:
        rule = (
            f"the step `{step}` of its build failed" if step not in sources else "its kernel does not compile"
        )
        body = "\n".join(output.strip().splitlines()[-6:])
        return CompileError(name, rule, body=body, hint=f"the log: {log_path}")
    first = errors[0]
    at = _author_line(output.splitlines(), messages, first, sources)
    text = first["text"].removeprefix("static assertion failed: ")
    hint = next((advice for pattern, advice in _HELP if re.search(pattern, text)), "")
    excerpt = _excerpt(request, at[0], at[1])
    exported = next((m[1] for line in excerpt if (m := _EXPORT.search(line))), None)
    names = [d.name for d in request.unit]
    if exported is not None and exported not in names:
        # An unknown name leaves the macro of its entry undefined, which reads as anything but that.
        text = f"`{exported}` is no operator of this folder; there are: {', '.join(names)}"
        forward = exported.removesuffix("_backward")
        hint = "the first argument of OPWRIGHT_KERNEL is the operator's name"
        if forward != exported and forward in names:
            hint = f"declare it with `@{forward}.backward`"
    body = [f"{at[0]}:{at[1]}: {text}", *excerpt]
    more = len({(m["file"], m["line"], m["text"]) for m in errors}) - 1
    footer = f"{more} more: {log_path}" if more else f"the log: {log_path}"
    return CompileError(
        name,
        "its kernel does not compile",
        body="\n".join([*body, "", footer]),
        hint=hint or f"edit {at[0]}, and call again",
    )


def _author_line(
    lines: list[str], messages: list[re.Match[str]], first: re.Match[str], sources: dict[str, Source]
) -> tuple[str, int]:
    """Returns the place in the author's source that the error belongs to.

    An error inside a header is told with the lines that led there ("required from here", "in
    expansion of macro"); the first of them in one of the author's files counts.
    """
    if first["file"] in sources:
        return first["file"], int(first["line"])
    start = lines.index(first.group(0))
    ordered = [*lines[start:], *reversed(lines[:start])]
    for line in ordered:
        for found in re.finditer(r"(?:^|from |In file included from )([^\s:][^:\n]*):(\d+)", line):
            if found[1] in sources:
                return found[1], int(found[2])
    return first["file"], int(first["line"])


def _excerpt(request: Request, file: str, line: int) -> list[str]:
    source = next((s for s in request.sources if s.origin == file), None)
    try:
        if source and source.path is None:
            text, first = source.inline.splitlines(), source.line
        else:
            text, first = Path(file).read_text().splitlines(), 1
    except OSError:
        return []
    shown = range(max(line - 1, first), min(line + 1, first + len(text) - 1) + 1)
    return [f"{'>' if n == line else ' '} {n:4} | {text[n - first]}" for n in shown]


def _keep(log: str, name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="opwright-"))
    path = folder / f"{name}.log"
    path.write_text(log)
    return path
