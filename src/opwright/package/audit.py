"""Reads a wheel, any wheel, and says where it can be used, and what is wrong with it."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from opwright.build.elf import SharedLibrary, read_library
from opwright.errors import PackageError, plural
from opwright.package.shims import minimum_torch

# What a process with torch has, or the driver brings: no wheel has to.
_BROUGHT = re.compile(
    r"lib(mvec|torch|c10|shm|gomp|cuda|cudart|cublas|cudnn|cufft|curand|cusolver|cusparse|nvrtc|nccl|nv|python)[\w-]*\.so"
)


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
        PackageError: it is not there, or not a wheel.
    """
    if not path.exists():
        raise PackageError(str(path), "there is no such file", hint="`opwright wheel` makes a wheel, in `dist`")
    parts = path.name.removesuffix(".whl").split("-")
    if path.suffix != ".whl" or len(parts) not in (5, 6) or not zipfile.is_zipfile(path):
        raise PackageError(
            str(path),
            "it is not a wheel",
            hint="`opwright wheel --check dist/NAME-VERSION-py3-none-PLATFORM.whl`",
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
        if libraries and "linux" in platform:
            _ask_auditwheel(audit, platform)
        made = [n for n in names if n.endswith("/_opwright/provenance.json")]
        for name in made:
            _note_provenance(audit, json.loads(archive.read(name)), archive, name)
        _check_surroundings(audit, names, bool(made))
    return audit


def _check_record(audit: Audit, archive: zipfile.ZipFile) -> None:
    names = [n for n in archive.namelist() if not n.endswith("/")]
    record = next((n for n in names if re.fullmatch(r"[^/]+\.dist-info/RECORD", n)), None)
    if record is None:
        audit.problems.append("it has no RECORD, so it cannot be installed")
        return
    listed = {row[0]: row[1] for row in csv.reader(io.StringIO(archive.read(record).decode())) if row}
    for name in sorted(listed.keys() - set(names)):
        audit.problems.append(f"{name} is in RECORD, but not in the wheel")
    for name in ("METADATA", "WHEEL"):
        if not any(n.endswith(f".dist-info/{name}") for n in names):
            audit.problems.append(f"it has no {name}, so it cannot be installed")
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
        torch = f"{plural(len(library.unstable_torch_symbols), 'symbol')} of its C++ interface: for one version of torch only"
        audit.problems.append(
            f"{name}: takes {library.unstable_torch_symbols[0]} from torch, which changes with every version"
        )
    elif library.stable_torch_symbols:
        least = minimum_torch(library)
        since = f", available from torch {least[0]}.{least[1]} on" if least else ""
        torch = f"its stable ABI ({plural(len(library.stable_torch_symbols), 'function')}){since}"
    audit.facts.append((name, f"{library.size_bytes / 1e6:.2f} MB, {library.machine}"))
    audit.facts.append(("  of torch", torch))
    if library.python_symbols and abi == "none":
        audit.problems.append(
            f"{name}: takes {library.python_symbols[0]} from Python, but its name promises any Python"
        )
    newest = [
        f"{family} {version}" for family in ("GLIBC", "GLIBCXX", "GCC") if (version := library.newest_version(family))
    ]
    audit.facts.append(("  of the system", ", ".join(newest) or "nothing with a version"))
    if not platform.endswith(library.machine):
        audit.problems.append(f"{name}: is for {library.machine}, the wheel's name says {platform}")
    if library.device_code:
        audit.facts.append(("  GPU code", str(library.device_code)))
    cudart = next((n for n in library.needed if n.startswith("libcudart")), None)
    if cudart:
        audit.remarks.append(f"{name}: needs {cudart}, which only one CUDA has; link the static one: `-cudart static`")
    for folder in (*library.search, *library.inherited_search):
        if folder.startswith("/") and not folder.startswith(str(library.path.parent)):
            audit.problems.append(f"{name}: looks for libraries in {folder}, a folder of the machine that built it")


def _ask_auditwheel(audit: Audit, platform: str) -> None:
    """Compares the platform in the wheel's name with the oldest one that has what its libraries use."""
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(audit.wheel)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        audit.remarks.append(f"auditwheel cannot say more of it: {(result.stderr.strip() or '?').splitlines()[-1]}")
        return
    found = json.loads(result.stdout)
    tag = found["sym_tag"]
    audit.facts.append(("fits", tag))
    if platform.startswith("linux_"):
        audit.remarks.append(f"{platform} is not a platform that package indexes accept; its libraries fit {tag}")
    elif _glibc(tag) > _next_policy(platform, found):
        versions = ", ".join(max(each, key=_numbers) for each in found["versioned_symbols"].values() if each)
        audit.problems.append(f"its name promises {platform}, its libraries ({versions}) fit {tag}")
    for library in found["external_libs"]:
        if not _BROUGHT.match(library):
            audit.problems.append(
                f"needs {library}, which is neither in it nor a part of {platform}; `auditwheel repair` puts it in"
            )


def _glibc(platform: str) -> tuple[int, ...]:
    """Returns the (2, 28) of manylinux_2_28_x86_64; of what fits no such platform, more than any has."""
    old = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
    if not platform.startswith(("manylinux", "musllinux")):
        return (99,)
    return old.get(platform.split("_")[0], _numbers(platform)[:2])


def _next_policy(platform: str, found: dict[str, Any]) -> tuple[int, ...]:
    """Returns the oldest of the platforms that auditwheel knows which is not older than this one."""
    promised = _glibc(platform)
    known = [_glibc(name) for name in found["policy_upgrades"] if name.startswith("manylinux")]
    return min((version for version in known if version >= promised), default=promised)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _note_provenance(audit: Audit, made: dict[str, Any], archive: zipfile.ZipFile, name: str) -> None:
    library = name.replace("provenance.json", "library.so")
    if library not in archive.namelist():
        audit.problems.append(f"{library} is missing")
        return
    if hashlib.sha256(archive.read(library)).hexdigest() != made["library"]:
        audit.problems.append(f"{library}: is not the one that {name} describes")
    launched = [d for d, held in made["operators"].items() if held.get("launched")]
    if launched:
        audit.remarks.append(f"{', '.join(launched)} need Triton on a GPU; without it, their references run")
    without = [d for d, held in made["operators"].items() if not held["backends"] and not held.get("launched")]
    if without:
        audit.remarks.append(f"{', '.join(without)} have no kernel in it: their references run")
    dirty = " with changes" if made["dirty"] else ""
    audit.facts += [
        ("operators", ", ".join(made["operators"])),
        ("minimum torch", ".".join(map(str, made["minimum_torch"]))),
        ("CPU kernels", " ".join(made["levels"])),
        ("GPU kernels", " ".join(made["architectures"]) or "none"),
        *(
            (
                f"  {source}",
                ", ".join(f"{variant.removeprefix('cpu_')} {size / 1e3:.0f}" for variant, size in sizes.items())
                + " kB",
            )
            for source, sizes in made["sizes"].items()
        ),
        ("made by", f"opwright {made['opwright']}, {', '.join(made['compilers'])}"),
        ("commit", f"{made['commit']}{dirty}" if made["commit"] else "none"),
    ]


def _check_surroundings(audit: Audit, names: list[str], is_ours: bool) -> None:
    if not any(re.search(r"licen[cs]e|copying", name, re.IGNORECASE) for name in names):
        audit.remarks.append("it has no licence file; `license-files` in [project] names it")
    if not any(name.endswith(("py.typed", ".pyi")) for name in names):
        audit.remarks.append("it has neither py.typed nor stubs, so type checkers see nothing")
