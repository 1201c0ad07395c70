"""What is in the checkpoint: group D of the known faults of data loaders."""

import json
import logging
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.corpora import D240, Corpus, documents, make_corpus, write_jsonl, write_tokenizer
from tests.ranks import run_ranks
from tests.resume import Place, Run, builder, check_steps, expected_stream, rows_of
from zephon_patches import DataConfig, SourceConfig, build_loader
from zephon_patches.errors import StateError
from zephon_patches.store.reader import TokenStore

pytestmark = [
    pytest.mark.usefixtures("small_blocks"),
    # Said by torch about one process without a group, and about its own use of tensors.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d240"), D240)


@pytest.fixture(scope="module")
def build(corpus):
    return builder(corpus)


@pytest.fixture(scope="module")
def expected(corpus):
    return expected_stream(corpus)


def after_steps(build, place: Place, steps: int) -> Run:
    run = Run(build, place)
    for _ in range(steps):
        run.step()
    return run


# --- through torch's distributed checkpoint ---


def ranks_of_a_checkpoint(rank: int, folder: str, meeting: str) -> None:
    """Saves at 4 ranks and loads at 4, then at 2; each rank is a process."""
    build = builder(Corpus(Path(folder), D240, True))
    for size in (4, 2):
        if rank >= size:
            return
        dist.init_process_group("gloo", init_method=f"file://{meeting}-{size}", rank=rank, world_size=size)
        checkpoint = f"{meeting}-checkpoint"
        if size == 4:
            saved = build(Place(4, 3), rank)
            for _ in zip(range(7), saved, strict=False):
                pass
            dcp.save({"dataloader": saved}, checkpoint_id=checkpoint)
        loader = build(Place(size, 3), rank)
        dcp.load({"dataloader": loader}, checkpoint_id=checkpoint)
        state = loader.state_dict()
        content = json.dumps([state["cursor"], sorted(state), rows_of(next(iter(loader)))])
        Path(f"{meeting}-{size}-{rank}.json").write_text(content)
        dist.barrier()
        dist.destroy_process_group()


def test_saved_by_4_processes_it_loads_at_4_and_at_2(corpus, expected, tmp_path):
    """D01: real processes with gloo; every rank stands at 84."""
    next(iter(builder(corpus)(Place(1, 12), 0)))  # builds the store
    run_ranks(ranks_of_a_checkpoint, 4, str(corpus.folder), str(tmp_path / "run"))
    for size in (4, 2):
        for rank in range(size):
            cursor, keys, rows = json.loads((tmp_path / f"run-{size}-{rank}.json").read_text())
            assert cursor == 84
            assert keys == ["cursor", "order"]
            start = 84 + rank * 12 // size
            assert [tuple(map(tuple, row)) for row in rows] == expected.rows(start, start + 3)


def save(folder: Path, **states) -> None:
    dcp.save(states, checkpoint_id=folder, no_dist=True)


def load(folder: Path, **states) -> None:
    dcp.load(states, checkpoint_id=folder, no_dist=True)


def test_saved_by_one_process_it_loads_at_any_size(build, expected, tmp_path):
    """D01: in one process, and the keys under which it stands."""
    run = after_steps(build, Place(1, 12), 7)
    save(tmp_path, dataloader=run.loaders[0])
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    assert set(metadata.state_dict_metadata) == {"dataloader.cursor", "dataloader.order"}
    for place in (Place(4, 3), Place(5, 2), Place(12, 1), Place(2, 3, 8)):
        resumed = Run(build, place)
        for loader in resumed.loaders:
            load(tmp_path, dataloader=loader)
        assert resumed.cursor == 84
        check_steps(resumed, expected, 3)


def test_a_checkpoint_of_step_0_loads_anywhere(build, expected, tmp_path):
    """D02: saved with dp 1, loaded with dp 4."""
    save(tmp_path, dataloader=build(Place(1, 12), 0))
    run = Run(build, Place(4, 3))
    for loader in run.loaders:
        load(tmp_path, dataloader=loader)
    assert run.cursor == 0
    check_steps(run, expected, 2)


def test_weights_can_be_loaded_without_the_position(build, expected, tmp_path):
    """D03: the loader left out of the load, and a checkpoint that has none."""
    for with_loader in (True, False):
        folder = tmp_path / str(with_loader)
        run = after_steps(build, Place(1, 12), 3)
        save(folder, weights=torch.ones(3), **({"dataloader": run.loaders[0]} if with_loader else {}))
        weights = torch.zeros(3)
        load(folder, weights=weights)
        assert weights.tolist() == [1, 1, 1]
        fresh = Run(build, Place(2, 6))
        assert fresh.cursor == 0
        check_steps(fresh, expected, 1)


def test_a_checkpoint_without_the_loader_s_keys_is_no_start_from_zero(build, tmp_path):
    """D03: nothing is started over in silence where the loader was asked for."""
    save(tmp_path, weights=torch.ones(3))
    loader = build(Place(1, 12), 0)
    with pytest.raises(CheckpointException, match="dataloader.cursor"):
        load(tmp_path, dataloader=loader, weights=torch.zeros(3))


def test_strange_keys_in_a_checkpoint_and_in_a_state_do_no_harm(build, expected, tmp_path):
    """D03: an unknown key beside ours."""
    run = after_steps(build, Place(1, 12), 7)
    strange = {**run.loaders[0].state_dict(), "other_tool": 1}
    save(tmp_path, dataloader=strange, something_else=torch.ones(1))
    resumed = Run(build, Place(1, 4))
    load(tmp_path, dataloader=resumed.loaders[0])
    check_steps(resumed, expected, 2)
    resumed.load(strange)
    assert resumed.cursor == 84
    assert set(resumed.state()) == {"cursor", "order"}


# --- the state itself ---


def test_a_state_is_a_frozen_copy(build, expected):
    """D06: five more batches change nothing in it."""
    run = after_steps(build, Place(1, 12), 3)
    state = run.loaders[0].state_dict()
    before = repr(state), pickle.dumps(state)
    check_steps(run, expected, 5)
    assert (repr(state), pickle.dumps(state)) == before
    resumed = Run(build, Place(3, 4))
    resumed.load(state)
    check_steps(resumed, expected, 5)


def test_a_state_is_tiny_and_costs_nothing_however_far_the_run_is(build, monkeypatch):
    """D07: the same size at any step; making one reads and hashes nothing."""
    loader = build(Place(1, 12), 0)
    sizes = []
    for step in (1, 100, 10_000):
        loader.load_state_dict({**loader.state_dict(), "cursor": 12 * step})
        sizes.append(len(pickle.dumps(loader.state_dict())))
    assert max(sizes) < 1024
    assert max(sizes) - min(sizes) < 8

    def forbidden(*args, **kwargs):
        raise AssertionError("a state must cost nothing")

    for name in ("numpy.cumsum", "hashlib.blake2b", "json.dumps", "builtins.open"):
        monkeypatch.setattr(name, forbidden)
    states = [loader.state_dict() for _ in range(1000)]
    monkeypatch.undo()
    assert all(state == states[0] for state in states)


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda state: {}, "no 'cursor'"),
        (lambda state: None, "found NoneType"),
        (lambda state: [state["cursor"], state["order"]], "found list"),
        (lambda state: pickle.dumps(state)[:50], "found bytes"),
        (lambda state: state | {"cursor": -1}, "cursor is -1"),
        (lambda state: state | {"cursor": "84"}, "cursor is '84'"),
        (lambda state: state | {"cursor": 84.5}, "cursor is 84.5"),
        (lambda state: state | {"cursor": 2**63}, "cursor is 9,223,372"),
        (lambda state: state | {"order": state["order"][:100]}, "order is"),
        (lambda state: {"cursor": 84}, "no 'order'"),
    ],
)
def test_a_broken_state_is_loud_and_never_a_start_from_zero(build, change, text):
    """D10: 84.0 is refused as well, which the row leaves open."""
    loader = build(Place(1, 12), 0)
    loader.load_state_dict({**loader.state_dict(), "cursor": 36})
    state = {**loader.state_dict(), "cursor": 84}
    with pytest.raises(StateError, match=text):
        loader.load_state_dict(change(state))
    assert loader.cursor == 36


# --- resuming reads nothing of the past ---


class Counting:
    """A shard's tokens that count how many of them are looked at."""

    def __init__(self, tokens, counts: list[int]) -> None:
        self._tokens, self._counts = tokens, counts

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, part: slice):
        found = self._tokens[part]
        self._counts.append(found.nbytes)
        return found


_opened: list[str] | None = None


def _listen(event: str, arguments: tuple) -> None:
    if event == "open" and _opened is not None and isinstance(arguments[0], (str, os.PathLike)):
        _opened.append(os.fspath(arguments[0]))


def test_a_resume_far_on_reads_as_many_bytes_as_a_start(tmp_path, monkeypatch):
    """D11: two million documents of one token; at 0 and at 1.9 million."""
    global _opened
    texts = tmp_path / "texts" / "a.jsonl"
    texts.parent.mkdir()
    texts.write_bytes(b'{"text":"0_0"}\n' * 2_000_000)
    corpus = Corpus(tmp_path, [1], False)
    write_tokenizer(corpus.tokenizer, corpus.lengths, eos=False)
    config = corpus.config(shard_bytes=1 << 21)

    def build():
        return build_loader(config, corpus.tokenizer, seq_len=1, global_batch_size=8, local_batch_size=8)

    build()
    looked_at: list[int] = []
    real = TokenStore.tokens
    monkeypatch.setattr(TokenStore, "tokens", lambda store, shard: Counting(real(store, shard), looked_at))
    sys.addaudithook(_listen)  # cannot be taken back, so it listens only while there is a list
    read = {}
    for cursor in (0, 1_900_000):
        looked_at.clear()
        _opened = []
        try:
            loader = build()
            loader.load_state_dict({**loader.state_dict(), "cursor": cursor})
            next(iter(loader))
            opened = [Path(path) for path in _opened]
        finally:
            _opened = None
        in_store = [path for path in opened if "cache" in path.parts]
        assert texts not in opened
        assert not [path for path in in_store if path.suffix in (".idx", ".origin")]
        whole = sum(path.stat().st_size for path in in_store if path.suffix != ".bin")  # .bin files are mapped
        read[cursor] = (whole, sum(looked_at))
    assert read[0] == read[1_900_000]
    assert read[0][0] < 50_000  # the manifest, read a time or two
    assert read[0][1] == 8 * 2 * 2  # 8 rows of 2 tokens of 2 bytes


# --- changed data and settings ---


def refusal(loader, state: dict) -> str:
    """The message of a refused load, which leaves the loader at its start."""
    with pytest.raises(StateError) as error:
        loader.load_state_dict(state)
    assert loader.cursor == 0
    text = str(error.value)
    assert "the state at sample 84 counts in another order of data" in text
    assert "Bring back what the checkpoint was written with" in text
    return text


@pytest.fixture(scope="module")
def saved(build):
    return after_steps(build, Place(2, 6), 7).state()


@pytest.mark.parametrize("change", ["a document removed", "a file added", "a file renamed to another place"])
def test_changed_data_is_refused(saved, tmp_path, change):
    """D12: the override is a later feature; the refusal names the source and both values."""
    lengths = D240
    corpus = make_corpus(tmp_path, lengths)
    texts = corpus.texts / "00.jsonl"
    lines = texts.read_text().splitlines(keepends=True)
    if change == "a document removed":
        texts.write_text("".join(lines[:100] + lines[101:]))
    elif change == "a file added":
        write_jsonl(corpus.texts / "01.jsonl", [3])
    else:  # the same documents in another order
        texts.write_text("".join(lines[120:]))
        (corpus.texts / "01.jsonl").write_text("".join(lines[:120]))
    text = refusal(builder(corpus)(Place(1, 12), 0), saved)
    assert "source web: data (fingerprint of its shards): " in text
    if change != "a file renamed to another place":
        tokens = {"a document removed": 2640 - D240[100] - 1, "a file added": 2644}[change]
        assert f"source web: tokens: 2640 in the checkpoint, {tokens} now" in text


def test_a_renamed_source_is_refused(corpus, saved):
    """D12: its name is part of its shuffling key."""
    config = DataConfig(sources=[SourceConfig("code", str(corpus.texts))], cache_dir=str(corpus.folder / "cache"))
    loader = build_loader(config, corpus.tokenizer, seq_len=8, global_batch_size=12, local_batch_size=12)
    assert "sources: web in the checkpoint, code now" in refusal(loader, saved)


def test_a_renamed_file_with_the_same_place_in_the_order_is_no_change(saved, tmp_path, expected):
    """D12, the other side: the order does not depend on it."""
    corpus = make_corpus(tmp_path, D240)
    (corpus.texts / "00.jsonl").rename(corpus.texts / "renamed.jsonl")
    run = Run(builder(corpus), Place(3, 4))
    run.load(saved)
    check_steps(run, expected, 2)


@pytest.mark.parametrize(
    "settings, line",
    [
        ({"seed": 1}, "data.seed: 0 in the checkpoint, 1 now"),
        ({"shuffle_shards": 1}, "data.shuffle_shards: 256 in the checkpoint, 1 now"),
        ({"shard_bytes": 3000}, "data.shard_bytes: 0 in the checkpoint, 3000 now"),
        ({"seq_len": 16}, "training.seq_len: 8 in the checkpoint, 16 now"),
    ],
)
def test_a_changed_setting_is_refused(corpus, saved, settings, line):
    """D14 for seq_len, and its like: the field, the saved and the present value."""
    assert line in refusal(builder(corpus, **settings)(Place(1, 12), 0), saved)


def test_another_tokenizer_is_refused(saved, tmp_path):
    """D12 for the tokenizer: same files, other ids."""
    corpus = make_corpus(tmp_path, D240)
    content = json.loads((corpus.tokenizer / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["0_0"], vocabulary["0_1"] = vocabulary["0_1"], vocabulary["0_0"]
    (corpus.tokenizer / "tokenizer.json").write_text(json.dumps(content))
    text = refusal(builder(corpus)(Place(1, 12), 0), saved)
    assert "tokenizer (content of model.hf_assets_path): " in text


def test_a_load_says_where_it_goes_on(build, saved, caplog):
    """D12: what proceeds is logged, with the place and a changed batch."""
    with caplog.at_level(logging.INFO):
        build(Place(1, 4, 8), 0).load_state_dict(saved)
    assert "resume at sample 84 (epoch 0, sample 84 of 330 of source 'web')" in caplog.text
    assert "the global batch was 12 samples and is 8 now; the order goes on from sample 84" in caplog.text


def test_documents_are_numbered_as_the_tokenizer_numbers_them():
    """The tests' own numbering, which all of the above stands on."""
    assert documents([2, 1]) == [[0, 1, 4], [2, 4]]
