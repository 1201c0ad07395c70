"""Every exception of the package.

A message says what was found, where, what was expected, and what to do next. Each class can be
made from its message alone, since worker processes hand exceptions over by type and text.
"""

__all__ = [
    "ConfigError",
    "InputError",
    "LoaderError",
    "MappingError",
    "ReadError",
    "StateError",
    "StoreError",
    "UpstreamError",
    "ZephonError",
]


class ZephonError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(ZephonError):
    """Raised when a setting is unknown, missing, of the wrong type, or outside its range."""


class InputError(ZephonError):
    """Raised when an input file, one of its records, or the tokenizer's files cannot be used."""


class StoreError(ZephonError):
    """Raised when a token store is missing, unfinished, damaged, or older than its input."""


class MappingError(ZephonError):
    """Raised when a global batch cannot be dealt to the given topology."""


class StateError(ZephonError):
    """Raised when a loader state is no state of ours, or belongs to another order of data."""


class LoaderError(ZephonError):
    """Raised when a loader is used in a way that would lose, repeat or mix up samples."""


class ReadError(LoaderError):
    """Raised when an item cannot be had: reading it failed, or the worker that was to read it died or hangs."""


class UpstreamError(ZephonError, ImportError):
    """Raised when the TorchTitan release that the overlay stands on is missing or another one."""
