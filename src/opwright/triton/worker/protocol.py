"""One JSON request per line in, one JSON reply per line out."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from typing import Any, TextIO

from . import packfile
from .compile import compile_key
from .describe import describe
from .errors import WorkerError, first_paragraph
from .kernel import find_kernel

_WATCH_INTERVAL_S = 1.0
_lock = threading.Lock()
_FIELDS: dict[str, dict[str, type]] = {
    "describe": {"file": str, "function": str},
    "compile": {"file": str, "function": str, "arch": int, "args": list, "options": dict, "out": str},
}


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Fulfils one request and returns its reply; never raises. Threads take turns.

    `{"do": "describe", "file", "function"}` gives the record of a description, which is also put into a pack file if there
    is an `out`; `{"do": "compile", "file", "function", "arch": 90, "args": [CLASS, ...], "options": {"num_warps": 8}, "out": PATH}`
    gives the record of a kernel, which the pack file holds beside the description.
    """
    identity = request.get("id") if isinstance(request, dict) else None
    try:
        _check(request)
        with _lock:
            return {"id": identity, "ok": _fulfil(request)}
    except WorkerError as error:
        return {"id": identity, "error": error.as_reply()}
    except Exception as error:
        _report()
        return {"id": identity, "error": WorkerError("internal", first_paragraph(error)).as_reply()}


def _check(request: Any) -> None:
    if not isinstance(request, dict):
        raise WorkerError("request", f"A request is a JSON object, not a {type(request).__name__}.")
    fields = _FIELDS.get(str(request.get("do")))
    if fields is None:
        raise WorkerError("request", f"`do` is {request.get('do')!r}, expected {' or '.join(map(repr, _FIELDS))}.")
    for name, kind in fields.items():
        if type(request.get(name)) is not kind:
            raise WorkerError("request", f"`{name}` is {request.get(name)!r}, expected a {kind.__name__}.")
    if not isinstance(request.get("out", ""), (str, type(None))):
        raise WorkerError("request", f"`out` is {request['out']!r}, expected a str.")
    if not all(isinstance(text, str) for text in request.get("args", ())):
        raise WorkerError("request", f"`args` is {request['args']!r}, expected a list of classes.")


def _fulfil(request: dict[str, Any]) -> dict[str, Any]:
    kernel = find_kernel(request["file"], request["function"])
    entries = [packfile.Entry(describe(kernel))]
    if request["do"] == "compile":
        entries.append(packfile.Entry(*compile_key(kernel, request["arch"], request["args"], request["options"])))
    out = request.get("out")
    if out is None:
        return entries[0].record
    try:
        written = packfile.write_pack(out, entries)
    except OSError as error:
        raise WorkerError("output", f"`{out}` cannot be written: {error.strerror}.") from error
    return next(entry.record for entry in written if (entry.blob is None) == (request["do"] == "describe"))


def _report() -> None:
    import traceback

    traceback.print_exc(file=sys.stderr)


def main() -> None:
    """Serves requests from descriptor 0 to descriptor 1 until the other end is closed or its process ends.

    Both are moved away first, so that whatever a kernel file prints, or a process that it starts, goes to stderr.
    """
    # The folder of this package was added to import it, and would otherwise be searched for the author's modules.
    sys.path[:] = [folder for folder in sys.path if folder and os.path.abspath(folder) != _package_folder()]
    requests, replies = _private_descriptors()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the host, which closes the pipe if it ends
    threading.Thread(target=_watch, args=(replies.fileno(), os.getppid()), daemon=True).start()
    for line in requests:
        try:
            request = json.loads(line)
        except ValueError as error:
            reply = {"id": None, "error": WorkerError("request", f"A line is not JSON: {error}.").as_reply()}
        else:
            reply = handle(request)
        try:
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
        except BrokenPipeError:
            break
    os._exit(0)


def _package_folder() -> str:
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _private_descriptors() -> tuple[TextIO, TextIO]:
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stderr
    return requests, replies


def _watch(replies: int, parent: int) -> None:
    """Ends the process when nobody reads its replies any more, even in the middle of a compile.

    PR_SET_PDEATHSIG would end it with the *thread* that started it, and a host starts it from whichever thread first
    misses. The pipe's other end closes with the host's process; where a fork of the host still holds it, the worker's
    parent changes.
    """
    poller = select.poll()
    poller.register(replies, 0)  # errors and hang-ups are reported unasked
    while os.getppid() == parent and not poller.poll(_WATCH_INTERVAL_S * 1000):
        pass
    os._exit(0)
