"""Files that an extension is made of are compared by content, wherever they are found."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from extension_modules import source

from opwright import settings
from opwright.cpp_extension import load, load_inline

pytestmark = pytest.mark.compiler

HEADER = "#include <vector>\n#include <number.h>\n"


def write_archive(path: Path, value: int) -> None:
    source, object_file = path.with_suffix(".c"), path.with_suffix(".o")
    source.write_text(f"int number(void) {{ return {value}; }}\n")
    subprocess.run(["cc", "-fPIC", "-c", source, "-o", object_file], check=True)
    path.unlink(missing_ok=True)
    subprocess.run(["ar", "rc", path, object_file], check=True)


@pytest.mark.parametrize("flags", [["{}/libq.a"], ["-L{}", "-lq"]], ids=["path", "name"])
def test_a_static_library_that_changes(flags: list[str], tmp_path: Path) -> None:
    """The flags alone were compared, and the module of the earlier library was returned."""
    text = 'extern "C" int number();\n' + source("number()")
    flags = [flag.format(tmp_path) for flag in flags]
    for value in (1, 2):
        write_archive(tmp_path / "libq.a", value)
        assert load_inline("archive", text, extra_ldflags=flags, no_implicit_headers=True).value() == value


@pytest.mark.parametrize("how", ["-isystem", "CPATH", "CPLUS_INCLUDE_PATH"])
def test_a_header_of_the_system_that_changes(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the headers of `#include "..."` and `-I` were compared."""
    file = tmp_path / "k.cpp"
    file.write_text(HEADER + source("NUMBER"))
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, value in zip(folders, (1, 2), strict=True):
        folder.mkdir()
        (folder / "number.h").write_text(f"#define NUMBER {value}\n")

    def value(folder: Path) -> int:
        if how == "-isystem":
            return load("system_header", file, extra_cflags=[f"-isystem {folder}"]).value()
        monkeypatch.setenv(how, str(folder))
        return load("system_header", file).value()

    assert [value(folder) for folder in folders] == [1, 2]
    (folders[0] / "number.h").write_text("#define NUMBER 3\n")
    assert [value(folder) for folder in folders] == [3, 2]


def test_white_space_around_a_folder(tmp_path: Path) -> None:
    """PyTorch strips it; it was part of the name."""
    (tmp_path / "number.h").write_text("#define NUMBER 6\n")
    text = HEADER + source("NUMBER")
    folders = [f"  {tmp_path}\n"]
    assert load_inline("spaced", text, extra_include_paths=folders, no_implicit_headers=True).value() == 6


@pytest.mark.parametrize("through", ["source", "folder"])
def test_a_header_above_a_folder_belongs_to_its_checkout(through: str, tmp_path: Path) -> None:
    """It was compared where the first checkout has it, and the second one got the first one's module."""
    checkouts = [tmp_path / "one", tmp_path / "two"]
    for checkout, value in zip(checkouts, (1, 2), strict=True):
        for name, text in {
            "number.h": f"#define NUMBER {value}\n",
            "include/inner.h": '#include "../number.h"\n',
            "cpu/k.cpp": f'#include "{"../number.h" if through == "source" else "inner.h"}"\n' + source("NUMBER"),
        }.items():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            (checkout / name).write_text(text)

    def value(checkout: Path) -> int:
        return load("above", checkout / "cpu" / "k.cpp", extra_include_paths=[checkout / "include"]).value()

    assert [value(checkout) for checkout in checkouts] == [1, 2]
    (checkouts[0] / "number.h").write_text("#define NUMBER 3\n")
    assert [value(checkout) for checkout in checkouts] == [3, 2]


def test_no_header_of_compilers_python_and_torch_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWRIGHT_CACHE_DIR", str(tmp_path))
    text = "#include <cmath>\n#include <vector>\n#include <c10/util/Exception.h>\n" + source(5)
    assert load_inline("own_headers", text, no_implicit_headers=True).value() == 5
    records = list(settings.store_dir().glob("objects/*/*/record.json"))
    assert [json.loads(record.read_text())["files"] for record in records] == [{}]


@pytest.mark.parametrize("folder", [None, "build"])
def test_relative_paths_of_flags(folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were relative to a directory of the build, where there is nothing."""
    monkeypatch.chdir(tmp_path)
    base = tmp_path / (folder or ".")
    (base / "include").mkdir(parents=True)
    (base / "include" / "number.h").write_text("#define NUMBER 4\n")
    (base / "before.h").write_text("#define BEFORE 50\n")
    write_archive(base / "include" / "libq.a", 600)
    text = '#include <number.h>\nextern "C" int number();\n' + source("NUMBER + BEFORE + number()")
    options: dict[str, Any] = {
        "extra_cflags": ["-Iinclude", "-include", "before.h"],
        "extra_ldflags": ["-L include -lq"],
        "build_directory": folder,
        "no_implicit_headers": True,
    }
    assert load_inline("relative", text, **options).value() == 654


@pytest.mark.parametrize("folder", [None, "build"])
def test_relative_files_of_a_link(folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were looked for in a directory of the build, and a new content must be linked again."""
    monkeypatch.chdir(tmp_path)
    base = tmp_path / (folder or ".")
    base.mkdir(exist_ok=True)
    (base / "cap.map").write_text("{ global: PyInit_*; local: *; };\n")
    flags = ["-Wl,--whole-archive", "libq.a", "-Wl,--no-whole-archive", "-Wl,--version-script=cap.map"]
    text = 'extern "C" int number();\n' + source("number()")
    options: dict[str, Any] = {"extra_ldflags": flags, "build_directory": folder, "no_implicit_headers": True}
    for value in (1, 2):
        write_archive(base / "libq.a", value)
        assert load_inline("relative_link", text, **options).value() == value
