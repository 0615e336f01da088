"""A prediction: what a step of some size is expected to take, and whether plans may be built on that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.fit import Blocks
from lightning_mimose.predict.structure import Structure


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a step of some size is expected to look like.

    Attributes:
        structure: Its shape.
        values: Shape (structure.columns,).
        error: Expected error as a share of the step's peak.
        trusted: Whether plans may be built on it.
        doubtful: Grades of lean saves whose peaks do not follow the fit (kernels that change with the size).
        dims: The named dimensions it is for.
        reach: The largest of them over the largest that was measured, or proven since; at most 1 where none is larger.
        others: Predictions of the other paths that such a step may take, or of other shapes on its path; what is said
            besides holds for all of them.
        torn: What else it may be rounded up to, and the values then, see `Fit.torn_at`; `values` are those of the
            larger blocks.
    """

    structure: Structure
    values: NDArray[np.float64]
    error: float
    trusted: bool
    doubtful: frozenset[str] = frozenset()
    dims: Mapping[str, int] = field(default_factory=dict)
    reach: float = 1.0
    others: tuple[Prediction, ...] = ()
    torn: Mapping[Blocks, NDArray[np.float64]] = field(default_factory=dict)
