"""`opwright wheel --check`: what it says of wheels that are right, and of such as are not."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from opwright.errors import PackageError
from opwright.package.audit import audit_wheel

pytestmark = pytest.mark.compiler


def library(folder: Path, source: str = "int f(void) { return 1; }", *flags: str) -> bytes:
    (folder / "k.c").write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", "k.c", "-o", "k.so", *flags], cwd=folder, check=True)
    return (folder / "k.so").read_bytes()


def make_wheel(folder: Path, files: dict[str, bytes], tag: str = "py3-none-manylinux_2_34_x86_64") -> Path:
    path = folder / f"sample-1.0-{tag}.whl"
    files = {
        "sample/__init__.py": b"",
        "sample/py.typed": b"",
        "sample-1.0.dist-info/licenses/LICENSE": b"",
        "sample-1.0.dist-info/METADATA": b"Name: sample",
        "sample-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0",
    } | files
    rows = []
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{name},sha256={digest},{len(data)}")
            archive.writestr(name, data)
        archive.writestr("sample-1.0.dist-info/RECORD", "\n".join([*rows, "sample-1.0.dist-info/RECORD,,"]))
    return path


def test_a_wheel_without_problems(tmp_path: Path) -> None:
    audit = audit_wheel(make_wheel(tmp_path, {"sample/k.so": library(tmp_path)}))
    assert audit.passed
    assert not audit.remarks
    facts = dict(audit.facts)
    assert facts["python"] == "any"
    assert facts["sample/k.so"].endswith("x86_64")
    assert facts["  of torch"] == "no symbol"


@pytest.mark.parametrize(
    ("source", "flags", "text"),
    [
        ("void PyList_New(void); void f(void) { PyList_New(); }", [], "takes PyList_New from Python, but its name promises any"),
        ("void _ZN2at4onesEv(void); void f(void) { _ZN2at4onesEv(); }", [], "changes with every version"),
        ("int f(void) { return 1; }", ["-Wl,-rpath,/home/me/torch/lib"], "looks for libraries in /home/me/torch/lib"),
    ],
    ids=["Python", "unstable torch", "rpath"],
)  # fmt: skip
def test_problems_of_a_library(tmp_path: Path, source: str, flags: list[str], text: str) -> None:
    audit = audit_wheel(make_wheel(tmp_path, {"sample/k.so": library(tmp_path, source, *flags)}))
    assert not audit.passed
    assert any(text in problem for problem in audit.problems), audit.problems


def test_names_that_promise_too_much(tmp_path: Path) -> None:
    # dlopen has been in libc, not libdl, since glibc 2.34.
    data = library(tmp_path, "void *dlopen(const char *, int); void *f(void) { return dlopen(0, 1); }")
    old = audit_wheel(make_wheel(tmp_path, {"sample/k.so": data}, "py3-none-manylinux_2_17_x86_64"))
    said = "its name promises manylinux_2_17_x86_64, its libraries (GLIBC_2.34) fit manylinux_2_34_x86_64"
    assert said in old.problems, old.problems
    other = audit_wheel(make_wheel(tmp_path, {"sample/k.so": data}, "py3-none-manylinux_2_34_aarch64"))
    assert any("is for x86_64" in p for p in other.problems)
    plain = audit_wheel(make_wheel(tmp_path, {"sample/k.so": data}, "py3-none-linux_x86_64"))
    assert any("not a platform that package indexes accept" in r for r in plain.remarks)


def test_a_library_that_the_wheel_does_not_bring(tmp_path: Path) -> None:
    library(tmp_path, "int g(void) { return 1; }", "-Wl,-soname,libsomething.so.3")
    shutil.move(tmp_path / "k.so", tmp_path / "libsomething.so.3")
    data = library(tmp_path, "int g(void); int f(void) { return g(); }", "libsomething.so.3")
    audit = audit_wheel(make_wheel(tmp_path, {"sample/k.so": data}))
    assert any("needs libsomething.so.3, which is neither in it" in problem for problem in audit.problems), (
        audit.problems
    )
    both = {"sample/k.so": data, "sample/libsomething.so.3": (tmp_path / "libsomething.so.3").read_bytes()}
    data = library(tmp_path, "int g(void); int f(void) { return g(); }", "libsomething.so.3", "-Wl,-rpath,$ORIGIN")
    assert audit_wheel(make_wheel(tmp_path, both | {"sample/k.so": data})).passed


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("torch_tag_core", "its stable ABI (1 function), available from torch 2.12 on"),
        ("torch_new_stable_ivalue", "its stable ABI (1 function), available from torch 2.13 on"),
        ("aoti_torch_get_dim", "its stable ABI (1 function)"),
    ],
)
def test_the_oldest_torch(tmp_path: Path, function: str, text: str) -> None:
    data = library(tmp_path, f"int {function}(void); int f(void) {{ return {function}(); }}")
    assert dict(audit_wheel(make_wheel(tmp_path, {"sample/k.so": data})).facts)["  of torch"] == text


def test_a_changed_file(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, {"sample/a.py": b"1\n"})
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (files | {"sample/a.py": b"2\n", "sample/more.py": b""}).items():
            archive.writestr(name, data)
    problems = audit_wheel(path).problems
    assert "sample/a.py has not the digest that RECORD says" in problems
    assert "sample/more.py is not in RECORD" in problems


def test_what_users_would_miss(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, {})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sample/__init__.py", "")
        archive.writestr("sample-1.0.dist-info/METADATA", "")
        archive.writestr("sample-1.0.dist-info/WHEEL", "")
        names = [
            "sample/__init__.py",
            *(f"sample-1.0.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD")),
        ]
        archive.writestr("sample-1.0.dist-info/RECORD", "".join(f"{name},,\n" for name in names))
    audit = audit_wheel(path)
    assert audit.passed, audit.problems
    assert [remark.split(";")[0].split(",")[0] for remark in audit.remarks] == [
        "it has no licence file", "it has neither py.typed nor stubs",
    ]  # fmt: skip


def test_files_that_are_missing(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, {"sample/a.py": b"1\n"})
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            if not name.endswith(("a.py", "METADATA")):
                archive.writestr(name, data)
    problems = audit_wheel(path).problems
    assert "sample/a.py is in RECORD, but not in the wheel" in problems
    assert "it has no METADATA, so it cannot be installed" in problems


@pytest.mark.parametrize("name", ["a.whl", "a-1-py3-none-any.whl", "a-1.0-py3-none-any.zip"])
def test_a_file_that_is_not_a_wheel(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("no archive")
    with pytest.raises(PackageError, match="not a wheel"):
        audit_wheel(tmp_path / name)
