"""What samples hold, through the loader: each packing, positions, boundaries; plans found, made, lost and damaged."""

import itertools
import json
import os
import pickle
import stat
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpora import D60, D240, make_corpus, make_sources
from tests.reference import IGNORE
from tests.resume import Place, Run, builder, check_chain, check_every_stop, check_steps, expected_stream, rows_of
from tests.strategies import chains, document_lengths, shuffle_shards
from zephon_patches import build_loader
from zephon_patches.errors import InputError, StateError, StoreError
from zephon_patches.loader import plans as plans_module
from zephon_patches.loader.build import build_evaluation_loader
from zephon_patches.loader.plans import open_plans
from zephon_patches.loader.state import describe_order
from zephon_patches.samples import plan_list
from zephon_patches.samples.plan_file import PLANNERS, open_plan
from zephon_patches.store.manifest import Manifest, ShardRecord
from zephon_patches.store.reader import TokenStore

pytestmark = pytest.mark.usefixtures("small_blocks")

KINDS = [
    {"packing": "best_fit"},
    {"packing": "best_fit", "positions": True},
    {"packing": "document", "positions": True},
    {"packing": "concat", "positions": True},
    {"packing": "concat", "mask_boundaries": True},
    {"packing": "concat", "positions": True, "mask_boundaries": True},
]
kinds = st.sampled_from(KINDS)
SHARDS = {"shard_bytes": 700, "shuffle_shards": 2, "seed": 1}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d60"), D60, files=3)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    numbers = itertools.count()
    parent = tmp_path_factory.mktemp("fresh")
    return lambda: parent / str(next(numbers))


def epoch_of(corpus, seq_len, **settings):
    """All rows of one epoch, read as they come."""
    loader = builder(corpus, seq_len=seq_len, infinite=False, **settings)(Place(1, 1, 1), 0)
    return [row for item in loader for row in rows_of(item)]


# --- what comes ---


@given(document_lengths, st.booleans(), st.integers(1, 12), shuffle_shards, st.sampled_from([0, 1, 60, 200]), kinds)
@settings(max_examples=60)
def test_samples_are_the_reference_s_for_any_documents(fresh, lengths, eos, seq_len, shuffle, shard_bytes, kind):
    corpus = make_corpus(fresh(), lengths, eos)
    order = {"shuffle_shards": shuffle, "shard_bytes": shard_bytes, **kind}
    expected = expected_stream(corpus, seq_len=seq_len, **order)
    if not expected.epoch_samples:
        with pytest.raises(InputError, match="give no sample"):
            builder(corpus, seq_len=seq_len, **order)(Place(1, 1, 1), 0)
        return
    rows = epoch_of(corpus, seq_len, **order)
    assert rows == expected.rows(0, expected.epoch_samples)


@given(document_lengths, st.booleans(), st.integers(1, 12), shuffle_shards, st.sampled_from([0, 1, 60]), kinds)
@settings(max_examples=60)
def test_law_3_each_token_of_a_document_but_its_first_is_a_label_once_an_epoch(
    fresh, lengths, eos, seq_len, shuffle, shard_bytes, kind
):
    """Of packings that keep documents whole, and of concat with masked boundaries."""
    if kind["packing"] == "concat" and "mask_boundaries" not in kind:
        return
    corpus = make_corpus(fresh(), lengths, eos)
    order = {"shuffle_shards": shuffle, "shard_bytes": shard_bytes, **kind}
    if not expected_stream(corpus, seq_len=seq_len, **order).epoch_samples:
        return
    rows = epoch_of(corpus, seq_len, **order)
    labels = Counter(label for row in rows for label in row.labels if label != IGNORE)
    assert labels == Counter(token for tokens in corpus.documents for token in tokens[1:])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_run_is_stopped_at_every_step_and_goes_on_at_other_sizes(corpus, kind):
    build = builder(corpus, **SHARDS, **kind)
    check_every_stop(build, Place(2, 3), [Place(3, 4), Place(1, 12), Place(5, 2), Place(12, 1)], 9)


@given(kinds, chains())
@settings(max_examples=25)
def test_a_chain_of_resumes_with_other_batches_is_the_reference_s(corpus, kind, links):
    check_chain(builder(corpus, **SHARDS, **kind), links, expected_stream(corpus, **SHARDS, **kind))


@pytest.mark.parametrize("context", ["spawn", "fork"])
def test_workers_give_the_same(corpus, context):
    kind = {"packing": "best_fit", "positions": True}
    build = builder(corpus, **SHARDS, **kind, loader={"multiprocessing_context": context})
    check_steps(Run(build, Place(1, 5, 12, workers=2)), expected_stream(corpus, **SHARDS, **kind), 3)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_items_are_fresh_int64_tensors_of_one_shape_and_padding_rows_have_no_label(corpus, kind):
    loader = builder(corpus, **kind)(Place(1, 5, 12), 0)
    items = [item for item, _ in zip(loader, range(3), strict=False)]
    for inputs, labels in items:
        assert inputs.keys() == ({"input", "positions"} if kind.get("positions") else {"input"})
        for tensor in (*inputs.values(), labels):
            assert (tensor.shape, tensor.dtype) == ((5, 8), torch.int64)
    inputs, labels = items[-1]
    assert (labels[2:] == IGNORE).all()
    assert not (labels[:2] == IGNORE).all(1).any()
    assert all(torch.equal(inputs[key][i], items[0][0][key][0]) for key in inputs for i in (2, 3, 4))


def test_validation_reads_every_packed_sample_once(corpus):
    kind = {"packing": "document", "positions": True}
    rows = []
    for rank in range(3):
        loader = build_evaluation_loader(
            corpus.config(**kind), corpus.tokenizer, seq_len=8, local_batch_size=4, dp_rank=rank, dp_size=3
        )
        rows += [row for item in loader for row in rows_of(item) if any(label != IGNORE for label in row.labels)]
    expected = expected_stream(corpus, **kind)
    assert sorted(rows) == sorted(expected.rows(0, expected.epoch_samples))


def test_a_mixture_of_stores_of_both_types_packs_in_one_batch(tmp_path):
    made = make_sources(tmp_path, web=D60[:20], code=[9] * 20)
    config = made.config(packing="best_fit", weights={"web": 1, "code": 1})
    loader = build_loader(config, made.tokenizer, seq_len=8, global_batch_size=6, local_batch_size=6)
    _, labels = next(iter(loader))
    first = made.documents("code")[0][0]
    in_code = [(row[row != IGNORE] >= first).all() for row in labels]
    assert sum(map(bool, in_code)) == 3


# --- steps without a label ---


def test_a_rank_whose_labels_are_all_masked_is_known(tmp_path):
    corpus = make_corpus(tmp_path, [1] * 30 + [9] * 3, eos=False)
    loader = builder(corpus, shuffle_shards=0, mask_boundaries=True)(Place(1, 2, 2), 0)
    assert loader.may_be_without_labels
    found = []
    for _ in zip(range(2), loader, strict=False):
        found.append(loader.has_labels_in_last_step)
    assert found == [False, True]
    assert not builder(corpus)(Place(1, 2, 2), 0).may_be_without_labels
    assert builder(corpus, infinite=False)(Place(1, 2, 2), 0).may_be_without_labels


# --- the state ---


def test_a_state_of_before_these_settings_is_loaded_with_their_defaults_and_has_the_same_text(corpus):
    loader = builder(corpus)(Place(1, 4), 0)
    order = json.loads(loader.state_dict()["order"])
    assert order["packing"] == "concat"
    assert not {"positions", "mask_boundaries"} & order.keys()
    assert "plans" not in order["sources"][0]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {"packing": "best_fit"}, "data.packing: 'concat' in the checkpoint, 'best_fit' now"),
        ({"packing": "best_fit"}, {"packing": "document"}, "data.packing: 'best_fit' in the checkpoint, 'document'"),
        ({}, {"positions": True}, "data.positions: False in the checkpoint, True now"),
        ({"mask_boundaries": True}, {}, "data.mask_boundaries: True in the checkpoint, False now"),
    ],
)
def test_another_content_of_samples_is_told_and_can_be_accepted(corpus, before, now, said):
    state = Run(builder(corpus, **before), Place(1, 4)).state()
    with pytest.raises(StateError) as caught:
        Run(builder(corpus, **now), Place(1, 4)).load({**state, "cursor": 24})
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert len(lines) == 1
    assert said in lines[0]
    fingerprint = str(caught.value).partition('data.accept_change = "')[2].partition('"')[0]
    Run(builder(corpus, accept_change=fingerprint, **now), Place(1, 4)).load({**state, "cursor": 24})


def test_plans_that_another_version_made_are_told(corpus):
    run = Run(builder(corpus, packing="best_fit"), Place(1, 4))
    state = run.state()
    order = json.loads(state["order"])
    order["sources"][0]["plans"] = "0" * 16
    content = {key: value for key, value in order.items() if key not in ("format", "fingerprint", "global_batch_size")}
    state = {**state, "order": describe_order(content, 12)}
    with pytest.raises(StateError, match=r"fingerprint of its plans\): 0000000000000000 in the checkpoint"):
        run.load(state)


# --- plans: found, made, lost, damaged ---


@pytest.fixture
def store(tmp_path):
    corpus = make_corpus(tmp_path, D240, files=2)
    builder(corpus, shard_bytes=5000)(Place(1, 1, 1), 0)
    [folder] = (tmp_path / "cache" / "web").iterdir()
    return corpus, TokenStore(folder)


def plan_files(store):
    return {path.name: path.read_bytes() for path in store.folder.iterdir() if "best_fit" in path.name}


def test_plans_are_made_once_and_opening_reads_the_list_alone(store, monkeypatch):
    _, store = store
    made = open_plans(store, "web", "best_fit", 8)
    before = plan_files(store)
    assert sorted(before) == sorted(
        ["best_fit-8.json", *(f"{store.record(i).name}.best_fit-8" for i in range(len(store.tokens_per_shard)))]
    )
    assert not (store.folder / "units").exists()
    for shard in range(len(store.tokens_per_shard)):
        plan = open_plan(store.folder, store.record(shard), "best_fit", 8)
        found = (int(made.samples[shard]), int(made.labels[shard]), int(made.left_out[shard]))
        assert found == (plan.num_samples, plan.num_labels, plan.left_out)
    assert 0.9 < made.fill <= 1
    monkeypatch.setattr(plans_module, "_make", None)
    monkeypatch.setattr(plan_list, "ensure_plan", None)
    again = open_plans(store, "web", "best_fit", 8)
    assert again.checksums == made.checksums
    assert (again.samples == made.samples).all()
    assert plan_files(store) == before


def test_several_make_the_plans_of_a_store_at_once(store):
    _, store = store
    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(lambda n: open_plans(store, "web", "best_fit", 8, n % 2 == 0), range(12)))
    assert len({plans.fingerprint for plans in made}) == 1
    assert not [path for path in store.folder.iterdir() if path.name.endswith(".tmp")]


@pytest.mark.parametrize("damage", ["list cut", "list of other data", "list lost", "list of numbers", "plan damaged"])
def test_a_damaged_or_stale_plan_is_never_used(store, damage):
    corpus, store = store
    open_plans(store, "web", "best_fit", 8)
    good = plan_files(store)
    listed = store.folder / "best_fit-8.json"
    plan = store.folder / f"{store.record(1).name}.best_fit-8"
    if damage == "list cut":
        listed.write_bytes(good[listed.name][:-20])
    elif damage == "list of other data":
        entries = [plan_list.PlanEntry(1, 1, 0, "0" * 16)] * len(store.tokens_per_shard)
        plan_list.write_list(store.folder, "another", "best_fit", 8, entries)
    elif damage == "list lost":
        listed.unlink()
    elif damage == "list of numbers":
        listed.write_text("[1, 2]")
    else:
        plan.write_bytes(good[plan.name][:-1] + b"\x7f")
    expected = expected_stream(corpus, shard_bytes=5000, packing="best_fit")
    check_steps(Run(builder(corpus, shard_bytes=5000, packing="best_fit"), Place(1, 12)), expected, 8)
    assert plan_files(store) == good


@pytest.mark.parametrize("wrong", ["samples", "checksum"])
def test_a_list_that_fits_with_a_plan_that_another_version_made_is_an_error(store, wrong):
    corpus, store = store
    open_plans(store, "web", "best_fit", 8)
    entries = [plan_list.entry_of(store.folder, store, i, "best_fit", 8) for i in range(len(store.tokens_per_shard))]
    if wrong == "samples":
        entries = [entry._replace(samples=entry.samples + 1) for entry in entries]
    else:
        entries[0] = entries[0]._replace(checksum="0" * 16)
    plan_list.write_list(store.folder, store.data_fingerprint, "best_fit", 8, entries)
    said = "samples and the checksum" if wrong == "samples" else "and 0000000000000000"
    with pytest.raises(StoreError, match=rf"{said}.*: another version .*remove .*best_fit-8.json"):
        epoch_of(corpus, 8, shard_bytes=5000, packing="best_fit")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_store_is_read_if_its_plans_are_there_and_else_told(store):
    corpus, store = store
    mode = store.folder.stat().st_mode
    open_plans(store, "web", "best_fit", 8)
    os.chmod(store.folder, mode & ~stat.S_IWUSR)
    try:
        assert epoch_of(corpus, 8, shard_bytes=5000, packing="best_fit")
        with pytest.raises(
            StoreError, match=r"at seq_len 9 are missing, and cannot be made here .*zephon-data prepare"
        ):
            epoch_of(corpus, 9, shard_bytes=5000, packing="best_fit")
    finally:
        os.chmod(store.folder, mode)


def test_a_write_that_fails_is_an_error_that_says_what_to_do(store, monkeypatch):
    corpus, store = store

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("zephon_patches.samples.plan_file.write_plan", full)
    with pytest.raises(StoreError, match=r"cannot be made here .*No space left.*--packing best_fit --seq-len 8"):
        open_plans(store, "web", "best_fit", 8)
    monkeypatch.undo()
    assert open_plans(store, "web", "best_fit", 8).fill > 0.9
    path = store.folder / f"{store.record(0).name}.best_fit-8"
    path.unlink()
    monkeypatch.setattr("zephon_patches.samples.plan_file.write_plan", full)
    with pytest.raises(StoreError, match=r"is lost or damaged, and cannot be made again here .No space left"):
        epoch_of(corpus, 8, shard_bytes=5000, packing="best_fit")


def test_what_is_left_out_and_the_fill_are_logged(tmp_path, caplog):
    caplog.set_level("INFO")
    corpus = make_corpus(tmp_path, [5, 2, 3, 1], eos=False)
    builder(corpus, seq_len=4, packing="best_fit")(Place(1, 1, 1), 0)
    said = "source 'web': packing best_fit fills 87.50 % of the places of 2 samples; 1 documents have no label"
    assert said in caplog.text


@pytest.mark.parametrize("packing", list(PLANNERS))
def test_verify_of_plans_finds_what_is_damaged(store, packing):
    _, store = store
    open_plans(store, "web", packing, 8)
    assert plan_list.damaged_plans(store.folder) == []
    plan = store.folder / f"{store.record(1).name}.{packing}-8"
    plan.write_bytes(b"x" + plan.read_bytes()[1:])
    (store.folder / f"{packing}-8.json").write_text("{")
    found = dict(plan_list.damaged_plans(store.folder))
    assert found.keys() == {plan, store.folder / f"{packing}-8.json"}
    assert "not JSON" in found[store.folder / f"{packing}-8.json"]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_state_stays_small(corpus, kind):
    assert len(json.dumps(builder(corpus, **kind)(Place(1, 4), 0).state_dict())) < 1024


def test_opening_ten_thousand_shards_reads_no_plan_and_keeps_little(tmp_path, monkeypatch):
    count = 10_000
    records = [ShardRecord(f"{n:06d}-000", 2, 20, "0" * 16, f"{n:016x}", "0" * 16) for n in range(count)]
    (tmp_path / "manifest.json").write_bytes(Manifest({}, "<u2", [], records).to_json())
    store = TokenStore(tmp_path)
    entries = [plan_list.PlanEntry(3, 18, 0, f"{n:016x}") for n in range(count)]
    plan_list.write_list(tmp_path, store.data_fingerprint, "best_fit", 8, entries)
    opened = []
    monkeypatch.setattr(plan_list, "ensure_plan", lambda *arguments: opened.append(arguments))
    plans = open_plans(store, "web", "best_fit", 8)
    assert int(plans.samples.sum()) == 3 * count
    assert not opened
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best_fit-8.json", "manifest.json"]
    assert len(pickle.dumps(plans)) < 100 * count
