"""`opwright doctor FILE.so`: what it says of a library against what the loader, the linker and binutils say."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from elftools.elf.elffile import ELFFile
from fork_server import run_opwright

from opwright.backends import cuda
from opwright.build.elf import read_library
from opwright.build.fatbin import DeviceCode
from opwright.doctor import installed_torch, loader
from opwright.doctor.library import LibraryReport, examine
from opwright.package import shims

pytestmark = pytest.mark.compiler
TORCH = Path(torch.__file__).parent
MODULE = "void *PyInit_{0}(void) {{ return 0; }}\n"


@pytest.fixture
def build(tmp_path: Path):
    """Compiles C to a shared library of that name."""

    def compile(name: str, text: str, *flags: str) -> Path:
        source = tmp_path / f"{name}.c"
        source.write_text(text)
        subprocess.run(["gcc", "-shared", "-fPIC", "-w", source, "-o", tmp_path / name, *flags], check=True)
        return tmp_path / name

    return compile


def finding_of(report: LibraryReport, subject: str, state: str):
    found = [f for f in report.findings if (f.subject, f.state) == (subject, state)]
    assert len(found) == 1, report.findings
    return found[0]


def failure_of(library: Path, name: str = "", first: str = "torch") -> str:
    """Returns what Python says when it imports a module, or loads a library, after another."""
    program = f"import {first}, {name}" if name else f"import {first}, ctypes; ctypes.CDLL({str(library)!r}, 2)"
    # A start of its own: what PyTorch has loaded already would give a library its symbols.
    result = subprocess.run([sys.executable, "-c", program], cwd=library.parent, capture_output=True, text=True)
    return "" if result.returncode == 0 else result.stderr.strip().splitlines()[-1]


# --- reading, against binutils and the loader ----------------------------------------------------------


@pytest.mark.parametrize("name", ["libc10.so", "libtorch_python.so", "libshm.so"])
def test_a_file_is_read_as_readelf_reads_it(name: str) -> None:
    if not shutil.which("readelf"):
        pytest.skip("no readelf")
    path = TORCH / "lib" / name
    library = read_library(path)
    shown = subprocess.run(["readelf", "-dVW", "--dyn-syms", path], capture_output=True, text=True).stdout
    assert list(library.needed) == re.findall(r"\(NEEDED\).*\[(.*)\]", shown)
    rows = re.findall(r"^ +\d+: .{16} +\S+ +\w+ +(GLOBAL|WEAK|UNIQUE) +\w+ +(\w+) (\S+)", shown, re.MULTILINE)
    undefined = {(row[2], row[0] == "WEAK") for row in rows if row[1] == "UND"}
    assert {(f"{s.name}@{s.version}".rstrip("@"), s.is_weak) for s in library.undefined} == undefined
    assert {row[2].split("@")[0] for row in rows if row[1] != "UND"} <= library.defined
    versions = re.findall(r"Name: (\w+_[\d.]+)  Flags", shown)
    assert {v for some in library.versions_needed.values() for v in some} >= set(versions)


def test_libraries_are_found_where_ldd_finds_them() -> None:
    path = TORCH / "lib" / "libtorch_python.so"
    shown = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
    found = {name: Path(place).resolve() for name, place in re.findall(r"(\S+) => (/\S+)", shown)}
    closure = loader.closure_of(read_library(path))
    assert closure.absent == {}
    assert {name: library.path for name, library in closure.found.items() if name in found} == found


def test_torchs_own_libraries_are_healthy_and_quick() -> None:
    for path in (next(TORCH.glob("_C.*.so")), TORCH / "lib" / "libtorch_cpu.so"):
        started = time.monotonic()
        report = examine(path)
        assert time.monotonic() - started < 10
        assert {finding.state for finding in report.findings} == {"ok"}


def test_the_installed_torch_is_read_without_importing_it() -> None:
    found = installed_torch.find_torch()
    assert (found.version, found.cuda or None) == (str(torch.__version__), torch.version.cuda)
    assert found.has_cxx11_abi == torch._C._GLIBCXX_USE_CXX11_ABI


def test_the_versions_of_shims_are_those_of_torchs_headers() -> None:
    """What the guards around functions say, the table says too."""
    told: dict[str, tuple[int, int]] = {}
    for name in ("csrc/stable/c/shim.h", "csrc/inductor/aoti_torch/c/shim.h"):
        path, version = TORCH / "include" / "torch" / name, (0, 0)
        for line in path.read_text().splitlines() if path.exists() else ():
            if begins := re.match(r"#if TORCH_FEATURE_VERSION >= TORCH_VERSION_(\d+)_(\d+)", line):
                version = (int(begins[1]), int(begins[2]))
            elif re.match(r"#endif.*TORCH_FEATURE_VERSION", line):
                version = (0, 0)
            for function in re.findall(r"\b((?:aoti_)?torch_\w+)\(", line):
                told.setdefault(function, version)
    told = {name: version for name, version in told.items() if version > (0, 0)}
    assert {name: shims._VERSIONS.get(name) for name in told} == told


# --- symbols ---------------------------------------------------------------------------------------------


def test_a_symbol_that_torch_does_not_have(build) -> None:
    text = MODULE.format("op") + "void use(void) { _ZN2at9not_thereEv(); _ZN3c1019NoSuchEv(); }"
    path = build("op.so", text)
    assert "_ZN2at9not_thereEv" in failure_of(path, "op")
    report = examine(path)
    assert "at::not_there()" in finding_of(report, "symbols", "wrong").detail
    assert f"not in torch {torch.__version__}" in finding_of(report, "symbols", "wrong").detail
    assert "2 unstable" in finding_of(report, "torch", "wrong").detail
    assert "`pip install --no-build-isolation --force-reinstall .`" in finding_of(report, "symbols", "wrong").hint
    assert report.facts["missing_symbols"]["_ZN2at9not_thereEv"] == "at::not_there()"


def test_a_symbol_of_torch_whose_library_is_not_named(build) -> None:
    path = build("op.so", "extern int _ZN3c1019UndefinedTensorImpl10_singletonE; int *use(void)"
                          "{ return &_ZN3c1019UndefinedTensorImpl10_singletonE; }")  # fmt: skip
    assert "undefined symbol" in failure_of(path)
    assert "-lc10`" in finding_of(examine(path), "symbols", "wrong").hint
    linked = build("linked.so", (path.parent / "op.so.c").read_text(), f"-L{TORCH}/lib", "-lc10")
    assert failure_of(linked) == ""
    report = examine(linked)
    assert {finding.state for finding in report.findings} == {"ok"}
    assert "libc10.so only after `import torch`" in finding_of(report, "libraries", "ok").detail


@pytest.mark.parametrize(
    ("name", "cause", "command"),
    [
        ("my_own_function", "declared and never defined", "sources=[...]"),
        ("cudaMalloc", "a library of CUDA is not linked", "-lcudart"),
        ("GOMP_parallel", "OpenMP is not linked", "-fopenmp"),
        ("_ZNSt9exceptionD2Ev", "the C++ library is not linked", "`g++`"),
        ("__cudaRegisterLinkedBinary_12_op_cu", "was not linked (-rdc)", "dlink=True"),
        ("torch_of_the_future", "not in torch", "`pip install --upgrade torch`"),
        ("PyUnicode_AS_DATA", "not in Python", "--force-reinstall"),
    ],
)
def test_a_missing_symbol_has_a_cause(build, name: str, cause: str, command: str) -> None:
    path = build("op.so", f"void {name}(void); void use(void) {{ {name}(); }}")
    assert name in failure_of(path, first="sys")
    found = finding_of(examine(path), "symbols", "wrong")
    assert cause in found.detail
    assert command in found.hint


def test_what_torch_brings_for_all_is_not_missing(build) -> None:
    text = (
        "extern int _ZN3c1019UndefinedTensorImpl10_singletonE;"
        "int *use(void) { GOMP_parallel(); return &_ZN3c1019UndefinedTensorImpl10_singletonE; }"
    )
    path = build("op.so", text, f"-L{TORCH}/lib", "-lc10")  # libc10 does not need OpenMP, torch does
    assert failure_of(path) == ""
    assert finding_of(examine(path), "symbols", "ok")


def test_weak_symbols_and_those_of_python_are_not_missing(build) -> None:
    path = build("op.so", "__attribute__((weak)) void later(void); void use(void) { later(); PyErr_Occurred(); }")
    assert failure_of(path) == ""
    assert "all" in finding_of(examine(path), "symbols", "ok").detail


def test_the_stable_shims_tell_the_oldest_torch(build) -> None:
    """A function that the library can do without, as a weak symbol, counts for nothing."""
    flags = [f"-L{TORCH}/lib", "-ltorch_cpu"]
    old = build("old.so", "void use(void) { torch_dtype_float8_e8m0fnu(); }", *flags)
    new = build(
        "new.so",
        "void use(void) { torch_dtype_float8_e8m0fnu(); torch_library_set_python_module(); }",
        *flags,
    )
    weak = build(
        "weak.so",
        "__attribute__((weak)) void torch_library_set_python_module();"
        "void use(void) { torch_dtype_float8_e8m0fnu(); torch_library_set_python_module(); }",
        *flags,
    )
    assert "torch >= 2.11: 2 stable" in finding_of(examine(weak), "torch", "ok").detail
    assert "torch >= 2.11: 1 stable" in finding_of(examine(old), "torch", "ok").detail
    state, text = ("ok", "torch >= 2.13: 2 stable") if torch.__version__ >= (2, 13) else ("wrong", "for a newer torch")
    assert text in finding_of(examine(new), "torch", state).detail


def test_a_symbol_of_cuda_or_of_the_old_abi_is_told_apart(build) -> None:
    if torch.version.cuda:
        pytest.skip("a torch with CUDA has the symbol")
    names = ("_ZN3c104cuda9SetDeviceEi", "_ZN3c105ErrorC1EiSs", "_ZN2at9not_thereEv")
    report = examine(build("op.so", "void use(void) {" + "".join(f"{name}();" for name in names) + "}"))
    details = [finding.detail for finding in report.findings if finding.subject == "symbols"]
    for text in (
        "no CUDA: c10::cuda::SetDevice(int)",
        "old C++ ABI: c10::Error::Error(int, ",
        "at::not_there()",
    ):
        assert sum(text in detail for detail in details) == 1


@pytest.mark.skipif(bool(torch.version.cuda), reason="a torch with CUDA has the symbol")
def test_what_needs_a_torch_with_cuda_need_not_be_built_again(build) -> None:
    report = examine(
        build("op.so", "void _ZN3c104cuda9SetDeviceEi(int); void use(void) { _ZN3c104cuda9SetDeviceEi(0); }")
    )
    found = finding_of(report, "torch", "wrong")
    assert "lacks 1" in found.detail
    assert found.hint.startswith("`pip install --force-reinstall torch")


@pytest.mark.parametrize("abi", [0, 1])
def test_the_cxx_abi(tmp_path: Path, abi: int) -> None:
    source = tmp_path / "op.cpp"
    source.write_text(
        "#include <string>\nnamespace c10 { struct Error { Error(int, std::string); }; }\n"
        'void use() { c10::Error(1, "x"); }\n'
    )
    flag = f"-D_GLIBCXX_USE_CXX11_ABI={abi}"
    subprocess.run(["g++", "-shared", "-fPIC", flag, source, "-o", tmp_path / "op.so"], check=True)
    found = next(f for f in examine(tmp_path / "op.so").findings if f.subject == "C++ ABI")
    assert found.detail.startswith(f"_GLIBCXX_USE_CXX11_ABI={abi}")
    assert (found.state == "ok") == (abi == torch._C._GLIBCXX_USE_CXX11_ABI)


# --- libraries and versions ------------------------------------------------------------------------------


def test_a_library_of_another_cuda(build, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = build("libcudart.so.11.0", "void cudaMalloc(void) {}", "-Wl,-soname,libcudart.so.11.0")
    path = build("op.so", "void cudaMalloc(void); void use(void) { cudaMalloc(); }", str(stub))
    kept = stub.rename(stub.with_name("away"))
    assert "libcudart.so.11.0: cannot open" in failure_of(path)
    report = examine(path)
    found = finding_of(report, "libraries", "wrong")
    assert "libcudart.so.11.0 is not found: it was built for CUDA 11" in found.detail
    assert "LD_LIBRARY_PATH" in found.hint
    assert "perhaps in libcudart.so.11.0" in finding_of(report, "symbols", "wrong").detail
    assert report.facts["needed"]["libcudart.so.11.0"] is None

    elsewhere = stub.parent / "elsewhere"
    elsewhere.mkdir()
    kept.rename(elsewhere / "libcudart.so.11.0")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(elsewhere))
    assert failure_of(path) == ""
    assert finding_of(examine(path), "libraries", "ok")


def test_a_version_that_the_library_here_does_not_have(build, tmp_path: Path) -> None:
    script = tmp_path / "map"
    script.write_text("GLIBC_9.1 { f; }; GLIBC_9.2 { g; } GLIBC_9.1;")
    flags = ["-Wl,-soname,libnew.so", f"-Wl,--version-script={script}"]
    build("libnew.so", "void f(void) {} void g(void) {}", *flags)
    path = build(
        "op.so",
        "void f(void); void g(void); void use(void) { f(); g(); }",
        str(tmp_path / "libnew.so"),
        "-Wl,-rpath,$ORIGIN",
    )
    assert failure_of(path) == ""
    assert finding_of(examine(path), "C library", "ok").detail == "needs GLIBC 9.2 (here 9.2)"
    script.write_text("GLIBC_9.1 { f; g; };")
    build("libnew.so", "void f(void) {} void g(void) {}", *flags)
    loader._read.cache_clear()
    assert "`GLIBC_9.2' not found" in failure_of(path)
    found = finding_of(examine(path), "C library", "wrong")
    assert found.detail.endswith("there is no GLIBC_9.2 of libnew.so here")


# --- names -----------------------------------------------------------------------------------------------


def test_a_name_for_another_python(build) -> None:
    path = build("foo.cpython-39-x86_64-linux-gnu.so", MODULE.format("foo"))
    assert "No module named 'foo'" in failure_of(path, "foo")
    found = finding_of(examine(path), "Python", "wrong")
    assert found.detail.startswith("for 3.9; this is ")
    assert "python3.9" in found.hint


def test_a_name_that_is_not_the_modules(build) -> None:
    path = build("foo.so", MODULE.format("bar"))
    assert "PyInit_foo" in failure_of(path, "foo")
    found = finding_of(examine(path), "module", "wrong")
    assert found.hint == f"`mv {path} {path.parent}/bar.so`"
    subprocess.run(found.hint.strip("`").split(), check=True)
    assert finding_of(examine(path.parent / "bar.so"), "module", "ok")


def test_a_module_without_its_function(build) -> None:
    path = build("foo.abi3.so", "int x;")
    assert "PyInit_foo" in failure_of(path, "foo")
    assert "PYBIND11_MODULE" in finding_of(examine(path), "module", "wrong").hint


def test_what_pybind_was_compiled_for(build) -> None:
    text = (
        'const char *a = "3.9", *b = "module was compiled for Python %s, but";'
        'const char *c = "__pybind11_internals_v4_gcc_libstdcpp_cxxabi1013__";'
    )
    path = build("foo.so", MODULE.format("foo") + text + "void use(void) { PyErr_Occurred(); _ZN2at9not_thereEv(); }")
    report = examine(path)
    assert finding_of(report, "Python", "wrong").detail.startswith("compiled for 3.9, this is")
    assert "internals 4_gcc_libstdcpp_cxxabi1013, torch's are " in finding_of(report, "pybind11", "warn").detail


def test_the_package_that_a_file_belongs_to(build, tmp_path: Path) -> None:
    path = build("foo.so", MODULE.format("foo") + "void use(void) { _ZN2at9not_thereEv(); }")
    info = tmp_path / "attention-2.6.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: attention\nVersion: 2.6.3+cu12torch2.4cxx11abiFALSE\n")
    (info / "RECORD").write_text("foo.so,,\n")
    found = finding_of(examine(path), "torch", "wrong")
    assert "for torch 2.4 (attention 2.6.3+cu12torch2.4cxx11abiFALSE)" in found.detail
    assert found.hint.startswith("`pip install torch==2.4`")
    (info / "METADATA").write_text("Name: attention\nVersion: 1.0\nRequires-Dist: torch==2.5.1\n")
    found = finding_of(examine(path), "torch", "wrong")
    assert found.hint.startswith("`pip install torch==2.5.1`")
    assert "--no-build-isolation attention`" in found.hint


# --- files that are not libraries for this machine ------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"hello", "is not an ELF file: it begins with b'hello'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of git-lfs"),
        (b"MZ\x90\x00", "is a library of Windows"),
        (b"\x7fELF\x02\x01\x01", "is cut off: it has 7 of 64 bytes"),
    ],
)
def test_a_file_that_is_no_library(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "foo.so"
    path.write_bytes(content)
    (found,) = examine(path).findings
    assert found.state == "wrong"
    assert says in found.detail
    assert "`" in found.hint


def test_a_file_of_python_is_no_library(tmp_path: Path) -> None:
    """The hint was to install it again."""
    path = tmp_path / "op.py"
    path.write_text("import torch\n")
    (found,) = examine(path).findings
    assert (found.state, found.detail) == ("wrong", "is a file of Python, not a shared library")
    assert found.hint.startswith(f"`opwright inspect {path}`")


def test_a_file_that_was_cut_off_is_of_another_machine_or_not_linked(build) -> None:
    whole = build("op.so", "int x;").read_bytes()
    path = build("op.so", "int x;")
    path.write_bytes(whole[:-1000])
    assert f"it has {len(whole) - 1000} of {len(whole)} bytes" in examine(path).findings[0].detail
    path.write_bytes(whole[:18] + (183).to_bytes(2, "little") + whole[20:])  # e_machine: aarch64
    assert "for aarch64, and this machine is" in finding_of(examine(path), "file", "wrong").detail
    unlinked = path.with_name("op.o")
    subprocess.run(["gcc", "-c", path.with_name("op.so.c"), "-o", unlinked], check=True)
    assert "object file, not a shared library" in finding_of(examine(unlinked), "file", "wrong").detail


def test_a_damaged_file_is_a_finding_never_an_error(build) -> None:
    path = build("op.so", MODULE.format("op") + "void use(void) { _ZN2at9not_thereEv(); puts(0); }")
    whole, chance = path.read_bytes(), random.Random(4)
    states = set()
    for _ in range(100):
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 20))):
            # Headers and tables are at both ends of the file.
            at = chance.choice((chance.randrange(0x400), len(whole) - 1 - chance.randrange(0x800)))
            damaged[at] = chance.randrange(256)
        path.write_bytes(damaged)
        states |= {finding.state for finding in examine(path).findings}
    assert "wrong" in states


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        (".rodata", 32, 1 << 60),
        (".dynsym", 24, 1 << 40),
        (".gnu.version_r", 44, 1 << 31),
    ],  # size, place, entries
)
def test_a_table_that_claims_too_much(build, section: str, field: int, value: int) -> None:
    path = build("op.so", 'const char *text = "text"; void use(void) { puts(text); }')
    whole = bytearray(path.read_bytes())
    with path.open("rb") as f:
        elf = ELFFile(f)
        at = elf["e_shoff"] + elf.get_section_index(section) * elf["e_shentsize"] + field
    whole[at : at + 8] = value.to_bytes(8, "little")
    path.write_bytes(whole)
    assert "is damaged" in finding_of(examine(path), "file", "wrong").detail


# --- GPU code --------------------------------------------------------------------------------------------


@pytest.fixture
def cuda_library(tmp_path: Path):
    """Compiles a kernel for architectures."""

    def compile(*codes: str) -> Path:
        source = tmp_path / "k.cu"
        source.write_text("__global__ void k(float *x) { *x += 1; }\nvoid go(float *x) { k<<<1, 1>>>(x); }\n")
        flags = [f"-gencode=arch=compute_{re.sub('.*_', '', code)},code={code}" for code in codes]
        command = ["nvcc", "-shared", "-Xcompiler", "-fPIC", *flags, source, "-o", tmp_path / "k.so"]
        subprocess.run(command, check=True)
        return tmp_path / "k.so"

    return compile


@pytest.mark.parametrize(
    ("machine_code", "ptx", "gpu", "way"),
    [
        # CUDA C++ Programming Guide: binary compatibility within a major version, upwards; PTX upwards; "a" for
        # one architecture only; "f" for a family.
        ("80", "", "86", "machine code"),
        ("86", "", "80", ""),
        ("80", "", "90", ""),
        ("80", "80", "90", "PTX"),
        ("80", "90", "86", "machine code"),
        ("", "90", "86", ""),
        ("90a", "", "90", "machine code"),
        ("90a", "90a", "100", ""),
        ("100f", "", "103", "machine code"),
        ("100a", "", "103", ""),
    ],
)
def test_what_runs_on_a_gpu(machine_code: str, ptx: str, gpu: str, way: str) -> None:
    assert DeviceCode(tuple(machine_code.split()), tuple(ptx.split())).way_to_run_on(gpu) == way


@pytest.mark.nvcc
def test_gpu_code(cuda_library, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cuda_library("sm_80", "sm_90", "compute_90")
    facts = examine(path).facts
    assert (facts["machine_code"], facts["ptx"]) == (("80", "90"), ("90",))
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    assert f"release {facts['cuda']}," in said
    for gpu, state, says in [
        ("86", "ok", "sm_86 runs its machine code"),
        ("120", "ok", "sm_120 runs its PTX"),
        ("75", "wrong", "no kernel image for sm_75"),
    ]:
        monkeypatch.setattr(cuda, "gpu_architectures", lambda gpu=gpu: (gpu,))
        monkeypatch.setattr(cuda, "driver_version", lambda: "99.0")
        found = finding_of(examine(path), "GPU code", state)
        assert says in found.detail
    assert 'TORCH_CUDA_ARCH_LIST="7.5"' in found.hint
    monkeypatch.setattr(cuda, "gpu_architectures", lambda: ("120",))
    monkeypatch.setattr(cuda, "driver_version", lambda: "11.0")
    assert "the driver knows 11.0" in finding_of(examine(path), "GPU code", "wrong").detail


@pytest.mark.nvcc
def test_code_for_one_gpu_only(cuda_library) -> None:
    code = read_library(cuda_library("sm_90a", "sm_90")).device_code
    assert code.machine_code == ("90", "90a")
    only = read_library(cuda_library("sm_90a")).device_code
    assert [only.way_to_run_on(gpu) for gpu in ("90", "100")] == ["machine code", ""]


# --- the command -----------------------------------------------------------------------------------------


def test_the_command(build) -> None:
    def doctor(*words: object) -> subprocess.CompletedProcess:
        return run_opwright("doctor", *map(str, words), env={"NO_COLOR": "1"})

    healthy, ill = (
        build("good.so", MODULE.format("good")),
        build("ill.so", "void use(void) { _ZN2at9not_thereEv(); }"),
    )
    assert doctor(healthy).returncode == 0
    shown = doctor(ill)
    assert (shown.returncode, shown.stderr) == (1, "")
    assert re.search(r"^symbols +wrong +1 missing, .*at::not_there\(\)$", shown.stdout, re.MULTILINE)
    assert re.search(r"^hint: torch, symbols: .*`pip install", shown.stdout, re.MULTILINE)
    facts = json.loads(doctor(ill, "--json").stdout)
    assert facts["missing_symbols"] == {"_ZN2at9not_thereEv": "at::not_there()"}
    for finding in facts["findings"]:
        assert finding["detail"] in shown.stdout
        assert finding["state"] == "ok" or finding["hint"] in shown.stdout
    assert doctor(ill.parent / "absent.so").returncode == 2
    assert "is a directory" in doctor(ill.parent).stdout
