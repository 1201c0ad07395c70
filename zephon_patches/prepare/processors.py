"""Functions of the user's that make texts of records, given by name.

A store's recipe holds the name and a hash of the function's source, so a function that is edited gives another
store. What it calls is not seen: after a change there, give it another name.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from zephon_patches.errors import ConfigError, InputError
from zephon_patches.keys import fingerprint

__all__ = ["Processor", "load_processor", "process"]

Processor = Callable[[Any], Any]
"""A record's text, several texts, or None"""


def load_processor(name: str, where: str) -> tuple[Processor, list[str]]:
    """Imports a processor.

    Args:
        name: ``package.module:function``.
        where: The setting that names it, for messages.

    Returns:
        The function, and what it is known by in a recipe.

    Raises:
        ConfigError: It cannot be imported, or cannot be called.
    """
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does while it is imported
        raise ConfigError(
            f"{where} = {name!r}: {module_name} cannot be imported ({error!r}); Python looks in the folders of "
            "PYTHONPATH and in the environment"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{where} = {name!r}: {module_name} has no {path!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{where} = {name!r}: {type(found).__name__}, which cannot be called")
    try:
        source = [fingerprint(inspect.getsource(found))]
    except (OSError, TypeError):  # made by C, or at run time
        source = []
    return found, [name, *source]


def process(processor: Processor, record: Any, place: Callable[[], str]) -> list[str]:
    """The texts that a processor makes of a record.

    Args:
        place: Where the record is, for messages.

    Raises:
        InputError: It raised, or gave something else.
    """
    try:
        result = processor(record)
    except Exception as error:
        raise InputError(f"{place()}: the processor raised {error!r}") from error
    # Not just anything that can be iterated: a dict would pass for a list of its keys.
    texts = [] if result is None else list(result) if isinstance(result, list | tuple) else [result]
    for text in texts:
        if not isinstance(text, str):
            raise InputError(
                f"{place()}: the processor gave {type(text).__name__}, expected a text, a list of texts or None"
            )
    return texts
