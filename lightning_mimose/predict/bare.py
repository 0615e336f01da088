"""The step that found no gradients of an earlier one, and the very first one: whether others contradict them.

What is done with older gradients in the midst of a step (clones that are kept to be compared with the next ones) is no
part of such a step, so that for its size less is predicted than later steps take. And what is made once and stays (the
state of optimizers that update within backward, a memory of features, averages of the weights) is made in the very
first.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.checking import EXACT_ERROR, USABLE_ERROR
from lightning_mimose.predict.fit import Fit
from lightning_mimose.predict.fits import Part, those_in, with_batch_of
from lightning_mimose.predict.fitting import best_fit
from lightning_mimose.predict.observed import Observed
from lightning_mimose.predict.paths import Key, names_of
from lightning_mimose.predict.structure import Structure

FEWEST_OTHERS, MOST_OTHERS = 3, 8
"""Other sizes by which it may be contradicted: to look at more of them each time takes too long."""
CONTRADICTED = 5
"""How many times what others miss each other by it has to be below what they tell of it."""


def is_contradicted(
    key: Key,
    observed: Observed,
    fit_of: Callable[[Structure, Part | None, tuple[str, ...]], Fit | None],
    resident_bytes: int,
) -> bool:
    """Whether a step took less than the others tell, by far more than what those miss; or was the first, and another.

    Args:
        key: Its size.
        observed: What was measured.
        fit_of: The fit of all sizes of a shape that have one value of some dimension; None where there is none yet.
        resident_bytes: What is resident besides activations: errors are shares of a step's whole peak.
    """
    batch = with_batch_of(key)
    for (structure, known), part in product(observed.sizes.items(), dict.fromkeys([batch, None])):
        alike = observed.of(structure, names_of(key)) if key in known else {}
        if part is None and batch is not None and len(those_in(batch, alike)) == len(alike):
            continue  # the same as those with its batch
        others = [other for other in those_in(part, alike) if other != key]
        if len(others) < FEWEST_OTHERS or (len(others) > MOST_OTHERS and len(others) % MOST_OTHERS):
            continue
        whole = fit_of(structure, part, names_of(key))
        if whole is None or whole.error <= EXACT_ERROR:
            continue
        measured = [alike[other] for other in others]
        fit = best_fit([dict(other) for other in others], measured, structure, resident_bytes)
        if fit.error > USABLE_ERROR or not fit.covers(dict(key)):
            continue
        values = np.array([fit.values_at(dict(key)), known[key].values])
        told, found = structure.summary(values)[:, :2]
        missed = found - told
        far = CONTRADICTED * max(fit.error_at(dict(key), resident_bytes), EXACT_ERROR) * (told[0] + resident_bytes)
        if -missed[0] > far:
            return True
        if key == observed.oldest and _was_made_once(fit, key, missed, np.diff(structure.left(values))[0], far):
            return True
    return False


def _was_made_once(fit: Fit, key: Key, missed: NDArray[np.float64], left_bytes: float, far: float) -> bool:
    """Whether the very first step made something that stays.

    Args:
        fit: Of the others.
        key: The first one's size.
        missed: What it took more than they tell, with everything kept and with everything recomputed.
        left_bytes: What it left more than they tell.
        far: What is more than they miss each other by.
    """
    if left_bytes > far and (np.abs(missed - left_bytes) <= far).all():
        return True
    if not all(fit.low[name] <= value <= fit.high[name] for name, value in key):
        return False
    # Made in backward, it was missing yet with everything kept, but not with everything recomputed; or it was too much.
    return left_bytes > far or abs(missed[0]) <= far < abs(missed[1])
