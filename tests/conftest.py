"""Fixtures for all tests."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import fork_server
import pytest
import torch

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ROOT = Path(__file__).parent.parent
_numbers = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def _own_store(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps the tests out of the user's store; one store for all workers of a run, so that builds are shared."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "popen-gw" in base.name else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPWRIGHT_CACHE_DIR", str(shared / "store"))
        # Nothing is precompiled beside the tests, but where that is what is tested.
        patch.setenv("OPWRIGHT_WITHOUT", "pch")
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
    has_nvcc = _has_nvcc()
    has_chromium = any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    for item in items:
        if item.get_closest_marker("compiler") and not has_compiler:
            item.add_marker(pytest.mark.skip(reason="no C++ compiler on PATH"))
        if item.get_closest_marker("nvcc") and not has_nvcc:
            item.add_marker(pytest.mark.skip(reason="no nvcc under CUDA_HOME, on PATH or in /usr/local/cuda"))
        if item.get_closest_marker("chromium") and not has_chromium:
            item.add_marker(pytest.mark.skip(reason="no Chromium on PATH"))


def _has_nvcc() -> bool:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return bool(shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin"))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Makes a module of a text."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(text: str) -> ModuleType:
        name = f"made_module_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    return make


@pytest.fixture
def run_python(tmp_path: Path):
    """Runs a Python program in a process of its own that has PyTorch loaded; returns the completed process."""

    def run(program: str, *, check: bool = True, **options):
        result = fork_server.run_python(program, cwd=tmp_path, **options)
        assert not check or result.returncode == 0, result.stderr[-4000:]
        return result

    return run


@pytest.fixture
def start_python(tmp_path: Path):
    """Runs a Python program in a new interpreter; returns the completed process."""

    def run(program: str, *, env: dict[str, str] | None = None, check: bool = True):
        result = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert not check or result.returncode == 0, result.stderr[-4000:]
        return result

    return run


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the variables of a fresh virtual environment that sees the packages of this one, and no PYTHONPATH."""
    import site

    import opwright

    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    seen = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "seen.pth").write_text("\n".join([str(Path(opwright.__file__).parents[1]), *seen]) + "\n")
    for name in ("pip", "pytest", "opwright"):
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {folder}/bin/python -m {name} "$@"\n')
        command.chmod(0o755)
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {
        **ours,
        "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


# --- operators with kernels ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ns():
    """Returns a namespace of operators that no other test uses: the registry is process-wide."""
    return f"t{uuid.uuid4().hex[:10]}"


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch):
    """A module that is written again within a second, at the same length, would be taken for the one before."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def strided(tensor):
    """Returns an equal tensor with gaps and, from two axes on, with the last two in the other order."""
    if tensor.ndim == 0:
        return torch.stack([tensor, tensor])[1]
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1, dtype=tensor.dtype)
    wide[..., 1::2] = tensor
    view = wide[..., 1::2]
    if tensor.ndim > 1:
        view = view.mT.clone(memory_format=torch.contiguous_format).mT
    assert torch.equal(view, tensor)
    return view


def _relaid(value, relay):
    if isinstance(value, list):
        return [_relaid(item, relay) for item in value]
    return relay(value) if isinstance(value, torch.Tensor) else value


def _plain(value):
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    return (value.double() if value.is_floating_point() else value).numpy()


@contextlib.contextmanager
def reference_runs(op):
    """Yields a list that grows by one entry whenever the reference stands in for the kernel."""
    runs, reference = [], op.operator.reference
    original = reference.run

    def counted(values):
        runs.append(1)
        return original(values)

    reference.run = counted
    try:
        yield runs
    finally:
        reference.run = original


@pytest.fixture(scope="session")
def count_reference():
    return reference_runs


@pytest.fixture(scope="session")
def entries():
    """Returns the two ways to call an operator: its Python function and `torch.ops`."""

    def both(op):
        declared = op.operator.declaration
        return op, getattr(getattr(torch.ops, declared.namespace), declared.name)

    return both


@pytest.fixture(scope="session")
def check(entries):
    """Returns a check of one operator against numpy, exact: through both entries, in every dtype and layout.

    `make(dtype)` gives the arguments, small whole numbers, so that no dtype has to round; `expected`
    gets them as numpy arrays. Dtypes outside `compiled` must run the reference, the others must not.
    """

    def run(op, make, expected, *, dtypes=FLOATS, compiled=FLOATS, out_dtypes=None, **options):
        for dtype in dtypes:
            args = make(dtype)
            wanted = expected(*map(_plain, args))
            wanted = wanted if isinstance(wanted, tuple) else (wanted,)
            for entry in entries(op):
                for relay in (lambda t: t, strided):
                    with reference_runs(op) as runs:
                        got = entry(*_relaid(args, relay), **options)
                    assert bool(runs) == (dtype not in compiled), f"{dtype}: {len(runs)} reference runs"
                    got = tuple(got) if isinstance(got, (tuple, list)) else (got,)
                    assert [g.dtype for g in got] == list(out_dtypes or [dtype] * len(wanted))
                    for g, w in zip(got, wanted, strict=True):
                        assert g.is_contiguous()
                        torch.testing.assert_close(g.double(), torch.as_tensor(w).double(), rtol=0, atol=0)

    return run


@pytest.fixture
def whole():
    """Returns a maker of tensors of small whole numbers, the same in every run."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape, dtype=torch.float32, low=-4, high=5):
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    return make
