"""The build hook of hatchling: `[tool.hatch.build.hooks.opwright]` in a project's pyproject.toml."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.plugin import hookimpl

from opwright.errors import PackageError
from opwright.package.wheel import build, complete_wheel

# Options that hatchling has for every hook, and the one that says which package it is.
_NOT_OURS = frozenset({
    "package", "dependencies", "require-runtime-dependencies", "require-runtime-features", "enable-by-default", "path",
})  # fmt: skip


class OpwrightBuildHook(BuildHookInterface):
    """Puts the library of a package's operators into its wheel.

    Options in pyproject.toml: `package` (the import name, where there are several), `architectures` (such as
    `["80", "90"]`; `[]`: no CUDA kernels), `levels` (of x86-64: `["v2", "v3", "v4"]`).

    An editable install has no library: kernels are built when their sources change, by the toolkit.
    """

    PLUGIN_NAME = "opwright"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        if version == "editable":
            build_data.setdefault("dependencies", []).append("opwright")
            return
        self._folder = tempfile.TemporaryDirectory(prefix="opwright-wheel-")
        options = {name: value for name, value in self.config.items() if name not in _NOT_OURS}
        self._built = build(*self._package(), Path(self._folder.name), options)
        build_data["pure_python"], build_data["tag"] = False, self._built.tag

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.target_name == "wheel" and version != "editable":
            complete_wheel(Path(artifact_path), self._built)
            self._folder.cleanup()

    def _package(self) -> tuple[Path, str]:
        """Returns the folder that the package lies in, and its name."""
        packages = {Path(path).name: Path(self.root, path).parent for path in self.build_config.packages}
        name = self.config.get("package") or (next(iter(packages)) if len(packages) == 1 else None)
        if name not in packages:
            raise PackageError(
                self.metadata.name, "it is not clear which package has the operators",
                rows=[("packages", ", ".join(packages) or "none"), ("package", str(self.config.get("package")))],
                hint="`packages` of [tool.hatch.build.targets.wheel], and `package` among the options of the hook",
            )  # fmt: skip
        return packages[name], name


@hookimpl
def hatch_register_build_hook() -> type[BuildHookInterface]:
    """Called by hatchling."""
    return OpwrightBuildHook
