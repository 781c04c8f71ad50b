"""Lets operators' libraries compile Triton kernels in this process, since it is Python already."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from typing import Any

from opwright import settings
from opwright.errors import LoadError
from opwright.triton.packs.workers import WorkerPool, is_installed

_COMPILER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)
_replies = threading.local()
_compiling: set[int] = set()  # the threads that compile at the moment
_workers: WorkerPool | None = None  # in a child of fork that cannot compile in its own process


@_COMPILER
def _compile(request: bytes) -> int | None:
    """Returns the address of the reply, or None after Ctrl-C: an exception cannot leave a callback.

    The runtime then raises the signal again, so that the caller of the launch gets the KeyboardInterrupt.
    """
    try:
        try:
            reply = _answer(json.loads(request))
        except (Exception, SystemExit) as error:
            reply = {"error": {"kind": "internal", "message": f"the compile failed: {error!r}"}}
        _replies.buffer = ctypes.create_string_buffer(json.dumps(reply).encode())  # until this thread's next request
        return ctypes.addressof(_replies.buffer)
    except KeyboardInterrupt:
        return None


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    if _workers is not None:
        del request["id"]  # the pool numbers the requests of its workers
        return _workers.ask(sys.executable, request)
    _compiling.add(threading.get_ident())
    try:
        from opwright.triton import worker

        return worker.handle(request)
    finally:
        _compiling.discard(threading.get_ident())


def _prepare_child() -> None:
    """Lets workers compile in a child of fork if another thread was compiling.

    That thread may have held locks of Python's imports, of Triton or of LLVM, which nobody releases in the child.
    """
    global _workers
    if _workers is not None or _compiling - {threading.get_ident()}:
        _workers = WorkerPool()
    _compiling.clear()


os.register_at_fork(after_in_child=_prepare_child)


def attach(library: ctypes.CDLL, subject: str) -> None:
    """Gives a library that launches Triton kernels the compiler of this process, if Triton is installed in it.

    A worker of another Python that OPWRIGHT_TRITON names is left to do it.

    Raises:
        LoadError: OPWRIGHT_TRITON or the pack next to the kernel's source is wrong.
    """
    setup = library.opwright_triton_setup
    setup.argtypes, setup.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_char_p
    compiler = ctypes.cast(_compile, ctypes.c_void_p) if is_installed() and not _names("python") else None
    wrong = setup(compiler, os.fsencode(settings.cache_dir()))
    if wrong:
        rule, _, rest = wrong.decode().partition("\n\n")
        raise LoadError(subject, rule, hint=rest.replace("hint: ", "").strip() or "`opwright explain OPW206`")


def can_obtain_kernels() -> bool:
    """Returns whether a kernel can come from anywhere: Triton here or in another Python, or a pack."""
    return is_installed() or _names("python") or _names("pack")


def _names(setting: str) -> bool:
    items = os.environ.get("OPWRIGHT_TRITON", "").split(",")
    return any(item.startswith(f"{setting}=") for item in items)
