"""Finds the kernels of a declaration: the files next to it, or those that it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from opwright.backends.protocol import Backend
from opwright.backends.registry import all_backends, device_types
from opwright.contract.sources import Source
from opwright.errors import KernelFileError


def find_sources(subject: str, file: str, kernels: Mapping[str, str | Path | None]) -> dict[str, Source]:
    """Returns the sources of the kernels that a declaration in `file` names, or that lie next to it.

    They are given by backend, and by type of device: the one that runs there.

    Args:
        kernels: those that the declaration names, by backend.

    Raises:
        KernelFileError: one that is named does not exist.
    """
    folder = Path(file).parent
    found: dict[str, Source] = {}
    for name, backend in all_backends().items():
        given = kernels.get(name)
        if isinstance(given, str) and "\n" in given:
            line = _line_of(given, file)
            found[name] = Source(name, None, given, file if line else f"<{name} of {subject}>", line or 1)
            continue
        path = folder / (given or backend.file_name)
        if path.is_file():
            found[name] = Source(_language(backend, path).name, path.resolve(), None, str(path))
        elif given is not None:
            raise KernelFileError(
                subject,
                f"the {name} kernel does not exist",
                rows=[("expected", str(path))],
                hint="the path is relative to the declaring file; a source itself has a newline",
            )
    by_backend = dict(found)
    for device in device_types():
        there = [name for name in by_backend if all_backends()[name].device_type == device]
        if there:
            found[device] = by_backend[next((name for name in there if kernels.get(name)), there[0])]
    return found


def tell_where(file: str) -> str:
    """Returns where the kernels of a declaration in `file` are looked for."""
    *names, last = (backend.file_name for backend in all_backends().values())
    text = f"looked for: {', '.join(names)} and {last} beside {Path(file).name}"
    return "; ".join(filter(None, (text, tell_misnamed(file))))


def tell_misnamed(file: str) -> str:
    """Returns how a declaration in `file` names a source with kernels beside it that has another name, or ""."""
    files = {backend.file_name: backend for backend in all_backends().values()}
    for path in filter(Path.is_file, sorted(Path(file).parent.glob("*.*"))):
        backend = next((b for name, b in files.items() if path.suffix == Path(name).suffix != ".py"), None)
        if backend is not None and path.name not in files and "OPWRIGHT_KERNEL" in path.read_text(errors="replace"):
            return f'`{path.name}` there needs `{backend.name}="{path.name}"` in the declaration'
    return ""


def _language(backend: Backend, path: Path) -> Backend:
    """Returns the backend of the same device whose files end as this one, which the declaration gave to another."""
    if path.suffix == Path(backend.file_name).suffix:
        return backend
    others = (b for b in all_backends().values() if b.device_type == backend.device_type)
    return next((b for b in others if path.suffix == Path(b.file_name).suffix), backend)


def _line_of(text: str, file: str) -> int | None:
    """Returns the line of `file` on which an inline source starts, if it stands there literally."""
    try:
        at = Path(file).read_text().find(text)
        return Path(file).read_text()[:at].count("\n") + 1 if at >= 0 else None
    except (OSError, UnicodeDecodeError):
        return None
