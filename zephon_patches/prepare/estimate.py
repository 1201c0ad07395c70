"""About how long a build takes: the first documents of what is to be built are tokenized, and thrown away.

That runs in this process with the library's threads, on all its cores, as one builder does. Worker processes are at
least as fast, so for them it is an upper bound; and what builders on other machines take over comes off it.
"""

import time
from collections.abc import Iterable

from zephon_patches.prepare.encoding import Encoder
from zephon_patches.prepare.shards import Input
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.prepare.unfinished import Unit

__all__ = ["estimated_minutes"]

# What is tokenized to estimate the time, and the least text for which that is worth it.
_SAMPLE_BYTES, _SAMPLE_SECONDS, _ESTIMATED_BYTES = 1 << 20, 10.0, 64 << 20


def estimated_minutes(source: Input, tokenizer: TextTokenizer, units: Iterable[Unit], size: int) -> float:
    """About how long some units take on this machine alone.

    Args:
        size: Their bytes of input.

    Returns:
        Minutes; 0 for little input, of which no sample is taken.
    """
    if size < _ESTIMATED_BYTES:
        return 0.0
    encoder = Encoder(tokenizer, None, source.name)
    if source.in_place is None:
        encoder.load()
    started = time.monotonic()
    sampled = 0
    for unit in units:
        piece, piece_size = source.sample(unit, _SAMPLE_BYTES)
        sampled_texts = 0
        for batch in encoder.batches(piece):
            sampled_texts += batch.text_bytes
            if time.monotonic() - started > _SAMPLE_SECONDS:  # a large row group; its texts will do
                piece_size = sampled_texts
                break
        sampled += piece_size
        if sampled >= _SAMPLE_BYTES or time.monotonic() - started > _SAMPLE_SECONDS:
            break
    return (time.monotonic() - started) / max(sampled, 1) * size / 60
