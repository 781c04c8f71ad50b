"""A compiler's output, reduced to what its reader needs: the first error at the author's own line."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from opwright.errors import ArchitectureError, CompileError

if TYPE_CHECKING:
    from opwright.build.compile import Request

_MESSAGE = re.compile(
    r"^(?P<file>[^\s:][^:\n]*):(?P<line>\d+):(?:(?P<column>\d+):)? (?P<kind>[a-z ]+): (?P<text>.*)$"
)
# The device half of nvcc has a form of its own.
_NVCC_MESSAGE = re.compile(
    r"^(?P<file>[^\s(][^(\n]*)\((?P<line>\d+)\): (?P<kind>[a-z ]+?)(?: #\d+-D)?: (?P<text>.*)$"
)
_NVCC_UNKNOWN = re.compile(r"Unsupported gpu architecture '(?:compute|sm)_(\w+)'")
_EXPORT = re.compile(r"^>.*OPWRIGHT_KERNEL\(\s*(\w+)")
_HELP = [
    (r"cannot convert .*(half|bfloat16)", "compute in `opwright::compute_t<T>`, and convert with `T(value)`"),
    (
        r"`?__device__|calling a __host__ function",
        "mark the function `__device__`, or `OPWRIGHT_HOST_DEVICE`",
    ),
    (r"No such file or directory", "includes are found beside the source and in Opwright's own headers"),
    (r"torch/|ATen/|c10/", "kernels see no PyTorch header; host code includes <opwright/tensor.h>"),
]


def compile_error(request: Request, step: str, output: str, log: str) -> CompileError | ArchitectureError:
    """Returns the error for a failed step of a build; the full log is kept in a file that it names."""
    unknown = _NVCC_UNKNOWN.search(output)
    if unknown:
        return ArchitectureError(
            request.subject,
            f"nvcc does not know the architecture sm_{unknown[1]}",
            rows=[("it knows", " ".join(request.known_architectures()))],
            hint="`pip install --upgrade nvidia-cuda-nvcc`, or `OPWRIGHT_ARCH=` one that it knows: the driver "
            "compiles its PTX for newer GPUs",
        )
    log_path = _keep(log, request.unit[0].name)
    sources = {source.origin: source for found in request.sources.values() for source in found}
    messages = [m for line in output.splitlines() if (m := _MESSAGE.match(line) or _NVCC_MESSAGE.match(line))]
    errors = [m for m in messages if "error" in m["kind"]]
    name = request.unit[0].name
    if not errors:
        is_kernel = step.startswith("kernel")
        rule = "its kernel does not compile" if is_kernel else f"the step `{step}` of its build failed"
        body = "\n".join(output.strip().splitlines()[-6:])
        return CompileError(name, rule, body=body, hint=f"the log: {log_path}")
    first = errors[0]
    at = _author_line(output.splitlines(), messages, first, sources)
    text = first["text"].removeprefix("static assertion failed: ")
    text = re.sub(r'^static assertion failed with "(.*)"$', r"\1", text)
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


def text_error(
    name: str, texts: Mapping[str, tuple[str, str]], step: str, output: str, log: str
) -> CompileError:
    """Returns the error for a failed step of a build of plain sources: what each is called, and its text, by path."""
    log_path = _keep(log, name)
    messages = [m for line in output.splitlines() if (m := _MESSAGE.match(line) or _NVCC_MESSAGE.match(line))]
    errors = [m for m in messages if "error" in m["kind"]]
    rule = "it does not link" if step == "link" else "its source does not compile"
    if not errors:
        body = "\n".join(output.strip().splitlines()[-6:])
        return CompileError(name, rule, body=body, hint=f"the log: {log_path}")
    file, line = _author_line(output.splitlines(), messages, errors[0], texts)
    place, text = texts.get(file, (file, ""))
    lines = text.splitlines()
    shown = range(max(line - 1, 1), min(line + 1, len(lines)) + 1)
    excerpt = [f"{'>' if n == line else ' '} {n:4} | {lines[n - 1]}" for n in shown]
    more = len({(m["file"], m["line"], m["text"]) for m in errors}) - 1
    footer = f"{more} more: {log_path}" if more else f"the log: {log_path}"
    body = [f"{place}:{line}: {errors[0]['text']}", *excerpt, "", footer]
    return CompileError(name, rule, body="\n".join(body), hint="correct it, and call again")


def _author_line(
    lines: list[str], messages: list[re.Match[str]], first: re.Match[str], sources: Container[str]
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
        inside = re.search(r"at line (\d+) of (\S+)", line)  # nvcc's words for "required from here"
        if inside and inside[2] in sources:
            return inside[2], int(inside[1])
    return first["file"], int(first["line"])


def _excerpt(request: Request, file: str, line: int) -> list[str]:
    every = [source for found in request.sources.values() for source in found if source.origin == file]
    # Several sources may be strings in one file: the last that starts above the line.
    source = max((s for s in every if s.path or s.line <= line), key=lambda s: s.line, default=None)
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
