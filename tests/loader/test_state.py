"""Law 4: the state is one number and a description of what it counts in."""

import json
import pickle

import pytest

from tests.corpora import D60, make_corpus
from tests.resume import Place, Run, builder, check_steps, expected_stream
from zephon_patches.errors import StateError
from zephon_patches.keys import canonical_json, fingerprint
from zephon_patches.loader.state import check_order, describe_order, read_state

ORDER = {
    "packing": "concat",
    "seed": 0,
    "seq_len": 8,
    "shard_bytes": 0,
    "shuffle_shards": 256,
    "sources": [{"data": "d", "name": "web", "recipe": "r", "samples": 83, "tokens": 660}],
    "tokenizer": "t",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("d60"), D60)


ALONE = Place(1, 4)


def a_loader(corpus, place=ALONE, rank=0, **settings):
    return builder(corpus, **settings)(place, rank)


# --- what it is ---


def test_it_has_two_keys_of_plain_types(corpus):
    state = a_loader(corpus).state_dict()
    assert {key: type(value) for key, value in state.items()} == {"cursor": int, "order": str}
    iterator = iter(loader := a_loader(corpus, Place(1, 12)))
    next(iterator)
    assert type(loader.state_dict()["cursor"]) is int


def test_it_is_the_same_bytes_on_every_rank_and_for_1_to_64_ranks(corpus, small_blocks):
    states = set()
    for dp in range(1, 65):
        for rank in {0, dp // 2, dp - 1}:
            loader = a_loader(corpus, Place(dp, 1 + dp % 3, 64), rank)
            for _, _ in zip(range(loader.micro_batches_per_step), loader, strict=False):
                pass
            assert loader.cursor == 64
            states.add(pickle.dumps(loader.state_dict()))
    assert len(states) == 1
    assert len(states.pop()) < 1024


def test_local_batch_workers_and_place_of_the_data_are_not_in_it(corpus, tmp_path):
    elsewhere = make_corpus(tmp_path, D60)
    states = {
        canonical_json(a_loader(c, Place(1, local, 12, workers)).state_dict())
        for c in (corpus, elsewhere)
        for local, workers in ((1, 0), (5, 2))
    }
    assert len(states) == 1
    assert str(corpus.folder.name) not in states.pop()


def test_its_size_is_the_same_after_one_step_and_after_10_000(corpus):
    loader = a_loader(corpus, Place(1, 1, 1))
    iterator = iter(loader)
    next(iterator)
    first = loader.state_dict()
    for _ in range(9_999):
        next(iterator)
    last = loader.state_dict()
    assert last["cursor"] == 10_000
    assert last["order"] == first["order"]
    assert len(pickle.dumps(last)) - len(pickle.dumps(first)) < 8
    loader.load_state_dict({**last, "cursor": 10**15})
    assert len(pickle.dumps(loader.state_dict())) < 1024


def test_the_order_is_canonical_json_that_a_person_can_read(corpus):
    text = a_loader(corpus, seed=5).state_dict()["order"]
    order = json.loads(text)
    assert canonical_json(order) == text
    (source,) = order["sources"]
    assert (order["format"], order["seed"], order["seq_len"], order["global_batch_size"]) == (1, 5, 8, 12)
    assert (source["name"], source["samples"], source["tokens"]) == ("web", 83, 660)
    assert not [key for key in [*order, *source] if "rank" in key or "dp" in key or "worker" in key or "path" in key]


def test_golden_order_entry():
    # Another text here makes checkpoints of earlier versions unreadable, or has them refused as another order.
    assert describe_order(ORDER, 12) == (
        '{"fingerprint":"abd85813e27ba457","format":1,"global_batch_size":12,"packing":"concat","seed":0,"seq_len":8,'
        '"shard_bytes":0,"shuffle_shards":256,"sources":[{"data":"d","name":"web","recipe":"r","samples":83,'
        '"tokens":660}],"tokenizer":"t"}'
    )


def test_the_fingerprint_stands_for_all_but_the_batch_size():
    def print_of(order, batch=12):
        return json.loads(describe_order(order, batch))["fingerprint"]

    assert print_of(ORDER, 24) == print_of(ORDER)
    for key in ORDER:
        assert print_of({**ORDER, key: "other"}) != print_of(ORDER)


# --- when it is asked for ---


def test_it_is_full_at_birth(corpus):
    loader = a_loader(corpus)
    state = loader.state_dict()
    assert state["cursor"] == 0
    assert json.loads(state["order"])["fingerprint"]
    iter(loader)
    assert loader.state_dict() == state


def test_in_mid_step_it_is_the_start_of_the_step(corpus):
    loader = a_loader(corpus)  # 3 items a step
    cursors = []
    for _, _ in zip(range(7), loader, strict=False):
        cursors.append((loader.state_dict()["cursor"], loader.delivered_in_step))
    assert cursors == [(0, 1), (0, 2), (12, 0), (12, 1), (12, 2), (24, 0), (24, 1)]


def test_it_is_a_frozen_copy(corpus):
    loader = a_loader(corpus, Place(1, 12))
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    before = repr(state), pickle.dumps(state)
    for _ in range(5):
        next(iterator)
    assert (repr(state), pickle.dumps(state)) == before
    state["cursor"] = 999  # nor does the loader share it
    state["order"] = "?"
    assert loader.state_dict()["cursor"] == 72
    assert loader.state_dict()["order"] != "?"


def test_asking_for_it_moves_nothing(corpus):
    asked, quiet = a_loader(corpus), a_loader(corpus)
    for _, one, other in zip(range(30), asked, quiet, strict=False):
        for _ in range(3):
            asked.state_dict()
        assert one[0]["input"].tolist() == other[0]["input"].tolist()


def test_it_is_absolute_and_not_counted_from_the_last_load(corpus):
    loader = a_loader(corpus, Place(1, 12))
    loader.load_state_dict({**loader.state_dict(), "cursor": 600})
    assert loader.state_dict()["cursor"] == 600
    next(iter(loader))
    assert loader.state_dict()["cursor"] == 612


def test_loading_its_own_state_changes_no_byte(corpus):
    loader = a_loader(corpus)
    for cursor in (0, 7, 12, 10**15):
        state = {**loader.state_dict(), "cursor": cursor}
        loader.load_state_dict(state)
        assert pickle.dumps(loader.state_dict()) == pickle.dumps(state)


# --- what is refused ---


def whole() -> dict:
    return {"cursor": 84, "order": describe_order(ORDER, 12)}


def test_a_whole_state_is_read():
    cursor, order = read_state(whole())
    assert cursor == 84
    assert {key: order[key] for key in ORDER} == ORDER


@pytest.mark.parametrize(
    "state, text",
    [
        (None, "found NoneType, expected a dict"),
        ([84], "found list, expected a dict"),
        (b"\x80\x04", "found bytes, expected a dict"),
        ({}, "no 'cursor' in it .found nothing."),
        ({"cursor": 84}, "no 'order' in it .found 'cursor'."),
        ({"dp_rank_0": b"", "world_size": 4}, "no 'cursor' in it .found 'dp_rank_0', 'world_size'."),
        (whole() | {"cursor": -1}, "cursor is -1"),
        (whole() | {"cursor": "84"}, "cursor is '84', expected an integer"),
        (whole() | {"cursor": 84.5}, "cursor is 84.5, expected an integer"),
        (whole() | {"cursor": None}, "cursor is None"),
        (whole() | {"cursor": True}, "cursor is True"),
        (whole() | {"cursor": 2**63}, "cursor is 9,223,372,036,854,775,808"),
        (whole() | {"cursor": 16**5000}, "cursor is an integer of 20,001 bits, expected 0 to"),
        (whole() | {"cursor": [[]]}, "cursor is of type list"),
        (whole() | {"order": None}, "order is None, expected a JSON object"),
        (whole() | {"order": whole()["order"][:-20]}, "the checkpoint is damaged"),
        (whole() | {"order": "[1]"}, "expected a JSON object"),
        (whole() | {"order": b"{}"}, "expected a JSON object"),
        (whole() | {"order": "{}"}, "order has format None"),
        (whole() | {"order": whole()["order"].replace('"format":1', '"format":2')}, "order has format 2, this version"),
        (whole() | {"order": whole()["order"].replace('"seed":0', '"seed":1')}, "it was edited or damaged"),
        (whole() | {"order": whole()["order"].replace('"fingerprint"', '"finger"')}, "it was edited or damaged"),
    ],
)
def test_what_is_no_whole_state_is_refused_by_what_was_found(state, text):
    with pytest.raises(StateError, match=text):
        read_state(state)


def nested(depth, innermost="1"):
    return '{"a":' * depth + innermost + "}" * depth


@pytest.mark.parametrize("order", [nested(30), nested(900), nested(100_000), "[" * 100_000])
def test_an_order_too_deep_to_be_shown_is_damage(order):
    for text in (order, f'{{"format":1,"seed":{order}}}'):
        with pytest.raises(StateError, match="expected a JSON object; the checkpoint is damaged"):
            read_state({"cursor": 1, "order": text})


def test_a_number_without_a_hash_is_damage():
    with pytest.raises(StateError, match="has fingerprint none, but .* edited or damaged"):
        read_state({"cursor": 1, "order": whole()["order"].replace('"seed":0', '"seed":1e999')})


@pytest.mark.parametrize(
    "sources",
    [None, "other", {}, [3], [{}], [{**ORDER["sources"][0], "name": ["web"]}], [{"name": "web", "data": "d"}]],
)
def test_sources_of_another_form_are_refused_also_with_a_right_fingerprint(sources):
    order = {key: value for key, value in ORDER.items() if key != "sources"}
    order |= {} if sources is None else {"sources": sources}
    with pytest.raises(StateError, match="sources in the order is .* expected a list of objects with name, recipe"):
        read_state({"cursor": 1, "order": describe_order(order, 1)})


@pytest.mark.parametrize("key", [key for key in ORDER if key != "sources"])
def test_a_setting_that_lacks_in_the_state_is_a_difference(key):
    saved = json.loads(describe_order({k: v for k, v in ORDER.items() if k != key}, 12))
    with pytest.raises(StateError, match=f"{key}.*: None in the checkpoint"):
        check_order(saved, json.loads(describe_order(ORDER, 12)), 1)


@pytest.mark.parametrize(
    "key, label",
    [("seed", "data.seed"), ("seq_len", "training.seq_len"), ("tokenizer", "tokenizer"), ("packing", "packing")],
)
def test_a_changed_setting_is_named_with_both_values(key, label):
    saved, present = json.loads(describe_order(ORDER, 12)), json.loads(describe_order({**ORDER, key: "new"}, 12))
    with pytest.raises(StateError) as error:
        check_order(saved, present, 84)
    text = str(error.value)
    assert "the state at sample 84 counts in another order of data" in text
    assert f"{label}" in text
    assert f"{ORDER[key]!r} in the checkpoint, 'new' now" in text


def test_all_changes_are_named_at_once():
    present = {**ORDER, "seed": 1, "shuffle_shards": 2, "sources": [{**ORDER["sources"][0], "tokens": 700}]}
    with pytest.raises(StateError) as error:
        check_order(json.loads(describe_order(ORDER, 12)), json.loads(describe_order(present, 12)), 84)
    for line in (
        "data.seed: 0 in the checkpoint, 1 now",
        "data.shuffle_shards: 256 in the checkpoint, 2 now",
        "source web: tokens: 660 in the checkpoint, 700 now",
    ):
        assert line in str(error.value)
    assert "samples:" not in str(error.value)


def test_another_batch_size_is_no_change():
    check_order(json.loads(describe_order(ORDER, 12)), json.loads(describe_order(ORDER, 24)), 84)


@pytest.mark.parametrize("state", [None, {}, {"cursor": -1, "order": "{}"}])
def test_a_refused_load_leaves_the_loader_as_it_was(corpus, state):
    run = Run(builder(corpus), Place(1, 4))
    check_steps(run, expected_stream(corpus), 2)
    with pytest.raises(StateError):
        run.load(state)
    assert run.cursor == 24
    check_steps(run, expected_stream(corpus), 2)


@pytest.mark.parametrize("batch", [None, "12", 12.0, True, 0])
def test_a_batch_size_that_is_no_number_of_samples_is_refused_though_no_fingerprint_covers_it(corpus, batch):
    loader = a_loader(corpus)
    order = json.loads(loader.state_dict()["order"]) | {"global_batch_size": batch}
    with pytest.raises(StateError, match="global_batch_size in the order is"):
        loader.load_state_dict({"cursor": 84, "order": canonical_json(order)})
    assert loader.cursor == 0


def test_the_fingerprint_is_the_one_of_the_content():
    order = json.loads(describe_order(ORDER, 12))
    assert order["fingerprint"] == fingerprint({"format": 1, **ORDER})
