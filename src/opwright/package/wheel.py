"""Completes a wheel that a build backend has made: the library, the runtime, stubs, and the right tag.

Any backend packs the Python files of a project; what makes them a wheel of operators is added here, in the
same way for all. Nothing in a wheel depends on when or where it was made.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tokenize
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opwright.build.elf import SharedLibrary, read_library
from opwright.errors import OpwrightError, PackageError
from opwright.package.runtime import rewritten, runtime_files
from opwright.package.stubs import stub_of

# Of a package, what its wheel does without: tests, and the sources of what is in the library.
_LEFT = re.compile(
    r"(^|/)(\.[^/]+/.*|test_[^/]*\.py|conftest\.py|__snapshots__/.*|[^/]*\.(cpp|cu|cuh|h|hpp)|NOTES\.md)$"
)
_TORCHS_GLIBC = (2, 28)
_EPOCH = (1980, 1, 1, 0, 0, 0)


def platform_tag(library: SharedLibrary) -> str:
    """Returns the platform of a wheel with this library: the oldest glibc that has what it and torch need."""
    needed = tuple(int(part) for part in library.newest_version("GLIBC").split(".")[:2] if part)
    major, minor = max(needed, _TORCHS_GLIBC)
    return f"manylinux_{major}_{minor}_{library.machine}"


@dataclass(frozen=True)
class Built:
    """A library that is to go into a wheel.

    Attributes:
        folder: where `library.so` lies.
        package: the import name of the package.
        provenance: what it holds and what it was made from.
        gates: the generated text of each operator's Python function.
        tag: of the wheel.
    """

    folder: Path
    package: str
    provenance: dict[str, Any]
    gates: dict[str, str]
    tag: str


def build(root: Path, package: str, folder: Path, options: Mapping[str, Any]) -> Built:
    """Builds the library of a package.

    Args:
        root: the folder that the package lies in.
        package: its import name.
        folder: an empty folder to build in.
        options: `architectures`, `levels`, as in pyproject.toml.

    Raises:
        OpwrightError: it cannot be built.
    """
    check_options(package, options)
    if not (root / package / "__init__.py").is_file():
        raise PackageError(
            package, "it is not a package of its own: the wheel's library and runtime lie in it",
            rows=[("expected", str(root / package / "__init__.py"))], hint="`touch` that file, or name another `package`",
        )  # fmt: skip
    if (root / package / "_opwright").exists():
        raise PackageError(package, "it has a module `_opwright`, the place of a wheel's runtime", hint="rename it")
    made = _build(root, package, folder, options)
    provenance = made["provenance"]
    provenance["commit"], provenance["dirty"] = _commit(root)
    return Built(
        folder, package, provenance, made["gates"], f"py3-none-{platform_tag(read_library(folder / 'library.so'))}"
    )


def check_options(subject: str, options: Mapping[str, Any]) -> None:
    """Refuses options of a build that are misspelt, or not of their type.

    Raises:
        PackageError: with what was given and what is expected.
    """
    known = {"architectures": (r"\d{2,3}[af]?", '["80", "90"]'), "levels": (r"\w+", '["v2", "v3"]')}
    for name, value in options.items():
        if name not in known:
            raise PackageError(
                subject, f"there is no option `{name}`", rows=[("known", ", ".join(["package", *known]))]
            )
        form, example = known[name]
        is_list = isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
        if not is_list or not all(re.fullmatch(form, item) for item in value):
            raise PackageError(
                subject, f"`{name}` is a list of names", rows=[("got", repr(value))], hint=f"`{name} = {example}`"
            )


def complete_wheel(wheel: Path, built: Built) -> None:
    """Puts the library into a wheel of Python files, with the runtime and stubs, and rewrites its imports."""
    try:
        _complete(wheel, built)
    except BaseException:
        wheel.unlink(missing_ok=True)  # it has no library
        raise


def _complete(wheel: Path, built: Built) -> None:
    package = built.package
    files = _contents(wheel, package, built.tag)
    files |= {f"{package}/{name}": text.encode() for name, text in runtime_files(package, built.gates).items()}
    for path in sorted((built.folder / "launched").glob("*.py")):
        files[f"{package}/_opwright/launched/{path.name}"] = rewritten(path.read_text(), package).encode()
    files[f"{package}/_opwright/library.so"] = (built.folder / "library.so").read_bytes()
    files[f"{package}/_opwright/provenance.json"] = (json.dumps(built.provenance, indent=1) + "\n").encode()
    with zipfile.ZipFile(wheel) as archive:
        programs = {entry.filename for entry in archive.infolist() if entry.external_attr >> 16 & 0o100}
    part = wheel.with_suffix(".part")
    try:
        _write(part, files, programs)
        os.replace(part, wheel)
    finally:
        part.unlink(missing_ok=True)


def _build(root: Path, package: str, work: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the library in a process whose torch is the stand-in."""
    order = {"root": str(root), "package": package, "work": str(work), **options}
    result = subprocess.run(
        [sys.executable, "-m", "opwright.package.process", json.dumps(order)],
        stdout=subprocess.PIPE,
        text=True,
    )
    if result.returncode != 0:
        try:
            raise _Failed(json.loads(result.stdout))
        except ValueError:
            raise PackageError(
                package, "its library could not be built", rows=[("exit status", str(result.returncode))]
            ) from None
    return json.loads(result.stdout)


class _Failed(PackageError):
    """An error of the process that builds, with its own code and text."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.code = found["code"]  # the text names it
        rows = [tuple(row) for row in found["rows"]]
        super().__init__(found["subject"], found["rule"], rows=rows, body=found["body"], hint=found["hint"])


def describe(error: OpwrightError) -> dict[str, Any]:
    """Returns what `_Failed` is made from."""
    rows = [(str(name), str(value)) for name, value in error.rows]
    parts = {
        "code": error.code,
        "subject": error.subject,
        "rule": error.rule,
        "body": error.body,
        "hint": error.hint,
    }
    return parts | {"rows": rows}


def _commit(root: Path) -> tuple[str | None, bool]:
    """Returns the commit that the sources are of, and whether they differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout

    try:
        return git("rev-parse", "HEAD").strip(), bool(git("status", "--porcelain", "--", ".").strip())
    except (OSError, subprocess.CalledProcessError):
        return None, False


def _contents(wheel: Path, package: str, tag: str) -> dict[str, bytes]:
    """Returns the files of a wheel: its package without the omitted files, with imports and metadata changed."""
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            data = archive.read(name)
            if name.endswith(("/", "/RECORD")):
                continue
            if name.startswith(f"{package}/"):
                if _LEFT.search(name):
                    continue
                if name.endswith(".py"):
                    text = decode_source(data)
                    data = rewritten(text, package).encode()
                    compile(data, name, "exec", dont_inherit=True)
                    stub = stub_of(text, is_package=name.endswith("/__init__.py"))
                    found.setdefault(f"{name}i", rewritten(stub, package).encode())
            elif name.endswith(".dist-info/WHEEL"):
                data = re.sub(rb"Tag: .*\n", b"", data).rstrip() + f"\nTag: {tag}\n".encode()
                data = data.replace(b"Root-Is-Purelib: true", b"Root-Is-Purelib: false")
            found[name] = data
    found.setdefault(f"{package}/py.typed", b"")
    return found


def decode_source(data: bytes) -> str:
    """Returns the text of a Python file, whose first lines may name its encoding."""
    encoding, first = tokenize.detect_encoding(io.BytesIO(data).readline)
    text = data.decode(encoding)
    if encoding.startswith("utf-8"):
        return text
    end = len(b"".join(first).decode(encoding))
    return re.sub(r"coding[:=]\s*[-\w.]+", "coding: utf-8", text[:end]) + text[end:]


def _write(path: Path, files: dict[str, bytes], programs: Collection[str]) -> None:
    """Writes a wheel with its RECORD, in a fixed order and with a fixed time."""
    info = next(name.split("/")[0] for name in files if name.endswith(".dist-info/WHEEL"))
    record = f"{info}/RECORD"
    rows = io.StringIO()
    table = csv.writer(rows, lineterminator="\n")
    table.writerows([name, f"sha256={_digest(data)}", len(data)] for name, data in sorted(files.items()))
    table.writerow([record, "", ""])
    ordered = sorted(files.items(), key=lambda item: (item[0].startswith(info), item[0]))
    ordered.append((record, rows.getvalue().encode()))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in ordered:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = (0o755 if name.endswith(".so") or name in programs else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
