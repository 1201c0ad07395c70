"""Trains with this fork's modules, installed or from a checkout, from any folder:

    torchrun --nproc_per_node 2 -m zephon_patches.train --job.config_file my.toml

The overlay works by being the first ``torchtitan`` on Python's path. ``run_train.sh`` puts it there from outside; here
it is done from inside, before anything imports TorchTitan. A wheel has the overlay in ``zephon_patches/overlay``,
where it hides nothing and overwrites nothing; a checkout has it beside ``zephon_patches``.

A trainer of one's own starts with ::

    from zephon_patches.train import use_overlay

    use_overlay()
    import torchtitan.train
"""

import os
import sys
from pathlib import Path

from zephon_patches.errors import UpstreamError

__all__ = ["main", "overlay_folder", "use_overlay"]


def overlay_folder() -> Path:
    """The folder whose ``torchtitan`` is the overlay.

    Raises:
        UpstreamError: It is neither in this package nor beside it.
    """
    package = Path(__file__).resolve().parent
    candidates = [package / "overlay", package.parent]
    for folder in candidates:
        # The release has a train.py, the overlay has none: an installed TorchTitan beside this package is no overlay.
        if (folder / "torchtitan" / "__init__.py").is_file() and not (folder / "torchtitan" / "train.py").exists():
            return folder
    places = " nor ".join(str(folder / "torchtitan") for folder in candidates)
    raise UpstreamError(
        f"the modules that replace TorchTitan's are neither in {places}: this installation is incomplete; install "
        "the package anew"
    )


def use_overlay() -> None:
    """Lets ``import torchtitan`` find the overlay, in this process and in those that it starts.

    Raises:
        UpstreamError: Another ``torchtitan`` is already imported, or there is no overlay.
    """
    folder = overlay_folder()
    loaded = sys.modules.get("torchtitan")
    origin = loaded.__spec__.origin if loaded is not None and loaded.__spec__ is not None else None
    if loaded is not None and (origin is None or Path(origin).resolve().parent != folder / "torchtitan"):
        raise UpstreamError(
            f"torchtitan is already imported, from {origin or 'an unknown place'}, so this fork's modules cannot take "
            "their places; call zephon_patches.train.use_overlay(), or start python -m zephon_patches.train, before "
            "anything imports torchtitan"
        )
    first = str(folder)
    sys.path[:] = [first, *(entry for entry in sys.path if entry != first)]
    # Spawned processes get sys.path as it is; those that start a Python of their own get this.
    others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != first]
    os.environ["PYTHONPATH"] = os.pathsep.join([first, *others])


def main() -> None:
    """Runs TorchTitan's trainer on the arguments of the command line."""
    use_overlay()
    import torchtitan.train

    torchtitan.train.main(torchtitan.train.Trainer)


if __name__ == "__main__":
    main()
