"""Manifests, and recording into them: no Triton is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from opwright.errors import ManifestError
from opwright.triton.packs.manifest import KernelEntry, Manifest, read_manifest

from .pack_cases import ADD, FILL, opwright, write_manifest

# Writes what the runtime writes: a line for every key at its first launch, options as VALUE texts.
APPLICATION = """
import json, os, sys
settings = os.environ["OPWRIGHT_TRITON"].split(",")
(path,) = [item.removeprefix("record=") for item in settings if item.startswith("record=")]
with open(path, "a") as file:
    for size in sys.argv[1:]:
        line = {"file": os.path.abspath("kernels/add.py"), "function": "add", "args": ["*fp32:16", size], "arch": 90}
        file.write(json.dumps({**line, "options": {"num_warps": "8", "enable_fp_fusion": "False"}}) + "\\n")
print("the application's own output", settings[:-1])
sys.exit(3)
"""


def _record(folder: Path, *sizes: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "app.py").write_text(APPLICATION)
    command = ("--", sys.executable, "app.py", *sizes)
    return opwright(folder, "pack", "record", "--out", "m.json", *command, check=3, **environment)


def test_record_writes_merges_and_passes_the_status_on(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    write_manifest(tmp_path)
    first = _record(tmp_path, "i32:16", "i32", "i32", OPWRIGHT_TRITON="check")
    assert first.stdout == "the application's own output ['check']\n"
    assert first.stderr == snapshot
    assert (tmp_path / "m.json").read_text() == snapshot
    again = _record(tmp_path, "i32")
    assert again.stderr == snapshot
    third = _record(tmp_path, "i64", "i32")
    assert third.stderr == snapshot
    written = (tmp_path / "m.json").read_text()
    assert written.count('"add"') == 3
    (tmp_path / "m.json").unlink()
    _record(tmp_path, "i64", "i32", "i32:16")
    assert (tmp_path / "m.json").read_text() == written


def test_record_keeps_what_was_written_by_hand(tmp_path: Path) -> None:
    tune = [{"arguments": {"n": 5}, "grid": "grid"}]
    by_hand = {"file": "kernels/gone.py", "function": "f", "tune": tune}
    (tmp_path / "m.json").write_text(json.dumps({"kernels": [by_hand]}))
    write_manifest(tmp_path)
    _record(tmp_path, "i32")
    document = json.loads((tmp_path / "m.json").read_text())
    assert document["kernels"][1] == by_hand
    assert document["kernels"][0]["options"] == {"enable_fp_fusion": False, "num_warps": 8}
    assert document["architectures seen"] == [90]


def test_options_of_the_command_are_its_own(tmp_path: Path) -> None:
    program = "import sys; print(sys.argv[1:])"
    command = ("--", sys.executable, "-c", program, "--arch", "3", "--out", "x", "-h")
    found = opwright(tmp_path, "pack", "record", *command)
    assert found.stdout == "['--arch', '3', '--out', 'x', '-h']\n"
    assert "nothing was recorded" in found.stderr


def test_record_of_no_command(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    assert opwright(tmp_path, "pack", "record", check=2).stderr == snapshot
    assert opwright(tmp_path, "pack", "record", "--", "./nothing", check=2).stderr == snapshot
    assert not list(tmp_path.iterdir())


def test_a_killed_command(tmp_path: Path) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    opwright(tmp_path, "pack", "record", "--", sys.executable, "-c", program, check=128 + 15)


def test_what_is_written_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    file = str(tmp_path / "k.py")
    entries = (
        KernelEntry(file, "a", ("*fp32:16", '="r\\"é\\\\"', "(i32, =(1, 2))"), (("maxnreg", None), ("x", (1, 2.5)))),
        KernelEntry(file, "b", None, (), ({"arguments": {"n": 4}},)),
    )
    Manifest(path).merged(entries, [90, 80, 90]).write()
    (tmp_path / "k.py").write_text("")
    found = read_manifest(path)
    assert [entry.identity for entry in found.entries] == [entry.identity for entry in entries]
    assert found.entries[1].tune == entries[1].tune
    assert found.architectures == (80, 90)
    assert [entry.line for entry in found.entries] == [4, 5]
    assert sorted(os.listdir(tmp_path)) == ["k.py", "m.json"]


@pytest.mark.parametrize("options", [{"num_warps": 8}, {"num_warps": "8"}])
def test_options_as_values_and_as_texts_are_the_same_key(tmp_path: Path, options: dict) -> None:
    path = write_manifest(tmp_path, {**ADD, "options": {**options, "precision": "tf32", "fusion": "True"}})
    (entry,) = read_manifest(path).entries
    assert entry.key == '*fp32:16, *fp32:16, *fp32:16, i32, =256; fusion=True, num_warps=8, precision="tf32"'


def test_files_are_named_from_the_manifest(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path / "a" / "m.json")
    inside, beside = str(tmp_path / "a" / "b" / "k.py"), str(tmp_path / "c" / "k.py")
    assert (manifest.name_of(inside), manifest.name_in_pack(inside)) == ("b/k.py", "b/k.py")
    assert (manifest.name_of(beside), manifest.name_in_pack(beside)) == ("../c/k.py", "c/k.py")
    assert manifest.name_of("/elsewhere/k.py") == "/elsewhere/k.py"


BAD = {
    "no JSON": "{\n",
    "no list": '{"kernel": []}',
    "another field": '{"kernels": [], "files": []}',
    "architectures": '{"kernels": [], "architectures seen": ["90"]}',
    "no object": '{"kernels": [\n1]}',
    "unknown field": '{"kernels": [\n{"file": "kernels/add.py", "function": "f", "args": [], "arch": 90}]}',
    "no function": '{"kernels": [\n{"file": "kernels/add.py", "args": []}]}',
    "no args": '{"kernels": [\n{"file": "kernels/add.py", "function": "f"}]}',
    "missing file": '{"kernels": [\n\n{"file": "kernels/add.py", "function": "f", "args": []},\n{"file": "gone.py", "function": "f", "args": []}]}',
    "no class": '{"kernels": [{"file": "kernels/add.py", "function": "f", "args": [\n"i32", "*fp99"]}]}',
    "another way to write it": '{"kernels": [{"file": "kernels/add.py", "function": "f", "args": ["=1.50"]}]}',
    "args": '{"kernels": [\n{"file": "kernels/add.py", "function": "f", "args": [1024]}]}',
    "options": '{"kernels": [\n{"file": "kernels/add.py", "function": "f", "args": [], "options": [8]}]}',
    "option": '{"kernels": [\n{"file": "kernels/add.py", "function": "f", "args": [], "options": {"a": {}}}]}',
    "tune": '{"kernels": [\n{"file": "kernels/add.py", "function": "f", "tune": [{"n": 5}]}]}',
    "tune dtype": '{"kernels": [\n{"file": "kernels/add.py", "function": "f", "tune": [{"arguments": {"x": {"shape": [4], "dtype": "half"}}}]}]}',
    "tune shape": '{"kernels": [\n{"file": "kernels/add.py", "function": "f", "tune": [{"arguments": {"x": {"shape": 4, "dtype": "fp16"}}}]}]}',
}


@pytest.mark.parametrize("name", BAD)
def test_bad_manifests_name_the_line(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    path = write_manifest(tmp_path)
    path.write_text(BAD[name])
    with pytest.raises(ManifestError) as found:
        read_manifest(path)
    assert str(found.value).replace(str(tmp_path), "FOLDER") == snapshot


def test_lines_are_those_of_the_file_however_it_is_laid_out(tmp_path: Path) -> None:
    path = write_manifest(tmp_path)
    path.write_text('{"kernels":\n\n[' + json.dumps(FILL) + ",\n" + json.dumps(ADD, indent=1) + "\n\n] }")
    assert [entry.line for entry in read_manifest(path).entries] == [3, 4]


def test_there_is_no_manifest(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    assert opwright(tmp_path, "pack", "build", "m.json", "--out", "a.opk", "--arch", "90", check=2).stderr == snapshot


def test_help_of_packs_imports_neither_torch_nor_triton(start_python) -> None:
    start_python(
        "import sys, opwright.cli.pack_command, opwright.triton.packs.build, opwright.triton.packs.tune\n"
        "import opwright.triton.packs.verify, opwright.triton.packs.record, opwright.triton.packs.embed\n"
        "assert not {'torch', 'triton'} & set(sys.modules)"
    )


def test_no_module_beside_the_worker_hides_one_of_the_standard_library() -> None:
    import opwright.triton

    (folder,) = opwright.triton.__path__
    names = {path.stem for path in Path(folder).iterdir()}
    assert not names & sys.stdlib_module_names
