"""What a resume accepts of mixtures, stages and skips: what is consumed must stay, what comes may change."""

import json
import logging
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpora import D60, make_sources
from tests.resume import Place, Run, builder, check_steps, expected_mix
from tests.strategies import skips, stages
from zephon_patches.errors import StateError
from zephon_patches.keys import canonical_json
from zephon_patches.loader.state import describe_order, describe_stages, differences, read_state
from zephon_patches.mapping import Skips

WEIGHTS = {"web": 0.7, "code": 0.3}
PLACE = Place(1, 12)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_sources(tmp_path_factory.mktemp("made"), web=D60, code=[9] * 20, a=[5] * 30)


def a_loader(made, **settings):
    return builder(made, **settings)(PLACE, 0)


def state_at(made, cursor: int, **settings) -> dict:
    return {**a_loader(made, **settings).state_dict(), "cursor": cursor}


def refusal(made, state: dict, **settings) -> str:
    loader = a_loader(made, **settings)
    with pytest.raises(StateError) as caught:
        loader.load_state_dict(state)
    assert loader.cursor == 0
    return str(caught.value)


# --- what the state holds ---


def test_the_order_tells_weights_stages_and_skips(made):
    loader = a_loader(made, weights=WEIGHTS, stages=[(120, {"web": 1})], skip=[(70, 80), (60, 72)])
    order = json.loads(loader.state_dict()["order"])
    assert order["stages"] == [{"at": 0, "weights": {"code": 3, "web": 7}}, {"at": 120, "weights": {"web": 1}}]
    assert order["skip"] == [[60, 80]]
    assert [source["name"] for source in order["sources"]] == ["code", "web"]


def test_the_order_of_the_tables_has_no_say(made):
    turned = {"code": 0.3, "web": 0.7}
    assert state_at(made, 0, weights=WEIGHTS) == state_at(made, 0, weights=turned)
    run = Run(builder(made, weights=turned), PLACE)
    check_steps(run, expected_mix(made, weights=WEIGHTS), 3)


def test_equal_ratios_are_one_order(made):
    assert state_at(made, 0, weights=WEIGHTS) == state_at(made, 0, weights={"web": 7, "code": 3})


def test_one_source_has_the_same_state_with_any_weight_and_beside_sources_that_are_off(made):
    alone = state_at(made, 0, weights={"web": 0.3})
    assert alone == state_at(made, 0, weights={"web": 1, "code": 0})
    assert "stages" not in json.loads(alone["order"])
    assert len(pickle.dumps(alone)) < 1024


def test_a_source_or_a_stage_adds_about_128_bytes():
    def size(sources: int, stages: int) -> int:
        entries = [
            {"data": "0" * 16, "name": f"source-{i}", "recipe": "0" * 16, "samples": 10**9, "tokens": 10**12}
            for i in range(sources)
        ]
        mixtures = [(10**9 * at, {e["name"]: 1 + i + at for i, e in enumerate(entries)}) for at in range(stages)]
        order = {"packing": "concat", "seed": 0, "sources": entries, "stages": describe_stages(mixtures)}
        return len(describe_order(order, 1024))

    assert size(2, 1) < 1024
    for sources, of in ((3, 1), (10, 1), (100, 1), (100, 10), (2, 10), (6, 20)):
        assert size(sources, of) - size(2, 1) <= 132 * (sources - 2 + of - 1)
        assert size(sources, of + 1) - size(sources, of) <= 128


# --- what may change ---


def test_a_stage_appended_beyond_the_cursor_needs_nothing(made):
    before = {"weights": WEIGHTS}
    after = {"weights": WEIGHTS, "stages": [(48, {"code": 1})]}
    run = Run(builder(made, **after), PLACE)
    run.load(state_at(made, 48, **before))
    assert run.step() == expected_mix(made, **after).rows(48, 60)
    # And it may be taken away again, as long as it is beyond.
    again = Run(builder(made, **before), PLACE)
    again.load(state_at(made, 48, **after))
    text = refusal(made, state_at(made, 49, **after), **before)
    assert "mixture from sample 48 on: code 1 in the checkpoint, that of before now" in text


def test_a_source_that_comes_with_a_later_stage_is_no_change(made):
    later = {"weights": {**WEIGHTS, "a": 0}, "stages": [(60, {"web": 0.5, "a": 0.5})]}
    run = Run(builder(made, **later), Place(3, 2))
    run.load(state_at(made, 60, weights=WEIGHTS))
    check_steps(run, expected_mix(made, **later), 4)
    assert [source.get("since") for source in json.loads(run.state()["order"])["sources"]] == [60, None, None]


def test_one_source_gets_company(made):
    """The first run had no weights at all."""
    later = {"weights": {"web": 1, "code": 0}, "stages": [(36, {"web": 0.5, "code": 0.5})]}
    state = state_at(made, 36, weights={"web": 5})
    assert "stages" not in json.loads(state["order"]), "as without a weight"
    run = Run(builder(made, **later), PLACE)
    run.load(state)
    check_steps(run, expected_mix(made, **later), 4)


def test_sources_that_counted_by_size_get_company_with_their_sizes_as_weights(made):
    sizes = {
        source["name"]: source["samples"] for source in json.loads(a_loader(made).state_dict()["order"])["sources"]
    }
    weights = {**sizes, "a": 0}
    made_of_two = type(made)(made.folder, {name: made.lengths[name] for name in ("web", "code")})
    state = {**builder(made_of_two)(PLACE, 0).state_dict(), "cursor": 48}
    later = {"weights": weights, "stages": [(48, {"web": 1, "a": 1})]}
    run = Run(builder(made, **later), PLACE)
    run.load(state)
    check_steps(run, expected_mix(made, **later), 4)


def test_sources_by_size_get_a_stage(made):
    run = Run(builder(made, stages=[(36, {"a": 1})]), PLACE)
    run.load(state_at(made, 36))
    check_steps(run, expected_mix(made, stages=[(36, {"a": 1})]), 4)


def test_skips_may_be_added_beyond_the_cursor_and_not_below(made):
    skip = {"weights": WEIGHTS, "skip": [(60, 84)]}
    run = Run(builder(made, **skip), PLACE)
    run.load(state_at(made, 48, weights=WEIGHTS))
    expected = expected_mix(made, weights=WEIGHTS)
    assert run.step() == expected.rows(48, 60)
    assert run.step() == expected.rows(84, 96)
    text = refusal(made, state_at(made, 72, weights=WEIGHTS), **skip)
    assert "data.skip below the cursor: nothing in the checkpoint, [60, 72) now" in text
    text = refusal(made, {**run.state(), "cursor": 96}, weights=WEIGHTS)
    assert "data.skip below the cursor: [60, 84) in the checkpoint, nothing now" in text


def test_many_skips_are_told_by_those_that_differ(made):
    many = [(3 * n, 3 * n + 1) for n in range(1000)]
    state = state_at(made, 3000, skip=many)
    text = refusal(made, state, skip=[*many[:500], (1501, 1502), *many[501:]])
    assert "data.skip below the cursor: [1500, 1501) in the checkpoint, [1501, 1502) now" in text
    text = refusal(made, state)
    assert "data.skip below the cursor: [0, 1), [3, 4), " in text
    assert "[21, 22) and 992 more in the checkpoint, nothing now" in text


@given(stages(2, 100), stages(2, 100), skips, skips, st.integers(0, 200))
@settings(max_examples=200)
def test_exactly_the_consumed_part_is_compared(before, after, skip, new_skip, cursor):
    def described(of, skipped):
        order = {
            "tokenizer": "t",
            "shard_bytes": 0,
            "sources": [{"name": name, "data": "d", "recipe": "r", "samples": 5, "tokens": 9} for name in "ab"],
            "stages": describe_stages([(at, dict(zip("ab", weights, strict=True))) for at, weights in of]),
        }
        for source, name in zip(order["sources"], "ab", strict=True):
            source["since"] = next((s["at"] for s in order["stages"] if name in s["weights"]), 10**9)
        return json.loads(describe_order({**order, "skip": [list(i) for i in Skips(skipped).intervals]}, 12))

    def consumed(of, skipped):
        on = [(at, list(weights)) for at, weights in of if at < max(cursor, 1)]
        return on, {n for start, stop in skipped for n in range(start, stop) if n < cursor}

    lines = differences(described(before, skip), described(after, new_skip), cursor)
    assert bool(lines) == (consumed(before, skip) != consumed(after, new_skip))


# --- what is refused, and accepted ---


def test_other_weights_are_refused_with_both_and_accepted_by_fingerprint_alone(made, caplog):
    caplog.set_level(logging.INFO, logger="zephon_patches")
    state = state_at(made, 120, weights=WEIGHTS)
    other = {"weights": {"web": 0.8, "code": 0.2}}
    new = json.loads(a_loader(made, **other).state_dict()["order"])["fingerprint"]
    text = refusal(made, state, **other)
    assert "mixture from sample 0 on: code 3, web 7 in the checkpoint, code 1, web 4 now" in text
    assert f'data.accept_change = "{new}"' in text
    assert "A [[data.stages]] table with at = 120 changes the mixture from here on and leaves what was." in text

    run = Run(builder(made, **other, accept_change=new), Place(2, 3))
    run.load(state)
    check_steps(run, expected_mix(made, **other), 3)
    assert "data: data.accept_change: from sample 120 on the order is another one" in caplog.text
    order = json.loads(run.state()["order"])
    (change,) = order["changes"]
    assert change["at"] == 120
    assert change["before"] == json.loads(state["order"])["fingerprint"]
    assert "code 3, web 7 in the checkpoint" in change["changed"]

    # The new state needs no acceptance, and keeps what was.
    for accept in ("", new):
        again = Run(builder(made, **other, accept_change=accept), PLACE)
        again.load(run.state())
        assert again.state() == run.state()
    assert "has nothing to accept any more" in caplog.text

    # Another order is not accepted by it.
    third = {"weights": {"web": 0.9, "code": 0.1}}
    text = refusal(made, run.state(), **third, accept_change=new)
    assert f'data.accept_change = "{new}" accepts another order than this one' in text
    assert new != json.loads(a_loader(made, **third).state_dict()["order"])["fingerprint"]


def test_a_stage_is_recommended_only_where_one_can_start(made):
    other = {"weights": {"web": 0.6, "code": 0.4}}
    assert "table with at = 1 changes" in refusal(made, state_at(made, 1, weights=WEIGHTS), **other)
    assert "[[data.stages]]" not in refusal(made, state_at(made, 0, weights=WEIGHTS), **other)


def test_any_change_can_be_accepted_and_the_state_stays_small(made):
    state = state_at(made, 12, weights={"web": 1})
    befores = []
    for seed in range(1, 8):
        settings = {"weights": {"web": 1}, "seed": seed, "shuffle_shards": 1 + seed}
        fingerprint = json.loads(a_loader(made, **settings).state_dict()["order"])["fingerprint"]
        loader = a_loader(made, **settings, accept_change=fingerprint)
        befores.append(json.loads(state["order"])["fingerprint"])
        loader.load_state_dict(state)
        state = loader.state_dict()
        assert len(pickle.dumps(state)) < 1024
    assert [change["before"] for change in json.loads(state["order"])["changes"]] == befores[-3:]


def test_an_accepted_change_moves_nothing_else(made):
    state = state_at(made, 120, weights=WEIGHTS)
    fingerprint = json.loads(a_loader(made).state_dict()["order"])["fingerprint"]
    loader = a_loader(made, accept_change=fingerprint)
    loader.load_state_dict(state)
    assert (loader.cursor, loader.restored) == (120, True)
    loader.load_state_dict(loader.state_dict())
    assert len(json.loads(loader.state_dict()["order"])["changes"]) == 1


@pytest.mark.parametrize(
    "key, values",
    [
        ("stages", [5, {}, [5], [{}], [{"at": 0}], [{"at": "0", "weights": {}}], [{"at": -1, "weights": {}}]]),
        ("stages", [[{"at": 0, "weights": [1]}], [{"at": True, "weights": {}}], [{"at": 2**70, "weights": {}}]]),
        ("skip", [5, {"a": 1}, [5], [[1]], [[1, 2, 3]], [["a", "b"]], [[5, 1]], [[1.5, 3]], [[1, 2**70]], [[-3, 2]]]),
        ("since", ["x", None, [1], -1, True]),
    ],
)
def test_parts_of_another_form_are_refused_also_with_a_right_fingerprint(key, values):
    source = {"data": "d", "name": "web", "recipe": "r", "samples": 83, "tokens": 660}
    for value in values:
        parts = {"sources": [{**source, "since": value}]} if key == "since" else {"sources": [source], key: value}
        with pytest.raises(StateError, match=f"loader state: {'sources' if key == 'since' else key} in the order is"):
            read_state({"cursor": 5, "order": describe_order(parts, 12)})


@pytest.mark.parametrize("changes", ["x", [1], [{"at": 3}], [{"at": "3", "before": "x"}], [{"at": 3, "before": None}]])
def test_changes_that_are_none_are_refused_though_no_fingerprint_covers_them(made, changes):
    state = state_at(made, 0, weights=WEIGHTS)
    order = canonical_json({**json.loads(state["order"]), "changes": changes})
    with pytest.raises(StateError, match="changes in the order is"):
        read_state({"cursor": 0, "order": order})


# --- what the log says ---


def test_the_log_says_which_stage_is_in_force_and_which_comes_next(made, caplog):
    caplog.set_level(logging.INFO, logger="zephon_patches")
    settings = {"weights": WEIGHTS, "stages": [(120, {"web": 1, "code": 2}), (500, {"code": 1})]}
    for cursor, line in (
        (119, "mixture from sample 0 on: code 30 %, web 70 %; next from sample 120 on: code 66.67 %, web 33.33 %"),
        (120, "mixture from sample 120 on: code 66.67 %, web 33.33 %; next from sample 500 on: code 100 %"),
        (900, "mixture from sample 500 on: code 100 %; the last stage"),
    ):
        caplog.clear()
        a_loader(made, **settings).load_state_dict(state_at(made, cursor, **settings))
        assert f"data: {line}" in caplog.messages
    caplog.clear()
    a_loader(made, weights={"web": 1}).load_state_dict(state_at(made, 7, weights={"web": 1}))
    assert "mixture" not in caplog.text
    assert "data: resume at sample 7 (epoch 0, sample 7 of 83 of source 'web')" in caplog.messages


def test_golden_order_entry_of_a_mixture():
    # Another text here has checkpoints of runs with several sources refused as another order.
    order = {
        "sources": [{"name": "a"}, {"name": "b", "since": 9}],
        "stages": describe_stages([(0, {"a": 7, "b": 0}), (9, {"a": 1, "b": 2})]),
        "skip": [[3, 5]],
    }
    assert describe_order(order, 12) == (
        '{"fingerprint":"bbb05b163532d7fe","format":1,"global_batch_size":12,"skip":[[3,5]],"sources":[{"name":"a"},'
        '{"name":"b","since":9}],"stages":[{"at":0,"weights":{"a":7}},{"at":9,"weights":{"a":1,"b":2}}]}'
    )
