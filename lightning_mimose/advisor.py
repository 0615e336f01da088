"""The advisor: what was learnt, and the plan it gives for a size. Numbers only; it outlives the model.

The engine asks it at every step; reports, `explain` and a user's questions ask it after training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.actions.lean.recipes import GRADES
from lightning_mimose.actions.menu import OFFLOAD, RECOMPUTE_LEAN, check_actions
from lightning_mimose.actions.split import CHUNKS, SPLITS
from lightning_mimose.agreement import Choices, Judgement
from lightning_mimose.budget import format_bytes
from lightning_mimose.errors import BudgetInfeasibleError, MimoseError
from lightning_mimose.measure.observe import Observation
from lightning_mimose.plan import Plan, Planner, PlannerChoice
from lightning_mimose.plan.optimal import least_peak_heuristic
from lightning_mimose.predict.assemble import Extras, Link, assemble
from lightning_mimose.predict.estimator import Estimator, Prediction
from lightning_mimose.predict.structure import CallShape, Resident, Structure
from lightning_mimose.predict.timeline import Timeline
from lightning_mimose.sizes import BatchSize, SizeTracker

log = logging.getLogger(__name__)

RESERVE_SHARE = 0.002
"""Share of the budget kept free of plans: small allocations that no column describes (logged scalars, hooks)."""
MINIMUM_UNIT_SHARE = 1e-4
"""Units that save less than this share of the activation peak are left alone."""
MISSED_SHARE = 0.008
"""A planned step that misses its prediction by more says that the fit is not what it seemed."""
OUT_OF_MEMORY_SHARE = 0.05
"""Share of the budget that is kept free after the device ran out of memory under a plan that should have fitted."""
SEVERAL_PASSES_ERROR = 0.02
"""Share of the peak by which a step with several backward passes (a GAN's) may be mispredicted."""
TRIAL_SHARE = 1.5
"""What a unit that is tried beside a planned step may take, as a share of its working set."""
UNSCALED_SHARE = 0.02
"""What of a unit may not be proportional to the batch, where the batch never varied."""
DYING_INPUTS_ERROR = 0.004
"""Share of the peak by which a step may be mispredicted in which inputs die early (T5's) and units are kept lean."""
KNOWN_VIEWS = 8
"""Sizes whose whole timelines are remembered, for a budget that is shared."""
KNOWN_PEAKS = 256
"""Sizes between the rounded ones whose peaks are remembered."""
STATE_VERSION = 3


class Advice(NamedTuple):
    """What to do with one batch.

    Attributes:
        plan: The plan; None to run sheltered.
        predicted_peak_bytes: For the batch's actual size; None when sheltered.
        cache_hit: Whether the plan was known.
        infeasible: Whether even the most saving plan exceeds the budget.
    """

    plan: Plan | None
    predicted_peak_bytes: int | None
    cache_hit: bool
    infeasible: bool = False


@dataclass(frozen=True)
class Holds:
    """What is alive at the peak of a step.

    Attributes:
        retained_bytes: Outermost unit that is kept -> what it keeps for backward.
        transient_bytes: The rest, besides what is resident.
        peak_bytes: All of it.
        position: Where the peak is.
        least_bytes: The peak under the most saving plan.
    """

    retained_bytes: Mapping[str, int]
    transient_bytes: int
    peak_bytes: int
    position: str
    least_bytes: int


@dataclass(frozen=True, eq=False)
class StepView:
    """What is known about the step of one batch size.

    Attributes:
        structure: Its shape.
        timeline: What it holds.
        margin_bytes: What plans leave free.
        least_bytes: The least budget that is sure to do.
        wants_bytes: What it would take if nothing were saved.
        trusted: Whether plans are made for it.
        routes: Plan -> what was worked out for it by those who let steps wait for each other.
    """

    structure: Structure
    timeline: Timeline
    margin_bytes: int
    least_bytes: int
    wants_bytes: int
    trusted: bool
    routes: dict[Any, Any]


class Advisor:
    """Learns from measured steps and answers with plans.

    Args:
        budget_bytes: The budget in force.
        size_fn: Batch -> size; None reads the dimensions of its tensors.
        planner: See `plan.Scheduler`.
        actions: What plans may choose from, see `actions.menu`; the shelter recomputes whatever they say.
        fingerprint: Identifies model, precision and device; what was learnt for another is not used.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        size_fn: Callable[[Any], int | Mapping[str, int]] | None = None,
        planner: PlannerChoice = "auto",
        actions: Sequence[str] | None = None,
        fingerprint: str = "",
    ) -> None:
        self.budget_bytes = budget_bytes
        self.actions = check_actions(None) if actions is None else tuple(actions)
        self.fingerprint = fingerprint
        self.tracker = SizeTracker(size_fn)
        self.estimator = Estimator()
        self.planner = Planner(planner)
        self.shelter: dict[str, str] = {}
        self.left_out: set[str] = set()
        self._unlean: frozenset[str] = frozenset()
        self._divisible: frozenset[str] = frozenset()
        self.link: Link | None = None
        """The way to host memory, if offloading is planned with."""
        self.refused: dict[str, str] = {}
        """Unit -> why it can never be recomputed, as the engine found out."""
        self.indivisible: Mapping[str, str] = {}
        """Unit -> why it cannot be split."""
        self.hints: dict[str, str] = {}
        """What about -> advice on operators that would lower the peak."""
        self.different: dict[str, tuple[str, ...]] = {}
        """Unit -> operations whose results lean saves do not rebuild bit for bit, and so keep."""
        self.resident = Resident(0, 0, True, 0)
        self._surplus_bytes = 0
        self._inputs_die: bool | None = None
        self._largest_allocated_bytes = 0
        self._fragmentation_bytes = 0
        self.announce: Callable[[str], None] = log.info
        self._announced = False
        self._actual_peaks: dict[Any, int] = {}
        self._views: dict[tuple[BatchSize, Resident], StepView] = {}

    def advise(self, size: BatchSize, resident: Resident, batch_bytes: int) -> Advice:
        """The plan for a batch.

        Args:
            size: Its size, as observed.
            resident: What is resident, the batch included.
            batch_bytes: The batch's part of it, which does not identify a plan.
        """
        self.resident = Resident(
            resident.lasting_bytes - batch_bytes,
            resident.old_gradient_bytes,
            resident.zeroes_gradients,
            resident.update_bytes - batch_bytes,
        )
        self.estimator.resident_bytes = self.resident.total_bytes
        planned = size.rounded_up()
        plan = self.planner.cache.get(self._key(planned), self.budget_bytes)
        if plan is None and planned is not size:
            plan, planned = self.planner.cache.get(self._key(size), self.budget_bytes), size
        hit, infeasible = plan is not None, False
        if plan is None:
            planned, prediction = self._known_size(size)
            if prediction is None:
                return Advice(None, None, False)
            if not prediction.trusted:
                return Advice(self._beyond_shelter(self._timeline(prediction, resident)), None, False)
            self._announce()
            timeline = self._timeline(prediction, resident)
            margin = self._margin_bytes(prediction, timeline, self.budget_bytes)
            sheltered = self.sure_bytes(timeline) <= self.budget_bytes
            menu = self.menu(timeline)
            key = self._key(planned)
            plan, infeasible = self.planner.plan(key, menu, self.budget_bytes, margin, can_wait=sheltered)
            if plan is None:  # what the actions asked for cannot do (yet), the shelter can
                return Advice(None, None, False)
        peak = self._actual_peak(size, planned, plan, resident)
        return Advice(plan, peak, hit, infeasible)

    def _key(self, size: BatchSize) -> tuple[Any, ...]:
        """What a plan is remembered for: nothing but tuples, which are looked up fastest."""
        return size.dims, size.layout, self.resident

    def _known_size(self, size: BatchSize) -> tuple[BatchSize, Prediction | None]:
        """The size that a batch is planned as, and what is known of it: sizes that are nearly the same share a plan.

        Of a run whose batches are all of one size no other one is known, not even that which it is rounded up to.
        """
        rounded = size.rounded_up()
        prediction = self.estimator.predict(dict(rounded.dims))
        if rounded is not size and (prediction is None or not prediction.trusted):
            own = self.estimator.predict(dict(size.dims))
            if own is not None and own.trusted:
                return size, own
        return rounded, prediction

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            self.announce(f"mimose: {len(self.estimator)} sizes measured, planning begins")

    def least(self, timeline: Timeline) -> Plan:
        """The plan with the least peak: the quick answer if it fits, the exact one before anything is refused."""
        return self.planner.least(self.menu(timeline), self.budget_bytes)

    def _beyond_shelter(self, timeline: Timeline) -> Plan | None:
        """A plan for a size that is not trusted yet, where the shelter is expected to break the budget.

        The shelter is a cut chosen before anything was measured; what is known by now may name a leaner one.
        """
        if self._shelter_bytes(timeline) <= (1 - RESERVE_SHARE) * self.budget_bytes:
            return None
        least = least_peak_heuristic(self.menu(timeline))
        return least if least.predicted_peak_bytes <= (1 - 10 * RESERVE_SHARE) * self.budget_bytes else None

    def room_to_try(self, size: BatchSize, resident: Resident, advice: Advice, *, split: bool = False) -> set[str]:
        """Units that may run once more beside a step, with all they save kept, in no more memory than it may have.

        In a planned step that is the peak it is predicted to have anyway. In a sheltered one it is the budget, judged
        by the sizes measured so far; a larger size is taken to need quadratically more.

        Args:
            size: The batch's size.
            resident: What is resident.
            advice: What the step will do.
            split: Whether they run without keeping what they save, but with two results to compare.
        """

        def trial(call: CallShape, value: NDArray[np.float64]) -> float:
            if split and call.lean >= 0:
                return float(value[call.lean] + value[call.given] + 2 * value[call.returned])
            return float(value[call.working])

        prediction = self.estimator.predict(dict(size.dims))
        if advice.plan is not None and prediction is not None and advice.predicted_peak_bytes is not None:
            room = advice.predicted_peak_bytes - resident.total_bytes
            value = prediction.values
            return {
                call.unit
                for call in prediction.structure.calls
                if call.region and value[call.entry] + TRIAL_SHARE * trial(call, value) <= room
            }
        if advice.plan is not None:
            return set()
        wanted = dict(size.dims)
        for dims, structure, values in self.estimator.observations():
            if dims.keys() != wanted.keys():
                continue
            # Dimensions of the same lengths are one: tokens and their mask.
            grown = prod(
                max(1.0, now / seen) ** 2 for now, seen in {(wanted[name], seen) for name, seen in dims.items()}
            )
            timeline = self._timeline(Prediction(structure, values, 0.0, False), resident)
            peak = self._shelter_bytes(timeline) - resident.total_bytes
            largest = max((trial(call, values) for call in structure.calls if call.region), default=0.0)
            if resident.total_bytes + grown * (peak + largest) <= self.budget_bytes:
                return {call.unit for call in structure.calls if call.region}
        return set()

    def limit(self, unlean: Collection[str], divisible: Collection[str]) -> None:
        """Plan only what units were tried with.

        Args:
            unlean: Units whose recipes were not tried yet.
            divisible: Units that were split on trial.
        """
        if unlean != self._unlean or divisible != self._divisible:
            self._unlean, self._divisible = frozenset(unlean), frozenset(divisible)
            self.planner.forget()

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
        return prediction is not None and self.sure_bytes(self._timeline(prediction, resident)) <= self.budget_bytes

    def judge(self, size: BatchSize, resident: Resident) -> Callable[[Choices], Judgement | None]:
        """What another rank's plan would be for a batch; None where it does what was not tried here."""
        prediction = self.estimator.predict(dict(size.dims))
        if prediction is None:
            return lambda choices: None
        timeline = self._timeline(prediction, resident)
        free = self._margin_bytes(prediction, timeline, self.budget_bytes)

        def judged(choices: Choices) -> Judgement | None:
            if not all(self._allowed(unit, action) and unit not in self.left_out for unit, action in choices):
                return None
            understood = dict(choices)
            for unit, action in choices:
                # A grade of lean saves that is missing spares hardly more than the one before it.
                lower = GRADES[GRADES.index(action) :: -1] if action in GRADES else (action,)
                known = [each for each in lower if (unit, each) in timeline.option_index]
                if known:
                    understood[unit] = known[0]
                else:
                    del understood[unit]
            peak = timeline.peak_bytes(understood)
            fits = peak + free <= self.budget_bytes
            return Judgement(tuple(understood.items()), peak, timeline.added_seconds(understood), fits)

        return judged

    def _margin_bytes(self, prediction: Prediction, timeline: Timeline, budget_bytes: int) -> int:
        """What a plan leaves free: for what no column describes, and for the fit's error on a step of this size."""
        peak = min(budget_bytes, timeline.peak_bytes({}))
        # Which inputs die with their last call is told apart for all or for none; lean saves let some go earlier.
        unsure = DYING_INPUTS_ERROR if self._inputs_die and set(self.actions) & set(GRADES) else 0.0
        error = max(prediction.error, unsure, SEVERAL_PASSES_ERROR if prediction.structure.passes > 1 else 0.0)
        free = int(RESERVE_SHARE * budget_bytes + 1.5 * error * peak)
        return free + self._surplus_bytes + self._fragmentation_bytes

    def _timeline(self, prediction: Prediction, resident: Resident, inputs_die: bool | None = None) -> Timeline:
        timeline = assemble(
            prediction.structure,
            prediction.values,
            resident,
            seconds_per_flop=self.estimator.seconds_per_flop(),
            minimum_share=MINIMUM_UNIT_SHARE,
            left_out=frozenset(self.left_out),
            inputs_die=bool(self._inputs_die if inputs_die is None else inputs_die),
            extras=self._extras(prediction),
        )
        return timeline.only(lambda _, action: action not in prediction.doubtful)

    def _extras(self, prediction: Prediction) -> Extras:
        smaller = {}
        for chunks, action in zip(CHUNKS, SPLITS, strict=True):
            if action in self.actions:
                rows = prediction.dims.get("batch", chunks)
                part_rows = -(-rows // chunks)
                part = self.estimator.predict({**prediction.dims, "batch": part_rows})
                # Where the batch never varied, what is known is that activations are proportional to it.
                share = prediction.values * (part_rows / rows + UNSCALED_SHARE)
                if part is None or part.structure != prediction.structure:
                    smaller[chunks] = share
                else:
                    smaller[chunks] = part.values if part.trusted else np.maximum(part.values, share)
        return Extras(self.link, smaller)

    def _actual_peak(self, size: BatchSize, planned: BatchSize, plan: Plan, resident: Resident) -> int | None:
        """A plan is made for a size rounded up; the prediction is for the actual one."""
        if planned == size:
            return plan.predicted_peak_bytes
        slot = (size, plan, resident)
        if slot not in self._actual_peaks:
            prediction = self.estimator.predict(dict(size.dims))
            if prediction is None:
                return None
            if len(self._actual_peaks) >= KNOWN_PEAKS:
                self._actual_peaks.clear()
            self._actual_peaks[slot] = self._timeline(prediction, resident).peak_bytes(dict(plan))
        return self._actual_peaks[slot]

    def step_view(self, size: BatchSize, resident: Resident) -> StepView | None:
        """What a batch's step looks like; None before anything is known about its size."""
        slot = (size, resident)
        if slot not in self._views:
            prediction = self.estimator.predict(dict(size.dims))
            if prediction is None:
                return None
            timeline = self._timeline(prediction, resident)
            least, trusted = self.sure_bytes(timeline), prediction.trusted
            margin = self._margin_bytes(prediction, timeline, self.budget_bytes) if trusted else 0
            wants = timeline.peak_bytes({}) + margin
            if len(self._views) >= KNOWN_VIEWS:
                self._views.clear()
            self._views[slot] = StepView(prediction.structure, timeline, margin, least, wants, trusted, {})
        return self._views[slot]

    def _forget_plans(self) -> None:
        """What plans, peaks and views were made from is no longer believed."""
        self.planner.forget()
        self._actual_peaks.clear()
        self._views.clear()

    def leave_out(self, units: set[str]) -> None:
        """Plan without some units, from now on."""
        if units != self.left_out:
            self.left_out = set(units)
            self._forget_plans()

    def most_saving(self, size: BatchSize, resident: Resident) -> Advice:
        """The plan with the least peak, as far as it is known; no plan means the shelter."""
        prediction = self.estimator.predict(dict(size.dims))
        if prediction is None or not prediction.trusted:
            return Advice(None, None, False)
        plan = self.least(self._timeline(prediction, resident))
        return Advice(plan, plan.predicted_peak_bytes, False)

    def holds(self, size: BatchSize, resident: Resident, actions: Mapping[str, str]) -> Holds | None:
        """Where memory goes at the peak of a batch's step; None before anything is known about its size."""
        prediction = self.estimator.predict(dict(size.dims))
        if prediction is None:
            return None
        timeline = self._timeline(prediction, resident)
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

    # --- learning ---------------------------------------------------------------------------------------------

    def learn(self, size: BatchSize, observation: Observation) -> None:
        """Take in a sheltered step. Plans made without it are dropped: better estimates make better ones."""
        self.estimator.add(dict(size.dims), observation.structure, observation.values)
        self._forget_plans()

    def verify(
        self, size: BatchSize, resident: Resident, plan: Plan, predicted_bytes: int, measured_bytes: int
    ) -> None:
        """Compare a planned step with its prediction; what was missing is kept free from now on.

        Args:
            size: The batch's size.
            resident: What was resident, the batch included.
            plan: The plan that was in force.
            predicted_bytes: Its predicted peak.
            measured_bytes: The peak that was measured.
        """
        missed = measured_bytes - predicted_bytes
        if missed > 0:
            self._surplus_bytes = max(missed, self._surplus_bytes)
        else:
            self._surplus_bytes = int(self._surplus_bytes * 0.9)
        bound = self.estimator.varies or any(action in (OFFLOAD, *SPLITS) for action in dict(plan).values())
        if abs(missed) <= MISSED_SHARE / 4 * measured_bytes or (missed < 0 and bound):
            return
        self._forget_plans()
        prediction = self.estimator.predict(dict(size.dims))
        if self._inputs_die:
            self._inputs_die = False  # and for good: something holds inputs that looked free
        elif self._inputs_die is None and prediction is not None and missed < 0:
            dying = self._timeline(prediction, resident, inputs_die=True).peak_bytes(dict(plan))
            if abs(dying - measured_bytes) <= MISSED_SHARE / 4 * measured_bytes:
                self._inputs_die = True
                return
        if abs(missed) > MISSED_SHARE * measured_bytes:
            self.estimator.distrust()

    def learn_out_of_memory(self, predicted_bytes: int | None) -> None:
        """The device had less than was planned with: keep a share of the budget free for a while."""
        if predicted_bytes is not None:
            self._surplus_bytes = max(self._surplus_bytes, int(OUT_OF_MEMORY_SHARE * self.budget_bytes))
        self.planner.forget()
        self._views.clear()

    def forget(self) -> None:
        """What is trained has changed: nothing that was measured before holds any more."""
        self.estimator = Estimator()
        self._forget_plans()
        self._inputs_die = None

    def learn_reserved(self, allocated_peak_bytes: int, reserved_peak_bytes: int) -> None:
        """Learn what the allocator reserves beyond what is allocated; plans leave it free.

        What it reserved for an earlier, larger step is no fragmentation, so the largest step counts.
        """
        self._largest_allocated_bytes = max(self._largest_allocated_bytes, allocated_peak_bytes)
        gap = max(0, reserved_peak_bytes - self._largest_allocated_bytes)
        if gap > 1.05 * self._fragmentation_bytes:
            self.planner.forget()
            self._views.clear()
        self._fragmentation_bytes = gap

    # --- asking -----------------------------------------------------------------------------------------------

    def plan(self, batch_or_size: Any, budget_bytes: int | None = None) -> Plan:
        """The plan that a batch, or named dimensions, would get.

        Raises:
            BudgetInfeasibleError: No plan fits.
            MimoseError: Nothing is known about this size yet.
        """
        budget = self.budget_bytes if budget_bytes is None else budget_bytes
        size = self.tracker.look(batch_or_size)
        timeline, prediction = self._timeline_of(size)
        margin = self._margin_bytes(prediction, timeline, budget)
        plan = self.planner.answer(size, self.menu(timeline), budget, margin)
        if plan is not None:
            return plan
        least = self.sure_bytes(timeline)
        raise BudgetInfeasibleError(
            f"No plan keeps {batch_or_size if _is_size(batch_or_size) else 'this batch'} inside {budget:,} bytes "
            f"({format_bytes(budget)}). Give at least {least:,} bytes ({format_bytes(least)}).",
            budget_bytes=budget,
            resident_bytes=self.resident.total_bytes,
            smallest_feasible_bytes=least,
        )

    def timeline(self, batch_or_size: Any) -> tuple[Timeline, Prediction]:
        """The timeline of a batch, or of named dimensions, and the prediction it was made from.

        Raises:
            MimoseError: Nothing is known about this size yet.
        """
        return self._timeline_of(self.tracker.look(batch_or_size))

    def _timeline_of(self, size: BatchSize) -> tuple[Timeline, Prediction]:
        prediction = self.estimator.predict(dict(size.dims))
        if prediction is None:
            raise MimoseError(
                f"Nothing is known yet about batches of {dict(size.dims)}: {len(self.estimator)} sizes were measured. "
                "Ask again after some training steps on batches with these dimensions."
            )
        data = round(float(prediction.values[prediction.structure.batch]))
        here = self.resident
        resident = Resident(
            here.lasting_bytes + data, here.old_gradient_bytes, here.zeroes_gradients, here.update_bytes + data
        )
        return self._timeline(prediction, resident), prediction

    def sure_bytes(self, timeline: Timeline) -> int:
        """The least budget that is sure to do: for the plan that a run which knows nothing starts with."""
        return with_reserve(self._shelter_bytes(timeline))

    def _shelter_bytes(self, timeline: Timeline) -> int:
        known = timeline.option_index
        return timeline.peak_bytes({unit: a for unit, a in self.shelter.items() if (unit, a) in known})

    def smallest_feasible_bytes(self, batch_or_size: Any) -> int:
        """`sure_bytes` of a batch, or of named dimensions."""
        return self.sure_bytes(self.timeline(batch_or_size)[0])

    def guarded(self) -> dict[str, str]:
        """Unit -> what is not done with it, and why."""
        found = {unit: f"never recomputed: {reason}" for unit, reason in self.refused.items()}
        for unit, operations in self.different.items():
            kept = f"kept in full: results of {', '.join(operations)}, which came out different when made again"
            found[unit] = f"{found[unit]}; {kept}" if unit in found else kept
        for unit, reason in self.indivisible.items():
            found[unit] = "; ".join([*filter(None, [found.get(unit)]), f"never split: {reason}"])
        return found

    # --- state ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, as plain data."""
        return {
            "version": STATE_VERSION,
            "fingerprint": self.fingerprint,
            "tracker": self.tracker.state_dict(),
            "estimator": self.estimator.state_dict(),
            "surplus_bytes": self._surplus_bytes,
            "inputs_die": self._inputs_die,
            "refused": dict(self.refused),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Take over what was learnt for the same model, precision and device; returns whether it was."""
        if state.get("version") != STATE_VERSION or state.get("fingerprint") != self.fingerprint:
            return False
        self.tracker.load_state_dict(state["tracker"])
        self.estimator.load_state_dict(state["estimator"])
        self._surplus_bytes = int(state["surplus_bytes"])
        self._inputs_die = state["inputs_die"]
        self.refused = dict(state.get("refused", {}))
        return True


def with_reserve(peak_bytes: int) -> int:
    """The budget that has this peak and the reserve in it: what is named as enough must also be enough for plans.

    Example:
        >>> with_reserve(998)
        1000
    """
    return ceil(peak_bytes / (1 - RESERVE_SHARE))


def _is_size(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(item, int) for item in value.values())
