"""Where a run over a number of epochs ends: training.steps, the schedule, the last checkpoint, and going on."""

import logging
import shutil

import pytest

from tests.corpora import D60, make_corpus, make_sources
from tests.resume import expected_mix, expected_stream
from tests.titan.jobs import FakeTrainer, changed, job
from zephon_patches.errors import ConfigError, StateError
from zephon_patches.titan.steps import place_to_start

SAMPLES = 83  # of an epoch: 6 full steps of 12 and one of 11


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d60"), D60)


@pytest.fixture(scope="module")
def expected(corpus):
    return expected_stream(corpus)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="zephon_patches")
    return caplog


@pytest.fixture(autouse=True)
def close_all():
    yield
    FakeTrainer.close_all()


def whole_run(config, dp_size: int = 1) -> list:
    """Trains to the end on all ranks; the rows by step."""
    trainers = [FakeTrainer(config, rank, dp_size).load() for rank in range(dp_size)]
    steps = []
    while trainers[0].step < trainers[0].job_config.training.steps:
        steps.append([row for trainer in trainers for row in trainer.train_step()])
    assert {trainer.step for trainer in trainers} == {trainer.job_config.training.steps for trainer in trainers}
    return steps


def full(corpus, folder, **settings):
    return job(corpus, folder, checkpoint__last_save_model_only=False, **settings)


def test_a_run_over_epochs_ends_with_the_last_sample(corpus, expected, tmp_path, log):
    steps = whole_run(full(corpus, tmp_path, data__epochs=2))
    assert [len(rows) for rows in steps] == [12] * 13 + [10]
    assert [row for rows in steps for row in rows] == expected.rows(0, 2 * SAMPLES)
    assert (
        "data: the data ends at sample 166, in 14 steps from sample 0 (step 0) on; training.steps is 14, of 1,000 that "
        "are set"
    ) in log.messages
    assert (tmp_path / "checkpoint" / "step-14" / ".metadata").exists(), "the trainer's own last checkpoint"


def test_the_smaller_number_of_steps_counts(corpus, expected, tmp_path, log):
    steps = whole_run(full(corpus, tmp_path, data__epochs=2, training__steps=3))
    assert [row for rows in steps for row in rows] == expected.rows(0, 36)
    assert "training.steps is 3, of 3 that are set" in log.text


def test_without_epochs_the_steps_are_the_user_s(corpus):
    trainer = FakeTrainer(job(corpus)).load()
    assert type(trainer.job_config.training.steps) is int
    assert trainer.job_config.training.steps == 1000


def test_the_learning_rate_s_schedule_is_made_for_these_steps(corpus, tmp_path):
    def rates(config):
        trainer = FakeTrainer(config).load()
        found = []
        for _ in range(trainer.job_config.training.steps - trainer.step):
            found.append(trainer.checkpointer.states["lr_scheduler"].schedulers[0].get_last_lr()[0])
            trainer.train_step()
            trainer.checkpointer.states["lr_scheduler"].step()
        return found

    warmup = {"lr_scheduler__warmup_steps": 2}
    ended = rates(full(corpus, tmp_path / "a", data__epochs=1, **warmup))
    asked = rates(full(corpus, tmp_path / "b", training__steps=7, **warmup))
    assert len(ended) == 7
    assert ended == asked


@pytest.mark.parametrize("dp_size", [1, 3, 5, 12])
def test_a_resume_counts_the_steps_behind_and_those_ahead_of_its_own_size(corpus, expected, tmp_path, dp_size):
    config = full(corpus, tmp_path, data__epochs=1)
    first = FakeTrainer(config).load()
    rows = first.train(4)
    FakeTrainer.close_all()
    # 35 samples are left: with a batch of 20 these are 2 more steps, known before the schedule is made.
    config = changed(config, training__global_batch_size=20, training__local_batch_size=4)
    assert place_to_start(config) == (4, 48)
    assert FakeTrainer(config, 0, dp_size).job_config.training.steps == 6
    steps = whole_run(config, dp_size)
    assert [len(step) for step in steps] == [20, 15]
    assert rows + [row for step in steps for row in step] == expected.rows(0, SAMPLES)


def test_a_finished_run_trains_nothing_and_says_so_and_more_epochs_go_on(corpus, expected, tmp_path, log):
    config = full(corpus, tmp_path, data__epochs=1)
    rows = [row for step in whole_run(config, 2) for row in step]
    before = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    log.clear()
    for dp_size in (1, 3):
        assert whole_run(config, dp_size) == []
    assert "data: all samples are trained on and nothing is left to do; raise data.epochs to go on" in log.messages
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == before
    # On 12 ranks the last step of the first epoch, 11 samples, leaves one without a row.
    for epochs, dp_size in ((2, 5), (3, 12)):
        rows += [row for step in whole_run(changed(config, data__epochs=epochs), dp_size) for row in step]
        assert rows == expected.rows(0, epochs * SAMPLES)


def test_steps_that_are_done_are_told(corpus, tmp_path, log):
    for settings in ({}, {"data__epochs": 2}):
        config = full(corpus, tmp_path / f"{len(settings)}", training__steps=3, **settings)
        whole_run(config)
        assert "nothing is left to do" not in log.text
        assert whole_run(config, 2) == []
        assert "data: all steps are done and nothing is left to do; raise training.steps to go on" in log.messages
        log.clear()


def test_a_last_checkpoint_that_keeps_no_place_is_told_while_there_is_time(corpus, tmp_path, log):
    def told(config) -> bool:
        log.clear()
        FakeTrainer(config).load()
        return "the last checkpoint will hold the model only" in log.text

    assert told(job(corpus, tmp_path, data__epochs=1)), "TorchTitan's default"
    assert not told(full(corpus, tmp_path, data__epochs=1))
    assert not told(job(corpus, data__epochs=1)), "no checkpoints"
    assert not told(job(corpus, tmp_path)), "no end"


def test_fewer_epochs_than_are_trained_are_refused(corpus, tmp_path):
    whole_run(full(corpus, tmp_path, data__epochs=2))
    with pytest.raises(
        StateError, match="cursor is 166, but this loader ends at sample 83; raise the number of epochs"
    ):
        FakeTrainer(full(corpus, tmp_path, data__epochs=1)).load()


def test_skipped_samples_need_no_steps(corpus, expected, tmp_path):
    config = full(corpus, tmp_path, data__epochs=1, data__skip=[(20, 60)])
    steps = whole_run(config)
    assert [row for rows in steps for row in rows] == expected.rows(0, 20) + expected.rows(60, SAMPLES)
    assert len(steps) == 4


def test_data_that_is_skipped_as_a_whole_trains_nothing(corpus, tmp_path, log):
    assert whole_run(full(corpus, tmp_path, data__epochs=1, data__skip=[(0, 1000)])) == []
    assert "nothing is left to do" in log.text


def test_an_initial_cursor_counts_where_no_checkpoint_does(corpus, expected, tmp_path):
    config = full(corpus, tmp_path, data__epochs=1, data__initial_cursor=40)
    assert place_to_start(config) == (0, 40)
    steps = whole_run(config)
    assert [row for rows in steps for row in rows] == expected.rows(40, SAMPLES)
    assert len(steps) == 4
    # The checkpoint's does from now on; unless it is left out, and the step is not.
    assert place_to_start(config) == (4, 83)
    assert place_to_start(changed(config, checkpoint__load_step=2)) == (2, 64)
    assert place_to_start(changed(config, checkpoint__exclude_from_loading=["dataloader"])) == (4, 40)
    assert place_to_start(changed(config, checkpoint__enable=False)) == (0, 40)


def test_an_initial_cursor_behind_the_end_is_refused(corpus):
    assert whole_run(job(corpus, data__epochs=1, data__initial_cursor=SAMPLES)) == []
    with pytest.raises(ConfigError, match="data.initial_cursor = 84 is behind the end of the data, sample 83"):
        FakeTrainer(job(corpus, data__epochs=1, data__initial_cursor=SAMPLES + 1)).load()


def test_a_checkpoint_to_begin_from_counts_where_more_than_its_model_is_loaded(corpus, tmp_path):
    FakeTrainer(full(corpus, tmp_path / "first")).load().train(3)
    begin = {"checkpoint__initial_load_path": str(tmp_path / "first" / "checkpoint" / "step-3")}
    config = full(corpus, tmp_path / "second", data__epochs=1, **begin)
    assert place_to_start(config) == (0, 0)
    config = changed(config, checkpoint__initial_load_model_only=False)
    assert place_to_start(config) == (3, 36)
    assert FakeTrainer(config).load().job_config.training.steps == 7


def test_a_checkpoint_without_a_place_leaves_the_complaint_to_its_load(corpus, tmp_path):
    config = job(corpus, tmp_path, data__epochs=1, training__steps=2)
    whole_run(config)  # the last checkpoint is a model only, as by default
    assert place_to_start(config) == (0, 0)
    with pytest.raises(StateError, match=r"it was saved as a model only .*checkpoint\.load_step \(1\); or start anew"):
        FakeTrainer(config).load()
    shutil.rmtree(tmp_path / "checkpoint" / "step-1")
    with pytest.raises(StateError, match=r"checkpoint\.load_step \(none is beside it\); or start anew"):
        FakeTrainer(config).load()


def test_several_sources_without_weights_come_exactly_so_often(tmp_path):
    made = make_sources(tmp_path, web=D60, code=[9] * 20, a=[3])
    config = full(make_corpus(tmp_path / "any", [1]), tmp_path, data__epochs=3, data__sources=made.sources())
    config = changed(config, model__hf_assets_path=str(made.tokenizer))
    mix = expected_mix(made)
    rows = [row for step in whole_run(config, 5) for row in step]
    assert rows == mix.rows(0, 3 * mix.epoch_samples)
    size = mix.epoch_samples
    for epoch in range(3):
        assert sorted(rows[epoch * size : (epoch + 1) * size]) == sorted(rows[:size])
