"""The forecast: what a step of some size takes, by what was measured, and how far that is to be believed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from lightning_mimose.advise.advice import RESERVE_SHARE, StepView, with_reserve
from lightning_mimose.errors import MimoseError
from lightning_mimose.menu import CHUNKS, GRADES, OFFLOAD, SPLITS, check_actions
from lightning_mimose.plan import Plan
from lightning_mimose.predict.assemble import Extras, Link, assemble
from lightning_mimose.predict.checking import GOOD_ERROR
from lightning_mimose.predict.comparing import Comparing, Comparisons
from lightning_mimose.predict.estimator import Estimator
from lightning_mimose.predict.features import varying_dims
from lightning_mimose.predict.misses import Misses
from lightning_mimose.predict.paths import joined
from lightning_mimose.predict.penalties import Penalties
from lightning_mimose.predict.postures import Postures
from lightning_mimose.predict.prediction import Prediction
from lightning_mimose.predict.rows import kept_timeline, levels, whole_bytes
from lightning_mimose.predict.shapes import Resident
from lightning_mimose.predict.timeline import Timeline
from lightning_mimose.sizes import BatchSize, SizeTracker, is_size

MINIMUM_UNIT_SHARE = 1e-4
"""Units that save less than this share of the activation peak are left alone."""
SEVERAL_PASSES_ERROR = 0.02
"""Share of the peak by which a step with several backward passes (a GAN's) may be mispredicted."""
UNSCALED_SHARE = 0.02
"""What of a unit may not be proportional to the batch, where the batch never varied."""
LEAN_REACH = 1.1
"""How much larger than all that were measured a batch may be for plans to keep its units lean without more ado."""
FAR_REACH = 1.5
"""How much larger one may be at all before it is measured in shelter."""
LEAN_REACH_ERROR = 0.1
"""Share of the peak by which a lean step may be mispredicted for every doubling of its size beyond that."""
KNOWN_VIEWS = 8
"""Sizes whose whole timelines are remembered, for a budget that is shared."""
KNOWN_PEAKS = 256
"""Sizes between the rounded ones whose peaks are remembered."""


class Forecast:
    """Says what steps will take.

    Args:
        budget_bytes: The budget in force.
        size_fn: Batch -> size; None reads the dimensions of its tensors.
        actions: What plans may choose from, see `menu`.
        fingerprint: Identifies model, precision and device; what was learnt for another is not used.
        turns: See `Estimator`.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        size_fn: Callable[[Any], int | Mapping[str, int]] | None = None,
        actions: Sequence[str] | None = None,
        fingerprint: str = "",
        turns: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        self.budget_bytes = budget_bytes
        self.actions = check_actions(None) if actions is None else tuple(actions)
        self.fingerprint = fingerprint
        self.tracker = SizeTracker(size_fn)
        self.turns = dict(turns)
        self.estimator = Estimator(turns=self.turns)
        self.shelter: dict[str, str] = {}
        self.left_out: set[str] = set()
        self.link: Link | None = None
        """The way to host memory, if offloading is planned with."""
        self.refused: dict[str, str] = {}
        """Unit -> why it can never be recomputed, as the engine found out."""
        self.indivisible: Mapping[str, str] = {}
        """Unit -> why it cannot be split."""
        self.different: dict[str, tuple[str, ...]] = {}
        """Unit -> operations whose results lean saves do not rebuild bit for bit, and so keep."""
        self.spoiled: frozenset[str] = frozenset()
        """Units whose results were changed before the next one saved them, or held for longer than was seen."""
        self.compared: Comparisons | None = None
        """Which recipes were compared so far in the model that is trained, if one is."""
        self.may_hand_on = True
        """Whether a unit's parameters are there while another unit's backward runs; those that are sharded are not."""
        self.owns_allocator = True
        """Whether no other job's tensors are in an accelerator's allocator: what it holds tells of this model's."""
        self.resident = Resident(0, 0, True, 0)
        self.misses = Misses()
        self.penalties = Penalties()
        self.beside_staying = False
        """Whether what is known was learnt beside gradients that stay, of parameters that no optimizer has."""
        self.postures = Postures()
        self._actual_peaks: dict[Any, int] = {}
        self._views: dict[tuple[BatchSize, Resident, object], StepView] = {}

    @property
    def _asked_resident(self) -> Resident:
        """What is taken to be resident where somebody asks: as in the latest step, and updates come."""
        return self.resident._replace(updates=True)

    # --- what a step takes ------------------------------------------------------------------------------------

    def timeline(self, batch_or_size: Any) -> tuple[Timeline, Prediction]:
        """The timeline of a batch, or of named dimensions, and the prediction it was made from.

        Raises:
            MimoseError: Nothing is known about this size yet.
        """
        return self._timeline_for(self.size_of(batch_or_size))

    def _unlike(self, size: BatchSize) -> str:
        """What sets a size apart from all that were measured, in words."""
        dims = dict(size.dims)
        known = [each for each in self.estimator.relations if dims.keys() >= {each.name, *each.others}]
        return "".join(
            f" In all of them {each.name} followed from {' and '.join(each.others)}, and would be "
            f"{round(each.value(dims))} here: name {'both' if len(each.others) == 1 else 'all'}."
            for each in known
            if not each.holds(dims)
        )

    def size_of(self, batch_or_size: Any) -> BatchSize:
        """The size of a batch, or of dimensions of which only some may be named."""
        size = self.tracker.look(batch_or_size)
        if not is_size(batch_or_size):
            return size
        with self.estimator.fits.at_leisure():
            return BatchSize(tuple(self.estimator.completed(dict(size.dims), batch_or_size).items()), size.layout)

    def _timeline_for(self, size: BatchSize) -> tuple[Timeline, Prediction]:
        with self.estimator.fits.at_leisure():
            prediction = self.estimator.predict(dict(size.dims))
        if prediction is None:
            raise MimoseError(
                f"Nothing is known yet about batches of {dict(size.dims)}: {len(self.estimator)} sizes were measured. "
                f"Ask again after some training steps on batches with these dimensions.{self._unlike(size)}"
            )
        data = round(float(prediction.values[prediction.structure.batch]))
        return self.timeline_of(prediction, self._asked_resident.without(-data)), prediction

    def timeline_of(self, prediction: Prediction, resident: Resident) -> Timeline:
        """The timeline of a predicted step beside what is resident."""
        left_out = self.left_out.union(*(each.structure.unsteady for each in (prediction, *prediction.others)))
        paths = [self._on_path(each, resident, left_out) for each in (prediction, *prediction.others)]
        return joined(paths).only(lambda _, action: action not in prediction.doubtful)

    def kept_timeline(self, prediction: Prediction, resident: Resident) -> Timeline | None:
        """The timeline without any options, where what a step takes when it is kept may be within the budget.

        None where that is out of the question, which is found out at once.
        """
        each_path = (prediction, *prediction.others)
        for each in each_path:
            # Without inputs that die, which the timeline takes off, it takes more.
            if int(levels(each.structure, whole_bytes(each.values), resident)[2].max(initial=0)) > self.budget_bytes:
                return None
        return joined([kept_timeline(each.structure, each.values, resident) for each in each_path])

    def _on_path(self, prediction: Prediction, resident: Resident, left_out: Collection[str]) -> Timeline:
        comparing: Comparing = {}
        if self.compared is not None:
            seen = self.estimator.observed.sizes.get(prediction.structure, {})
            measured = [each.values for each in seen.values()]
            comparing = self.compared.to_come(prediction.structure, prediction.values, measured)
        return assemble(
            prediction.structure,
            prediction.values,
            resident,
            rates=self.estimator.rates(prediction.structure, prediction.values),
            minimum_share=MINIMUM_UNIT_SHARE,
            left_out=frozenset(left_out),
            extras=self._extras(prediction),
            handed_on=self.handed_on,
            comparing=comparing,
        )

    @property
    def handed_on(self) -> Mapping[str, int]:
        """Unit -> up to which grade its result is rebuilt by whoever is given it, where the unit is lean.

        None are beside actions that take what they are given apart (splitting) or away (offloading).
        """
        if not self.may_hand_on or not {OFFLOAD, *SPLITS}.isdisjoint(self.actions):
            return {}
        found = self.estimator.observed.handing.handed_on
        return {unit: limit for unit, limit in found.items() if unit not in self.spoiled} if self.spoiled else found

    def _extras(self, prediction: Prediction) -> Extras:
        smaller = {}
        for chunks, action in zip(CHUNKS, SPLITS, strict=True):
            if action in self.actions:
                rows = prediction.dims.get("batch", chunks)
                part_rows = -(-rows // chunks)
                # Pairs of rows, say, are as many as the batch has.
                part = self.estimator.predict(self.estimator.completed({**prediction.dims, "batch": part_rows}, ()))
                # Where the batch never varied, what is known is that activations are proportional to it.
                share = prediction.values * (part_rows / rows + UNSCALED_SHARE)
                if part is None or part.structure != prediction.structure:
                    smaller[chunks] = share
                else:
                    # What is kept free is for the whole batch's error, and that of a measured one is little.
                    exact = part.trusted and part.error <= GOOD_ERROR
                    smaller[chunks] = part.values if exact else np.maximum(part.values, share)
        return Extras(self.link, smaller)

    def _margin_bytes(self, prediction: Prediction, timeline: Timeline, budget_bytes: int) -> int:
        """What a plan leaves free: for what no column describes, and for the fit's error on a step of this size."""
        peak = min(budget_bytes, timeline.peak_bytes({}))
        passes = max(each.structure.passes for each in (prediction, *prediction.others))
        # A size of which nothing is sure has an infinite one: who asks for its plan gets one that leaves much free.
        error = max(min(prediction.error, 1.0), SEVERAL_PASSES_ERROR if passes > 1 else 0.0)
        beyond = LEAN_REACH_ERROR * self.beyond(prediction)
        free = int(RESERVE_SHARE * budget_bytes + (1.5 * error + beyond) * peak)
        broke = self.estimator.broke.get(tuple(sorted(prediction.dims.items())), 0) if self.estimator.broke else 0
        return free + max(self.misses.kept_free_bytes, broke + self.misses.fragmentation_bytes)

    def _actual_peak(self, size: BatchSize, planned: BatchSize, plan: Plan, resident: Resident) -> int | None:
        """A plan is made for a size rounded up; the prediction is for the actual one."""
        return plan.predicted_peak_bytes if planned == size else self.peak_under(plan, size, resident)

    def peak_under(self, plan: Plan, size: BatchSize, resident: Resident) -> int | None:
        """What a batch takes under a plan that was made for another size; None where nothing is known of it."""
        slot = (size, plan, resident, self.estimator.token)
        if slot not in self._actual_peaks:
            prediction = self.estimator.predict(dict(size.dims))
            if prediction is None:
                return None
            if len(self._actual_peaks) >= KNOWN_PEAKS:
                self._actual_peaks.clear()
            kept = None if plan.choices else self.kept_timeline(prediction, resident)
            timeline = self.timeline_of(prediction, resident) if kept is None else kept
            self._actual_peaks[slot] = timeline.peak_bytes(understood_by(timeline, plan.choices))
        return self._actual_peaks[slot]

    def step_view(self, size: BatchSize, resident: Resident) -> StepView | None:
        """What a batch's step looks like; None before anything is known about its size."""
        slot = (size, resident, self.estimator.token)
        if slot not in self._views:
            prediction = self.estimator.predict(dict(size.dims))
            if prediction is None:
                return None
            timeline = self.timeline_of(prediction, resident)
            least, trusted = self.sure_bytes(timeline), self._trusts(prediction, timeline)
            margin = self._margin_bytes(prediction, timeline, self.budget_bytes) if trusted else 0
            wants = timeline.peak_bytes({}) + margin
            if len(self._views) >= KNOWN_VIEWS:
                self._views.clear()
            self._views[slot] = StepView(prediction.structure, timeline, margin, least, wants, trusted, {})
        return self._views[slot]

    def _trusts(self, prediction: Prediction, timeline: Timeline) -> bool:
        """Whether plans are made on a prediction, or its step is measured first.

        Far beyond the sizes that were measured it is, if plans might keep its units lean.
        """
        if not prediction.trusted or prediction.reach <= FAR_REACH or not self.beyond(prediction):
            return prediction.trusted
        needs = with_reserve(timeline.peak_bytes({})) > self.budget_bytes
        return not needs or self.sure_bytes(timeline) > self.budget_bytes

    def beyond(self, prediction: Prediction) -> float:
        """How far a size is beyond those of which it is known how lean units behave; 0 if it is not.

        Inside a lean unit's backward the highest of several moments is learnt. In larger batches it may be another one,
        which no fit has seen (attention's scores grow faster than the rest).
        """
        if not prediction.structure.grades or set(self.actions).isdisjoint(GRADES):
            return 0.0
        return max(0.0, prediction.reach - LEAN_REACH)

    def sure_bytes(self, timeline: Timeline) -> int:
        """The least budget that is sure to do: for the plan that a run which knows nothing starts with."""
        return with_reserve(self._shelter_bytes(timeline))

    def _shelter_bytes(self, timeline: Timeline) -> int:
        return timeline.peak_bytes(self._sheltered(timeline), learns=True)

    def _sheltered(self, timeline: Timeline) -> dict[str, str]:
        known = timeline.option_index
        return {unit: action for unit, action in self.shelter.items() if (unit, action) in known}

    def smallest_feasible_bytes(self, batch_or_size: Any) -> int:
        """`sure_bytes` of a batch, or of named dimensions."""
        return self.sure_bytes(self.timeline(batch_or_size)[0])

    def independent_dims(self, size: BatchSize) -> tuple[str, ...]:
        """The dimensions that vary, of those that a size has, and that follow from no others."""
        alike = [dims for dims, _, _ in self.estimator.observations() if dims.keys() == dict(size.dims).keys()]
        return varying_dims(alike)[0] if alike else ()


def understood_by(timeline: Timeline, choices: Iterable[tuple[str, str]]) -> dict[str, str]:
    """What a plan that was made for another timeline does in this one, which may not have all its options."""
    understood = {}
    for unit, action in choices:
        # A grade of lean saves that is missing spares hardly more than the one before it.
        lower = GRADES[GRADES.index(action) :: -1] if action in GRADES else (action,)
        known = [each for each in lower if (unit, each) in timeline.option_index]
        if known:
            understood[unit] = known[0]
    return understood
