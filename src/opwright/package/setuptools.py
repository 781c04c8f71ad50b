"""For projects with a setup.py:

from opwright.package.setuptools import wheel_commands
setup(..., cmdclass=wheel_commands(architectures=["80", "90"]))
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from setuptools import Command
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.sdist import sdist

from opwright.errors import PackageError
from opwright.package.wheel import build, complete_wheel

_SOURCES = frozenset({".cpp", ".cu", ".cuh", ".h", ".hpp", ".py"})


def wheel_commands(
    package: str | None = None,
    *,
    architectures: Sequence[str] | None = None,
    levels: Sequence[str] | None = None,
) -> dict[str, type[Command]]:
    """Returns commands for `cmdclass`, with which wheels have the library of a package's operators.

    Args:
        package: its import name, where the project has several.
        architectures: as the option of the build hook of hatchling.
        levels: as the option of the build hook of hatchling.
    """
    given = {"architectures": architectures, "levels": levels}
    options = {name: value for name, value in given.items() if value is not None}

    class OpwrightWheel(bdist_wheel):
        """Builds the library, then the wheel with it."""

        def finalize_options(self) -> None:
            self.distribution.has_ext_modules = lambda: True  # else the files would not lie at the wheel's root
            super().finalize_options()

        def get_tag(self) -> tuple[str, str, str]:
            if not hasattr(self, "_built"):  # an editable install, which has no library
                return super().get_tag()
            python, abi, platform = self._built.tag.split("-")
            return python, abi, platform

        def run(self) -> None:
            with tempfile.TemporaryDirectory(prefix="opwright-wheel-") as folder:
                root, name = _package_of(self.distribution, package)
                self._built = build(root, name, Path(folder), options)
                super().run()
                made = Path(self.dist_dir) / f"{self.wheel_dist_name}-{self._built.tag}.whl"
                complete_wheel(made, self._built)

    class OpwrightSdist(sdist):
        """Adds the sources of kernels, which setuptools does not know."""

        def make_distribution(self) -> None:
            root, name = _package_of(self.distribution, package)
            here = Path.cwd().resolve()
            found = [path for path in sorted((root / name).rglob("*")) if path.is_file() and path.suffix in _SOURCES]
            self.filelist.extend(str(path.relative_to(here)) for path in found)
            self.filelist.remove_duplicates()
            super().make_distribution()

    return {"bdist_wheel": OpwrightWheel, "sdist": OpwrightSdist}


def _package_of(distribution: Any, package: str | None) -> tuple[Path, str]:
    """Returns the folder that the package lies in, and its name."""
    top = sorted({name.split(".")[0] for name in distribution.packages or ()})
    if package is None and len(top) != 1:
        raise PackageError(
            distribution.get_name(), "it is not clear which package has the operators",
            rows=[("packages", ", ".join(top) or "none")], hint='`wheel_commands("my_ops")`',
        )  # fmt: skip
    name = package or top[0]
    folders = distribution.package_dir or {}
    root = Path(folders[name]).parent if name in folders else Path(folders.get("", "."))
    return root.resolve(), name
