"""The list of a store's plans: what comes back, and that nothing else than what was written is believed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.test_reader import make_store
from zephon_patches.errors import StoreError
from zephon_patches.keys import canonical_json, fingerprint
from zephon_patches.samples.plan_list import entry_of, list_path, plan_of, read_list, write_list
from zephon_patches.store.reader import TokenStore


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return TokenStore(make_store(tmp_path_factory.mktemp("list") / "s", [list(range(30)), [5], list(range(9))]))


@pytest.fixture(scope="module")
def good(store):
    entries = [entry_of(store.folder, store, shard, "best_fit", 8) for shard in range(len(store.tokens_per_shard))]
    write_list(store.folder, store.data_fingerprint, "best_fit", 8, entries)
    return list_path(store.folder, "best_fit", 8).read_bytes()


def test_it_says_what_the_plans_are(store, good):
    plans = read_list(store, "best_fit", 8)
    found = [plan_of(store, shard, plans) for shard in range(3)]
    assert plans.samples.tolist() == [plan.num_samples for plan in found] == [4, 0, 1]
    assert plans.labels.tolist() == [29, 0, 8]
    assert plans.left_out.tolist() == [0, 1, 0]
    assert plans.fill == 37 / 40
    content = json.loads(good)
    assert content.keys() == {"format", "packing", "seq_len", "data", "samples", "labels", "left_out", "plans", "hash"}
    assert plans.fingerprint == fingerprint(content["plans"])


@given(st.data())
def test_any_damage_is_found(store, good, data):
    bad = bytearray(good)
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)), max_size=4)):
        bad[place] = value
    bad = bytes(bad[: data.draw(st.just(len(bad)) | st.integers(0, len(bad)))])
    path = list_path(store.folder, "best_fit", 8)
    path.write_bytes(bad)
    try:
        plans = read_list(store, "best_fit", 8)
    except StoreError:
        return
    finally:
        path.write_bytes(good)
    assert plans.samples.tolist() == [4, 0, 1]  # another writing of the same, such as without the line end


values = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=4)
)


@given(st.sampled_from(["format", "packing", "seq_len", "data", "samples", "labels", "left_out", "plans"]), values)
def test_other_values_with_a_right_hash_are_no_list_or_one_of_counts(store, good, key, value):
    content = {**json.loads(good), key: value}
    del content["hash"]
    path = list_path(store.folder, "best_fit", 8)
    try:
        content["hash"] = fingerprint(content)
        path.write_text(canonical_json(content))
    except ValueError:  # no JSON
        return
    try:
        with pytest.raises(StoreError):
            read_list(store, "best_fit", 8)
            # Counts that could be: told when a plan is opened.
            assert key in ("samples", "labels", "left_out") and len(value) == 3
            raise StoreError("counts")
    finally:
        path.write_bytes(good)
