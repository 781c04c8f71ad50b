"""Kernels in C++ for the CPU: `cpu.cpp`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from opwright import settings
from opwright.backends.flag_paths import absolute
from opwright.backends.protocol import CompiledBackend, CompileJob, WheelPart
from opwright.backends.toolchain import INCLUDE, KERNEL_FLAGS, machine_identity
from opwright.contract.sources import Source

# What kernels are compiled for, from the oldest to the newest: the first fits every machine.
LEVELS = {
    "x86_64": {
        "v2": ("-march=x86-64-v2",),
        "v3": ("-march=x86-64-v3",),
        "v4": ("-march=x86-64-v4",),
        "v4bf16": ("-march=x86-64-v4", "-mavx512bf16"),
        "v4amx": ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    },
    "aarch64": {"base": ("-march=armv8-a",)},
}
# Levels that only sources have which name such a macro; the others' kernels are those of the first of these levels that
# has them.
SPECIAL_LEVELS = {
    "v4bf16": (("v4",), re.compile("__AVX512BF16__|__AMX_")),
    "v4amx": (("v4bf16", "v4"), re.compile("__AMX_")),
}


def variant_of(level: str) -> str:
    """Returns the name of the set of kernels for a level: "cpu_v3"."""
    return f"cpu_{level}"


class CpuBackend(CompiledBackend):
    """C++, compiled for the CPU of this machine."""

    name = "cpu"
    file_name = "cpu.cpp"
    device_type = "cpu"
    devices = "CPUs"

    def flags(self) -> tuple[str, ...]:
        """Returns the flag policy and OPWRIGHT_CXXFLAGS, with its paths from here, as compilers run elsewhere."""
        own = settings.cxxflags()
        return (*KERNEL_FLAGS, *(absolute(own, os.getcwd()) if own else ()))

    def describe_machine(self) -> list[str]:
        """Returns what `-march=native` depends on."""
        return [machine_identity()]

    def make_command(self, job: CompileJob, part: str = "") -> list[str]:
        """Returns the command that compiles a source."""
        return [
            job.compiler.path, *job.flags, "-I", str(INCLUDE), "-include", job.header,
            "-MD", "-MF", f"{job.stem}.d", "-c", str(job.path), "-o", f"{job.stem}.o",
        ]  # fmt: skip

    def wheel_parts(
        self, source: Source, levels: Mapping[str, Sequence[str]], architectures: Sequence[str]
    ) -> list[WheelPart]:
        """Returns a part for each level; special ones only of sources that ask for them."""
        text = source.with_headers(source.read())
        return [
            WheelPart(variant_of(level), "", self.wheel_flags(flags, architectures, None))
            for level, flags in levels.items()
            if level not in SPECIAL_LEVELS
            or SPECIAL_LEVELS[level][1].search(text)
            or SPECIAL_LEVELS[level][0][-1] not in levels
        ]

    def wheel_flags(self, level: Sequence[str], architectures: Sequence[str], tool: None) -> tuple[str, ...]:
        """Returns the flags for a level."""
        fixed = [f for f in KERNEL_FLAGS if not f.startswith(("-march", "-mcpu", "-ffile-prefix-map"))]
        # Else static variables of inline functions are shared with those compiled for other levels.
        return (*level, *fixed, "-fno-gnu-unique", "-DOPWRIGHT_OLD_GLIBC")

    def make_wheel_command(self, job: CompileJob, part: str, prefix_maps: Sequence[str]) -> list[str]:
        """Returns the command that compiles a source for a level."""
        return [
            job.compiler.path, *job.flags, *prefix_maps, "-I", str(INCLUDE), "-include", job.header,
            "-c", str(job.path), "-o", f"{job.stem}.o",
        ]  # fmt: skip


BACKEND = CpuBackend()
