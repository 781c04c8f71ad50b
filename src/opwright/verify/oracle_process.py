"""Asks the oracle what results must be: in this process, or in one where the candidate does not run.

The second process has a reference and a comparison of its own. A candidate that changes PyTorch, its reference or the
memory of its process changes neither what its results are compared with nor how.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import pickle
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from opwright.isolation import Fork, end_with_parent
from opwright.verify.compare import Difference, collect_undecided, compare, note_undecided
from opwright.verify.oracle import Discrete, Expected, expect, few_threads, with_room
from opwright.verify.tensors import storage_bytes

# Takes a target, values and further arguments; returns the outputs. It is a function of a module, so that the other
# process finds it by its name.
Computation = Callable[..., Sequence[Any]]
# Returns the targets by key for a device.
MakeSubjects = Callable[[torch.device], dict[str, Any]]


@dataclass(frozen=True)
class Question:
    """A computation for the oracle, with its inputs. The whole allowance is computed only if a result seems wrong.

    Attributes:
        values: its inputs, in the dtype under test; they stay as they are until results are compared.
        arguments: what it takes beside the target and the values.
        is_loose: whether NaN is as right as an infinity.
        room: share of the largest result that every one may err by; None: no more than the allowance.
    """

    computation: Computation
    values: Sequence[Any]
    arguments: tuple[Any, ...] = ()
    is_loose: bool = False
    room: float | None = None


@dataclass(frozen=True)
class Output:
    """Shape, dtype and device of an expected output; the oracle keeps its values under `number`."""

    number: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Oracle:
    """The oracle in this process."""

    def __init__(self) -> None:
        self._known: dict[int, Expected | Discrete] = {}
        self._numbers = itertools.count()

    def expect(self, target: Any, question: Question) -> list[Output | None]:
        """Returns what each output must be; None for one that is absent."""
        outputs = [self.keep(each) for each in _expect(target, question)]
        for output in outputs:
            if output is not None:
                weakref.finalize(output, self.forget, [output.number]).atexit = False
        return outputs

    def compare(self, got: torch.Tensor, wanted: Output) -> Difference:
        """Returns how far an output, on any device, is from what it must be."""
        with torch.no_grad():
            return compare(got.detach(), self._known[wanted.number])

    def keep(self, expected: Expected | Discrete | None) -> Output | None:
        """Keeps an expected output until `forget`; returns its description, or None for one that is absent."""
        if expected is None:
            return None
        number = next(self._numbers)
        self._known[number] = expected
        return Output(number, expected.exact.shape, expected.dtype, expected.exact.device)

    def forget(self, numbers: Sequence[int]) -> None:
        """Frees what is kept under some numbers."""
        for number in numbers:
            self._known.pop(number, None)


def _expect(target: Any, question: Question) -> list[Expected | Discrete | None]:
    def compute(values: Sequence[Any]) -> Sequence[Any]:
        return question.computation(target, values, *question.arguments)

    with torch.no_grad(), few_threads(question.values):
        found = expect(compute, question.values, target.precision)
    for each in found:
        if isinstance(each, Expected):
            each.is_loose = question.is_loose
            if question.room is not None:
                with_room(each, question.room)
    return found


class OracleProcess:
    """The oracle in a process that is forked here, and ends with this one.

    Args:
        make: returns the targets by key for a device; called in that process.
        shared: objects that are not sent, since the fork has them.

    Attributes:
        pid: the number of the process.
    """

    def __init__(self, make: MakeSubjects, shared: Sequence[Any] = ()) -> None:
        self._shared = {id(each): each for each in shared}
        self._connection, theirs = multiprocessing.Pipe()
        self._forgotten: list[int] = []
        self._lock = threading.Lock()

        def main() -> None:
            self._connection.close()
            _serve(theirs, make, self._shared)
            os._exit(0)

        self._process = Fork(main)
        self.pid = self._process.pid
        theirs.close()

    def expect(self, target: Any, question: Question) -> list[Output | None]:
        """Returns what each output must be; None for one that is absent."""
        outputs, form = self._ask("expect", target.key, target.device, target.mutated(), question)
        if target.callables is not None:
            target.callables.form = form
        for output in outputs:
            if output is not None:
                weakref.finalize(output, self._forgotten.append, output.number).atexit = False
        return outputs

    def compare(self, got: torch.Tensor, wanted: Output) -> Difference:
        """Returns how far an output, on any device, is from what it must be."""
        found, undecided = self._ask("compare", got.detach().to(wanted.device), wanted)
        for text in undecided:
            note_undecided(text)
        return found

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()

    def _ask(self, *request: Any) -> Any:
        with self._lock:  # a check compares in several threads
            forgotten, self._forgotten[:] = list(self._forgotten), []
            try:
                self._connection.send_bytes(_pack((forgotten, *request), self._shared))
                answer = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                raise RuntimeError("the process of the oracle has ended; it may have run out of memory") from None
        if isinstance(answer, _Raised):
            answer.error.frames = answer.frames
            raise answer.error
        return answer


def frames_of(error: BaseException) -> set[tuple[str, int]]:
    """Returns the file and first line of each function that an exception came through, in either process."""
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return {(code.co_filename, code.co_firstlineno) for code in codes} | getattr(error, "frames", set())


class _Pickler(pickle.Pickler):
    """Pickles a tensor as the bytes of its storage, with its strides: much faster than PyTorch's own way."""

    def __init__(self, buffer: io.BytesIO, shared: dict[int, Any]) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._shared = shared

    def persistent_id(self, value: Any) -> int | None:
        return id(value) if id(value) in self._shared else None

    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return NotImplemented
        value = value.detach()
        data = pickle.PickleBuffer(storage_bytes(value).cpu().numpy())
        form = value.dtype, tuple(value.shape), value.stride(), value.storage_offset(), str(value.device)
        return _unpack_tensor, (data, *form)


def _unpack_tensor(
    data: bytearray, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, device: str
) -> torch.Tensor:
    # Memory of its own: aligned, and writable.
    memory = torch.frombuffer(data, dtype=torch.uint8).clone() if len(data) else torch.empty(0, dtype=torch.uint8)
    memory = memory.to(device)
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), offset, shape, strides)


def _pack(value: Any, shared: dict[int, Any]) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, shared).dump(value)
    return buffer.getvalue()


# --- in the process of the oracle --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Raised:
    error: BaseException
    frames: set[tuple[str, int]]


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, shared: dict[int, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._shared = shared

    def persistent_load(self, number: int) -> Any:
        return self._shared[number]


def _serve(connection: Connection, make: MakeSubjects, shared: dict[int, Any]) -> None:
    os.setsid()  # what ends the session of the candidate's process does not look for this one
    end_with_parent()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    oracle, targets = Oracle(), {}

    def answer(forgotten: list[int], kind: str, *request: Any) -> Any:
        oracle.forget(forgotten)
        if kind == "compare":
            with collect_undecided() as undecided:
                return oracle.compare(*request), undecided
        key, device, mutated, question = request
        if device not in targets:
            targets[device] = make(device)
        target = targets[device][key]
        target._mutated = mutated  # of a callable, as its cases tell: they need not be made here
        found = [oracle.keep(each) for each in _expect(target, question)]
        return found, target.callables.form if target.callables is not None else None

    while True:
        try:
            data = connection.recv_bytes()
        except EOFError:
            return
        try:
            result = answer(*_Unpickler(data, shared).load())
        except BaseException as error:  # whatever a reference may raise
            result = _Raised(_portable(error), frames_of(error))
        connection.send_bytes(_pack(result, {}))


def _portable(error: BaseException) -> BaseException:
    """Returns an exception that another process can read, of the same class if that can be."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
