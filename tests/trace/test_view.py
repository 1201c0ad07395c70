"""Looking at data: what stands at a number is what a run trains on there, and the way back finds all of it."""

import json
from collections import defaultdict

import numpy as np
import pytest

from tests.corpora import D60, make_sources
from tests.prepare import stores, test_chat
from tests.resume import Place, Run, builder, expected_mix
from tests.trace.runs import files_under, prepare, tokens_of, view_of, write_config
from zephon_patches import build_loader
from zephon_patches.errors import ConfigError, InputError, StoreError
from zephon_patches.loader.state import ORDER
from zephon_patches.trace.steps import basis_of_config, deal, numbers_of_step, steps_over
from zephon_patches.training_config import read_training_config

pytestmark = pytest.mark.usefixtures("small_blocks")

MIXED = {"weights": {"web": 0.7, "code": 0.3}, "stages": [(150, {"web": 1})]}


@pytest.fixture
def made(tmp_path):
    return make_sources(tmp_path, web=D60, code=[9, 0, 4, 30] * 7)


@pytest.fixture
def config(tmp_path, made):
    """Two sources, several shards, a stage, and a skip over the stage's start."""
    path = write_config(tmp_path / "run.toml", made, **MIXED, shard_bytes=600, skip="[[30, 40], [145, 152]]")
    prepare(path)
    return path


def test_what_is_shown_is_what_the_run_trains_on_document_by_document(made, config):
    expected = expected_mix(made, **MIXED, shard_bytes=600)
    for sample in view_of(config).samples(range(300)):
        tokens = [token for part in sample.parts for token in tokens_of(made, sample.source, part)]
        row = expected[sample.n]
        assert tokens == [row.inputs[0], *(label for label in row.labels if label >= 0)]
        assert sample.skipped == (30 <= sample.n < 40 or 145 <= sample.n < 152)


def test_a_row_is_what_the_trainer_gets(made, config):
    view, expected = view_of(config), expected_mix(made, **MIXED, shard_bytes=600)
    place = view.order.locate(np.arange(200))
    for n, (source, shard, sample) in enumerate(zip(place.source, place.shard, place.sample, strict=True)):
        row = view.row(int(source), int(shard), int(sample))
        assert (tuple(row["input"].tolist()), tuple(row["labels"].tolist())) == expected[n][:2]
        assert row["input"].dtype == row["labels"].dtype == "int64"


KINDS = [
    {"packing": "best_fit"},
    {"packing": "best_fit", "positions": True},
    {"packing": "document", "positions": True},
    {"packing": "concat", "positions": True},
    {"packing": "concat", "mask_boundaries": True},
    {"packing": "concat", "positions": True, "mask_boundaries": True},
]


@pytest.fixture
def packed(tmp_path, made, request):
    """A config of the same sources whose samples are of another kind, the parameter."""
    data = {key: json.dumps(value) for key, value in request.param.items()}
    path = write_config(tmp_path / "packed.toml", made, **MIXED, shard_bytes=600, **data)
    prepare(path)
    return path


@pytest.mark.parametrize(("packed", "kind"), [(kind, kind) for kind in KINDS], indirect=["packed"])
def test_a_row_of_any_kind_is_what_the_trainer_gets(made, packed, kind):
    view, expected = view_of(packed), expected_mix(made, **MIXED, shard_bytes=600, **kind)
    place = view.order.locate(np.arange(300))
    for n, (source, shard, sample) in enumerate(zip(place.source, place.shard, place.sample, strict=True)):
        row = view.row(int(source), int(shard), int(sample))
        found = [tuple(row[name].tolist()) for name in ("input", "labels", "positions") if name in row]
        assert found == [part for part in expected[n] if part]


@pytest.mark.parametrize("packed", KINDS[:3:2], indirect=True)
def test_the_parts_of_a_packed_sample_are_its_pieces(made, packed):
    view = view_of(packed)
    for sample in view.samples(range(300)):
        pieces = [tokens_of(made, sample.source, part) for part in sample.parts]
        place = view.order.locate(np.array([sample.n]))
        row = view.row(*(int(of[0]) for of in (place.source, place.shard, place.sample)))
        inputs = [token for piece in pieces for token in piece[:-1]]
        labels = [token for piece in pieces for token in piece[1:]]
        assert row["input"][: len(inputs)].tolist() == inputs
        assert row["labels"].tolist() == labels + [-100] * (8 - len(labels))


@pytest.mark.parametrize("packed", [{"packing": "concat"}, *KINDS[:3:2]], indirect=True)
def test_find_is_the_way_back_from_every_document_in_every_epoch(made, packed):
    view = view_of(packed)
    shown = defaultdict(set)
    samples = view.samples(range(700))
    for sample in samples:
        for part in sample.parts:
            shown[sample.source, part.record].add((sample.n, sample.epoch, sample.shard, sample.sample, part))
    for name in made.lengths:
        for record, document in enumerate(made.documents(name)):
            ((source, place),) = view.find("0.jsonl", record, name)
            assert place.stop - place.start == len(document)
            found = {
                (o.n, o.epoch, o.shard, o.sample, part)
                for o in view.occurrences(source, place, range(30))
                for part in o.parts
                if o.n is not None and o.n < 700
            }
            assert found == shown[name, record]
            assert found or len(document) < 2 or name == "code"


def test_a_source_that_a_stage_turns_off_has_no_numbers_behind(config):
    view = view_of(config)
    ((source, place),) = view.find("0.jsonl", 3, "code")
    assert {o.n for o in view.occurrences(source, place, range(50, 52))} == {None}


def test_a_rank_is_shown_what_it_reads(made, config):
    view = view_of(config)
    skip = [(30, 40), (145, 152)]
    for place in (Place(1, 12), Place(5, 2), Place(3, 3), Place(12, 1)):
        run = Run(builder(made, **MIXED, shard_bytes=600, skip=skip), place)
        expected = expected_mix(made, **MIXED, shard_bytes=600)
        for step in range(1, 16):
            rows = run.step_by_rank()
            numbers = numbers_of_step(view, step, basis_of_config(view))
            for rank in range(place.dp):
                dealt = list(deal(numbers, place.local, place.dp, rank))
                assert [expected[r.n] for r in dealt] == rows[rank]
                assert [(r.micro_batch, r.row) for r in dealt] == [divmod(i, place.local) for i in range(len(dealt))]
            assert run.cursor == numbers.numbers[-1] + 1


def test_steps_over_an_interval_are_those_that_take_from_it(config):
    view = view_of(config)
    basis = basis_of_config(view)
    by_step = {step: numbers_of_step(view, step, basis).numbers.tolist() for step in range(1, 30)}
    for start, stop in [(0, 12), (0, 13), (11, 12), (29, 41), (30, 40), (140, 160), (35, 38)]:
        wanted = {step for step, numbers in by_step.items() if any(start <= n < stop for n in numbers)}
        assert wanted <= {step.step for step in steps_over(view, start, stop, basis)}


def test_the_description_is_the_loader_s(made, config):
    loader = builder(made, **MIXED, shard_bytes=600, skip=[(30, 40), (145, 152)])(Place(1, 12), 0)
    assert view_of(config).description == loader.state_dict()[ORDER]


def test_finite_data_ends(tmp_path, made):
    path = write_config(tmp_path / "run.toml", made, epochs=2)
    prepare(path)
    view = view_of(path)
    run = Run(builder(made, infinite=False, epochs=2), Place(2, 6))
    steps = 0
    while rows := run.step():
        steps += 1
        assert len(numbers_of_step(view, steps, basis_of_config(view)).numbers) == len(rows)
    with pytest.raises(ConfigError, match=rf"step {steps + 1}: the data ends at sample {view.end}"):
        numbers_of_step(view, steps + 1, basis_of_config(view))
    ((source, place),) = view.find("0.jsonl", 0, "web")
    assert all((o.n is None) == (o.epoch >= 2) for o in view.occurrences(source, place, range(4)))


def test_looking_needs_no_texts_and_writes_nothing(made, config, tmp_path):
    before = files_under(tmp_path)
    shown = view_of(config).samples(range(50))
    assert files_under(tmp_path) == before
    made.folder.joinpath("texts").rename(tmp_path / "elsewhere")
    assert view_of(config).samples(range(50)) == shown


def test_a_store_that_is_not_there_is_not_built(tmp_path, made):
    path = write_config(tmp_path / "run.toml", made)
    before = files_under(tmp_path)
    with pytest.raises(
        StoreError, match=r"is no finished store, and looking builds none\. .*zephon_patches.cli prepare"
    ):
        view_of(path)
    assert files_under(tmp_path) == before


def test_edited_texts_are_told(tmp_path, made, config, caplog):
    (made.texts("web") / "0.jsonl").touch()
    view_of(config)
    assert "source 'web': its files have other times" in caplog.text


@pytest.mark.parametrize("write", [stores.write_mixed, stores.write_compressed])
def test_records_of_every_kind_of_file_are_where_they_are_said_to_be(tmp_path, write):
    folder = write(tmp_path)
    stores.open_store(folder)
    path = tmp_path / "run.toml"
    path.write_text(
        f'[data]\ncache_dir = "{folder / "cache"}"\nshard_bytes = {stores.SHARD_BYTES}\n'
        f'[[data.sources]]\nname = "web"\npath = "{folder / "texts"}"\n'
        f'[model]\nhf_assets_path = "{folder / "tokenizer"}"\n[training]\nseq_len = 8\n'
    )
    view, seen = view_of(path), set()
    for sample in view.samples(range(view.order.num_samples)):
        for part in sample.parts:
            words = [*stores.text_at(folder / "texts", part.file, part.record).split(), "<eos>"]
            assert part.tokens == len(words)
            ((source, place),) = view.find(part.file, part.record)
            start = place.start
            ids = view.stores[source].tokens(place.shard, start + part.start, start + part.stop)
            assert view.tokenizer.decode(ids.tolist()).split() == words[part.start : part.stop]
            seen.add((part.file, part.record))
    store = view.stores[0]
    assert seen == set(stores.places_of(stores.Manifest.read(store.folder), store.folder))


def test_a_text_begins_as_the_sample_does(made, config):
    view = view_of(config)
    for sample in view.samples(range(60)):
        whole = [t for part in sample.parts for t in tokens_of(made, sample.source, part)]
        assert view.text(sample, 5).split() == view.tokenizer.decode(whole[:5]).split()
        assert view.text(sample, 100).split() == view.tokenizer.decode(whole).split()


@pytest.mark.parametrize(
    "file, record, source, text",
    [
        ("1.jsonl", 0, None, "no file of that name in sources code, web; .* such as '0.jsonl'"),
        ("0.jsonl", 0, None, "0.jsonl of source 'code', 0.jsonl of source 'web' have that name"),
        ("x0.jsonl", 0, "web", "no file of that name in source web"),
    ],
)
def test_names_that_fit_none_or_several_are_refused(config, file, record, source, text):
    with pytest.raises(InputError, match=text):
        view_of(config).find(file, record, source)


def test_a_record_behind_the_end_is_refused_and_a_path_is_a_name(made, config):
    view = view_of(config)
    with pytest.raises(StoreError, match=r"0.jsonl has 60 records, counted from 0, and no record 60"):
        view.find("0.jsonl", 60, "web")
    assert view.find(str(made.texts("web") / "0.jsonl"), 59, "web") == view.find("0.jsonl", 59, "web")


def test_without_a_fixed_batch_steps_need_something_to_count_from(tmp_path, made):
    path = write_config(tmp_path / "run.toml", made, batch=-1)
    prepare(path)
    with pytest.raises(ConfigError, match=r"training.global_batch_size is not set.*--run RUN"):
        basis_of_config(view_of(path))


@pytest.mark.parametrize("change", ["seq_len = 0", "seq_len = true", "global_batch_size = 0", 'local_batch_size = "2"'])
def test_settings_that_cannot_be_are_named(tmp_path, made, change):
    path = write_config(tmp_path / "run.toml", made)
    key = change.partition(" ")[0]
    lines = [line for line in path.read_text().splitlines() if not line.startswith(key)]
    path.write_text("\n".join([*lines, change]) + "\n")
    with pytest.raises(ConfigError, match=rf"run.toml: \[training\]: {key} = "):
        read_training_config(path)


def test_a_far_place_costs_what_a_near_one_does(made, config, monkeypatch):
    """Counted in indexes that are read: one for each shard that the samples are of."""
    view = view_of(config)
    read = []
    for store in view.stores:
        monkeypatch.setattr(store, "_layout", _counted(store._layout, read))
    view.samples(range(10**15, 10**15 + 12))
    assert len(set(read)) <= 12


def _counted(function, calls):
    def call(shard):
        calls.append(shard)
        return function(shard)

    return call


@pytest.mark.parametrize("packing", ["best_fit", "document"])
def test_a_row_of_conversations_has_the_labels_of_the_assistant_alone(tmp_path, packing):
    test_chat.write_tokenizer(tmp_path / "tokenizer")
    turns = [("yes", "no and kind"), ("you and no", "yes"), ("kind " * 9, "no " * 12), ("no", "you " * 5)]
    for number, (asked, answered) in enumerate(turns * 5):
        chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered * (1 + number % 3)}]
        test_chat.write_chats(tmp_path, chat, name=f"texts/{number}.jsonl")
    path = tmp_path / "run.toml"
    path.write_text(
        f'[data]\ncache_dir = "{tmp_path}/cache"\npacking = "{packing}"\npositions = true\n'
        f'[[data.sources]]\nname = "chat"\npath = "{tmp_path}/texts"\nchat_field = "messages"\n'
        f'[model]\nhf_assets_path = "{tmp_path}/tokenizer"\n[training]\nseq_len = 24\nglobal_batch_size = 4\n'
    )
    prepare(path)
    config = read_training_config(path)
    loader = build_loader(
        config.data, config.tokenizer, seq_len=24, global_batch_size=4, local_batch_size=1, infinite=False
    )
    view = view_of(path)
    masked = 0
    for n, (inputs, labels) in zip(range(view.order.end(1)), loader, strict=False):
        place = view.order.locate(np.array([n]))
        row = view.row(*(int(of[0]) for of in (place.source, place.shard, place.sample)))
        expected = {name: array[0].tolist() for name, array in {**inputs, "labels": labels}.items()}
        assert {name: array.tolist() for name, array in row.items()} == expected
        masked += expected["labels"].count(-100)
    assert masked
