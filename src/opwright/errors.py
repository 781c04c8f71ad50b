"""Every error that a user of Opwright can meet.

The docstring of a class is what `opwright explain CODE` prints. The first digit of a code tells the kind: 0 a
declaration that cannot be honoured, 1 a call that breaks its contract, 2 a kernel that cannot be built, be loaded or
finish, 3 `opwright.verify`, `bench` and the commands. This module imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence


class OpwrightError(Exception):
    """An error that has no entry of its own: its message says what is wrong and what to do.

    All errors of Opwright derive from it (`except opwright.errors.OpwrightError`).
    """

    code = "OPW000"

    def __init__(
        self,
        subject: str,
        rule: str,
        *,
        rows: Sequence[tuple[str, ...]] = (),
        body: str = "",
        hint: str = "",
    ) -> None:
        self.subject, self.rule, self.rows, self.body, self.hint = subject, rule, rows, body, hint
        super().__init__(self._text())

    def _text(self) -> str:
        head = f"`{self.subject}`: {self.rule}" if self.subject else self.rule
        parts = [f"{head}   [{self.code}]"]
        if self.rows:
            parts.append("\n".join("  " + line for line in align(self.rows)))
        if self.body:
            parts.append("\n".join("  " + line if line else "" for line in self.body.splitlines()))
        if self.hint:
            parts.append(f"hint: {self.hint}")
        return "\n\n".join(parts)

    def __reduce__(self):
        return (_rebuild, (type(self), self.subject, self.rule, self.rows, self.body, self.hint))


def _rebuild(cls, subject, rule, rows, body, hint):
    return cls(subject, rule, rows=rows, body=body, hint=hint)


def align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Pads the columns of `rows` to equal width; the last column of a row is left as it is."""
    count = max(map(len, rows))
    widths = [max((len(row[i]) for row in rows if len(row) > i + 1), default=0) for i in range(count)]
    return ["  ".join([cell.ljust(widths[i]) for i, cell in enumerate(row[:-1])] + [row[-1]]).rstrip() for row in rows]


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Writes a count and what is counted: `1 case`, `1,412 cases`."""
    return f"{count:,} {noun if count == 1 else nouns or f'{noun}s'}"


# --- declarations -----------------------------------------------------------------------------------


class DeclarationError(OpwrightError, TypeError):
    """A declaration cannot be honoured. Raised at the declaration, before anything is registered."""


class AnnotationError(DeclarationError):
    """A parameter or the result has no annotation, or one that no schema can express.

    The annotations of the reference are the operator's contract. Tensors are written in jaxtyping's
    syntax, `Float[Tensor, "*batch n"]`, alone, as `... | None`, as `list[...]` or as
    `Mutates[...]`; numbers as `int`, `float`, `bool`; choices as `Literal["a", "b"]`. The result is a
    tensor annotation, a tuple of them, or None for an operator that only mutates.
    """

    code = "OPW001"


class AxisError(DeclarationError):
    """An axis of the contract cannot be read, or the size of an output axis does not follow.

    Axes are separated by spaces: a name (`n`), a number (`3`), one variadic axis (`*batch`), or an
    expression of named axes and int arguments (`4*h`, `t-k+1`). Every axis of an output must follow
    from the inputs. Sizes that only the data know must be declared: see OPW004.
    """

    code = "OPW002"


class RandomnessError(DeclarationError):
    """The reference draws random numbers, and the declaration does not say so.

    A random operator cannot be compared element by element, cached or recomputed like others, so
    PyTorch has to know. Declare it with `random=True`, or take the randomness as an input tensor.
    """

    code = "OPW003"


class DataDependentShapeError(DeclarationError):
    """The size of an output depends on the values of the inputs, and the declaration does not say so.

    torch.compile and torch.export have to treat such a size as unknown. Declare the axis with
    `data_dependent=["k"]`. Kernels get their outputs allocated, so such an operator runs its
    reference on every backend.
    """

    code = "OPW004"


class ReferenceError(DeclarationError):
    """The reference does not return what its contract promises.

    At the declaration the reference is run on tensors of a few elements, each axis of another size, and the result's
    count, shapes and dtypes are compared. If it raises, and takes the same tensors where two axes are equal, these are
    one axis under two names. So are two variadic axes, such as `*batch` and `*b`, if it takes no other sizes for one
    of them alone.
    """

    code = "OPW005"


class UndeclaredMutationError(DeclarationError):
    """The reference writes into an argument that is not declared as mutated.

    PyTorch reorders and removes calls of operators that are declared as functional. Annotate the
    argument as `Mutates[Float[Tensor, "n"]]`, or write into a copy.
    """

    code = "OPW006"


class NameTakenError(DeclarationError):
    """Another operator already has this name.

    Declaring an operator again from the same file or module replaces it (a notebook cell, a reload).
    Declaring the same name from elsewhere, or with another function of the same file, is refused, because one of the
    two would be silently lost. So is a namespace in which PyTorch has operators, such as `aten` or `prims`.
    """

    code = "OPW007"


class KernelFileError(DeclarationError):
    """A kernel was named in the declaration, and the file does not exist.

    The path is relative to the file of the declaration. A kernel may also be its source, a text of several lines.
    """

    code = "OPW008"


class BackwardError(DeclarationError):
    """The backward's parameters do not fit its operator.

    A backward takes the gradient of each output (`grad_output`; `grad_output0`, `grad_output1`, ...
    when there are several), then whichever inputs, outputs and options it needs, by their names, and
    returns one gradient for each floating-point tensor input, in order.
    """

    code = "OPW009"


# --- calls --------------------------------------------------------------------------------------------


class ContractError(OpwrightError):
    """An argument of a call breaks the operator's contract. Nothing was computed."""


class NotATensorError(ContractError, TypeError):
    """An argument is not a tensor where one is expected, or it is a sparse or a nested tensor.

    `torch.as_tensor(...)` makes one of a number, a list or an array, and `x.to_dense()` of a sparse tensor.
    """

    code = "OPW101"


class RankError(ContractError, ValueError):
    """A tensor has too few or too many dimensions.

    The annotation says how many there are; `*batch n` takes any number in front of the last. `x.unsqueeze(0)` and
    `x.flatten(0, 1)` change the number.
    """

    code = "OPW102"


class DtypeError(ContractError, TypeError):
    """A tensor has a dtype outside its family, or tensors of one family differ in dtype.

    All tensors annotated with the same family (`Float`, `Int`, ...) share one dtype in a call. Under
    autocast, operators with the policy "promote" (the default) or "lower" convert by themselves.
    """

    code = "OPW103"


class ShapeError(ContractError, ValueError):
    """Two axes with one name have different sizes, or an axis does not have the size that the contract says."""

    code = "OPW104"


class DeviceError(ContractError, ValueError):
    """The tensors of one call are on different devices.

    `x.to(weight.device)` moves one.
    """

    code = "OPW105"


class OptionError(ContractError, ValueError):
    """An option has a value outside its `Literal[...]`."""

    code = "OPW106"


class OptionTypeError(ContractError, TypeError):
    """An option has the wrong type, such as a string where the declaration says `float`, or does not fit in 64 bits.

    A tensor of one element is taken as a number, and gets no gradient. For a gradient, declare a tensor without axes:
    `Float[Tensor, ""]`.
    """

    code = "OPW110"


class OutError(ContractError, ValueError):
    """`out=` differs from the result in number, type, shape, dtype or device, shares memory, or takes part in autograd.

    A tensor of `out=` may have any strides, and may lie on an argument: the kernel then writes into memory
    of its own, and the result is copied. Its own elements must not share memory, as those of an expanded
    tensor do, and neither must two tensors of `out=`.
    """

    code = "OPW107"


class NotDifferentiableError(ContractError, RuntimeError):
    """A gradient was asked of an operator that has none, as one that mutates its arguments.

    Call it under `torch.no_grad()`, or with `x.detach()`.
    """

    code = "OPW108"


class OverlapError(ContractError, ValueError):
    """An argument that the operator writes into shares memory with another argument.

    The result would depend on the order in which the kernel reads and writes. Tensors that lie between
    each other without a common element, such as two columns of one matrix, are accepted.
    """

    code = "OPW109"


class ShardingError(ContractError, RuntimeError):
    """An operator cannot run on these distributed tensors (`torch.distributed.tensor.DTensor`).

    All tensors of a call are distributed on one mesh. Arguments that are only read are moved as a rule wants them;
    one that the operator writes into stays where it is, so a rule must take it as it is. Operators that draw random
    numbers, and those whose results have sizes that depend on data, run on local tensors alone.
    """

    code = "OPW111"


# --- builds ---------------------------------------------------------------------------------------------


class BuildError(OpwrightError, RuntimeError):
    """A kernel cannot be built or loaded."""


class NoCompilerError(BuildError):
    """No C++ compiler was found, and kernels are required.

    Without OPWRIGHT_REQUIRE_KERNELS=1 the reference runs instead, with one warning. On Debian and
    Ubuntu: `apt-get install g++`. Another compiler: `OPWRIGHT_CXX=/path/to/c++`.
    """

    code = "OPW201"
    missing = "C++ compiler"  # in the warning


class CompileError(BuildError):
    """A kernel does not compile. The first error is shown at the author's own line; the log has all.

    `opwright inspect TARGET` prints the signature that the kernel must have. Without the file, the reference runs.
    """

    code = "OPW202"


class ExtensionError(BuildError, ValueError):
    """An argument of `opwright.cpp_extension` is invalid: a name that is not an identifier, a missing source."""

    code = "OPW211"


class KernelError(OpwrightError, RuntimeError):
    """A kernel gave up while running, through `opwright::check` or an exception of its own.

    The message is the kernel's: it says which input it does not take.
    """

    code = "OPW203"


class DeviceFaultError(KernelError):
    """A kernel faulted on the GPU: it read or wrote an address that is not its own, or trapped.

    Kernels run after their call has returned, so a fault shows at a later call. `CUDA_LAUNCH_BLOCKING=1`
    makes it show at the call that caused it, and `compute-sanitizer python program.py` names the line.
    After an illegal address CUDA refuses all further work on the device until the process ends.
    """

    code = "OPW210"


class OutOfBoundsError(KernelError, IndexError):
    """An operator was given an index outside of its dimension.

    It was found by `opwright::check_index` in the kernel, by PyTorch in the reference, or by another check in the
    kernel where the reference raises an IndexError for the same arguments. The message names the index or the arguments.
    """

    code = "OPW213"


class StoreError(BuildError):
    """The cache of builds cannot be written: a read-only or full disk, or missing permission.

    Name another directory with OPWRIGHT_CACHE_DIR, or free space with `opwright cache prune`. Compilers also write
    temporary files, into /tmp or where TMPDIR says.
    """

    code = "OPW204"


class StoreOwnerError(BuildError):
    """The cache belongs to another user, or others may write to it.

    Libraries in the cache are loaded into the process, so a cache that others can write to is a way
    to run their code. Use a directory of your own (OPWRIGHT_CACHE_DIR) or `chmod 700` it.
    """

    code = "OPW205"


class LoadError(BuildError, ImportError):
    """A built library cannot be loaded.

    `opwright doctor FILE.so` says why, for example that another library is missing.
    """

    code = "OPW206"


class NoNvccError(NoCompilerError):
    """No CUDA compiler was found, and kernels are required; or the one that was named is not there.

    nvcc is looked for under CUDA_HOME, on PATH, under /usr/local/cuda and among Python's packages.
    Without OPWRIGHT_REQUIRE_KERNELS=1 the reference runs on CUDA instead, with one warning. From PyPI:
    `pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-crt nvidia-nvvm`.
    """

    code = "OPW207"
    missing = "CUDA compiler (nvcc)"


class NoTritonError(NoCompilerError):
    """An operator's GPU kernel is a Triton kernel, and there is no Triton to compile it with.

    `pip install triton`, or name another Python that has it in OPWRIGHT_TRITON (`python=/path/to/venv/bin/python`),
    or a pack (`pack=kernels.opk`). Until then the operator runs its PyTorch reference.
    """

    code = "OPW212"
    missing = "Triton"


class HostCompilerError(BuildError):
    """nvcc refuses every C++ compiler of this machine, as too new or too old.

    nvcc compiles the host half of a source with a C++ compiler, and each release knows which versions
    it works with. The preferred one is that of OPWRIGHT_CXX; when it is refused, every `g++-N` and
    `clang++-N` on PATH is tried. `apt-get install g++-13` installs one more beside the system's own.
    """

    code = "OPW208"


class ArchitectureError(BuildError):
    """The compiler, the library or the driver does not know this GPU's architecture.

    A library holds machine code for the architectures that it was built for and PTX of the newest, which
    the driver compiles for newer GPUs. Name others with OPWRIGHT_ARCH (`OPWRIGHT_ARCH=80,90`). nvcc
    knows what `nvcc --list-gpu-arch` lists; a newer one is on PyPI (`pip install -U nvidia-cuda-nvcc`).
    A driver that is older than the toolkit cannot compile its PTX: name the GPU's own architecture.
    """

    code = "OPW209"


# --- verify, bench, commands --------------------------------------------------------------------------


class CheckError(OpwrightError):
    """verify, bench or a command cannot do what was asked."""


class NotVerifiedError(CheckError):
    """An operator was not measured, or not to the end. The message says why.

    It is wrong: `opwright verify TARGET` shows on which input; a wrong kernel has no speed. It crashed, ended the
    process or did not return within `--timeout` seconds. Or an input did not fit in memory: `--axis` chooses smaller
    sizes, as `--axis n=256,1024`.
    """

    code = "OPW301"


class TargetError(CheckError):
    """The TARGET of a command names no operator.

    A TARGET is an importable module (`opwright_ops`, `opwright_ops.bias_gelu`), a file (`./op.py`), or
    either with `::name` for one operator of it.
    """

    code = "OPW302"


class SettingError(CheckError, ValueError):
    """An environment variable or a flag has a value that it cannot have.

    The message says which, and what it can be. `opwright COMMAND --help` lists the flags.
    """

    code = "OPW303"


class RecordError(CheckError):
    """A record is damaged, was written by a newer version of Opwright, or cannot be written.

    `opwright verify --out` and `opwright bench --out` write a new one.
    """

    code = "OPW304"


class ManifestError(CheckError, ValueError):
    """A manifest of Triton kernels cannot be read, or an entry of it names what is not there.

    A manifest is JSON: `{"kernels": [...]}`, one line for each key of a kernel, with `file` (relative to the manifest),
    `function`, `args` (a class for each parameter: `"*fp32:16"`, `"i32"`, `"=1024"`) and, if any are given, `options`
    (`{"num_warps": 8}`). `opwright pack record -- COMMAND` writes one from what a program launches.
    """

    code = "OPW305"


class PackFileError(CheckError, ValueError):
    """A file is not a pack of kernels, or is damaged.

    Everything in a pack has a digest, and nothing that does not fit its digest is used. `opwright pack verify PACK` lists
    what is wrong; `opwright pack build MANIFEST --out PACK` writes it again.
    """

    code = "OPW306"


class PackBuildError(CheckError):
    """A pack cannot be built: an architecture or Triton is missing, or the file cannot be written.

    No GPU is needed, but a Python with Triton 3.5 to 3.9: the one that Opwright runs in, else that of VIRTUAL_ENV, else
    python3. `--python PY` names others, one for each version of Triton that the pack is to hold.
    """

    code = "OPW307"


class RecordingError(CheckError):
    """The command whose kernels were to be recorded cannot be run.

    Try it without `opwright pack record` first.
    """

    code = "OPW308"


class TuneError(CheckError):
    """The configurations of a kernel under `@triton.autotune` cannot be measured.

    That needs a GPU of an architecture that the pack has, a Python with torch and Triton (`--python PY`), and for each
    kernel arguments to call it with: `"tune": [{"arguments": {...}}]` in its line of the manifest.
    """

    code = "OPW309"


class PackageError(CheckError):
    """A wheel cannot be made of a package of operators, or an installed one cannot be used.

    `opwright wheel` builds the wheel of the project in this folder, with neither torch nor a GPU: the modules of the
    package are imported with a stand-in for torch, to read what they declare. All operators of a wheel have one
    namespace. An installed wheel says which torch and which machine it was built for; `opwright wheel --check FILE`
    prints it.
    """

    code = "OPW310"


def all_errors() -> dict[str, type[OpwrightError]]:
    """Returns every error that has a code, by its code."""
    found: dict[str, type[OpwrightError]] = {}
    pending: list[type[OpwrightError]] = [OpwrightError]
    while pending:
        cls = pending.pop()
        if "code" in vars(cls):
            found[cls.code] = cls
        pending.extend(cls.__subclasses__())
    return dict(sorted(found.items()))
