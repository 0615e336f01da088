"""The step that found no gradients of an earlier one, and the very first one: whether others contradict them.

What is done with older gradients in the midst of a step (clones that are kept to be compared with the next ones) is no
part of such a step, so that for its size less is predicted than later steps take. And what is made once and stays (the
state of optimizers that update within backward) is made in the very first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lightning_mimose.predict.checking import EXACT_ERROR, USABLE_ERROR
from lightning_mimose.predict.fit import Fit
from lightning_mimose.predict.fits import Part, those_in, with_value
from lightning_mimose.predict.fitting import best_fit
from lightning_mimose.predict.observed import Observed
from lightning_mimose.predict.paths import Key, names_of
from lightning_mimose.predict.structure import Structure

FEWEST_OTHERS, MOST_OTHERS = 3, 8
"""Other sizes by which it may be contradicted: to look at more of them takes too long."""
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
    part = next((with_value(name, value) for name, value in key if name == "batch"), None)
    for structure, known in observed.sizes.items():
        alike = observed.of(structure, names_of(key)) if key in known else {}
        others = [other for other in those_in(part, alike) if other != key]
        if not FEWEST_OTHERS <= len(others) <= MOST_OTHERS:
            continue
        whole = fit_of(structure, part, names_of(key))
        if whole is None or whole.error <= EXACT_ERROR:
            continue
        measured = [alike[other] for other in others]
        fit = best_fit([dict(other) for other in others], measured, structure, resident_bytes)
        if fit.error > USABLE_ERROR or not fit.covers(dict(key)):
            continue
        told, found = structure.summary(np.array([fit.values_at(dict(key)), known[key].values]))[:, :2]
        far = CONTRADICTED * max(fit.error, EXACT_ERROR) * (told[0] + resident_bytes)
        is_first = key == observed.oldest and all(fit.low[name] <= value <= fit.high[name] for name, value in key)
        # With everything kept nothing was missing then, but something is with everything recomputed, or is too much.
        made_once = is_first and abs(told[0] - found[0]) <= far < abs(told[1] - found[1])
        if told[0] - found[0] > far or made_once:
            return True
    return False
