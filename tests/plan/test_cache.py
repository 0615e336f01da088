"""The plan cache: what it remembers, forgets, and hands on; from several threads."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mimose.plan import Plan, PlanCache


def plan(seconds: float = 1.0) -> Plan:
    """Some plan, told from others by its seconds."""
    return Plan.of({"a": "recompute", "b": "keep"}, predicted_peak_bytes=10, added_seconds=seconds)


def test_get_counts_hits_and_misses() -> None:
    """Size and budget both have to match."""
    cache = PlanCache()
    assert cache.get((8, 128), 100) is None
    cache.put((8, 128), 100, plan())
    assert cache.get((8, 128), 100) == plan()
    assert cache.get((8, 128), 101) is None
    assert cache.get((8, 127), 100) is None
    assert (cache.hits, cache.misses, len(cache)) == (1, 3, 1)


@given(st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 2)), max_size=60))
def test_forgets_the_least_recently_used(capacity: int, calls: list[tuple[bool, int, int]]) -> None:
    """Behaves like a plain ordered dictionary that is cut at the front, for any sequence of calls."""
    cache, model = PlanCache(capacity), OrderedDict[tuple[int, int], Plan]()
    for number, (writes, key, budget) in enumerate(calls):
        if writes:
            cache.put(key, budget, plan(number))
            model[key, budget] = plan(number)
            model.move_to_end((key, budget))
            while len(model) > capacity:
                model.popitem(last=False)
        else:
            assert cache.get(key, budget) == model.get((key, budget))
            if (key, budget) in model:
                model.move_to_end((key, budget))
        known = sorted(((b, p) for (k, b), p in model.items() if k == key and b <= 1), key=lambda e: -e[0])
        assert cache.incumbents(key, 1) == [p for _, p in known]
        assert len(cache) == len(model)


def test_incumbents_are_of_this_size_and_no_larger_budget() -> None:
    """The largest budget first, since its plan is likely the fastest."""
    cache = PlanCache()
    for budget in (50, 100, 150):
        cache.put("size", budget, plan(budget))
        cache.put("other size", budget, plan(-budget))
    assert [p.added_seconds for p in cache.incumbents("size", 100)] == [100, 50]
    assert cache.incumbents("unknown", 100) == []


def test_what_actions_cost_is_no_reason_to_forget_plans_without_any() -> None:
    """There is no better one, whatever they cost; neither here nor for a larger budget."""
    cache = PlanCache()
    nothing = Plan.of({"a": "keep"}, predicted_peak_bytes=30, added_seconds=0.0)
    cache.put("small", 100, nothing)
    cache.put("large", 100, plan())
    cache.put("large", 300, nothing)
    cache.clear_actions()
    assert len(cache) == 2
    assert cache.get("small", 100) == cache.get("large", 300) == nothing
    assert cache.get("large", 100) is None
    assert cache.incumbents("large", 300) == [nothing]
    cache.clear_actions()
    assert len(cache) == 2


def test_replace_only_where_the_old_plan_still_stands() -> None:
    """A late answer must not bring back what was forgotten, nor displace what was planned anew."""
    cache = PlanCache()
    assert not cache.replace("size", 1, plan(2), plan(1))
    cache.put("size", 1, plan(2))
    assert cache.replace("size", 1, plan(2), plan(1))
    assert cache.get("size", 1) == plan(1)
    assert not cache.replace("size", 1, plan(2), plan(0))
    cache.clear()
    assert not cache.replace("size", 1, plan(1), plan(0))
    assert (len(cache), cache.incumbents("size", 1)) == (0, [])


def test_state_goes_through_json() -> None:
    """Plans, nested tuple keys and the order of use survive."""
    cache = PlanCache(capacity=2)
    cache.put(("batch", (8, 128)), 100, plan(1))
    cache.put(("batch", (4, None)), 100, plan(2))
    cache.get(("batch", (8, 128)), 100)
    loaded = PlanCache(capacity=2)
    loaded.put("before", 1, plan())
    loaded.load_state(json.loads(json.dumps(cache.state())))
    loaded.put("new", 1, plan(3))
    assert loaded.get(("batch", (8, 128)), 100) == plan(1)
    assert loaded.get(("batch", (4, None)), 100) is None
    assert loaded.get("before", 1) is None


def test_keys_of_other_types_need_a_codec() -> None:
    """The error names the type; with `encode` and `decode` it works."""
    cache = PlanCache()
    cache.put(frozenset({1, 2}), 1, plan())
    with pytest.raises(TypeError, match="frozenset"):
        cache.state()
    other = PlanCache()
    other.load_state(json.loads(json.dumps(cache.state(encode=sorted))), decode=frozenset)  # type: ignore[arg-type]
    assert other.get(frozenset({1, 2}), 1) == plan()


def test_a_state_of_another_version_is_not_read() -> None:
    """What an unknown format means cannot be trusted: start empty."""
    cache = PlanCache()
    cache.put("size", 1, plan())
    cache.load_state({**cache.state(), "version": 0})
    assert len(cache) == 0


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_are_independent(duplicate: object) -> None:
    """A callback that holds a cache can be copied and pickled."""
    cache = PlanCache(capacity=3)
    cache.put("size", 1, plan())
    other = duplicate(cache)  # type: ignore[operator]
    other.put("size", 2, plan())
    assert (len(cache), len(other), other.capacity) == (1, 2, 3)
    assert other.incumbents("size", 2) == [plan(), plan()]
    assert cache.incumbents("size", 2) == [plan()]


def test_capacity_must_be_positive() -> None:
    """A cache of nothing is a mistake."""
    with pytest.raises(ValueError, match="at least 1, but got 0"):
        PlanCache(0)


def test_threads_see_whole_plans_and_one_replacement_wins() -> None:
    """Of many threads that replace the same plan exactly one succeeds, while others read, write and evict."""
    cache = PlanCache(capacity=16)
    cache.put("size", 0, plan(0))
    won: list[int] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        if cache.replace("size", 0, plan(0), plan(number + 1)):
            won.append(number)
        for turn in range(300):
            cache.put(number, turn % 5, plan(turn))
            cache.get("size", 0)
            assert all(isinstance(known, Plan) for known in cache.incumbents(number, 5))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(cache) == 16
