"""The loader's state: one number, and a description of the order that it counts in.

A flat dict with two keys, for ever::

    cursor   int, every sequence number below it is consumed
    order    canonical JSON: what the order is made of, its fingerprint, and a format number

Nothing in it depends on ranks or workers, so one copy serves every topology. DCP plans a load from the keys
that are present before it asks the loader, so whatever has to be added goes inside ``order``.
"""

import json
from collections.abc import Callable
from typing import Any

from zephon_patches.config import MAX_NUMBER
from zephon_patches.errors import StateError
from zephon_patches.keys import canonical_json, fingerprint

__all__ = ["CURSOR", "FORMAT", "ORDER", "check_order", "describe_order", "read_state"]

CURSOR, ORDER = "cursor", "order"
FORMAT = 1

# What is told but not compared: the order goes on from the cursor whatever the size of a step.
_INFORMATION = ("fingerprint", "global_batch_size")

_SETTINGS = {
    "seed": "data.seed",
    "seq_len": "training.seq_len",
    "packing": "packing",
    "shuffle_shards": "data.shuffle_shards",
    "shard_bytes": "data.shard_bytes",
    "tokenizer": "tokenizer (content of model.hf_assets_path)",
}
_SOURCE_PARTS = {
    "recipe": "how its records become documents",
    "tokens": "tokens",
    "samples": "samples",
    "data": "data (fingerprint of its shards)",
}

_SOURCE_KEYS = ("name", *_SOURCE_PARTS)

# Deeper than the order of any mixture.
_MAX_DEPTH = 16

_WAY_OUT = (
    "Bring back what the checkpoint was written with. Or start the data anew by not loading the loader's state: in "
    'TorchTitan, checkpoint.exclude_from_loading = ["dataloader"], and data.initial_cursor = the sample to start at'
)


def describe_order(order: dict[str, Any], global_batch_size: int) -> str:
    """The ``order`` entry of the state.

    Args:
        order: ``seed``, ``seq_len``, ``packing``, ``shuffle_shards``, ``shard_bytes``, ``tokenizer``, and
            ``sources``: a list of dicts with ``name``, ``recipe``, ``data``, ``tokens`` and ``samples``.
        global_batch_size: Told for people and logs.
    """
    content = {"format": FORMAT, **order}
    return canonical_json({**content, "fingerprint": fingerprint(content), "global_batch_size": global_batch_size})


def read_state(state: Any) -> tuple[int, dict[str, Any]]:
    """Checks a state's form: (cursor, order).

    Raises:
        StateError: It is not a state of this loader, or is damaged, or a newer version wrote it.
    """
    if not isinstance(state, dict):
        raise StateError(f"loader state: found {type(state).__name__}, expected a dict with {CURSOR!r} and {ORDER!r}")
    for key in (CURSOR, ORDER):
        if key not in state:
            found = ", ".join(sorted(map(repr, state))) or "nothing"
            raise StateError(
                f"loader state: no {key!r} in it (found {found}); it was not written with "
                'data.loading_strategy = "zephon", or is incomplete'
            )
    cursor, text = state[CURSOR], state[ORDER]
    if not isinstance(cursor, int) or isinstance(cursor, bool):
        raise StateError(f"loader state: cursor is {_shown(cursor)}, expected an integer")
    if not 0 <= cursor <= MAX_NUMBER:
        shown = f"{cursor:,}" if cursor.bit_length() < 256 else f"an integer of {cursor.bit_length():,} bits"
        raise StateError(f"loader state: cursor is {shown}, expected 0 to {MAX_NUMBER:,}")
    try:
        order = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        order = None
    if not isinstance(order, dict) or _is_deeper(order, _MAX_DEPTH):
        raise StateError(f"loader state: order is {_shown(text)}, expected a JSON object; the checkpoint is damaged")
    if order.get("format") != FORMAT:
        raise StateError(
            f"loader state: order has format {order.get('format')!r}, this version reads format {FORMAT}; resume with "
            "the version that wrote the checkpoint"
        )
    content = {key: value for key, value in order.items() if key not in _INFORMATION}
    try:
        present = fingerprint(content)
    except ValueError:  # a number that reads as an infinity has no hash
        present = "none"
    if order.get("fingerprint") != present:
        raise StateError(
            f"loader state: the order's content has fingerprint {present}, but {order.get('fingerprint')} "
            "stands in it; it was edited or damaged"
        )
    # A fingerprint keeps no one from writing anything: what comes from elsewhere may have a good one.
    if not _are_sources(order.get("sources")):
        raise StateError(
            f"loader state: sources in the order is {order.get('sources')!r:.200}, expected a list of objects with "
            f"{', '.join(_SOURCE_KEYS)}"
        )
    batch = order.get("global_batch_size")
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise StateError(f"loader state: global_batch_size in the order is {batch!r}, expected 1 or more samples")
    return cursor, order


def _shown(value: Any) -> str:
    plain = value is None or isinstance(value, bool | float | str | bytes)
    return repr(value[:60] if isinstance(value, str | bytes) else value) if plain else f"of type {type(value).__name__}"


def _is_deeper(data: Any, depth: int) -> bool:
    """Whether plain data is nested deeper than so many levels; such data could not even be shown in a message."""
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return depth < 0 or any(_is_deeper(entry, depth - 1) for entry in inner)


def _are_sources(sources: Any) -> bool:
    return isinstance(sources, list) and all(
        isinstance(source, dict) and source.keys() >= set(_SOURCE_KEYS) and isinstance(source["name"], str)
        for source in sources
    )


def check_order(
    saved: dict[str, Any],
    present: dict[str, Any],
    cursor: int,
    data_changes: Callable[[int, str], list[str]] = lambda source, data: [],
) -> None:
    """Compares the order that a state counts in with the present one.

    Args:
        saved: The state's order.
        present: The loader's.
        cursor: The state's, for the message.
        data_changes: Given a present source's number and its data's fingerprint of before, says which files changed.

    Raises:
        StateError: They differ; the message says in what, from what to what.
    """
    if saved["fingerprint"] == present["fingerprint"]:
        return
    keys = [*_SETTINGS, *sorted(saved.keys() ^ present.keys())]  # a key that one of them lacks is a difference too
    lines = [
        f"{_SETTINGS.get(key, key)}: {saved.get(key)!r} in the checkpoint, {present.get(key)!r} now"
        for key in keys
        if saved.get(key) != present.get(key)
    ]
    # Another tokenizer or another cutting changes every source's numbers too; naming the cause is enough.
    if saved.get("tokenizer") == present["tokenizer"] and saved.get("shard_bytes") == present["shard_bytes"]:
        lines += _source_differences(saved, present, data_changes)
    listed = "\n  ".join(lines)
    raise StateError(f"the state at sample {cursor:,} counts in another order of data:\n  {listed}\n{_WAY_OUT}")


def _source_differences(
    saved: dict[str, Any], present: dict[str, Any], data_changes: Callable[[int, str], list[str]]
) -> list[str]:
    before = {source["name"]: source for source in saved["sources"]}
    now = [source["name"] for source in present["sources"]]
    lines = []
    if list(before) != now:
        lines.append(f"sources: {', '.join(before)} in the checkpoint, {', '.join(now)} now")
    for number, source in enumerate(present["sources"]):
        old = before.get(source["name"])
        if old is None:
            continue
        for key, label in _SOURCE_PARTS.items():
            # The number of samples follows from the tokens and seq_len.
            if old[key] != source[key] and not (key == "samples" and saved.get("seq_len") != present["seq_len"]):
                lines.append(f"source {source['name']}: {label}: {old[key]} in the checkpoint, {source[key]} now")
        if old["data"] != source["data"]:
            lines += [f"source {source['name']}: {change}" for change in data_changes(number, old["data"])]
    return lines
