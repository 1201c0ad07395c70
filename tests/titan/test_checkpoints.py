"""Checkpoints of TorchTitan through real DCP saves and loads: what is refused and in which words, what goes on, and
what is counted. One process; where a run has several ranks, all of them are in it."""

import json
import logging
import math
import random
import shutil
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.data import IterableDataset

from tests.corpora import D60, Corpus, make_corpus, make_sources, write_jsonl
from tests.reference import Sample
from tests.resume import expected_mix, expected_stream
from tests.titan.jobs import BATCH, SEQ_LEN, FakeTrainer, Metrics, changed, job
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.validate import Validator
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims, utils
from torchtitan.hf_datasets.text_datasets import build_text_dataloader
from torchtitan.protocols import BaseStateDictAdapter
from zephon_patches import SourceConfig, StageConfig
from zephon_patches.errors import LoaderError, StateError, StoreError, ZephonError
from zephon_patches.keys import canonical_json, fingerprint
from zephon_patches.loader.state import CURSOR, ORDER
from zephon_patches.titan import hook

pytestmark = pytest.mark.usefixtures("small_blocks", "group", "upstreams_reductions", "closed")

# A checkpoint of step 3 stands at sample 36.
STEPS, SAVED = 3, 3 * BATCH


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """The process group of one process that DCP and asynchronous saving ask for."""
    meeting = tmp_path_factory.mktemp("group") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def upstreams_reductions(monkeypatch):
    """A manager of ours changes how losses are reduced, for the whole process: undone behind each test."""
    monkeypatch.setattr(utils, "dist_max", getattr(utils.dist_max, "upstream", utils.dist_max))
    monkeypatch.setattr(hook, "_counted", weakref.WeakSet())


@pytest.fixture
def closed():
    yield
    FakeTrainer.close_all()


@pytest.fixture(scope="module")
def prototype(tmp_path_factory, group):
    """A corpus of three files, cut into several shards, its store, and a run with the checkpoints of three steps."""
    corpus = make_corpus(tmp_path_factory.mktemp("prototype"), D60, files=3)
    FakeTrainer(job(corpus, corpus.folder / "run")).load().train(STEPS)
    return corpus


@pytest.fixture
def corpus(prototype, tmp_path):
    """A copy of it, to be changed."""
    return Corpus(Path(shutil.copytree(prototype.folder, tmp_path / "copy")), D60, True)


@pytest.fixture(scope="module")
def expected(prototype):
    return expected_stream(prototype)


class Case:
    """A run that is about to be resumed: its corpus, settings and newest checkpoint, to be changed."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.config = job(corpus, corpus.folder / "run")
        self.checkpoint = corpus.folder / "run" / "checkpoint" / f"step-{STEPS}"
        self.dataloader: Any = None
        self.description: str | None = None

    def start(self) -> FakeTrainer:
        trainer = FakeTrainer(self.config, dataloader=self.dataloader)
        if self.description is not None:
            trainer.dataloader._description = self.description
        return trainer.load()

    def set(self, **settings: Any) -> None:
        self.config = changed(self.config, **settings)

    def rewrite(self, dataloader: Any, ntokens_seen: int = 0) -> None:
        """Writes the checkpoint anew, with another loader in the place of ours."""
        shutil.rmtree(self.checkpoint)
        # Ours is refused in a run that has another loader.
        writer = FakeTrainer(changed(self.config, data__loading_strategy="stock"), dataloader=dataloader)
        writer.step, writer.ntokens_seen = STEPS, ntokens_seen
        writer.checkpointer.save(STEPS)

    @property
    def state(self) -> dict[str, Any]:
        loader = FakeTrainer(self.config).dataloader
        return {**loader.state_dict(), CURSOR: SAVED}

    def rewrite_state(self, **entries: Any) -> None:
        self.rewrite(Holding({**self.state, **entries}))

    def other_order(self, **changes: Any) -> str:
        """The order's entry with other content, and the fingerprint that belongs to it."""
        order = {**json.loads(self.state[ORDER]), **changes}
        content = {key: value for key, value in order.items() if key not in ("fingerprint", "global_batch_size")}
        return canonical_json({**order, "fingerprint": fingerprint(content)})

    @property
    def source(self) -> dict[str, Any]:
        return json.loads(self.state[ORDER])["sources"][0]


class Holding:
    """Something with a state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Numbers(IterableDataset):
    """The stock loader's data, with a place in it."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self):
        while True:
            self.place += 1
            yield {"input": torch.zeros(SEQ_LEN, dtype=torch.int64)}, torch.zeros(SEQ_LEN, dtype=torch.int64)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def stock_loader(dp_size: int = 2) -> ParallelAwareDataloader:
    return ParallelAwareDataloader(Numbers(), dp_rank=0, dp_world_size=dp_size, batch_size=2)


# --- what is refused: each of these breaks a run in another way ---


def stock(case: Case) -> None:
    case.rewrite(stock_loader(dp_size=2))


def stock_without_its_size(case: Case) -> None:
    case.rewrite(Holding({"dp_rank_0": b"", "dp_rank_1": b""}))


def model_only(case: Case) -> None:
    shutil.rmtree(case.checkpoint)
    FakeTrainer(changed(case.config, training__steps=STEPS, checkpoint__load_step=2)).load().train(1)


def without_a_loader(case: Case) -> None:
    case.rewrite(Holding({}))


def newer_format(case: Case) -> None:
    case.rewrite_state(order=case.other_order(format=2))


def a_source_more_before(case: Case) -> None:
    case.rewrite_state(order=case.other_order(sources=[case.source, {**case.source, "name": "code"}]))


def a_source_more_now(case: Case) -> None:
    case.description = case.other_order(sources=[case.source, {**case.source, "name": "code"}])


def a_renamed_source(case: Case) -> None:
    case.config.data.sources[0].name = "internet"


def a_file_added(case: Case) -> None:
    write_jsonl(case.corpus.texts / "000.jsonl", [5, 4])


def a_file_added_and_no_old_store(case: Case) -> None:
    a_file_added(case)
    shutil.rmtree(case.corpus.folder / "cache")


def a_file_removed(case: Case) -> None:
    (case.corpus.texts / "01.jsonl").unlink()


def a_file_edited(case: Case) -> None:
    path = case.corpus.texts / "02.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def a_file_edited_and_no_old_store(case: Case) -> None:
    a_file_edited(case)
    shutil.rmtree(case.corpus.folder / "cache")


def swap_two_words(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace("21_0 21_1", "21_1 21_0"))
    assert path.read_text() != text


def a_file_edited_in_the_same_size(case: Case) -> None:
    swap_two_words(case.corpus.texts / "01.jsonl")


def a_file_edited_in_the_same_size_and_no_old_store(case: Case) -> None:
    a_file_edited_in_the_same_size(case)
    shutil.rmtree(case.corpus.folder / "cache")


def a_file_edited_in_the_same_size_and_another_added(case: Case) -> None:
    a_file_edited_in_the_same_size(case)
    a_file_added(case)


def another_tokenizer(case: Case) -> None:
    path = case.corpus.tokenizer / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["0_0"], vocabulary["0_1"] = vocabulary["0_1"], vocabulary["0_0"]
    path.write_text(json.dumps(content))


def another_packing(case: Case) -> None:
    case.rewrite_state(order=case.other_order(packing="best_fit"))


def setting(**settings: Any) -> Callable[[Case], None]:
    return lambda case: case.set(**settings)


def entries(**changes: Any) -> Callable[[Case], None]:
    return lambda case: case.rewrite_state(**changes)


def an_edited_order(case: Case) -> None:
    case.rewrite_state(order=case.state[ORDER].replace('"seed":0', '"seed":1'))


def a_truncated_file(case: Case) -> None:
    path = case.checkpoint / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:100])


def a_missing_file(case: Case) -> None:
    (case.checkpoint / "__0_0.distcp").unlink()


def no_metadata(case: Case) -> None:
    (case.checkpoint / ".metadata").unlink()
    case.set(checkpoint__load_step=STEPS)


def truncated_metadata(case: Case) -> None:
    path = case.checkpoint / ".metadata"
    path.write_bytes(path.read_bytes()[:50])


def only_the_cursor(case: Case) -> None:
    case.rewrite(Holding({CURSOR: SAVED}))


def only_the_order(case: Case) -> None:
    case.rewrite(Holding({ORDER: case.state[ORDER]}))


def foreign_entries(case: Case) -> None:
    case.rewrite(Holding({"epoch": 1, "position": 36}))


def ours_under_the_stock_strategy(case: Case) -> None:
    case.set(data__loading_strategy="stock")
    case.dataloader = stock_loader()


class Refusal(NamedTuple):
    """A broken run, and what its message must hold: what is there, what should be, what to do."""

    breaks: Callable[[Case], None]
    found: str
    expected: str
    todo: str
    error: type[ZephonError] = StateError


EXCLUDE = 'checkpoint.exclude_from_loading = ["dataloader"]'
LOAD_STEP = "checkpoint.load_step (2, 1)"
BRING_BACK = "Bring back what the checkpoint was written with"

REFUSALS = [
    Refusal(stock, "by TorchTitan's own loader on 2 data-parallel ranks", "cannot become one cursor", EXCLUDE),
    Refusal(stock_without_its_size, "TorchTitan's own loader on some data-parallel", "one cursor", EXCLUDE),
    Refusal(
        model_only, "saved as a model only", "checkpoint.last_save_model_only", "checkpoint.initial_load_path = "
    ),
    Refusal(without_a_loader, "holds no place in the data", "go on from it where it stopped", EXCLUDE),
    Refusal(newer_format, "order has format 2", "reads format 1", "with the version that wrote the checkpoint"),
    Refusal(a_source_more_before, "web, code in the checkpoint", "web now", BRING_BACK),
    Refusal(a_source_more_now, "sources: web in the checkpoint", "web, code now", BRING_BACK),
    Refusal(a_renamed_source, "sources: web in the checkpoint", "internet now", BRING_BACK),
    Refusal(a_file_added, "tokens: 660 in the checkpoint, 671 now", "files that are new: 000.jsonl\n", BRING_BACK),
    Refusal(a_file_added_and_no_old_store, "660 in the checkpoint, 671 now", "data (fingerprint", BRING_BACK),
    Refusal(a_file_removed, "files that are gone: 01.jsonl\n", "data (fingerprint", BRING_BACK),
    Refusal(a_file_edited, "files that changed: 02.jsonl (", "bytes before, ", BRING_BACK),
    Refusal(a_file_edited_and_no_old_store, "660 in the checkpoint, ", "data (fingerprint", BRING_BACK),
    Refusal(a_file_edited_in_the_same_size, "01.jsonl: edited since", "same size", "bring the old file", StoreError),
    Refusal(a_file_edited_in_the_same_size_and_no_old_store, "data (fingerprint", " now\n", BRING_BACK),
    Refusal(
        a_file_edited_in_the_same_size_and_another_added, "files that are new: 000.jsonl\n", "01.jsonl", BRING_BACK
    ),
    Refusal(another_tokenizer, "tokenizer (content of model.hf_assets_path): ", " now\n", BRING_BACK),
    Refusal(another_packing, "packing: 'best_fit' in the checkpoint", "'concat' now", BRING_BACK),
    Refusal(setting(data__seed=7), "data.seed: 0 in the checkpoint", "7 now", BRING_BACK),
    Refusal(setting(training__seq_len=16), "training.seq_len: 8 in the checkpoint", "16 now", BRING_BACK),
    Refusal(setting(data__shuffle_shards=1), "data.shuffle_shards: 256 in the", "1 now", BRING_BACK),
    Refusal(setting(data__shard_bytes=900), "data.shard_bytes: 0 in the checkpoint", "900 now", BRING_BACK),
    Refusal(entries(cursor="36"), "cursor is '36'", "expected an integer", LOAD_STEP),
    Refusal(entries(cursor=36.0), "cursor is 36.0", "expected an integer", LOAD_STEP),
    Refusal(entries(cursor=True), "cursor is True", "expected an integer", LOAD_STEP),
    Refusal(entries(cursor=None), "cursor is None", "expected an integer", LOAD_STEP),
    Refusal(entries(cursor=-1), "cursor is -1", "expected 0 to ", LOAD_STEP),
    Refusal(entries(cursor=2**63), "cursor is 9,223,372,036,854,775,808", "expected 0 to ", LOAD_STEP),
    Refusal(entries(order="{"), "order is '{'", "expected a JSON object", LOAD_STEP),
    Refusal(an_edited_order, "the order's content has fingerprint", "edited or damaged", LOAD_STEP),
    Refusal(a_truncated_file, "entry 'cursor' is damaged", f"step-{STEPS}", LOAD_STEP),
    Refusal(a_missing_file, "entry 'cursor' is damaged", f"step-{STEPS}", LOAD_STEP),
    Refusal(no_metadata, "no .metadata", "unfinished", LOAD_STEP),
    Refusal(truncated_metadata, ".metadata cannot be read", f"step-{STEPS}", LOAD_STEP),
    Refusal(only_the_cursor, "entries are 'cursor'", "expected 'cursor' and 'order'", LOAD_STEP),
    Refusal(only_the_order, "entries are 'order'", "expected 'cursor' and 'order'", LOAD_STEP),
    Refusal(foreign_entries, "entries are 'epoch', 'position'", "expected 'cursor' and 'order'", LOAD_STEP),
    Refusal(
        ours_under_the_stock_strategy, 'was written with data.loading_strategy = "zephon"', "another strategy", EXCLUDE
    ),
]  # fmt: skip


def name_of(refusal: Refusal) -> str:
    name = refusal.breaks.__name__
    return name if name != "<lambda>" else refusal.found


@pytest.mark.parametrize("refusal", REFUSALS, ids=name_of)
def test_what_does_not_fit_is_refused_with_what_was_found_what_is_expected_and_what_to_do(refusal, corpus):
    case = Case(corpus)
    refusal.breaks(case)
    with pytest.raises(refusal.error) as caught:
        case.start()
    assert type(caught.value) is refusal.error
    text = str(caught.value)
    assert refusal.found in text
    assert refusal.expected in text
    assert refusal.todo in text


def test_nothing_is_loaded_where_the_state_is_refused(corpus):
    case = Case(corpus)
    case.set(data__seed=7)
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(StateError):
        FakeTrainer(case.config, model=model).load()
    assert torch.equal(model.weight, before)


# --- what the messages advise works ---


def test_a_stock_run_goes_on_without_its_places(corpus, expected):
    case = Case(corpus)
    stock(case)
    case.set(checkpoint__exclude_from_loading=["dataloader"], data__initial_cursor=40)
    trainer = case.start()
    assert trainer.step == STEPS
    assert trainer.train(2) == expected.rows(40, 64)
    # Its own checkpoints are ours, so the setting must go; from then on the cursor counts.
    case.set(checkpoint__exclude_from_loading=[])
    assert case.start().train(1) == expected.rows(64, 76)


def test_a_model_only_checkpoint_gives_its_weights_to_a_new_run(corpus, expected):
    case = Case(corpus)
    model_only(case)
    case.set(checkpoint__initial_load_path=str(case.checkpoint), checkpoint__folder="new", data__initial_cursor=SAVED)
    trainer = case.start()
    assert trainer.step == 0
    assert trainer.train(1) == expected.rows(SAVED, SAVED + BATCH)


def test_an_earlier_checkpoint_can_be_resumed_from(corpus, expected):
    case = Case(corpus)
    a_truncated_file(case)
    case.set(checkpoint__load_step=2, checkpoint__interval=100)
    assert case.start().train(1) == expected.rows(24, 36)


def test_an_unfinished_checkpoint_is_passed_over_and_not_advised(corpus, expected):
    case = Case(corpus)
    (case.checkpoint / ".metadata").unlink()
    case.set(data__seed=7)
    with pytest.raises(StateError, match="the state at sample 24"):  # step 2 is the newest that is complete
        case.start()
    (case.checkpoint.with_name("step-2") / "__0_0.distcp").unlink()
    with pytest.raises(StateError, match=r"checkpoint\.load_step \(1\)"):
        case.start()


# --- what goes on ---


def test_another_global_batch_goes_on_with_a_line_that_has_both_sizes(corpus, expected, caplog):
    case = Case(corpus)
    case.set(training__global_batch_size=8)
    caplog.set_level(logging.INFO)
    trainer = case.start()
    assert "the global batch was 12 samples and is 8 now; the order goes on from sample 36" in caplog.text
    assert trainer.train(2) == expected.rows(36, 52)


def test_a_resume_says_where_it_goes_on(corpus, caplog):
    caplog.set_level(logging.INFO)
    Case(corpus).start()
    assert "resume at sample 36 (epoch 0, sample 36 of 83 of source 'web')" in caplog.text
    assert "training starts at sample 36 (step 3 of 1,000)" in caplog.text
    assert "initial_cursor" not in caplog.text


# --- where the data starts without a state ---


NOTHING = "no checkpoint was loaded; starting at data.initial_cursor = 24"
NO_PLACE = "the checkpoint gave no place in the data; starting at data.initial_cursor = 24"


def check_start(trainer: FakeTrainer, expected, cursor: int = 24) -> None:
    assert trainer.step == 0
    assert trainer.dataloader.cursor == cursor
    assert trainer.train(1) == expected.rows(cursor, cursor + BATCH)


@pytest.mark.parametrize("saving", [True, False])
def test_a_fresh_run_starts_at_the_initial_cursor(corpus, expected, caplog, tmp_path, saving):
    caplog.set_level(logging.INFO)
    trainer = FakeTrainer(job(corpus, tmp_path / "fresh" if saving else None, data__initial_cursor=24)).load()
    assert NOTHING in caplog.text
    assert "training starts at sample 24 (step 0 of 1,000)" in caplog.text
    check_start(trainer, expected)


def test_a_run_from_a_seed_checkpoint_starts_at_the_initial_cursor(corpus, expected, caplog, tmp_path):
    config = job(corpus, tmp_path / "seeded")
    FakeTrainer(config).checkpointer.save(0, last_step=True)
    caplog.set_level(logging.INFO)
    trainer = FakeTrainer(changed(config, data__initial_cursor=24)).load()
    assert NO_PLACE in caplog.text
    check_start(trainer, expected)


def test_a_run_from_another_run_s_weights_starts_at_the_initial_cursor(corpus, expected, caplog, tmp_path):
    config = job(corpus, tmp_path / "new", data__initial_cursor=24)
    config.checkpoint.initial_load_path = str(Case(corpus).checkpoint)
    caplog.set_level(logging.INFO)
    trainer = FakeTrainer(config).load()
    assert NO_PLACE in caplog.text
    check_start(trainer, expected)
    # The second start finds the run's own checkpoint, with a state.
    caplog.clear()
    trainer = FakeTrainer(config).load()
    assert "data.initial_cursor = 24 does not count, the checkpoint's cursor does" in caplog.text
    assert trainer.train(1) == expected.rows(36, 48)


def test_another_run_s_whole_checkpoint_brings_its_cursor(corpus, expected, tmp_path):
    config = job(corpus, tmp_path / "new", data__initial_cursor=24)
    config.checkpoint.initial_load_path = str(Case(corpus).checkpoint)
    config.checkpoint.initial_load_model_only = False
    trainer = FakeTrainer(config).load()
    assert trainer.step == STEPS
    assert trainer.train(1) == expected.rows(36, 48)


class Adapter(BaseStateDictAdapter):
    """Stands for weights of Hugging Face: only their reader is another one, since safetensors may not be there."""

    fqn_to_index_mapping = None
    hf_assets_path = None

    def __init__(self) -> None:
        pass

    def to_hf(self, state_dict):
        return state_dict

    def from_hf(self, hf_state_dict):
        return hf_state_dict

    def get_hf_storage_reader(self, path, from_quantized=False):
        return dcp.FileSystemReader(path)


def test_a_run_from_weights_of_hugging_face_starts_at_the_initial_cursor(corpus, expected, caplog, tmp_path):
    model = nn.Linear(2, 2)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "weights")
    config = job(corpus, tmp_path / "new", data__initial_cursor=24)
    config.checkpoint.initial_load_in_hf = True
    config.checkpoint.initial_load_path = str(tmp_path / "weights")
    caplog.set_level(logging.INFO)
    trainer = FakeTrainer(config, sd_adapter=Adapter()).load()
    assert torch.equal(trainer.model.weight, model.weight)
    assert NO_PLACE in caplog.text
    check_start(trainer, expected)


def test_a_run_s_own_last_checkpoint_for_hugging_face_is_refused_by_name(corpus):
    # Upstream takes it for the newest checkpoint, and would then look for DCP's files in it.
    case = Case(corpus)
    shutil.rmtree(case.checkpoint)
    case.checkpoint.mkdir()
    (case.checkpoint / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(StateError, match=r"saved for Hugging Face .* checkpoint\.load_step \(2, 1\); or start anew"):
        case.start()


# --- leaving the state out ---


@pytest.mark.parametrize("excluded", [["dataloader"], ["dataloader", "train_state"]])
def test_leaving_out_a_state_warns_at_every_start_with_both_numbers(corpus, expected, caplog, excluded):
    case = Case(corpus)
    case.set(checkpoint__exclude_from_loading=excluded, data__initial_cursor=5)
    for start, cursor in enumerate([SAVED, 17, 17]):
        caplog.clear()
        trainer = case.start()
        warning = f"stands at sample {cursor}, but checkpoint.exclude_from_loading leaves that out"
        [record] = [record for record in caplog.records if warning in record.getMessage()]
        assert record.levelno == logging.WARNING
        assert "the data starts at data.initial_cursor = 5, at this start and at every other" in record.getMessage()
        assert trainer.dataloader.cursor == 5
        if start < 2:
            trainer.step = STEPS + start  # with the step left out too it would count from 0 again
            assert trainer.train(1) == expected.rows(5, 17)


def test_leaving_out_what_stands_at_0_or_is_not_ours_gives_no_warning(corpus, caplog):
    case = Case(corpus)
    case.set(checkpoint__exclude_from_loading=["dataloader"])
    for write in (lambda: case.rewrite_state(cursor=0), lambda: case.rewrite(stock_loader())):
        write()
        case.start()
    assert [record for record in caplog.records if record.name == hook.__name__] == []


# --- when a save happens ---


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_the_saved_cursor_is_the_saved_step_s_though_the_loader_goes_on(corpus, expected, tmp_path, mode, workers):
    if mode == "async_with_pinned_mem" and not torch.accelerator.is_available():
        pytest.skip("memory is pinned for an accelerator, and there is none")
    config = job(corpus, tmp_path / "run", checkpoint__async_mode=mode, checkpoint__interval=2)
    config.training.dataloader.num_workers = workers
    trainer = FakeTrainer(config).load()
    trainer.train(7)
    assert trainer.dataloader.cursor == 7 * BATCH
    trainer.checkpointer._async_wait()
    for step in (2, 4, 6):
        resumed = FakeTrainer(changed(config, checkpoint__load_step=step)).load()
        assert (resumed.step, resumed.dataloader.cursor) == (step, step * BATCH)
        assert resumed.ntokens_seen == step * BATCH * SEQ_LEN
        assert resumed.train(1) == expected.rows(step * BATCH, (step + 1) * BATCH)


def test_an_asynchronous_save_keeps_what_it_was_given(corpus, tmp_path, monkeypatch):
    # The write waits until the loader is steps ahead.
    config = job(corpus, tmp_path / "run", checkpoint__async_mode="async", checkpoint__interval=3)
    may_write = threading.Event()
    write = dcp.FileSystemWriter.write_data

    def waiting(self, *args, **kwargs):
        assert may_write.wait(60)
        return write(self, *args, **kwargs)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", waiting)
    trainer = FakeTrainer(config).load()
    trainer.train(5)
    assert not trainer.checkpointer.save_future.done()
    may_write.set()
    trainer.checkpointer._async_wait()
    assert FakeTrainer(config).load().dataloader.cursor == SAVED


def test_a_trainer_that_stops_within_a_step_saves_nothing(corpus, tmp_path):
    trainer = FakeTrainer(job(corpus, tmp_path / "run")).load()
    trainer.train(1)
    next(trainer.batches)
    with pytest.raises(LoaderError, match="1 of (the )?6 micro-batches of the step at sample 12"):
        trainer.checkpointer.save(2)
    assert not (tmp_path / "run" / "checkpoint" / "step-2").exists()


# --- tokens seen ---


def start_ranks(config: JobConfig, dp_size: int) -> list[FakeTrainer]:
    return [FakeTrainer(config, rank, dp_size).load() for rank in range(dp_size)]


def train_ranks(ranks: list[FakeTrainer], steps: int) -> list[Sample]:
    return [row for _ in range(steps) for trainer in ranks for row in trainer.train_step()]


def test_tokens_seen_are_those_of_all_samples_over_a_chain_of_resumes(corpus, expected, tmp_path):
    config = job(corpus, tmp_path / "run", training__local_batch_size=5)  # never divides, so there is padding
    step = 0
    for dp_size, steps in ((2, 3), (3, 2), (1, 4), (3, 1)):
        ranks = start_ranks(config, dp_size)
        assert {trainer.ntokens_seen for trainer in ranks} == {step * BATCH * SEQ_LEN}
        rows = train_ranks(ranks, steps)
        assert rows == expected.rows(step * BATCH, (step + steps) * BATCH)
        for trainer in ranks:
            assert [(entry["step"], entry["n_tokens_seen"]) for entry in trainer.metrics_processor.logged] == [
                (s, s * BATCH * SEQ_LEN) for s in range(step + 1, step + steps + 1)
            ]
        step += steps
        assert {trainer.state_dict()["ntokens_seen"] for trainer in ranks} == {step * BATCH * SEQ_LEN}


def test_tokens_seen_go_on_from_a_stock_checkpoint_as_its_count_times_its_ranks(corpus):
    case = Case(corpus)
    case.rewrite(stock_loader(dp_size=2), ntokens_seen=480)  # of one of the two ranks
    case.set(checkpoint__exclude_from_loading=["dataloader"])
    trainer = case.start()
    trainer.train(1)
    assert [entry["n_tokens_seen"] for entry in trainer.metrics_processor.logged] == [960 + BATCH * SEQ_LEN]
    # Now the saved count is that of all ranks.
    case.set(checkpoint__exclude_from_loading=[])
    ranks = start_ranks(case.config, 3)
    train_ranks(ranks, 1)
    assert {trainer.ntokens_seen for trainer in ranks} == {960 + 2 * BATCH * SEQ_LEN}


def test_what_else_the_trainer_logs_is_left_as_it_is(corpus):
    trainer = FakeTrainer(job(corpus)).load()
    trainer.metrics_processor.log(1, 2.0, 3.0, 4.0)
    trainer.metrics_processor.log(2, 2.0, 3.0, 4.0, extra_metrics={"lr": 5.0})
    assert trainer.metrics_processor.logged == [{"step": 1}, {"step": 2, "lr": 5.0}]


# --- the largest loss ---


def finite_trainer(corpus: Corpus, rank: int) -> FakeTrainer:
    """One of 12 ranks, with as many samples for the last step as leave rank 0 without one."""
    config = job(corpus, training__local_batch_size=1)
    return FakeTrainer(config, rank, 12, dataloader=build_text_dataloader(12, rank, None, config, infinite=False))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_tokens_takes_no_part_in_the_largest_loss(corpus, rank):
    trainer = finite_trainer(corpus, rank).load()
    nan = torch.tensor(float("nan"))
    assert math.isnan(utils.dist_max(nan)), "before the first step"
    trainer.train(6)
    assert math.isnan(utils.dist_max(nan)), "a loss that is NaN is no rank without tokens"
    assert trainer.train(1) == ([] if rank == 0 else expected_stream(corpus).rows(71 + rank, 72 + rank))
    if rank == 0:
        assert utils.dist_max(nan) == float("-inf")
        assert max(utils.dist_max(nan), 2.5) == 2.5
    else:
        assert math.isnan(utils.dist_max(nan))
        assert utils.dist_max(torch.tensor(2.5)) == 2.5


def test_a_second_loader_that_has_not_begun_changes_no_largest_loss(corpus):
    first = FakeTrainer(job(corpus)).load()
    second = FakeTrainer(job(corpus)).load()
    first.train(1)
    assert utils.dist_max(torch.tensor(2.5)) == 2.5
    assert math.isnan(utils.dist_max(torch.tensor(float("nan"))))
    assert second.dataloader.cursor == 0


# --- several loaders in one process ---


def test_two_runs_in_one_process_do_not_know_of_each_other(corpus, expected, tmp_path):
    configs = [job(corpus, tmp_path / name) for name in ("a", "b")]
    configs[1] = changed(configs[1], training__global_batch_size=8, data__initial_cursor=30)
    a, b = (FakeTrainer(config).load() for config in configs)
    for step in range(3):
        assert a.train(1) == expected.rows(12 * step, 12 * step + 12)
        assert b.train(1) == expected.rows(30 + 8 * step, 38 + 8 * step)
    assert (a.ntokens_seen, b.ntokens_seen) == (36 * SEQ_LEN, 24 * SEQ_LEN)
    a, b = (FakeTrainer(config).load() for config in configs)
    assert (a.dataloader.cursor, b.dataloader.cursor) == (36, 54)
    assert b.train(1) == expected.rows(54, 62)
    assert a.train(1) == expected.rows(36, 48)


class TokenModel(nn.Module):
    """A loss for each pair of tokens; stands in for the model where upstream's validator needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(700, 8)
        self.output = nn.Linear(8, 700)

    def forward(self, tokens):
        return self.output(self.embedding(tokens))

    def get_attention_masks(self, *args, **kwargs):
        raise TypeError("none")


def loss_sum(predictions, labels):
    return nn.functional.cross_entropy(predictions.flatten(0, 1), labels.flatten(), reduction="sum")


def validator(config: JobConfig, metrics: Metrics) -> Validator:
    return Validator(
        job_config=config,
        dp_world_size=1,
        dp_rank=0,
        tokenizer=None,
        parallel_dims=ParallelDims(1, 1, 1, 1, 1, 1, 1, 1),
        loss_fn=loss_sum,
        validation_context=nullcontext,
        maybe_enable_amp=nullcontext(),
        metrics_processor=metrics,
    )


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("steps", [-1, 3])
def test_validation_does_not_disturb_training(corpus, tmp_path, steps, workers):
    config = job(corpus, tmp_path / "run", validation__steps=steps, validation__local_batch_size=5)
    config.validation.seq_len = SEQ_LEN
    config.validation.dataloader.num_workers = workers
    config.data.validation_sources = [SourceConfig("check", str(corpus.texts / "00.jsonl"))]
    runs = []
    for validates in (False, True):
        config.job.dump_folder = str(tmp_path / f"{validates}")
        model = TokenModel()
        trainer = FakeTrainer(config, model=model).load()
        upstreams = validator(config, trainer.metrics_processor) if validates else None
        rows, states = [], []
        for _ in range(4):
            rows += trainer.train(1)
            if upstreams is not None:
                upstreams.validate([model], trainer.step)
            states.append(trainer.dataloader.state_dict())
        resumed = FakeTrainer(config, model=TokenModel()).load()
        rows += resumed.train(1)
        runs.append((rows, states, resumed.ntokens_seen, trainer.ntokens_seen))
    assert runs[0] == runs[1]
    losses = trainer.metrics_processor.validation_losses
    assert len(losses) == 4 and len(set(losses)) == 1, "each pass reads the same samples, and nothing is trained here"


def test_upstreams_validator_reads_what_it_counts_and_the_mean_is_that_of_the_batches(corpus):
    config = job(corpus, validation__steps=3, validation__local_batch_size=5, validation__seq_len=SEQ_LEN)
    config.data.validation_sources = [SourceConfig("check", str(corpus.texts))]
    model, metrics = TokenModel(), Metrics()
    validator(config, metrics).validate([model], 1)
    means = []
    for first in (0, 5, 10):
        rows = expected_stream(corpus, name="check").rows(first, first + 5)
        inputs, labels = (torch.tensor([row[i] for row in rows]) for i in (0, 1))
        means.append(loss_sum(model(inputs), labels).item() / int((labels != -100).sum()))
    assert metrics.validation_losses == [pytest.approx(sum(means) / 3, rel=1e-5)]
    assert metrics.ntokens_since_last_log == 3 * 5 * SEQ_LEN


# --- changes of the order ---


def test_a_changed_mixture_goes_on_by_a_stage_or_by_its_fingerprint_and_tokens_count_what_was_delivered(tmp_path):
    made = make_sources(tmp_path, web=D60, code=[9] * 20)

    def mixed(weights: dict, *stages: StageConfig, **settings: Any) -> JobConfig:
        config = job(make_corpus(tmp_path / "any", [1]), tmp_path / "run", data__sources=made.sources(weights))
        return changed(config, model__hf_assets_path=str(made.tokenizer), data__stages=list(stages), **settings)

    before, after = {"web": 0.5, "code": 0.5}, {"web": 0.9, "code": 0.1}
    skip = {"data__skip": [(40, 50)]}
    FakeTrainer(mixed(before)).load().train(STEPS)
    with pytest.raises(StateError) as caught:
        FakeTrainer(mixed(after)).load()
    text = str(caught.value)
    assert "step-3: the state at sample 36 counts in another order of data" in text
    new = text.partition('data.accept_change = "')[2][:16]

    by_stage = FakeTrainer(mixed(before, StageConfig(36, after), **skip)).load()
    stages = [(SAVED, after)]
    expected = expected_mix(made, weights=before, stages=stages)
    assert by_stage.train(1) == expected.rows(36, 40) + expected.rows(50, 58)
    assert by_stage.ntokens_seen == 48 * SEQ_LEN, "what is skipped is not seen"
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-4")

    accepted = FakeTrainer(mixed(after, data__accept_change=new)).load()
    assert accepted.train(1) == expected_mix(made, weights=after).rows(36, 48)
    again = FakeTrainer(mixed(after)).load()
    assert again.step == 4
    (change,) = json.loads(again.dataloader.state_dict()[ORDER])["changes"]
    assert change["at"] == SAVED
    assert again.train(1) == expected_mix(made, weights=after).rows(48, 60)


# --- global random state ---


def test_no_global_random_state_is_touched_by_building_training_validating_saving_and_loading(corpus, tmp_path):
    shutil.rmtree(corpus.folder / "cache")  # so that the store is built too
    config = job(corpus, tmp_path / "run", checkpoint__async_mode="async", validation__seq_len=SEQ_LEN)
    config.training.dataloader.num_workers = 1
    config.data.validation_sources = [SourceConfig("check", str(corpus.texts))]
    models = [TokenModel(), TokenModel()]
    before = random_states()
    trainer = FakeTrainer(config, model=models[0]).load()
    trainer.train(3)
    validator(config, trainer.metrics_processor).validate([models[0]], 3)
    trainer.checkpointer._async_wait()
    resumed = FakeTrainer(config, model=models[1]).load()
    assert resumed.step == 3
    resumed.train(1)
    resumed.checkpointer._async_wait()
    assert random_states() == before


def random_states():
    return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()


def test_checkpoints_whose_writers_were_killed_do_not_push_out_complete_ones(corpus, tmp_path):
    """Else, while the newest is being written, there might be none that can be loaded."""
    config = job(corpus, tmp_path, checkpoint__keep_latest_k=2, checkpoint__interval=2)
    trainer = FakeTrainer(config).load()
    trainer.train(4)
    FakeTrainer.close_all()
    shutil.copytree(tmp_path / "checkpoint" / "step-4", tmp_path / "checkpoint" / "step-5")
    (tmp_path / "checkpoint" / "step-5" / ".metadata").unlink()

    trainer = FakeTrainer(config).load()
    assert trainer.step == 4
    removed, queue = set(), trainer.checkpointer.purge_queue
    put = queue.put
    queue.put = lambda path: (removed.add(Path(path).name), put(path))
    trainer.train(2)
    assert removed == {"step-2"}, "of the two that are kept, step-4 is one, and step-5 is not"
    trainer.train(4)
    assert removed == {"step-2", "step-4", "step-5"}, "an unfinished one goes when it is the oldest"
    queue.put = put
