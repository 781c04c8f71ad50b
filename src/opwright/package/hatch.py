"""The build hook of hatchling: `[tool.hatch.build.hooks.opwright]` in a project's pyproject.toml."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.plugin import hookimpl

from opwright.package.wheel import build, complete_wheel


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
        options = {name: self.config[name] for name in ("architectures", "levels") if name in self.config}
        self._built = build(*self._package(), Path(self._folder.name), options)
        build_data["pure_python"], build_data["tag"] = False, self._built.tag

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.target_name == "wheel" and version != "editable":
            complete_wheel(Path(artifact_path), self._built)
            self._folder.cleanup()

    def _package(self) -> tuple[Path, str]:
        """Returns the folder that the package lies in, and its name."""
        packages = self.build_config.packages
        name = self.config.get("package")
        for path in packages:
            if name in (None, Path(path).name):
                return Path(self.root, path).parent, Path(path).name
        raise ValueError("[tool.hatch.build.targets.wheel] names no `packages`")


@hookimpl
def hatch_register_build_hook() -> type[BuildHookInterface]:
    """Called by hatchling."""
    return OpwrightBuildHook
