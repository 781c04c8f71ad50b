"""Runs the checks on a target and writes the record."""

from __future__ import annotations

import itertools
import time
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jaxtyping
import torch

from opwright.backends.exports import may_export
from opwright.backends.sources import tell_misnamed, tell_where
from opwright.backends.toolchain import find_compiler
from opwright.build.store import Store
from opwright.contract import domains
from opwright.contract.annotations import Mutates
from opwright.contract.contract import MISSING, Contract
from opwright.contract.declaration import Declaration, read_contract
from opwright.contract.declared import Labelled
from opwright.contract.dtypes import family_names
from opwright.contract.likely import find_likely, remarks_on
from opwright.contract.precision import Precision, check_precision
from opwright.contract.sweep import Case
from opwright.dispatch.operator import operator_of
from opwright.dispatch.reference import caller, outputs_of
from opwright.errors import CheckError
from opwright.isolation import TIMEOUT_S, Limits, Unfit
from opwright.machine import machine_card
from opwright.records import Check, Failure, VerifyRecord
from opwright.verify.callables import name_of
from opwright.verify.checks import CHECKS, unknown_check
from opwright.verify.devices import device_of, devices_for, parse_device
from opwright.verify.inputs.sweep import accepts, describe_refused, refusal_of, sweep_cases
from opwright.verify.request import Request, list_samples, showing_warnings
from opwright.verify.runner import BUILDING, Job, Result, Work, run_apart, run_here
from opwright.verify.tasks import Task
from opwright.verify.tensors import tensors_of

_MAX_PROCESSES = 4
_UNSTEADY_BACKWARD = "backward: outputs written", "backward: determinism"


@showing_warnings()
def verify(
    target: Any,
    reference: Callable[..., Any] | None = None,
    samples: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
    *,
    contract: str | None = None,
    precision: Precision | None = None,
    checks: Iterable[str] | None = None,
    only: str = "",
    quick: bool = False,
    full: bool = False,
    devices: Iterable[str | torch.device] | None = None,
    on_check: Callable[[Check], None] | None = None,
    expand: bool = True,
    isolated: bool = True,
    timeout_s: float = TIMEOUT_S,
    memory_bytes: int | None = None,
) -> VerifyRecord:
    """Checks whether an operator, or any callable, is right.

    An operator is compared with its reference in float64 over dtypes, layouts, shapes and values that
    follow from its contract, forward and backward, and with what PyTorch expects of an operator.

    The checks run in processes of their own where that can be: one that crashes, hangs or exits is a finding.

    Args:
        target: an operator, its `torch.ops` entry, a callable with `reference` and `samples`, or a `Task`.
        reference: the same computation in PyTorch; an operator has its own.
        samples: an iterable, or a function giving one, of argument tuples or of `(args, kwargs)`.
        contract: the parameters and the result of a callable, as
            `"(x: Float[Tensor, '*b n'], *, eps: float = 1e-5) -> Float[Tensor, '*b n']"`, in place of samples: the
            inputs are then those of an operator with this contract.
        precision: how much less precise than its reference a callable may be, as
            `Factor(2, "an FFT", of_largest=True)`; an operator declares it with `@operator`.
        checks: names of the checks to run, as "numerics" or "backward: numerics"; all by default.
        only: run only cases whose description contains this text.
        quick: has no effect, and is kept for programs that pass it: the default is as quick.
        full: the same checks on more inputs, in minutes.
        devices: "cpu", "cuda", "cuda:1", ...; by default the CPU, and the GPU when there is one and the
            operator has a CUDA kernel; for a callable, and for samples on a GPU, where the samples are.
        on_check: called with each check when it has finished.
        expand: whether more inputs are made from the samples of a callable: other values, where the reference
            accepts them, and other layouts.
        isolated: whether the checks run in processes of their own: on Linux, on a GPU if the candidate can be
            imported again; `in_process` of the record says why they did not. False for a debugger.
        timeout_s: how many seconds one call of the candidate may take.
        memory_bytes: how much memory each process of the checks may take. By default the free memory is divided by
            one more than there are such processes side by side: half of it where there is one.

    Returns:
        The record; `.passed` and `.failures` say how it went.

    Raises:
        CheckError: a callable comes without a reference or samples, or there is no such check or device.
        DeclarationError: `contract` or `precision` cannot be read.
        NoCompilerError: OPWRIGHT_CXX names something that is not there.
    """
    started = time.time()
    wanted = set(checks) if checks is not None else None
    for name in sorted(name for name in wanted or () if name.removeprefix("backward: ") not in CHECKS):
        raise unknown_check("verify", name)
    if quick and full:
        raise CheckError("verify", "`quick` and `full` exclude each other", hint="leave one out")
    effort = "full" if full else "default"
    refused = ""
    if contract is not None:
        (samples, refused), expand = _make_samples(contract, target, reference, samples, effort), False
    if precision is not None:
        _check_precision(target, precision)
    is_made = isinstance(target, Request)  # by `opwright.testing.suite`, for several runs
    request = target if is_made else Request(target, reference, list_samples(samples), effort, expand, precision)
    find_compiler(Store().identities)  # the record names it: an error of the setting comes before the checks
    work = Work(request, only)
    chosen = _devices(request, devices)
    jobs = [
        Job(prefix, name, device)
        for device in chosen
        for prefix in request.prefixes
        for name in CHECKS
        if wanted is None or not wanted.isdisjoint((name, prefix + name))
    ]
    results: list[Result] = []

    def emit(result: Result) -> None:
        results.append(result)
        if on_check is not None:
            on_check(result.check)

    in_process = _run(work, jobs, emit, Limits(timeout_s, memory_bytes) if isolated else None)
    is_built = all(failure.input != BUILDING for result in results for failure in result.failures)
    return VerifyRecord(
        name=request.name,
        checks=[result.check for result in results],
        failures=_in_order(failure for result in results for failure in result.failures),
        backends=_backends(results),
        machine=machine_card(),  # it wakes the GPU, after which no fork could run the checks
        created=started,
        seconds=time.time() - started,
        effort=effort,
        only=only,
        in_process=in_process,
        notes=[*_notes_on(request, chosen, is_built), *filter(None, [refused])],
    )


def _in_order(failures: Iterable[Failure]) -> list[Failure]:
    """Returns failures with those first from which others follow.

    Where a backward gives other results each time, the gradients of its operator do, too.
    """
    found = sorted(failures, key=_rank)
    if found and found[0].check in CHECKS and CHECKS[found[0].check].group == "gradients":
        found.sort(key=lambda failure: failure.check not in _UNSTEADY_BACKWARD)
    return found


def _rank(failure: Failure) -> int:
    """Returns where a failure comes among others: first those from which others follow.

    What is read outside of a tensor can be any value; what is raised follows from anything, a write into an expanded
    argument for one, which numerics tells by its name.
    """
    check = failure.check.rpartition(": ")[2]
    if failure.message.startswith("raised "):
        return 1 if check == "numerics" else 2
    return 0 if check == "guard bands" and "outside" in failure.message else 1


def _check_precision(target: Any, precision: Precision) -> None:
    """Raises CheckError or DeclarationError where a precision is invalid, or belongs elsewhere."""
    name = name_of(target)
    if isinstance(target, Task) or operator_of(target) is not None:
        hint = f"`@opwright.operator(..., precision={precision!r})`"
        raise CheckError(name, "`precision` is for a callable: an operator declares its own", hint=hint)
    check_precision(precision, name)


def _notes_on(request: Request, chosen: Sequence[torch.device], is_built: bool) -> list[str]:
    """Returns what an operator is declared to be, and what its author should declare, as its inputs have shown.

    Args:
        is_built: whether its kernels are built, or there are none.
    """
    operators = [target for target in request.made().values() if target.operator is not None]
    declaration = operators[0].operator.declaration if operators else None
    precision = declaration.precision if declaration is not None else request.precision
    notes = []
    if declaration is not None and not declaration.deterministic:
        notes.append("declared `deterministic=False`: repeated calls are held to the allowance, not to the same bits")
    if declaration is not None and declaration.batch_invariant:
        notes.append("declared `batch_invariant=True`: each entry is held to the same bits in every batch")
    if precision == "tf32":
        notes.append('declared `precision="tf32"`: products of float32 matrices may be rounded as in TF32')
    elif precision is not None:
        notes.append(f"declared `precision`: results may err {precision}")
    if operators and is_built:
        first = operators[0].operator
        if not first.declaration.sources and tell_misnamed(first.declaration.file):
            notes.append(f"its reference was checked; {tell_where(first.declaration.file)}")
        for operator in filter(None, (first, first.backward_operator)):
            notes += _notes_on_kernels(operator.declaration, chosen)
    for target in operators:
        notes += [*remarks_on(target.drawn), *filter(None, [target.tell_refused()])]
    return list(dict.fromkeys(notes))


def _notes_on_kernels(declaration: Declaration, chosen: Sequence[torch.device]) -> list[str]:
    """Returns that the file of a kernel has none for this operator, on each device where it was verified."""
    notes = []
    for device in dict.fromkeys(device.type for device in chosen):
        source = declaration.sources.get(device)
        if source is not None and not may_export(source, declaration.name):
            notes.append(f"`{declaration.name}` has no {device} kernel: its reference was checked")
    return notes


def _run(work: Work, jobs: list[Job], emit: Callable[[Result], None], limits: Limits | None) -> str:
    """Runs jobs, apart where that can be; returns why it could not, "" if it could."""
    # Samples may be large, and so are some inputs of the full sweep.
    is_small = work.request.operator is not None and work.request.samples is None and work.request.effort != "full"
    processes = min(torch.get_num_threads(), _MAX_PROCESSES) if is_small else 1
    reason = ""
    for _, some in itertools.groupby(jobs, key=lambda job: job.device):
        pending = list(some)
        why = "" if limits else "isolated=False"
        if limits:
            try:
                for result in run_apart(work, list(pending), limits, processes):
                    pending.pop(0)
                    emit(result)
            except Unfit as unfit:
                why = str(unfit)
        if pending:
            reason = reason or why
            work.request.make_cases()  # a reference that raises is not a finding
            run_here(work, pending, emit)
    return reason


def _devices(request: Request, named: Iterable[str | torch.device] | None) -> list[torch.device]:
    if named is not None:
        return [parse_device(name) for name in named]
    given = tensors_of(request.samples or ())
    return devices_for(request.operator, given) if request.operator is not None else [device_of(given)]


def _backends(results: Sequence[Result]) -> list[str]:
    """Returns what ran: kernels or references of the operator, and kernels of its backward."""
    named = [result.backend for result in results if result.backend]
    counted = [
        result.backend
        for result in results
        if result.check.cases and not (result.check.name.startswith("backward: ") and result.backend == "reference")
    ]
    return list(dict.fromkeys([backend for backend in counted if backend] or named[-1:]))


def _make_samples(text: str, target: Any, reference: Any, samples: Any, effort: str) -> tuple[list[Labelled], str]:
    """Returns the inputs of a sweep over a contract, as far as the reference takes them, and a note on the others.

    Args:
        text: the parameters and the result of a function, as in Python.

    Raises:
        CheckError: the text is not a signature, or the reference takes none of the inputs.
        DeclarationError: an annotation cannot be read.
    """
    name = name_of(target)
    if isinstance(target, Task) or operator_of(target) is not None:
        raise CheckError(name, "`contract` is for a callable: an operator and a task have inputs of their own")
    if reference is None or samples is not None:
        raise CheckError(name, "`contract` takes the place of `samples`, beside a `reference`")
    contract = _parse(text, name)
    own = caller(contract, reference)

    def call(values: Sequence[Any]) -> list[Any]:
        return outputs_of(contract, own(values))

    contract = find_likely(contract, call)
    cases = list(sweep_cases(contract, call, effort))
    taken = [case for case in cases if accepts(contract, call, case)]
    if not taken:
        raise CheckError(
            name,
            "its reference takes none of the inputs that follow from `contract`",
            rows=[("the first", str(cases[0])) if cases else ("inputs", "none")],
            hint="pass `samples`, or a contract with the reference's axes and domains",
        )
    kept = set(map(id, taken))
    refused = [case for case in cases if id(case) not in kept and contract.find_outside(case.values) is None]
    note = describe_refused(name, refused, len(taken), refusal_of(call, refused[0], contract)) if refused else ""
    samples = [Labelled(case.label, *contract.split_arguments(case.values)) for case in taken]
    return [*_with_defaults(contract, taken), *samples], note


def _with_defaults(contract: Contract, cases: Sequence[Case]) -> list[Labelled]:
    """Returns calls that leave out all options with a default: a candidate may have others than the reference."""
    optional = {p.name: p.default for p in contract.parameters if not p.is_tensor and p.default is not MISSING}
    required = [p.name for p in contract.parameters if not p.keyword_only]
    while required and required[-1] in optional:
        required.pop()
    found = []
    for case in cases:
        is_usual = case.label == "base" or case.label.startswith("values around")
        if optional and is_usual and all(case.options[name] == default for name, default in optional.items()):
            args, kwargs = contract.split_arguments(case.values)
            kept = {name: value for name, value in kwargs.items() if name not in optional}
            found.append(Labelled(f"{case.label}, defaults left out", args[: len(required)], kept))
    return found[:6]  # enough for all cases with usual numbers in the first dtype


def _parse(text: str, name: str) -> Contract:
    scope = {"Tensor": torch.Tensor, "torch": torch, "Mutates": Mutates}
    scope |= {key: getattr(jaxtyping, key) for key in family_names()}
    scope |= {key: getattr(domains, key) for key in ("Index", "NonNegative", "Positive", "Probability", "Range")}
    scope |= {key: getattr(typing, key) for key in ("Annotated", "Literal", "Optional")}
    try:
        exec(f"def contract{text}: ...", scope)
    except (SyntaxError, NameError) as error:
        raise CheckError(
            name,
            "invalid `contract`",
            rows=[("got", text), ("error", str(error))],
            hint="""contract="(x: Float[Tensor, '*b n'], eps: float = 1e-5) -> Float[Tensor, '*b n']\"""",
        ) from None
    return read_contract(scope["contract"], name)
