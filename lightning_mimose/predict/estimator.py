"""The estimator: input size -> every column of a step's structure, and how far to trust it.

The paper fits one quadratic per module in one scalar. Here every column (saved bytes, working sets, levels,
operations) is a polynomial in the named dimensions that vary, with non-negative coefficients where that fits,
which is exact as long as the kernels do not change. Trust is measured: each size is predicted from the others,
and a size outside the range seen, or a fit that leaves residuals, is not trusted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.ample import Bounds
from lightning_mimose.predict.bare import is_contradicted
from lightning_mimose.predict.features import Relation, varying_dims
from lightning_mimose.predict.fit import Fit
from lightning_mimose.predict.fits import Fits, Part, with_batch_of, with_side, with_value
from lightning_mimose.predict.given import tells_more
from lightning_mimose.predict.maxima import NOT_KNOWN, Maxima, Measured
from lightning_mimose.predict.nearby import alone_with, nearer
from lightning_mimose.predict.observed import Observed
from lightning_mimose.predict.pace import Pace
from lightning_mimose.predict.paths import Key, names_of
from lightning_mimose.predict.prediction import Prediction
from lightning_mimose.predict.rates import AGAIN_SECONDS, Rates, overlapped
from lightning_mimose.predict.structure import Structure
from lightning_mimose.predict.trust import Trust
from lightning_mimose.sizes import BatchSize


class Estimator:
    """Learns from observed steps; predicts others.

    Attributes:
        token: Stands for it: plans that are made by it are none of another's.
        bounds: What steps take at most that no fit describes.
        trust: How far fits and single sizes are believed.
        shelter_only: Sizes for which a plan that was to be leaner than the shelter was not.
        missed_beyond: Sizes for which such a plan broke the budget -> bytes that it was above what it was to reach.
        broke: Sizes of which a planned step broke the budget -> bytes that it was above its prediction, at most.
        verified: Planned steps that were held against its predictions.

    Args:
        patience: See `Trust`.
        turns: See `Trust`.
    """

    def __init__(self, patience: int = 5, turns: Mapping[str, Sequence[int]] = MappingProxyType({})) -> None:
        self.token = object()
        self.bounds = Bounds()
        self.shelter_only: set[BatchSize] = set()
        self.missed_beyond: dict[BatchSize, int] = {}
        self.broke: dict[Key, int] = {}
        self.verified = 0
        self.resident_bytes = 0
        """What is resident besides activations: errors are shares of a step's whole peak."""
        self.adds_to_gradients = False
        """Whether the next step may add to gradients of earlier ones."""
        self.trust = Trust(patience, turns)
        self.observed = Observed()
        self.fits = Fits()
        self._rate: float | None = None
        self.pace = Pace()

    def __len__(self) -> int:
        """Number of distinct sizes observed."""
        return len(self.observed)

    @property
    def knows_anything(self) -> bool:
        """Whether sizes were measured, or bounds are known."""
        return len(self) > 0 or self.bounds.knows_anything

    def add(
        self,
        dims: Mapping[str, int],
        structure: Structure,
        values: NDArray[np.float64],
        maxima: Maxima = NOT_KNOWN,
        *,
        bare: bool = False,
        seconds: float = 0.0,
        units: int | None = None,
    ) -> None:
        """Learn from one measured step.

        Args:
            dims: Named dimensions of its batch.
            structure: Its shape.
            values: Shape (structure.columns,).
            maxima: What some of them are the largest of, if that is known.
            bare: Whether it found no gradients of an earlier step. What others do with those (clones that are kept from
                step to step) is no part of it then, so others are believed rather than it.
            seconds: What the forward of all that was recomputed took.
            units: Stands for the units that were called, see `Parting.called`; None where nobody knows.
        """
        key = tuple(sorted(dims.items()))
        if not self.observed.add(key, structure, Measured(values, maxima, seconds), self.resident_bytes, units):
            return
        self.observed.note_gradients(key, bare=bare)
        self.trust.measured(key, len(self))
        self._rate = None
        self.fits.measured(self.observed.sizes)
        for doubtful in {self.observed.bare, self.observed.oldest}:
            if doubtful in (None, key):
                continue
            if is_contradicted(doubtful, self.observed, self._timely_fit, self.resident_bytes):
                self.drop(doubtful)

    def disbelieve(self, dims: Iterable[tuple[str, int]]) -> bool:
        """Forget what was measured of a size in a step that found no gradients; returns whether there was anything."""
        key = tuple(sorted(dims))
        if key != self.observed.bare:
            return False
        self.drop(key)
        return True

    def drop(self, dims: Iterable[tuple[str, int]]) -> None:
        """Forget what was measured of a size."""
        key = tuple(sorted(dims))
        self.observed.drop(key)
        self.trust.dropped(key)
        self._rate = None
        self.fits.measured(self.observed.sizes)

    def observations(self) -> Iterator[tuple[dict[str, int], Structure, NDArray[np.float64]]]:
        """Every size that was measured, the newest last: named dimensions, shape of the step, columns."""
        for structure, known in self.observed.sizes.items():
            for key, measured in known.items():
                yield dict(key), structure, measured.values

    def distrust(self) -> None:
        """A prediction was wrong: see `Trust.lose`."""
        self.trust.lose(len(self))

    def note_broken(self, size: BatchSize, missed_bytes: int) -> None:
        """A planned step of a size broke the budget: what was missing is kept free for this size from now on."""
        for key in {tuple(sorted(each.dims)) for each in (size, size.rounded_up())}:
            self.broke[key] = max(missed_bytes, self.broke.get(key, 0))

    def has_habit(self, dims: Mapping[str, int]) -> bool:
        """Whether its size tells which of several paths a step takes: what is predicted holds for no other one."""
        if names_of(tuple(sorted(dims.items()))) in self.observed.parting.parts:
            return True
        return self.observed.varies and self.observed.habits.of(tuple(sorted(dims.items()))) is not None

    def called(self, dims: Iterable[tuple[str, int]], units: int) -> bool:
        """A step of some size, measured or planned, called a set of units, see `Parting.called`."""
        news = self.observed.called(tuple(sorted(dims)), units, self.resident_bytes)
        if news:
            self._rate = None
            self.fits.measured(self.observed.sizes)
        return news

    def may_skip(self, dims: Iterable[tuple[str, int]]) -> bool:
        """Whether a size may take less than what is predicted for it, see `Parting.may_skip`."""
        return self.observed.parting.may_skip(tuple(sorted(dims)))

    def unsettle(self, dims: Iterable[str]) -> bool:
        """A planned step took a path that was not known; returns whether batches with these dimensions wait for it."""
        return self.observed.waits.strange(tuple(sorted(dims)))

    def wait_for(self, dims: Iterable[str]) -> None:
        """A planned step did what none had done: the next one with these dimensions tells whether that goes on."""
        self.observed.waits.next(tuple(sorted(dims)))

    def heed(self, dims: Iterable[str], structure: Structure) -> bool:
        """A measured step tells nothing but its path; returns whether batches with these dimensions wait for it now."""
        names = tuple(sorted(dims))
        known = {other.path for other in self.observed.alike(names)}
        path = self.observed.loops.path_of(names, structure)
        is_new = bool(known) and path not in known and not any(path.is_part_of(other) for other in known)
        return is_new and self.observed.waits.strange(names)

    def predict(self, dims: Mapping[str, int]) -> Prediction | None:
        """Predict a size; None before anything was observed of its dimensions, or of the path that it takes."""
        key, observed = tuple(sorted(dims.items())), self.observed
        names = names_of(key)
        latest = observed.latest(names)
        if latest is None:
            return None
        alike = observed.alike(names)
        newest = {latest.path: latest} | {other.path: other for other in alike if other.path != latest.path}
        settled = observed.waits.are_over(names)
        if observed.by_size(names):
            likely = observed.likely(key, newest)
            newest = {path: shape for path, shape in newest.items() if path in likely}
            if not newest:
                return None
            settled = settled and len(newest) == 1  # between two, others will tell
        alone = {path: self._alone(structure, dims, key) for path, structure in newest.items()}
        paths = {path: alone[path] or self._beside_gradients(each, dims, key) for path, each in newest.items()}
        habit = observed.habits.of(key) if settled else None
        if habit in paths:  # of the others, those that were only seen with other sizes say nothing of this one
            here = {structure.path for structure, known in observed.sizes.items() if key in known}
            paths = {path: each for path, each in paths.items() if path in here or (each and each.trusted)}
        first, *others = paths.values()
        unsure = [newest[path] for path in paths if alone[path] is None]
        others += [
            self._fitted(each, dims, key) for structure in unsure for each in nearer(observed.sizes, structure, key)
        ]
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

    def _alone(self, structure: Structure, dims: Mapping[str, int], key: Key) -> Prediction | None:
        """By the one shape of batches that are as large, where that tells enough: no other one says anything then."""
        shape = alone_with(self.observed.sizes, structure, key)
        found = None if shape is None else self._beside_gradients(shape, dims, key)
        if found is None or not found.trusted:
            return None
        other = found.structure  # of the other kind, maybe
        return found if other is shape or alone_with(self.observed.sizes, other, key) == other else None

    def _beside_gradients(self, structure: Structure, dims: Mapping[str, int], key: Key) -> Prediction | None:
        """As `_on_path`, by steps that treat gradients of earlier ones as the next one will, where they tell enough.

        Those that make them anew hold all that one layer's backward makes, and others no two of them at once.
        """
        if structure.adds_to_gradients != self.adds_to_gradients:
            for other in self.observed.sizes:
                if other.path == structure.path and other.adds_to_gradients == self.adds_to_gradients:
                    found = self._on_path(other, dims, key)
                    if found is not None and found.trusted:
                        return found
        return self._on_path(structure, dims, key)

    def _on_path(self, structure: Structure, dims: Mapping[str, int], key: Key) -> Prediction | None:
        """Predict a size, if its step takes the path of a structure."""
        here = [(other, known) for other, known in self.observed.sizes.items() if other.path == structure.path]
        seen = [other for other, known in here if key in known]
        # Beside other gradients of earlier steps (none, in the first one) it was another step: a fit is better then.
        bare = key == self.observed.bare
        alike = [o for o in seen if o.old_gradient_bytes == structure.old_gradient_bytes and not bare]
        fitted = None if alike else self._fitted(structure, dims, key)
        seen = alike or seen
        if seen and (fitted is None or not fitted.trusted):
            # The same size in steps of several shapes: which one comes next is anybody's guess.
            error, values = self.observed.scatter.error_on(structure.path), self.observed.sizes[seen[-1]][key].values
            trusted = len(seen) == 1 and self.trust.in_size(key, error, len(self))
            return Prediction(seen[-1], values, error, trusted, dims=dims)
        return fitted

    def _fitted(self, structure: Structure, dims: Mapping[str, int], key: Key) -> Prediction | None:
        best: Prediction | None = None
        usable: Prediction | None = None
        names, scatter = names_of(key), self.observed.scatter.error_on(structure.path)
        # Where kernels change, sizes on the other side may go by no formula that is right for those on this one.
        turns = self.trust.turns
        sides = (with_side(name, dims[name], turns[name]) for name in turns.keys() & dims.keys())
        parts: list[Part | None] = [*dict.fromkeys([with_batch_of(key), None]), *sides]
        for part in parts:
            fit = self._fit(structure, part, names)
            if fit is None:
                continue
            # Sizes that a fit leaves out for a small side have one of their own.
            parts.extend(each for n in fit.too_small(dims) if (each := with_value(n, dims[n])) not in parts)
            if not fit.covers(dims):
                continue
            error = max(fit.error_at(dims, self.resident_bytes), scatter)
            trusted, reach = self.trust.in_fit(fit, error, dims, len(self)), self.trust.reach(fit, dims)
            values = fit.values_at(dims)
            torn = {blocks: other for blocks, other in fit.torn_at(dims).items() if blocks not in self.trust.decided}
            prediction = Prediction(structure, values, error, trusted, fit.doubtful, dims, reach, torn=torn)
            if prediction.trusted:
                return prediction
            best = best or prediction
            # Kernels whose scratch depends on whether a side is even follow no polynomial however many sizes are seen:
            # twice the margin, after twice the patience, is better than no plan ever.
            if self.trust.in_fit(fit, error, dims, len(self), times=2) and (usable is None or error < usable.error):
                usable = replace(prediction, trusted=True)
        return usable or best

    def is_told_better_by(self, given: Mapping[Key, tuple[int, ...]], dims: Iterable[tuple[str, int]]) -> bool:
        """Whether steps go by the shapes of what the model is given rather than by their batches, see `tells_more`.

        Args:
            given: Size of a batch -> that shape.
            dims: Of the latest batch.
        """
        key = tuple(sorted(dims))
        names = names_of(key)
        structure = self.observed.latest(names)
        if structure is None or not given:
            return False
        fits = [self._timely_fit(structure, part, names) for part in dict.fromkeys([with_batch_of(key), None])]
        best = min((fit for fit in fits if fit is not None), key=lambda fit: fit.error, default=None)
        return tells_more(given, self.observed.of(structure, names), best, structure, self.resident_bytes)

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
        newest = self.observed.newest()
        if newest is None:
            return ()
        names, structure = newest
        fit = self._fit(structure, None, names)
        if fit is not None and fit.without:  # which was made from a part of them
            return varying_dims([dict(key) for key in self.observed.of(structure, names)])[1]
        return () if fit is None else fit.relations

    def _fit(self, structure: Structure, part: Part | None, names: tuple[str, ...]) -> Fit | None:
        """The fit over all sizes, or over those that have one value of some dimension, or others with its kernels.

        The batch, as a rule: a shorter last one must not disturb the others. Only of sizes with these dimensions: a
        batch without a mask, or of another task, may make the same calls.
        """
        return self.fits.of(structure, part, self.observed.of(structure, names), self.resident_bytes)

    def _timely_fit(self, structure: Structure, part: Part | None, names: tuple[str, ...]) -> Fit | None:
        """The same, unless it comes late."""
        fit = self._fit(structure, part, names)
        return None if self.fits.is_late else fit

    def seconds_per_operation(self) -> float:
        """Rate of recomputation on this device, over all regions of each structure's largest batch; a guess before.

        Regions are measured beside a profiler and hooks, which take as long for the operations of a small batch as for
        those of a large one. Whole steps that were timed without them do more than what is counted: the lesser of the
        two is nearer.
        """
        if self._rate is None:
            seconds = operations = 0.0
            for structure, known in self.observed.sizes.items():
                largest = max(known.values(), key=lambda each: structure.forward_operations(each.values))
                if largest.seconds:
                    seconds += largest.seconds
                    operations += structure.forward_operations(largest.values)
            self._rate = seconds / operations if operations and seconds else 1e-11
        return min(self._rate, self.pace.seconds_per_operation or self._rate)

    def rates(self, structure: Structure, values: NDArray[np.float64]) -> Rates:
        """What the parts of actions cost in a step.

        Args:
            structure: Its shape.
            values: Shape (structure.columns,).
        """
        per_operation, host_seconds = self.seconds_per_operation(), self.pace.host_seconds
        if host_seconds is None or self.pace.seconds_per_operation is None:
            return Rates(per_operation, again_seconds=AGAIN_SECONDS)
        return overlapped(structure, values, per_operation, host_seconds)

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, as plain data."""
        return self.observed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another estimator learnt."""
        self.observed.load_state_dict(state)
        self._rate = None
        self.fits.measured(self.observed.sizes)
