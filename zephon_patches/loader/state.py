"""The loader's state: one number, and a description of the order that it counts in.

A flat dict with two keys, for ever::

    cursor   int, every sequence number below it is consumed or skipped
    order    canonical JSON: what the order is made of, its fingerprint, and a format number

Nothing in it depends on ranks or workers, so one copy serves every topology. DCP plans a load from the keys
that are present before it asks the loader, so whatever has to be added goes inside ``order``.

What an order has by default stands for itself and is left out: one source and one stage, no skips. So a state without
them is the same text as ever. Stages and skips count in a comparison as far as they are consumed, that is below the
cursor, and so do sources that only later stages draw from; the fingerprint is that of everything.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from zephon_patches.config import MAX_NUMBER
from zephon_patches.errors import StateError
from zephon_patches.keys import canonical_json, fingerprint
from zephon_patches.mapping import Skips

__all__ = [
    "CURSOR",
    "FORMAT",
    "ORDER",
    "accepted_change",
    "check_order",
    "describe_order",
    "describe_stages",
    "differences",
    "read_state",
    "with_changes",
]

CURSOR, ORDER = "cursor", "order"
FORMAT = 1

# What is told but not compared: the order goes on from the cursor whatever the size of a step, and what it was before
# an accepted change makes no difference to what comes.
_INFORMATION = ("fingerprint", "global_batch_size", "changes")

# What is compared as far as it is consumed.
_CONSUMED = {"skip", "sources", "stages"}

# A state stays small however often its order was changed, and however much at once.
_CHANGES_KEPT, _CHANGE_LENGTH = 3, 120

# Intervals that a message shows.
_LISTED = 8

# How a line about a mixture begins.
_MIXTURE = "mixture"

# Bytes of a stage's weights above which their fingerprint stands for them.
_LONGEST_WEIGHTS = 88

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
    "Bring back what the checkpoint was written with. Or go on from that sample in the new order, where samples may "
    'repeat or be missed: data.accept_change = "{fingerprint}". Or start the data anew by not loading the loader\'s '
    'state: in TorchTitan, checkpoint.exclude_from_loading = ["dataloader"], and data.initial_cursor = the sample to '
    "start at"
)


def describe_order(order: dict[str, Any], global_batch_size: int) -> str:
    """The ``order`` entry of the state.

    Args:
        order: ``seed``, ``seq_len``, ``packing``, ``shuffle_shards``, ``shard_bytes``, ``tokenizer``, and
            ``sources``: a list of dicts with ``name``, ``recipe``, ``data``, ``tokens`` and ``samples``, and ``since``,
            the number at which the first stage that draws from it starts, unless that is 0. Where there are some,
            ``stages`` as by ``describe_stages`` and ``skip``: the skipped intervals.
        global_batch_size: Told for people and logs.
    """
    content = {"format": FORMAT, **order}
    return canonical_json({**content, "fingerprint": fingerprint(content), "global_batch_size": global_batch_size})


def describe_stages(stages: Sequence[tuple[int, Mapping[str, int]]]) -> list[dict[str, Any]]:
    """The entry ``stages`` of a description.

    Args:
        stages: First number and whole weights, by source, without a common factor.

    Returns:
        For each ``at`` and ``weights``, those above 0; a fingerprint in place of many.
    """
    described = []
    for at, weights in stages:
        on: Any = {name: weight for name, weight in weights.items() if weight}
        described.append({"at": at, "weights": on if len(canonical_json(on)) <= _LONGEST_WEIGHTS else fingerprint(on)})
    return described


def with_changes(description: str, changes: Sequence[Mapping[str, Any]]) -> str:
    """A description with the last changes of order that were accepted on the way."""
    if not changes:
        return description
    return canonical_json({**json.loads(description), "changes": list(changes)[-_CHANGES_KEPT:]})


def accepted_change(saved: dict[str, Any], cursor: int, lines: Sequence[str]) -> dict[str, Any]:
    """What the state carries of an accepted change: where it was, the order of before, and in what it differed."""
    changed = "; ".join(lines)
    if len(changed) > _CHANGE_LENGTH:
        changed = changed[: _CHANGE_LENGTH - 3] + "..."
    return {"at": cursor, "before": saved["fingerprint"], "changed": changed}


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
    if not _are_stages(order.get("stages", [])):
        raise StateError(
            f"loader state: stages in the order is {order['stages']!r:.200}, expected a list of objects with at, the "
            "number of a sample, and weights"
        )
    if not _are_intervals(order.get("skip", [])):
        raise StateError(
            f"loader state: skip in the order is {order['skip']!r:.200}, expected a list of pairs of numbers of samples"
        )
    batch = order.get("global_batch_size")
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise StateError(f"loader state: global_batch_size in the order is {batch!r}, expected 1 or more samples")
    changes = order.get("changes", [])
    if not isinstance(changes, list) or not all(
        isinstance(change, dict) and _is_number(change.get("at")) and isinstance(change.get("before"), str)
        for change in changes
    ):
        raise StateError(
            f"loader state: changes in the order is {changes!r:.200}, expected a list of what was accepted where"
        )
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
        isinstance(source, dict)
        and source.keys() >= set(_SOURCE_KEYS)
        and isinstance(source["name"], str)
        and _is_number(source.get("since", 0))
        for source in sources
    )


def _are_stages(stages: Any) -> bool:
    return isinstance(stages, list) and all(
        isinstance(stage, dict) and _is_number(stage.get("at")) and isinstance(stage.get("weights"), dict | str)
        for stage in stages
    )


def _are_intervals(skip: Any) -> bool:
    return isinstance(skip, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(map(_is_number, pair)) and pair[0] < pair[1] for pair in skip
    )


def _is_number(value: Any) -> bool:
    """Whether it can be the number of a sample."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER


def check_order(
    saved: dict[str, Any],
    present: dict[str, Any],
    cursor: int,
    data_changes: Callable[[int, str], list[str]] = lambda source, data: [],
    accept: str = "",
) -> list[str]:
    """Compares the order that a state counts in, up to its cursor, with the present one.

    Args:
        saved: The state's order.
        present: The loader's.
        cursor: The state's.
        data_changes: Given a present source's number and its data's fingerprint of before, says which files changed.
        accept: Fingerprint of the order that may differ: ``data.accept_change``.

    Returns:
        The differences; none but where the present order is the accepted one.

    Raises:
        StateError: They differ; the message says in what, from what to what.
    """
    lines = differences(saved, present, cursor, data_changes)
    if not lines or accept == present["fingerprint"]:
        return lines
    listed = "\n  ".join(lines)
    other = f'\ndata.accept_change = "{accept}" accepts another order than this one.' if accept else ""
    if cursor and any(line.startswith(_MIXTURE) for line in lines):  # no stage is at 0
        other += f"\nA [[data.stages]] table with at = {cursor} changes the mixture from here on and leaves what was."
    raise StateError(
        f"the state at sample {cursor:,} counts in another order of data:\n  {listed}{other}\n"
        f"{_WAY_OUT.format(fingerprint=present['fingerprint'])}"
    )


def differences(
    saved: dict[str, Any],
    present: dict[str, Any],
    cursor: int,
    data_changes: Callable[[int, str], list[str]] = lambda source, data: [],
) -> list[str]:
    """In what two orders differ up to a cursor, one line each; arguments as ``check_order``."""
    if saved["fingerprint"] == present["fingerprint"]:
        return []
    # A key that one of them lacks is a difference too.
    keys = [*_SETTINGS, *sorted((saved.keys() ^ present.keys()) - _CONSUMED - set(_INFORMATION))]
    lines = [
        f"{_SETTINGS.get(key, key)}: {saved.get(key)!r} in the checkpoint, {present.get(key)!r} now"
        for key in keys
        if saved.get(key) != present.get(key)
    ]
    # Another tokenizer or another cutting changes every source's numbers too; naming the cause is enough.
    if saved.get("tokenizer") == present["tokenizer"] and saved.get("shard_bytes") == present["shard_bytes"]:
        lines += _source_differences(saved, present, cursor, data_changes)
    for before, now in zip_longest(_stages_until(saved, cursor), _stages_until(present, cursor)):
        if before != now:
            at = (before or now)["at"]
            lines.append(f"{_MIXTURE} from sample {at:,} on: {_mixture(before)} in the checkpoint, {_mixture(now)} now")
    skipped, skipped_now = (set(Skips(map(tuple, order.get("skip", []))).below(cursor)) for order in (saved, present))
    if skipped != skipped_now:
        gone, added = _intervals(skipped - skipped_now), _intervals(skipped_now - skipped)
        lines.append(f"data.skip below the cursor: {gone} in the checkpoint, {added} now")
    return lines


def _intervals(intervals: set[tuple[int, int]]) -> str:
    """Intervals in words, of many the first ones."""
    listed = ", ".join(f"[{start}, {stop})" for start, stop in sorted(intervals)[:_LISTED]) or "nothing"
    return listed if len(intervals) <= _LISTED else f"{listed} and {len(intervals) - _LISTED:,} more"


def _until(cursor: int) -> int:
    """Stages that start below this are consumed; the first one always is, at least in part."""
    return max(cursor, 1)


def _stages_until(order: dict[str, Any], cursor: int) -> list[dict[str, Any]]:
    stages = order.get("stages") or [{"at": 0, "weights": {source["name"]: 1 for source in order["sources"]}}]
    return [stage for stage in stages if stage["at"] < _until(cursor)]


def _mixture(stage: dict[str, Any] | None) -> str:
    if stage is None:
        return "that of before"
    weights = stage["weights"]
    if isinstance(weights, str):
        return f"weights with fingerprint {weights}"
    return ", ".join(f"{name} {weight}" for name, weight in weights.items())


def _source_differences(
    saved: dict[str, Any], present: dict[str, Any], cursor: int, data_changes: Callable[[int, str], list[str]]
) -> list[str]:
    """Differences of the sources that were drawn from below the cursor."""
    before = {source["name"]: source for source in saved["sources"]}
    used, used_now = (
        [source["name"] for source in order["sources"] if source.get("since", 0) < _until(cursor)]
        for order in (saved, present)
    )
    lines = []
    if sorted(used) != sorted(used_now):
        lines.append(f"sources: {', '.join(used)} in the checkpoint, {', '.join(used_now)} now")
    for number, source in enumerate(present["sources"]):
        if source["name"] not in used or source["name"] not in used_now:
            continue
        old = before[source["name"]]
        for key, label in _SOURCE_PARTS.items():
            # The number of samples follows from the tokens and seq_len.
            if old[key] != source[key] and not (key == "samples" and saved.get("seq_len") != present["seq_len"]):
                lines.append(f"source {source['name']}: {label}: {old[key]} in the checkpoint, {source[key]} now")
        if old["data"] != source["data"]:
            lines += [f"source {source['name']}: {change}" for change in data_changes(number, old["data"])]
    return lines
