"""compile_commands.json: how each source is compiled, for clangd and what else reads it.

It is kept in `<project>/build`, where clangd looks by itself for every source below the project. The
commands are clang's: what nvcc and gcc have of their own is translated or left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from opwright import settings
from opwright.backends.toolchain import NATIVE
from opwright.errors import NoNvccError

_NAME = "compile_commands.json"
_LOCK_SECONDS = 1.0  # a build does not wait longer for a file that only editors read
_LAUNCHERS = ("ccache", "sccache", "distcc", "icecc")
# Folders of headers that are there for the speed of a build: editors are to see the whole ones.
_LIGHT = NATIVE / "extension"

# --- one command --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """How one file is compiled, in clang's words.

    Attributes:
        directory: the file's own folder: all paths of the command are absolute.
    """

    directory: str
    file: str
    arguments: tuple[str, ...]

    def entry(self) -> dict[str, object]:
        """Returns the command as compile_commands.json has it."""
        return {**asdict(self), "arguments": list(self.arguments)}


def from_compiler(arguments: Sequence[str], directory: Path, file: Path) -> Command:
    """Returns the command of an editor for a file that a compiler compiles.

    Args:
        arguments: of gcc, clang or nvcc, its own name first; ccache and the like may come before it.
        directory: where it runs, which need not be there later.
        file: the source.
    """
    words = list(arguments)
    while os.path.basename(words[0]) in _LAUNCHERS:
        words.pop(0)
    name, file = os.path.basename(words[0]), Path(os.path.abspath(directory / file))
    driver = [words[0]]
    if re.match(r"nvcc\b", name):
        driver = ["clang++", "-x", "cuda", *_cuda_flags(words)]
        words = list(_host_words(words))
    kept = _kept(words[1:], directory, is_clang="clang" in name)
    # gcc has warnings that clang does not know.
    arguments = (*driver, *kept, "-Wno-unknown-warning-option", "-c", str(file))
    return Command(str(file.parent), str(file), arguments)


_PATHS = re.compile(r"(-isystem|-iquote|-idirafter|-include(?!-pch)|-imacros|-I)(.*)", re.DOTALL)
_MACROS = re.compile(r"(-D|-U|-x)(.*)", re.DOTALL)
# What the meaning of a source depends on. gcc has hundreds of flags beside these, and clang stops at one
# that it does not know.
_MEANING = re.compile(
    r"-std=\S+|-ansi|-pthread|-nostdinc(\+\+)?|-O\w*|-w|-pedantic"
    r"|-W(?!l,|a,|p,|error\b|invalid-pch)\S+"
    r"|-m(arch|cpu|tune|abi|fpu|float-abi)=\S+|-m(32|64)"
    r"|-m(no-)?(sse|avx|fma|f16c|bmi|lzcnt|popcnt|aes|sha|pclmul|vpclmul|gfni|amx-)[\w.]*"
    r"|-f(no-)?(exceptions|rtti|openmp|openmp-simd|fast-math|finite-math-only|math-errno|trapping-math"
    r"|signed-char|unsigned-char|short-enums|char8_t|ms-extensions|sized-deallocation|freestanding|builtin"
    r"|PIC|pic|PIE|pie)"
    r"|-f(sanitize|visibility|template-depth|constexpr-depth|openmp)=\S+"
    r"|-fvisibility-inlines-hidden"
    r"|-stdlib=\S+|--sysroot=\S+|--target=\S+|--gcc-(toolchain|install-dir)=\S+"
)


def _kept(words: Iterable[str], directory: Path, *, is_clang: bool) -> Iterator[str]:
    """Yields the flags that an editor needs, paths made absolute."""
    words = iter(words)
    for word in words:
        if found := _PATHS.fullmatch(word):
            given = found[2] or next(words, "")
            path = os.path.normpath(directory / given)
            if _is_for_builds(path):
                continue
            is_found_later = found[1] in ("-include", "-imacros") and not os.path.exists(path)
            yield from (found[1], given if is_found_later else path)  # later: among the include paths
        elif found := _MACROS.fullmatch(word):
            value = found[2] or next(words, "")
            yield from ("-x", value) if found[1] == "-x" else (f"{found[1]}{value}",)
        elif re.fullmatch(r"-X\w+|-o|-M[FTQ]|-include-pch", word):
            next(words, "")
        elif _MEANING.fullmatch(word) or (is_clang and word.startswith("-f") and "pch" not in word):
            yield word


def _is_for_builds(path: str) -> bool:
    """Whether a header, or a folder of headers, is precompiled or lighter: clang cannot use gcc's."""
    full = Path(path)
    own = (_LIGHT, settings.store_dir())
    return any(full.is_relative_to(folder) for folder in own) or os.path.exists(f"{path}.gch")


# --- CUDA ---------------------------------------------------------------------------------------------

_LONG = {
    "--include-path": "-I",
    "--system-include": "-isystem",
    "--pre-include": "-include",
    "--define-macro": "-D",
    "--undefine-macro": "-U",
    "--std": "-std",
    "--compiler-options": "-Xcompiler",
}
# Flags of nvcc that take the next word, when that may begin with a dash.
_SKIPPED = re.compile(r"-X(?!compiler)\w+|--[\w-]+-options|-ccbin|-x|--x|-o|-M[FTQ]|--output-file")


def _host_words(words: Sequence[str]) -> Iterator[str]:
    """Yields the words of an nvcc command that clang may know, as gcc would have them."""
    rest = iter(words)
    yield next(rest)
    for word in rest:
        name, equals, value = word.partition("=")
        name = _LONG.get(name, name)
        if name == "-Xcompiler":
            yield from (value if equals else next(rest, "")).split(",")
        elif name in ("-I", "-isystem", "-include", "-D", "-U", "-std"):
            value = value if equals else next(rest, "")
            yield from (f"-std={value}",) if name == "-std" else (name, value)
        elif _SKIPPED.fullmatch(name):
            if not equals:
                next(rest, "")
        elif word.startswith(("-I", "-D", "-U", "-isystem")):
            yield word


def _cuda_flags(words: Sequence[str]) -> list[str]:
    """Returns where clang finds the toolkit of an nvcc, and for which GPU it reads the source.

    It reads the device's half, which kernels are in; it checks the host's functions there too.
    """
    listed = re.findall(r"(?:sm|compute)_(\d+[af]?)", " ".join(words))
    newest = max(listed, key=lambda name: int(name.rstrip("af")), default=None)
    flags = ["--cuda-device-only", *([f"--cuda-gpu-arch=sm_{newest}"] if newest else [])]
    root = _toolkit(words[0])
    include = root / "include"
    if (include / "cuda.h").exists():
        flags.append(f"--cuda-path={root}")
    else:  # conda's: clang does not know the layout; any version from 9.2 on is the same to it
        include = next(iter(root.glob("targets/*/include")), include)
        flags += ["-nocudainc", "-nocudalib", "-isystem", str(include)]
        flags += ["-include", "__clang_cuda_runtime_wrapper.h", "-Xclang", "-target-sdk-version=12.9"]
    if (include / "cccl").exists():  # nvcc adds it by itself
        flags += ["-isystem", str(include / "cccl")]
    return [*flags, "-idirafter", str(NATIVE / "clangd")]


def _toolkit(nvcc: str) -> Path:
    root = Path(nvcc).resolve().parent.parent
    if (root / "nvvm").exists():
        return root
    from opwright.backends import cuda  # a script that calls nvcc: nvcc itself is asked, once
    from opwright.build.store import Store

    try:
        found = cuda.find_nvcc(Store().identities)
    except NoNvccError:  # another nvcc than this one, and incomplete
        found = None
    return found.root if found else root


# --- the file -----------------------------------------------------------------------------------------


def project_of(path: Path) -> Path | None:
    """Returns the project that a file belongs to: the nearest folder with pyproject.toml, setup.py or .git.

    What is installed or in the store belongs to none, nor does what lies loose in a home directory.
    """
    path = Path(os.path.abspath(path))
    if {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(settings.store_dir()):
        return None
    home = os.path.expanduser("~")
    for folder in map(str, path.parents):  # strings: this is part of every build, and Path takes 5x longer
        if folder in (home, os.sep):
            return None
        if any(os.path.exists(f"{folder}/{name}") for name in ("pyproject.toml", "setup.py", ".git")):
            return Path(folder)
    return None


def record(commands: Iterable[Command]) -> list[Path]:
    """Keeps commands that compilers were just run with; returns the files that have them.

    Sources outside of projects are passed over. Nothing is raised: a build does not fail for its editor.
    """
    if not settings.compile_commands():
        return []
    by_project: dict[Path, list[Command]] = {}
    for command in commands:
        project = project_of(Path(command.file))
        if project:
            by_project.setdefault(project, []).append(command)
    written = [write(found, project) for project, found in by_project.items()]
    return [path for path in written if path]


def write(commands: Iterable[Command], project: Path) -> Path | None:
    """Merges commands into the compile_commands.json of a project, by file.

    Entries of other tools stay. Those of Opwright whose file is gone are dropped. A file in which nothing
    changes is not touched, as clangd would read everything again.

    Returns:
        The file; None when it cannot be written, or holds anything but a list of commands.
    """
    path = _place(project)
    try:
        make_folder(path.parent)
        with _lock(path.parent):
            known = _read(path)
            merged = _merge(known, commands)
            if merged != known or not path.exists():
                _replace(path, json.dumps(merged, indent=1) + "\n")
    except (OSError, ValueError):
        return None
    return path


def keep_text(path: Path, text: str) -> bool:
    """Writes a generated header that commands include, unless it is there already; returns whether it is there."""
    try:
        if not path.exists() or path.read_text() != text:
            make_folder(path.parent)
            _replace(path, text)
    except (OSError, ValueError):
        return False
    return True


def make_folder(path: Path) -> None:
    """Makes a folder, out of git's sight when it is new."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(exist_ok=True)
            if folder.name == "build":
                (folder / ".gitignore").write_text("*\n")


def _place(project: Path) -> Path:
    """Returns where clangd finds the file: one in the project's root comes before that in `build`."""
    root = project / _NAME
    return Path(os.path.realpath(root if os.path.lexists(root) else project / "build" / _NAME))


def _read(path: Path) -> list[dict]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    found = json.loads(text) if text.strip() else []
    if not isinstance(found, list) or not all(isinstance(e, dict) and "file" in e for e in found):
        raise ValueError(f"{path} is not a list of commands")
    return found


def _merge(known: Sequence[dict], commands: Iterable[Command]) -> list[dict]:
    new = {command.file: command.entry() for command in commands}
    merged = []
    for entry in known:
        file = os.path.normpath(os.path.join(entry.get("directory", ""), entry["file"]))
        if file in new:
            entry = new.pop(file)
        elif _is_own(entry) and not os.path.exists(file):
            continue
        merged.append(entry)
    return [*merged, *new.values()]


def _is_own(entry: dict) -> bool:
    return "arguments" in entry and entry.get("directory") == os.path.dirname(entry["file"])


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder, which leaves nothing behind; goes on without where there are no locks.

    Raises:
        TimeoutError: another process holds it, and does not come to an end.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(str(folder)) from None
                time.sleep(0.002)
            except OSError:
                break  # a file system without locks
        yield
    finally:
        os.close(handle)
