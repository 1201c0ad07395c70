"""From TorchTitan's settings to loaders: sizes, log lines, refusals, models, validation, workers."""

import copy
import functools
import json
import logging
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import corpora
from tests.corpora import D60, make_corpus, make_sources, words, write_tokenizer
from tests.resume import expected_mix, expected_stream, is_padding, rows_of
from tests.titan.jobs import BATCH, SEQ_LEN, changed, job
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.hf_datasets import DatasetConfig, text_datasets
from torchtitan.protocols import train_spec
from torchtitan.protocols.train_spec import get_train_spec
from zephon_patches import SourceConfig
from zephon_patches.errors import ConfigError, InputError, MappingError, StoreError
from zephon_patches.loader.evaluation import EvaluationLoader
from zephon_patches.loader.loader import Loader
from zephon_patches.titan import build

MODELS = ["llama3", "llama4", "qwen3", "deepseek_v3", "gpt_oss"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d60"), D60)


@pytest.fixture(scope="module")
def expected(corpus):
    return expected_stream(corpus)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger=build.__name__)
    return caplog


def training(config: JobConfig, dp_size: int = 1, dp_rank: int = 0) -> Loader:
    return text_datasets.build_text_dataloader(dp_size, dp_rank, None, config)


def validation(config: JobConfig, dp_size: int = 1, dp_rank: int = 0) -> EvaluationLoader:
    return text_datasets.build_text_validation_dataloader(dp_size, dp_rank, None, config)


def first_step(loader: Loader):
    items = iter(loader)
    return [row for _ in range(loader.micro_batches_per_step) for row in rows_of(next(items))]


# --- the size of a step ---


@settings(max_examples=60)
@given(batch=st.integers(1, 60), local=st.integers(1, 20), data=st.data())
def test_the_trainer_takes_as_many_micro_batches_as_the_loader_s_step_has(corpus, batch, local, data):
    dp_size = data.draw(st.integers(1, batch))
    config = job(corpus, training__global_batch_size=batch, training__local_batch_size=local)
    loader = training(config, dp_size)
    padded, rows = config.training.global_batch_size, local * dp_size
    assert padded % rows == 0  # upstream's own check
    assert padded // rows == loader.micro_batches_per_step
    assert loader.global_batch_size == batch <= padded < batch + rows


def test_the_padded_size_is_set_once_however_often_it_is_built(corpus):
    config = job(corpus, training__local_batch_size=5)
    for dp_size, padded in ((1, 15), (1, 15), (2, 20), (3, 15), (1, 15)):
        assert training(config, dp_size).global_batch_size == BATCH
        assert config.training.global_batch_size == padded


@pytest.mark.parametrize("again", [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_a_copy_of_the_settings_still_knows_the_size_that_was_asked_for(corpus, again):
    config = job(corpus, training__local_batch_size=5)
    training(config)
    config = again(config)
    assert training(config, 2).global_batch_size == BATCH
    assert json.loads(json.dumps(config.to_dict()))["training"]["global_batch_size"] == 20


def test_validation_leaves_the_size_of_a_training_step_alone(corpus):
    config = job(corpus, training__local_batch_size=5)
    config.data.validation_sources = config.data.sources
    validation(config)
    assert config.training.global_batch_size == BATCH


def test_the_log_has_the_size_of_a_step_and_that_of_its_rows(corpus, log):
    training(job(corpus, training__global_batch_size=1200, training__local_batch_size=7), 30)
    assert log.messages == [
        "data: a step takes 1,200 samples: 30 ranks x 6 micro-batches x 7 rows = 1,260 rows, 60 of them padding"
    ]


def test_padding_above_a_tenth_names_the_best_local_batch_size(corpus, log):
    training(job(corpus, training__local_batch_size=5), 1)  # 15 rows
    assert log.messages[-1] == (
        "data: 20 % of the rows are padding; training.local_batch_size = 4 would need 0 padding rows"
    )
    assert log.records[-1].levelno == logging.WARNING
    # Following the advice, the warning is gone.
    log.clear()
    training(job(corpus, training__local_batch_size=4), 1)
    assert [record.levelno for record in log.records] == [logging.INFO]


def test_padding_that_no_local_batch_size_avoids_is_no_warning(corpus, log):
    training(job(corpus, training__global_batch_size=5, training__local_batch_size=1), 3)  # 6 rows, 17 %
    assert "1 of them padding" in log.text
    assert [record.levelno for record in log.records] == [logging.INFO]


@pytest.mark.parametrize("dp_size", [1, 3])
def test_an_unset_global_batch_is_torchtitan_s_and_the_log_says_what_that_means(corpus, log, dp_size):
    config = job(corpus, training__global_batch_size=JobConfig().training.global_batch_size)
    loader = training(config, dp_size)
    assert loader.global_batch_size == config.training.global_batch_size == 2 * dp_size
    assert (
        f"data: training.global_batch_size is not set, so a step takes local_batch_size x {dp_size} ranks = "
        f"{2 * dp_size} samples. Another number of ranks will change the size of a step"
    ) in log.text
    assert "0 of them padding" in log.text
    # Built once more on other ranks, it is still unset.
    assert training(config, 5).global_batch_size == config.training.global_batch_size == 10


def test_a_global_batch_of_0_is_refused(corpus):
    with pytest.raises(ConfigError, match="training.global_batch_size = 0: expected at least 1, or -1"):
        training(job(corpus, training__global_batch_size=0))


def test_more_ranks_than_samples_are_refused_with_both_numbers(corpus):
    config = job(corpus)
    with pytest.raises(MappingError, match="dp_size = 13 is above global_batch_size = 12.*at most 12 data-parallel"):
        training(config, 13)
    assert config.training.global_batch_size == BATCH


# --- what cannot work ---


def test_fault_tolerance_is_refused_by_name(corpus):
    with pytest.raises(ConfigError, match='loading_strategy = "zephon" does not work with fault_tolerance.enable'):
        training(job(corpus, fault_tolerance__enable=True))


def test_the_forge_engine_is_refused_by_name(corpus, monkeypatch):
    name = "torchtitan.experiments.forge.engine"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(ConfigError, match=f'does not work with {name}.*set data.loading_strategy = "stock"'):
        training(job(corpus))


@pytest.fixture
def tokenizer_of(tmp_path):
    """A tokenizer whose largest id is the given one."""

    def write(largest_id: int):
        return write_tokenizer(tmp_path / "tokenizer", [largest_id - 1])  # then <unk>, then EOS

    return write


@pytest.mark.parametrize("make", [training, validation])
def test_ids_beyond_the_model_s_vocabulary_are_refused_with_both_numbers(corpus, tokenizer_of, make):
    config = job(corpus, model__hf_assets_path=str(tokenizer_of(2048)))
    config.data.validation_sources = config.data.sources
    with pytest.raises(ConfigError) as caught:
        make(config)
    text = str(caught.value)
    assert "gives ids up to 2,048, and the model llama3 debugmodel has a vocabulary of 2,048" in text
    assert "set model.hf_assets_path to the model's own tokenizer" in text


def test_ids_up_to_the_last_of_the_vocabulary_are_taken(corpus, tokenizer_of):
    config = job(corpus, model__hf_assets_path=str(tokenizer_of(2047)))
    assert build._tokenizer(config).largest_id == 2047


def test_a_model_without_a_vocabulary_of_its_own_is_not_checked(corpus, monkeypatch, tokenizer_of):
    monkeypatch.setattr(train_spec, "get_train_spec", lambda name: SimpleNamespace(model_args={"small": object()}))
    config = job(corpus, model__flavor="small", model__hf_assets_path=str(tokenizer_of(10**5)))
    assert build._tokenizer(config).largest_id == 10**5


# --- models ---


@pytest.mark.parametrize("name", MODELS)
def test_every_model_s_loaders_are_the_overlay_s(name):
    spec = get_train_spec(name)
    assert spec.build_dataloader_fn is text_datasets.build_text_dataloader
    if name in ("llama3", "llama4", "qwen3"):
        from torchtitan.components import validate

        assert spec.build_validator_fn is validate.build_validator
        assert validate.build_text_validation_dataloader is text_datasets.build_text_validation_dataloader
    else:
        assert spec.build_validator_fn is None  # upstream has none


@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_on_the_same_samples_at_debug_size(corpus, expected, name):
    flavors = [flavor for flavor in get_train_spec(name).model_args if flavor.startswith("debug")]
    assert flavors
    for flavor in flavors:
        config = job(corpus, model__name=name, model__flavor=flavor)
        assert first_step(training(config)) == expected.rows(0, BATCH)


# --- where a rank is ---


def test_only_the_place_in_the_batch_mesh_counts(corpus, expected, monkeypatch):
    for number in range(8):
        for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
            monkeypatch.setenv(name, str(number))
        monkeypatch.setenv("WORLD_SIZE", "8")
        assert first_step(training(job(corpus), 2, 1)) == expected.rows(6, 12)


def test_the_seed_of_the_model_changes_no_order(corpus, expected):
    assert first_step(training(job(corpus, debug__seed=7))) == expected.rows(0, BATCH)


# --- sources ---


def test_a_registered_data_set_is_a_source_with_its_loader_and_processor(corpus, monkeypatch, tmp_path):
    asked = []

    def load(path):
        asked.append(path)
        return ({"document": i} for i in range(60))

    numbered = DatasetConfig(
        path="nowhere/numbered", loader=load, sample_processor=lambda record: " ".join(words(record["document"], 9))
    )
    monkeypatch.setitem(text_datasets.DATASETS, "numbered", numbered)
    nine = make_corpus(tmp_path / "nine", [9] * 60)
    config = job(nine, training__dataset="Numbered", training__dataset_path=None)
    config.data.sources = []
    config = changed(config, validation__dataset="numbered", validation__seq_len=SEQ_LEN, validation__steps=-1)
    expected = expected_stream(nine, name="numbered")
    assert first_step(training(config)) == expected.rows(0, BATCH)
    rows = [row for item in validation(config) for row in rows_of(item) if not is_padding(row)]
    assert rows == expected.rows(0, expected.epoch_samples)
    assert asked == ["nowhere/numbered"], "one store serves both"


@pytest.mark.parametrize("table, make", [("training", training), ("validation", validation)])
def test_a_data_set_that_is_not_registered_or_cannot_be_loaded_is_named(corpus, monkeypatch, table, make):
    config = job(corpus)
    config.data.sources = []
    getattr(config, table).dataset = "nonesuch"
    sources = "[[data.sources]]" if table == "training" else "[[data.validation_sources]]"
    with pytest.raises(ConfigError) as caught:
        make(config)
    assert f"{table}.dataset = 'nonesuch' is not registered (registered are c4, " in str(caught.value)
    assert f"or give the files in a {sources} table" in str(caught.value)

    def fails(path):
        raise OSError("no network")

    broken = DatasetConfig(path="nowhere/broken", loader=fails, sample_processor=str)
    monkeypatch.setitem(text_datasets.DATASETS, "broken", broken)
    getattr(config, table).dataset = "broken"
    with pytest.raises(InputError) as error:
        make(config)
    assert "data set 'broken' cannot be loaded from 'nowhere/broken' (no network)" in str(error.value)
    assert f"set {table}.dataset_path, or give the files in a {sources} table" in str(error.value)


# --- validation ---


def validating(corpus, steps: int, **settings) -> JobConfig:
    config = job(corpus, validation__steps=steps, validation__seq_len=SEQ_LEN, validation__local_batch_size=5)
    config.data.validation_sources = [SourceConfig("web", str(corpus.texts))]
    return changed(config, **settings)


def test_validation_reads_all_samples_with_as_many_batches_on_each_rank(corpus, expected, log):
    config = validating(corpus, -1)
    loaders = [validation(config, 3, rank) for rank in range(3)]
    passes = [[rows_of(item) for item in loader] for loader in loaders]
    assert [len(batches) for batches in passes] == [6, 6, 6]  # 83 samples, 15 in a batch
    rows = [row for step in zip(*passes, strict=True) for batch in step for row in batch if not is_padding(row)]
    assert rows == expected.rows(0, 83)
    assert log.messages[-1] == "data: validation reads every sample once, in 6 batches on each rank"


def test_validation_with_steps_says_that_they_count_batches_of_today_s_size(corpus, expected, log):
    config = validating(corpus, 4)
    loaders = [validation(config, 3, rank) for rank in range(3)]
    passes = [[rows_of(item) for item in loader] for loader in loaders]
    assert [row for step in zip(*passes, strict=True) for batch in step for row in batch] == expected.rows(0, 60)
    assert "data: validation reads 4 batches of 15 samples; on another number of ranks" in log.messages[-1]
    assert "validation.steps = -1 always reads all" in log.messages[-1]


def test_validation_has_its_own_seq_len_and_sources(corpus, tmp_path):
    other = make_corpus(tmp_path, [9] * 20)
    config = validating(corpus, -1, validation__seq_len=16)
    config.data.validation_sources = [SourceConfig("other", str(other.texts))]
    items = list(validation(config))
    assert {tuple(inputs["input"].shape) for inputs, _ in items} == {(5, 16)}
    rows = [row for item in items for row in rows_of(item) if not is_padding(row)]
    assert len(rows) == -(-(20 * 10 - 1) // 16)


def test_validation_without_a_source_of_its_own_takes_the_registry_s(corpus):
    config = validating(corpus, -1, validation__dataset="nonesuch")
    assert isinstance(validation(config), EvaluationLoader), "the table of sources wins"
    config.data.validation_sources = []
    with pytest.raises(ConfigError, match="validation.dataset = 'nonesuch' is not registered"):
        validation(config)


def test_several_sources_of_validation_are_read_by_size_all_of_them(corpus, tmp_path):
    made = make_sources(tmp_path, web=D60, code=[9] * 20)
    config = validating(corpus, -1, model__hf_assets_path=str(made.tokenizer))
    config.data.validation_sources = made.sources()
    config.data.skip = [(0, 50)]  # of training
    expected = expected_mix(made)
    passes = [[rows_of(item) for item in validation(config, 3, rank)] for rank in range(3)]
    rows = [row for step in zip(*passes, strict=True) for batch in step for row in batch if not is_padding(row)]
    assert rows == expected.rows(0, expected.epoch_samples)


# --- workers ---


@pytest.mark.parametrize("table, make", [("training", training), ("validation", validation)])
def test_settings_of_workers_are_passed_on(corpus, table, make):
    config = validating(corpus, -1)
    delivery = getattr(config, table).dataloader
    delivery.num_workers, delivery.prefetch_factor, delivery.persistent_workers = 2, 5, True
    passed = make(config)._items._delivery
    assert (passed.num_workers, passed.prefetch_factor, passed.persistent_workers) == (2, 5, True)
    delivery.num_workers, delivery.pin_memory = 0, True  # those of workers do not count then, as in TorchTitan
    assert make(config)._items._delivery.num_workers == 0


# --- settings as users write them ---


def test_a_toml_file_and_arguments_lead_to_the_loader(corpus, expected, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
        [data]
        loading_strategy = "zephon"
        cache_dir = "{corpus.folder / "cache"}"
        [[data.sources]]
        name = "web"
        path = "{corpus.texts}"
        [model]
        hf_assets_path = "{corpus.tokenizer}"
        [training]
        seq_len = {SEQ_LEN}
        global_batch_size = {BATCH}
        """
    )
    arguments = ["--job.config_file", str(path), "--training.local_batch_size", "3", "--data.seed", "5"]
    config = ConfigManager().parse_args(arguments)
    assert first_step(training(config, 2, 1)) == expected_stream(corpus, seed=5).rows(6, 12)
    assert first_step(training(config, 2, 1)) != expected.rows(6, 12)


# What a review found


def test_a_default_global_batch_follows_the_ranks_when_built_again():
    from zephon_patches.titan.build import _global_batch_size, _set_padded_batch_size

    training = SimpleNamespace(local_batch_size=2, global_batch_size=-1)
    _set_padded_batch_size(training, _global_batch_size(training, 2), 2)
    assert _global_batch_size(training, 3) == 6
    training.global_batch_size = 0
    with pytest.raises(ConfigError, match="global_batch_size = 0"):
        _global_batch_size(training, 2)


def test_what_a_partial_binds_is_part_of_a_processor_s_identity():
    from zephon_patches.titan.build import _identity_of

    def process(record, key):
        return record[key]

    first, second = (_identity_of(functools.partial(process, key=key)) for key in "ab")
    assert first != second
    assert _identity_of(process) != first


def test_a_registered_data_set_whose_folder_is_gone_is_served_by_its_store(tmp_path):
    from zephon_patches.prepare.build import open_or_build
    from zephon_patches.prepare.tokenizers import TextTokenizer
    from zephon_patches.titan.build import _registered

    folder = tmp_path / "texts"
    corpora.write_jsonl(folder / "a.jsonl", [3, 4])
    tokenizer = TextTokenizer(corpora.write_tokenizer(tmp_path / "tokenizer", [3, 4]))
    registry = {
        "mine": SimpleNamespace(path="nowhere", loader=lambda path: [{"text": "0_0 0_1"}], sample_processor=text_of)
    }
    table = SimpleNamespace(dataset="mine", dataset_path=str(folder))
    built = open_or_build(_registered("training", table, registry), tokenizer, tmp_path / "cache", 0)
    folder.rename(tmp_path / "gone")
    found = open_or_build(_registered("training", table, registry), tokenizer, tmp_path / "cache", 0)
    assert found.folder == built.folder


def text_of(record):
    return record["text"]


def test_how_much_of_a_store_is_compared_is_a_setting_of_training_and_validation(tmp_path):
    corpus = make_corpus(tmp_path, D60)
    (corpus.texts / "long.jsonl").write_text(json.dumps({"text": " ".join(words(0, 3) * 10_000)}) + "\n")
    config = job(corpus, data__validation_sources=[SourceConfig("held", str(corpus.texts))])
    training(config), validation(config)
    for path in corpus.folder.glob("cache/*/*/*.bin"):
        with open(path, "r+b") as file:  # between the pages that are compared otherwise
            file.seek(5000)
            file.write(b"\xff")
    config = changed(config, training__global_batch_size=1, training__local_batch_size=1)
    for make in (training, validation):
        next(iter(make(config)))
        with pytest.raises(StoreError, match=r"000000-000\.bin: damaged"):
            next(iter(make(changed(config, data__verify="checksum"))))
