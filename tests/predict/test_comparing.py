"""What comparing recipes will take: once for every number of places that a unit's calls have."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.measure.observe import Observation, observe
from lightning_mimose.menu import GRADES
from lightning_mimose.predict.comparing import MOST_COUNTS, Comparing, Comparisons
from tests.helpers.models import TinyText, text_batch
from tests.helpers.recording import recorded


@cache
def seen() -> Observation:
    """A step whose blocks were surveyed."""
    return observe(recorded(TinyText(2), text_batch(4, 16), lean=True), 0, grades=GRADES)


def places_of(unit: str) -> tuple[int, int, int]:
    """Number of a unit's call, how many places it has, and what comparing takes in them."""
    calls = seen().structure.calls
    index = next(i for i, call in enumerate(calls) if call.unit == unit and call.places >= 0)
    return index, int(seen().values[calls[index].places]), int(seen().values[calls[index].comparing])


def to_come(comparisons: Comparisons, values: NDArray[np.float64] | None = None, more: int = 2) -> Comparing:
    """What is to come in that step, where all calls of another size saved more often."""
    other = np.array(seen().values)
    other[[call.places for call in seen().structure.calls if call.places >= 0]] += more
    return comparisons.to_come(seen().structure, seen().values if values is None else values, [seen().values, other])


def test_nothing_is_to_come_of_what_was_compared_or_never_was() -> None:
    """Units that were not tried are planned otherwise."""
    index, places, nbytes = places_of("layers.0")
    assert places > 2
    assert nbytes > 0
    comparisons = Comparisons()
    assert to_come(comparisons) == {}
    comparisons.made("layers.0", places + 7, len(GRADES))
    assert to_come(comparisons) == {index: (0, nbytes)}
    comparisons.made("layers.0", places, 2)
    assert to_come(comparisons) == {index: (2, nbytes)}
    comparisons.made("layers.0", places, len(GRADES))
    assert to_come(comparisons) == {}
    assert comparisons.news == {"layers.0"}


def test_calls_that_always_save_as_often_are_no_loops() -> None:
    """A unit may be called again in a step, and save less then, as it does in every size."""
    _, places, _ = places_of("layers.0")
    comparisons = Comparisons()
    comparisons.made("layers.0", places + 1, len(GRADES))
    assert to_come(comparisons)
    assert to_come(comparisons, more=0) == {}
    assert comparisons.to_come(seen().structure, seen().values, []) == {}


def test_a_part_of_the_places_may_be_new() -> None:
    """As surveys of other numbers of places have shown; that of one which was compared says nothing."""
    index, places, nbytes = places_of("layers.1")
    comparisons = Comparisons()
    comparisons.missing("layers.1", places, nbytes, nbytes)  # before anything was compared
    comparisons.made("layers.1", places + 7, len(GRADES))
    comparisons.missing("layers.1", places + 7, nbytes, nbytes)
    assert comparisons.shares == {}
    comparisons.missing("layers.1", places + 3, 0, nbytes)  # a shorter loop, whose rounds were all met
    assert comparisons.shares == {}
    comparisons.missing("layers.1", places + 9, nbytes // 4, nbytes)
    found = to_come(comparisons)
    assert found == {index: (0, int(nbytes // 4 / nbytes * nbytes))}


def test_a_number_that_is_not_known_to_be_right_says_nothing() -> None:
    """It was fitted on bytes, which may go by other laws."""
    index, places, _ = places_of("layers.0")
    comparisons, values = Comparisons(), np.array(seen().values)
    comparisons.made("layers.0", places, len(GRADES))
    values[seen().structure.calls[index].places] += 0.4
    assert to_come(comparisons, values) == {}


def test_no_more_numbers_are_remembered_than_there_is_use_for() -> None:
    """A block whose operations go by what a batch holds has new ones in every call."""
    comparisons = Comparisons()
    for places in range(2 * MOST_COUNTS):
        comparisons.made("block", places, 1)
    assert 0 < len(comparisons.grades["block"]) <= MOST_COUNTS
