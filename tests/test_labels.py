"""Which words and whole numbers in batches tell steps apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mimose.labels import MOST_PATHS, MOST_VALUES, Labels
from lightning_mimose.sizes import SizeTracker

IDS = torch.zeros(2, 8)


class Pair(NamedTuple):
    """A batch of two."""

    ids: torch.Tensor
    task: str


@dataclass
class Batch:
    """The same with names of its own."""

    ids: torch.Tensor
    task: str


def followed(batch_of: Any, count_of: Any, steps: int = 24) -> Labels:
    """Labels after some steps of as many sizes, none told apart by."""
    labels = Labels()
    for step in range(steps):
        labels.observe(batch_of(step))
        labels.ran(step, 0, count_of(step))
    return labels


@pytest.mark.parametrize(
    ("batch_of", "path"),
    [
        (lambda task: {"ids": IDS, "task": task}, "task"),
        (lambda task: {"ids": IDS, "task": [task] * 3}, "task"),
        (lambda task: (IDS, task), "1"),
        (lambda task: Pair(IDS, task), "task"),
        (lambda task: Batch(IDS, task), "task"),
        (lambda task: ({"ids": IDS, "meta": {"task": task}}, 0), "0.meta.task"),
        (lambda task: (IDS, ("tag", "parse").index(task)), "1"),
        (lambda task: [IDS, task == "tag"], "1"),
    ],
)
def test_what_decides_about_the_number_of_operations_is_found(batch_of: Any, path: str) -> None:
    """Wherever in the batch it is, as long as that is not too deep."""
    labels = followed(lambda step: batch_of(("tag", "parse")[step % 2]), lambda step: 70 + step % 2)
    assert labels.ran(0, 0, 71) == path
    assert labels.dims == {}
    labels.tell(path)
    assert list(labels.dims.values()) == [1]
    assert labels.dims_of(batch_of("tag")) != labels.dims_of(batch_of("parse"))
    assert labels.ran(0, 0, 71) is None


@pytest.mark.parametrize(
    "batch_of",
    [
        lambda step: {"ids": IDS},
        lambda step: {"ids": IDS, "name": f"sample {step}", "index": step},
        lambda step: {"ids": IDS, "language": ("en", "de", "fr")[step % 3]},
        lambda step: {"ids": IDS, "names": [f"sample {step}", "another"], "text": "word " * 20 + str(step % 2)},
        lambda step: (IDS, 0.5 * (step % 2), None),
    ],
)
def test_names_of_batches_and_what_decides_nothing_tell_nothing(batch_of: Any) -> None:
    labels = followed(batch_of, lambda step: 70 + step % 2)
    assert labels.ran(1, 0, 70) is None
    assert set(labels._now) <= {"language"}


def test_what_has_dimensions_of_its_own_is_told_apart_anyway() -> None:
    labels = Labels()
    for step in range(24):
        labels.observe({"ids": IDS, "task": "ab"[step % 2]})
        assert labels.ran(step, step % 2, 70 + step % 2) is None


def test_what_took_another_amount_of_memory_may_be_told_apart_by_what_comes_again() -> None:
    """By what has the fewest values first, and by no more than a few together."""
    labels = followed(
        lambda step: {"task": "abcd"[step % 4], "split": "xy"[step // 2 % 2], "half": step % 3, "id": step},
        lambda step: 70,
    )
    found = []
    while (path := labels.suspect()) is not None:
        found.append(path)
        labels.tell(path)
    assert found == ["split", "half"]
    assert followed(lambda step: {"task": "abcd"[step % 4]}, lambda step: 70, 4).suspect() is None


class Lazy(dict[str, Any]):
    """Decodes its items when it is asked for them."""

    def items(self) -> Any:
        """Not all of them can be."""
        raise KeyError("lazy column")


def test_batches_that_cannot_be_looked_through_have_no_labels() -> None:
    """Nor are samples looked through, and no more places are followed than a batch may have."""
    labels = Labels()
    for batch in (Lazy(task="a"), {"boxes": [["a"]] * 64}, {"names": ["a"] * 100}, {"x": [0.5] * 4}):
        labels.observe(batch)
        assert labels._now == {}
    for step in range(500):
        labels.observe({f"sample {step}": step, "task": "ab"[step % 2]})
    assert len(labels._labels) <= MOST_PATHS


@given(st.lists(st.one_of(st.integers(0, 20), st.text(max_size=3)), max_size=60))
def test_never_are_there_too_many(values: list[Any]) -> None:
    """What turns out to be a name later on is told apart by no more."""
    labels = Labels()
    for step, value in enumerate(values):
        labels.observe({"ids": IDS, "label": value})
        labels.ran(step, 0, 70 + hash(value) % 3)
        if (path := labels.suspect()) is not None:
            labels.tell(path)
        assert len(labels._now) == (len(set(values[: step + 1])) <= MOST_VALUES)
        assert set(labels.told) <= set(labels._now)


def test_sizes_are_others_only_where_something_is_told_apart() -> None:
    """As if it were another set of tensors; what was learnt about that outlives the tracker."""
    tracker = SizeTracker()
    sizes = [tracker.observe({"ids": IDS, "task": task}) for task in "ab"]
    assert sizes[0] == sizes[1]
    tracker.labels.tell("task")
    apart = [tracker.observe({"ids": IDS, "task": task}) for task in "aba"]
    assert len({*sizes, *apart}) == 3
    assert apart[0] == apart[2]
    assert apart[0].layout != apart[1].layout
    assert tracker.look({"ids": IDS, "task": "a"}) == apart[0]
    assert tracker.look({"batch": 2}) == apart[0]
    unrelated = SizeTracker()
    unrelated.labels.tell("task")
    sizes = [
        unrelated.observe({"nodes": torch.zeros(n, 3), "edges": torch.zeros(m, 2), "task": "a"})
        for n, m in ((4, 9), (8, 8))  # which agree by chance
    ]
    assert sizes[0].layout == sizes[1].layout
    assert tracker.look({"batch": 2, "task=b": 1}) == apart[1]
    other = SizeTracker()
    other.load_state_dict(tracker.state_dict())
    assert other.observe({"ids": IDS, "task": "b"}) == apart[1]
    assert other.observe({"ids": IDS}).dims == (("batch", 2), ("ids:1", 8))
