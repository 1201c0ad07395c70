"""The comparison with other loaders, run on small data without them: the limit and this repository's loader."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers import corpora, measure, tables, tasks
from benchmarks.peers.adapters import Batch, Batches, Documents, Peer, Run, Unsupported
from benchmarks.peers.adapters.limit import Adapter as Limit
from benchmarks.peers.adapters.ours import Adapter as Ours

SEQ_LEN = 16
STEPS = 6


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Documents:
    """The corpus of identities: tokens 1 to 2,500."""
    return corpora.identities(tmp_path_factory.mktemp("corpora") / "identities", 2500)


@pytest.fixture(scope="module")
def written(documents: Documents, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats") / "limit"
    tasks.write(Limit(), str(documents.folder), str(folder), SEQ_LEN)
    return folder


def test_identities_are_all_different_and_their_text_gives_them(documents: Documents) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(documents.tokenizer / "tokenizer.json"))
    lines = [line for path in documents.texts for line in path.read_text().splitlines()]
    ids = [tokenizer.encode(json.loads(line)["text"]).ids for line in lines]
    assert np.concatenate(ids).tolist() == documents.tokens.tolist() == list(range(1, 2501))
    assert [len(one) for one in ids] == documents.lengths.tolist() == [len(one) for one in documents]


def test_the_limit_delivers_the_rows_of_this_repository(written: Path) -> None:
    run = Run(seq_len=SEQ_LEN, batch_rows=4, seed=5)
    items = list(Ours().open(written, run))
    ours = torch.cat([batch.inputs[(batch.labels >= 0).any(dim=1)] for batch in items])  # without padding rows
    limit = torch.cat([batch.inputs for batch in Limit().open(written, run)])
    assert len(ours) == 157 and len(limit) == 156  # it leaves out the row that the shard's end cuts short
    assert limit.tolist() == ours[(ours != 0).all(dim=1)].tolist()


def test_an_epoch_of_this_repository_misses_and_repeats_nothing(documents: Documents, written: Path) -> None:
    found = tasks.epoch(Ours(), str(documents.folder), str(written), "default", SEQ_LEN, ranks=3, workers=0)
    assert found == {"tokens": 2500, "missing": 0, "repeated": 0, "never_labels": 1}  # the very first is no label


@pytest.mark.parametrize("ranks", [1, 5, 8])
def test_a_restore_of_this_repository_is_identical(ranks: int, written: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "saved")
    reference = tasks.reference(Ours(), str(written), _run(4), "default", STEPS, target)
    assert reference["repeatable"] and reference["steps"] == 20
    assert tasks.elastic(Ours(), str(written), _run(ranks), "default", STEPS, target) == {"verdict": "identical"}


def _run(ranks: int) -> dict[str, int]:
    return {"ranks": ranks, "batch_rows": -(-8 // ranks), "seq_len": SEQ_LEN, "global_batch": 8}


class Wrong(Peer):
    """A loader over rows 0, 1, 2 and so on that keeps its place by rank, and may do something wrong with it."""

    title = "wrong"
    settings = {"restarts": 0, "skips": 1, "refuses": 2, "shuffles the rest": 3, "drops the end": 4}  # noqa: RUF012

    def open(self, folder: Path, run: Run, checkpoint: bytes | None = None) -> Batches:
        place = 0 if checkpoint is None else int(checkpoint)
        if checkpoint is not None and run.ranks != 4:
            if run.extra == 2:
                raise ValueError("no other number of ranks")
            place = {0: 0, 1: place + 24}.get(run.extra, place)
        rows = np.arange(1, 160 * SEQ_LEN + 1).reshape(160, SEQ_LEN)[place:]
        if run.extra == 3 and checkpoint is not None and run.ranks != 4:
            rows = rows[::-1].copy()
        if run.extra == 4 and checkpoint is not None and run.ranks != 4:
            rows = rows[:-1]
        return _Rows(rows, run, place)

    def checkpoint(self, states: list[int]) -> bytes:
        return str(states[0]).encode()


class _Rows(Batches):
    def __init__(self, rows: np.ndarray, run: Run, place: int) -> None:
        self._rows, self._run, self._place = rows, run, place
        self._step = 0

    def __next__(self) -> Batch:
        size = self._run.batch_rows * self._run.ranks
        start = self._step * size + self._run.rank * self._run.batch_rows
        rows = self._rows[start : start + self._run.batch_rows]
        if not len(rows):
            raise StopIteration
        self._step += 1
        return Batch(torch.from_numpy(rows))

    def state(self) -> int:
        return self._place + self._step * self._run.batch_rows * self._run.ranks


@pytest.mark.parametrize(
    ("setting", "verdict"),
    [
        ("restarts", "silently wrong"),
        ("skips", "silently wrong"),
        ("refuses", "refused"),
        ("shuffles the rest", "other batches"),
        ("drops the end", "identical but for the last step"),
    ],
)
@pytest.mark.parametrize("forks", [False, True])
def test_what_a_loader_does_wrong_is_found(
    setting: str, verdict: str, forks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wrong, "forks_ranks", forks)
    target = str(tmp_path / "saved")
    tasks.reference(Wrong(), str(tmp_path), _run(4), setting, STEPS, target)
    assert tasks.elastic(Wrong(), str(tmp_path), _run(4), setting, STEPS, target)["verdict"] == "identical"
    assert tasks.elastic(Wrong(), str(tmp_path), _run(2), setting, STEPS, target)["verdict"] == verdict


class _Here(measure.Bench):
    """Asks in this process, about the corpus of identities alone."""

    adapters = {"limit": Limit(), "ours": Ours()}  # noqa: RUF012
    documents: Documents

    def ask(self, name: str, do: str, **arguments: Any) -> dict[str, Any]:
        return getattr(tasks, do)(self.adapters[name], **arguments)

    def corpus(self, name: str) -> Documents:
        return self.documents


def test_measurements_become_a_table(tmp_path: Path, documents: Documents) -> None:
    bench = _Here(tmp_path, ["limit", "ours"], rounds=2, seconds=0.001, megabytes=1, text_megabytes=1)
    bench.documents = documents
    found = measure.deliver(bench)
    assert [len(found[name][setting]) for name, setting in (("limit", "one file"), ("ours", "default"))] == [2, 2]
    text = tables.markdown("a", found, {"ours": "this repository"})
    ours = next(line for line in text.splitlines() if line.startswith("| this repository"))
    _, setting, speed, share, *_ = ours.split(" | ")
    assert setting == "default" and float(speed.split()[0]) > 0 and float(share.split()[0]) > 0


def test_a_worker_says_what_it_cannot_do(tmp_path: Path) -> None:
    with measure.Bench(tmp_path, ["ours"], 1, 0.1, 1, 1) as bench:
        assert (
            "no_such_setting" in bench.ask("ours", "deliver", folder="x", setting="no_such_setting", seconds=1)["error"]
        )
        assert bench.ask("ours", "hello")["settings"] == ["default"]


def test_peers_without_a_counterpart_are_said_to_have_none() -> None:
    with pytest.raises(Unsupported):
        Wrong().write_text([], Path(), Path(), SEQ_LEN, 1)
    found = {"one": {"unsupported": "has none"}, "two": {"install": "no such version"}}
    text = tables.markdown("c", found, {"one": "One"})
    assert "| One | none: has none |" in text and "| two | does not install: no such version |" in text
