"""Compares what a fast engine makes of texts with what the reference makes of them.

At the start of a build, texts that are known to trip up tokenizers (nasty.py). While it runs, a sample of each shard's
documents: the first, the last, the longest, and every k-th, where k is such that a two-thousandth of the text is
compared (the reference may well be a hundred times slower). A document that is larger than its share is compared by an
excerpt, which both engines encode anew. So an engine is caught that errs in a sampled document, and missed is one
that errs only in documents, or in parts of long ones, that are neither sampled nor like a nasty text. Where everything
is compared (``exact``) nothing is missed.

After a difference no document of the engine's is trusted: a marker in the store's folder says so to all builders, and
shards that were only sampled are made again. Each builder looks for it before it marks a shard as finished. The
manifest is written when all shards are finished, so after all comparisons.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.store.atomic import write_atomic

__all__ = ["DISTRUSTED", "EngineDistrusted", "Sampling", "compare", "describe", "distrust", "is_distrusted"]

DISTRUSTED = "engine-distrusted.json"

# One part in so many of the text is compared while it goes by, and at the most half as much again at a shard's end.
_SHARE = 2000
# What may be compared of one document, in characters, however small the shard.
_EXCERPT = 2048
# What is kept of a text that differs.
_TEXT_CHARACTERS = 10_000
# Steps, and characters encoded in them, to find the smallest text that differs.
_STEPS, _STEP_CHARACTERS = 400, 4 << 20


class EngineDistrusted(Exception):
    """Raised when an engine differed from the reference, here or in another builder of the store."""


def is_distrusted(folder: Path) -> bool:
    """Whether an engine differed from the reference while the store in this folder was built."""
    return Path(folder, DISTRUSTED).exists()


def distrust(folder: Path, report: dict[str, Any]) -> None:
    """Tells all builders of a store, also those of later starts."""
    write_atomic(Path(folder, DISTRUSTED), (json.dumps(report, indent=1) + "\n").encode("ascii"))


def compare(
    fast: TextTokenizer,
    reference: TextTokenizer,
    texts: Sequence[str],
    encoded: tuple[np.ndarray, list[int]] | None = None,
    expected: tuple[np.ndarray, list[int]] | None = None,
) -> dict[str, Any] | None:
    """Compares the ids of texts.

    Args:
        encoded: What ``fast.encode_batch`` gave for them; None to encode them here.
        expected: What ``reference.encode_batch`` gave for them; None to encode them here.

    Returns:
        None if they are the same. Else plain data: ``text`` is the smallest that was found to differ, ``engine`` and
        ``reference`` are names, ``found`` and ``expected`` the ids that each gave; ``error`` is there in the place of
        ``found``, where the engine gave none.
    """
    expected = expected or reference.encode_batch(texts)
    found: np.ndarray | None = None
    try:
        encoded = encoded or fast.encode_batch(texts)
    except Exception:
        text = next((text for text in texts if _differs(fast, reference, text)), texts[0])
    else:
        if encoded[1] == expected[1] and np.array_equal(encoded[0], expected[0]):
            return None
        text, found = _first_difference(texts, encoded, expected)
    shorter = _shrunk(text, lambda text: _differs(fast, reference, text))
    report = {"engine": fast.engine_name, "reference": reference.engine_name, "text": shorter[:_TEXT_CHARACTERS]}
    report["expected"] = reference.encode_batch([shorter])[0][:_TEXT_CHARACTERS].tolist()
    try:
        if found is None or shorter != text:  # else it may depend on what is encoded with it
            found = fast.encode_batch([shorter])[0]
        report["found"] = found[:_TEXT_CHARACTERS].tolist()
    except Exception as error:
        report["error"] = str(error)
    return report


def describe(report: dict[str, Any]) -> str:
    """What differed, in words."""
    text = report["text"]
    shown = repr(text) if len(text) <= 200 else f"{text[:200]!r}... ({len(text):,} characters)"
    found = f"fails ({report['error']})" if "error" in report else f"gives {_shown(report['found'])}"
    expected = f"{report['reference']} gives {_shown(report['expected'])}"
    return f"{report['engine']} {found} where {expected} for the text {shown}"


class Sampling:
    """Picks documents of one shard to compare.

    Args:
        compare: Is given texts, and, of whole documents, what ``encode_batch`` gave for them; raises what it likes.
    """

    def __init__(self, compare: Callable[..., None]) -> None:
        self._compare = compare
        self._seen = 0  # characters
        self._room = 0.0  # characters that may be compared now
        self._documents = 0
        self._longest = self._last = ""
        self._longest_size = 0

    def look(self, texts: Sequence[str], tokens: np.ndarray, lengths: list[int]) -> None:
        """Compares some of a batch of documents."""
        sizes = [len(text) for text in texts]
        total = sum(sizes)
        picked = {0} if not self._documents else set()
        self._room += total / _SHARE
        count = int(self._room // min(max(total / len(texts), 1), _EXCERPT))
        if count:
            step = max(len(texts) // count, 1)
            # Not the same places in every batch, in case documents repeat in a pattern.
            picked.update(range(self._documents % step, len(texts), step))
        whole: list[int] = []
        excerpts: list[str] = []
        for index in sorted(picked):
            if sizes[index] <= _EXCERPT:
                whole.append(index)
            else:
                excerpts.append(_excerpt(texts[index], _EXCERPT, self._documents + index))
            self._room -= min(sizes[index], _EXCERPT)
        if whole:
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            ids = np.concatenate([tokens[offsets[index] : offsets[index + 1]] for index in whole])
            self._compare([texts[index] for index in whole], (ids, [lengths[index] for index in whole]))
        if excerpts:
            self._compare(excerpts)
        self._seen += total
        self._documents += len(texts)
        room = self._room_at_end()
        longest = max(range(len(texts)), key=sizes.__getitem__)
        if sizes[longest] > self._longest_size:
            self._longest, self._longest_size = _excerpt(texts[longest], room, self._documents), sizes[longest]
        self._last = _excerpt(texts[-1], room, self._documents)

    def finish(self) -> None:
        """Compares the longest and the last document, after all others."""
        if self._documents:
            room = self._room_at_end()
            self._compare([_excerpt(self._longest, room, 0), _excerpt(self._last, room, 0)])

    def _room_at_end(self) -> int:
        return max(self._seen // (4 * _SHARE), _EXCERPT)


def _first_difference(
    texts: Sequence[str], encoded: tuple[np.ndarray, list[int]], expected: tuple[np.ndarray, list[int]]
) -> tuple[str, np.ndarray]:
    """The first text whose ids differ, and its ids, of some that do."""
    ours, theirs = (np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in (encoded, expected))
    return next(
        (text, one) for text, one, other in zip(texts, ours, theirs, strict=True) if not np.array_equal(one, other)
    )


def _differs(fast: TextTokenizer, reference: TextTokenizer, text: str) -> bool:
    expected = reference.encode_batch([text])[0]
    try:
        return not np.array_equal(fast.encode_batch([text])[0], expected)
    except Exception:
        return True


def _shrunk(text: str, differs: Callable[[str], bool]) -> str:
    """A part of a text that still differs, and of which a little less does not; the text itself if it does not."""
    room = _STEP_CHARACTERS
    if len(text) > room or not differs(text):
        return text
    steps = 0
    step = len(text) // 2
    while step and steps < _STEPS:
        for shorter in (text[step:], text[:-step]):
            steps += 1
            room -= len(shorter)
            if room < 0:
                return text
            if differs(shorter):
                text = shorter
                step = min(step, len(text) // 2)
                break
        else:
            step //= 2
    return text


def _excerpt(text: str, size: int, number: int) -> str:
    """A part of a text of at most ``size`` characters; ``number`` chooses the place."""
    if len(text) <= size:
        return text
    start = number * 0x9E3779B97F4A7C15 % 2**64 * (len(text) - size + 1) >> 64
    return text[start : start + size]


def _shown(ids: list[int]) -> str:
    return str(ids) if len(ids) <= 40 else f"{str(ids[:40])[:-1]}, ... {len(ids):,} ids]"
