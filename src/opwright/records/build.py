"""How a library was built."""

from __future__ import annotations

from dataclasses import dataclass

from opwright.records.machine import VERSION, Machine


@dataclass
class BuildStep:
    """One command of a build.

    Attributes:
        name: what it made, or which compiler ran.
        start: seconds from the beginning of the build.
    """

    name: str
    start: float
    seconds: float


@dataclass
class KernelUse:
    """The resources of one GPU kernel, as ptxas reports them.

    Attributes:
        kernel: its name, with template arguments.
        architecture: as "sm_90".
        registers: of a thread; at most 255.
        spill_bytes: stored to memory because registers ran out, for each thread.
        stack_bytes: of a thread.
        shared_bytes: of a block; dynamic shared memory is not known to the compiler.
    """

    kernel: str
    architecture: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass
class BuildRecord:
    """How the library of one operator, its backward included, was built.

    Attributes:
        operators: qualified names of all operators inside.
        compiler: identities of the compilers.
        library_bytes: size of the library.
        steps: in the order in which they began; empty where the build did not keep them.
        kernels: of the GPU; empty for a library without CUDA C++.
        built: when the library was built, which may be long before the record: seconds since 1970.
    """

    name: str
    operators: list[str]
    compiler: str
    library_bytes: int
    steps: list[BuildStep]
    kernels: list[KernelUse]
    machine: Machine
    built: float
    created: float
    seconds: float
    version: int = VERSION
