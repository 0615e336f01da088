"""Whether what the model is given tells more of a step than its batch does.

A step may pad two texts to the longer one, or a text to whole blocks: what it takes goes by no polynomial in what the
batch shows, but by one in the shape of what comes to the first unit.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_mimose.predict.checking import GOOD_ERROR
from lightning_mimose.predict.fit import Fit
from lightning_mimose.predict.fitting import best_fit
from lightning_mimose.predict.maxima import Measured
from lightning_mimose.predict.paths import Key
from lightning_mimose.predict.structure import Structure

FEWEST_SIZES, SIZES_PER_DIMENSION = 8, 5
"""Sizes by which that may be told: batches that have a formula of their own have shown it by then."""
BETTER = 0.25
"""What its error has to be of that of the batches' own."""


def tells_more(
    given: Mapping[Key, tuple[int, ...]],
    measured: Mapping[Key, Measured],
    fit: Fit | None,
    structure: Structure,
    resident_bytes: int,
) -> bool:
    """Whether shapes describe well what the sizes of batches describe badly.

    Args:
        given: Size of a batch -> shape of what came to the first unit.
        measured: Size of a batch -> what was measured of its step.
        fit: The best that is made of these sizes; None where there is nothing yet.
        structure: What the columns are.
        resident_bytes: See `best_fit`.
    """
    if fit is None or fit.error <= GOOD_ERROR:
        return False
    known = [key for key in measured if key in given]
    fewest = max(FEWEST_SIZES, SIZES_PER_DIMENSION * len(fit.basis.dims))
    if not known or len(known) % fewest or len({len(given[key]) for key in known}) > 1:  # each time takes too long
        return False
    shapes = [{"batch" if i == 0 else f"given:{i}": n for i, n in enumerate(given[key])} for key in known]
    found = best_fit(shapes, [measured[key] for key in known], structure, resident_bytes)
    return found.error <= min(GOOD_ERROR, BETTER * fit.error)
