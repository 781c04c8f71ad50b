"""A compiler's output, reduced to what its reader needs: the first error at the author's own line."""

from __future__ import annotations

import difflib
import itertools
import os
import re
import shlex
import tempfile
from collections.abc import Container, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from opwright import settings
from opwright.backends.exports import without_comments
from opwright.backends.toolchain import NATIVE
from opwright.build.causes import Failure, find_cause
from opwright.build.demangle import demangle
from opwright.build.glue import enum_name, enumerator, enums_of, kernel_signature
from opwright.build.parameters import line_of_function, parameters_of, tell_difference
from opwright.build.request import Request
from opwright.errors import ArchitectureError, BuildError, CompileError, StoreOwnerError
from opwright.store_root import make_directory, make_root

_MESSAGE = re.compile(r"^(?P<file>[^\s:][^:\n]*):(?P<line>\d+):(?:(?P<column>\d+):)? (?P<kind>[a-z ]+): (?P<text>.*)$")
# The device half of nvcc has a form of its own.
_NVCC_MESSAGE = re.compile(r"^(?P<file>[^\s(][^(\n]*)\((?P<line>\d+)\): (?P<kind>[a-z ]+?)(?: #\d+-D)?: (?P<text>.*)$")
_NVCC_UNKNOWN = re.compile(r"Unsupported gpu architecture '(?:compute|sm)_(\w+)'")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[mK]")
# Template arguments that nobody wrote.
_FILLED_IN = re.compile(r",\s*std::(?:__cxx11::)?(?:allocator|char_traits|less|default_delete|hash|equal_to)\s*<")
_MAX_LOGS = 10
_LONGEST = 300  # characters of a message that are shown
_DECLARED_AS = "the kernel must be declared as"
_EXPORT = re.compile(r"^>.*OPWRIGHT_KERNEL\(\s*(\w+)")
# With the line on which the next declaration begins; not in a macro of the author's.
_ANY_EXPORT = re.compile(r"(?<!\\\n)^[ \t]*OPWRIGHT_KERNEL\(\s*(\w+)[^)]*\)\s*(?=\S|$)", re.MULTILINE)
_HELP = [
    (r"cannot convert .*(half|bfloat16)", "compute in `opwright::compute_t<T>`, and convert with `T(value)`"),
    (
        r"requires --extended-lambda",
        "`export NVCC_APPEND_FLAGS=--extended-lambda`, or write a struct whose `operator()` is `__device__`",
    ),
    (
        r"calling a __host__ function\(\"(?:[\w:&*<> ]+ )?opwright::(\w+)[(<]",
        r"`opwright::\1` is host code: call it in the function that launches",
    ),
    (
        r"`?__device__|calling a __host__ function",
        "mark the function `__device__`, or `OPWRIGHT_HOST_DEVICE`",
    ),
    (
        r"torch/|ATen/|c10/",
        "kernels see no PyTorch header; host code includes <opwright/tensor.h>; `opwright.cpp_extension` builds "
        "sources that need torch/extension.h",
    ),
    (
        r"No such file or directory",
        "includes are found beside the source, in Opwright's own headers and, of `cuda.cu`, in the CUDA toolkit",
    ),
    (
        r"uses too much shared data",
        "above 48 KiB, declare it as `extern __shared__`, and allow the size with `cudaFuncSetAttribute(kernel, "
        "cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)`",
    ),
    (r"'(?:min|max|sort|fill|fill_n|copy|clamp|swap|nth_element)' is not a member of 'std'", "`#include <algorithm>`"),
    (r"'numeric_limits' is not a member of 'std'", "`#include <limits>`"),
    (r"expected unqualified-id before string constant", "a `}` is missing above that line"),
    (r"^'at' was not declared", "half precision is `opwright::half` and `opwright::bfloat16` in a kernel"),
    (
        r"^'torch' was not declared|type/value mismatch at argument \d+ .*kCompiledMask",
        "the types are those of C++: `float`, `double`, `opwright::half`, `opwright::bfloat16`, `int64_t`",
    ),
    (
        r"assignment of read-only location '(\w+)\.opwright::View<const",
        r"an input is read-only; `Mutates[...]` around the annotation of `\1` declares that it is written into",
    ),
    (r"names no type, so", "the types that it is good for, as in `OPWRIGHT_KERNEL(name, float, double)`"),
    (r"the kernel has \S+, which is not in", "take it out of OPWRIGHT_KERNEL, or widen the annotation"),
]
# What g++ and nvcc say of an enumerator, and g++ of an enum, that there is not.
_NO_ENUMERATOR = re.compile(r"['‘]\w+['’] is not a member of ['‘](\w+)['’]|enum \"(\w+)\" has no member")
# What g++ and nvcc say of a template where a function is expected.
_NOT_A_FUNCTION = re.compile("cannot resolve address of overloaded function|which instance of function template")
_INCLUDE = re.compile(r"#include <[^>]+>")
_UNKNOWN = re.compile(
    r"['‘\"](\w+)['’\"] (?:is not a member of ['‘]opwright|that depend|was not declared|is undefined)"
    r'|namespace "opwright" has no member "(\w+)"'
)
_STRING = re.compile(r"const char ?\[\d+\]")
_UNDECLARED = re.compile(r"['‘](\w+)['’] (?:has not been|was not) declared")


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
        body = _end_of(output)
        advice = _advice(body)
        footer = f"\n\nthe log: {log_path}" if advice else ""
        return CompileError(name, rule, body=body + footer, hint=advice or f"the log: {log_path}")
    first = errors[0]
    places = [_author_line(output.splitlines(), messages, each, sources) for each in errors]
    unknown = _unknown_export(request, places)
    at = unknown[1:] if unknown else places[0]
    text = first["text"].removeprefix("static assertion failed: ")
    text = re.sub(r'^static assertion failed with "(.*)"$', r"\1", text)
    hint = _advice(text) or _enum_hint(request, text, at) or _include_hint(messages, first)
    hint = hint or _header_hint(request, text)
    excerpt = _excerpt(request, at[0], at[1])
    exported = unknown[0] if unknown else next((m[1] for line in excerpt if (m := _EXPORT.search(line))), None)
    names = [d.name for d in request.unit]
    if exported is not None and exported not in names:
        # An unknown name leaves the macro of its entry undefined, which reads as anything but that.
        text = f"`{exported}` is not an operator of this folder; there are: {', '.join(names)}"
        forward = exported.removesuffix("_backward")
        hint = "the first argument of OPWRIGHT_KERNEL is the operator's name"
        if forward != exported and forward in names:
            hint = f"declare it with `@{forward}.backward`"
    elif exported is not None and re.search(rf"['‘\"]{exported}['’\"] (was not declared|is undefined)", text):
        text = f"there is no function `{exported}` above it"
        hint = "a kernel has the name of its operator; `opwright inspect TARGET` prints how it is declared"
    elif (
        exported is not None
        and _NOT_A_FUNCTION.search(text)
        and any(d.name == exported and d.contract.scalar_family is None for d in request.unit)
    ):
        text = f"`{exported}` must be a function, not a template: each of its tensors has a single dtype"
        hint = f"write a function with these types, and `OPWRIGHT_KERNEL({exported})`; `opwright inspect` prints both"
    elif exported is not None and re.search(r"redefinition of|has already been defined", text):
        text, hint = (
            f"`{exported}` is exported twice",
            f"name all of its types in one `OPWRIGHT_KERNEL({exported}, ...)`",
        )
    elif exported is not None and _is_kernel_of_cuda(request, at, exported):
        text = f"`{exported}` must be the host function that launches, not the `__global__` function"
        hint = f"rename that function `{exported}_kernel`, and launch it in `{exported}`"
    elif text.startswith(_DECLARED_AS):
        at, text = _at_function(request, at, exported, text)
        excerpt = _excerpt(request, *at)
        hint = _how_to_go_on(request, at[0])
        if hint.startswith("edit") and os.path.basename(at[0]) in ("cpu.cpp", "cuda.cu"):  # of a template, perhaps
            hint += f"; without {os.path.basename(at[0])} the reference runs"
    else:
        hint = _signature_hint(request, at) or hint
    body = [f"{at[0]}:{at[1]}: {text}", *excerpt]
    more = len({(m["file"], m["line"], m["text"]) for m in errors}) - 1
    footer = f"{more} more: {log_path}" if more else f"the log: {log_path}"
    return CompileError(
        name,
        "its kernel does not compile",
        body="\n".join([*body, "", footer]),
        hint=hint or _how_to_go_on(request, at[0]),
    )


def _advice(text: str) -> str:
    """Returns the hint for an error that is known; "" for another."""
    return next((found.expand(advice) for pattern, advice in _HELP if (found := re.search(pattern, text))), "")


def _end_of(output: str) -> str:
    """Returns the errors in an output that names no line of a source; without any, its last six lines."""
    lines = output.strip().splitlines()
    errors = [line for line in lines if re.search(r"\berror\b", line)]
    return re.sub(r"\b_Z\w+", lambda name: demangle(name[0]), "\n".join((errors or lines)[-6:]))


def _is_kernel_of_cuda(request: Request, at: tuple[str, int], name: str) -> bool:
    """Returns whether the last function of a name above a line is a `__global__` one."""
    lines, first = _lines_of(request, *at)
    above = without_comments("\n".join(lines[: at[1] - first + 1]))
    return (
        re.search(rf"__global__[^;{{}}]*\bvoid\s+{name}\s*\((?!.*\bvoid\s+{name}\s*\()", above, re.DOTALL) is not None
    )


def _unknown_export(request: Request, places: Sequence[tuple[str, int]]) -> tuple[str, str, int] | None:
    """Returns a name that no operator has under which a kernel is exported, and where, if an error follows from that.

    The macro of its entry is not defined then. g++ reports that on the line of the export, or where the next
    declaration begins.
    """
    names = {declaration.name for declaration in request.unit}
    for source, text in request.texts.items():
        code = without_comments(text)
        for export in _ANY_EXPORT.finditer(code):
            first = source.line + code.count("\n", 0, export.start())
            last = source.line + code.count("\n", 0, export.end())
            if export[1] not in names and any(file == source.origin and first <= n <= last for file, n in places):
                return export[1], source.origin, first
    return None


def _at_function(request: Request, at: tuple[str, int], name: str | None, text: str) -> tuple[tuple[str, int], str]:
    """Returns the place of the function whose signature is wrong, and the message with the parameter that is."""
    lines, first = _lines_of(request, *at)
    line = line_of_function("\n".join(lines[: at[1] - first]), name) if name else 0
    if not line:
        return at, text
    told = tell_difference("\n".join(lines[line - 1 :]), name, text)
    return (at[0], first + line - 1), f"{told}; {text}" if told else text


def _signature_hint(request: Request, at: tuple[str, int]) -> str:
    """Returns the signature of the kernel around an error, where its parameters are certainly others."""
    lines, first = _lines_of(request, *at)
    above = "\n".join(lines[: at[1] - first + 1])
    backend = next((b for b, found in request.sources.items() if any(s.origin == at[0] for s in found)), "")
    declarations = {line_of_function(above, d.name): d for d in request.unit}
    line = max(declarations)
    if not (line and backend):
        return ""
    name, text = declarations[line].name, "\n".join(lines[line - 1 :])
    signature = kernel_signature(declarations[line], backend)
    written, wanted = parameters_of(text, name), parameters_of(signature, name)
    if written is None or wanted is None:
        return ""
    if len(written) == len(wanted) and not any(re.match(r"(?:const )?(?:torch|at)::", p) for p in written):
        return ""
    told = tell_difference(text, name, signature)
    return f"{told}; {_DECLARED_AS}: {signature}" if told else f"{_DECLARED_AS}: {signature}"


def _how_to_go_on(request: Request, file: str) -> str:
    inline = [s for found in request.sources.values() for s in found if s.origin == file and s.path is None]
    if not inline:
        return f"edit {file}, and call again"
    # Python reads a declaration in a file once; a cell of a notebook and a text that was computed are in no file.
    return f"edit {file}, and start Python again" if os.path.isfile(file) else "declare it again with another source"


def _include_hint(messages: list[re.Match[str]], first: re.Match[str]) -> str:
    """Returns the `#include` that g++ asks for in its notes on an error, if it does."""
    notes = itertools.takewhile(lambda m: m["kind"] == "note", messages[messages.index(first) + 1 :])
    return next((f"`{found[0]}`" for m in notes if (found := _INCLUDE.search(m["text"]))), "")


def _header_hint(request: Request, text: str) -> str:
    """Returns what makes a name of Opwright known that an error says is unknown; "" if no header has it."""
    if not (unknown := _UNKNOWN.search(text)):
        return ""
    name = unknown[1] or unknown[2]
    function, type_ = rf"(?:[\w:]+(?:<.*>)?[*&]* +)+{name}\(", rf"(?:template <.*> )?(?:struct|using|class) {name}\b"
    definition = re.compile(rf"^(?:{function}|{type_})", re.MULTILINE)
    folder = NATIVE / "include" / "opwright"
    for header in sorted(path for path in folder.glob("*.*") if "_" not in path.name):
        texts = [path.read_text() for path in (header, *folder.glob(f"{header.stem}_*"))]  # parts of it
        if any(map(definition.search, texts)):
            if "opwright" not in unknown[0] and header.name in _included_by("\n".join(request.texts.values())):
                return f"write `opwright::{name}`"
            return f"`#include <opwright/{header.name}>` has `opwright::{name}`"
    return ""


def _included_by(text: str) -> set[str]:
    """Returns the headers of Opwright that a source has: those that it includes, and `kernel.h`, with theirs."""
    found, waiting = set[str](), {"kernel.h"} | _headers_in(text)
    while waiting:
        header = waiting.pop()
        found.add(header)
        waiting |= _headers_in((NATIVE / "include" / "opwright" / header).read_text()) - found
    return found


def _headers_in(text: str) -> set[str]:
    named = re.findall(r"^#include [<\"]opwright/([\w./]+)[>\"]", text, re.MULTILINE)
    return {name for name in named if (NATIVE / "include" / "opwright" / name).is_file()}


def _enum_hint(request: Request, text: str, at: tuple[str, int]) -> str:
    """Returns the names that a choice has in a kernel, where the error is about one that there is not, or a string."""
    enums = enums_of(request.unit)
    if _STRING.search(text):
        parameters = (p for d in request.unit for p in d.contract.parameters if p.kind == "choice")
        used = next((p for p in parameters if re.search(rf"['‘]{enum_name(p.name)}['’]", text)), None)
        line = next((line for line in _excerpt(request, *at) if line.startswith(">")), "")
        choice = next((c for c in used.choices if f'"{c}"' in line), used.choices[0]) if used else ""
        return f"`{used.name}` is an enum: `{enum_name(used.name)}::{enumerator(choice)}`" if used else ""
    if wrong := _UNDECLARED.search(text):
        name = next(iter(difflib.get_close_matches(wrong[1], enums, 1)), "")
    else:
        wrong = _NO_ENUMERATOR.search(text)
        name = wrong[1] or wrong[2] if wrong else ""
    return f"there are {', '.join(f'`{name}::{enumerator(c)}`' for c in enums[name])}" if name in enums else ""


def text_error(name: str, texts: Mapping[str, tuple[str, str]], step: str, output: str, log: str) -> BuildError:
    """Returns the error for a failed step of a build of plain sources: the first error, its cause, what mends it.

    Args:
        texts: what each source is called, and its text, by path.
        step: "link", or the name of a compilation.
        log: what all steps of the build said, each below its command.
    """
    log_path = _keep(log, name)
    command = _command(output, log)
    output = _COLOUR.sub("", output)
    lines = output.splitlines()
    messages = [m for line in lines if (m := _MESSAGE.match(line) or _NVCC_MESSAGE.match(line))]
    errors = [m for m in messages if "error" in m["kind"]]
    first = errors[0] if errors else None
    place = _author_line(lines, messages, first, _Own(texts, command)) if first else ("", 0)
    cause = find_cause(Failure(texts, output, command, first["text"] if first else "", place))
    rule = "it does not link" if step == "link" else "its source does not compile"
    more = len({(m["file"], m["line"], m["text"]) for m in errors}) - 1
    footer = f"{more} more: {log_path}" if more > 0 else f"the log: {log_path}"
    if cause:
        rule = f"{rule}: {cause.rule}" if step == "link" else cause.rule
        place = place if cause.place is None else cause.place
    if place[1]:
        shown = first if cause is None or cause.place is None else None
        body = _told(texts, place, shown, messages)
    else:
        body = [] if first or cause else output.strip().splitlines()[-6:]
    return (cause.error if cause else CompileError)(
        name,
        rule,
        rows=cause.rows if cause else (),
        body="\n".join([*body, *([""] if body else []), footer]),
        hint=cause.hint if cause else (first and _include_hint(messages, first)) or "correct it, and call again",
    )


def _command(output: str, log: str) -> list[str]:
    """Returns the words of the command that said `output`: the last above it in the log."""
    end = log.rfind(output) if output else len(log)
    lines = [line for line in log[:end].splitlines() if line.startswith("$ ")]
    try:
        return shlex.split(lines[-1][2:]) if lines else []
    except ValueError:  # a path with a quote, in a log that does not quote it
        return lines[-1][2:].split()


class _Own:
    """The files that the author wrote: the sources, and headers beside them or in a directory named with -I."""

    def __init__(self, texts: Mapping[str, tuple[str, str]], command: Sequence[str]) -> None:
        self._texts = texts
        self._own = {os.path.dirname(path) for path in texts}
        self._own |= {word[2:] for word in command if word.startswith("-I") and len(word) > 2}
        self._foreign = [folder for word, folder in pairwise(command) if word == "-isystem"]

    def __contains__(self, file: str) -> bool:
        if file in self._texts:
            return True
        path = os.path.normpath(file)
        if any(path.startswith(folder + os.sep) for folder in (*self._foreign, "/usr/include", "/usr/lib")):
            return False
        return any(folder and path.startswith(folder + os.sep) for folder in self._own)


def _told(
    texts: Mapping[str, tuple[str, str]],
    place: tuple[str, int],
    first: re.Match[str] | None,
    messages: list[re.Match[str]],
) -> list[str]:
    """Returns the first error at the author's line, with three lines of source and at most three notes."""
    file, line = place
    shown, text = texts.get(file, (file, None))
    if text is None:
        try:
            text = Path(file).read_text(errors="replace")
        except OSError:
            text = ""
    source = text.splitlines()
    numbers = range(max(line - 1, 1), min(line + 1, len(source)) + 1)
    head = f"{shown}:{line}"
    if first:
        head += f": {_simple(first['text'])}"
    body = [head, *(f"{'>' if n == line else ' '} {n:4} | {source[n - 1]}" for n in numbers)]
    if first and first["file"] != file and first["file"] not in texts:
        body.append(f"it shows in {first['file']}:{first['line']}")
    return body + (_notes(texts, first, messages) if first else [])


def _notes(texts: Mapping[str, tuple[str, str]], first: re.Match[str], messages: list[re.Match[str]]) -> list[str]:
    """Returns what is said about an error that its reader needs: notes about the author's own lines, few candidates."""
    start = messages.index(first) + 1
    end = next((i for i in range(start, len(messages)) if messages[i]["kind"] != "note"), len(messages))
    notes = [m for m in messages[start:end] if "in expansion of" not in m["text"]]
    candidates = [m for m in notes if "candidate" in m["text"]]
    own = [m for m in notes if m["file"] in texts and not m["text"].startswith(" ")]
    chosen = own[:3] or (notes[:4] if 0 < len(candidates) <= 2 else [])
    told = [f"{texts.get(m['file'], (m['file'],))[0]}:{m['line']}: note: {_simple(m['text'].strip())}" for m in chosen]
    hidden = len(candidates) - sum("candidate" in m["text"] for m in chosen)
    rest = f"{hidden} {'more ' if told else ''}{'candidate' if hidden == 1 else 'candidates'} in the log"
    return [*told, rest] if hidden > 0 else told


def _simple(text: str) -> str:
    """Returns a message without the template arguments that the standard library fills in, and not too long."""
    while True:
        found = _FILLED_IN.search(text)
        if found is None:
            break
        depth, end = 1, found.end()
        while depth and end < len(text):
            depth += {"<": 1, ">": -1}.get(text[end], 0)
            end += 1
        text = text[: found.start()] + text[end:]
    text = re.sub(r"std::(__cxx11::)?basic_string<char\s*>", "std::string", re.sub(r"(?<=\w)\s+>", ">", text))
    is_authors = text.startswith("static assertion failed")
    return text if is_authors or len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _author_line(
    lines: list[str], messages: list[re.Match[str]], first: re.Match[str], sources: Container[str]
) -> tuple[str, int]:
    """Returns the place in the author's source that the error belongs to.

    An error inside a header is told with the lines that led there: before it who needed the template
    ("required from here"), after it whose macro it was ("in expansion of macro"), else who included it.
    The innermost of them in one of the author's files counts.
    """
    if first["file"] in sources:
        return first["file"], int(first["line"])
    start = lines.index(first.group(0))
    texts = {m.group(0) for m in messages if m["kind"] != "note"}
    before = next((i for i in range(start - 1, -1, -1) if lines[i] in texts), -1)
    after = next((i for i in range(start + 1, len(lines)) if lines[i] in texts), len(lines))
    required = [line for line in lines[before + 1 : start] if "required" in line]
    ordered = [*required, *lines[start:after], *reversed(lines[:start]), *lines[after:]]
    for line in ordered:
        if re.search(r"note: +(candidate|.*declared here|.*previous)", line):
            continue
        for found in re.finditer(r"(?:In file included from |from |^)([^\s:][^:\n]*):(\d+)", line):
            if found[1] in sources:
                return found[1], int(found[2])
        inside = re.search(r"at line (\d+) of (.+?)$", line)  # nvcc's words for "required from here"
        if inside and inside[2] in sources:
            return inside[2], int(inside[1])
    return first["file"], int(first["line"])


def _excerpt(request: Request, file: str, line: int) -> list[str]:
    lines, first = _lines_of(request, file, line)
    shown = range(max(line - 1, first), min(line + 1, first + len(lines) - 1) + 1)
    return [f"{'>' if n == line else ' '} {n:4} | {lines[n - first]}" for n in shown]


def _lines_of(request: Request, file: str, line: int) -> tuple[list[str], int]:
    """Returns the lines of the source that a line of a file is in, and which line of it is the first."""
    every = [source for found in request.sources.values() for source in found if source.origin == file]
    # Several sources may be strings in one file: the last that starts above the line.
    source = max((s for s in every if s.path or s.line <= line), key=lambda s: s.line, default=None)
    try:
        if source and source.path is None:
            return source.inline.splitlines(), source.line
        return Path(file).read_text().splitlines(), 1
    except OSError:
        return [], 1


def _keep(log: str, name: str) -> Path:
    """Writes a log into the store, where the last ten stay; into a temporary folder if the store cannot be written."""
    try:
        make_root(settings.store_dir())
        folder = settings.store_dir() / "logs"
        make_directory(folder)
        descriptor, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log", dir=folder)
        for old in sorted(folder.glob("*.log"), key=lambda p: p.stat().st_mtime)[:-_MAX_LOGS]:
            old.unlink(missing_ok=True)
    except (OSError, StoreOwnerError):
        descriptor, path = tempfile.mkstemp(prefix=f"opwright-{name}-", suffix=".log")
    with open(descriptor, "w") as file:
        file.write(log)
    return Path(path)
