"""Concatenate and chunk: which tokens of a shard make which sample.

The documents of a shard are one run of T tokens. Sample k holds the ``seq_len + 1`` tokens from
``k * seq_len``: the first ``seq_len`` are its inputs, the last ``seq_len`` its labels. Neighbours overlap
by one token, so each token but the shard's first is a label exactly once; the last sample of a shard may
be shorter and is padded. Shards do not run into each other.

Worked case, T = 10 tokens 0..9, ``seq_len`` = 4: 9 labels make ceil(9 / 4) = 3 samples, of tokens 0..4,
4..8 and 8..9; the last has one label and three padded places.
"""

import numpy as np

__all__ = ["num_samples", "samples_with", "span"]


def num_samples(num_tokens: np.ndarray, seq_len: int) -> np.ndarray:
    """Samples of each shard.

    Args:
        num_tokens: int64, any shape; tokens of each shard.
        seq_len: At least 1.

    Returns:
        int64, the same shape; 0 for a shard of one token or none, which has no label.
    """
    labels = np.maximum(np.asarray(num_tokens, dtype=np.int64) - 1, 0)
    return -(-labels // seq_len)


def span(sample: int, seq_len: int, num_tokens: int) -> tuple[int, int]:
    """First token of a sample and the one behind its last, in the shard; 2 to ``seq_len + 1`` tokens."""
    start = sample * seq_len
    return start, min(start + seq_len + 1, num_tokens)


def samples_with(start: int, stop: int, seq_len: int, num_tokens: int) -> range:
    """The samples that hold any of the tokens ``[start, stop)`` of a shard of ``num_tokens``, as input or label.

    So for a document's tokens they are the samples of the document; those at its ends may hold others too.
    """
    if start >= stop:
        return range(0)
    # Sample k holds tokens k * seq_len to (k + 1) * seq_len, both included.
    first = max(-(-start // seq_len) - 1, 0)
    last = (stop - 1) // seq_len
    return range(first, min(last + 1, int(num_samples(np.int64(num_tokens), seq_len))))
