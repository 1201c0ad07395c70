"""What the log and the metrics say of the data."""

import numpy as np
import pytest

from tests.corpora import D60, make_corpus, make_sources
from tests.resume import Place, builder
from tests.titan.jobs import FakeTrainer, job
from zephon_patches import StageConfig
from zephon_patches.titan.metrics import DataMetrics


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d60"), D60)


@pytest.fixture(autouse=True)
def trainers():
    yield
    FakeTrainer.close_all()


@pytest.fixture
def mixed(tmp_path, corpus):
    made = make_sources(tmp_path, web=D60, code=[9] * 40)
    config = job(corpus, tmp_path / "run", data__sources=made.sources({"web": 0.7, "code": 0.3}))
    config.model.hf_assets_path = str(made.tokenizer)
    config.data.cache_dir = str(tmp_path / "cache")
    config.data.stages = [StageConfig(at=30, weights={"web": 1.0, "code": 3.0})]
    return config


def test_each_logged_step_has_the_data_s_values(mixed):
    trainer = FakeTrainer(mixed, 0, 5).load()
    trainer.train(4)
    first, *_, last = trainer.metrics_processor.logged
    assert first["data/cursor"] == 12 and last["data/cursor"] == 48
    assert first["data/padding_rows"] == last["data/padding_rows"] == 20 - 12
    assert all(entry["data/waiting(s)"] > 0 for entry in trainer.metrics_processor.logged)
    assert first["data/samples/web"] + first["data/samples/code"] == 12
    assert first["data/target_share/web"] == pytest.approx(0.7)
    assert abs(first["data/share/web"] - 0.7) <= 1.5 / 12
    assert last["data/target_share/code"] == 0.75, "the stage that is in force"
    assert abs(last["data/share/code"] - 0.75) <= 1.5 / 18
    drawn = names(trainer, 0, 48)
    samples = {name: drawn.count(name) for name in ("web", "code")}
    assert {name: last[f"data/samples/{name}"] for name in samples} == samples
    assert last["data/epoch/web"] == last["data/samples/web"] / 83


def names(trainer, start, stop):
    loader = trainer.dataloader
    return [loader.sources[source] for source in loader.order.locate(np.arange(start, stop)).source]


def test_values_are_means_over_the_steps_between_two_logs(corpus):
    loader = builder(corpus, infinite=False)(Place(5, 1), 0)
    metrics, items = DataMetrics(loader), iter(loader)
    for _ in range(2 * loader.micro_batches_per_step):
        next(items)
    assert metrics.values()["data/padding_rows"] == 15 - 12
    for _ in items:
        pass
    assert loader.steps_delivered == 7
    assert metrics.values()["data/padding_rows"] == pytest.approx(15 - (83 - 24) / 5)
    assert "data/share/web" not in metrics.values(), "one source has all"


def test_a_start_and_a_resume_write_one_paragraph(mixed, caplog):
    caplog.set_level("INFO")
    FakeTrainer(mixed, 0, 2).load().train(3)
    (text,) = [message for message in caplog.messages if "training starts at" in message]
    done = "epoch 0, 0 samples of it are done"
    assert text.splitlines() == [
        "data: training starts at sample 0 (step 0 of 1,000)",
        f"    source code: 40 documents, 400 tokens, 50 samples of 8, 30 % of the samples; {done}",
        f"    source web: 60 documents, 660 tokens, 83 samples of 8, 70 % of the samples; {done}",
        "    2 data-parallel ranks now; a step takes 12 samples; the data has no end",
        "    at another NGPU each step takes the same samples (training.global_batch_size is set)",
    ]
    caplog.clear()
    FakeTrainer(mixed, 0, 3).load()
    (text,) = [message for message in caplog.messages if "training starts at" in message]
    lines = text.splitlines()
    assert lines[0] == "data: training starts at sample 36 (step 3 of 1,000)"
    assert "75 % of the samples; epoch 0, 14 samples of it are done" in lines[1]
    assert lines[3].startswith("    3 data-parallel ranks now; processes that wrote the checkpoint: 1; a step takes 12")


def test_without_a_global_batch_the_paragraph_says_what_another_ngpu_does(corpus, caplog):
    caplog.set_level("INFO")
    FakeTrainer(job(corpus, training__global_batch_size=-1, data__epochs=1), 0, 2).load()
    (text,) = [message for message in caplog.messages if "training starts at" in message]
    assert "the data ends at sample 83" in text
    assert "at another NGPU a step has another size (training.global_batch_size is not set)" in text
