"""Names that a package of operators cannot have."""

from __future__ import annotations

import keyword
import re
import sys

from opwright.errors import PackageError

# Namespaces of operators that PyTorch and its companions have.
_TAKEN = frozenset(
    "aten prim prims aten_native c10 torch quantized _quantized inductor _inductor_test fsdp c10d _c10d_functional "
    "_c10d_functional_autograd symm_mem higher_order mkl mkldnn onednn onnx profiler rngprims debugprims export "
    "streams sparse static_runtime tensorexpr torchvision image video torchaudio torchtext fbgemm xnnpack metal "
    "vulkan_prepack cudnn triton xla _test _nnapi nvprims opwright".split()
)


def check_name(name: str, subject: str) -> None:
    """Refuses an invalid name of a package and of its operators' namespace.

    Raises:
        PackageError: it is not an identifier, or another package has it.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or keyword.iskeyword(name):
        fitting = re.sub(r"\W+", "_", name).strip("_0123456789") or "my_ops"
        raise PackageError(
            subject, "this cannot be the name of a package", rows=[("got", repr(name))], hint=f"`{fitting}`"
        )
    if name.lower() in _TAKEN or name in sys.stdlib_module_names:
        whose = (
            "PyTorch has operators with this namespace"
            if name.lower() in _TAKEN
            else "Python has a module of this name"
        )
        raise PackageError(subject, whose, rows=[("got", repr(name))], hint=f"`{name}_ops`")
