"""`@operator`: a declaration becomes an operator of PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from opwright.contract.declaration import Declaration, code_of, declare, declare_backward
from opwright.contract.dryrun import dry_run
from opwright.contract.precision import Precision
from opwright.dispatch import compile_cache, kernels, registry, sharding
from opwright.dispatch.arguments import Arguments
from opwright.dispatch.autocast import autocast_kernel
from opwright.dispatch.autograd import Gradient, autograd_kernel
from opwright.dispatch.call_errors import CallErrors
from opwright.dispatch.entry_point import entry_point
from opwright.dispatch.fake import fake_kernel
from opwright.dispatch.fallback import Fallback
from opwright.dispatch.mutation import mutation_kernel
from opwright.dispatch.out_variant import OutVariant
from opwright.dispatch.record import Operator
from opwright.dispatch.reference import Reference
from opwright.dispatch.registration import AUTOCAST_KEYS, Functions, Registration, signature_of
from opwright.dispatch.registry import operator_of
from opwright.dispatch.sharding_rules import Rules
from opwright.dispatch.vmap import vmap_kernel
from opwright.errors import DeclarationError

__all__ = ["Operator", "install", "operator", "operator_of"]


def operator(
    qualified_name: str,
    cpu: str | Path | None = None,
    cuda: str | Path | None = None,
    triton: str | Path | None = None,
    *,
    random: bool = False,
    data_dependent: Sequence[str] = (),
    non_differentiable: Sequence[str] = (),
    autocast: str | None = "promote",
    deterministic: bool = True,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    shared_gradients: Sequence[Sequence[str]] = (),
    derived_gradients: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Any]:
    """Declares a PyTorch operator by its reference.

    Args:
        qualified_name: `ns::name`; the operator is also `torch.ops.ns.name`.
        cpu: the kernel for CPUs: a path relative to the declaring file, or the source itself (a string with a newline).
            None: the file `cpu.cpp` next to the declaring file, if it exists.
        cuda: the same for NVIDIA GPUs, and `cuda.cu`.
        triton: the same for a Triton kernel, and `triton.py`.
        random: the reference draws random numbers.
        data_dependent: axes of outputs whose size only the data know.
        non_differentiable: outputs that no gradient flows through, such as those that the backward needs.
        autocast: what happens to mixed precisions under autocast: "promote", "lower", "float32", None.
        deterministic: False where the last bits of a result vary from call to call, as sums by atomics do.
        precision: "tf32" where products of float32 matrices are computed in TF32; `Factor(4, "reason")` where results
            may err four times what verify otherwise allows.
        batch_invariant: an entry of a variadic axis has the same bits whatever else is in the batch. This holds for
            the backward, too.
        shared_gradients: groups of inputs whose gradient is one tensor, as the terms of a sum have it:
            `[("input", "residual")]`. A declared backward returns it once, in the place of the first.
        derived_gradients: inputs whose gradient is seldom asked for: `["table"]`. A declared backward leaves it out; it
            follows from the reference in calls that need it, and in others nothing is kept for it.

    Returns:
        A decorator. The decorated function calls the operator; its attributes `backward`, `samples`,
        `sweep`, `cost`, `baseline`, `sharding`, `exchange` say more about it, `operator` is the `Operator` behind it.

    Raises:
        DeclarationError: the declaration cannot be honoured; the subclass says why.
    """
    if not isinstance(qualified_name, str):
        name = getattr(qualified_name, "__name__", "name")
        raise DeclarationError(name, "`@operator` wants the operator's name", hint=f'`@operator("my_ops::{name}")`')
    frame = sys._getframe(1)
    named = {"cpu": cpu, "cuda": cuda, "triton": triton}

    def decorate(reference: Callable[..., Any]) -> Any:
        code = code_of(reference)
        try:
            declaration = declare(
                qualified_name,
                reference,
                find_sources=partial(kernels.find_sources, kernels=named),
                random=random,
                data_dependent=data_dependent,
                non_differentiable=non_differentiable,
                autocast=autocast,
                deterministic=deterministic,
                precision=precision,
                batch_invariant=batch_invariant,
                shared_gradients=shared_gradients,
                derived_gradients=derived_gradients,
                local_names=frame.f_locals,
                body=_body_of(frame),
                is_direct=any(at is not None and at.f_code.co_name == "<module>" for at in (frame, frame.f_back)),
            )
            kernels.refuse_kernel(declaration, named)
            return install(declaration).function
        except DeclarationError as error:
            raise _locate(error, code) from None

    return decorate


def install(declaration: Declaration, forward: Operator | None = None) -> Operator:
    """Makes a declaration the current one of its name, and of its forward if it is a backward."""
    dry_run(declaration)  # without the lock, for the reference may call operators that have to be built
    with registry.lock:
        registration = _register(declaration)
        declaration = declaration._replace(generation=registration.generation)
        contract = declaration.contract
        arguments = Arguments(contract)
        reference = Reference(declaration, arguments)
        errors = CallErrors(declaration.name, arguments, reference)
        fallback = Fallback(declaration, registration, arguments, reference, errors)
        out = OutVariant(registration, arguments, reference, errors, fallback)
        gradient = Gradient(
            declaration,
            arguments,
            reference,
            has_kernel=partial(kernels.has_kernel, declaration),
            has_every_kernel=kernels.has_every_kernel(declaration),
        )
        functions = Functions(
            fallback=fallback.run_call,
            coded_fallback=fallback.run_coded,
            coded_reference=fallback.run_coded_reference,
            plain=None if kernels.may_have_kernels(declaration) else fallback.run_coded_without_kernels,
            reference=lambda *args, **kwargs: reference.compute(arguments.normalize(*args, **kwargs)),
            fake=fake_kernel(arguments),
            autograd=autograd_kernel(
                gradient, registration, arguments, reference, errors.explain, partial(sharding.install, registration)
            ),
            vmap=vmap_kernel(declaration, registration, arguments, reference),
            autocast={
                device: autocast_kernel(declaration, registration, arguments, device) for device in AUTOCAST_KEYS
            },
            mutation=mutation_kernel(registration, arguments),
            out=out.run,
            out_mutation=out.run_mutation,
        )
        new = Operator(
            declaration=declaration,
            registration=registration,
            arguments=arguments,
            reference=reference,
            gradient=gradient,
            explain=errors.explain,
            call_general=partial(_call_general, registration, arguments, errors),
            call_with_out=out.call,
            function=entry_point(declaration, registration),
        )
        new.rules = Rules(new)
        gradient.derived.compute_sharded = partial(sharding.differentiate, new)
        gradient.derived.place_sharded = partial(sharding.redistribute, new)
        _attach(new)
        registration.follow(new, functions)
        registration.call_function(contract, new.function)
        sharding.install(registration)
        registry.operators[declaration.qualified_name] = new
        compile_cache.include(declaration)
        if forward is not None:
            forward.backward_operator = new
        for other in registry.operators.values():
            other.traces.clear()  # they may call what was declared before
        kernels.unload(declaration)  # a library that was built without this operator is out of date
        kernels.claim(new)
    return new


def _register(declaration: Declaration) -> Registration:
    """Returns what is registered for the schema of a declaration, after the one before it has made room."""
    name = declaration.qualified_name
    old = registry.check_free(declaration, has_kernels=kernels.are_registered(declaration))
    if old is not None:
        kernels.unload(old.declaration)
    found = registry.registrations.get(name)
    if found is not None and found.signature == signature_of(declaration):
        return found
    generation = declaration.generation
    if found is not None:
        kernels.retire(found.current.declaration)
        found.retire()
        generation = found.generation + 1
    made = registry.registrations[name] = Registration(declaration._replace(generation=generation), generation)
    return made


def _call_general(registration: Registration, arguments: Arguments, errors: CallErrors, values: Sequence[Any]) -> Any:
    """Calls the dispatcher's own entry; a broken contract raises its ContractError."""
    try:
        if sharding.has_sharded(values):
            return sharding.call(registration.current, values)
        return arguments.pass_to(registration.entry(), values)
    except (RuntimeError, TypeError) as error:
        raise errors.explain(error, values) from None


def _install_backward(forward: Operator, reference: Callable[..., Any], local_names: Mapping[str, Any]) -> Any:
    code = code_of(reference)
    try:
        made = install(declare_backward(forward.declaration, reference, local_names), forward)
    except DeclarationError as error:
        raise _locate(error, code) from None
    forward.gradient.set_backward(made.function, made.contract)
    return made.function


def _body_of(frame: FrameType) -> CodeType | None:
    """Returns the code of the module that declares an operator while it is run, or None.

    That is the module of the function itself, or the one that has called this function directly. Farther up is the
    program that runs: a test may declare again what another test has declared.
    """
    callers, at = [], frame
    while at is not None and (at.f_globals is frame.f_globals or at is frame.f_back):
        callers.append(at.f_code)
        at = at.f_back
    return next((code for code in callers if code.co_name == "<module>"), None)


def _attach(new: Operator) -> None:
    """Gives an operator's function the attributes by which an author says more about it."""

    function = new.function
    function.operator = new
    new.install_backward = partial(_install_backward, new)
    function.backward = new.backward
    function.samples = new.samples
    function.sweep = new.sweep
    function.cost = new.cost
    function.baseline = new.baseline
    function.sharding = new.sharding
    function.exchange = new.exchange


def _locate(error: DeclarationError, code: CodeType) -> DeclarationError:
    rows = [("at", f"{code.co_filename}:{code.co_firstlineno}"), *error.rows]
    return type(error)(error.subject, error.rule, rows=rows, body=error.body, hint=error.hint)
