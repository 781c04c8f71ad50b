"""What is to be built: a unit's sources, what is generated for them, and the address of the build in the store."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from opwright.backends.protocol import CompiledBackend
from opwright.backends.registry import all_backends
from opwright.backends.toolchain import GLUE_FLAGS, INCLUDE_VARIABLES, LINK_FLAGS, headers_digest
from opwright.build.glue import backend_of, glue_text, header_text, kernel_signature
from opwright.build.store import Store, digest_of
from opwright.contract.declaration import Declaration
from opwright.contract.sources import Source

_FORMAT = 2  # changes when the layout of a library changes
# An include that depends on where the source lies, or whose name cannot be read off it.
_INCLUDES_BESIDE = re.compile(r"^\s*#\s*(include|include_next|embed)\b\s*[^\s<]|__has_include", re.MULTILINE)


@dataclass
class Request:
    """What is to be built, and its address in the store.

    Attributes:
        unit: the operators of the library.
        backends: the types of device whose kernels it holds.
        sources: the sources for each of them.
        texts: their contents, which a build of the request is made from.
        translations: the C++ that is compiled in place of a source.
        glue, headers: generated from the contracts; a header for each type of device.
        flags: of the compiler for each of them.
        has_own_runtime: the glue brings what all operators share, as a probe does.
    """

    unit: tuple[Declaration, ...]
    backends: tuple[str, ...]
    sources: dict[str, tuple[Source, ...]]
    texts: dict[Source, str]
    translations: dict[Source, str]
    glue: str
    headers: dict[str, str]
    flags: dict[str, tuple[str, ...]]
    has_own_runtime: bool = False
    key: str = field(init=False)

    def __post_init__(self) -> None:
        parts = [f"format {_FORMAT}", headers_digest(), *GLUE_FLAGS, *LINK_FLAGS, self.glue, *self.texts.values()]
        for device in self.backends:
            parts += [device, *self.flags[device], self.headers[device]]
        for device in self.backends:
            parts += backend_of(self.unit, device).describe_machine()
        for source, text in self.texts.items():
            if source.path and _INCLUDES_BESIDE.search(text):  # the same text elsewhere may include another file
                parts.append(str(source.path.parent))
        parts += [f"{name}={os.environ[name]}" for name in INCLUDE_VARIABLES if os.environ.get(name)]
        for backend, sources in self.languages.items():
            generated = [self.translations[source] for source in sources if source in self.translations]
            parts += backend.describe_surroundings(generated)
        self.key = digest_of("\0".join(parts).encode())[:40]

    @property
    def languages(self) -> dict[CompiledBackend, list[Source]]:
        """The backends that the sources are written for, with their sources."""
        found: dict[CompiledBackend, list[Source]] = {}
        for sources in self.sources.values():
            for source in sources:
                found.setdefault(all_backends()[source.backend], []).append(source)
        return found

    @property
    def compiled_files(self) -> set[Path]:
        """The sources that compilers read from where the author keeps them."""
        return {source.path for source in self.texts if source.path and source not in self.translations}

    @property
    def subject(self) -> str:
        """The operator that errors are about."""
        return next((d.name for d in self.unit if d.forward is None), self.unit[0].name)

    def known_architectures(self) -> list[str]:
        """Returns the architectures that its compilers know."""
        identities = Store().identities
        return [name for backend in self.languages for name in backend.known_architectures(identities)]


def make_request(
    unit: Sequence[Declaration], backends: Sequence[str], texts: Mapping[Source, str] | None = None
) -> Request:
    """Returns the request for the kernels of a unit.

    Args:
        backends: the types of device.
        texts: those of the sources; by default as they are now.
    """
    sources = {b: tuple(dict.fromkeys(d.sources[b] for d in unit if b in d.sources)) for b in backends}
    texts = {s: texts[s] if texts else s.read() for found in sources.values() for s in found}
    return Request(
        unit=tuple(unit),
        backends=tuple(backends),
        sources=sources,
        texts=texts,
        translations={s: _translate(s, t, unit) for s, t in texts.items() if _is_translated(s)},
        glue=glue_text(unit, backends),
        headers={backend: header_text(unit, backend) for backend in backends},
        flags={backend: backend_of(unit, backend).flags() for backend in backends},
    )


def renew(request: Request) -> Request:
    """Returns the request for the same kernels, from the sources as they are now."""
    texts = {source: source.read() for source in request.texts}
    if texts == request.texts:
        return request
    translations = {source: _translate(source, texts[source], request.unit) for source in request.translations}
    return replace(request, texts=texts, translations=translations)


def _is_translated(source: Source) -> bool:
    return not all_backends()[source.backend].is_read_in_place


def _translate(source: Source, text: str, unit: Sequence[Declaration]) -> str:
    """Returns the C++ that is compiled in place of a source."""
    backend = all_backends()[source.backend]
    held = [d for d in unit if d.sources.get(backend.device_type) == source]
    return backend.translate(held, source, text, [kernel_signature(d, backend.device_type) for d in held])
