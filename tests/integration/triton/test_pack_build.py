"""Packs built by the genuine Tritons, then listed, verified, compared, damaged and linked."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from opwright import settings
from opwright.triton.packs.verify import verify
from opwright.triton.worker.packfile import Entry, pack, read_pack, write_pack

from .pack_cases import ADD, FILL, build, opwright, write_manifest

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def pythons(triton_pythons: dict[str, Path]) -> list[Path]:
    """The Python of the oldest Triton, and that of the newest if there is another."""
    ordered = sorted(triton_pythons, key=lambda version: [int(part) for part in version.split(".")])
    return [triton_pythons[version] for version in dict.fromkeys([ordered[0], ordered[-1]])]


@pytest.fixture(scope="module")
def built(pythons: list[Path], tmp_path_factory: Any) -> Path:
    """A folder with a pack of two kernels for three architectures, by every Python."""
    folder = tmp_path_factory.mktemp("built")
    result = build(folder, write_manifest(folder, FILL, ADD), "app.opk", pythons, arch="80,90,100")
    assert result.stdout == "app.opk\n"
    assert re.fullmatch(
        rf"Built {6 * len(pythons)} kernels for sm_80 sm_90 sm_100 in .* s \(.* KiB, 0 cached\)\n",
        result.stderr,
    )
    return folder


def _plain(text: str) -> str:
    """Replaces what depends on the versions that are installed."""
    text = re.sub(r"Triton \d\S*", "Triton VERSION", text)
    text = re.sub(r"ptxas \d\S*", "ptxas VERSION", text)
    text = re.sub(r"driver >= \d\S*", "driver >= VERSION", text)
    text = re.sub(r"\d+(\.\d)? (KiB|MiB)", "SIZE", text)
    text = re.sub(r" in [\d.]+ s", " in TIME", text)
    return re.sub(r"python +/\S+", "python    PYTHON", text)


def test_a_pack_has_every_key_for_every_architecture_and_triton(built: Path, pythons: list[Path]) -> None:
    entries = read_pack(built / "app.opk")
    kernels = [e.record for e in entries if e.blob is not None]
    found = {(r["file"], r["function"], r["arch"], r["triton"]) for r in kernels}
    versions = {r["triton"] for r in kernels}
    assert len(versions) == len(pythons)
    places = [("kernels/packed.py", "fill"), ("kernels/add.py", "add_kernel")]
    assert found == {(*p, arch, v) for p in places for arch in (80, 90, 100) for v in versions}
    described = [e.record for e in entries if e.blob is None]
    assert sorted((r["file"], r["function"]) for r in described) == sorted(places)
    assert {r["triton"] for r in described} == {max(versions)}
    for record in [*kernels, *described]:
        files = dict(map(tuple, record["sources"]))
        assert files.keys() == {record["file"], "triton/__init__.py"}
        assert files[record["file"]] == hashlib.sha256((built / record["file"]).read_bytes()).hexdigest()
    assert str(built).encode() not in (built / "app.opk").read_bytes()


def test_the_same_pack_on_another_machine(built: Path, pythons: list[Path], tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, ADD, FILL)
    env = {"OPWRIGHT_CACHE_DIR": str(tmp_path / "another store")}
    build(tmp_path, manifest, "out/app.opk", pythons[::-1], arch="sm_100,9.0,80", **env)
    assert (tmp_path / "out/app.opk").read_bytes() == (built / "app.opk").read_bytes()


def test_a_second_build_starts_no_python(built: Path, pythons: list[Path]) -> None:
    program = built / "python"  # is given to the build by the name that the cache knows it by
    program.write_text(f'#!/bin/sh\necho started >> {built}/starts\nexec {pythons[0]} "$@"\n')
    program.chmod(0o755)
    first = build(built, built / "manifest.json", "one.opk", [program])
    assert "0 cached" in first.stderr
    assert (built / "starts").read_text().startswith("started")
    (built / "starts").unlink()
    again = build(built, built / "manifest.json", "two.opk", [program])
    assert "2 cached" in again.stderr
    assert not (built / "starts").exists()
    assert (built / "one.opk").read_bytes() == (built / "two.opk").read_bytes()
    folder = settings.store_dir() / "triton"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_changed_is_compiled_again_and_compared(built: Path, pythons: list[Path], tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, FILL, ADD)
    build(tmp_path, manifest, "before.opk", pythons[:1])
    file = tmp_path / "kernels/packed.py"
    file.write_text(file.read_text().replace("tl.arange(0, BLOCK), value)", "tl.arange(0, BLOCK), value + 1)"))
    stale = opwright(tmp_path, "pack", "verify", "before.opk", "--root", ".", check=1)
    assert "kernels/packed.py has changed since: build the pack again" in stale.stdout
    assert "add.py" not in stale.stdout
    result = build(tmp_path, manifest, "after.opk", pythons[:1])
    assert "1 cached" in result.stderr
    opwright(tmp_path, "pack", "verify", "after.opk", "--root", ".")
    compared = opwright(tmp_path, "pack", "diff", "before.opk", "after.opk", "--json", check=1)
    changed = json.loads(compared.stdout)
    assert [(d["kind"], d["what"], d["place"]["function"]) for d in changed] == [
        ("changed", "description", "fill"),
        ("changed", "kernel", "fill"),
    ]
    assert "cubin" in changed[1]["changes"]
    assert "cubin" not in changed[0]["changes"]


def test_ls(built: Path, pythons: list[Path], snapshot: SnapshotAssertion) -> None:
    build(built, built / "manifest.json", "one.opk", pythons[:1], arch="80,90")
    assert _plain(opwright(built, "pack", "ls", "one.opk").stdout) == snapshot
    facts = json.loads(opwright(built, "pack", "ls", "app.opk", "--json").stdout)
    assert facts["bytes"] == (built / "app.opk").stat().st_size
    entries = read_pack(built / "app.opk")
    assert sorted(k["bytes"] for k in facts["kernels"]) == sorted(len(e.blob) for e in entries if e.blob)


def test_diff(built: Path, pythons: list[Path], tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    same = opwright(built, "pack", "diff", "app.opk", "app.opk")
    assert (same.stdout, same.stderr) == ("", "Compared: the same\n")
    build(built, built / "manifest.json", "one.opk", pythons[:1], arch="90")
    entries = []
    for entry in read_pack(built / "one.opk"):
        if entry.record["function"] == "fill":
            continue
        if entry.blob:
            entries.append(Entry({**entry.record, "arch": 100}, entry.blob))
            entry = Entry({**entry.record, "num_warps": 8, "shared": 512, "params": []}, entry.blob + b"\0")
        entries.append(entry)
    write_pack(tmp_path / "other.opk", entries)
    found = opwright(built, "pack", "diff", "one.opk", tmp_path / "other.opk", check=1)
    assert re.sub(r"\d\.\d\.\d", "VERSION", found.stdout) == snapshot
    assert found.stderr == "Compared: 1 added, 2 removed, 1 changed\n"


FAILING: list[dict[str, Any]] = [
    FILL,
    {**FILL, "args": ["*i32:16", "i32"]},
    {**FILL, "args": ["*i32:16", "=4", "=64"]},
    {**FILL, "options": {"num_wraps": 4}},
    {"file": "kernels/packed.py", "function": "adds_text", "args": ["*i32", "i32"]},
    {"file": "kernels/packed.py", "function": "no_kernel", "args": []},
    {"file": "kernels/packed.py", "function": "missing", "args": []},
    {"file": "kernels/packed.py", "function": "fill", "tune": [{"arguments": {}}]},
    {"file": "kernels/packed.py", "function": "scaled", "tune": [{"arguments": {"n": 5}}]},
]


def test_failures_are_named_and_the_rest_goes_on(
    pythons: list[Path], tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    manifest = write_manifest(tmp_path, *FAILING)
    failed = build(tmp_path, manifest, "a.opk", pythons[:1], arch="80,90", check=1)
    said = _plain(failed.stderr.replace(f"{tmp_path}", "FOLDER"))
    said = re.sub(r"which has .*", "which has OPTIONS", said)
    assert re.sub(r"does not compile: .*", "does not compile: REASON", said) == snapshot
    assert (failed.stdout, (tmp_path / "a.opk").exists()) == ("", False)
    most = build(tmp_path, manifest, "a.opk", pythons[:1], "--keep-going", arch="80,90", check=1)
    assert most.stdout == "a.opk\n"
    assert "14 kernels failed\n" in most.stderr
    assert len([e for e in read_pack(tmp_path / "a.opk") if e.blob]) == 2
    opwright(tmp_path, "pack", "verify", "a.opk")
    as_json = build(tmp_path, manifest, "b.opk", pythons[:1], "--json", check=1)
    facts = json.loads(as_json.stdout)
    assert (facts["pack"], len(facts["failures"]), facts["cached"]) == (None, 8, 1)


def test_architectures(pythons: list[Path], tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    manifest = write_manifest(tmp_path, FILL)
    assert build(tmp_path, manifest, "a.opk", pythons[:1], arch="91", check=2).stderr == snapshot
    named = ("pack", "build", manifest, "--out", "a.opk", "--python", pythons[0])
    assert opwright(tmp_path, *named, check=2).stderr == snapshot
    write_manifest(tmp_path, FILL, seen=[90])
    assert "for sm_90 in" in opwright(tmp_path, *named).stderr
    write_manifest(tmp_path)
    assert opwright(tmp_path, *named, check=5).stdout == ""


def test_pythons(pythons: list[Path], tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    manifest = write_manifest(tmp_path, FILL)
    (tmp_path / "no-python").write_text("#!/bin/sh\necho 'it is broken' >&2; exit 7\n")
    (tmp_path / "no-python").chmod(0o755)
    missing = build(tmp_path, manifest, "a.opk", [Path("/no/python")], check=2)
    assert missing.stderr == snapshot
    broken = build(tmp_path, manifest, "a.opk", [tmp_path / "no-python"], check=1)
    assert _plain(broken.stderr.replace(str(tmp_path), "FOLDER")) == snapshot
    without = build(tmp_path, manifest, "a.opk", [Path(os.sys.executable)], check=None)  # type: ignore[attr-defined]
    assert without.returncode == 0 or "cannot import Triton" in without.stderr
    again = tmp_path / "again"
    again.symlink_to(pythons[0].absolute())
    link = tmp_path / "venv"
    link.symlink_to(pythons[0].absolute().parents[1])
    twice = build(tmp_path, manifest, "a.opk", [pythons[0], link / "bin/python"], check=2)
    assert "two Pythons have Triton" in twice.stderr


def test_the_default_python_is_that_of_the_environment(pythons: list[Path], tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, FILL)
    command = ("pack", "build", manifest, "--out", "a.opk", "--arch", "90")
    opwright(tmp_path, *command, VIRTUAL_ENV=str(pythons[0].parents[1]), OPWRIGHT_TRITON="")
    named = opwright(tmp_path, *command, OPWRIGHT_TRITON=f"check,python={pythons[-1]}")
    assert "Built 1 kernel" in named.stderr


def test_files_that_a_pack_cannot_tell_apart(pythons: list[Path], tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    manifest = write_manifest(tmp_path, {**FILL, "file": "kernels/packed.py"}, {**FILL, "file": "packed.py"})
    shutil.copy(tmp_path / "kernels/packed.py", tmp_path / "packed.py")
    refused = build(tmp_path, manifest, "a.opk", pythons[:1], check=2)
    assert refused.stderr.replace(str(tmp_path), "FOLDER") == snapshot
    above = tmp_path / "above"
    above.mkdir()
    for name in ("packed.py", "kernels"):
        shutil.move(tmp_path / name, above / name)
    both = [{**FILL, "file": f"above/{file}"} for file in ("packed.py", "kernels/packed.py")]
    manifest.write_text(json.dumps({"kernels": both}))
    build(tmp_path, manifest, "a.opk", pythons[:1])
    opwright(tmp_path, "pack", "verify", "a.opk")


def test_verify_finds_nothing_in_a_good_pack(built: Path, pythons: list[Path], snapshot: SnapshotAssertion) -> None:
    good = opwright(built, "pack", "verify", "app.opk", "--root", ".")
    count = 6 * len(pythons)
    assert (good.stdout, good.stderr) == ("", f"Verified app.opk: {count} kernels, {count + 2} rows\n")


def test_every_flipped_byte_is_found_or_makes_no_difference(built: Path, pythons: list[Path]) -> None:
    build(built, built / "manifest.json", "one.opk", pythons[:1], arch="90")
    content = (built / "one.opk").read_bytes()
    entries = verify(content)[0]
    for at in range(0, len(content), 41):
        damaged = bytearray(content)
        damaged[at] ^= 0x5A
        found, findings = verify(bytes(damaged))
        assert findings or found == entries, at
        assert verify(content[:at])[1], at


def _wrong(**fields: Any) -> Any:
    return lambda record, blob: ({**record, **fields}, blob)


DAMAGES = {
    "another architecture": _wrong(arch=100),
    "another symbol": _wrong(symbol="other"),
    "warps": _wrong(num_warps=8),
    "no warps": _wrong(num_warps=0),
    "shared": _wrong(shared=-1),
    "version": _wrong(triton="new"),
    "scratch": _wrong(global_scratch=[0]),
    "sources": _wrong(sources=[["a.py", "12"]]),
    "key": lambda record, blob: ({**record, "key": "*fp99, i32"}, blob),
    "arity": lambda record, blob: ({**record, "key": "*i32:16, i32"}, blob),
    "too few parameters": lambda record, blob: ({**record, "params": record["params"][:-1]}, blob),
    "overlapping parameters": lambda record, blob: (
        {**record, "params": [record["params"][0], *record["params"]]},
        blob,
    ),
    "a parameter of no argument": lambda record, blob: (
        {**record, "params": [{**record["params"][0], "arg": [9]}, *record["params"][1:]]},
        blob,
    ),
    "missing field": lambda record, blob: ({k: v for k, v in record.items() if k != "cuda"}, blob),
    "no cubin": lambda record, blob: (record, b"\x7fELF" + bytes(60)),
    "cut cubin": lambda record, blob: (record, blob[:500]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_record_that_is_signed_and_wrong(
    name: str, built: Path, pythons: list[Path], snapshot: SnapshotAssertion
) -> None:
    entries = []
    for entry in read_pack(built / "app.opk"):
        record = entry.record
        if record["function"] == "fill" and record.get("arch", 90) == 90:
            if entry.blob and record["triton"] == max(python.parents[1].name for python in pythons)[7:]:
                entries.append(Entry(*DAMAGES[name](record, entry.blob)))
            elif not entry.blob:
                entries.append(entry)
    _, findings = verify(pack(entries))
    text = "\n".join(f"{finding.place}: {finding.what}" for finding in findings)
    assert re.sub(r"\d\.\d\.\d", "VERSION", text) == snapshot


def test_rows_that_do_not_belong_together(built: Path) -> None:
    entries = [e for e in read_pack(built / "app.opk") if e.record["function"] == "fill"]
    kernel = next(e for e in entries if e.blob)
    description = next(e for e in entries if not e.blob)

    def findings(*found: Entry) -> list[str]:
        return [finding.what for finding in verify(pack(found))[1]]

    assert findings(kernel, description) == []
    assert findings(kernel) == ["has no description: the runtime cannot launch it"]
    twice = Entry({**kernel.record, "source_key": "another"}, kernel.blob)
    assert findings(kernel, twice, description) == ["is there twice"]
    elsewhere = Entry({**description.record, "file": "packed.py"})
    assert findings(kernel, description, elsewhere) == ["cannot be told from packed.py::fill"]


def test_a_pack_that_is_none(built: Path, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    (tmp_path / "text.opk").write_text("no pack")
    (tmp_path / "cut.opk").write_bytes((built / "app.opk").read_bytes()[:3000])
    for file in ("text.opk", "missing.opk"):
        said = {}
        for name, *others in (("ls",), ("verify",), ("diff", "cut.opk"), ("embed", "--out", "a.c")):
            found = opwright(tmp_path, "pack", name, file, *others, check=None)
            assert found.returncode == (1 if name == "verify" and file == "text.opk" else 2)
            said[name] = found.stdout + found.stderr
        assert said["verify"] == snapshot(name=f"verify {file}")
        assert said["ls"] == snapshot(name=file)
        assert said["diff"] == said["ls"]
        assert said["embed"] == said["ls"]
    assert "has 3000 bytes" in opwright(tmp_path, "pack", "verify", "cut.opk", check=1).stdout


@pytest.mark.compiler
def test_a_linked_pack(built: Path, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    shutil.copy(built / "app.opk", tmp_path / "my app.1.opk")
    opwright(tmp_path, "pack", "embed", "my app.1.opk", "--out", "app_pack.c")
    text = (tmp_path / "app_pack.c").read_text()
    text = re.sub(r"\d+ bytes, SHA-256 [0-9a-f]{64}", "SIZE bytes, SHA-256 DIGEST", text)
    assert text.replace(str(tmp_path), "FOLDER") == snapshot
    (tmp_path / "main.c").write_text(
        "#include <stdint.h>\n#include <stdio.h>\n"
        "extern const unsigned char opwright_pack_my_app_begin[], opwright_pack_my_app_end[];\n"
        "int main() {\n"
        "  if ((uintptr_t)opwright_pack_my_app_begin % 64) return 1;\n"
        "  fwrite(opwright_pack_my_app_begin, 1, opwright_pack_my_app_end - opwright_pack_my_app_begin, stdout);\n"
        "}\n"
    )
    subprocess.run([compiler, "-Wall", "-Werror", "main.c", "app_pack.c", "-o", "main"], cwd=tmp_path, check=True)
    linked = subprocess.run([tmp_path / "main"], capture_output=True, check=True).stdout
    assert linked == (built / "app.opk").read_bytes()
    opwright(tmp_path, "pack", "embed", "my app.1.opk", "--out", "b.c", "--name", "other")
    assert "opwright_pack_other_begin" in (tmp_path / "b.c").read_text()
