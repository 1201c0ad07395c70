"""Puts the overlay into the wheel: ``torchtitan/`` becomes ``zephon_patches/overlay/torchtitan/``.

Not at the top: there it would write over the installed TorchTitan. And not in an editable install, which uses the
folder of the checkout: there the copy would be all that is found of ``zephon_patches``. A static ``force-include``
in pyproject.toml cannot tell the two apart.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class OverlayHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"]["torchtitan"] = "zephon_patches/overlay/torchtitan"
