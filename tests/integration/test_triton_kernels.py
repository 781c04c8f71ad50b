"""Operators whose GPU kernel is a Triton kernel, as far as a machine without GPU and Triton goes."""

from __future__ import annotations

import importlib.util
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest

from opwright.backends.registry import all_backends
from opwright.dispatch import kernels, registry
from opwright.errors import KernelFileError, LoadError, NoTritonError
from opwright.triton.packs.workers import is_installed

pytestmark = pytest.mark.compiler
OPERATOR = """
from jaxtyping import Float
from torch import Tensor
from opwright import operator

@operator("{name}"{more})
def double(input: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return input * 2
"""
TRITON = """
import triton
import triton.language as tl

@triton.jit
def double_kernel(input, output, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(output + at, tl.load(input + at, mask=at < n) * 2, mask=at < n)

def double(input, output):
    double_kernel[(triton.cdiv(input.size(0), 256),)](input, output, input.size(0), BLOCK=256)
"""
CUDA = """
#include <opwright/kernel.h>
using opwright::View;
template <typename T> void double_(View<const T, 1> input, View<T, 1> output, cudaStream_t) {}
"""
_numbers = itertools.count()


@pytest.fixture
def declare(tmp_path: Path) -> Any:
    def declared(more: str = "", **files: str) -> Any:
        name = f"triton_choice::double{next(_numbers)}"
        for file, text in files.items():
            (tmp_path / file.replace("_", ".", 1)).write_text(text.replace("double", name.split("::")[1], 0))
        text = OPERATOR.replace("def double", f"def {name.split('::')[1]}").format(name=name, more=more)
        (tmp_path / "op.py").write_text(text)
        spec = importlib.util.spec_from_file_location(name.replace("::", "_"), tmp_path / "op.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return registry.operators[name]

    return declared


def source_of(operator: Any) -> str:
    return operator.declaration.sources["cuda"].path.name


def test_choice_of_the_file(declare: Any) -> None:
    """cuda.cu comes first; the declaration decides otherwise."""
    assert source_of(declare(triton_py=TRITON)) == "triton.py"
    both = {"triton_py": TRITON, "cuda_cu": CUDA}
    assert source_of(declare(**both)) == "cuda.cu"
    assert source_of(declare(', cuda="triton.py"', **both)) == "triton.py"
    assert source_of(declare(', triton="triton.py"', **both)) == "triton.py"
    assert source_of(declare(', cuda="cuda.cu", triton="triton.py"', **both)) == "cuda.cu"
    with pytest.raises(KernelFileError):
        declare(', cuda="other.py"', **both)


def test_library_is_built_without_nvcc_and_triton(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = declare(triton_py=TRITON.replace("def double(", f"def double{next(_numbers)}("))
    name = operator.declaration.name
    path = operator.declaration.sources["cuda"].path
    path.write_text(TRITON.replace("def double(", f"def {name}("))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    library, is_new = kernels.build(kernels.unit_key(operator.declaration, "cuda"))
    assert is_new
    assert hasattr(library.handle, "opwright_triton_setup")
    assert not kernels.build(kernels.unit_key(operator.declaration, "cuda"))[1]
    path.write_text(path.read_text().replace("256", "512"))
    assert kernels.build(kernels.unit_key(operator.declaration, "cuda"))[1]


def test_without_triton_the_reference_runs(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opwright.triton.host.is_installed", lambda: False)
    monkeypatch.setattr(kernels, "_warned", set())
    operator = declare(triton_py=TRITON)
    with pytest.warns(RuntimeWarning, match="no Triton was found, so operators run their PyTorch reference"):
        assert not kernels.ensure_loaded(operator, "cuda")
    monkeypatch.setenv("OPWRIGHT_REQUIRE_KERNELS", "1")
    with pytest.raises(NoTritonError, match="pip install triton"):
        kernels.ensure_loaded(operator, "cuda")


def test_a_folder_named_triton_is_not_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert not is_installed()
    (tmp_path / "triton/__init__.py").write_text("")
    importlib.invalidate_caches()
    assert is_installed()


def test_a_pack_beside_takes_the_place_of_triton(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opwright.triton.host.is_installed", lambda: False)
    operator = declare(triton_py=TRITON)
    operator.declaration.sources["cuda"].path.with_suffix(".opk").write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = operator.declaration.sources["cuda"]
        assert all_backends()["triton"].find_obstacle(source, operator.declaration.name) is None


def test_a_damaged_pack_beside_is_an_error_not_a_crash(declare: Any) -> None:
    operator = declare(triton_py=TRITON.replace("def double(", f"def double{next(_numbers)}("))
    source = operator.declaration.sources["cuda"].path
    source.write_text(TRITON.replace("def double(", f"def {operator.declaration.name}("))
    source.with_suffix(".opk").write_bytes(b"OPWPACK1 but not really")
    with pytest.raises(LoadError, match="it is not a pack"):
        kernels.build(kernels.unit_key(operator.declaration, "cuda"))
