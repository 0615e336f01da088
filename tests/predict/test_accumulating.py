"""Steps that add to older gradients, and such as free them, count as one shape once both were seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_mimose.predict.accumulating import EITHER, either
from lightning_mimose.predict.estimator import Estimator
from lightning_mimose.predict.maxima import Measured
from lightning_mimose.predict.observed import Observed
from lightning_mimose.predict.rows import levels
from lightning_mimose.predict.shapes import NEVER, Resident
from lightning_mimose.predict.structure import Structure
from tests.helpers.models import TinyText, text_batch
from tests.predict.test_structure import HUB, observed

OLD = 1_000_000


@pytest.fixture(scope="module")
def measured() -> Structure:
    """The shape of a step without older gradients."""
    return observed(TinyText(layers=2), text_batch(2, 8)).structure


def kinds(structure: Structure) -> tuple[Structure, Structure, Structure]:
    """With none before it; freeing what was there before it; and adding to that."""
    freed = tuple(replace(p, old_gradient_bytes=0 if p.backward else OLD) for p in structure.positions)
    kept = tuple(replace(p, old_gradient_bytes=OLD, gradient_bytes=0) for p in structure.positions)
    return (
        replace(structure, old_gradient_bytes=0),
        replace(structure, old_gradient_bytes=OLD, positions=freed),
        replace(structure, old_gradient_bytes=OLD, positions=kept),
    )


def test_one_kind_stays_what_it_is(measured: Structure) -> None:
    """The usual loop frees them in every step but the first, which finds none."""
    none, freed, kept = kinds(measured)
    assert either(freed, [none]) == (freed, [])
    assert either(kept, [kept]) == (kept, [])
    assert either(measured, [none, freed, kept]) == (measured, [])  # a loop of which it is known when it frees them


def test_steps_that_keep_a_part_are_known_exactly(measured: Structure) -> None:
    """One of two networks' gradients, say: every step but the first, which finds none, is like the others."""
    none, freed, kept = kinds(measured)
    some = tuple(replace(p, old_gradient_bytes=OLD // 3 if p.backward else OLD) for p in measured.positions)
    part = replace(measured, old_gradient_bytes=OLD, positions=some)
    assert either(part, [none, freed, kept]) == (part, [])
    assert either(none, [part]) == (none, [])


def test_holds_are_kept() -> None:
    """An input that somebody was seen to hold longer is held longer by the steps of either kind."""
    make, batch_of = HUB["t5"]
    measured = observed(make(), batch_of(2, 16)).structure
    none, freed, kept = kinds(measured)
    longer = replace(freed, loose=(replace(freed.loose[0], since_time=NEVER), *freed.loose[1:]))
    observations = Observed()
    values = np.zeros(measured.columns)
    for number, structure in enumerate((none, longer, kept, kept)):
        observations.add((("batch", number),), structure, Measured(values), 0)
    (one,) = observations.sizes
    assert one.old_gradient_bytes == EITHER
    assert one.loose[0].since_time == NEVER


def test_both_kinds_are_one(measured: Structure) -> None:
    """In whichever order they come; and so is everything of that shape that comes later."""
    none, freed, kept = kinds(measured)
    one, others = either(kept, [none, freed])
    assert others == [none, freed]
    assert one == either(none, [kept])[0] == either(freed, [kept, none])[0]
    assert one.old_gradient_bytes == EITHER
    for later in (none, freed, kept):
        assert either(later, [one]) == (one, [one])


@pytest.mark.parametrize("before", [0, OLD])
def test_what_is_alive_is_never_too_little(measured: Structure, before: int) -> None:
    """It is exact for those that add to gradients or find none, and an upper bound for those that free them."""
    none, freed, kept = kinds(measured)
    one, _ = either(kept, [none, freed])
    value = np.arange(measured.columns)
    resident = Resident(7, before, False, 0)
    found = levels(one, value, resident)[2]
    if before == 0:
        assert (found == levels(none, value, resident)[2]).all()
    else:
        assert (found == levels(kept, value, resident)[2]).all()
        assert (found >= levels(freed, value, resident)[2]).all()


def test_what_was_learnt_of_either_kind_is_known(measured: Structure) -> None:
    """Sizes of both are sizes of the one, and stay so in a checkpoint."""
    none, freed, kept = kinds(measured)
    estimator = Estimator()
    values = observed(TinyText(layers=2), text_batch(2, 8)).values
    for tokens, structure in ((8, none), (12, freed), (16, kept), (20, freed)):
        estimator.add({"batch": 2, "ids:1": tokens}, structure, values * tokens)
    again = Estimator()
    again.load_state_dict(estimator.state_dict())
    for each in (estimator, again):
        assert {structure.old_gradient_bytes for structure in each.observed.sizes} == {EITHER}
        assert len(each) == 4
        each.add({"batch": 2, "ids:1": 24}, kept, values * 24)
        assert len(each.observed.sizes) == 1
