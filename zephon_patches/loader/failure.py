"""An item that cannot be had, and the words that say which one it is.

Whoever reads a micro-batch knows its rows; whoever asked for it knows which numbers, step and rank they are of. So a
reader raises a ``ReadFailure``, and its owner makes an error of it that names all.
"""

from collections.abc import Callable, Iterator, Sequence

from zephon_patches.errors import LoaderError, ReadError, ZephonError
from zephon_patches.loader.collate import Item, MicroBatchReader, Row

__all__ = ["Items", "ReadFailure", "failed_by", "named"]

# Rows that a message lists.
_LISTED = 8


class ReadFailure(Exception):
    """Raised when a micro-batch cannot be had; what the user gets is made of it by ``named``.

    Args:
        kind: Of the error to be.
        reason: What happened.
        rows: Of the micro-batch.
    """

    def __init__(self, kind: type[ZephonError], reason: str, rows: Sequence[Row]) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.rows = rows


class Items:
    """The same items. Behind an error, Ctrl-C too, it goes on with an error: an end would look like that of the data.

    Args:
        again: Where ``iter(loader)`` begins, in words.
    """

    def __init__(self, items: Iterator[Item], again: Callable[[], str]) -> None:
        self._items = items
        self._again = again
        self._error = ""

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._error:
            raise LoaderError(
                f"this iterator ended with an error; iter(loader) begins anew {self._again()}. The error: {self._error}"
            )
        try:
            return next(self._items)
        except StopIteration:
            raise
        except BaseException as error:
            self._error = str(error) or type(error).__name__
            raise


def failed_by(error: Exception) -> tuple[type[ZephonError], str]:
    """What becomes of an error in reading: one of ours stays what it is, any other gets its type into its text."""
    if isinstance(error, ZephonError):
        return type(error), str(error)
    return ReadError, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def named(failure: ReadFailure, reader: MicroBatchReader, item: str, numbers: Sequence[int] | None) -> ZephonError:
    """The error that names what could not be read.

    Args:
        failure: Has its rows.
        reader: Knows what their sources and shards are called.
        item: Which item it was, in words.
        numbers: Of the rows in the global order, -1 for padding; None where the order is of no interest.
    """
    lines = []
    folders = {}
    for place, (source, shard, sample, padding) in enumerate(failure.rows[:_LISTED]):
        number = "" if numbers is None or numbers[place] < 0 else f"{numbers[place]:,}: "
        filled = " (a padding row)" if padding else ""
        name, shard_name, folder = reader.place_of(source, shard)
        folders[name] = folder
        lines.append(f"  {number}source {name}, shard {shard_name}, sample {sample:,} of it{filled}")
    if len(failure.rows) > _LISTED:
        lines.append(f"  and {len(failure.rows) - _LISTED:,} more rows")
    lines += [f"  source {name} is {folder}" for name, folder in folders.items()]
    kept = [number for number in numbers or () if number >= 0]
    which = f", numbers {kept[0]:,} to {kept[-1]:,}" if kept else ""
    return failure.kind("\n".join([failure.reason, f"It was to be read for {item}{which}:", *lines]))
