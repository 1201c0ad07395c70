"""What a worker can be asked for: the measurements and checks of the tables. Each answers with plain data."""

import json
import os
import pickle
import shutil
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.adapters import IGNORE, Batch, Documents, Peer, Run
from benchmarks.peers.ranks import Ranks

_COMPARED = 3  # batches after a restore


def one_line(error: BaseException) -> str:
    """An error in the width of a table's cell."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def hello(peer: Peer) -> dict[str, Any]:
    return {
        "title": peer.title,
        "versions": peer.versions(),
        "settings": list(peer.settings),
        "reads_tokens": peer.reads_tokens,
        "text_settings": list(peer.text_settings),
        "notes": list(peer.notes),
    }


def write(peer: Peer, documents: str, folder: str, seq_len: int) -> dict[str, Any]:
    target = Path(folder)
    if not target.exists():
        work = target.with_name(target.name + ".work")
        shutil.rmtree(work, ignore_errors=True)
        peer.write(Documents(Path(documents)), work, seq_len)
        work.rename(target)
    return {}


def deliver(
    peer: Peer, folder: str, setting: str, seconds: float, workers: int = 0, touch: bool = False
) -> dict[str, Any]:
    """Tokens delivered in about so many seconds, epoch after epoch; opening is not counted.

    Args:
        touch: Reads every token, so that all memory that a batch stands in is there.
    """
    run = Run(workers=workers, extra=peer.settings[setting])
    tokens, spent, checksum = 0, 0.0, 0
    while spent < seconds:
        batches = peer.open(Path(folder), replace(run, seed=run.seed + 1))
        before = tokens
        try:
            started = time.perf_counter()
            for batch in batches:
                tokens += batch.inputs.numel()
                if touch:
                    checksum += int(batch.inputs.sum())
                if time.perf_counter() - started + spent > seconds:
                    break
            spent += time.perf_counter() - started
            _check(batch, run)
        finally:
            batches.close()
        if tokens == before:
            raise RuntimeError("an epoch without a batch")
    return {"tokens": tokens, "seconds": spent}


def from_text(peer: Peer, documents: str, folder: str, setting: str) -> dict[str, Any]:
    """The first epoch from text: seconds to the first batch, to the last one, and tokens."""
    corpus = Documents(Path(documents))
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir(parents=True)
    run = Run(extra=peer.text_settings[setting])
    tokens, first = 0, 0.0
    started = time.perf_counter()
    batches = peer.open_text(corpus.texts, corpus.tokenizer, Path(folder), run)
    try:
        for batch in batches:
            first = first or time.perf_counter() - started
            tokens += batch.inputs.numel()
        seconds = time.perf_counter() - started
        _check(batch, run)
    finally:
        batches.close()
    shutil.rmtree(folder)
    return {"first": first, "seconds": seconds, "tokens": tokens}


def convert(peer: Peer, documents: str, folder: str, cores: int) -> dict[str, Any]:
    """Seconds to make the peer's own format of text, on so many cores, and its bytes."""
    corpus = Documents(Path(documents))
    shutil.rmtree(folder, ignore_errors=True)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:cores])
    try:
        started = time.perf_counter()
        peer.write_text(corpus.texts, corpus.tokenizer, Path(folder), Run().seq_len, cores)
        seconds = time.perf_counter() - started
    finally:
        os.sched_setaffinity(0, allowed)
    size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    shutil.rmtree(folder)
    return {"seconds": seconds, "bytes": size}


def save_on_the_way(
    peer: Peer, folder: str, setting: str, tokens: int, fractions: Sequence[float], target: str
) -> dict[str, Any]:
    """Reads an epoch, and at fractions of it keeps the checkpoint and what the next batches are."""
    run = Run(extra=peer.settings[setting])
    batches = peer.open(Path(folder), run)
    position = 0
    try:
        for fraction in fractions:
            until = int(tokens * fraction) // (run.batch_rows * run.seq_len)
            for _ in islice(batches, until - position):
                pass
            checkpoint = peer.checkpoint([batches.state()])
            expected = [_digest(batch) for batch in islice(batches, _COMPARED)]
            position = until + _COMPARED
            Path(f"{target}-{fraction}").write_bytes(checkpoint)
            Path(f"{target}-{fraction}.json").write_text(json.dumps(expected))
    finally:
        batches.close()
    return {}


def restore(peer: Peer, folder: str, setting: str, target: str, fraction: float) -> dict[str, Any]:
    """Seconds from opening to the first batch, at a fraction of the epoch (0 is without a checkpoint)."""
    run = Run(extra=peer.settings[setting])
    checkpoint = Path(f"{target}-{fraction}").read_bytes() if fraction else None
    started = time.perf_counter()
    batches = peer.open(Path(folder), run, checkpoint)
    try:
        first = next(batches)
        seconds = time.perf_counter() - started
        found = [_digest(batch) for batch in (first, *islice(batches, _COMPARED - 1))]
    finally:
        batches.close()
    expected = json.loads(Path(f"{target}-{fraction}.json").read_text()) if fraction else found
    return {"seconds": seconds, "same": found == expected}


def checkpoint_bytes(peer: Peer, folder: str, setting: str, ranks: int, steps: int) -> dict[str, Any]:
    run = Run(ranks=ranks, extra=peer.settings[setting])
    with Ranks(peer, Path(folder), run) as opened:
        for _ in islice(opened, steps):
            pass
        return {"bytes": len(peer.checkpoint(opened.states()))}


def epoch(
    peer: Peer, documents: str, folder: str, setting: str, seq_len: int, ranks: int, workers: int
) -> dict[str, Any]:
    """Tokens of the corpus of identities over an epoch: missing, repeated, and never a label."""
    size = Documents(Path(documents)).vocabulary
    run = Run(ranks=ranks, workers=workers, seq_len=seq_len, extra=peer.settings[setting])
    inputs, labels = (np.zeros(size, np.int64) for _ in range(2))
    with Ranks(peer, Path(folder), run) as opened:
        for rows, targets in islice(opened, 3 * size // (ranks * run.batch_rows * seq_len)):  # some may not end
            inputs += np.bincount(rows.ravel(), minlength=size)
            labels += np.bincount(targets[targets != IGNORE], minlength=size)
    inputs, labels = inputs[1:], labels[1:]  # 0 is padding
    return {
        "tokens": len(inputs),
        "missing": int(((inputs == 0) & (labels == 0)).sum()),
        "repeated": int(np.maximum(inputs - 1, 0).sum()),
        "never_labels": int(((inputs > 0) & (labels == 0)).sum()),
    }


def reference(peer: Peer, folder: str, run: dict[str, Any], setting: str, steps: int, target: str) -> dict[str, Any]:
    """An uninterrupted epoch, and the checkpoint of a second run that stops behind so many steps."""
    described = Run(**run, extra=peer.settings[setting])
    with Ranks(peer, Path(folder), described) as opened:
        whole = [inputs for inputs, _ in opened]
    with Ranks(peer, Path(folder), described) as opened:
        again = [inputs for inputs, _ in islice(opened, steps)]
        checkpoint = peer.checkpoint(opened.states())
    Path(target).write_bytes(checkpoint)
    Path(f"{target}.steps").write_bytes(pickle.dumps(whole))
    return {
        "steps": len(whole),
        "bytes": len(checkpoint),
        "repeatable": list(map(_as_set, again)) == list(map(_as_set, whole[:steps])),
    }


def elastic(peer: Peer, folder: str, run: dict[str, Any], setting: str, steps: int, target: str) -> dict[str, Any]:
    """What comes after a restore at another number of ranks, against the uninterrupted run."""
    described = Run(**run, extra=peer.settings[setting])
    whole = pickle.loads(Path(f"{target}.steps").read_bytes())
    try:
        with Ranks(peer, Path(folder), described, Path(target).read_bytes()) as opened:
            after = [inputs for inputs, _ in islice(opened, 3 * len(whole))]
    except Exception as error:
        traceback.print_exc()
        return {"verdict": "refused", "why": one_line(error)}
    found_steps, expected_steps = (list(map(_as_set, part)) for part in (after, whole[steps:]))
    if found_steps == expected_steps:
        return {"verdict": "identical"}
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(found_steps, expected_steps, strict=False))))
    if same >= len(expected_steps) - 1 and len(after) - same <= 1:  # some drop or fill up what makes no whole step
        return {"verdict": "identical but for the last step"}
    expected, found = (np.concatenate(part).ravel() for part in (whole, whole[:steps] + after))
    size = max(int(expected.max()), int(found.max())) + 1
    surplus = (np.bincount(found, minlength=size) - np.bincount(expected, minlength=size))[1:]  # 0 is padding
    missing, repeated = int(-surplus[surplus < 0].sum()), int(surplus[surplus > 0].sum())
    # At an epoch's end a loader may drop, or fill up, what makes no whole step, but not repeat
    # what came before the restore.
    allowed = described.ranks * described.batch_rows * described.seq_len
    again = np.intersect1d(np.concatenate(whole[:steps]), np.concatenate(after)).any() if after else False
    return {
        "verdict": "silently wrong" if again or max(missing, repeated) > allowed else "other batches",
        "missing": missing / len(expected),
        "repeated": repeated / len(expected),
        "same_steps": same,
        "steps": len(expected_steps),
    }


def _as_set(step: np.ndarray) -> list[bytes]:
    return sorted(row.tobytes() for row in step)


def _digest(batch: Batch) -> str:
    return blake2b(batch.inputs.contiguous().numpy().tobytes()).hexdigest()


def _check(batch: Batch, run: Run) -> None:
    """All peers give the same: int64, whole rows; only the last batch of an epoch may have fewer of them."""
    shape = tuple(batch.inputs.shape)
    if batch.inputs.dtype != torch.int64 or len(shape) != 2 or shape[1] != run.seq_len or shape[0] > run.batch_rows:
        raise RuntimeError(f"the adapter gave {batch.inputs.dtype} {shape}, not int64 {(run.batch_rows, run.seq_len)}")
