"""Builds the one library of a package: CPU kernels for several levels of x86-64, CUDA kernels for several GPUs.

Sources are compiled apart from each other, and each for every level. What they define without meaning to
share it (a helper of the same name in two files, an inline function of a header compiled with other
instructions) must not be merged by the linker: so of every object only the kernels' entries stay visible.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.elf.constants import SH_FLAGS
from elftools.elf.elffile import ELFFile

from opwright import __version__
from opwright.backends.cpu import LEVELS, SPECIAL_LEVELS, variant_of
from opwright.backends.exports import find_exports
from opwright.backends.protocol import CompiledBackend, CompileJob, WheelPart
from opwright.backends.registry import all_backends, backend_of_device, device_types
from opwright.backends.toolchain import (
    GLUE_FLAGS,
    LINK_FLAGS,
    NATIVE,
    Compiler,
    find_compiler,
)
from opwright.build.changes import FileChanged, Watch
from opwright.build.compile import SUPPORT, support_commands
from opwright.build.diagnostics import compile_error
from opwright.build.glue import entry_symbol, glue_text, header_text
from opwright.build.request import make_request
from opwright.build.steps import StepFailed, run_all
from opwright.contract.declaration import Declaration
from opwright.contract.schema import coded_schema_of, interface_of, kernel_twin, out_schema_of, schema_of
from opwright.contract.sources import Source
from opwright.errors import NoCompilerError, PackageError
from opwright.package import glibc
from opwright.package.names import check_package_name

# The newest torch of whose stable ABI the glue takes anything.
MINIMUM_TORCH = (2, 11)

ARCHITECTURES = ("80", "90", "100")


@dataclass
class Options:
    """What a library is built for."""

    architectures: tuple[str, ...] = ARCHITECTURES
    levels: tuple[str, ...] = ()  # all of the machine's


@dataclass
class _Piece:
    """One source, compiled for one level or for all GPUs."""

    backend: CompiledBackend
    part: WheelPart
    source: Source
    unit: list[Declaration]
    folder: Path

    @property
    def variant(self) -> str:
        return self.part.variant  # "cpu_v3", "cuda"

    @property
    def device(self) -> str:
        return self.backend.device_type

    @property
    def stem(self) -> str:
        return f"{self.folder.name}_{self.variant}{self.part.name}"

    def symbols(self) -> dict[str, str]:
        """Returns the names that stay visible, by those in the object."""
        ends = ("", "_dtypes", "_16bit", "_dtypes_16bit")
        return {
            entry_symbol(self.device, d.name) + end: entry_symbol(self.variant, d.name) + end
            for d in self.unit
            for end in ends
        }


def build_library(declarations: Sequence[Declaration], root: Path, work: Path, options: Options) -> dict[str, Any]:
    """Builds `work/library.so`; returns what it holds and what it was made from.

    Args:
        declarations: all operators of the package.
        root: the folder that the package lies in; paths in messages and records are relative to it.

    Raises:
        PackageError: the operators have several namespaces.
        NoCompilerError, NoNvccError: a compiler is missing.
        CompileError: a kernel does not compile.
    """
    namespaces = sorted({d.namespace for d in declarations})
    if len(namespaces) > 1:
        package = declarations[0].module.partition(".")[0]
        other = next(d for d in declarations if d.namespace != (package if package in namespaces else namespaces[0]))
        rename = f'write `@operator("{package}::{other.name}")`, or ' if package in namespaces else ""
        raise PackageError(
            other.namespace, "the operators of a wheel have one namespace", rows=[("found", ", ".join(namespaces))],
            hint=f"{rename}make a project of each",
        )  # fmt: skip
    check_package_name(namespaces[0], declarations[0].name)
    watch = Watch()
    identities = work / "identities"
    identities.mkdir()
    compiler = find_compiler(identities)
    named = os.environ.get("CXX", "").split()
    if named and shutil.which(named[0]) is None:
        raise NoCompilerError(namespaces[0], "CXX names no compiler", rows=[("CXX", os.environ["CXX"])])
    if compiler is None:
        raise NoCompilerError(namespaces[0], "there is no C++ compiler", hint="`apt-get install g++`")
    machine = _answer(compiler, "-dumpmachine").split("-")[0]
    known = LEVELS.get(machine, {})
    if not known or not set(options.levels) <= set(known):
        raise PackageError(
            namespaces[0], "there are no such levels of CPU kernels for this machine",
            rows=[("got", ", ".join(options.levels)), ("machine", machine), ("levels", ", ".join(known) or "none")],
        )  # fmt: skip
    levels = {name: flags for name, flags in known.items() if name in (options.levels or known)}
    pieces = _pieces(declarations, levels, options, work)
    levels = {name: flags for name, flags in levels.items() if any(p.variant == variant_of(name) for p in pieces)}
    tools = {
        piece.backend: piece.backend.find_compiler(identities) for piece in pieces if piece.backend.has_own_compiler
    }
    for backend in tools if machine != platform.machine() else ():
        raise PackageError(
            namespaces[0], f"{backend.name.upper()} kernels are compiled on a machine of the kind that they are for",
            rows=[("compiler", machine), ("here", platform.machine())],
            hint="build on such a machine, or `architectures = []` among the options of the build hook",
        )  # fmt: skip
    for backend in (backend for backend, tool in tools.items() if tool is None):
        error = backend.make_compiler_error(namespaces[0])
        raise type(error)(
            namespaces[0], f"there is no {error.missing} for its kernels",
            hint=f"{error.hint.partition(', or ')[0]}, "
            "or `architectures = []` among the options of the build hook, for a wheel without them",
        )  # fmt: skip
    unlevelled = sorted({piece.variant for piece in pieces} - set(map(variant_of, levels)))
    variants = [*map(variant_of, levels), *unlevelled]
    prefix = (
        f"-ffile-prefix-map={root}=.",
        f"-ffile-prefix-map={work}=.",
        f"-ffile-prefix-map={NATIVE}=opwright",
    )
    commands: dict[str, list[str]] = dict(support_commands(compiler, work))
    (work / "unit.c").write_text(glue_text(declarations, variants))
    (work / "define.c").write_text(_define_text(declarations, unlevelled))
    shutil.copy(NATIVE / "src" / "level.c", work / "level.c")
    stubs = glibc.stub_commands(compiler, work)
    commands |= stubs
    held = [f"-DOPWRIGHT_HAS_{level}" for level in levels]
    for name in ("unit", "level", "define"):
        commands[name] = [
            compiler.path, *GLUE_FLAGS, *held, *prefix, "-I", str(NATIVE / "src"), "-c", f"{name}.c", "-o", f"{name}.o"
        ]  # fmt: skip
    # Slow ones first, so that none is left alone at the end.
    for piece in sorted(pieces, key=lambda p: (not p.backend.has_own_compiler, -len(p.source.read()))):
        path = piece.source.path or _written(piece)
        header, tool = str(piece.folder / f"contract_{piece.device}.h"), tools.get(piece.backend)
        flags = piece.part.flags
        if piece.variant in unlevelled:
            flags = (*piece.backend.wheel_flags((), options.architectures, tool), *flags)
        job = CompileJob(path, header, piece.stem, flags, tool, compiler, identities)
        commands[piece.stem] = piece.backend.make_wheel_command(job, piece.part.name, prefix)
    try:
        run_all(commands, work)
    except StepFailed as failed:
        piece = next((p for p in pieces if p.stem == failed.step), None)
        if piece is None:
            raise PackageError(failed.step, "it cannot be compiled", body=failed.output) from None
        request = make_request(piece.unit, (piece.device,))
        raise compile_error(request, failed.step, failed.output, failed.log) from None
    for piece in pieces:
        _hide(piece, compiler, work)
    entries = _check_entries(pieces, compiler, work)
    link = [
        compiler.path,
        *LINK_FLAGS,
        "-Wl,-s",
        *_aliases(entries, levels),
        "unit.o",
        "level.o",
        "define.o",
        *(f"{p.stem}.o" for p in pieces),
        *SUPPORT,
    ]
    for backend in dict.fromkeys(piece.backend for piece in pieces):
        link += backend.link_flags(tools.get(backend))
    link += glibc.link_flags(compiler, stubs)
    try:
        run_all({"link": [*link, "-o", "library.so"]}, work)
    except StepFailed as failed:
        raise PackageError(namespaces[0], "its library cannot be linked", body=failed.output) from None
    launched = _find_launched(declarations, root, work)
    try:
        watch.digests({piece.source.path for piece in pieces if piece.source.path})
    except FileChanged as changed:
        raise PackageError(
            namespaces[0], "a source changed while the wheel was built", rows=[("file", str(changed.path))],
            hint="build it again",
        ) from None  # fmt: skip
    return {
        "opwright": __version__,
        "namespace": namespaces[0],
        "minimum_torch": list(MINIMUM_TORCH),
        "machine": machine,
        "library": hashlib.sha256((work / "library.so").read_bytes()).hexdigest(),
        "bytes": (work / "library.so").stat().st_size,
        "levels": list(levels),
        "architectures": [f"sm_{a}" for a in options.architectures] + ["PTX"] if tools else [],
        "operators": {
            d.qualified_name: {
                "schema": interface_of(d.contract, d.name),
                "backends": sorted({p.device for p in pieces if d in p.unit and _is_held(p, d, entries)}),
                "launched": launched.get(d.qualified_name, {}),
            }
            for d in declarations
        },
        "compilers": [compiler.identity.splitlines()[0], *(tool.identity for tool in tools.values())],
        "flags": {
            device: _describe_flags(backend, levels, options, tools)
            for device in device_types()
            if isinstance(backend := backend_of_device(device), CompiledBackend)
        },
        "sources": _digests(pieces, root),
        "sizes": _sizes(pieces, root, work),
    }  # fmt: skip


def _describe_flags(
    backend: CompiledBackend,
    levels: Mapping[str, Sequence[str]],
    options: Options,
    tools: Mapping[CompiledBackend, Any],
) -> dict[str, str] | str:
    """Returns the flags of a backend's compiler, for each level of CPUs."""
    if backend.has_own_compiler:
        tool = tools.get(backend)
        return " ".join(backend.wheel_flags((), options.architectures, tool)) if tool else ""
    return {level: " ".join(backend.wheel_flags(flags, (), None)) for level, flags in levels.items()}


def _define_text(declarations: Sequence[Declaration], unlevelled: Sequence[str]) -> str:
    """Returns the C source of `opwright_define`, by which a program without Python gets the operators."""
    schemas = []
    for declaration in declarations:
        contract, name = declaration.contract, declaration.name
        schemas += [schema_of(contract, name), coded_schema_of(contract, kernel_twin(name))]
        schemas += [out_schema_of(contract, name)] if contract.outputs else []
    lines = "".join(f"    {json.dumps(schema)},\n" for schema in schemas)
    others = "".join(f' || opwright_register("{variant}")' for variant in unlevelled)
    return f"""// For a process without Python, which defines the operators otherwise.
#include "glue.h"
extern const char *opwright_level(void);
extern int opwright_register(const char *backend);

static const char *const schemas[] = {{
{lines}    0,
}};

static int define(Handle library) {{
  char backend[16];
  for (const char *const *schema = schemas; *schema; ++schema) {{
    if (aoti_torch_library_def(library, *schema)) return 1;
  }}
  snprintf(backend, sizeof backend, "{variant_of("%s")}", opwright_level());
  return (*opwright_level() && opwright_register(backend)){others};
}}

// Defines the operators and registers their kernels. Zero on success; another call then does nothing.
__attribute__((visibility("default"))) int opwright_define(void) {{
  if (opwright_has_no_python) return 0;
  Handle library;
  if (aoti_torch_library_init_fragment("{declarations[0].namespace}", "opwright", 0, &library)) return 1;
  if (define(library)) {{
    aoti_torch_delete_library_object(library);
    return 1;
  }}
  opwright_has_no_python = 1;
  return 0;
}}
"""


def _pieces(
    declarations: Sequence[Declaration], levels: dict[str, tuple[str, ...]], options: Options, work: Path
) -> list[_Piece]:
    units: dict[tuple[str, Source], list[Declaration]] = {}
    for declaration in declarations:
        for device, source in _kernels_of(declaration).items():
            if _is_shipped(source):
                units.setdefault((device, source), []).append(declaration)
    found: list[_Piece] = []
    for (device, source), unit in units.items():
        backend = all_backends()[source.backend]
        parts = backend.wheel_parts(source, levels, options.architectures)
        if parts:
            folder = work / f"{unit[0].name}_{len(found)}"
            folder.mkdir()
            (folder / f"contract_{device}.h").write_text(header_text(unit, device))
            found += [_Piece(backend, part, source, unit, folder) for part in parts]
    return found


def _kernels_of(declaration: Declaration) -> dict[str, Source]:
    """Returns the sources of an operator's kernels by the type of device that they run on."""
    return {device: declaration.sources[device] for device in device_types() if device in declaration.sources}


def _is_shipped(source: Source) -> bool:
    """Returns whether wheels can have kernels of its language: those that run without a compiler of their own."""
    backend = all_backends()[source.backend]
    return isinstance(backend, CompiledBackend) and backend.is_read_in_place


def _find_launched(declarations: Sequence[Declaration], root: Path, work: Path) -> dict[str, dict[str, str]]:
    """Returns the modules whose kernels Python launches, by operator and type of device.

    A source that is not a module of the package becomes one of its runtime, in `work/launched`.
    """
    folder = work / "launched"
    folder.mkdir()
    names: dict[Source, str] = {}
    found: dict[str, dict[str, str]] = {}
    for declaration in declarations:
        package = declaration.module.partition(".")[0]
        for device, source in _kernels_of(declaration).items():
            if declaration.name not in all_backends()[source.backend].launch_functions(source, declaration.name):
                continue
            if source not in names and source.path and source.path.is_relative_to(root / package):
                names[source] = ".".join(source.path.relative_to(root).with_suffix("").parts)
            elif source not in names:
                names[source] = f"{package}._opwright.launched.{declaration.name}"
                (folder / f"{declaration.name}.py").write_text(source.read())
            found.setdefault(declaration.qualified_name, {})[device] = names[source]
    return found


def _written(piece: _Piece) -> Path:
    """Returns a file with a source that stands in the declaration."""
    path = piece.folder / f"source{piece.backend.suffix}"
    path.write_text(piece.source.inline)
    return path


def _hide(piece: _Piece, compiler: Compiler, work: Path) -> None:
    """Leaves only the kernels' entries visible, under the names of their variant."""
    path, symbols = work / f"{piece.stem}.o", piece.symbols()
    joined = work / f"{piece.stem}.joined.o"
    subprocess.run(
        [_answer(compiler, "-print-prog-name=ld"), "-r", "--force-group-allocation", "-o", joined, path], check=True
    )
    subprocess.run(
        [
            _answer(compiler, "-print-prog-name=objcopy"),
            *(f"--keep-global-symbol={name}" for name in symbols.values()),  # as they are renamed
            *(f"--redefine-sym={old}={new}" for old, new in symbols.items() if old != new),
            joined, path,
        ],
        check=True,
    )  # fmt: skip


def _check_entries(pieces: Sequence[_Piece], compiler: Compiler, work: Path) -> dict[str, set[str]]:
    """Returns the entries of each variant.

    Refuses objects without those of their operators: the references would run, and nobody would know.
    """
    found: dict[str, set[str]] = {}
    for piece in pieces:
        listed = subprocess.run(
            [_answer(compiler, "-print-prog-name=nm"), "--defined-only", "--extern-only", "--format=just-symbols", work / f"{piece.stem}.o"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        found.setdefault(piece.variant, set()).update(listed.stdout.split())
    for piece in pieces:
        for declaration in piece.unit:
            if not _is_held(piece, declaration, found) and declaration.name in (find_exports(piece.source) or ()):
                raise PackageError(declaration.name, "its kernel is lost on the way", rows=[("object", piece.stem)])
    return found


def _is_held(piece: _Piece, declaration: Declaration, entries: dict[str, set[str]]) -> bool:
    symbol = entry_symbol(piece.variant, declaration.name)
    return bool({symbol, f"{symbol}_16bit"} & entries[piece.variant])


def _aliases(entries: dict[str, set[str]], levels: Iterable[str]) -> list[str]:
    """Returns the flags that give a special level the entries of plainer ones, where it has none of its own."""
    flags = []
    for level in (name for name in levels if name in SPECIAL_LEVELS):
        own, found = variant_of(level), set(entries[variant_of(level)])
        for plain in map(variant_of, SPECIAL_LEVELS[level][0]):
            for symbol in sorted(entries.get(plain, ())):
                name = symbol.replace(f"opwright_{plain}_", f"opwright_{own}_", 1)
                if name not in found:
                    found.add(name)
                    flags.append(f"-Wl,--defsym={name}={symbol}")
    return flags


@functools.cache
def _answer(compiler: Compiler, question: str) -> str:
    """Asks a compiler, which may be one for another machine, what that is or where its tools are."""
    return subprocess.run([compiler.path, question], check=True, capture_output=True, text=True).stdout.strip()


def _name(piece: _Piece, root: Path) -> str:
    path = piece.source.path
    return os.path.relpath(path, root.resolve()) if path else f"{piece.unit[0].qualified_name} ({piece.device})"


def _digests(pieces: Sequence[_Piece], root: Path) -> dict[str, str]:
    found = {_name(p, root): hashlib.sha256(p.source.read().encode()).hexdigest() for p in pieces}
    return dict(sorted(found.items()))


def _sizes(pieces: Sequence[_Piece], root: Path, work: Path) -> dict[str, dict[str, int]]:
    """Returns the bytes of each source in the library, by variant."""
    found: dict[str, dict[str, int]] = {}
    for piece in pieces:
        with (work / f"{piece.stem}.o").open("rb") as f:
            sections = [s.header for s in ELFFile(f).iter_sections()]
        taken = sum(s.sh_size for s in sections if s.sh_flags & SH_FLAGS.SHF_ALLOC and s.sh_type != "SHT_NOBITS")
        sizes = found.setdefault(_name(piece, root), {})
        sizes[piece.variant] = sizes.get(piece.variant, 0) + taken
    return dict(sorted(found.items()))
