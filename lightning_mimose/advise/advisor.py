"""The advisor: the plan for a size, by what was learnt. Numbers only; it outlives the model.

The engine asks it at every step; reports, `explain` and a user's questions ask it after training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from math import inf, isfinite
from types import MappingProxyType
from typing import Any

from lightning_mimose.advise.advice import RESERVE_SHARE, Advice, Holds, with_reserve
from lightning_mimose.advise.forecast import KNOWN_PEAKS, LEAN_REACH, understood_by
from lightning_mimose.advise.student import Student
from lightning_mimose.advise.torn import torn_by
from lightning_mimose.agreement import Choices, Judgement
from lightning_mimose.budget import budget_in_bytes, format_bytes
from lightning_mimose.errors import BudgetInfeasibleError
from lightning_mimose.menu import GRADES, KEEP, RECOMPUTE_LEAN, SPLITS
from lightning_mimose.plan import Plan, Planner, PlannerChoice
from lightning_mimose.plan.best import small_plan
from lightning_mimose.plan.cache import PlanCache
from lightning_mimose.plan.structure import plan_of
from lightning_mimose.predict.checking import USABLE_ERROR
from lightning_mimose.predict.misses import MISSED_SHARE
from lightning_mimose.predict.prediction import Prediction
from lightning_mimose.predict.shapes import Resident
from lightning_mimose.predict.timeline import Timeline
from lightning_mimose.sizes import BatchSize, is_size

log = logging.getLogger(__name__)

KNOWN_PLANS = 64
"""Plans whose actions are remembered as a dictionary."""


class Advisor(Student):
    """A student that answers with plans.

    Args:
        budget_bytes: The budget in force.
        size_fn: Batch -> size; None reads the dimensions of its tensors.
        planner: See `plan.Scheduler`.
        actions: What plans may choose from, see `menu`; the shelter recomputes whatever they say.
        fingerprint: Identifies model, precision and device; what was learnt for another is not used.
        turns: See `Estimator`.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        size_fn: Callable[[Any], int | Mapping[str, int]] | None = None,
        planner: PlannerChoice = "auto",
        actions: Sequence[str] | None = None,
        fingerprint: str = "",
        turns: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        super().__init__(budget_bytes, size_fn=size_fn, actions=actions, fingerprint=fingerprint, turns=turns)
        self.planner = Planner(planner)
        self._unlean: frozenset[str] = frozenset()
        self._divisible: frozenset[str] = frozenset()
        self._leaner = PlanCache(capacity=KNOWN_PEAKS)
        """Plans for sizes that are not trusted yet, where the shelter breaks the budget."""
        self.hints: dict[str, str] = {}
        """What about -> advice on operators that would lower the peak."""
        self.announce: Callable[[str], None] = log.info
        self._announced = False
        self._actions: dict[int, tuple[Plan, dict[str, str], frozenset[str]]] = {}
        """By the identity of plans, which are held so that no other object can have it."""

    def hint(self, about: str, text: str | None) -> None:
        """Advise the user in the report; None takes back what was said about it."""
        self.hints.pop(about, None)
        if text is not None:
            self.hints[about] = text

    def advise(self, size: BatchSize, resident: Resident, batch_bytes: int) -> Advice:
        """The plan for a batch.

        Args:
            size: Its size, as observed.
            resident: What is resident, the batch included.
            batch_bytes: The batch's part of it, which does not identify a plan.
        """
        fits = self.estimator.fits
        if fits.settle():
            self._forget_plans()
        fits.hurries = True
        advice = self._advise(size, resident, batch_bytes)
        if advice.infeasible and fits.is_late:  # nothing is refused by what stands in for a better prediction
            self._forget_plans()
            with fits.at_leisure():
                advice = self._advise(size, resident, batch_bytes)
        return advice

    def _advise(self, size: BatchSize, resident: Resident, batch_bytes: int) -> Advice:
        self.resident = resident.without(batch_bytes)
        self.estimator.resident_bytes = self.resident.total_bytes
        self.estimator.adds_to_gradients = not resident.zeroes_gradients
        planned = self._stands_for(size)
        plan = self.planner.known(self._key(planned), self.budget_bytes)
        if plan is None and planned is not size:
            plan, planned = self.planner.known(self._key(size), self.budget_bytes), size
        hit, infeasible, proves = plan is not None, False, False
        if plan is None and (known := self._leaner.get(self._key(size), self.budget_bytes)) is not None:
            return Advice(known, None, cache_hit=True)
        if plan is None:
            planned, prediction = self._known_size(size)
            if prediction is None:
                return self._unplanned(size, resident, 0)
            key = self._key(planned)
            plan = self._kept_whole(key, prediction, resident)
            if plan is None:
                timeline = self.timeline_of(prediction, resident)
                if not self._trusts(prediction, timeline):
                    beyond = self._beyond_shelter(timeline, size)
                    if beyond is not None:
                        self._leaner.put(self._key(size), self.budget_bytes, beyond)
                        return Advice(beyond, None, False)
                    return self._unplanned(size, resident, timeline.peak_bytes({}))
                margin = self._margin_bytes(prediction, timeline, self.budget_bytes)
                sheltered = self.sure_bytes(timeline) <= self.budget_bytes
                plan, infeasible = self.planner.plan(
                    key,
                    self.menu(timeline),
                    self.budget_bytes,
                    margin,
                    can_wait=sheltered,
                    missed_bytes=self.misses.surplus_bytes,
                )
            self._announce()
            if plan is None or (infeasible and self.estimator.may_skip(size.dims)):
                # What the actions asked for cannot do (yet), the shelter can; or it shows whether it can.
                return Advice(None, None, False)
            proves = self.beyond(prediction) > 0
            if proves and set(GRADES).isdisjoint(self.actions_of(plan).values()):
                proves = self.estimator.trust.beyond_compared(size.dims) > LEAN_REACH
            told_by, actions = 2 * MISSED_SHARE * plan.predicted_peak_bytes, self.actions_of(plan)
            proves = proves or bool(torn_by(prediction, resident, self.timeline_of, actions, told_by))
        peak = self._actual_peak(size, planned, plan, resident)
        return Advice(plan, peak, hit, infeasible, proves)

    def actions_of(self, plan: Plan) -> dict[str, str]:
        """The units of a plan that act; the same dictionary whenever the plan is asked for again."""
        return self._known_of(plan)[1]

    def strangers_to(self, plan: Plan) -> frozenset[str]:
        """The units that a plan knows nothing of, of those that the shelter recomputes; remembered likewise."""
        return self._known_of(plan)[2]

    def _known_of(self, plan: Plan) -> tuple[Plan, dict[str, str], frozenset[str]]:
        known = self._actions.get(id(plan))
        if known is None or known[0] is not plan:  # of an object before a copy was made
            if len(self._actions) >= KNOWN_PLANS:
                self._actions.clear()
            strangers = frozenset(self.shelter).difference(plan.units)
            known = self._actions[id(plan)] = plan, dict(plan.choices), strangers
        return known

    def _kept_whole(self, key: Hashable, prediction: Prediction, resident: Resident) -> Plan | None:
        """The plan that keeps everything, where that fits; to know that takes a fraction of the time of planning."""
        timeline = self.kept_timeline(prediction, resident) if prediction.trusted else None
        if timeline is None or with_reserve(timeline.peak_bytes({})) > self.budget_bytes:
            return None
        margin = self._margin_bytes(prediction, timeline, self.budget_bytes)
        return self.planner.keep(key, timeline, self.budget_bytes, margin)

    def _key(self, size: BatchSize, resident: Resident | None = None) -> tuple[Any, ...]:
        """What a plan is remembered for: nothing but tuples, which are looked up fastest."""
        return size.dims, size.layout, resident or self.resident, self.estimator.token

    def _stands_for(self, size: BatchSize) -> BatchSize:
        """The rounded size, unless it may take another path than this one."""
        rounded = size.rounded_up()
        alone = rounded is not size and self.estimator.has_habit(dict(rounded.dims))
        return size if alone else rounded

    def _known_size(self, size: BatchSize) -> tuple[BatchSize, Prediction | None]:
        """The size that a batch is planned as, and what is known of it: sizes that are nearly the same share a plan.

        Of a run whose batches are all of one size no other one is known, not even that which it is rounded up to.
        """
        rounded = self._stands_for(size)
        prediction = self.estimator.predict(dict(rounded.dims))
        error = prediction.error if prediction is not None and prediction.trusted else inf
        if rounded is size or error <= USABLE_ERROR:
            return rounded, prediction
        own = self.estimator.predict(dict(size.dims))
        if own is not None and ((own.trusted and own.error < error) or prediction is None):
            return size, own
        return rounded, prediction

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            self.announce(f"mimose: {len(self.estimator)} sizes measured, planning begins")

    def least(self, timeline: Timeline) -> Plan:
        """The plan with the least peak: the quick answer if it fits, the exact one before anything is refused."""
        return self.planner.least(self.menu(timeline), self.budget_bytes)

    def _beyond_shelter(self, timeline: Timeline, size: BatchSize) -> Plan | None:
        """A plan for a size that is not trusted yet, where the shelter is expected to break the budget.

        The shelter is a cut chosen before anything was measured; what is known by now may name a leaner one.
        """
        missed_bytes = self.estimator.missed_beyond.get(size.rounded_up(), 0)
        shelter_only = size in self.estimator.shelter_only
        if shelter_only or self._shelter_bytes(timeline) <= (1 - RESERVE_SHARE) * self.budget_bytes:
            return None
        least = small_plan(self.menu(timeline))
        most_bytes = (1 - 10 * RESERVE_SHARE) * self.budget_bytes - missed_bytes
        return least if least.predicted_peak_bytes <= most_bytes else None

    def _unplanned(self, size: BatchSize, resident: Resident, kept_bytes: int) -> Advice:
        """Nothing is to be trusted about a size: it is sheltered, or kept whole where the budget is ample.

        Args:
            size: The size.
            resident: What is resident, the batch included.
            kept_bytes: What it is predicted to take if it is kept, for what that is worth.
        """
        most = self.estimator.bounds.of(dict(size.dims))
        if most is not None:
            most = max(max(resident.total_bytes, resident.end_bytes) + most, kept_bytes)
            if with_reserve(most) + self.misses.kept_free_bytes <= self.budget_bytes:
                return Advice(Plan((), tuple(self.shelter), most, 0.0), None, False, bounded=True)
        return Advice(None, None, False)

    def keeping_some(self, size: BatchSize, resident: Resident) -> Advice | None:
        """What of a batch of which nothing is to be trusted may be kept for sure; None if nothing.

        Args:
            size: Its size.
            resident: What is resident, the batch included.
        """
        base = max(resident.total_bytes, resident.end_bytes)
        most = int((self.budget_bytes - self.misses.kept_free_bytes) / (1 + RESERVE_SHARE))
        found = self.estimator.bounds.within(dict(size.dims), most - base)
        if found is None:
            return None
        kept, bound_bytes = found
        actions = {unit: KEEP if unit in kept else action for unit, action in self.shelter.items()}
        plan = Plan.of(actions, predicted_peak_bytes=base + bound_bytes, added_seconds=0.0)
        return Advice(plan, None, False, bounded=True) if len(plan) < len(self.shelter) else None

    def has_leaner(self, size: BatchSize, resident: Resident) -> bool:
        """Whether a plan is known that keeps a batch inside the budget."""
        prediction = self.estimator.predict(dict(size.dims))
        if prediction is None or not prediction.trusted:
            return False
        timeline = self.timeline_of(prediction, resident)
        margin = self._margin_bytes(prediction, timeline, self.budget_bytes)
        return self.least(timeline).predicted_peak_bytes + margin <= self.budget_bytes

    def not_beyond_shelter(self, size: BatchSize, resident: Resident, plan: Plan | None, peak_bytes: int) -> None:
        """Learn what a plan reached that was to be leaner than the shelter, and broke the budget.

        Args:
            size: The batch's size.
            resident: What was resident.
            plan: The plan; None where it is not to blame for all of it.
            peak_bytes: What it reached.
        """
        self._leaner.clear()
        if plan is not None:
            missed, known = self.estimator.missed_beyond, size.rounded_up()
            missed[known] = max(peak_bytes - plan.predicted_peak_bytes, missed.get(known, 0))
        prediction = self.estimator.predict(dict(size.dims))
        if prediction is None or peak_bytes > self._shelter_bytes(self.timeline_of(prediction, resident)):
            self.estimator.shelter_only.add(size)

    def limit(self, unlean: Collection[str], divisible: Collection[str]) -> None:
        """Plan only what units were tried with.

        Args:
            unlean: Units whose recipes were not tried yet.
            divisible: Units that were split on trial.
        """
        if unlean != self._unlean or divisible != self._divisible:
            self._unlean, self._divisible = frozenset(unlean), frozenset(divisible)
            self.planner.forget()
            self._leaner.clear()

    def compared_at(self, size: BatchSize, units: Collection[str]) -> None:
        """Recipes were compared in the latest step, and are not where its size comes again.

        Args:
            size: Its size.
            units: Units whose calls had more places, or other grades, than were compared before.
        """
        prediction = self.estimator.predict(dict(size.dims))
        if prediction is None or set(units) <= set(prediction.structure.dynamic):
            return  # there nothing was counted for it
        for each in (size, size.rounded_up()):
            self.planner.drop(self._key(each))
        self._actual_peaks.clear()
        self._views.clear()

    def menu(self, timeline: Timeline) -> Timeline:
        """What plans may choose from."""
        return timeline.only(self._allowed)

    def _allowed(self, unit: str, action: str) -> bool:
        if action in (*GRADES, RECOMPUTE_LEAN) and unit in self._unlean:
            return False
        return action in self.actions and (action not in SPLITS or unit in self._divisible)

    def may_shelter(self, size: BatchSize, resident: Resident) -> bool:
        """Whether a batch may run sheltered, as far as is known."""
        prediction = self.estimator.predict(dict(size.dims))
        return prediction is not None and self.sure_bytes(self.timeline_of(prediction, resident)) <= self.budget_bytes

    def judge(self, size: BatchSize, resident: Resident) -> Callable[[Choices], Judgement | None]:
        """What another rank's plan would be for a batch; None where it does what was not tried here."""
        prediction = self.estimator.predict(dict(size.dims))
        if prediction is None or not isfinite(prediction.error):
            return lambda choices: None
        timeline = self.timeline_of(prediction, resident)
        free = self._margin_bytes(prediction, timeline, self.budget_bytes)

        def judged(choices: Choices) -> Judgement | None:
            if not all(self._allowed(unit, action) and unit not in self.left_out for unit, action in choices):
                return None
            understood = understood_by(timeline, choices)
            peak = timeline.peak_bytes(understood)
            fits = peak + free <= self.budget_bytes
            return Judgement(tuple(understood.items()), peak, timeline.added_seconds(understood), fits)

        return judged

    def most_saving(self, size: BatchSize, resident: Resident) -> Advice:
        """The plan with the least peak, as far as it is known; no plan means the shelter."""
        prediction = self.estimator.predict(dict(size.dims))
        if prediction is None or not prediction.trusted:
            return Advice(None, None, False)
        plan = self.least(self.timeline_of(prediction, resident))
        return Advice(plan, plan.predicted_peak_bytes, False)

    def _forget_plans(self) -> None:
        self.planner.forget()
        self._leaner.clear()
        super()._forget_plans()

    def _forget_prices(self) -> None:
        self.planner.forget(prices_only=True)
        super()._forget_prices()

    # --- asking -----------------------------------------------------------------------------------------------

    def plan(self, batch_or_size: Any, budget: str | int | float | None = None) -> Plan:
        """The plan that a batch, or named dimensions, would get: the shelter's where the actions asked for do not do.

        Raises:
            BudgetInfeasibleError: No plan fits.
            BudgetError: The budget cannot be read, or is a share of a device.
            MimoseError: Nothing is known about this size yet.
        """
        budget = self.budget_bytes if budget is None else budget_in_bytes(budget)
        size = self.size_of(batch_or_size)
        timeline, prediction = self._timeline_for(size)
        margin = self._margin_bytes(prediction, timeline, budget)
        plan = self.planner.answer(self._key(size, self._asked_resident), self.menu(timeline), budget, margin)
        if plan is not None:
            return plan
        least = self.sure_bytes(timeline)
        if least <= budget:
            return self.shelter_plan(timeline)
        raise BudgetInfeasibleError(
            f"No plan keeps {batch_or_size if is_size(batch_or_size) else 'this batch'} inside {budget:,} bytes "
            f"({format_bytes(budget)}). Give at least {least:,} bytes ({format_bytes(least)}).",
            budget_bytes=budget,
            resident_bytes=self.resident.total_bytes,
            smallest_feasible_bytes=least,
        )

    def shelter_plan(self, timeline: Timeline) -> Plan:
        """What a sheltered step does, as a plan."""
        return plan_of(timeline, timeline.chosen(self._sheltered(timeline)))

    def holds(self, size: BatchSize, resident: Resident, actions: Mapping[str, str]) -> Holds | None:
        """Where memory goes at the peak of a batch's step; None before anything is known about its size."""
        prediction = self.estimator.predict(dict(size.dims))
        if prediction is None:
            return None
        timeline = self.timeline_of(prediction, resident)
        known = {unit: action for unit, action in actions.items() if (unit, action) in timeline.option_index}
        level = timeline.level_bytes(timeline.chosen(known))
        peak = int(level.argmax())
        retained: dict[str, int] = {}
        for index, option in enumerate(timeline.options):
            unit, spared = timeline.units[option.unit], int(timeline.relief_bytes[index, peak])
            if unit not in known and timeline.parents[option.unit] < 0 and spared > 0:
                retained[unit] = max(spared, retained.get(unit, 0))
        used = int(level[peak])
        return Holds(
            retained,
            max(0, used - resident.total_bytes - sum(retained.values())),
            used,
            timeline.labels[peak],
            min(self.sure_bytes(timeline), self.least(timeline).predicted_peak_bytes),
        )
