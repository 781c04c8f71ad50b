"""Compiles one key of a kernel: Triton's own binder and compiler, with no GPU, no CUDA driver and no torch."""

from __future__ import annotations

import inspect
from typing import Any

from .classes import (
    Absent,
    ArgumentClass,
    Constant,
    Group,
    observed,
    parse_class,
    representative,
    write_class,
)
from .compile_errors import compile_error
from .cubin import read_cubin
from .errors import WorkerError, first_paragraph
from .kernel import Kernel, require_triton
from .parameters import launch_parameters
from .target import compiling_for
from .values import write_value

_WARP_SIZE = 32
# A driver runs every cubin of its major version (minor version compatibility), if it knows the architecture.
_FIRST_DRIVER = {100: 12080, 101: 12080, 120: 12080, 103: 12090, 121: 12090, 110: 13000, 88: 13000}
_OURS = ("arch", "backend_name", "warp_size", "ptx_version", "ir_override", "instrumentation_mode")


def compile_key(kernel: Kernel, arch: int, args: list[str], options: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Returns the record of one key of a kernel, and its cubin.

    Args:
        kernel: The kernel.
        arch: The compute capability, as 90.
        args: One class for each parameter of the function.
        options: The options that were given.

    Raises:
        WorkerError: The classes do not fit the declaration, Triton refuses, or the cubin is not as derived.
    """
    import triton

    classes = _checked_classes(kernel, args)
    source, parsed, target = _bind(kernel, arch, classes, options)
    try:
        with compiling_for(target) as variables:
            compiled = triton.compile(source, target=target, options=parsed.__dict__, _env_vars=variables)
    except Exception as error:
        raise compile_error(kernel, error) from error
    cubin = compiled.asm["cubin"]
    return _record(kernel, arch, write_key(args, options), compiled, cubin), cubin


def write_key(args: list[str], options: dict[str, Any]) -> str:
    """Returns a key's text from its classes and the options that were given."""
    try:
        given = ", ".join(f"{name}={write_value(options[name])}" for name in sorted(options))
    except ValueError as error:
        raise WorkerError("option", f"An option cannot be in a key: {error}.") from None
    return f"{', '.join(args)}; {given}" if given else ", ".join(args)


def _checked_classes(kernel: Kernel, args: list[str]) -> list[ArgumentClass]:
    parameters = kernel.jit.params
    if len(args) != len(parameters):
        names = ", ".join(p.name for p in parameters)
        raise kernel.error("argument", f"was given {len(args)} arguments, expected {len(parameters)}: {names}.")
    classes = []
    for parameter, text in zip(parameters, args):
        try:
            found = parse_class(text)
        except WorkerError as error:
            raise kernel.error("argument", f"{_named(parameter)}: {error.message}") from None
        if parameter.is_constexpr and not isinstance(found, Constant):
            raise kernel.error("argument", f"{_named(parameter)} is `tl.constexpr`: given `{text}`, expected `=VALUE`.")
        if not parameter.is_constexpr and isinstance(found, Constant):
            raise kernel.error(
                "argument",
                f"{_named(parameter)} is not a `tl.constexpr`: given `{text}`, expected {_runtime_class(found)}.",
            )
        classes.append(found)
    return classes


def _runtime_class(found: Constant) -> str:
    value = found.value
    if value is None:
        return f"`{write_class(Absent())}`"
    if isinstance(value, tuple):
        return f"a tuple of classes, as `{write_class(Group((parse_class('i32'), parse_class('fp32'))))}`"
    return "`u1`" if isinstance(value, bool) else "`fp32`" if isinstance(value, float) else "`i32` or a pointer"


def _named(parameter: Any) -> str:
    return f"argument {parameter.num + 1} `{parameter.name}`"


def _bind(kernel: Kernel, arch: int, classes: list[ArgumentClass], options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Returns what Triton's `run` would compile for arguments of these classes: source, options and target."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    jit, module = kernel.jit, kernel.kernel_file.module
    target = GPUTarget("cuda", arch, _WARP_SIZE)
    backend = make_backend(target)
    kwargs = _run_options(kernel, options, knobs)
    values = {p.name: representative(c, module) for p, c in zip(jit.params, classes)}
    try:
        _check_options(kernel, backend, options)
        binder = create_function_from_signature(jit.signature, jit.params, backend)
        bound, specialization, extra = binder(**values, **kwargs)
        _check_observed(kernel, classes, bound, specialization)
        parsed, signature, constexprs, attributes = jit._pack_args(backend, kwargs, bound, specialization, extra)
    except WorkerError:
        raise
    except Exception as error:
        raise kernel.error("option" if options else "argument", f"Triton refuses: {first_paragraph(error)}") from error
    return ASTSource(jit, signature, constexprs, attributes), parsed, target


def _run_options(kernel: Kernel, options: dict[str, Any], knobs: Any) -> dict[str, Any]:
    """Adds to the given options what `JITFunction.run` of any version adds."""
    kwargs = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    # The default changes with Triton 3.10; a key without it must mean one thing.
    kwargs.setdefault("enable_fp_fusion", True)
    kwargs["debug"] = kwargs.get("debug", kernel.jit.debug) or knobs.runtime.debug
    for name in ("instrumentation_mode", "fpsan_homomorphic_casts"):
        if hasattr(knobs.compilation, name):
            kwargs[name] = getattr(knobs.compilation, name)
    return kwargs


def _check_options(kernel: Kernel, backend: Any, options: dict[str, Any]) -> None:
    known = {name for name in backend.parse_options({"enable_fp_fusion": True}).__dict__ if name not in _OURS}
    for name in options:
        if name not in known:
            import triton

            has = ", ".join(sorted(known))
            raise kernel.error("option", f"`{name}` is not an option of Triton {triton.__version__}, which has {has}.")


def _check_observed(kernel: Kernel, classes: list[ArgumentClass], bound: dict[str, Any], specialization: Any) -> None:
    """Raises if Triton's binder put an argument into another class than the one asked for."""
    for parameter, given, value, (type_, attribute) in zip(kernel.jit.params, classes, bound.values(), specialization):
        if isinstance(given, Constant):
            continue
        found = observed(type_, attribute, value, kernel.kernel_file.module)
        if found != write_class(given):
            why = f"declared `{parameter.annotation_type}`" if parameter.annotation_type else None
            why = "under `do_not_specialize`" if parameter.do_not_specialize else why
            why = why or (
                "under `do_not_specialize_on_alignment`" if parameter.do_not_specialize_on_alignment else None
            )
            because = f", for it is {why}" if why else ""
            raise kernel.error(
                "argument", f"{_named(parameter)}: given `{write_class(given)}`, expected `{found}`{because}."
            )


def _record(kernel: Kernel, arch: int, key: str, compiled: Any, cubin: bytes) -> dict[str, Any]:
    import triton

    meta = compiled.metadata
    descriptors = list(getattr(meta, "tensordesc_meta", None) or [])
    layout = read_cubin(cubin, meta.name)
    version = require_triton()
    parameters = launch_parameters(compiled.src.signature.values(), bool(descriptors), version, layout, meta.name)
    if layout.required_threads not in (None, meta.num_warps * _WARP_SIZE):
        raise kernel.error(
            "contract",
            f"the cubin of Triton {triton.__version__} requires {layout.required_threads} threads, expected "
            f"{meta.num_warps} warps of {_WARP_SIZE}.",
        )
    ptxas = _ptxas_version(arch)
    return {
        "file": kernel.file,
        "function": kernel.function,
        "key": key,
        "arch": arch,
        "triton": triton.__version__,
        "ptxas": ptxas,
        "cuda": max(int(ptxas.split(".")[0]) * 1000, _FIRST_DRIVER.get(arch, 0)),
        "symbol": meta.name,
        "num_warps": meta.num_warps,
        "num_ctas": meta.num_ctas,
        "shared": meta.shared,
        "tmem": getattr(meta, "tmem_size", None) or 0,
        "pdl": bool(meta.launch_pdl),
        "cooperative": bool(meta.launch_cooperative_grid),
        "global_scratch": [meta.global_scratch_size or 0, meta.global_scratch_align or 1],
        "profile_scratch": [meta.profile_scratch_size or 0, meta.profile_scratch_align or 1],
        "params": parameters,
        "tma": descriptors,
        "max_threads": layout.required_threads,
        "sources": kernel.kernel_file.digests(kernel.jit),
        "source_key": kernel.jit.cache_key,
    }


def _ptxas_version(arch: int) -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    takes_arch = bool(inspect.signature(get_ptxas).parameters)
    return str((get_ptxas(arch) if takes_arch else get_ptxas()).version)
