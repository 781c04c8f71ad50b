"""Which compilers a request needs, and which of them are installed."""

from __future__ import annotations

from typing import NamedTuple

from opwright.backends.protocol import CompiledBackend, Tool
from opwright.backends.toolchain import Compiler, find_compiler
from opwright.build.request import Request
from opwright.build.store import Store


class Tools(NamedTuple):
    """The compilers that a request needs; None where there is none.

    Attributes:
        compiler: of C++, which all requests need.
        own: those of backends that have their own.
    """

    compiler: Compiler | None
    own: dict[CompiledBackend, Tool | None]

    @property
    def is_whole(self) -> bool:
        """Whether none is missing."""
        return self.compiler is not None and all(self.own.values())

    @property
    def identity(self) -> str | None:
        """What a build is recorded under; None when a tool is missing, so that any build will do."""
        return "; ".join(tool.identity for tool in (self.compiler, *self.own.values())) if self.is_whole else None


def find_tools(request: Request, store: Store) -> Tools:
    """Returns the compilers here that a request needs."""
    own = [backend for backend in request.languages if backend.has_own_compiler]
    return Tools(find_compiler(store.identities), {backend: backend.find_compiler(store.identities) for backend in own})
