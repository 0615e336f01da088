"""The estimator: input size -> every column of a step's structure, and how far to trust it.

The paper fits one quadratic per module in one scalar. Here every column (saved bytes, working sets, levels,
operations) is a polynomial in the named dimensions that vary, with non-negative coefficients where that fits,
which is exact as long as the kernels do not change. Trust is measured: each size is predicted from the others,
and a size outside the range seen, or a fit that leaves residuals, is not trusted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.features import Relation, varying_dims
from lightning_mimose.predict.fit import GOOD_ERROR, USABLE_ERROR, Fit, Value
from lightning_mimose.predict.fits import Fits
from lightning_mimose.predict.handing import common
from lightning_mimose.predict.paths import Habits, Waits
from lightning_mimose.predict.scatter import Scatter
from lightning_mimose.predict.structure import Structure

MAX_OBSERVATIONS = 48
MAX_STRUCTURES = 8
FORGET_AFTER = 20
"""Steps in a row on the same part of the longest path seen, after which that one counts as a thing of the past."""


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
        others: Predictions of the other paths that such a step may take; what is said besides holds for all of them.
    """

    structure: Structure
    values: NDArray[np.float64]
    error: float
    trusted: bool
    doubtful: frozenset[str] = frozenset()
    dims: Mapping[str, int] = field(default_factory=dict)
    reach: float = 1.0
    others: tuple[Prediction, ...] = ()


class Estimator:
    """Learns from observed steps; predicts others.

    Args:
        patience: Sizes after which a fit with small residuals is used with a margin, for each varying dimension.
    """

    def __init__(self, patience: int = 5) -> None:
        self.resident_bytes = 0
        """What is resident besides activations: errors are shares of a step's whole peak."""
        self._patience = patience
        self._enough = 0
        self._measured_since: set[tuple[tuple[str, int], ...]] = set()
        self._observed: dict[Structure, dict[tuple[tuple[str, int], ...], NDArray[np.float64]]] = {}
        self.fits = Fits()
        self._latest: dict[tuple[str, ...], Structure] = {}
        """Of every kind of batch (names of dimensions), the newest last."""
        self._first: Structure | None = None
        """The very first step's, as long as there is none alike."""
        self._shorter = 0
        self._shorter_path: Structure | None = None
        self.varies = False
        """Whether steps were seen on several paths (layers dropped at random, tasks in turns)."""
        self._waits, self._habits, self._scatter = Waits(), Habits(), Scatter()
        self._rate: float | None = None
        self._handed: tuple[dict[str, int], dict[str, frozenset[str]], dict[str, int]] | None = None
        self._proven: dict[str, int] = {}
        self._compared: dict[str, int] = {}

    def __len__(self) -> int:
        """Number of distinct sizes observed."""
        return sum(len(sizes) for sizes in self._observed.values())

    def add(self, dims: Mapping[str, int], structure: Structure, values: NDArray[np.float64]) -> None:
        """Learn from one measured step.

        Args:
            dims: Named dimensions of its batch.
            structure: Its shape.
            values: Shape (structure.columns,).
        """
        key = tuple(sorted(dims.items()))
        names = _names(key)
        self._habits.add(key, structure.path)
        # A step that leaves calls out needs less than the next one may: only the longest path is learnt from. One of
        # another kind of batch (a text without images) is a path of its own.
        alike = self._alike(names)
        is_known = any(structure.path == other.path for other in alike)
        is_part = any(structure.path.is_part_of(other.path) for other in alike)
        self.varies |= bool(alike) and not is_known
        if is_known or is_part:
            self._waits.known(names)
        else:
            self._waits.new(names, one_of_several=not all(other.path.is_part_of(structure.path) for other in alike))
        if is_part:
            self._shorter = self._shorter + 1 if structure == self._shorter_path else 1
            self._shorter_path = structure
            if self._shorter < FORGET_AFTER:
                return
        self._shorter = 0
        for other in alike:
            if other.path.is_part_of(structure.path) or structure.path.is_part_of(other.path):
                rest = {k: values for k, values in self._observed.pop(other).items() if _names(k) != names}
                if rest:
                    self._observed[other] = rest
        before = next((other for other in self._observed if other == structure), None)
        if before is None:
            self._first = self._first if self._observed else structure
        elif before is self._first:
            self._first = None  # others may hold on to the first batch's inputs for good, which says nothing of others
        else:
            structure = before.with_holds_of(structure)  # they may hold them longer in some steps than in others
        known = self._known_as(structure)
        if key in known:
            self._scatter.add(structure, known.pop(key), values, self.resident_bytes)
        known[key] = values
        if len(self) < self._enough:
            self._measured_since.add(key)
        if len(self._observed) > MAX_STRUCTURES:
            del self._observed[next(s for s in self._observed if s != structure)]
        if len(known) > MAX_OBSERVATIONS:
            # Oldest first, but never the extremes of a dimension, which span the range that is trusted.
            most, _ = Counter(map(_names, known)).most_common(1)[0]
            like = [other for other in known if _names(other) == most]
            ranges = [[other[i][1] for other in like] for i in range(len(most))]
            low, high = [min(values) for values in ranges], [max(values) for values in ranges]
            inner = (k for k in like if all(low[i] < k[i][1] < high[i] or low[i] == high[i] for i in range(len(k))))
            known.pop(next(inner, like[0]))
        self._latest.pop(names, None)
        self._latest[names], self._rate, self._handed = structure, None, None
        self.fits.measured(self._observed)

    def _known_as(self, structure: Structure) -> dict[tuple[tuple[str, int], ...], NDArray[np.float64]]:
        """The sizes that were observed of an equal structure, from now on of this very one.

        One object: comparing two equal ones takes milliseconds.
        """
        if not any(other is structure for other in self._observed):
            self._latest = {kind: structure if other == structure else other for kind, other in self._latest.items()}
            self._observed[structure] = self._observed.pop(structure, {})
        return self._observed[structure]

    def refine(
        self, structure: Structure, fates: Mapping[frozenset[str], Sequence[str | None]], acting: Collection[str]
    ) -> bool:
        """Learn from a planned step which inputs live longer, see `Structure.contradicted`; whether there are any."""
        refined = structure.contradicted(fates, acting)
        if refined is None or refined not in self._observed:
            return False
        self._known_as(refined)
        self._handed = None
        return True

    @property
    def handed_on(self) -> dict[str, int]:
        """Unit -> up to which grade its result is handed on, in steps of every shape that calls it."""
        return self._handing[0]

    @property
    def takers(self) -> dict[str, frozenset[str]]:
        """Unit whose result could be rebuilt -> the units that are given it."""
        return self._handing[1]

    @property
    def places(self) -> dict[str, int]:
        """Unit of `handed_on` -> which of the storages that it returns is handed on, from 0."""
        return self._handing[2]

    @property
    def _handing(self) -> tuple[dict[str, int], dict[str, frozenset[str]], dict[str, int]]:
        if self._handed is None:
            takers: dict[str, frozenset[str]] = {}
            places: dict[str, set[int]] = {}
            for structure in self._observed:
                for each in structure.handing:
                    unit, taker = structure.calls[each.call].unit, structure.calls[each.taker].unit
                    takers[unit] = takers.get(unit, frozenset()) | {taker}
                    places.setdefault(unit, set()).add(each.place)
            limits = common(structure.handed_on for structure in self._observed)
            always = {unit: min(found) for unit, found in places.items() if len(found) == 1}
            self._handed = {unit: limit for unit, limit in limits.items() if unit in always}, takers, always
        return self._handed

    def observations(self) -> Iterator[tuple[dict[str, int], Structure, NDArray[np.float64]]]:
        """Every size that was measured, the newest last: named dimensions, shape of the step, columns."""
        for structure, known in self._observed.items():
            for key, values in known.items():
                yield dict(key), structure, values

    def distrust(self) -> None:
        """A prediction was wrong: the fit looked better than it was. Ask for two more sizes.

        They may never come: a size that is measured from now on is believed, whatever others there are.
        """
        self._enough = len(self) + 2
        self._measured_since.clear()
        self._proven.clear()
        self._compared.clear()

    def has_habit(self, dims: Mapping[str, int]) -> bool:
        """Whether a size always took one of several paths, so that what is predicted for it holds for no other size."""
        return self.varies and self._habits.of(tuple(sorted(dims.items()))) is not None

    def unsettle(self, dims: Iterable[str]) -> bool:
        """A planned step took a path that was not known; returns whether batches with these dimensions wait for it."""
        return self._waits.strange(tuple(sorted(dims)))

    def prove(self, dims: Iterable[tuple[str, int]], *, lean: bool) -> None:
        """Learn that a prediction was right for some dimensions: as good as measured, for `Prediction.reach`.

        Args:
            dims: The dimensions.
            lean: Whether units were kept lean; otherwise it says nothing of those, see `beyond_compared`.
        """
        for name, value in dims:
            for known in (self._compared, self._proven) if lean else (self._compared,):
                known[name] = max(value, known.get(name, 0))

    def beyond_compared(self, dims: Iterable[tuple[str, int]]) -> float:
        """How far dimensions are beyond those of planned steps that came out as predicted, whatever they did."""
        return max((value / max(1, self._compared.get(name, 0)) for name, value in dims), default=1.0)

    def predict(self, dims: Mapping[str, int]) -> Prediction | None:
        """Predict a size; None before anything was observed, or if the batch has other dimensions."""
        key = tuple(sorted(dims.items()))
        latest = self._latest.get(_names(key))
        if latest is None or latest not in self._observed:
            return None
        alike = self._alike(_names(key))
        newest = {latest.path: latest} | {other.path: other for other in alike if other.path != latest.path}
        paths = {path: self._on_path(structure, dims, key) for path, structure in newest.items()}
        settled = self._waits.are_over(_names(key))
        habit = self._habits.of(key) if settled else None
        if habit in paths:  # of the others, those that were only seen with other sizes say nothing of this one
            here = {structure.path for structure, known in self._observed.items() if key in known}
            paths = {path: each for path, each in paths.items() if path in here or (each and each.trusted)}
        first, *others = paths.values()
        if first is None or (settled and not others):
            return first
        found = [each for each in (first, *others) if each is not None]
        return replace(
            first,
            error=max(each.error for each in found),
            trusted=settled and all(each is not None and each.trusted for each in (first, *others)),
            doubtful=frozenset().union(*(each.doubtful for each in found)),
            reach=max(each.reach for each in found),
            others=tuple(found[1:]),
        )

    def _on_path(
        self, structure: Structure, dims: Mapping[str, int], key: tuple[tuple[str, int], ...]
    ) -> Prediction | None:
        """Predict a size, if its step takes the path of a structure."""
        here = [(other, known) for other, known in self._observed.items() if other.path == structure.path]
        seen = [other for other, known in here if key in known]
        # Beside other gradients of earlier steps (none, in the first one) it was another step: a fit is better then.
        alike = [other for other in seen if other.old_gradient_bytes == structure.old_gradient_bytes]
        fitted = None if alike else self._fitted(structure, dims, key)
        seen = alike or seen
        if seen and (fitted is None or not fitted.trusted):
            # The same size in steps of several shapes: which one comes next is anybody's guess.
            trusted = len(seen) == 1 and (key in self._measured_since or len(self) >= self._enough)
            error = self._scatter.error
            return Prediction(
                seen[-1], self._observed[seen[-1]][key], error, trusted and error <= USABLE_ERROR, dims=dims
            )
        return fitted

    def _fitted(
        self, structure: Structure, dims: Mapping[str, int], key: tuple[tuple[str, int], ...]
    ) -> Prediction | None:
        best: Prediction | None = None
        usable: Prediction | None = None
        names = _names(key)
        parts: list[Value | None] = [("batch", dims["batch"])] if "batch" in dims else []
        parts.append(None)
        for part in parts:
            fit = self._fit(structure, part, names)
            if fit is None:
                continue
            # Sizes that a fit leaves out for a small side have one of their own.
            parts.extend(each for name in fit.too_small(dims) if (each := (name, dims[name])) not in parts)
            if not fit.covers(dims):
                continue
            error = max(fit.error_at(dims, self.resident_bytes), self._scatter.error)
            trusted = self._trusted(fit, error, dims)
            reach = max(dims[name] / max(1, fit.high[name], self._proven.get(name, 0)) for name in dims)
            prediction = Prediction(structure, fit.values_at(dims), error, trusted, fit.doubtful, dims, reach)
            if prediction.trusted:
                return prediction
            best = best or prediction
            # Kernels whose scratch depends on whether a side is even follow no polynomial however many sizes are seen:
            # twice the margin, after twice the patience, is better than no plan ever.
            if self._trusted(fit, error, dims, times=2) and (usable is None or error < usable.error):
                usable = replace(prediction, trusted=True)
        return usable or best

    def completed(self, dims: Mapping[str, int], named: Collection[str]) -> dict[str, int]:
        """A size of which some dimensions were named: those that always followed from others do so here."""
        found = dict(dims)
        for relation in self.relations:
            if relation.name not in named and found.keys() >= {relation.name, *relation.others}:
                found[relation.name] = max(0, round(relation.value(found)))
        return found

    @property
    def relations(self) -> tuple[Relation, ...]:
        """What followed from what in all sizes of the latest path that have the latest one's dimensions."""
        if not self._latest:
            return ()
        names, structure = next(reversed(self._latest.items()))
        fit = self._fit(structure, None, names)
        if fit is not None and fit.without:  # which was made from a part of them
            return varying_dims([dict(key) for key in self._observed[structure] if _names(key) == names])[1]
        return () if fit is None else fit.relations

    def _fit(self, structure: Structure, part: Value | None, names: tuple[str, ...]) -> Fit | None:
        """The fit over all sizes, or over those that have one value of some dimension.

        The batch, as a rule: a shorter last one must not disturb the others. Only of sizes with these dimensions: a
        batch without a mask, or of another task, may make the same calls.
        """
        known = {key: values for key, values in self._observed[structure].items() if _names(key) == names}
        return self.fits.of(structure, part, known, self.resident_bytes)

    def _trusted(self, fit: Fit, error: float, dims: Mapping[str, int], times: int = 1) -> bool:
        """Whether plans may be built on a fit; `times` as large an error is usable after as many times the patience."""
        if len(self) < self._enough:
            return False
        if error <= GOOD_ERROR:
            reach = 4.0
        elif error <= times * USABLE_ERROR and fit.sizes >= times * self._patience * max(1, len(fit.basis.dims)):
            reach = 1.25
        else:
            return False
        return all(fit.low[name] / reach <= value <= fit.high[name] * reach for name, value in dims.items())

    def _alike(self, names: tuple[str, ...]) -> list[Structure]:
        """The shapes that steps of batches with these dimensions were seen to have."""
        return [structure for structure, known in self._observed.items() if any(_names(key) == names for key in known)]

    def seconds_per_operation(self) -> float:
        """Rate of recomputation on this device, over all regions of each structure's largest batch; a guess before.

        Recomputations are measured beside a profiler and modes that count, which take as long for the operations of a
        small batch as for those of a large one.
        """
        if self._rate is None:
            seconds = operations = 0.0
            for structure, known in self._observed.items():
                regions = [call for call in structure.calls if call.region]
                work = [column for call in regions for column in (call.flops, call.besides)]
                largest = max(known.values(), key=lambda values: values[work].sum())
                seconds += float(largest[[call.seconds for call in regions]].sum())
                operations += float(largest[work].sum())
            self._rate = seconds / operations if operations and seconds else 1e-11
        return self._rate

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, as plain data."""
        number = {structure.path: i for i, structure in enumerate(self._observed)}
        return {
            "varies": self.varies,
            "waits": [[list(kind), left] for kind, left in self._waits.left.items()],
            "observed": [
                {
                    "structure": asdict(structure),
                    "sizes": [[list(map(list, key)), values.tolist()] for key, values in known.items()],
                }
                for structure, known in self._observed.items()
            ],
            "habits": [
                [number[path], list(map(list, key)), steps]
                for key, (path, steps) in self._habits.steps.items()
                if path in number
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another estimator learnt."""
        self.varies = bool(state.get("varies", False))
        paths = []
        for entry in state["observed"]:
            structure = Structure.of(entry["structure"])
            paths.append(structure.path)
            for key, values in entry["sizes"]:
                self.add({name: int(value) for name, value in key}, structure, np.array(values, dtype=np.float64))
        for kind, left in state["waits"]:
            self._waits.left[tuple(kind)] = int(left)
        for number, key, steps in state["habits"]:
            self._habits.steps[tuple((name, int(value)) for name, value in key)] = paths[number], int(steps)


def _names(key: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    return tuple(name for name, _ in key)
