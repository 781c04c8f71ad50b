"""What a shared library says about itself: what it needs, what it has, what it was compiled by and for.

Nothing of it is run, so a library that cannot be loaded is read like any other.
"""

from __future__ import annotations

import io
import mmap
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from opwright.build.demangle import demangle
from opwright.build.fatbin import DeviceCode, read_device_code
from opwright.errors import LoadError

_SYMBOL = struct.Struct("<IBBHQQ")  # of 64-bit files: name, kind, visibility, section, value, size
_LOCAL, _WEAK = 0, 2
_READ_LATER = (".rodata", ".nv_fatbin", "__nv_relfatbin")
_MACHINES = {
    "EM_X86_64": "x86_64",
    "EM_AARCH64": "aarch64",
    "EM_386": "i386",
    "EM_PPC64": "ppc64le",
    "EM_RISCV": "riscv64",
    "EM_S390": "s390x",
    "EM_ARM": "arm",
}
_KINDS = {"ET_DYN": "shared library", "ET_EXEC": "program", "ET_REL": "object file", "ET_CORE": "core dump"}
_AGAIN = "install or build it again: `pip install --force-reinstall --no-deps --no-cache-dir PACKAGE`"
_OTHER_FORMATS = (
    (b"MZ", "a library of Windows", _AGAIN),
    (b"\xcf\xfa\xed\xfe", "a library of macOS", _AGAIN),
    (b"\xca\xfe\xba\xbe", "a library of macOS", _AGAIN),
    (b"!<arch>", "a static library", "link it: `g++ -shared -o library.so -Wl,--whole-archive {path}`"),
    (b"version https://git-lfs", "a pointer of git-lfs", "`git lfs pull`"),
    (b"PK\x03\x04", "a zip archive or a wheel", "`pip install {path}`"),
    (b"/* GNU ld script", "a script of the linker", "name the library that it names: `cat {path}`"),
)
# The first name of a mangled symbol: at::, c10::, torch::, caffe2::, or a function of torch's Python part.
_UNSTABLE = re.compile(
    r"_Z(?:T[VTISC]|GV|T[hv]n?[\d_n]+)?(?:N[rVK]*[RO]?)?(?:2at|3c10|5torch|6caffe2|\d+TH[PC])|TH[PC][A-Z]"
)
_STABLE = re.compile(r"(?:aoti_torch|torch)_\w+")
_PYTHON = re.compile(r"_?Py[A-Z_]\w*")
_OLD_STRING = re.compile(r"std::string\b|std::basic_string<char,")
_PYTHON_VERSION = re.compile(rb"(?<![^\0])(3\.\d{1,2})\0")
_PYBIND_CHECK = b"module was compiled for Python %s"
_PYBIND = re.compile(rb"__pybind11_internals_v(\w+?)__")


@dataclass(frozen=True)
class Symbol:
    """A symbol that a library needs of others; `version` as `GLIBC_2.34`, often ""."""

    name: str
    version: str = ""
    is_weak: bool = False


@dataclass(frozen=True)
class SharedLibrary:
    """What an ELF file says.

    Attributes:
        machine: as `platform.machine()` calls it.
        kind: "shared library", "program", "object file".
        needed: the names of the libraries that the loader finds for it.
        search: where it says that they are looked for (DT_RUNPATH), `$ORIGIN` replaced.
        inherited_search: the same for all that it loads too (DT_RPATH).
        versions_needed: by library, the versions that it must have, as `GLIBC_2.34`.
        compilers: what the section .comment says, as `GCC: (Debian 12.2.0-14) 12.2.0`.
        regions: section name -> (begin, end) in the file, of the sections that are read later.
    """

    path: Path
    machine: str
    kind: str
    size_bytes: int
    soname: str = ""
    needed: tuple[str, ...] = ()
    search: tuple[str, ...] = ()
    inherited_search: tuple[str, ...] = ()
    defined: frozenset[str] = frozenset()
    undefined: tuple[Symbol, ...] = ()
    versions_needed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    versions_defined: frozenset[str] = frozenset()
    compilers: tuple[str, ...] = ()
    regions: dict[str, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def unstable_torch_symbols(self) -> tuple[str, ...]:
        """What it needs of torch's C++ interface, which changes with every torch."""
        return tuple(s.name for s in self.undefined if _UNSTABLE.match(s.name))

    @cached_property
    def stable_torch_symbols(self) -> tuple[str, ...]:
        """What it needs of torch's C shims, which later torches keep."""
        return tuple(s.name for s in self.undefined if _STABLE.fullmatch(s.name))

    @cached_property
    def python_symbols(self) -> tuple[str, ...]:
        """What it needs of Python."""
        return tuple(s.name for s in self.undefined if _PYTHON.fullmatch(s.name))

    @cached_property
    def module_names(self) -> tuple[str, ...]:
        """The names that it can be imported by: `foo` for a function `PyInit_foo`."""
        return tuple(sorted(name[7:] for name in self.defined if name.startswith("PyInit_")))

    @cached_property
    def has_cxx11_abi(self) -> bool | None:
        """Whether std::string is that of _GLIBCXX_USE_CXX11_ABI=1; None where no symbol tells."""
        names = [*(symbol.name for symbol in self.undefined), *self.defined]
        if any("__cxx11" in name for name in names):
            return True
        if "use_cxx11_abi_" in self.pybind_internals:
            return "use_cxx11_abi_1" in self.pybind_internals
        old = [
            *self.unstable_torch_symbols,
            *(name for name in names if name.startswith(("_ZNSs", "_ZNKSs"))),
        ]
        return False if any(has_old_string(name) for name in old) else None

    def newest_version(self, family: str) -> str:
        """Returns the newest version of `GLIBC`, `GLIBCXX` or `CXXABI` that it needs, as "2.34"; or ""."""
        return newest(family, (version for some in self.versions_needed.values() for version in some))

    @cached_property
    def device_code(self) -> DeviceCode:
        """The GPU code inside."""
        places = [self.regions[name] for name in (".nv_fatbin", "__nv_relfatbin") if name in self.regions]
        if not places:
            return DeviceCode()
        with open(self.path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read_device_code(data, places)

    @cached_property
    def pybind_internals(self) -> str:
        """What two extensions must share to pass objects through pybind11: "11_system_libstdcpp_..."; or ""."""
        found = _PYBIND.search(self._constants)
        return found[1].decode() if found else ""

    @cached_property
    def python_of_pybind(self) -> str:
        """The Python that pybind11 was compiled for, as "3.11", which it checks at import; or ""."""
        found = _PYTHON_VERSION.findall(self._constants) if _PYBIND_CHECK in self._constants else []
        return found[0].decode() if len(set(found)) == 1 else ""

    @cached_property
    def _constants(self) -> bytes:
        begin, end = self.regions.get(".rodata", (0, 0))
        with open(self.path, "rb") as f:
            f.seek(begin)
            return f.read(end - begin)


def has_old_string(name: str) -> bool:
    """Returns whether a symbol has the std::string of _GLIBCXX_USE_CXX11_ABI=0 among its arguments."""
    return bool(_OLD_STRING.search(demangle(name)))


def newest(family: str, versions: Iterable[str]) -> str:
    """Returns the newest of the versions of one family: "2.34" of `GLIBC_2.2.5`, `GLIBC_2.34`; "" of none."""
    found = [version[len(family) + 1 :] for version in versions if re.match(rf"{family}_\d", version)]
    return max(found, key=lambda version: [int(part) for part in version.split(".")], default="")


def read_library(path: Path) -> SharedLibrary:
    """Reads what an ELF file says about itself.

    Raises:
        LoadError: there is no such file, or it is not a complete ELF file.
    """
    from elftools.elf.elffile import ELFFile

    if path.exists() and not (path.is_file() or path.is_dir()):
        raise _error(path, "is a device or a pipe, not a regular file", hint=f"`ls -l {path}`")
    try:
        with open(path, "rb") as f:
            _check_whole(path, f)
            return _read(path, ELFFile(f))
    except FileNotFoundError:
        raise _error(path, "there is no such file", hint=f"`find . -name '{path.name}'`") from None
    except IsADirectoryError:
        hint = f"name a file in it: `ls {path}/*.so`"
        raise _error(path, "is a directory, not a library", hint=hint) from None
    except PermissionError:
        raise _error(path, "cannot be read: permission denied", hint=f"`sudo chmod a+r {path}`") from None
    except OSError as error:
        raise _error(path, f"cannot be read: {error.strerror}", hint=f"`file {path}`") from None
    except LoadError:
        raise
    except Exception:  # whatever elftools meets in tables that were overwritten
        raise _error(path, "is damaged: its tables point to nowhere", hint=_AGAIN) from None


def _error(path: Path, rule: str, *, hint: str) -> LoadError:
    return LoadError(str(path), rule, hint=hint)


def _check_whole(path: Path, f: BinaryIO) -> None:
    """Rejects a file that is not ELF or was cut off: the table of sections is the last thing in a file."""
    head = f.read(64)
    if head[:4] != b"\x7fELF":
        for magic, what, hint in _OTHER_FORMATS:
            if head.startswith(magic):
                raise _error(path, f"is {what}, not an ELF file", hint=hint.format(path=path))
        rule = f"is not an ELF file: it begins with {head[:8]!r}" if head else "is empty"
        raise _error(path, rule, hint=_AGAIN)
    size = f.seek(0, io.SEEK_END)
    end = 64
    if head[4:6] == b"\x02\x01" and len(head) == 64:
        table, entry, count = struct.unpack_from("<Q10xHH", head, 40)
        end = table + entry * count
    if size < end:
        raise _error(path, f"is cut off: it has {size} of {end} bytes", hint=_AGAIN)


def _read(path: Path, elf: Any) -> SharedLibrary:
    sections = {section.name: section for section in elf.iter_sections()}
    _check_bounds(elf, sections.values())
    tags: dict[str, list[str]] = {"needed": [], "soname": [], "runpath": [], "rpath": []}
    for tag in sections[".dynamic"].iter_tags() if ".dynamic" in sections else ():
        name = tag.entry.d_tag.removeprefix("DT_").lower() if isinstance(tag.entry.d_tag, str) else ""
        if name in tags:
            tags[name].append(getattr(tag, name))
    versions_needed, names_of_versions = _versions_needed(sections.get(".gnu.version_r"))
    defined, undefined = _symbols(elf, sections, names_of_versions)
    versions_defined = frozenset(
        name.name
        for _, names in (sections[".gnu.version_d"].iter_versions() if ".gnu.version_d" in sections else ())
        for name in names
    )
    comment = sections[".comment"].data() if ".comment" in sections else b""
    return SharedLibrary(
        path=path,
        machine=_MACHINES.get(elf["e_machine"], str(elf["e_machine"]).removeprefix("EM_").lower()),
        kind=_KINDS.get(elf["e_type"], "file"),
        size_bytes=elf.stream_len,
        soname="".join(tags["soname"]),
        needed=tuple(tags["needed"]),
        search=_folders(path, tags["runpath"]),
        inherited_search=() if tags["runpath"] else _folders(path, tags["rpath"]),
        defined=defined,
        undefined=undefined,
        versions_needed=versions_needed,
        versions_defined=versions_defined,
        compilers=tuple(dict.fromkeys(text.decode(errors="replace") for text in comment.split(b"\0") if text)),
        regions={
            name: (sections[name]["sh_offset"], sections[name]["sh_offset"] + sections[name]["sh_size"])
            for name in _READ_LATER
            if name in sections
        },
    )


def _check_bounds(elf: Any, sections: Iterable[Any]) -> None:
    """Refuses tables that reach beyond the file, or claim more entries than they have bytes."""
    for section in sections:
        kind, size = section["sh_type"], section["sh_size"]
        is_outside = kind != "SHT_NOBITS" and section["sh_offset"] + size > elf.stream_len
        if is_outside or ("GNU_ver" in str(kind) and section["sh_info"] > size):
            raise ValueError(section.name)


def _folders(path: Path, values: list[str]) -> tuple[str, ...]:
    origin = str(path.resolve().parent)
    folders = [folder for value in values for folder in value.split(":") if folder]
    return tuple(folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for folder in folders)


def _versions_needed(section: Any) -> tuple[dict[str, tuple[str, ...]], dict[int, str]]:
    """Returns the versions needed of each library, and the names of versions by their index."""
    by_library: dict[str, tuple[str, ...]] = {}
    by_index: dict[int, str] = {}
    for library, versions in section.iter_versions() if section else ():
        listed = list(versions)
        by_library[library.name] = tuple(version.name for version in listed)
        by_index.update({version["vna_other"]: version.name for version in listed})
    return by_library, by_index


def _symbols(
    elf: Any, sections: dict[str, Any], names_of_versions: dict[int, str]
) -> tuple[frozenset[str], tuple[Symbol, ...]]:
    """Returns the names that a file has for others, and the symbols that it needs of others."""
    table = sections.get(".dynsym")
    if table is None or elf.elfclass != 64 or not elf.little_endian:
        return frozenset(), ()
    # With struct, not with elftools: libtorch_cpu.so has 75,000 symbols, read in 0.07 s.
    strings = elf.get_section(table["sh_link"]).data()
    versions = sections[".gnu.version"].data() if ".gnu.version" in sections else b""
    indices = [index & 0x7FFF for (index,) in struct.iter_unpack("<H", versions)]
    defined, undefined = [], []
    for number, (at, info, _, section, _, _) in enumerate(_SYMBOL.iter_unpack(table.data())):
        name = strings[at : strings.index(b"\0", at)].decode(errors="replace")
        if section:
            defined.append(name)
        elif name and info >> 4 != _LOCAL:
            version = names_of_versions.get(indices[number], "") if indices else ""
            undefined.append(Symbol(name, version, info >> 4 == _WEAK))
    return frozenset(defined), tuple(undefined)
