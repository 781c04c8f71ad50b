"""The compilers of this machine: where they are, what they are, how they are called."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import platform
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from opwright import settings
from opwright.errors import NoCompilerError, StoreOwnerError
from opwright.processes import run_program
from opwright.store_root import make_root

NATIVE = Path(__file__).resolve().parent.parent / "native"
INCLUDE = NATIVE / "include"

# The flag policy for kernels. -fno-math-errno and -fno-trapping-math are what lets loops over exp and
# over conditions vectorise; neither changes a result: NaN, infinities, signed zeros and denormals
# stay as IEEE says (errno and the floating-point exception flags are what they give up).
KERNEL_FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-ffile-prefix-map=" + str(NATIVE) + "=opwright",
)
# -O1: -O2 takes 0.09 s longer and is not faster. -fexceptions: errors are raised through the glue.
GLUE_FLAGS = (
    "-x", "c", "-std=gnu11", "-O1", "-fPIC", "-fvisibility=hidden", "-fexceptions",
    "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers",
)  # fmt: skip
LINK_FLAGS = ("-shared", "-Wl,--no-as-needed", "-Wl,-z,defs", "-Wl,--build-id=none")


# Where compilers look for headers too.
INCLUDE_VARIABLES = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")


# Headers of the C library, the kernel and Python, in folders that other packages install headers into as well.
_C_LIBRARY = re.compile(
    r"/usr/include/([^/]+-linux-[^/]+/)?((arpa|asm|asm-generic|bits|gnu|linux|net|netinet|python3\.\d+t?)/.*"
    r"|sys/(?!(acl|capability|psx_syscall|sdt|sdt-config)\.h).*|("
    r"aio|alloca|argp|assert|byteswap|complex|ctype|dirent|dlfcn|elf|endian|err|errno|error|execinfo|fcntl|features"
    r"|features-time64|fenv|float|fnmatch|ftw|getopt|glob|grp|iconv|inttypes|langinfo|libgen|libintl|limits|link"
    r"|locale|malloc|math|memory|mntent|mqueue|netdb|obstack|poll|printf|pthread|pwd|regex|resolv|sched|search"
    r"|semaphore|setjmp|signal|spawn|stdc-predef|stdint|stdio|stdio_ext|stdlib|string|strings|syscall|syslog|termios"
    r"|tgmath|threads|time|uchar|ucontext|unistd|utime|wait|wchar|wctype|wordexp|xlocale)\.h)"
)


def is_of_c_library(header: str) -> bool:
    """Returns whether a header belongs to the C library, the kernel or Python.

    Updates of those are assumed to fit older builds.
    """
    return bool(_C_LIBRARY.fullmatch(header))


@functools.cache
def header_folders(compiler: str, identities: Path) -> tuple[Path, ...]:
    """Returns where a compiler alone has headers, those of C++ among them.

    Args:
        identities: a directory in which answers of compilers are remembered.
    """
    environment = {name: value for name, value in os.environ.items() if name not in INCLUDE_VARIABLES}
    command = [compiler, "-x", "c++", "-E", "-v", os.devnull]

    def ask() -> str:
        text = run_program(command, {**environment, "LC_ALL": "C"}).stderr
        if "End of search list" not in text:  # it may do next time, so this is not remembered
            raise OSError
        return text

    try:
        text = remember(signature_of("headers", compiler), identities, ask)
    except OSError:
        return ()
    listed = text.partition("#include <...> search starts here:")[2].partition("End of search list")[0]
    folders = [Path(os.path.normpath(line.strip())) for line in listed.splitlines() if line.startswith(" ")]
    shared = ("/usr/include", "/usr/local/include")
    return tuple(f for f in folders if str(f) not in shared and str(f.parent) != "/usr/include")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: how to call it, and an identity that changes when it is updated."""

    path: str
    identity: str


def find_compiler(identities: Path) -> Compiler | None:
    """Returns the C++ compiler to use, or None when the machine has none.

    Args:
        identities: a directory in which `--version` texts are remembered, so that only a compiler
            that was never seen before is run.

    Raises:
        NoCompilerError: OPWRIGHT_CXX names something that is not there.
    """
    named = settings.cxx()
    program, *flags = strip_launcher(os.environ.get("CXX", "").split()) or [""]
    is_program = all(flag.startswith("-") for flag in flags)  # unlike the first word of `zig c++` or `env X=1 g++`
    candidates = [named] if named else [*([program] if is_program else []), "c++", "g++", "clang++"]
    for candidate in candidates:
        found = shutil.which(candidate)
        if found:
            found = os.path.abspath(found)  # compilers run in another folder
            return Compiler(found, identify(found, identities))
    return None


def absent_cxx() -> str | None:
    """Returns the program that CXX names if it is not installed, else None; OPWRIGHT_CXX takes precedence."""
    words = strip_launcher(os.environ.get("CXX", "").split())
    return words[0] if words and not settings.cxx() and not shutil.which(words[0]) else None


_LAUNCHERS = ("ccache", "sccache", "distcc", "icecc")


def strip_launcher(words: Sequence[str]) -> list[str]:
    """Returns the words of a compiler's command without ccache or sccache in front of them."""
    return list(itertools.dropwhile(lambda word: os.path.basename(word) in _LAUNCHERS[:2], words))


def signature_of(question: str, path: str) -> str | None:
    """Returns a key that changes when the program may answer differently; None where that cannot be seen.

    A link to ccache or the like stands for the next program of its name on PATH.
    """
    found = os.path.abspath(path)
    if _is_launcher(found):
        folders = [os.environ.get("CCACHE_PATH", ""), os.environ.get("PATH", "")]
        others = [os.path.join(f, os.path.basename(path)) for f in os.pathsep.join(folders).split(os.pathsep) if f]
        found = next((p for p in others if os.access(p, os.X_OK) and not _is_launcher(p)), "")
        if not found or os.environ.get("CCACHE_COMPILER"):
            return None
    stat = os.stat(found)
    return f"{question}|{path}|{os.path.realpath(found)}|{stat.st_size}|{stat.st_mtime_ns}"


def _is_launcher(path: str) -> bool:
    return os.path.basename(os.path.realpath(path)) in _LAUNCHERS


def remember(subject: str | None, identities: Path, ask: Callable[[], str], name: str = "") -> str:
    """Returns the answer to a question about a compiler, asked only when it was not asked before.

    Args:
        subject: what the answer depends on; None asks anew.
        identities: a directory that exists, or that of a store, which is made.
        name: the name of the file that holds the answer, in place of a digest of `subject`.
    """
    key = name or hashlib.sha256(str(subject).encode()).hexdigest()[:32]
    remembered = identities / key
    if subject is not None:
        try:
            return remembered.read_text()
        except OSError:
            pass
    answer = ask()
    try:
        if not identities.is_dir():
            make_root(identities.parent)
            identities.mkdir(mode=0o700, exist_ok=True)
        temporary = identities / f"{key}.{os.getpid()}.{threading.get_ident()}"
        temporary.write_text(answer)
        temporary.rename(remembered)
    except (OSError, StoreOwnerError):
        pass  # a store that cannot be written: the compiler is asked again next time
    return answer


def identify(path: str, identities: Path) -> str:
    """Returns the identity of the compiler at a path."""

    def ask() -> str:
        try:
            result = run_program([path, "--version"])
        except OSError as error:
            raise NoCompilerError(
                path,
                "this compiler cannot be run",
                rows=[("reason", error.strerror or str(error))],
                hint="`OPWRIGHT_CXX=g++`",
            ) from None
        return result.stdout.splitlines()[0] if result.stdout else str(Path(path).resolve())

    return remember(signature_of("version", path), identities, ask)


@functools.cache
def machine_identity() -> str:
    """Returns what `-march=native` depends on: the CPU's model and instruction sets."""
    lines = [platform.system(), platform.machine()]
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                if not line.strip():
                    break  # the first CPU stands for all
                if line.split(":")[0].strip() in (
                    "vendor_id",
                    "cpu family",
                    "model",
                    "flags",
                    "Features",
                    "CPU part",
                    "CPU implementer",
                ):
                    lines.append(line.strip())
    except OSError:
        lines.append(platform.processor())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@functools.cache
def headers_digest() -> str:
    """Returns the digest of Opwright's own headers and glue sources, without those of Triton launches."""
    return _digest_of_files(os.path.join(INCLUDE, "opwright"), os.path.join(NATIVE, "src"))


@functools.cache
def triton_digest() -> str:
    """Returns the digest of the runtime of Triton launches."""
    return _digest_of_files(os.path.join(INCLUDE, "opwright", "triton"), os.path.join(NATIVE, "src", "triton"))


def _digest_of_files(*folders: str) -> str:
    # os, not pathlib: this is part of every first call, and a third of it with pathlib.
    digest = hashlib.sha256()
    for folder in folders:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.is_file():
                with open(entry.path, "rb") as f:
                    digest.update(entry.name.encode() + b"\0" + f.read() + b"\0")
    return digest.hexdigest()
