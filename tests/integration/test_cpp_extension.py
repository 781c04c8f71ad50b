"""`opwright.cpp_extension`: the defects of a build by name, place and time are not in a build by content."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.utils.cpp_extension
from extension_modules import inline, source

from opwright.cpp_extension import load, load_inline
from opwright.cpp_extension.extension import _architecture_flags, cpp_flags
from opwright.errors import CompileError, ExtensionError

pytestmark = pytest.mark.compiler


def program(name: str, value: int) -> str:
    return (
        "from opwright.cpp_extension import load_inline\n"
        f"print(load_inline({name!r}, [{source(value)!r}], no_implicit_headers=True).value())"
    )


def run(code: str, store: Path, **env: str) -> subprocess.CompletedProcess:
    import os

    environment = {**os.environ, "OPWRIGHT_CACHE_DIR": str(store), **env}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)


def test_a_stale_lock_file_holds_nobody(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()  # what torch.utils.cpp_extension waits for, without end
    assert inline("stale", 3, build_directory=str(tmp_path)).value() == 3
    assert (tmp_path / "stale.so").is_file()


def test_one_name_with_two_sources_in_two_processes(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: run(program("same", 10 + i % 2), tmp_path).stdout.strip(), range(8)))
    assert found == [str(10 + i % 2) for i in range(8)]


def test_64_processes_compile_once(tmp_path: Path) -> None:
    log = tmp_path / "runs.txt"
    wrapper = tmp_path / "c++"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *-c*inline0.cpp*) echo run >> {log};; esac\nexec /usr/bin/env c++ "$@"\n'
    )
    wrapper.chmod(0o755)
    code = program("many", 5)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: run(code, tmp_path / "store", OPWRIGHT_CXX=str(wrapper)), range(64)))
    assert [f.stdout.strip() for f in found] == ["5"] * 64, [f.stderr for f in found if f.returncode][:1]
    assert log.read_text().count("run") == 1


def test_arguments_are_not_changed() -> None:
    sources, flags, ldflags = [source(7)], ["-DX"], ["-Wl,--as-needed"]
    inline_module = load_inline(
        "unchanged", sources, extra_cflags=flags, extra_ldflags=ldflags, no_implicit_headers=True
    )
    assert inline_module.value() == 7
    assert (sources, flags, ldflags) == ([source(7)], ["-DX"], ["-Wl,--as-needed"])


def test_flags_in_the_form_of_a_setup_file() -> None:
    """The keys were taken for flags, and the compiler did not find a file `cxx`."""
    with pytest.raises(TypeError, match=r"expected a string or a list of strings, got \{'cxx'"):
        inline("mapping", 1, extra_cflags={"cxx": ["-O3"]})


def test_what_only_looks_like_an_architecture_swallows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    own = ("-gencode=arch=compute_80,code=[sm_80,compute_80]",)
    assert _architecture_flags(["-Xcompiler", "-march=native", "-I/home/research/include"]) == own
    assert _architecture_flags(["-gencode=arch=compute_90,code=sm_90"]) == ()
    assert _architecture_flags(["-arch=sm_90"]) == ()


def test_no_gpu_and_no_list_of_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    from opwright.backends import cuda

    monkeypatch.setattr(cuda, "gpu_architectures", lambda: ())
    for name in ("TORCH_CUDA_ARCH_LIST", "OPWRIGHT_ARCH"):
        monkeypatch.delenv(name, raising=False)
    assert _architecture_flags([]) == cuda.architecture_flags(cuda.DEFAULT_ARCHITECTURES)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0;12.0f+PTX")
    assert _architecture_flags([])[-1] == "-gencode=arch=compute_120f,code=[sm_120f,compute_120f]"


@pytest.mark.parametrize("named", ["bogus", "9.0;bogus", "Amper", "90", "8.0PTX", "9.0+PTX+PTX"])
def test_an_architecture_that_torch_does_not_know(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch raises a ValueError; the list was ignored, and the default architectures were built."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", named)
    for function in (_architecture_flags, torch.utils.cpp_extension._get_cuda_arch_flags):
        with pytest.raises(ValueError, match=named.rpartition(";")[2].replace("+", r"\+")):
            function([])


@pytest.mark.parametrize(
    "named", ["Ampere Hopper", "Ampere;Hopper", "Maxwell+Tegra Maxwell", "Volta+Tegra;7.5", "Blackwell", "9.0a 8.6+PTX"]
)
def test_families_of_architectures_are_those_of_torch(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "Ampere Hopper" was built without sm_86."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", named)
    torchs = torch.utils.cpp_extension._get_cuda_arch_flags([])
    found = [set(re.findall(r"sm_\w+", " ".join(flags))) for flags in (_architecture_flags([]), torchs)]
    assert found[0] == found[1]


def test_an_edited_cell_runs_the_new_code() -> None:
    modules = [inline("cell", value) for value in (1, 2, 3)]
    assert [module.value() for module in modules] == [1, 2, 3]
    assert inline("cell", 1).value() == 1


PYBIND_MODULE = """
#include <torch/extension.h>
struct Counter { int value = VALUE; };
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("value", [] { return VALUE; });
  pybind11::class_<Counter>(m, "Counter", pybind11::module_local())
      .def(pybind11::init<>())
      .def_readonly("value", &Counter::value);
}
"""


@pytest.mark.parametrize("from_file", [False, True])
def test_an_edited_pybind11_module_runs_the_new_code(from_file: bool, tmp_path: Path) -> None:
    """pybind11 3 returned the module that it had made first for the name."""
    name = f"pybind_cell_{from_file}".lower()
    file = tmp_path / "cell.cpp"

    def module(value: int) -> Any:
        text = PYBIND_MODULE.replace("VALUE", str(value))
        if not from_file:
            return load_inline(name, text)
        file.write_text(text)
        return load(name, file)

    first = module(1)
    assert (module(2).value(), module(3).value(), first.value(), module(1).value()) == (2, 3, 1, 1)
    second = module(2)
    assert (second.Counter().value, second.Counter.__module__) == (2, name)
    assert (second.__name__, second.__spec__.name, second.__package__) == (name, name, "")


def test_optimised_unless_told_otherwise() -> None:
    text = "#ifdef __OPTIMIZE__\n#define LEVEL 2\n#else\n#define LEVEL 0\n#endif\n" + source("LEVEL")
    assert load_inline("optimised", text, no_implicit_headers=True).value() == 2
    assert load_inline("plain", text, extra_cflags=["-O0"], no_implicit_headers=True).value() == 0
    assert "-O2" in cpp_flags(["-march=native"])
    assert "-O2" not in cpp_flags(["-O3", "-g"])


def test_headers_count_by_content_and_place(tmp_path: Path) -> None:
    text = '#include "number.h"\n' + source("NUMBER")
    for folder, number in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "k.cpp").write_text(text)
        (tmp_path / folder / "number.h").write_text(f"#define NUMBER {number}\n")
    assert load("headers", str(tmp_path / "one" / "k.cpp")).value() == 1
    assert load("headers", str(tmp_path / "two" / "k.cpp")).value() == 2  # the same source beside another header
    (tmp_path / "one" / "number.h").write_text("#define NUMBER 11\n")
    assert load("headers", str(tmp_path / "one" / "k.cpp")).value() == 11
    assert load("headers", str(tmp_path / "two" / "k.cpp")).value() == 2


def test_a_macro_of_the_flags_that_stands_for_the_name() -> None:
    """The second extension was given the object of the first one, with the name of that one."""
    text = source(3).replace("TORCH_EXTENSION_NAME", "MODULE_NAME")
    for name in ("first_name", "second_name"):
        flags = ["-DMODULE_NAME=TORCH_EXTENSION_NAME"]
        assert load_inline(name, text, extra_cflags=flags, no_implicit_headers=True).value() == 3


def test_standalone_and_library(tmp_path: Path) -> None:
    main = tmp_path / "main.cpp"
    main.write_text('#include <cstdio>\nint main() { std::puts("hello"); }\n')
    path = load("hello", str(main), is_python_module=False, is_standalone=True, build_directory=str(tmp_path / "out"))
    assert path == str(tmp_path / "out" / "hello")
    assert subprocess.run([path], capture_output=True, text=True).stdout == "hello\n"
    main.write_text("int loaded = 1;\n")
    assert Path(load("hello", str(main), is_python_module=False)).is_file()


def test_a_function_that_is_not_a_name() -> None:
    with pytest.raises(ExtensionError, match="must be the name of a C\\+\\+ function"):
        load_inline("bad", "int x;", functions=["f("])


def test_a_source_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.cpp"
    for value in (b"\xe9", b"\xea"):
        path.write_bytes(
            b"// \xe9\n" + source("(unsigned char)LETTER").encode().replace(b"LETTER", b"'" + value + b"'")
        )
        assert load("latin", str(path)).value() == value[0]
    path.write_bytes(b"// \xe9\nint x = nonsense; // \xe9\n")
    with pytest.raises(CompileError, match=r"(?s)latin.cpp:2: .*nonsense; // \ufffd"):
        load("latin", str(path))


def test_a_compile_error_is_shown_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.cpp"
    path.write_text(source("nonsense"))
    with pytest.raises(CompileError, match=r"(?s)wrong.cpp:3: .*nonsense.*>    3 \|"):
        load("wrong", str(path))
    with pytest.raises(CompileError, match=r"(?s)cpp_sources\[0\]:3: .*nonsense"):
        inline("wrong", "nonsense")


def test_bindings_of_functions_under_two_names() -> None:
    import torch

    text = "torch::Tensor d_sigmoid(torch::Tensor z) { auto s = torch::sigmoid(z); return (1 - s) * s; }"
    for name in ("bindings_one", "bindings_two"):
        module = load_inline(name, text, functions={"d_sigmoid": 'says "hello"\\n'})
        assert module.__name__ == name
        assert module.d_sigmoid.__doc__.endswith('says "hello"\\n\n')
        assert torch.equal(module.d_sigmoid(torch.zeros(2)), torch.full((2,), 0.25))


@pytest.mark.slow
def test_a_source_that_needs_the_whole_header() -> None:
    # Through an alias, so that nothing in the text tells beforehand.
    text = "namespace t = torch; int64_t parameters() { return t::nn::Linear(2, 3)->parameters().size(); }"
    assert load_inline("whole", text, functions=["parameters"]).parameters() == 2


def test_names_that_are_pytorchs() -> None:
    import torch.utils.cpp_extension as torchs

    import opwright.cpp_extension as ours

    for name in (
        "get_default_build_root",
        "is_ninja_available",
        "verify_ninja_availability",
        "SyclExtension",
    ):
        assert getattr(ours, name) is getattr(torchs, name)
    assert set(dir(torchs)) <= set(dir(ours))


def test_an_import_of_all_names() -> None:
    """`from opwright.cpp_extension import *` gave neither `SyclExtension` nor eight other names of PyTorch's."""
    found: list[dict[str, Any]] = []
    for module in ("opwright.cpp_extension", "torch.utils.cpp_extension"):
        names: dict[str, Any] = {}
        exec(f"from {module} import *", names)
        del names["__builtins__"]
        found.append(names)
    ours, torchs = found
    assert ours.keys() == torchs.keys()
    assert ours["load"] is load
    assert ours["BuildExtension"] is not torchs["BuildExtension"]


@pytest.mark.nvcc
def test_headers_of_cuda_belong_to_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that was built with another version of CUDA was returned."""
    from opwright.backends import cuda
    from opwright.build.store import Store

    real = cuda.find_nvcc(Store().identities)
    assert real is not None
    for version in (12, 13):
        root = tmp_path / str(version)
        (root / "include").mkdir(parents=True)
        (root / "include" / "toolkit.h").write_text(f"#define VERSION {version}\n")
        nvcc = cuda.Nvcc(real.path, f"nvcc {version}", root, real.cudart)
        monkeypatch.setattr(cuda, "find_nvcc", lambda _, nvcc=nvcc: nvcc)
        text = "#include <toolkit.h>\n" + source("VERSION")
        assert load_inline("toolkit", text, with_cuda=True, no_implicit_headers=True).value() == version
    monkeypatch.setattr(cuda, "find_nvcc", lambda _: None)  # what was built needs none
    assert load_inline("toolkit", text, with_cuda=True, no_implicit_headers=True).value() in (12, 13)


def test_a_toolkit_is_found_where_pytorch_has_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from opwright.backends import cuda
    from opwright.build.store import Store
    from opwright.cpp_extension import check_compiler_abi_compatibility, toolkit

    nvcc = cuda.find_nvcc(Store().identities)
    if nvcc is None:
        pytest.skip("no nvcc here")
    assert nvcc.root == Path(toolkit.CUDA_HOME)
    assert any((Path(path) / "cuda_runtime.h").exists() for path in toolkit.include_paths("cuda"))
    assert any((Path(path) / "libcudart.so").exists() for path in toolkit.library_paths("cuda"))
    assert check_compiler_abi_compatibility("c++")


@pytest.mark.nvcc
def test_the_cudnn_that_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its headers and libraries were not found."""
    from opwright.cpp_extension import CUDAExtension

    for i in (1, 2):
        (tmp_path / f"{i}/lib").mkdir(parents=True)
        (tmp_path / f"{i}/include").mkdir()
        (tmp_path / f"{i}/include/cudnn.h").write_text(f"#define CUDNN_MAJOR {i}\n")
        monkeypatch.setenv("CUDNN_HOME", str(tmp_path / str(i)))
        text = "#include <cudnn.h>\n" + source("CUDNN_MAJOR")
        assert load_inline("with_cudnn", text, with_cuda=True, no_implicit_headers=True).value() == i
    extension = CUDAExtension("e", ["e.cpp"])
    assert f"{tmp_path}/2/include" in extension.include_dirs
    assert f"{tmp_path}/2/lib" in extension.library_dirs
