"""The hash that the order stands on must never change; the values here come from its published parts."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from zephon_patches.keys import canonical_json, derive_key, fingerprint, hash64, hash64_of

plain_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def test_canonical_json_has_sorted_keys_no_white_space_and_ascii_only():
    assert canonical_json({"b": [1, 2.5, None], "a": "é"}) == '{"a":"\\u00e9","b":[1,2.5,null]}'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [float("-inf")]}])
def test_canonical_json_refuses_numbers_that_json_has_not(value):
    with pytest.raises(ValueError):
        canonical_json(value)


def test_canonical_json_refuses_other_objects():
    with pytest.raises(TypeError):
        canonical_json({"a": object()})


@given(plain_data, plain_data)
def test_fingerprints_are_equal_where_the_data_is(a, b):
    assert (fingerprint(a) == fingerprint(b)) == (canonical_json(a) == canonical_json(b))


def test_a_fingerprint_does_not_depend_on_the_order_of_keys():
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})


def test_golden_keys_and_fingerprints():
    # Another value here breaks every checkpoint (fingerprint) and every order (derive_key) there is.
    assert fingerprint({"a": 1}) == "4f935b526b20ad1b"
    assert derive_key(0, "web", 0, "shards") == 14869882282142115419
    assert derive_key(0, "web", 1, "group", 3) == 3866353214412671289


@given(st.lists(st.integers(0, 2**63) | st.text(max_size=5), max_size=4))
def test_keys_are_blake2b_of_the_path_as_json(path):
    assert derive_key(*path) == reference.key_of(*path)
    assert 0 <= derive_key(*path) < 2**64


def test_keys_of_paths_that_look_alike_differ():
    paths = [(0, 1), (1, 0), (1,), (0, 1, 0), ("0", 1), (0, "1"), ("01",), ("a", "bc"), ("ab", "c"), ("abc",)]
    assert len({derive_key(*path) for path in paths}) == len(paths)


def test_seed_and_epoch_do_not_add_up():
    keys = {derive_key(seed, "web", epoch, "shards") for seed in range(30) for epoch in range(30)}
    assert len(keys) == 900


def test_hash64_gives_the_published_outputs_of_splitmix64():
    # The first outputs for the seeds 0 and 1234567, as other implementations give them.
    places = np.arange(5, dtype=np.uint64)
    assert hash64(0, places[:4]).tolist() == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
        0xF88BB8A8724C81EC,
    ]
    assert hash64(1234567, places).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**64 - 1), max_size=5))
def test_hash64_is_whole_number_arithmetic_modulo_2_to_the_64(key, values):
    hashed = hash64(key, np.array(values, dtype=np.uint64))
    assert hashed.dtype == np.uint64
    assert hashed.tolist() == [reference.splitmix(key, value) for value in values]
    assert hashed.tolist() == [hash64_of(key, value) for value in values]


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**64 - 1), max_size=5))
def test_hash64_writes_where_it_is_told_to_and_nowhere_else(key, values):
    given_values, out, scratch = (np.array(values, dtype=np.uint64) for _ in range(3))
    assert hash64(key, given_values, out, scratch) is out
    assert given_values.tolist() == values
    assert out.tolist() == hash64(key, given_values).tolist()


def test_hash64_of_different_values_differ_and_keep_the_shape():
    assert hash64(7, np.array(3, dtype=np.uint64)).shape == ()
    hashed = hash64(7, np.arange(100_000, dtype=np.uint64).reshape(100, 1000))
    assert hashed.shape == (100, 1000)
    assert len(np.unique(hashed)) == 100_000


def test_nothing_depends_on_the_hash_seed_of_the_process():
    program = "from zephon_patches.keys import *; print(derive_key(1, 'x'), fingerprint({'b': 1, 'a': 2}))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{derive_key(1, 'x')} {fingerprint({'b': 1, 'a': 2})}\n"}
