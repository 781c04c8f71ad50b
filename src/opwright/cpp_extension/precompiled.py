"""Precompiled headers: PyTorch's take ten to twenty seconds of every compile, and need them once.

One is kept for each set of headers, torch, compiler and flags, at most a few at a time: each takes 200 to 600 MB.
Only GCC's are made; other compilers include the text. A header that GCC finds unfit (a macro that
means something else) is left aside by GCC itself, and its text is included.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opwright import settings
from opwright.build.announce import announce
from opwright.build.store import Store, digest_of
from opwright.cpp_extension.headers import EXTENSION
from opwright.processes import Process, run_program

_KEPT = 6  # the most recently used
_MIN_FREE_BYTES = 4 << 30  # no disk is filled up for the sake of speed
# Macros that headers of PyTorch, pybind11 or the C++ library read; others do not change what is precompiled.
_READ = re.compile(r"-[DU](_|NDEBUG|PYBIND11|TORCH_|C10_|AT_|USE_|CAFFE2|Py_|STRIP_ERROR|HAVE_)")
_NO_MATTER = re.compile(r"-[DUIWL]|-isystem|-iquote|-idirafter|-l|-MMD|-pipe$")
_UNKNOWN = re.compile(r"@|-include|-imacros|-x$|-fplugin|-fmodules|-B|-specs|-nostd|-fsanitize-blacklist")


@dataclass(frozen=True)
class Header:
    """A precompiled header to be.

    Attributes:
        kind: a file of native/extension/prefix, without its suffix.
        compiler, flags: how it is compiled; a source that uses it has the same.
        identity: what else it depends on: compiler, torch.
    """

    kind: str
    compiler: str
    flags: tuple[str, ...]
    identity: tuple[str, ...]

    @property
    def text(self) -> Path:
        """The header itself."""
        return EXTENSION / "prefix" / f"{self.kind}.h"

    @property
    def key(self) -> str:
        return digest_of("\0".join([self.kind, *self.flags, *self.identity]).encode())[:40]


def core_flags(flags: Sequence[str]) -> tuple[str, ...] | None:
    """Returns those of a compiler's flags that a precompiled header depends on; None: there can be none."""
    if any(_UNKNOWN.match(flag) for flag in flags) or any(
        os.environ.get(name) for name in ("CPATH", "CPLUS_INCLUDE_PATH")
    ):
        return None
    found, skip = [], False
    for flag in flags:
        if skip:
            skip = False
        elif flag in ("-I", "-D", "-U", "-isystem", "-iquote", "-idirafter", "-L", "-l"):
            if flag in ("-D", "-U"):
                return None  # apart from its macro: rare, and not worth the code
            skip = True
        elif _READ.match(flag) or not _NO_MATTER.match(flag):
            found.append(flag)
    return tuple(found)


def is_gcc(identity: str) -> bool:
    return bool(re.search(r"g\+\+|gcc|GCC|Debian|Ubuntu|Red Hat", identity)) and "clang" not in identity


def find(header: Header, store: Store) -> Path | None:
    """Returns the header to include whose precompiled form lies beside it, or None."""
    path = store.root / "headers" / header.key / "prefix.h"
    try:
        os.utime(path)  # the least recently used goes first
    except OSError:
        return None
    return path


def make(header: Header, includes: Sequence[str], store: Store, *, wait: bool = True) -> Path | None:
    """Precompiles a header unless it is there; returns it, or None when it cannot be made or someone else is at it."""
    with contextlib.ExitStack() as stack:
        try:
            if not stack.enter_context(store.lock(header.key, wait=wait)):
                return None
            found = find(header, store)
            if found:
                return found
            work = stack.enter_context(store.work())
            if shutil.disk_usage(work).free < _MIN_FREE_BYTES:
                return None
            shutil.copy(header.text, work / "prefix.h")
            command = [
                header.compiler,
                *includes,
                *header.flags,
                "-x",
                "c++-header",
                "prefix.h",
                "-o",
                "prefix.h.gch",
            ]
            if run_program(command, cwd=work).returncode != 0:
                return None
            store.put(work, store.root / "headers" / header.key)
            store.drop_oldest_headers(_KEPT)
        except Exception:  # whatever is wrong with the store: the text can be included all the same
            return None
    return find(header, store)


def make_in_background(headers: Sequence[Header], includes: Sequence[str], store: Store) -> None:
    """Precompiles headers in a process of its own, at the lowest priority, that outlives this one."""
    missing = [header for header in headers if find(header, store) is None]
    if not missing or not settings.precompiles_headers():
        return
    orders = [[header.kind, header.compiler, header.flags, header.identity] for header in missing]
    arguments = json.dumps({"store": str(store.root), "includes": list(includes), "headers": orders})
    with contextlib.suppress(OSError):
        process = Process(
            [sys.executable, "-S", "-c", _PROGRAM, json.dumps(sys.path), arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        announce(
            f"precompiling PyTorch's headers in the background, once, in process {process.pid}; "
            "`OPWRIGHT_WITHOUT=pch` turns this off"
        )


_PROGRAM = """
import json, os, sys
sys.path[:] = json.loads(sys.argv[1])
os.nice(19)
if hasattr(os, "SCHED_IDLE"):
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # a build in the foreground is not to feel it
from opwright.cpp_extension.precompiled import run
run(sys.argv[2])
"""


def run(arguments: str) -> None:
    """What the process of `make_in_background` does."""
    orders = json.loads(arguments)
    store = Store(Path(orders["store"]))
    for kind, compiler, flags, identity in orders["headers"]:
        make(Header(kind, compiler, tuple(flags), tuple(identity)), orders["includes"], store, wait=False)
