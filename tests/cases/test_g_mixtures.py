"""Mixtures: group G of the known faults of data loaders."""

import json
import math
import shutil
import subprocess
import sys
from collections import Counter

import pytest

from tests.corpora import D60, E48, make_sources, write_jsonl
from tests.resume import Place, Run, builder, check_chain, check_every_stop, check_steps, expected_mix, is_padding
from zephon_patches import SourceConfig, StageConfig
from zephon_patches.config import DataConfig, data_config_from_table
from zephon_patches.errors import ConfigError, InputError, StateError, StoreError

pytestmark = pytest.mark.usefixtures("small_blocks")


def source_of(made, row) -> str:
    """The source of a row, by its first token that no source shares."""
    eos = sum(made.all_lengths) + 1
    token = next(token for token in row.inputs if token != eos)
    return next(name for name in made.lengths if any(token in document for document in made.documents(name)))


def taken(build, samples: int, place: Place = Place(1, 20, 20)) -> list:  # noqa: B008  (a tuple)
    run = Run(build, place)
    rows = []
    while len(rows) < samples:
        rows += run.step()
    return rows[:samples]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_sources(tmp_path_factory.mktemp("made"), web=D60, code=[9] * 20, extra=[5] * 30)


def test_extreme_weights_wrap_a_source_by_its_own_epochs(tmp_path):
    """G01: 0.001 and 0.999 of two sources of 48 samples, 2,000 samples."""
    made = make_sources(tmp_path, rare=E48, common=E48)
    settings = {"weights": {"rare": 0.001, "common": 0.999}}
    rows = taken(builder(made, **settings), 2000)
    assert rows == expected_mix(made, **settings).rows(0, 2000)
    counts = Counter(source_of(made, row) for row in rows)
    assert abs(counts["rare"] - 2) <= 1
    assert abs(counts["common"] - 1998) <= 1


@pytest.mark.parametrize(
    "weights, found",
    [
        ([0, 0], "all weights are 0, so there is nothing to draw from"),
        ([0.5, -0.1], "source 'b': weight = -0.1: expected a number, 0 (off) or more"),
        ([math.nan, 1], "source 'a': weight = nan"),
        ([math.inf, 1], "source 'a': weight = inf"),
        ([True, 1], "source 'a': weight = True"),
        (["0.5", 1], "source 'a': weight = '0.5'"),
        ([1, None], "data.sources: 'b' without a weight, and others with one"),
    ],
)
def test_weights_that_are_none_are_refused_by_name(weights, found):
    """G03: [0, 0], [0.5, -0.1], [nan, 1] and their like."""
    with pytest.raises(ConfigError) as caught:
        DataConfig(sources=[SourceConfig(name, "x", weight=w) for name, w in zip("ab", weights, strict=True)])
    assert found in str(caught.value)


PROGRAM = """
import sys
from pathlib import Path
from tests.corpora import make_sources
from tests.resume import Place, Run, builder
weights = dict(zip("ab", map(float, sys.argv[2:])))
made = make_sources(Path(sys.argv[1]), a=[7] * 10, b=[7])
run = Run(builder(made, weights=weights), Place(8, 1, 8))
rows = [row for _ in range(50) for row in run.step()]
print(len(rows), sum(0 <= row.inputs[0] < 70 for row in rows))
"""


@pytest.mark.parametrize("weights, delivered", [(["1", "0"], "400 "), (["0", "1"], "400 0"), (["3", "1"], "400 ")])
def test_a_source_that_is_off_is_not_waited_for(tmp_path, weights, delivered):
    """G03 and G12: [1, 0] and its like, a source of one sample on 8 ranks; one that waits never ends."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), *weights],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.startswith(delivered)


def test_integers_are_weights(made):
    """G03: [3, 1]."""
    settings = {"weights": {"web": 3, "code": 1}}
    rows = taken(builder(made, **settings), 400)
    assert Counter(source_of(made, row) for row in rows) == {"web": 300, "code": 100}


def test_a_source_that_is_off_need_not_exist(made):
    config = made.config(weights={"web": 1, "code": 0})
    config.sources[1].path = "/absent"
    run = Run(lambda place, rank: _loader(config, made, place, rank), Place(1, 12))
    check_steps(run, expected_mix(made, weights={"web": 1}), 3)


def _loader(config, made, place, rank):
    from zephon_patches import build_loader

    return build_loader(
        config,
        made.tokenizer,
        seq_len=8,
        global_batch_size=place.batch,
        local_batch_size=place.local,
        dp_rank=rank,
        dp_size=place.dp,
    )


def test_a_source_that_a_stage_turned_off_needs_neither_its_texts_nor_its_shards(tmp_path):
    """Its table and its manifest are what the numbers before follow from."""
    made = make_sources(tmp_path, web=D60, code=[9] * 20)
    settings = {"weights": {"web": 0.5, "code": 0.5}, "stages": [(48, {"web": 1})]}
    run = Run(builder(made, **settings), Place(2, 6))
    rows = [row for _ in range(4) for row in run.step()]
    shutil.rmtree(made.texts("code"))
    shards = list((tmp_path / "cache" / "code").rglob("*.bin"))
    assert shards
    for shard in shards:
        shard.unlink()
    resumed = Run(builder(made, **settings), Place(3, 4))
    resumed.load(run.state())
    rows += [row for _ in range(6) for row in resumed.step()]
    assert rows == expected_mix(made, **settings).rows(0, 120)
    for loader in resumed.loaders:
        loader.seek(12)
    with pytest.raises(StoreError, match="code.*cannot be opened"):
        resumed.step()


def test_each_step_s_samples_are_dealt_from_the_one_mixture(made):
    """G05: 2 sources, 4 ranks, steps of 8."""
    settings = {"weights": {"web": 0.5, "code": 0.5}}
    run, expected = Run(builder(made, **settings), Place(4, 2, 8)), expected_mix(made, **settings)
    for step in range(5):  # in these no source begins a second epoch
        rows = run.step()
        assert len(set(rows)) == 8
        assert rows == expected.rows(8 * step, 8 * step + 8)


def test_shares_are_those_of_tokens_whatever_the_length_of_documents(tmp_path):
    """G06: documents of 40 and of 400 tokens, 1:1, seq_len 16, 200 samples."""
    made = make_sources(tmp_path, a=[40] * 100, b=[400] * 100)
    rows = taken(builder(made, weights={"a": 1, "b": 1}, seq_len=16), 200)
    tokens = Counter()
    for row in rows:
        tokens[source_of(made, row)] += sum(label >= 0 for label in row.labels)
    assert abs(tokens["a"] / sum(tokens.values()) - 0.5) <= 0.02


def test_weights_and_sources_change_in_mid_run_as_stages_and_nothing_comes_twice(made):
    """G08: 0.5/0.5 to sample 120, then 0.8/0.2, then a third source; then on another number of ranks."""
    halves = {"weights": {"web": 0.5, "code": 0.5}}
    first = Run(builder(made, **halves), Place(2, 6))
    rows = [row for _ in range(10) for row in first.step()]
    assert first.cursor == 120

    # Without a stage: loud.
    changed = Run(builder(made, weights={"web": 0.8, "code": 0.2}), Place(2, 6))
    with pytest.raises(StateError) as caught:
        changed.load(first.state())
    assert "mixture from sample 0 on: code 1, web 1 in the checkpoint, code 1, web 4 now" in str(caught.value)
    assert "data.accept_change" in str(caught.value)

    two = {**halves, "stages": [(120, {"web": 0.8, "code": 0.2})]}
    second = Run(builder(made, **two), Place(3, 2))
    second.load(first.state())
    rows += [row for _ in range(5) for row in second.step()]
    assert second.cursor == 180

    three = {
        "weights": {**halves["weights"], "extra": 0},
        "stages": [*two["stages"], (180, {"web": 0.4, "code": 0.2, "extra": 0.4})],
    }
    third = Run(builder(made, **three), Place(5, 1))
    third.load(second.state())
    rows += [row for _ in range(5) for row in third.step()]
    fourth = Run(builder(made, **three), Place(1, 4))
    fourth.load(third.state())
    rows += [row for _ in range(5) for row in fourth.step()]
    assert rows == expected_mix(made, **three).rows(0, 300)

    # Each source went on where it was: its samples in turn are those of a run of its own.
    for name in made.lengths:
        own = [row for row in rows if source_of(made, row) == name]
        assert own == expected_mix(made, weights={name: 1}).rows(0, len(own))


@pytest.mark.parametrize("kind", ["missing", "no match", "empty", "unfinished"])
def test_a_source_that_is_not_there_is_never_left_out(made, tmp_path, kind):
    """G10: a missing path, a glob that matches nothing, a file of nothing, a store that is half built."""
    config = made.config(weights={"web": 1, "code": 1})
    config.cache_dir = str(tmp_path / "cache")
    path = {"missing": "absent", "no match": "*.jsonl", "empty": "empty.jsonl", "unfinished": "absent"}[kind]
    config.sources[1].path = str(tmp_path / path)
    if kind == "empty":
        write_jsonl(tmp_path / "empty.jsonl", [])
    if kind == "unfinished":
        unfinished = tmp_path / "cache" / "code" / "0123456789abcdef-0123456789abcdef"
        unfinished.mkdir(parents=True)
        (unfinished / "plan.json").write_text("{}")
    with pytest.raises(InputError, match="'code'|absent|matches no file"):
        _loader(config, made, Place(1, 12), 0)


@pytest.mark.parametrize("sizes", [([7],), ([3], [1]), ([7] * 30, [15])])
def test_no_rank_starves_on_a_source_smaller_than_the_ranks(tmp_path, sizes):
    """G12: a source of 1 sample, and a mixture with one of 2 samples, on 8 ranks."""
    made = make_sources(tmp_path, **dict(zip("ab", sizes, strict=False)))
    settings = {"weights": dict.fromkeys(made.lengths, 1)}
    run = Run(builder(made, **settings), Place(8, 1, 8))
    check_steps(run, expected_mix(made, **settings), 30)


@pytest.mark.parametrize("place", [Place(1, 10, 10), Place(4, 2, 10), Place(3, 4, 10)])
def test_shares_hold_in_every_window_and_prefix(made, place):
    """G13: 0.5/0.3/0.2, every window of 100 within 3, every prefix within 2."""
    shares = {"web": 0.5, "code": 0.3, "extra": 0.2}
    names = [source_of(made, row) for row in taken(builder(made, weights=shares), 700, place)]
    for name, share in shares.items():
        before = [0]
        for drawn in names:
            before.append(before[-1] + (drawn == name))
        assert all(abs(count - n * share) <= 2 for n, count in enumerate(before))
        assert all(abs(before[n + 100] - before[n] - 100 * share) <= 3 for n in range(600))


def test_the_first_samples_depend_on_no_size(made):
    settings = {"weights": {"web": 0.5, "code": 0.3, "extra": 0.2}}
    runs = [taken(builder(made, **settings), 120, place) for place in (Place(1, 7, 7), Place(4, 3, 24), Place(6, 1, 6))]
    assert runs[0] == runs[1] == runs[2] == expected_mix(made, **settings).rows(0, 120)


def test_a_stop_at_each_step_of_a_mixture_with_stages_and_skips(made):
    settings = {
        "weights": {"web": 0.7, "code": 0.3, "extra": 0},
        "stages": [(50, {"code": 1}), (77, {"web": 1, "extra": 2})],
    }
    check_every_stop(builder(made, **settings), Place(2, 3), [Place(3, 4), Place(5, 1), Place(1, 12)], 12)
    links = [(Place(2, 3), 2), (Place(3, 2, 7), 3), (Place(1, 5, 5), 4), (Place(4, 8, 30), 2)]
    check_chain(builder(made, **settings), links, expected_mix(made, **settings))


@pytest.mark.parametrize(
    "stages, found",
    [
        ([{"at": 0, "weights": {"a": 1}}], "stage: at = 0: expected the number of a sample, 1 to"),
        ([{"at": 5, "weights": {}}], "stage at sample 5: weights = {}"),
        ([{"at": 5, "weights": {"a": 0}}], "stage at sample 5: all weights are 0"),
        ([{"at": 5, "weights": {"a": -1}}], "stage at sample 5: weight of 'a' = -1"),
        ([{"at": 5, "weights": {"c": 1}}], "no [[data.sources]] table has that name; the names are 'a', 'b'"),
        ([{"at": 5, "weights": {"a": 1}}, {"at": 5, "weights": {"b": 1}}], "at = 5 follows 5"),
        ([{"at": 5}], "[[data.stages]] number 1: 'weights' is missing"),
        ([{"at": 5, "weights": {"a": 1}, "until": 7}], "unknown key 'until'; the keys are at, weights"),
        ([{"at": "5", "weights": {"a": 1}}], "stage: at = '5': expected an integer"),
        ({"at": 5}, "data.stages must be written as [[data.stages]] tables, one for each stage"),
    ],
)
def test_stages_that_are_none_are_refused_by_name(stages, found):
    table = {"sources": [{"name": n, "path": "x", "weight": 1} for n in "ab"], "stages": stages}
    with pytest.raises(ConfigError) as caught:
        data_config_from_table(table, "run.toml")
    assert "run.toml" in str(caught.value)
    assert found in str(caught.value)


def test_a_table_gives_stages_weights_and_skips():
    table = {
        "skip": [[5, 9]],
        "sources": [{"name": "a", "path": "x", "weight": 1}, {"name": "b", "path": "x", "weight": 0.5}],
        "stages": [{"at": 5, "weights": {"a": 0.1, "b": 2}}],
    }
    config = data_config_from_table(json.loads(json.dumps(table)), "run.toml")
    assert config.stages == [StageConfig(5, {"a": 0.1, "b": 2})]
    assert [source.weight for source in config.sources] == [1, 0.5]
    assert config.skip == [(5, 9)]


def test_sources_with_weights_have_no_end_of_their_own(made):
    with pytest.raises(ConfigError, match="data.epochs = 2 goes with sources that have neither weights nor stages"):
        made.config(weights={"web": 1, "code": 1}, epochs=2)
    with pytest.raises(ConfigError, match="data.epochs = 2 goes with sources that have neither"):
        made.config(stages=[(5, {"web": 1})], epochs=2)
    with pytest.raises(ConfigError, match="infinite = False goes with sources that have neither"):
        builder(made, weights={"web": 1, "code": 1}, infinite=False)(Place(1, 12), 0)
    with pytest.raises(ConfigError, match="validation reads all sources by their size"):
        DataConfig(validation_sources=made.sources({"web": 1}))


def test_validation_of_several_sources_reads_each_sample_once(made):
    from tests.resume import rows_of
    from zephon_patches import build_evaluation_loader

    loader = build_evaluation_loader(made.config(), made.tokenizer, seq_len=8, local_batch_size=5)
    rows = [row for item in loader for row in rows_of(item) if not is_padding(row)]
    mix = expected_mix(made)
    assert rows == mix.rows(0, mix.epoch_samples)
