"""Sizes: names of dimensions in any batch, which of them vary, and rounding."""

from __future__ import annotations

import json
import timeit
from collections import UserDict
from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mimose.errors import SizeError
from lightning_mimose.sizes import BatchSize, SizeTracker, round_up_value


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def test_fast() -> None:
    """Reading and tracking a usual batch takes microseconds: 5 where 40 are allowed for a busy machine."""
    batches = [{key: zeros(8, n) for key in ("input_ids", "attention_mask", "labels")} for n in (64, 128)]
    tracker = SizeTracker()
    seconds = min(timeit.repeat(lambda: [tracker.observe(batch) for batch in batches], number=200, repeat=5))
    assert seconds / 400 < 40e-6


# Rounding


@given(st.integers(0, 2**70), st.integers(0, 2**70))
def test_round_up(n: int, m: int) -> None:
    """Rounding never goes down, adds at most 1/1024, keeps the order, and is done once."""
    up = round_up_value(n)
    assert n <= up
    assert (up - n) * 1024 <= n
    assert n >= 2048 or up == n
    assert round_up_value(up) == up
    assert (n <= m) <= (up <= round_up_value(m))


@given(st.integers(2048, 2**40))
def test_round_up_has_few_values(n: int) -> None:
    """An octave has 1024 values after rounding, so plans can be shared: the step is the stated power of two."""
    step = 2 ** (n.bit_length() - 1 - 10)
    assert round_up_value(n) % step == 0
    assert round_up_value(n) - n < step


@given(st.lists(st.integers(1, 10**6), min_size=4, max_size=4))
def test_round_up_costs_half_a_percent(factors: list[int]) -> None:
    """Four factors, as in memory quadratic in two dimensions, grow by less than 0.5 % in all."""
    exact = rounded = 1
    for n in factors:
        exact, rounded = exact * n, rounded * round_up_value(n)
    assert rounded <= 1.005 * exact


def test_rounded_up_size() -> None:
    """A rounded size keeps names and layout, and equal sizes are one key."""
    size = BatchSize((("batch", 8), ("pixels", 100_001)), layout=3)
    assert size.rounded_up() == BatchSize((("batch", 8), ("pixels", 100_032)), layout=3)
    assert len({size.rounded_up(), BatchSize((("batch", 8), ("pixels", 100_032)), 3), size}) == 2


# Tracking


def tracked(*batches: Any, size_fn: Any = None) -> tuple[SizeTracker, list[BatchSize]]:
    tracker = SizeTracker(size_fn)
    return tracker, [tracker.observe(batch) for batch in batches]


def test_one_batch_names_all() -> None:
    """After one distinct batch, even seen twice, all dimensions are named, equal ones once and 'batch' by itself."""
    batch = {"a": zeros(8, 5), "b": zeros(8, 5), "c": zeros(8, 8)}
    tracker, (size, _) = tracked(batch, batch)
    assert size.dims == (("batch", 8), ("a:1", 5), ("b:1", 5), ("c:1", 8))
    # All but 'batch' start as one group and come apart where they differ.
    assert tracker.named(size) == {"batch": 8, "a:1": 5, "c:1": 8}
    assert tracker.names == ("batch", "a:1", "c:1")
    assert tracker.varying == ()


def test_constants_are_dropped() -> None:
    """Once something varies, what never did is not named, but 'batch' is; old sizes can still be named."""
    tracker, (first, second) = tracked(zeros(8, 3, 32, 32), zeros(8, 3, 64, 64))
    assert tracker.names == ("batch", "input:2")
    assert tracker.varying == ("input:2",)
    assert tracker.named(first) == {"batch": 8, "input:2": 32}
    assert tracker.named(second) == {"batch": 8, "input:2": 64}


def test_groups_come_apart() -> None:
    """Dimensions that were always equal are one name until a batch tells them apart."""
    tracker, _ = tracked(zeros(8, 32, 32), zeros(8, 64, 64))
    assert tracker.names == ("batch", "input:1")
    size = tracker.observe(zeros(4, 64, 32))
    assert tracker.named(size) == {"batch": 4, "input:1": 64, "input:2": 32}
    assert tracker.varying == ("batch", "input:1", "input:2")


def test_layouts() -> None:
    """Other names are another layout, with its own numbers, and a return to the first finds it again."""
    two, one = {"a": zeros(8, 5), "b": zeros(8, 7)}, {"a": zeros(8, 9)}
    tracker, sizes = tracked(two, one, two, {"a": zeros(8, 5), "b": zeros(8, 6)})
    assert [size.layout for size in sizes] == [0, 1, 0, 0]
    assert tracker.named(sizes[0]) == {"batch": 8, "b:1": 7}
    assert tracker.named(sizes[1]) == {"batch": 8, "a:1": 9}
    assert tracker.names == ("batch", "b:1", "a:1")
    assert tracker.varying == ("b:1",)


def test_order_of_keys() -> None:
    """The same keys in another order are the same layout and, where the values agree, the same size."""
    one = {"a": zeros(8, 5), "b": zeros(8, 7)}
    tracker, (first, second) = tracked(one, dict(reversed(one.items())))
    assert first == second
    assert tracker.varying == ()


def test_leading_axes_that_agree_by_chance() -> None:
    """Unrelated leading axes that agree in one batch stay in their layout once they are known to be unrelated."""
    tracker, sizes = tracked((zeros(5, 2), zeros(3)), (zeros(4, 2), zeros(4)), (zeros(6, 2), zeros(4)))
    assert [size.layout for size in sizes] == [0, 0, 0]
    assert sizes[1].dims == (("0:0", 4), ("0:1", 2), ("1:0", 4))
    assert tracker.names == ("0:0", "1:0")


def test_leading_axes_that_mostly_agree() -> None:
    """One of two loaders has a shorter last batch: the others are no other layout from then on."""
    shared = [(zeros(8, tokens), zeros(8)) for tokens in (2, 3, 4, 5)]
    tracker, sizes = tracked(*shared[:3], (zeros(8, 2), zeros(3)), *shared)
    assert [size.layout for size in sizes] == [0, 0, 0, 1, 0, 0, 0, 0]
    restored = SizeTracker()
    restored.load_state_dict(tracker.state_dict())
    assert restored.observe(shared[0]).layout == 0


def test_size_fn() -> None:
    """size_fn gives the size alone: an int is 'size', a mapping is taken as it is, the batch may be anything."""
    tracker, (size,) = tracked("four", size_fn=len)
    assert size.dims == (("size", 4),)
    assert tracker.named(size) == {"size": 4}
    tracker, (size, _) = tracked("a b", ("c", "d", "e"), size_fn=lambda batch: {"words": torch.tensor(len(batch))})
    assert size.dims == (("words", 3),)
    assert type(size.dims[0][1]) is int
    assert tracker.names == ("words",)


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ({"ids": torch.zeros(2, 3)}, "one of type dict with the keys 'ids'"),
        (torch.zeros(2, 3), r"one of type Tensor and shape \(2, 3\)"),
        ([1, 2], "one of type list and length 2"),
        (object(), "one of type object"),
    ],
)
def test_a_size_fn_that_raises_is_named(batch: Any, named: str) -> None:
    """With what it raised, and what it was given."""
    tracker = SizeTracker(lambda batch: batch["nope"])
    with pytest.raises(SizeError, match=f"size_fn raised .*Error: .*{named}") as raised:
        tracker.observe(batch)
    assert raised.value.__cause__ is not None


@pytest.mark.parametrize(
    "answer", [None, "8", 8.0, True, -1, {}, {"n": 8.0}, {"n": True}, {"n": -1}, {3: 8}, [8], zeros(2), {"n": None}]
)
def test_size_fn_refused(answer: Any) -> None:
    """Anything but non-negative ints is refused, shown, and does not count as the type that was seen."""
    tracker = SizeTracker(lambda batch: answer if batch is None else {"n": batch})
    with pytest.raises(SizeError, match="size_fn returned"):
        tracker.observe(None)
    assert tracker.observe(7).dims == (("n", 7),)


def test_type_changes() -> None:
    """A batch, or a result of size_fn, of another kind than before is refused with both types."""
    tracker, _ = tracked({"a": zeros(8, 5)}, UserDict(a=zeros(8, 5)))
    with pytest.raises(SizeError, match="batch is a tuple, but it was a dict"):
        tracker.observe((zeros(8, 5),))
    tracker, _ = tracked(3, 4, size_fn=lambda batch: batch)
    with pytest.raises(SizeError, match="size_fn is a dict, but it was a int"):
        tracker.observe({"n": 3})


BATCHES = st.lists(
    st.one_of(*(st.tuples(*[st.integers(1, 3)] * n) for n in (1, 3, 4))).map(
        lambda values: dict(zip(("batch", "a", "b", "c"), values, strict=False))
    ),
    min_size=1,
    max_size=8,
)


def reference_names(history: list[dict[str, int]]) -> tuple[list[str], list[str]]:
    """(names, varying) of one layout, from all of its batches."""
    columns = {name: tuple(size[name] for size in history) for name in history[0]}
    firsts = [
        name
        for i, name in enumerate(columns)
        if name == "batch" or not any(columns[name] == columns[b] for b in list(columns)[:i] if b != "batch")
    ]
    varying = [name for name in firsts if len(set(columns[name])) > 1]
    return [name for name in firsts if not varying or name in varying or name == "batch"], varying


@given(BATCHES)
def test_tracker_against_history(batches: list[dict[str, int]]) -> None:
    """After every batch the O(dims) state names what a look at the whole history names, for each layout."""
    tracker = SizeTracker(lambda batch: batch)
    histories: dict[int, list[dict[str, int]]] = {}
    for batch in batches:
        size = tracker.observe(batch)
        histories.setdefault(size.layout, []).append(batch)
        assert dict(size.dims) == batch
        names, varying = [], []
        for history in histories.values():
            shown, moved = reference_names(history)
            names += [name for name in shown if name not in names]
            varying += [name for name in moved if name not in varying]
        assert tracker.names == tuple(names)
        assert tracker.varying == tuple(varying)
        assert tracker.named(size) == {name: batch[name] for name in reference_names(histories[size.layout])[0]}
    assert len(histories) == len({tuple(batch) for batch in batches})


@given(BATCHES, BATCHES)
def test_state_round_trips(before: list[dict[str, int]], after: list[dict[str, int]]) -> None:
    """A tracker restored from JSON goes on as the one that was saved, which it shares nothing with."""
    tracker, restored = SizeTracker(lambda batch: batch), SizeTracker(lambda batch: batch)
    for batch in before:
        tracker.observe(batch)
    saved = json.dumps(tracker.state_dict())
    state = tracker.state_dict()
    restored.load_state_dict(json.loads(saved))
    assert restored.names == tracker.names
    for batch in after:
        assert restored.observe(batch) == tracker.observe(batch)
        assert restored.names == tracker.names
        assert restored.varying == tracker.varying
    assert json.dumps(state) == saved


def test_state_keeps_type_and_layouts() -> None:
    """A restored tracker still refuses other types and still knows leading axes that are not shared."""
    tracker, _ = tracked((zeros(5, 2), zeros(3)))
    restored = SizeTracker()
    restored.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    assert restored.observe((zeros(4, 2), zeros(4))).layout == 0
    with pytest.raises(SizeError, match="it was a tuple"):
        restored.observe(zeros(4))
    fresh: Mapping[str, Any] = SizeTracker().state_dict()
    restored.load_state_dict(fresh)
    assert restored.observe(zeros(4)).dims == (("batch", 4),)


def test_a_batch_of_known_shapes_is_what_it_was() -> None:
    """Shapes that were met before are not read again: their size must be the same, whatever was met between."""
    tracker, fresh = SizeTracker(), SizeTracker()
    first, other = {"a": torch.zeros(4, 3), "b": torch.zeros(4)}, {"b": torch.zeros(4), "a": torch.zeros(4, 3)}
    apart = {"a": torch.zeros(5, 3), "b": torch.zeros(4)}
    batches = [first, other, first, apart, first, {**first, "c": torch.zeros(4, 9)}, apart, other, first]
    sizes = [tracker.observe(batch) for batch in batches]
    for batch, size in zip(batches, sizes, strict=True):
        fresh._by_shapes.clear()  # reads every batch
        assert fresh.observe(batch) == size
    with pytest.raises(SizeError):
        tracker.observe(torch.zeros(4, 3))


def test_batches_that_hold_the_same_shapes_in_other_ways_are_told_apart() -> None:
    """Names, other values beside the tensors, and nested tensors."""
    tracker = SizeTracker()
    long, short = torch.zeros(4, 9), torch.zeros(4, 3)
    assert tracker.observe({"a": long, "b": short}) != tracker.observe({"b": long, "a": short})
    assert tracker.observe({"a": long, "n": 1}) == tracker.observe({"a": long})
    assert tracker.observe({"a": long, "more": [short]}) != tracker.observe({"a": long})


ONE, TWO = ("ids", (4, 10)), ("2.ids", (4, 30))


def test_a_part_is_completed_by_the_largest_there_was() -> None:
    """And by what follows from what is there; of what was never seen nothing is known."""
    tracker = SizeTracker()
    tracker.restart(1, entries=True)

    def nothing(dims: dict[str, int], there: Collection[str]) -> dict[str, int]:
        return dims

    assert tracker.complete([ONE], nothing) is None
    for length in (30, 20):
        tracker.observe_leaves([ONE, ("2.ids", (4, length))])
    whole = tracker.complete([("ids", (4, 7))], nothing)
    assert whole is not None
    assert whole.dims == (("batch", 4), ("ids:1", 7), ("2.ids:1", 30))
    twice = tracker.complete([("ids", (4, 7))], lambda dims, there: dims | {"2.ids:1": 2 * dims["ids:1"]})
    assert twice is not None
    assert dict(twice.dims)["2.ids:1"] == 14
    assert tracker.holds([("ids", (4, 7)), TWO], whole)
    assert not tracker.holds([("ids", (4, 7)), TWO], twice)
    assert not tracker.holds([("ids", (4, 7)), TWO, ("3.ids", (4, 1))], whole)


def test_a_restart_forgets_all_but_where_sizes_are_read() -> None:
    """Of another place they are not comparable; the place is in the state."""
    tracker, _ = tracked(zeros(5, 2), zeros(4, 2))
    tracker.restart(2, entries=True)
    assert (tracker.names, tracker.level, tracker.entries) == ((), 2, True)
    assert tracker.observe_leaves([ONE, TWO]).layout == 0
    restored = SizeTracker()
    tracker.ignored.add("experts")
    restored.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    assert (restored.names, restored.level, restored.entries) == (tracker.names, 2, True)
    assert restored.ignored == {"experts"}
    with pytest.raises(SizeError, match="it shows when the step runs"):
        restored.look(zeros(4, 2))
    assert restored.look({"ids:1": 3}).dims == (("batch", 4), ("ids:1", 3), ("2.ids:1", 30))
