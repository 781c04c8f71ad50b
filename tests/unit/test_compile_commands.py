"""compile_commands.json: what is translated, where it is put, and what happens to what is there already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opwright.build import compile_commands
from opwright.build.compile_commands import Command, from_compiler, project_of, record, write
from opwright.errors import SettingError


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("OPWRIGHT_WITHOUT", raising=False)
    folder = tmp_path / "project with space"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    return folder


def command(file: Path, *flags: str) -> Command:
    file.touch()
    return Command(str(file.parent), str(file), ("c++", *flags, "-c", str(file)))


def entries(project: Path) -> dict[str, dict]:
    return {e["file"]: e for e in json.loads((project / "build" / "compile_commands.json").read_text())}


# --- translation --------------------------------------------------------------------------------------


def test_gcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWRIGHT_CACHE_DIR", str(tmp_path / "store"))
    (tmp_path / "all.h").touch()
    (tmp_path / "all.h.gch").touch()
    (tmp_path / "own.h").touch()
    line = (
        "ccache /usr/bin/g++-12 -MMD -MF a.d -DNAME=x -D OTHER -UNDEBUG -I inc -I../up -isystem /opt/torch "
        "-include own.h -include all.h -include opwright-store/pch/extension.h -Iopwright-store/pch -include cstdio "
        "-Winvalid-pch -Werror -Werror=return-type -Wall -Wno-maybe-uninitialized -Wl,-O1 -Wp,-DX "
        "-fno-gnu-unique -fvar-tracking -fno-exceptions -fopenmp -mavx256-split-unaligned-load -mavx512bf16 "
        "-march=native -std=gnu++17 -O2 -g -Xlinker -I -L/lib -lfoo -c a.cpp -o a.o"
    )
    found = from_compiler(
        line.replace("opwright-store/", f"{tmp_path}/store/opwright-store/").split(), tmp_path, Path("a.cpp")
    )
    assert (found.directory, found.file) == (str(tmp_path), str(tmp_path / "a.cpp"))
    assert list(found.arguments) == [
        "/usr/bin/g++-12", "-DNAME=x", "-DOTHER", "-UNDEBUG", "-I", str(tmp_path / "inc"),
        "-I", str(tmp_path.parent / "up"), "-isystem", "/opt/torch", "-include", str(tmp_path / "own.h"),
        "-include", "cstdio", "-Wall", "-Wno-maybe-uninitialized", "-fno-exceptions", "-fopenmp",
        "-mavx512bf16", "-march=native", "-std=gnu++17", "-O2", "-Wno-unknown-warning-option",
        "-c", str(tmp_path / "a.cpp"),
    ]  # fmt: skip


def test_clang_keeps_its_own_flags(tmp_path: Path) -> None:
    line = ["clang++-18", "-fblocks", "-stdlib=libc++", "-include-pch", "x.pch", "-x", "c++", "a.inc"]
    found = from_compiler(line, tmp_path, tmp_path / "a.inc")
    assert found.arguments[:5] == ("clang++-18", "-fblocks", "-stdlib=libc++", "-x", "c++")


def test_the_folder_of_a_build_is_not_in_the_command(tmp_path: Path) -> None:
    # It has a random name and is gone afterwards: the file would change with every build.
    line = ["c++", "-I", "/opt/include", "-c", str(tmp_path / "a.cpp"), "-o", "0.o"]
    found = {from_compiler(line, tmp_path / name, tmp_path / "a.cpp") for name in ("work1", "work2")}
    assert len(found) == 1


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    for folder in ("bin", "nvvm", "include/cccl"):
        (tmp_path / "cuda" / folder).mkdir(parents=True)
    (tmp_path / "cuda" / "include" / "cuda.h").touch()
    return tmp_path / "cuda"


def test_nvcc(toolkit: Path, tmp_path: Path) -> None:
    line = (
        f"sccache {toolkit}/bin/nvcc --generate-dependencies-with-compile --dependency-output a.d "
        "-gencode=arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=[sm_90a,compute_90a] "
        "--expt-relaxed-constexpr --extended-lambda --threads 4 -t4 -Xptxas -v,-O3 --ptxas-options=-v "
        "-Xcompiler=-fPIC,-fvisibility=hidden -Xcompiler -fopenmp,-Wall --compiler-options '-g' "
        "-ccbin /usr/bin/g++ -I=inc --include-path more -isystem /opt/torch -DA -D B=1 --define-macro=C "
        "-std c++20 -O3 -lineinfo --use_fast_math -rdc=true -Xcudafe --diag_suppress=20012 -x cu -c a.cu -o a.o"
    )
    found = from_compiler(line.split(), tmp_path, Path("a.cu"))
    assert list(found.arguments) == [
        "clang++", "-x", "cuda", "--cuda-device-only", "--cuda-gpu-arch=sm_90a",
        f"--cuda-path={toolkit}", "-isystem", str(toolkit / "include" / "cccl"),
        "-idirafter", str(compile_commands.NATIVE / "clangd"), "-fPIC", "-fvisibility=hidden", "-fopenmp",
        "-Wall", "-I", str(tmp_path / "inc"), "-I", str(tmp_path / "more"), "-isystem", "/opt/torch",
        "-DA", "-DB=1", "-DC", "-std=c++20", "-Wno-unknown-warning-option", "-c", str(tmp_path / "a.cu"),
    ]  # fmt: skip


def test_nvcc_of_conda(tmp_path: Path) -> None:
    # Its headers are in targets/x86_64-linux, a layout that clang's --cuda-path refuses.
    include = tmp_path / "env" / "targets" / "x86_64-linux" / "include"
    include.mkdir(parents=True)
    for folder in ("bin", "nvvm"):
        (tmp_path / "env" / folder).mkdir()
    found = from_compiler([f"{tmp_path}/env/bin/nvcc", "-c", "a.cu"], tmp_path, Path("a.cu")).arguments
    assert not any(flag.startswith("--cuda-path") for flag in found)
    assert found[found.index("-isystem") + 1] == str(include)


# --- projects -----------------------------------------------------------------------------------------


def test_the_project_is_the_nearest(project: Path) -> None:
    inner = project / "inner" / "src"
    inner.mkdir(parents=True)
    assert project_of(inner / "a.cpp") == project
    (project / "inner" / "setup.py").touch()
    assert project_of(inner / "a.cpp") == project / "inner"
    (inner / ".git").touch()  # a work tree's .git is a file
    assert project_of(inner / "a.cpp") == inner


def test_what_belongs_to_no_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert project_of(project.parent / "a.cpp") is None
    assert project_of(project / ".venv/lib/python3.11/site-packages/x/a.cpp") is None
    monkeypatch.setenv("OPWRIGHT_CACHE_DIR", str(project / ".cache"))
    assert project_of(project / ".cache" / "opwright-store" / "work" / "inline0.cpp") is None
    (project / "src").mkdir()
    monkeypatch.setenv("HOME", str(project))
    assert project_of(project / "src" / "a.cpp") is None
    monkeypatch.setenv("HOME", str(project / "src"))
    assert project_of(project / "src" / "a.cpp") is None


# --- the file -----------------------------------------------------------------------------------------


def test_write_merges_by_file(project: Path) -> None:
    a, b = project / "a.cpp", project / "b.cpp"
    assert write([command(a, "-O1"), command(b)], project) == project / "build" / "compile_commands.json"
    write([command(a, "-O2")], project)
    assert "-O2" in entries(project)[str(a)]["arguments"]
    assert list(entries(project)) == [str(a), str(b)]
    assert (project / "build" / ".gitignore").read_text() == "*\n"
    b.unlink()
    write([], project)
    assert list(entries(project)) == [str(a)]


def test_nothing_is_written_when_nothing_changes(project: Path) -> None:
    found = [command(project / "a.cpp")]
    path = write(found, project)
    os.utime(path, ns=(1, 1))
    write(found, project)
    assert path.stat().st_mtime_ns == 1


def test_entries_of_other_tools_stay(project: Path) -> None:
    folder = project / "build"
    folder.mkdir()
    (project / "a.cpp").touch()
    cmake = {
        "directory": str(folder),
        "command": "c++ -c generated.cpp",
        "file": "generated.cpp",
    }  # not there yet
    same = {"directory": str(folder), "command": "c++ -c ../a.cpp", "file": "../a.cpp"}
    (folder / "compile_commands.json").write_text(json.dumps([cmake, same]))
    write([command(project / "a.cpp")], project)
    found = json.loads((folder / "compile_commands.json").read_text())
    assert found == [cmake, command(project / "a.cpp").entry()]
    assert not (folder / ".gitignore").exists()  # the folder is not ours


def test_one_in_the_root_is_the_one_that_clangd_reads(project: Path) -> None:
    (project / "build" / "debug").mkdir(parents=True)
    (project / "compile_commands.json").symlink_to("build/debug/compile_commands.json")
    path = write([command(project / "a.cpp")], project)
    assert path == project / "build" / "debug" / "compile_commands.json"
    assert (project / "compile_commands.json").is_symlink()
    assert len(json.loads((project / "compile_commands.json").read_text())) == 1


@pytest.mark.parametrize("text", ["[{", "{}", "[1]"])
def test_what_is_no_list_of_commands_is_left_alone(project: Path, text: str) -> None:
    path = project / "build" / "compile_commands.json"
    path.parent.mkdir()
    path.write_text(text)
    assert write([command(project / "a.cpp")], project) is None
    assert path.read_text() == text
    path.write_text("")  # what a crash of the machine leaves
    assert write([command(project / "a.cpp")], project) == path


def test_a_project_that_cannot_be_written(project: Path) -> None:
    found = [command(project / "a.cpp")]
    (project / "build").touch()
    assert write(found, project) is None
    assert record(found) == []
    assert not compile_commands.keep_text(project / "build" / "opwright" / "contract.h", "")
    (project / "build").unlink()
    if os.geteuid():
        project.chmod(0o555)
        assert write(found, project) is None
        project.chmod(0o755)


def test_a_process_that_holds_the_lock_holds_up_no_build(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [command(project / "a.cpp")]
    path = write([], project)
    monkeypatch.setattr(compile_commands, "_LOCK_SECONDS", 0.05)
    with compile_commands._lock(path.parent):
        start = time.monotonic()
        assert write(found, project) is None
        assert time.monotonic() - start < 1
    assert write(found, project) == path


def test_processes_at_once_lose_no_entry(project: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom opwright.build import compile_commands\n"
        "from opwright.build.compile_commands import from_compiler, write\n"
        "compile_commands._LOCK_SECONDS = 60\n"  # on a busy machine five others can take more than the usual one
        "project, who = Path(sys.argv[1]), sys.argv[2]\n"
        "for i in range(20):\n"
        "    file = project / f'{who}_{i}.cpp'\n"
        "    file.touch()\n"
        "    assert write([from_compiler(['c++', '-c', str(file)], project, file)], project)\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, str(project), str(i)]) for i in range(6)]
    path = project / "build" / "compile_commands.json"
    while any(process.poll() is None for process in running):
        if path.exists():
            json.loads(path.read_text())  # whole at every moment
    assert [process.returncode for process in running] == [0] * 6
    assert len(entries(project)) == 6 * 20
    assert {p.name for p in (project / "build").iterdir()} == {".gitignore", "compile_commands.json"}


def test_the_setting(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [command(project / "a.cpp"), command(project.parent / "loose.cpp")]
    monkeypatch.setenv("OPWRIGHT_WITHOUT", "pch,compile_commands")
    assert record(found) == []
    assert not (project / "build").exists()
    monkeypatch.setenv("OPWRIGHT_WITHOUT", "pch")
    assert record(found) == [project / "build" / "compile_commands.json"]
    assert list(entries(project)) == [str(project / "a.cpp")]
    monkeypatch.setenv("OPWRIGHT_WITHOUT", "maybe")
    with pytest.raises(SettingError, match="OPWRIGHT_WITHOUT"):
        record(found)
