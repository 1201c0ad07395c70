"""What TensorBoard and W&B get of the data, and the paragraph that a start writes into the log.

Both are computed from the cursor when they are asked for; a step costs nothing.
"""

from typing import Any

from zephon_patches import mapping
from zephon_patches.loader.loader import Loader

__all__ = ["DataMetrics", "paragraph"]

# Sources that the log lists.
_LISTED = 16


class DataMetrics:
    """The values of a loader since the last time they were asked for.

    Args:
        loader: Its cursor and sources are told.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.begin()

    def begin(self) -> None:
        """Counts from here on; to be called when the loader was moved."""
        loader = self._loader
        self._steps, self._samples, self._waited = (
            loader.steps_delivered,
            loader.samples_delivered,
            loader.seconds_waited,
        )

    def values(self) -> dict[str, float]:
        """By the name under which they are logged; mean values are over the steps since the last call.

        ``data/cursor``; ``data/padding_rows`` of a step over all ranks; ``data/waiting(s)`` of a step on this rank; for
        each source ``data/epoch``, with the part of it that is done, ``data/samples`` so far, and in a mixture its
        ``data/share`` since the mixture is in force and ``data/target_share``.
        """
        loader = self._loader
        steps = max(loader.steps_delivered - self._steps, 1)
        rows = mapping.padded_batch_size(loader.global_batch_size, loader.local_batch_size, loader.topology.dp_size)
        values: dict[str, float] = {
            "data/cursor": loader.cursor,
            "data/padding_rows": rows - (loader.samples_delivered - self._samples) / steps,
            "data/waiting(s)": (loader.seconds_waited - self._waited) / steps,
        }
        self.begin()
        places = loader.order.epochs_at(loader.cursor)
        at, weights, counts = loader.order.mixture_at(loader.cursor)
        for name, (epoch, position, size), weight, count in zip(loader.sources, places, weights, counts, strict=True):
            values[f"data/epoch/{name}"] = epoch + position / size
            values[f"data/samples/{name}"] = epoch * size + position
            if len(places) > 1 and loader.cursor > at:
                values[f"data/share/{name}"] = count / (loader.cursor - at)
                values[f"data/target_share/{name}"] = weight / sum(weights)
        return values


def paragraph(loader: Loader, config: Any, step: int, written_by: int | None) -> str:
    """What a start is about to train on, in a few lines for the log.

    Args:
        loader: At the place where training starts.
        config: The trainer's.
        step: The trainer's.
        written_by: Processes that wrote the checkpoint; None if none was loaded.
    """
    cursor, dp_size, batch = loader.cursor, loader.topology.dp_size, loader.global_batch_size
    last = config.training.steps
    lines = [f"training starts at sample {cursor:,} (step {step:,} of {last:,})"]
    places = loader.order.epochs_at(cursor)
    _, weights, _ = loader.order.mixture_at(cursor)
    largest = sorted(range(len(places)), key=lambda number: -weights[number])
    for number in sorted(largest[:_LISTED]):
        epoch, position, size = places[number]
        name, documents, tokens = loader.sources[number], loader.documents[number], loader.tokens[number]
        share = f", {100 * weights[number] / sum(weights):.4g} % of the samples" if len(places) > 1 else ""
        lines.append(
            f"source {name}: {documents:,} documents, {tokens:,} tokens, {size:,} samples of {loader.seq_len:,}{share}"
            f"; epoch {epoch:,}, {position:,} samples of it are done"
        )
    if len(places) > _LISTED:
        lines.append(f"and {len(places) - _LISTED:,} smaller sources")
    end = "has no end" if loader.end is None else f"ends at sample {loader.end:,}"
    before = "" if written_by is None else f"; processes that wrote the checkpoint: {written_by:,}"
    lines.append(f"{dp_size:,} data-parallel ranks now{before}; a step takes {batch:,} samples; the data {end}")
    given = getattr(config.training.global_batch_size, "requested", batch)
    if given is not None:
        lines.append("at another NGPU each step takes the same samples (training.global_batch_size is set)")
    else:
        lines.append(
            "at another NGPU a step has another size (training.global_batch_size is not set); the order of the samples "
            "goes on from where it is"
        )
    return "\n    ".join(lines)
