"""Trust: whether plans may be built on what a fit, or one measured size, says; and how far beyond what was seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lightning_mimose.predict.checking import GOOD_ERROR, USABLE_ERROR
from lightning_mimose.predict.fewer import together
from lightning_mimose.predict.fit import Blocks, Fit
from lightning_mimose.predict.paths import Key

FAR, NEAR = 4.0, 1.25
"""How many times as large as those that were measured, or as small, sizes may be that a good fit is believed of. The
second is for one that is no more than usable, and for how large dimensions may be that a fit does without."""


class Trust:
    """Says it by how well sizes were predicted from each other, by how many there are, and by what came true since.

    Args:
        patience: Sizes after which a fit with small residuals is used with a margin, for each varying dimension.
        turns: Dimension -> from which of its values on kernels are others: no fit holds beyond one it has not seen.

    Attributes:
        decided: Which of two blocks lengths are rounded up to, where planned steps have told.
    """

    def __init__(self, patience: int, turns: Mapping[str, Sequence[int]]) -> None:
        self.turns = dict(turns)
        self.decided: set[Blocks] = set()
        self._patience = patience
        self._enough = 0
        self._measured_since: set[Key] = set()
        self._proven: dict[str, int] = {}
        self._compared: dict[str, int] = {}

    def lose(self, sizes: int) -> None:
        """A prediction was wrong: the fit looked better than it was. Ask for two more sizes than the number measured.

        They may never come: a size that is measured from now on is believed, whatever others there are.
        """
        self._enough = sizes + 2
        self._measured_since.clear()
        self._proven.clear()
        self._compared.clear()
        self.decided.clear()

    def measured(self, key: Key, sizes: int) -> None:
        """A size was measured, one of so many now."""
        if sizes < self._enough:
            self._measured_since.add(key)

    def dropped(self, key: Key) -> None:
        """What was measured of a size is forgotten."""
        self._measured_since.discard(key)

    def prove(self, dims: Iterable[tuple[str, int]], *, lean: bool) -> None:
        """Learn that a prediction was right for some dimensions: as good as measured, for `Prediction.reach`.

        Args:
            dims: The dimensions.
            lean: Whether units were kept lean; otherwise it says nothing of those, see `beyond_compared`.
        """
        for name, value in dims:
            for known in (self._compared, self._proven) if lean else (self._compared,):
                known[name] = max(value, known.get(name, 0))

    def decide(self, torn: Iterable[Blocks]) -> None:
        """Learn that lengths are rounded up to the first of two blocks, and not to the other."""
        self.decided.update(torn)

    def beyond_compared(self, dims: Iterable[tuple[str, int]]) -> float:
        """How far dimensions are beyond those of planned steps that came out as predicted, whatever they did."""
        return max((value / max(1, self._compared.get(name, 0)) for name, value in dims), default=1.0)

    def reach(self, fit: Fit, dims: Mapping[str, int]) -> float:
        """How far they are beyond those that a fit was made of, or that were proven since."""
        return max(dims[name] / max(1, fit.high[name], self._proven.get(name, 0)) for name in dims)

    def in_size(self, key: Key, error: float, sizes: int) -> bool:
        """Whether plans may be built on what was measured of a size itself.

        Args:
            key: The size.
            error: By which share of the peak steps like it have differed.
            sizes: How many were measured.
        """
        usable = USABLE_ERROR * (2 if sizes >= 2 * self._patience else 1)
        return (key in self._measured_since or sizes >= self._enough) and error <= usable

    def in_fit(self, fit: Fit, error: float, dims: Mapping[str, int], sizes: int, times: int = 1) -> bool:
        """Whether plans may be built on a fit.

        Args:
            fit: The fit.
            error: Expected error as a share of the step's peak.
            dims: For which size.
            sizes: How many were measured.
            times: As many times as large an error is usable after as many times the patience.
        """
        if sizes < self._enough:
            return False
        dimensions = len(fit.basis.dims) + len(fit.unused)
        if error <= GOOD_ERROR:
            reach = FAR
        elif error <= times * USABLE_ERROR and fit.sizes >= times * self._patience * max(1, dimensions):
            reach = NEAR
        else:
            return False
        for name in self.turns.keys() & dims.keys():
            if any(
                fit.high[name] < turn <= dims[name] or dims[name] < turn <= fit.low[name] for turn in self.turns[name]
            ):
                return False
        # What is left out has decided next to nothing so far: not much more of it, one by one and all together.
        if fit.unused and together(dims, fit.unused, fit.high) > NEAR * fit.most_unused:
            return False
        most = {name: value * (NEAR if name in fit.unused else reach) for name, value in fit.high.items()}
        return all(fit.low[name] / reach <= value <= most[name] for name, value in dims.items())
