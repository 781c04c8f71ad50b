"""Precompiled headers, bindings apart from their functions, compilers' wrappers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from opwright.build.store import Store
from opwright.cpp_extension import objects, precompiled
from opwright.cpp_extension.extension import Extension, build, cpp_flags
from opwright.cpp_extension.headers import EXTENSION, WHOLE
from opwright.store_root import make_root

pytestmark = pytest.mark.compiler

D_SIGMOID = """
torch::Tensor d_sigmoid(torch::Tensor z) { auto s = torch::sigmoid(z); return (1 - s) * s + ADDED; }
"""
PROGRAM = """
import json, sys, torch
from opwright.cpp_extension import load_inline
name, source, options = json.loads(sys.argv[1])
module = load_inline(name, [source], functions=["d_sigmoid"], **options)
print(module.d_sigmoid(torch.zeros(1)).item(), module.__name__, module.__file__)
"""


def d_sigmoid(store: Path, added: int, name: str = "ds", env: dict[str, str] | None = None, **options) -> str:
    order = json.dumps([name, D_SIGMOID.replace("ADDED", str(added)), options])
    environment = {**os.environ, "OPWRIGHT_CACHE_DIR": str(store), "OPWRIGHT_WITHOUT": "", **(env or {})}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, order], env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    value, found, path = result.stdout.split()
    assert float(value) == 0.25 + added
    assert found == name
    return (Path(path).parent / "build.log").read_text()


def test_the_process_in_the_background_is_announced_where_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    orders: list[list[str]] = []

    class Process:
        pid = 4711

        def __init__(self, command: list[str], **options) -> None:
            orders.append(command)

    monkeypatch.setattr(precompiled, "Process", Process)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("CI", raising=False)
    header = precompiled.Header("all", "c++", (), ("x",))
    for without, says in (("pch", False), ("", True)):
        monkeypatch.setenv("OPWRIGHT_WITHOUT", without)
        precompiled.make_in_background([header], [], Store(tmp_path))
        assert len(orders) == says
        assert ("in process 4711" in capsys.readouterr().err) == says


@pytest.mark.slow
def test_headers_are_precompiled_once_and_used(tmp_path: Path) -> None:
    first = d_sigmoid(tmp_path, 1)
    assert "/headers/" not in first
    deadline = time.monotonic() + 400
    while (
        len(list(tmp_path.glob("opwright-store/headers/*/prefix.h.gch"))) < 2
    ):  # code and bindings, by a process left behind
        assert time.monotonic() < deadline
        time.sleep(0.5)
    changed = d_sigmoid(tmp_path, 2)
    assert changed.count("-c ") == 1  # neither the bindings nor the module's name
    assert "/headers/" in changed
    assert "TORCH_EXTENSION_NAME" not in changed
    renamed = d_sigmoid(tmp_path, 2, name="renamed")
    assert "inline0.cpp" not in renamed
    other_flags = d_sigmoid(tmp_path, 3, extra_cflags=["-DMINE=1", "-Wall"])
    assert other_flags.count("/headers/") >= 2


def headers_read(name: str, *flags: str, own: bool = True) -> set[str]:
    """Returns the headers that a header of PyTorch includes, behind Opwright's own or not."""
    folders = [*([EXTENSION] if own else []), *objects.system_includes(None)]
    command = ["c++", "-std=c++20", "-M", *flags, *(f"-I{folder}" for folder in folders), "-x", "c++", "-"]
    text = f"#include <{name}>\n"
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return {os.path.realpath(word) for word in result.stdout.split() if "/" in word}


@pytest.mark.parametrize("name", ["torch/extension.h", "torch/torch.h", "torch/all.h", "torch/script.h"])
def test_the_lighter_headers_of_pytorchs_names(name: str) -> None:
    """They leave out headers of PyTorch, and have all of them where a source needs the whole."""
    extension = "-DTORCH_API_INCLUDE_EXTENSION_H"
    torchs = headers_read(name, extension, own=False)
    lighter = headers_read(name, extension)
    assert torchs <= headers_read(name, extension, WHOLE)
    assert not any("/torch/nn/" in path or "/jit/serialization/import" in path for path in lighter)
    assert any(path.endswith("torch/custom_class.h") for path in lighter)
    assert any("pybind11" in path for path in lighter) == any("pybind11" in path for path in torchs)


SCRIPT = """
#ifdef WITH_PYTHON
#include <Python.h>
#endif
#include <torch/script.h>
#ifdef WITH_PYTHON
PyMODINIT_FUNC PyInit_mine() { return nullptr; }
#endif
static auto registry = torch::RegisterOperators().op("started_with_script::twice(Tensor x) -> Tensor",
                                                     [](torch::Tensor x) { return x + x; });
"""


@pytest.mark.slow
def test_a_source_of_torch_script_starts_from_the_precompiled_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only torch/extension.h was precompiled; torch/script.h took half a minute in each source."""
    monkeypatch.setenv("OPWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("OPWRIGHT_WITHOUT", "")
    flags = cpp_flags(["-DWITH_PYTHON", "-Winvalid-pch", "-Werror=invalid-pch"])
    source = objects.Source("cpp", SCRIPT, flags=flags, name="scripted")
    entry, _ = build(Extension("scripted", [source], kind="library", use_pch=True))
    assert "-include " + str(tmp_path) in (entry.library.parent / "build.log").read_text()
    torch.ops.load_library(str(entry.library))
    assert torch.ops.started_with_script.twice(torch.ones(2)).tolist() == [2, 2]


def test_a_header_that_cannot_be_made_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = precompiled.Header("all", shutil.which("c++"), ("-no-such-flag",), ("x",))
    store = Store(tmp_path / "store")
    assert precompiled.make(header, [], store) is None
    assert precompiled.find(header, store) is None
    assert list((store.root / "work").iterdir()) == []
    file = tmp_path / "file"
    file.touch()
    assert precompiled.make(header, [], Store(file / "below")) is None


def test_the_least_recently_used_go(tmp_path: Path) -> None:
    from opwright.build.store import Store

    make_root(tmp_path)
    for name in [*(f"{i:040}" for i in range(9)), "mine"]:
        (tmp_path / "headers" / name).mkdir(parents=True)
        (tmp_path / "headers" / name / "prefix.h").touch()
        used = int(name) if name != "mine" else 0
        os.utime(tmp_path / "headers" / name / "prefix.h", (used, used))
    Store(tmp_path).drop_oldest_headers(6)
    left = sorted(path.name for path in (tmp_path / "headers").iterdir())
    assert left == [*(f"{i:040}" for i in range(3, 9)), "mine"]


def test_another_torch_is_another_object(monkeypatch: pytest.MonkeyPatch) -> None:
    source = objects.Source("cpp", "int x;")
    key = source.key(False)
    monkeypatch.setattr(objects, "torch_identity", lambda: ("2.99.0", "abc", "x", "y"))
    assert source.key(False) != key


@pytest.mark.parametrize("wrapper", ["ccache", "sccache"])
def test_a_wrapper_on_path_is_called(wrapper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opwright.cpp_extension import load_inline

    log = tmp_path / "log"
    (tmp_path / wrapper).write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec "$@"\n')
    (tmp_path / wrapper).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OPWRIGHT_CACHE_DIR", str(tmp_path / "store"))
    options = {"is_python_module": False, "no_implicit_headers": True}
    load_inline("wrapped", 'extern "C" int wrapped() { return 1; }', **options)
    assert "inline0.cpp" in log.read_text()
    monkeypatch.setenv("TORCH_NO_COMPILER_WRAPPER", "1")
    load_inline("wrapped", 'extern "C" int wrapped() { return 2; }', **options)
    assert len(log.read_text().splitlines()) == 1
