"""What a backend is: one language of kernels for one type of device.

A backend is an object that the registry finds. Nothing else in the toolkit knows one by its name. There are two kinds:
the kernels of a `CompiledBackend` become part of the C++ library of their operators; a `LaunchedBackend` launches its
kernels from Python, on outputs that the operator has allocated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from opwright.backends.toolchain import Compiler
from opwright.contract.sources import Source
from opwright.errors import NoCompilerError

if TYPE_CHECKING:  # `opwright doctor` looks for compilers without torch
    from opwright.contract.contract import Contract
    from opwright.contract.declaration import Declaration


class Backend(ABC):
    """One language of kernels for one type of device.

    Attributes:
        name: what the declaration and the kernel's file call it: "cuda".
        file_name: the kernel's file next to a declaration: "cuda.cu". Its ending tells the languages of a device apart.
        device_type: PyTorch's type of the device that the kernels run on.
        devices: such devices, in words, in the plural.
        is_gpu: whether a call returns before its kernel has run, and a device may be absent.
        comments: a regular expression of the language's comments.
    """

    name: str
    file_name: str
    device_type: str
    devices: str
    is_gpu: bool = False
    comments: str = r"//.*|/\*[\s\S]*?\*/"

    @property
    def dispatch_key(self) -> str:
        """The dispatcher's key of its device."""
        return self.device_type.upper()

    def is_in_torch(self) -> bool:
        """Returns whether this build of PyTorch can have tensors on its device."""
        return True

    def is_device_here(self) -> bool:
        """Returns whether PyTorch finds one of its devices here."""
        return True

    def count_devices(self) -> int:
        """Returns how many of its devices there are here."""
        return 1

    def find_obstacle(self, source: Source, subject: str) -> NoCompilerError | None:
        """Returns why no kernel can be made here, whatever its text; None where one can."""
        return None

    def find_refusal(self, contract: Contract, dtype: Any = None) -> str:
        """Returns why its kernels cannot take an operator at all, or not in a dtype; "" where they can.

        An operator with a kernel that cannot take it is an error. In a dtype that is refused, the reference runs.
        A library of compiled kernels knows its dtypes itself.
        """
        return ""

    def launch_functions(self, source: Source, subject: str) -> Collection[str]:
        """Returns the functions of a source that Python calls in a wheel; none where wheels hold compiled kernels.

        Args:
            source: the text of the kernels.
            subject: an operator, for messages.
        """
        return ()


class LaunchedLibrary(Protocol):
    """Kernels of operators, launched from Python."""

    def launch(self, declaration: Declaration, values: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Runs an operator's kernel with checked arguments, in schema order, into outputs that are not empty."""


class LaunchedBackend(Backend):
    """A backend whose kernels are launched from Python."""

    def find_refusal(self, contract: Contract, dtype: Any = None) -> str:
        """Returns why its kernels cannot take an operator: outputs are allocated before a launch."""
        return "the sizes of its outputs are known from the data only" if contract.data_dependent else ""

    @abstractmethod
    def load(self, unit: Sequence[Declaration], source: Source) -> LaunchedLibrary:
        """Compiles and loads the kernels of the operators that share a source.

        Raises:
            BuildError: they cannot be built.
        """


class Tool(Protocol):
    """A compiler: `identity` changes when it is updated."""

    identity: str


class CompileJob(NamedTuple):
    """One source to be compiled, in a folder that has the header of its contract.

    Attributes:
        path: the file to compile.
        header: the file to include first.
        stem: the object is `<stem>.o`, what was read is noted in `<stem>.d`.
        flags: of the backend.
        tool: the backend's own compiler.
        compiler: the C++ compiler.
        identities: a directory in which answers of compilers are remembered.
    """

    path: Path
    header: str
    stem: str
    flags: tuple[str, ...]
    tool: Any
    compiler: Compiler
    identities: Path


class WheelPart(NamedTuple):
    """A compile of a source for a wheel: the set of kernels that it belongs to, its name among those, its flags."""

    variant: str
    name: str
    flags: tuple[str, ...]


class CompiledBackend(Backend):
    """A backend whose kernels are compiled into the library of their operators.

    Attributes:
        stream: the C++ type of the stream that a kernel gets behind its outputs; "" for none.
        prelude: lines of the contract's header, before everything that names the stream's type.
        after_launch: C++ behind the call of a kernel.
        has_own_compiler: whether its sources need another than the C++ compiler, which every library needs.
        is_read_in_place: whether a compiler reads the author's file; else it is translated to C++ before.
    """

    stream: str = ""
    prelude: tuple[str, ...] = ()
    after_launch: str = ""
    has_own_compiler: bool = False
    is_read_in_place: bool = True

    @property
    def suffix(self) -> str:
        """The ending of its sources."""
        return Path(self.file_name).suffix

    # --- the address of a build --------------------------------------------------------------------------

    @abstractmethod
    def flags(self) -> tuple[str, ...]:
        """Returns the flags of its compiler, which are part of the address of a build."""

    def describe_machine(self) -> list[str]:
        """Returns what else its code depends on in this machine."""
        return []

    def describe_surroundings(self, generated: Sequence[str]) -> list[str]:
        """Returns what else goes into the address of a build with a kernel of its own.

        Args:
            generated: what it translated the sources to.
        """
        return []

    # --- compiling ---------------------------------------------------------------------------------------

    def find_compiler(self, identities: Path) -> Tool | None:
        """Returns its own compiler; None where it is not to be found here."""
        return None

    def make_compiler_error(self, subject: str) -> NoCompilerError:
        """Returns the error for its own compiler not being here."""
        raise NotImplementedError

    def translate(self, unit: Sequence[Declaration], source: Source, text: str, signatures: Sequence[str]) -> str:
        """Returns the C++ that is compiled in place of a source which no compiler reads.

        Args:
            unit: the operators of the library that have the source.
            signatures: what their kernels must be declared as.
        """
        raise NotImplementedError

    def exports_kernels(self, text: str) -> bool:
        """Returns whether a source exports a kernel at all."""
        return "OPWRIGHT_KERNEL(" in text

    def split(self, text: str) -> tuple[str, ...]:
        """Returns the parts that a source is compiled in, by its text with its headers; "" is the whole."""
        return ("",)

    @abstractmethod
    def make_command(self, job: CompileJob, part: str = "") -> list[str]:
        """Returns the command that compiles a source, or a part of it."""

    def repair(self, output: str, tool: Any, compiler: Compiler, identities: Path, subject: str) -> bool:
        """Returns whether something was changed, so that commands that failed with this output may work now."""
        return False

    def known_architectures(self, identities: Path) -> list[str]:
        """Returns the architectures that its compiler can be asked to compile for."""
        return []

    # --- linking -----------------------------------------------------------------------------------------

    def make_runtime_commands(self, compiler: Compiler) -> Mapping[str, list[str]]:
        """Returns the commands that make what all libraries with its kernels are linked with."""
        return {}

    def runtime_objects(self) -> tuple[str, ...]:
        """Returns the files that these commands make."""
        return ()

    def describe_runtime(self, compiler: Compiler) -> list[str]:
        """Returns what these files depend on."""
        return []

    def link_flags(self, tool: Any) -> list[str]:
        """Returns the linker's flags for a library with its kernels."""
        return []

    def system_folders(self, tool: Any, compiler: Compiler, identities: Path) -> list[Path]:
        """Returns the folders whose headers need no digests of their own."""
        return []

    # --- wheels ------------------------------------------------------------------------------------------

    def wheel_parts(
        self, source: Source, levels: Mapping[str, Sequence[str]], architectures: Sequence[str]
    ) -> list[WheelPart]:
        """Returns what is compiled of a source for a wheel; nothing where wheels cannot have such kernels.

        Args:
            levels: of CPUs, with their flags.
            architectures: of GPUs.
        """
        return []

    def wheel_flags(self, level: Sequence[str], architectures: Sequence[str], tool: Any) -> tuple[str, ...]:
        """Returns the flags of all parts of a wheel, for a level."""
        return ()

    def make_wheel_command(self, job: CompileJob, part: str, prefix_maps: Sequence[str]) -> list[str]:
        """Returns the command that compiles a part.

        Args:
            prefix_maps: the flags that keep paths of this machine out of it.
        """
        raise NotImplementedError
