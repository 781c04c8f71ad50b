"""opwright build"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from opwright.cli.console import print_json, progress, say
from opwright.cli.help import make_app
from opwright.cli.overview import TARGET
from opwright.errors import NoNvccError, SettingError, TargetError, plural

if TYPE_CHECKING:
    from opwright.build.load import Library
    from opwright.build.remote import RemoteStore
    from opwright.dispatch.operator import Operator

build_app = make_app("build")


@build_app.default
def build_operators(
    target: Annotated[str | None, Parameter(help=f"{TARGET} By default every op.py below this folder.")] = None,
    *,
    json: bool = False,
    out: Path | None = None,
    push: Annotated[bool, Parameter(negative="")] = False,
    compile_commands: Annotated[bool | None, Parameter(negative="--no-compile-commands")] = None,
) -> int:
    """Build the kernels of TARGET ahead of their first call: those of all backends into one library.

    CUDA kernels are compiled for --arch, else for the GPUs present, else for sm_80 and sm_90, with PTX of
    the newest. Without nvcc only the others are built.

    Exit code 2: a kernel does not compile; 5: there are no kernels.

    Args:
        json: Print where the libraries are, as JSON.
        out: A folder to write a record of each build into, for the report: its commands in time, the registers of
            its GPU kernels.
        push: Write the libraries to the remote store too, which OPWRIGHT_REMOTE_STORE names.
        compile_commands: Write compile_commands.json for editors, also where nothing has to be compiled,
            and print where it is; by default it is written only for what is compiled.
            --no-compile-commands leaves the file alone (OPWRIGHT_WITHOUT=compile_commands).
    """
    from opwright import settings
    from opwright.backends.sources import tell_where
    from opwright.dispatch import kernels

    if compile_commands is not None:
        left = [name for name in settings.without() if name != "compile_commands"]
        os.environ["OPWRIGHT_WITHOUT"] = ",".join(left if compile_commands else [*left, "compile_commands"])
    remote = _remote_store() if push else None
    started = time.perf_counter()
    built, cached, libraries = 0, 0, []
    operators = _find(target)
    units = kernels.libraries_of(operators)
    if not units:
        say("Nothing to build: there are no kernels, and every call runs the reference")
        for file in dict.fromkeys(operator.declaration.file for operator in operators):
            say(f"hint: {tell_where(file)}")
    for keys in units:
        # Before the build: what does not compile is to be opened in an editor.
        written = [str(path) for path in _write_commands(keys, target)] if compile_commands else []
        with progress("Building") as line:
            line.update(" ".join(d.name for d in kernels.unit_of(keys[0])))
            made = _build(keys)
        if made is None:
            continue
        library, is_new = made
        built, cached = built + is_new, cached + (not is_new)
        if remote is not None and not is_new:  # else the build has done so
            _push(library, keys, remote)
        if out is not None:
            save_record(library, out)
        libraries.append(
            {
                "operators": library.entry.record.operators,
                "library": str(library.entry.library),
                "built": is_new,
                "seconds": library.entry.record.seconds,
                "compile_commands": written,
            }
        )
    if json:
        print_json(libraries)
    elif compile_commands:
        print("\n".join(dict.fromkeys(path for library in libraries for path in library["compile_commands"])))
    else:
        for library in libraries:
            print(library["library"])
    count = built + cached
    if not count:
        return 5
    say(f"Built {plural(count, 'library', 'libraries')} in {time.perf_counter() - started:.2f} s ({cached} cached)")
    return 0


def _remote_store() -> RemoteStore:
    """Returns the store to write to.

    Raises:
        SettingError: there is none.
    """
    from opwright.build.remote import remote_store

    os.environ["OPWRIGHT_REMOTE_PUSH"] = "1"
    found = remote_store()
    if found is None:
        raise SettingError(
            "OPWRIGHT_REMOTE_STORE",
            "must name the remote store that `--push` writes to",
            hint="`export OPWRIGHT_REMOTE_STORE=s3://bucket/kernels`, or a path that all machines have",
        )
    return found


def _push(library: Library, keys: tuple[tuple, ...], remote: RemoteStore) -> None:
    from opwright.build.compile import push
    from opwright.build.request import make_request
    from opwright.build.store import Store
    from opwright.dispatch import kernels

    push(library.entry, make_request(kernels.unit_of(keys[0]), [key[1] for key in keys]), Store(), remote)


def save_record(library: Library, folder: Path) -> Path:
    """Writes the record of a build, new or from the store, and returns its path."""
    from opwright.build.usage import kernels_in, steps_of
    from opwright.machine import machine_card
    from opwright.records import BuildRecord, save_in

    kept = library.entry.record
    log = library.entry.path / "build.log"
    record = BuildRecord(
        # The library of an operator holds its backward; the shortest name is the operator's.
        name=min(kept.operators, key=len),
        operators=kept.operators,
        compiler=kept.compiler,
        library_bytes=library.entry.library.stat().st_size,
        steps=steps_of(kept.starts, kept.seconds),
        kernels=kernels_in(log.read_text(errors="replace") if log.exists() else ""),
        machine=machine_card(),
        built=kept.created,
        created=time.time(),
        seconds=kept.seconds.get("all", 0.0),
    )
    return save_in(folder, record)


def _find(target: str | None) -> list[Operator]:
    from opwright.target import find_operators

    if target is not None:
        return find_operators(target)
    from opwright.build.compile_commands import project_of

    here = Path.cwd()
    if project_of(here / "op.py") is None:
        raise TargetError(
            str(here),
            "this folder is in no project",
            hint="`opwright build TARGET`, or a `pyproject.toml` here",
        )
    files = [path for path in sorted(here.rglob("op.py")) if project_of(path)]
    return [operator for path in files for operator in find_operators(str(path))]


def _write_commands(keys: tuple[tuple, ...], target: str | None) -> list[Path]:
    """Writes the commands of one library's sources; there may be none to open in an editor.

    Raises:
        TargetError: its sources are in no project, or the project cannot be written.
    """
    from opwright.build.compile import write_compile_commands
    from opwright.build.compile_commands import project_of
    from opwright.build.request import make_request
    from opwright.build.store import Store
    from opwright.dispatch import kernels

    request = make_request(kernels.unit_of(keys[0]), [key[1] for key in keys])
    written = write_compile_commands(request, None, Store())
    sources = [source.path for found in request.sources.values() for source in found if source.path]
    if sources and not written:
        project = project_of(sources[0])
        raise TargetError(
            target or str(Path.cwd()),
            f"`{request.subject}` gets no compile_commands.json",
            rows=[("source", str(sources[0])), ("project", str(project or "none"))],
            hint="look into `build/compile_commands.json` there: it cannot be written, or is not a list"
            if project
            else "a `pyproject.toml` or `git init` makes a project of a folder",
        )
    return written


def _build(keys: tuple[tuple, ...]) -> tuple[Library, bool] | None:
    """Builds one library, if there is anything to build; without nvcc, the part of it that needs none."""
    from opwright import settings
    from opwright.backends.protocol import CompiledBackend
    from opwright.backends.registry import backend_of_device
    from opwright.dispatch import kernels
    from opwright.dispatch.launched import Launched

    try:
        library, has_compiled = kernels.build(*keys)
    except NoNvccError as error:
        if settings.require_kernels() or settings.architectures():
            raise
        say(f"skipped the CUDA kernels of {error.subject}: {error.rule}; hint: {error.hint}")
        backends = {key: backend_of_device(key[1]) for key in keys}
        others = [key for key, b in backends.items() if not (isinstance(b, CompiledBackend) and b.has_own_compiler)]
        if not others:
            return None
        library, has_compiled = kernels.build(*others)
    return None if isinstance(library, Launched) else (library, has_compiled)
