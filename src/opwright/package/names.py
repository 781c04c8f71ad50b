"""Names that a package of operators, or an operator in it, cannot have."""

from __future__ import annotations

import keyword
import re
import sys

from opwright.contract.names import CPP_KEYWORDS, PYTORCH_NAMESPACES
from opwright.errors import PackageError

# Namespaces that are PyTorch's or its companions'.
_TAKEN = PYTORCH_NAMESPACES | frozenset(
    "aten_native c10 torch higher_order tensorexpr torchvision image video torchaudio torchtext fbgemm xnnpack metal "
    "vulkan_prepack cudnn xla _nnapi nvprims opwright".split()
)


def check_package_name(name: str, subject: str) -> None:
    """Refuses an invalid name of a package and of its operators' namespace.

    Raises:
        PackageError: it is not an identifier, or another package has it.
    """
    fault = _fault_of(name, "a package")
    if fault:
        raise PackageError(subject, fault, rows=[("got", repr(name))], hint=f"`{_fitting(name, '_ops')}`")


def check_operator_name(name: str, subject: str) -> None:
    """Refuses an invalid name of an operator: its module and its C++ function have the same name.

    Raises:
        PackageError: it is not an identifier of Python and of C++, or another package has it.
    """
    fault = "C++ has a keyword of this name" if name in CPP_KEYWORDS else ""
    fault = _fault_of(name, "an operator") or fault
    if fault:
        package, slash, _ = subject.rpartition("/")
        hint = f"`{package}{slash}{_fitting(name, '_op')}`"
        raise PackageError(subject, fault, rows=[("got", repr(name))], hint=hint)


def _fault_of(name: str, of: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or keyword.iskeyword(name):
        return f"this cannot be the name of {of}"
    if name.lower() in _TAKEN:
        return "PyTorch has operators with this namespace"
    return "Python has a module of this name" if name in sys.stdlib_module_names else ""


def _fitting(name: str, ending: str) -> str:
    """Returns a similar name that is valid."""
    fitting = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_0123456789") or f"my{ending}"
    is_taken = _fault_of(fitting, "") or fitting in CPP_KEYWORDS
    return fitting + ending if is_taken else fitting
