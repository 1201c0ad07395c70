"""The configs that come with the repository: TorchTitan's reader takes them, and they can be resumed at any size."""

import dataclasses
import sys
from pathlib import Path

import pytest

from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec
from zephon_patches.config import SourceConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).resolve().parents[1] / "train_configs"
CONFIGS = sorted(FOLDER.glob("**/*.toml"))


@pytest.fixture(params=CONFIGS, ids=lambda path: path.name)
def path(request) -> Path:
    return request.param


@pytest.fixture
def config(path):
    return ConfigManager().parse_args(["--job.config_file", str(path)])


def test_there_are_the_configs_that_the_readme_names():
    assert [path.name for path in CONFIGS] == [
        "llama3_8b.toml",
        "llama3_debug.toml",
        "llama3_elastic.toml",
        "qwen3_debug.toml",
    ]


def test_every_data_setting_is_one_and_arrives(path, config):
    table = tomllib.loads(path.read_text())["data"]
    names = {field.name for field in dataclasses.fields(config.data)}
    assert table.keys() <= names
    for name, value in table.items():
        if name.endswith("sources"):
            assert getattr(config.data, name) == [SourceConfig(**source) for source in value]
        else:
            assert getattr(config.data, name) == value


def test_another_size_may_go_on_from_any_checkpoint(config):
    assert config.data.loading_strategy == "zephon" and config.data.sources
    assert config.training.global_batch_size > 0, "a step must not depend on the number of ranks"
    assert config.lr_scheduler.total_steps is not None, "nor the learning rate on where a run ends"
    assert config.checkpoint.enable and not config.checkpoint.last_save_model_only


def test_the_model_and_its_flavor_exist(config):
    assert config.model.flavor in get_train_spec(config.model.name).model_args


def test_the_demo_tokenizer_fits_each_model_that_uses_it(config):
    from scripts.make_demo_data import VOCABULARY_SIZE

    if "demo_data" in config.model.hf_assets_path:
        assert get_train_spec(config.model.name).model_args[config.model.flavor].vocab_size == VOCABULARY_SIZE


def test_each_run_has_its_own_folder():
    folders = [ConfigManager().parse_args(["--job.config_file", str(path)]).job.dump_folder for path in CONFIGS]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("other", [8, 16, 24, 64, 96, 128, 512])
def test_the_8b_config_needs_few_padding_rows_on_any_usual_number_of_gpus(other):
    from zephon_patches.mapping import padded_batch_size

    training = ConfigManager().parse_args(["--job.config_file", str(FOLDER / "llama3_8b.toml")]).training
    padded = padded_batch_size(training.global_batch_size, training.local_batch_size, other)
    assert padded <= 1.13 * training.global_batch_size
