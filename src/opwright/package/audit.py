"""Reads a wheel, any wheel, and says where it can be used, and what is wrong with it."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from opwright.build.elf import SharedLibrary, read_library
from opwright.errors import PackageError

# The newest libstdc++ that a platform tag promises, by the glibc in it (the policies of manylinux).
_LIBSTDCXX = {(2, 17): "3.4.19", (2, 24): "3.4.22", (2, 27): "3.4.24", (2, 28): "3.4.25", (2, 31): "3.4.28", (2, 34): "3.4.29"}


@dataclass
class Audit:
    """What was found.

    Attributes:
        facts: what the wheel is, as (name, value).
        problems: what keeps it from working where its name promises that it does.
        remarks: what its users would miss.
    """

    wheel: Path
    facts: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def audit_wheel(path: Path) -> Audit:
    """Examines a wheel; nothing of it is run.

    Raises:
        PackageError: it is no wheel.
    """
    parts = path.name.removesuffix(".whl").split("-")
    if path.suffix != ".whl" or len(parts) not in (5, 6) or not zipfile.is_zipfile(path):
        raise PackageError(
            str(path), "it is no wheel", hint="`opwright wheel --check dist/NAME-VERSION-py3-none-PLATFORM.whl`"
        )
    audit = Audit(path)
    python, abi, platform = parts[-3:]
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        _check_record(audit, archive)
        libraries = [n for n in names if re.search(r"\.so(\.\d+)*$", n)]
        audit.facts += [
            ("python", "any" if abi == "none" else f"{python} {abi}"),
            ("platform", platform),
            ("size", f"{path.stat().st_size / 1e6:.2f} MB, {sum(i.file_size for i in archive.infolist()) / 1e6:.2f} MB unpacked"),
        ]  # fmt: skip
        for name in libraries:
            file = Path(folder, PurePosixPath(name).name)
            file.write_bytes(archive.read(name))
            _check_library(audit, name, read_library(file), abi, platform)
        made = [n for n in names if n.endswith("/_opwright/provenance.json")]
        for name in made:
            _note_provenance(audit, json.loads(archive.read(name)), archive, name)
        _check_surroundings(audit, names, bool(made))
    return audit


def _check_record(audit: Audit, archive: zipfile.ZipFile) -> None:
    names = [n for n in archive.namelist() if not n.endswith("/")]
    (record,) = [n for n in names if n.endswith(".dist-info/RECORD")] or [None]
    if record is None:
        audit.problems.append("it has no RECORD, so it cannot be installed")
        return
    listed = {row[0]: row[1] for row in csv.reader(io.StringIO(archive.read(record).decode())) if row}
    for name in names:
        digest = listed.get(name)
        if digest is None:
            audit.problems.append(f"{name} is not in RECORD")
        elif digest:
            kind, _, value = digest.partition("=")
            found = base64.urlsafe_b64encode(hashlib.new(kind, archive.read(name)).digest()).rstrip(b"=").decode()
            if found != value:
                audit.problems.append(f"{name} has not the digest that RECORD says")


def _check_library(audit: Audit, name: str, library: SharedLibrary, abi: str, platform: str) -> None:
    torch = "no symbol"
    if library.unstable_torch_symbols:
        torch = f"{len(library.unstable_torch_symbols)} symbols of its C++ interface: for one version of torch only"
        audit.problems.append(f"{name}: takes {library.unstable_torch_symbols[0]} from torch, which changes with every version")
    elif library.stable_torch_symbols:
        torch = f"its stable ABI ({len(library.stable_torch_symbols)} functions)"
    audit.facts.append((name, f"{library.size_bytes / 1e6:.2f} MB, {library.machine}"))
    audit.facts.append(("  of torch", torch))
    if library.python_symbols and abi == "none":
        audit.problems.append(f"{name}: takes {library.python_symbols[0]} from Python, but its name promises any Python")
    glibc, libstdcxx = library.newest_version("GLIBC"), library.newest_version("GLIBCXX")
    audit.facts.append(("  of the system", f"glibc {glibc or 'any'}, libstdc++ {libstdcxx or 'any'}"))
    _check_platform(audit, name, library, platform, glibc, libstdcxx)
    if library.device_code:
        audit.facts.append(("  GPU code", str(library.device_code)))
    cudart = next((n for n in library.needed if n.startswith("libcudart")), None)
    if cudart:
        audit.remarks.append(f"{name}: needs {cudart}, which only one CUDA has; link the static one: `-cudart static`")
    for folder in (*library.search, *library.inherited_search):
        if folder.startswith("/") and not folder.startswith(str(library.path.parent)):
            audit.problems.append(f"{name}: looks for libraries in {folder}, a folder of the machine that built it")


def _check_platform(
    audit: Audit, name: str, library: SharedLibrary, platform: str, glibc: str, libstdcxx: str
) -> None:
    if not platform.endswith(library.machine):
        audit.problems.append(f"{name}: is for {library.machine}, the wheel's name says {platform}")
    tag = re.match(r"manylinux_(\d+)_(\d+)_", platform)
    if tag is None:
        if platform.startswith("linux_"):
            audit.remarks.append(f"{platform} is no platform that package indexes take; `auditwheel repair` finds the right one")
        return
    promised = (int(tag[1]), int(tag[2]))
    if glibc and _version(glibc) > promised:
        audit.problems.append(f"{name}: needs glibc {glibc}, the wheel's name promises {tag[1]}.{tag[2]}")
    newest = [v for floor, v in sorted(_LIBSTDCXX.items()) if floor <= promised]
    if libstdcxx and newest and _version(libstdcxx) > _version(newest[-1]):
        audit.problems.append(f"{name}: needs libstdc++ {libstdcxx}, {platform} promises {newest[-1]}")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _note_provenance(audit: Audit, made: dict[str, Any], archive: zipfile.ZipFile, name: str) -> None:
    library = name.replace("provenance.json", "library.so")
    if hashlib.sha256(archive.read(library)).hexdigest() != made["library"]:
        audit.problems.append(f"{library}: is not the one that {name} describes")
    if made["left_out"]:
        names = ", ".join(made["left_out"])
        audit.remarks.append(f"the Triton kernels of {names} are not in it: on a GPU their references run")
    dirty = " with changes" if made["dirty"] else ""
    audit.facts += [
        ("operators", ", ".join(made["operators"])),
        ("minimum torch", ".".join(map(str, made["minimum_torch"]))),
        ("CPU kernels", " ".join(made["levels"])),
        ("GPU kernels", " ".join(made["architectures"]) or "none"),
        ("made by", f"opwright {made['opwright']}, {', '.join(made['compilers'])}"),
        ("commit", f"{made['commit']}{dirty}" if made["commit"] else "none"),
    ]


def _check_surroundings(audit: Audit, names: list[str], is_ours: bool) -> None:
    if not any(re.search(r"licen[cs]e|copying", name, re.IGNORECASE) for name in names):
        audit.remarks.append("it has no licence file; `license-files` in [project] names it")
    if not any(name.endswith(("py.typed", ".pyi")) for name in names):
        audit.remarks.append("it has neither py.typed nor stubs, so type checkers see nothing")
