"""What a chat template makes of a conversation; apart from it, since templates take a library that texts do not."""

from typing import NamedTuple

__all__ = ["Rendered"]


class Rendered(NamedTuple):
    """A conversation as a text."""

    text: str
    spans: list[tuple[int, int]]
    """Where the assistant speaks: ascending half-open intervals of characters"""
