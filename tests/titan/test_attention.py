"""Where positions reach a model, and where they cannot: errors at start; what the models do with them."""

import logging

import pytest
import torch

from tests.corpora import D60, make_corpus
from tests.resume import expected_stream, rows_of
from tests.titan.jobs import BATCH, job
from torchtitan.hf_datasets import text_datasets
from torchtitan.protocols.train_spec import get_train_spec
from zephon_patches.cli import prepare
from zephon_patches.errors import ConfigError
from zephon_patches.titan import attention


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d60"), D60)


def build(config):
    return text_datasets.build_text_dataloader(1, 0, None, config)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model__name": "gpt_oss"}, "the model gpt_oss takes none"),
        (
            {"parallelism__context_parallel_degree": 2},
            "with parallelism.context_parallel_degree = 2 TorchTitan passes positions of its own",
        ),
        ({"parallelism__pipeline_parallel_degree": 4}, "only the first stage gets them"),
        (
            {"parallelism__tensor_parallel_degree": 2, "model__name": "qwen3"},
            "with parallelism.tensor_parallel_degree = 2 the model qwen3 shards its rotary table",
        ),
        ({"parallelism__tensor_parallel_degree": 2, "model__name": "deepseek_v3"}, "the model deepseek_v3 shards"),
    ],
)
def test_positions_that_cannot_reach_the_model_are_an_error_that_says_why(corpus, settings, said):
    with pytest.raises(ConfigError) as caught:
        build(job(corpus, data__positions=True, **settings))
    assert str(caught.value).startswith("data.positions = true cannot be: ")
    assert said in str(caught.value)
    build(job(corpus, **settings))  # without them it is no matter


@pytest.mark.parametrize("name", ["llama3", "llama4", "qwen3", "deepseek_v3"])
def test_positions_reach_the_models_that_take_them(corpus, name):
    config = job(corpus, data__positions=True, data__packing="best_fit", model__name=name)
    loader = build(config)
    items = iter(loader)
    rows = [row for _ in range(loader.micro_batches_per_step) for row in rows_of(next(items))]
    assert rows == expected_stream(corpus, packing="best_fit", positions=True).rows(0, BATCH)


@pytest.mark.parametrize("name", ["llama3", "llama4", "qwen3", "deepseek_v3"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_model_turns_by_the_positions_it_is_given(name, rows):
    spec = get_train_spec(name)
    arguments = spec.model_args["debugmodel"]
    arguments.n_layers = 1
    torch.manual_seed(0)
    model = spec.model_cls(arguments)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    model.eval()
    tokens = torch.arange(8).expand(rows, 8)
    counting = torch.arange(8).expand(rows, 8)
    with torch.no_grad():
        plain = model(tokens)
        assert torch.allclose(model(tokens, positions=counting), plain, atol=1e-5)
        assert not torch.allclose(model(tokens, positions=counting % 4), plain, atol=1e-5)


@pytest.mark.parametrize(("packing", "warned"), [("best_fit", True), ("concat", False), ("document", False)])
def test_a_mask_of_documents_made_from_eos_is_warned_of_where_rows_have_none(corpus, caplog, packing, warned):
    caplog.set_level(logging.WARNING, logger=attention.__name__)
    build(job(corpus, data__packing=packing, model__flavor="debugmodel_flex_attn"))
    assert ("so documents of one sample see each other" in caplog.text) == warned
    caplog.clear()
    build(job(corpus, data__packing=packing))
    assert not caplog.text


def test_the_mask_from_eos_separates_documents_of_concat_and_none_of_best_fit(corpus):
    """Upstream's mask of the flex models, on the rows of both packings."""
    from torchtitan.models.attention import get_document_mask_mod

    eos = sum(D60) + 1
    for packing, separated in (("concat", True), ("best_fit", False)):
        inputs, _ = next(iter(build(job(corpus, data__packing=packing, data__positions=True, training__seq_len=40))))
        tokens, positions = inputs["input"], inputs["positions"]
        sees = get_document_mask_mod(tokens.clone(), eos)
        crossings = 0
        for row in range(len(tokens)):
            for place in (positions[row, 1:] == 0).nonzero().flatten() + 1:
                crossings += bool(sees(row, 0, place, place - 1))
        assert (positions[:, 1:] == 0).any()
        assert (crossings == 0) == separated
        assert (tokens == eos).any() == separated


def test_the_length_that_prepare_takes_where_a_config_has_none_is_torchtitan_s(corpus):
    from torchtitan.config import JobConfig

    assert JobConfig().training.seq_len == JobConfig().validation.seq_len == prepare._SEQ_LEN
