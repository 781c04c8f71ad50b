"""What the output of a failed build of an extension becomes, from outputs of compilers that this machine may not have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from opwright import errors
from opwright.build.diagnostics import text_error
from opwright.cpp_extension.explain import import_error

CXX = "/usr/bin/c++ -I/p/include -isystem /torch/include -fPIC {flags} -c /p/k.cpp -o 0.o"
NVCC = "/usr/local/cuda/bin/nvcc -isystem /torch/include {flags} -ccbin /usr/bin/c++ -c /p/k.cu -o 0.o"
LINK = "/usr/bin/c++ /store/object.o -shared -L/torch/lib -lc10 -o extension.so"
SOURCE = "#include <torch/extension.h>\nint twice(int x) {\n  return 2 * x;\n}\n"
GENERATED = 'PYBIND11_MODULE(opwright_extension_module, m) {\nm.def("twise", twise, "");\n}\n'

# name -> command, what it says
CASES = {
    "killed": (CXX, "c++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated."),
    "killed by nvcc": (NVCC, "nvcc error   : 'cicc' died due to signal 9 (Kill signal)"),
    "killed linker": (LINK, "collect2: fatal error: ld terminated with signal 9 [Killed]"),
    "crashed": (
        CXX,
        "/p/k.cpp:3:10: internal compiler error: Segmentation fault\n    3 |   return 2 * x;\n"
        "Please submit a full bug report, with preprocessed source (by using -freport-bug).",
    ),
    "crashed linker": (LINK, "collect2: fatal error: ld terminated with signal 11 [Segmentation fault]"),
    "killed itself": (CXX, "/usr/bin/c++: killed by signal 9"),
    "crashed itself": (CXX, "/usr/bin/c++: killed by signal 11"),
    "silent": (CXX, ""),
    "new gcc": (
        NVCC,
        "/usr/local/cuda/include/crt/host_config.h:137:2: error: #error -- unsupported GNU version! gcc versions "
        "later than 13 are not supported! The nvcc flag '-allow-unsupported-compiler' can be used",
    ),
    "old nvcc": (NVCC, "nvcc fatal   : Unsupported gpu architecture 'compute_120'"),
    "flag of the host": (NVCC, "nvcc fatal   : Unknown option '-fopenmp'"),
    "flag": (CXX, "c++: error: unrecognized command-line option '-fno-such'; did you mean '-fno-sch'?"),
    "C++14": (
        CXX.format(flags="-std=c++14"),
        "In file included from /p/k.cpp:1:\n/torch/include/ATen/ATen.h:5:2: error: #error C++17 or later compatible "
        "compiler is required to use ATen.\n    5 | #error C++17\n      |  ^~~~~\n"
        "/torch/include/c10/a.h:7:1: error: 'optional' in namespace 'std' does not name a template type",
    ),
    "header of clang": (CXX, "/p/k.cpp:1:10: fatal error: 'mylib/thing.h' file not found"),
    "header of Python": (
        CXX,
        "In file included from /torch/include/torch/extension.h:5,\n                 from /p/k.cpp:1:\n"
        "/torch/include/torch/csrc/python_headers.h:12:10: fatal error: Python.h: No such file or directory",
    ),
    "header of CUDA": (CXX, "/p/k.cpp:1:10: fatal error: cusparse.h: No such file or directory"),
    "header of torch": (CXX, "/p/k.cpp:1:10: fatal error: c10/cuda/impl/cuda_cmake_macros.h: No such file or directory"),
    "header that torch removed": (CXX, "/p/k.cpp:1:10: fatal error: THC/THC.h: No such file or directory"),
    "macro that torch removed": (
        CXX,
        "/p/k.cpp: In function 'int twice(int)':\n"
        "/p/k.cpp:3:3: error: 'AT_CHECK' was not declared in this scope; did you mean 'CHECK'?",
    ),
    "macro that torch removed, nvcc": (NVCC, '/p/k.cu(3): error: identifier "AT_CHECK" is undefined'),
    "macro that torch removed, clang": (CXX, "/p/k.cpp:3:3: error: use of undeclared identifier 'AT_CHECK'"),
    "unknown function": (CXX, "generated bindings:2:16: error: 'twise' was not declared in this scope; did you mean 'twice'?"),
    "unknown function, nvcc": (NVCC, 'generated bindings(2): error: identifier "twise" is undefined'),
    "undefined": (
        LINK,
        "/usr/bin/ld: /store/object.o: in function `f':\nk.cpp:(.text+0xc): undefined reference to `ns::twice(float*, int)'\n"
        "collect2: error: ld returned 1 exit status",
    ),
    "undefined of CUDA": (LINK, "k.cpp:(.text+0xc): undefined reference to `cublasSgemm_v2'"),
    "no main": (LINK, "/usr/bin/ld: Scrt1.o: in function `_start':\n(.text+0x17): undefined reference to `main'"),
    "library": (LINK, "/usr/bin/ld: cannot find -lnowhere: No such file or directory"),
    "object": (LINK, "/usr/bin/ld: cannot find x.o: No such file or directory"),
    "not -fPIC": (
        LINK,
        "/usr/bin/ld: /p/liba.a(a.o): relocation R_X86_64_PC32 against symbol `x' can not be used when making a "
        "shared object; recompile with -fPIC",
    ),
    "other": (LINK, "/usr/bin/ld: something that was never seen before\ncollect2: error: ld returned 1 exit status"),
}  # fmt: skip


def inline(text: str = SOURCE) -> dict[str, tuple[str, str]]:
    """What `load_inline` calls the parts of the text that it makes."""
    return {
        "cpp_sources[0]": ("cpp_sources[0]", text),
        "generated bindings": ("generated bindings", GENERATED),
    }


def told(command: str, output: str, text: str = SOURCE, step: str = "source0") -> errors.BuildError:
    log = f"$ /usr/bin/c++ -c other.cpp\nnothing\n\n$ {command.format(flags='')}\n{output}\n"
    return text_error("ext", {**inline(text), "/p/k.cpp": ("your source", text)}, step, output, log)


def masked(error: errors.OpwrightError) -> str:
    return re.sub(r"/\S*/logs/(\w+)-\w+\.log", r"<logs>/\1.log", str(error))


@pytest.fixture(autouse=True)
def _no_cuda_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Headers are looked for on this machine, which may have those of CUDA."""
    monkeypatch.setattr("opwright.build.whereabouts._folders", lambda beside: iter(()))
    monkeypatch.setattr("opwright.build.whereabouts._torch", lambda: "PyTorch 2.x")
    monkeypatch.setattr("opwright.build.whereabouts._of_this_cuda", lambda wheel: wheel)
    monkeypatch.setattr("sys.version_info", (3, 11))


@pytest.mark.parametrize("kind", CASES)
def test_the_usual_causes(kind: str, snapshot: SnapshotAssertion) -> None:
    command, output = CASES[kind]
    error = told(command, output, step="link" if command == LINK else "source0")
    assert masked(error) == snapshot
    log = re.search(r"/\S*\.log", str(error))
    assert "nothing" in Path(log[0]).read_text()  # all commands of the build are in it


def test_classes_of_errors() -> None:
    assert isinstance(told(*CASES["new gcc"]), errors.HostCompilerError)
    assert isinstance(told(*CASES["old nvcc"]), errors.ArchitectureError)
    assert isinstance(told(*CASES["killed"]), errors.CompileError)


# What gcc says about line 3 comes after what it says about line 2, and both inside the library.
PAGES = """\
In file included from /usr/include/c++/12/map:60,
                 from /p/k.cpp:1:
/usr/include/c++/12/bits/stl_function.h: In instantiation of 'constexpr bool std::less<_Tp>::operator()(...)':
/usr/include/c++/12/bits/stl_map.h:529:32:   required from 'std::map<_Key, _Tp>::operator[](key_type&&)'
/p/k.cpp:2:9:   required from here
/usr/include/c++/12/bits/stl_function.h:408:20: error: no match for 'operator<' (operand types are 'const std::vector<A, std::allocator<A> >' and 'const std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >')
  408 |       { return __x < __y; }
CANDIDATES/usr/include/c++/12/bits/predefined_ops.h: In instantiation of 'bool std::sort(...)':
/p/k.cpp:3:12:   required from here
/usr/include/c++/12/bits/predefined_ops.h:69:22: error: no match for 'operator<' (operand types are 'A' and 'A')
"""


def test_templates_are_folded() -> None:
    candidates = "".join(
        f"/usr/include/c++/12/bits/stl_iterator.h:{n}:5: note: candidate: 'template<class T> operator<{n}'\n"
        f"/usr/include/c++/12/bits/stl_iterator.h:{n}:5: note:   template argument deduction/substitution failed:\n"
        for n in range(50)
    )
    output = PAGES.replace("CANDIDATES", candidates)
    text = str(told(CXX, output, "#include <map>\nmap[A{1}] = 2;\nstd::sort(begin, end);\n"))
    assert "your source:2: no match for 'operator<'" in text
    assert "'const std::vector<A>' and 'const std::string'" in text
    assert ">    2 | map[A{1}] = 2;" in text
    assert "it shows in /usr/include/c++/12/bits/stl_function.h:408" in text
    assert "50 candidates in the log" in text
    assert "1 more: " in text
    assert len(text.splitlines()) < 16


def test_the_few_candidates_of_the_author_are_shown() -> None:
    output = (
        "/p/k.cpp:3:10: error: no matching function for call to 'twice(const char [2])'\n"
        "/p/k.cpp:2:5: note: candidate: 'int twice(int)'\n"
        "/p/k.cpp:2:15: note:   no known conversion for argument 1 from 'const char [2]' to 'int'\n"
        "/torch/include/a.h:9:5: note: candidate: 'at::Tensor twice(const at::Tensor&)'\n"
    )
    text = str(told(CXX, output))
    assert "your source:2: note: candidate: 'int twice(int)'" in text
    assert "1 more candidate in the log" in text


def test_an_error_in_the_authors_own_header(tmp_path: Path) -> None:
    (tmp_path / "own.h").write_text("int f() {\n  return nonsense;\n}\n")
    source = str(tmp_path / "k.cpp")
    output = (
        f"In file included from {source}:1:\n{tmp_path}/own.h:2:10: error: 'nonsense' was not declared in this scope\n"
    )
    text = str(text_error("ext", {source: (source, "")}, "source0", output, f"$ c++ -c {source}\n{output}"))
    assert f"{tmp_path}/own.h:2: 'nonsense' was not declared" in text
    assert ">    2 |   return nonsense;" in text


def test_a_header_that_is_near_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    (tmp_path / "include" / "mylib").mkdir(parents=True)
    (tmp_path / "include" / "mylib" / "thing.h").touch()
    (tmp_path / "csrc").mkdir()
    source = tmp_path / "csrc" / "k.cpp"
    source.write_text('#include "mylib/thing.h"\n')
    output = f"{source}:1:10: fatal error: mylib/thing.h: No such file or directory\n"
    error = text_error("ext", {str(source): (str(source), "")}, "source0", output, f"$ c++ -c {source}\n{output}")
    assert error.hint == f'`extra_include_paths=["{tmp_path}/include"]`'


def test_a_function_of_the_cuda_source_is_declared_for_the_author() -> None:
    texts = {
        **inline(),
        "/w/inline1.cu": (
            "your source",
            "torch::Tensor twise(torch::Tensor x,\n    int n) {\n  return x;\n}\n",
        ),
    }
    output = "generated bindings:2:16: error: 'twise' was not declared in this scope\n"
    error = text_error("ext", texts, "source0", output, f"$ c++ -c /w/inline0.cpp\n{output}")
    assert error.rule == "`functions` names `twise`, and `cpp_sources` has no such function"
    assert error.hint == "declare it there: `torch::Tensor twise(torch::Tensor x, int n);`"


def test_an_unclosed_brace_is_not_blamed_on_generated_code() -> None:
    output = (
        "generated bindings:1:1: error: cannot declare static function inside another function\n"
        "generated bindings:3:2: error: expected '}' at end of input\n"
        "cpp_sources[0]:2:18: note: to match this '{'\n"
    )
    text = str(told(CXX, output, SOURCE.replace("  return 2 * x;\n}\n", "  return 2 * x;\n\n")))
    assert "ends too early" in text
    assert ">    2 | int twice(int x) {" in text
    assert "PYBIND11_MODULE" not in text


def test_definitions_in_two_sources(tmp_path: Path) -> None:
    texts = {
        "/p/a.cpp": ("/p/a.cpp", "// f\n\nint f(int x) { return 1; }\n"),
        "/p/b.cpp": ("/p/b.cpp", "int f(int);\nint f(int x)\n{ return 2; }\n"),
    }
    output = (
        "/usr/bin/ld: /store/2.o: in function `f(int)':\nb.cpp:(.text+0x0): multiple definition of `f(int)'; "
        "/store/1.o:a.cpp:(.text+0x0): first defined here\n"
    )
    error = text_error("ext", texts, "link", output, f"$ {LINK}\n{output}")
    assert error.rule == "it does not link: `f(int)` is defined twice"
    assert error.rows == (("defined in", "/p/a.cpp:3"), ("defined in", "/p/b.cpp:2"))


def test_a_word_in_a_source_is_no_cause() -> None:
    """Excerpts that compilers print are the author's text, not what the compiler says about itself."""
    output = (
        "/p/k.cpp:3:3: error: 'oops' was not declared in this scope\n"
        '    3 |   oops("out of memory, died due to signal 9");\n      |   ^~~~\n'
    )
    assert told(CXX, output).rule == "its source does not compile"


def test_colours_are_removed() -> None:
    output = "\x1b[01m\x1b[K/p/k.cpp:3:3:\x1b[m\x1b[K \x1b[01;31m\x1b[Kerror: \x1b[m\x1b[K'oops' was not declared\n"
    assert "your source:3: 'oops' was not declared" in str(told(CXX, output))


IMPORTS = {
    "library": "libnowhere.so.3: cannot open shared object file: No such file or directory",
    "driver": "libcuda.so.1: cannot open shared object file: No such file or directory",
    "C++ library": "/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by /store/extension.so)",
    "C library": "/lib/libc.so.6: version `GLIBC_2.38' not found (required by /store/extension.so)",
    "namespace": (
        "Only a single TORCH_LIBRARY can be used to register the namespace mine; please put all of your definitions "
        "in a single TORCH_LIBRARY block.  If you were trying to specify implementations, consider using "
        "TORCH_LIBRARY_IMPL (which can be duplicated).  If you really intended to define operators for a single "
        "namespace in a distributed way, you can use TORCH_LIBRARY_FRAGMENT to explicitly indicate this.  Previous "
        "registration of TORCH_LIBRARY was registered at /p/a.cpp:3; latest registration was registered at /p/b.cpp:4"
    ),
    "class": 'generic_type: type "Thing" is already registered!',
    "torch": "/store/extension.so: undefined symbol: _ZN2at5emptyEv",
    "CUDA": "/store/extension.so: undefined symbol: cublasCreate_v2",
    "other": "/store/extension.so: file too short",
}


@pytest.mark.parametrize("kind", IMPORTS)
def test_failed_imports(kind: str, snapshot: SnapshotAssertion) -> None:
    assert str(import_error("ext", "/store/extension.so", ImportError(IMPORTS[kind]))) == snapshot
