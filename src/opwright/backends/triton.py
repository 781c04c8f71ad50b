"""Kernels in Triton: `triton.py`, whose launch functions are translated to C++."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from opwright.backends.cuda import GpuBackend
from opwright.backends.protocol import CompileJob
from opwright.backends.toolchain import INCLUDE, NATIVE, Compiler, triton_digest
from opwright.contract.sources import Source
from opwright.errors import NoTritonError

if TYPE_CHECKING:
    from opwright.contract.declaration import Declaration

_RUNTIME = NATIVE / "src" / "triton"
_RUNTIME_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden")


class TritonBackend(GpuBackend):
    """Triton, launched by C++ that is translated from the file and linked with a runtime."""

    name = "triton"
    file_name = "triton.py"
    comments = "#.*"
    is_read_in_place = False

    def find_obstacle(self, source: Source, subject: str) -> NoTritonError | None:
        """Returns an error where there is neither Triton nor a pack of kernels."""
        from opwright.triton.host import can_obtain_kernels

        pack = source.path.with_suffix(".opk") if source.path else None
        if can_obtain_kernels() or (pack and pack.exists()):
            return None
        return NoTritonError(
            subject,
            "there is no Triton to compile its kernel with",
            rows=[("source", source.origin)],
            hint="`pip install triton`, or `OPWRIGHT_TRITON=python=/path/to/venv/bin/python`",
        )

    def launch_functions(self, source: Source, subject: str) -> Collection[str]:
        """Returns the launch functions: a wheel has the file, and Triton launches its kernels."""
        from opwright.triton.launch_file import read_launch_file

        return read_launch_file(subject, source.origin, source.read()).functions.keys()

    def describe_surroundings(self, generated: Sequence[str]) -> list[str]:
        """Returns the runtime, and the launch functions as they were translated."""
        return [triton_digest(), *_RUNTIME_FLAGS, *generated]

    def translate(self, unit: Sequence[Declaration], source: Source, text: str, signatures: Sequence[str]) -> str:
        """Returns the C++ of the launch functions."""
        from opwright.triton.launch_file import read_launch_file
        from opwright.triton.translate import translate

        file = read_launch_file(unit[0].name, source.origin, text)
        return translate(file, [declaration.contract for declaration in unit], signatures)

    def make_command(self, job: CompileJob, part: str = "") -> list[str]:
        """Returns the command that compiles the launch functions."""
        return [
            job.compiler.path, *_RUNTIME_FLAGS, "-I", str(INCLUDE), "-include", job.header,
            "-c", str(job.path), "-o", f"{job.stem}.o",
        ]  # fmt: skip

    def make_runtime_commands(self, compiler: Compiler) -> Mapping[str, list[str]]:
        """Returns the commands that compile the runtime."""
        worker = NATIVE.parent / "triton"
        return {
            f"Triton runtime: {path.stem}": [
                compiler.path, *_RUNTIME_FLAGS, "-I", str(INCLUDE), f'-DOPWRIGHT_TRITON_WORKER_DIR="{worker}"',
                "-c", str(path), "-o", f"triton_{path.stem}.o",
            ]
            for path in sorted(_RUNTIME.glob("*.cpp"))
        }  # fmt: skip

    def runtime_objects(self) -> tuple[str, ...]:
        """Returns the objects of the runtime."""
        return tuple(f"triton_{path.stem}.o" for path in sorted(_RUNTIME.glob("*.cpp")))

    def describe_runtime(self, compiler: Compiler) -> list[str]:
        """Returns what the runtime depends on."""
        return [compiler.identity, triton_digest(), str(_RUNTIME), *_RUNTIME_FLAGS]

    def link_flags(self, tool: None) -> list[str]:
        """Returns what the runtime needs of the system."""
        return ["-ldl", "-pthread"]


BACKEND = TritonBackend()
