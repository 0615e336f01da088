"""What a fit misses at single moments: it is judged by whole peaks, and a plan may have its peak at any of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.structure import Structure


def shortfalls(
    structure: Structure, missing: NDArray[np.float64], covered_bytes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """What has to be added to every column for no moment of the sizes that were seen to be predicted too low.

    What a position takes is the larger of several things in it, each of which follows a polynomial: where another one
    is the larger in small sizes than in large ones, no polynomial describes it.

    Args:
        structure: What the columns are.
        missing: Shape (sizes, columns); what was seen, less what is predicted.
        covered_bytes: Shape (sizes,); what plans leave free anyway, because the fit is not exact.

    Returns:
        Shape (columns,), bytes; zero but for columns that say what is alive at some moment.
    """
    padded = np.concatenate([missing, np.zeros((len(missing), 1))], axis=1)
    found = np.zeros(structure.columns)
    column, entry, _, _ = structure.arrays
    _, position, own = structure.layout.lean_positions
    calls = structure.layout.columns
    again, until_last = structure.layout.lean_working
    regions = calls["entry"] >= 0
    # Each moment is measured from another one, whose own miss counts in it.
    for base, moment in (
        (entry, column),
        (entry[position], own),
        (entry[position], structure.layout.lean_again),
        (calls["before_backward"], calls["working"]),
        (calls["before_backward"][again], until_last),
        (calls["entry"][regions], calls["lean"][regions]),
    ):
        missed = padded[:, base] + padded[:, moment] - covered_bytes[:, None]
        np.maximum.at(found, moment, missed.max(axis=0, initial=0.0))
    return found
