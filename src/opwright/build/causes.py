"""Why a build of plain sources failed: the usual causes, each with the command or the edit that mends it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from opwright.build import whereabouts
from opwright.errors import ArchitectureError, BuildError, CompileError, HostCompilerError

# Macros that PyTorch has removed, and those that took their place.
_REMOVED = {"AT_CHECK": "TORCH_CHECK", "THCudaCheck": "C10_CUDA_CHECK` of `<c10/cuda/CUDAException.h>"}
# What `load_inline` writes behind the author's text, to bind what `functions` names.
_GENERATED = "PYBIND11_MODULE(opwright_"
_UNDECLARED = re.compile(r"not declared|undeclared|is undefined|is not a member|no member named|not been declared")


@dataclass(frozen=True)
class Failure:
    """A step of a build that failed.

    Attributes:
        texts: what each source is called, and its text, by path.
        output: what the compiler or the linker said.
        command: the words of the command.
        error: the text of the first error; "" when none has a place.
        place: the path and the line that it belongs to.
    """

    texts: Mapping[str, tuple[str, str]]
    output: str
    command: list[str]
    error: str = ""
    place: tuple[str, int] = ("", 0)

    @property
    def flags_argument(self) -> str:
        """The argument of `load` that this command's flags came from."""
        if "-c" not in self.command:
            return "extra_ldflags"
        is_nvcc = any(word.endswith("nvcc") for word in self.command[:2])  # the first may be ccache
        return "extra_cuda_cflags" if is_nvcc else "extra_cflags"

    def lines(self) -> list[str]:
        """Returns the lines of the source that the error belongs to."""
        return self.texts.get(self.place[0], ("", ""))[1].splitlines()


@dataclass(frozen=True)
class Cause:
    """What broke, and what mends it.

    Attributes:
        place: where to look instead of where the error shows; a line of 0 is nowhere.
    """

    rule: str
    hint: str
    rows: tuple[tuple[str, ...], ...] = ()
    place: tuple[str, int] | None = None
    error: type[BuildError] = CompileError


def find_cause(failure: Failure) -> Cause | None:
    """Returns the cause of a failure, when it is one of the usual."""
    for pattern, explain in _CAUSES:
        match = re.search(pattern, failure.output, re.MULTILINE)
        cause = explain(match, failure) if match else None
        if cause:
            return cause
    if not failure.output.strip():
        return Cause("the compiler failed with no output", "run the last command of the log by hand")
    return _generated_code(failure) if failure.error else None


# --- the compiler itself ------------------------------------------------------------------------------


def _out_of_memory(match: re.Match[str], failure: Failure) -> Cause:
    return Cause(
        "the compiler was killed, as a rule because the memory is full",
        "`export OPWRIGHT_JOBS=1` compiles one source at a time; a source that is split needs less",
        (("reason", match[0].strip()),),
    )


def _crashed(match: re.Match[str], failure: Failure) -> Cause:
    lower = f', or `{failure.flags_argument}=["-O1"]`' if "-c" in failure.command else ""
    return Cause(
        "internal compiler error",
        f"another compiler (`export OPWRIGHT_CXX=clang++`){lower}",
        (("reason", match[0].strip()),),
    )


def _host_refused(match: re.Match[str], failure: Failure) -> Cause:
    version = match["version"] or "13"
    given = [after for word, after in pairwise(failure.command) if word == "-ccbin"]
    return Cause(
        "nvcc refuses this C++ compiler",
        f"`apt-get install g++-{version}`, then `export OPWRIGHT_CXX=g++-{version}` or "
        f'`extra_cuda_cflags=["-ccbin=g++-{version}"]`',
        (("got", given[-1] if given else "the system's own"), ("expected", f"g++ {version} or older")),
        place=("", 0),
        error=HostCompilerError,
    )


def _unknown_architecture(match: re.Match[str], failure: Failure) -> Cause:
    return Cause(
        f"nvcc does not know the architecture {match['architecture']}",
        '`export TORCH_CUDA_ARCH_LIST="8.0;9.0"` and no `-gencode` or `-arch` in `extra_cuda_cflags`; newer '
        "GPUs need a newer nvcc: `pip install --upgrade nvidia-cuda-nvcc`",
        (("it knows", f"`{failure.command[0] if failure.command else 'nvcc'} --list-gpu-arch`"),),
        error=ArchitectureError,
    )


def _unknown_flag(match: re.Match[str], failure: Failure) -> Cause:
    flag = match["flag"]
    is_hosts = failure.flags_argument == "extra_cuda_cflags"
    instead = f'write `"-Xcompiler={flag}"` for the C++ compiler behind nvcc, or ' if is_hosts else ""
    return Cause(
        "the compiler does not know a flag",
        f"{instead}take it out of `{failure.flags_argument}`",
        (("got", flag),),
    )


def _standard(match: re.Match[str], failure: Failure) -> Cause | None:
    given = [flag for flag in failure.command if re.fullmatch(r"--?std=\D+\d+", flag)]
    needed = match["needed"] or match["only"]
    if not given or int(given[-1][-2:]) >= int(needed):
        return None
    return Cause(
        f"it includes what needs C++{needed} or later, and is compiled as C++{given[-1][-2:]}",
        f"take `{given[-1]}` out of `{failure.flags_argument}`: C++20 is the default",
        (("got", given[-1]), ("expected", f"-std=c++{needed} or later")),
    )


# --- sources ------------------------------------------------------------------------------------------


def _missing_header(match: re.Match[str], failure: Failure) -> Cause:
    header = next(group for group in match.groups() if group)
    if not failure.error:
        return _missing_file(header)
    place = failure.place[0]
    found = whereabouts.of_header(header, failure.texts.get(place, (place, ""))[0], failure.command)
    return Cause(f"the header `{header}` is not found", found.hint, _looked_in(found))


def _missing_file(file: str) -> Cause:
    return Cause(
        f"the file `{file}` is not found",
        "write its absolute path: the commands of a build run in a directory of the cache",
    )


def _removed_macro(match: re.Match[str], failure: Failure) -> Cause | None:
    name = match["macro"]
    if not re.search(rf"\b{name}\b", failure.error):
        return None
    return Cause(f"PyTorch has removed `{name}`", f"write `{_REMOVED[name]}`")


def _looked_in(found: whereabouts.Search) -> tuple[tuple[str, ...], ...]:
    return tuple(("looked in" if not i else "", *row) for i, row in enumerate(found.looked_in))


def _namespace_twice(match: re.Match[str], failure: Failure) -> Cause:
    return Cause(
        f"the namespace `{match['namespace']}` has two TORCH_LIBRARY blocks",
        f"one `TORCH_LIBRARY({match['namespace']}, m)` for each namespace, and `TORCH_LIBRARY_FRAGMENT` for "
        "what is added",
    )


def _generated_code(failure: Failure) -> Cause | None:
    """Explains errors in the bindings that `load_inline` writes, which the author never sees."""
    lines, number = failure.lines(), failure.place[1]
    if not (lines and lines[0].startswith(_GENERATED)):
        return None
    authors = {path: text for path, (_, text) in failure.texts.items() if path.startswith("cpp_sources[")}
    name = re.match(r'm\.def\("([\w:]+)", ', lines[number - 1]) if number <= len(lines) else None
    if name is None:
        return _unfinished(failure, authors)
    if _UNDECLARED.search(failure.error):
        return _undeclared_function(name[1], failure, "\n".join(authors.values()))
    place = _first_mention(failure.texts, name[1])
    if "overloaded" in failure.error:
        return Cause(
            f"`functions` names `{name[1]}`, which is overloaded",
            "give each a name of its own, or bind them in a `PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)` "
            f"of your own: `m.def(..., py::overload_cast<double>(&{name[1]}))`",
            place=place,
        )
    return Cause(
        f"`functions` names `{name[1]}`, and pybind11 cannot bind it: {failure.error}",
        "its parameters and its result are tensors, numbers, strings, or containers of them",
        place=place,
    )


def _undeclared_function(name: str, failure: Failure, text: str) -> Cause:
    rule = f"`functions` names `{name}`, and `cpp_sources` has no such function"
    for _, other in failure.texts.values():
        definition = rf"^[ \t]*((?:[\w:<>,&*]+\s+)+[&*]*{name}\s*\([^;{{}}()]*\))\s*\{{"
        found = re.search(definition, other, re.MULTILINE)
        if found:
            return Cause(rule, f"declare it there: `{' '.join(found[1].split())};`", (("got", name),), ("", 0))
    known = sorted(set(re.findall(r"^(?!\s*#|.*=).*?\b([A-Za-z_]\w*)\s*\([^;{}]*\)\s*\{", text, re.MULTILINE)))
    near = difflib.get_close_matches(name, known, n=1)
    rows = (("got", name), ("there are" if known else "there is", ", ".join(known[:8]) or "none"))
    hint = f'`functions=["{near[0]}"]`' if near else f"define or declare `{name}` in `cpp_sources`"
    return Cause(rule, hint, rows, ("", 0))


def _unfinished(failure: Failure, authors: Mapping[str, str]) -> Cause | None:
    opened = re.findall(r"^(cpp_sources\[\d+\]):(\d+):\d+: note: to match this '\{'", failure.output, re.MULTILINE)
    ends = [(path, len(text.rstrip().splitlines())) for path, text in authors.items() if text.strip()]
    if not ends:
        return None
    file, line = opened[-1] if opened else ends[-1]
    return Cause(
        "its source ends too early: a brace, a parenthesis or a semicolon is missing",
        "close what is open at the end of `cpp_sources`",
        place=(file, int(line)),
    )


# --- linking ------------------------------------------------------------------------------------------


def _no_main(match: re.Match[str], failure: Failure) -> Cause:
    return Cause("a program needs a function `main`", "`int main() { ... }`, or `is_standalone=False`")


def _twice(match: re.Match[str], failure: Failure) -> Cause:
    symbol = match["symbol"]
    if symbol.startswith("PyInit_"):
        return Cause(
            "two of its sources have a PYBIND11_MODULE",
            "one source has it; the others define functions that it declares and binds",
            tuple(("source", place) for place, text in failure.texts.values() if "PYBIND11_MODULE" in text),
        )
    base = _base_name(symbol)
    body = rf"\b{base}\s*(?:\([^;{{}}]*\)[^;{{}}]*\{{|\[|=|;)" if "(" in symbol else rf"\b{base}\b"
    found = [
        (path, text.count("\n", 0, at.start()) + 1)
        for path, (_, text) in failure.texts.items()
        if (at := re.search(body, text))
    ]
    rows = [("defined in", f"{failure.texts[path][0]}:{line}") for path, line in found]
    if len(found) > 1:
        hint = "define it in one source and declare it in the others; `static` or `inline` gives each its own"
    else:
        hint = f"mark `{base}` as `inline` if a header defines it, or define it in one source alone"
    return Cause(f"`{symbol}` is defined twice", hint, tuple(rows), found[0] if found else None)


def _undefined(match: re.Match[str], failure: Failure) -> Cause:
    symbol = match["symbol"]
    place = _first_mention(failure.texts, _base_name(symbol))
    return Cause(f"`{symbol}` is used and never defined", whereabouts.of_symbol(symbol), place=place)


def _missing_library(match: re.Match[str], failure: Failure) -> Cause:
    found = whereabouts.of_library(match["library"], failure.command)
    return Cause(f"the library `{match['library']}` is not found", found.hint, _looked_in(found))


def _not_shareable(match: re.Match[str], failure: Failure) -> Cause:
    return Cause(
        "it links an object that was not compiled for a shared library",
        "compile that library with `-fPIC`, or link its shared form",
        (("object", match["object"]),),
    )


def _base_name(symbol: str) -> str:
    """Returns the name without namespaces, parameters and template arguments."""
    names = re.findall(r"(~?\w+)(?:<.*>)?(?=\(|$|\[)", symbol)
    return re.escape(names[0] if names else symbol)


def _first_mention(texts: Mapping[str, tuple[str, str]], name: str) -> tuple[str, int] | None:
    for path, (_, text) in texts.items():
        found = re.search(rf"\b{name}\b", text)
        if found and not path.endswith(".c"):
            return path, text.count("\n", 0, found.start()) + 1
    return None


_CAUSES: list[tuple[str, Callable[[re.Match[str], Failure], Cause | None]]] = [
    (
        r"^(?=\S).*(Killed signal terminated|unable to execute command: Killed|signal 9\b|out of memory|"
        r"virtual memory exhausted|instance of 'std::bad_alloc'|Cannot allocate memory).*$",
        _out_of_memory,
    ),
    (
        r"^(?=\S).*(internal compiler error|signal terminated program|unable to execute command: Seg|"
        r"terminated with signal|died due to signal|killed by signal|PLEASE submit a bug report).*$",
        _crashed,
    ),
    (
        r"unsupported (?:GNU|clang) version!(?:.*gcc versions later than (?P<version>\d+) are not)?",
        _host_refused,
    ),
    (r"Unsupported gpu architecture '(?P<architecture>\w+)'", _unknown_architecture),
    (
        r"(?:unrecognized command-line option|unknown argument:?|Unknown option) '(?P<flag>[^']+)",
        _unknown_flag,
    ),
    (
        r"error: (?:'(\S+)' file not found|(\S[^:\n]*): No such file or directory)"
        r"|cannot open source file \"(.+)\"",
        _missing_header,
    ),
    (
        r"#error.*C\+\+(?P<needed>\d\d) or later|only available from C\+\+(?P<only>\d\d) onwards",
        _standard,
    ),
    (
        rf"""error\b.*['"](?P<macro>{"|".join(_REMOVED)})['"]"""
        "(?: was not declared| must be available| is undefined|; did|$)",
        _removed_macro,
    ),
    (r"error: redefinition of .*TORCH_LIBRARY_(?:static_)?init_(?P<namespace>\w+)", _namespace_twice),
    (r"multiple definition of [`'](?P<symbol>.+?)';", _twice),
    (r"undefined reference to [`']main'", _no_main),
    (r"undefined reference to [`'](?P<symbol>.+)'", _undefined),
    (r"cannot find (?P<file>[^-\s][^:\n]*)", lambda match, _: _missing_file(match["file"])),
    (r"cannot find -l(?P<library>[^\s:]+)", _missing_library),
    (r"ld: (?P<object>.+?): relocation .* can ?not be used when making a shared object", _not_shareable),
]
