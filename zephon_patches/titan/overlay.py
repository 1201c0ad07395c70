"""How the repository's ``torchtitan`` joins the installed one.

The repository holds only the TorchTitan modules that it changes. Such a module starts with ::

    upstream = run_upstream(globals())

which runs the source of the same module of the installed release in the module's own namespace, and
then replaces what this fork changes. So there is one module of each name and one class of each name:
what tests patch, what is pickled, relative imports and ``super()`` behave as in the release. (An alias
module with a re-export was tried: a test that patches a name in ``components.checkpoint`` then patches
a name that nobody reads.) In a package's ``__init__.py`` the call also appends the installed package's
folder to ``__path__``, so a module that is not in the overlay is found in the release.

``__file__`` becomes the path of upstream's file, as upstream's code (and ``inspect``, which looks for
the source of a class there, as ``--help`` does for the descriptions of settings) expects;
``__spec__.origin`` stays the overlay's file and tells which modules are replaced.
"""

import functools
import json
from importlib.machinery import SourceFileLoader
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from zephon_patches.errors import UpstreamError

__all__ = ["UPSTREAM_VERSION", "extend_path", "hook_checkpoints", "run_upstream", "upstream_folder"]

UPSTREAM_VERSION = "0.2.2"


@functools.cache
def upstream_folder() -> Path:
    """The ``torchtitan`` folder of the installed release.

    It is found by the distribution's record, never by the order of ``sys.path``: the overlay is first there.

    Raises:
        UpstreamError: TorchTitan is not installed, in another version, or without its files.
    """
    runs_on = f"this fork runs on top of release {UPSTREAM_VERSION}: pip install torchtitan=={UPSTREAM_VERSION}"
    try:
        installed = distribution("torchtitan")
    except PackageNotFoundError:
        raise UpstreamError(f"torchtitan is not installed; {runs_on}") from None
    # A local suffix ("0.2.2+site1") names a rebuild of the same release.
    if installed.version.partition("+")[0] != UPSTREAM_VERSION:
        raise UpstreamError(f"torchtitan {installed.version} is installed; {runs_on}")
    candidates = [Path(str(installed.locate_file("torchtitan"))), *_checkout_of(installed)]
    for folder in candidates:
        if (folder / "__init__.py").is_file() and (folder / "train.py").is_file():
            return folder.resolve()
    places = " or ".join(map(str, candidates))
    raise UpstreamError(f"torchtitan {installed.version} is installed, but its files are not at {places}; {runs_on}")


def _checkout_of(installed: Distribution) -> list[Path]:
    """Where an editable install (``pip install -e``) of a checkout has its package, if it is one."""
    try:
        record = json.loads(installed.read_text("direct_url.json") or "{}")
    except ValueError:
        return []
    url = urlparse(record.get("url", ""))
    if url.scheme != "file":
        return []
    return [Path(url2pathname(url.path)) / "torchtitan"]


def extend_path(namespace: dict[str, Any]) -> None:
    """Lets a package of the overlay find upstream's modules where it has none of its own.

    Args:
        namespace: ``globals()`` of the package.
    """
    folder = str(upstream_folder().joinpath(*namespace["__spec__"].name.split(".")[1:]))
    if folder not in namespace["__path__"]:
        namespace["__path__"].append(folder)


def run_upstream(namespace: dict[str, Any]) -> SimpleNamespace:
    """Runs the upstream module of the same name in the namespace of an overlay module.

    Args:
        namespace: ``globals()`` of the overlay module; a package's ``__path__`` is extended.

    Returns:
        The names that upstream's module defines, for the overlay to build on.

    Raises:
        UpstreamError: The release is missing or another one, or has no such module.
    """
    # `python -m` names the module "__main__"; upstream's own `if __name__ == "__main__"` must not run before
    # the replacements are in, so the code always runs under the module's full name.
    spec = namespace["__spec__"]
    path = upstream_folder().joinpath(*spec.name.split(".")[1:])
    if "__path__" in namespace:
        extend_path(namespace)
        file = path / "__init__.py"
    else:
        file = path.with_suffix(".py")
    if not file.is_file():
        raise UpstreamError(f"the overlay replaces {spec.name}, but torchtitan {UPSTREAM_VERSION} has no {file}")

    # The loader compiles as an import would: under the real file name, without this module's
    # __future__ flags, through upstream's own __pycache__.
    code = SourceFileLoader(spec.name, str(file)).get_code(spec.name)
    assert code is not None
    name = namespace["__name__"]
    namespace.update(__name__=spec.name, __file__=str(file))
    try:
        exec(code, namespace)
    finally:
        namespace["__name__"] = name
    return SimpleNamespace(**{key: value for key, value in namespace.items() if not key.startswith("__")})


def hook_checkpoints(manager_cls: Any) -> None:
    """Lets the pipeline act around what TorchTitan's checkpoint manager does.

    The class itself stays (name, module, identity); five of its methods are wrapped.
    """
    upstream_init, upstream_dcp_load = manager_cls.__init__, manager_cls.dcp_load
    upstream_save, upstream_load = manager_cls.save, manager_cls.load
    upstream_purge = manager_cls._purge_stale_checkpoints

    # The hook is imported at the first call: it may import what imports the module that is being made here.
    @functools.wraps(upstream_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        from zephon_patches.titan import hook

        upstream_init(self, *args, **kwargs)
        hook.attach(self)

    @functools.wraps(upstream_dcp_load)
    def dcp_load(self: Any, state_dict: Any, checkpoint_id: str, from_hf: bool, *args: Any, **kwargs: Any) -> Any:
        from zephon_patches.titan import hook

        hook.before_load(self, state_dict, checkpoint_id, from_hf)
        return upstream_dcp_load(self, state_dict, checkpoint_id, from_hf, *args, **kwargs)

    @functools.wraps(upstream_save)
    def save(self: Any, curr_step: int, last_step: bool = False) -> Any:
        from zephon_patches.titan import hook

        saved = upstream_save(self, curr_step, last_step=hook.after_step(self, curr_step, last_step))
        hook.after_save(self)
        return saved

    @functools.wraps(upstream_load)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        from zephon_patches.titan import hook

        loaded = upstream_load(self, *args, **kwargs)
        hook.after_load(self, loaded)
        return loaded

    @functools.wraps(upstream_purge)
    def purge(self: Any) -> None:
        from zephon_patches.titan import hook

        with hook.unfinished_are_not_counted(self):
            upstream_purge(self)

    manager_cls.__init__, manager_cls.dcp_load, manager_cls.save, manager_cls.load = init, dcp_load, save, load
    manager_cls._purge_stale_checkpoints = purge
