"""The student: a forecast that learns from the steps that were measured, and keeps what it learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_mimose.advise.forecast import Forecast
from lightning_mimose.advise.torn import torn_by
from lightning_mimose.measure.call import RNG_STATE_BYTES
from lightning_mimose.measure.counters import Counters
from lightning_mimose.measure.observe import Observation
from lightning_mimose.menu import GRADES, KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_LEAN, SPLITS
from lightning_mimose.plan import Plan
from lightning_mimose.predict.estimator import Estimator
from lightning_mimose.predict.misses import MISSED_SHARE
from lightning_mimose.predict.pace import CHANGED, operations_of
from lightning_mimose.predict.postures import Modes
from lightning_mimose.predict.rates import host_work
from lightning_mimose.predict.shapes import Resident
from lightning_mimose.predict.structure import Structure
from lightning_mimose.sizes import BatchSize

STATE_VERSION = 26


class Student(Forecast):
    """Takes in what measured steps teach; for arguments see `Forecast`.

    Attributes:
        forgotten: How many times all that was measured was forgotten, or older knowledge taken up.
        barred_bytes: What measured peaks count besides, for the allocator must not give it out.
        scratch_bytes: By how much they may miss predictions for nothing but kernels' scratch memory.
    """

    forgotten = barred_bytes = scratch_bytes = 0

    def called(self, size: BatchSize, units: int) -> None:
        """Learn which units a step called, planned or not.

        Args:
            size: The batch's size.
            units: Stands for them.
        """
        if self.estimator.called(size.dims, units):
            self._forget_plans()

    def learn(self, size: BatchSize, observation: Observation, *, bare: bool = False, units: int | None = None) -> None:
        """Take in a sheltered step. Plans made without it are dropped: better estimates make better ones.

        Args:
            size: The batch's size.
            observation: What was measured.
            bare: Whether it found no gradients of an earlier step, see `Estimator.add`.
            units: Stands for the units that were called, see `called`.
        """
        self.misses.fade()  # no planned step may be left to show that less will do
        self.estimator.add(
            dict(size.dims),
            observation.structure,
            observation.values,
            observation.maxima,
            bare=bare,
            seconds=observation.seconds,
            units=units,
        )
        self._forget_plans()

    def heed(self, size: BatchSize, structure: Structure) -> None:
        """Learn of a step nothing but which way it went: others that go there are waited for, if it is a new one."""
        if self.estimator.heed(dict(size.dims), structure):
            self._forget_plans()

    def unlearn(self, size: BatchSize) -> None:
        """What was learnt of a size was no step of the kind that it was taken for."""
        self.postures.usual(self.estimator).drop(size.dims)
        self._forget_plans()

    def verify(
        self,
        size: BatchSize,
        resident: Resident,
        plan: Plan,
        predicted_bytes: int,
        measured_bytes: int,
        *,
        anew: bool = False,
    ) -> None:
        """Compare a planned step with its prediction; what was missing is kept free from now on.

        Args:
            size: The batch's size.
            resident: What was resident, the batch included.
            plan: The plan that was in force.
            predicted_bytes: Its predicted peak.
            measured_bytes: The peak that was measured.
            anew: Whether inputs turned out to live longer since, so that it would be predicted otherwise.
        """
        actions, prediction = dict(plan), self.estimator.predict(dict(size.dims))
        if anew and prediction is not None:
            predicted_bytes = self.timeline_of(prediction, resident).peak_bytes(actions)
        left_free = self.misses.left_free_bytes
        missed = measured_bytes - predicted_bytes
        small, large = MISSED_SHARE / 4 * measured_bytes, max(MISSED_SHARE * measured_bytes, self.scratch_bytes)
        broken = missed > 0 and measured_bytes > self.budget_bytes
        # What all plans leave free for it anyway is no news.
        more = missed > 0 and (missed - left_free > small or missed > large)
        if (more or broken) and self.estimator.disbelieve(size.dims):
            self._forget_plans()
            return
        self.misses.compare(predicted_bytes, measured_bytes)
        if broken:
            self.estimator.note_broken(size, missed)
        self.estimator.verified += 1
        # Not every meter sees the random states that regions keep, and that which is put back after a recomputation
        # (torch's profiler does, an operator's mode does not).
        unseen = 0.0
        if prediction is not None:
            structure = prediction.structure
            again = [actions.get(call.unit) in (RECOMPUTE, RECOMPUTE_LEAN) for call in structure.calls]
            unseen = RNG_STATE_BYTES * (float(structure.counts(prediction.values) @ again) + any(again))
        bound = (
            self.estimator.observed.varies or not {OFFLOAD, *SPLITS}.isdisjoint(actions.values()) or -missed <= unseen
        )
        if abs(missed) <= large:
            self.estimator.trust.prove(size.dims, lean=not set(GRADES).isdisjoint(actions.values()))
            if prediction is not None:
                self.estimator.trust.decide(torn_by(prediction, resident, self.timeline_of, actions, 2 * large))
        # Others would leave less, if these leave any.
        less = missed <= 0 and not bound and (-missed > large or (-missed > small and left_free > 0))
        if not (more or less or broken):
            return
        self._forget_plans()
        if abs(missed) > large:
            self.estimator.distrust()

    def learn_strangers(self, size: BatchSize, missed_bytes: int) -> bool:
        """Learn that a planned step called units that its plan knew nothing of: it took a path that was not expected.

        Args:
            size: The batch's size.
            missed_bytes: By how much it was above what was predicted for the paths that are known.

        Returns:
            Whether the next steps are measured for it.
        """
        self.misses.surplus_bytes = max(missed_bytes, self.misses.surplus_bytes)
        waits = self.estimator.unsettle(dict(size.dims))
        if waits or missed_bytes > 0:
            self._forget_plans()
        return waits

    def wait_for(self, size: BatchSize) -> None:
        """Measure the next step of batches like one that did what no step had done, before any is planned again."""
        self.estimator.wait_for(dict(size.dims))
        self._forget_plans()

    def learn_inputs(
        self, size: BatchSize, actions: Mapping[str, str], fates: Mapping[frozenset[str], Sequence[str | None]]
    ) -> bool:
        """Learn from a planned step's forward which inputs live longer than sheltered ones have shown.

        Args:
            size: The batch's size.
            actions: Unit -> what it did.
            fates: What became of the units' inputs, see `InputWatch.fates`.

        Returns:
            Whether there are any: plans that were made before are dropped.
        """
        prediction = self.estimator.predict(dict(size.dims))
        acting = [unit for unit, action in actions.items() if action != KEEP]
        observed, key = self.estimator.observed, tuple(sorted(size.dims))
        news = prediction is not None and observed.refine(prediction.structure, key, fates, acting)
        if news:
            self._forget_plans()
        return news

    def learn_out_of_memory(self, predicted_bytes: int | None, failed: Counters | None) -> None:
        """The device had less than was planned with: keep a share of the budget free for a while.

        Args:
            predicted_bytes: What it had been predicted to need.
            failed: What its allocator counted when it failed, where one counts.
        """
        if failed is not None and self.owns_allocator:
            self.misses.ran_out(failed.requested_peak_bytes, failed.reserved_bytes, self.budget_bytes)
        if predicted_bytes is not None:
            self.misses.out_of_memory(self.budget_bytes)
        self._forget_plans()

    def learn_held(self, measured_peak_bytes: int, held_bytes: int) -> None:
        """Learn what the allocator holds beyond what tensors asked it for; plans leave it free."""
        measured_peak_bytes -= self.barred_bytes
        if self.owns_allocator and self.misses.held(measured_peak_bytes, held_bytes, self.budget_bytes):
            self._forget_plans()

    def learn_pace(
        self, size: BatchSize, actions: Mapping[str, str], seconds: float, host_seconds: float = 0.0
    ) -> None:
        """Learn how long a planned step took; plans that weighed operations quite differently are made anew.

        Args:
            size: The batch's size.
            actions: Unit -> what it did.
            seconds: From the start of the forward to the end of backward, on the device.
            host_seconds: The same on the host; 0 where nobody knows.
        """
        prediction = self.estimator.predict(dict(size.dims))
        if prediction is None or not prediction.trusted:
            return  # what it would have done there nobody knows
        if any(each.structure.path != prediction.structure.path for each in prediction.others):
            return  # it may have taken another path
        structure, values, pace = prediction.structure, prediction.values, self.estimator.pace
        operations = operations_of(structure, values, actions)
        if operations is None:
            return
        before, host_before = self.estimator.seconds_per_operation(), pace.host_seconds
        pace.add(operations, seconds, host_seconds, host_work(structure, values, actions))
        same = before / CHANGED <= self.estimator.seconds_per_operation() <= before * CHANGED
        if not same or pace.host_seconds != host_before:
            self._forget_prices()

    def forget(self, known: Estimator | None = None, *, everywhere: bool = True) -> None:
        """What is trained has changed, or where sizes are read: what was measured before does not hold any more.

        Args:
            known: What takes its place, for it holds again; None for nothing.
            everywhere: Whether that goes for what was learnt in other postures, too.
        """
        if everywhere:
            self.postures.forget()
        pace = self.estimator.pace.anew() if known is None else known.pace
        verified = self.estimator.verified if everywhere else 0
        self.estimator = Estimator(turns=self.turns) if known is None else known
        self.estimator.pace, self.estimator.verified = pace, max(verified, self.estimator.verified)
        self.forgotten += everywhere or known is None
        if everywhere:  # else plans of other postures hold: each estimator has its own
            self._forget_plans()

    def take_posture(self, modes: Modes, kind: int, *, begins: bool = True) -> bool:
        """A step begins. What was learnt from steps in which modules were set otherwise says nothing of it.

        Args:
            modes: How they are set, see `engine.posture`.
            kind: Of which kind the step is, as far as is foreseen, see `predict.kinds`.
            begins: See `Postures.take`.

        Returns:
            Whether nothing is known of such steps.
        """
        changed, known = self.postures.take(modes, kind, self.estimator, begins=begins)
        if changed:
            self.forget(known, everywhere=False)
        return changed and known is None

    def leave_out(self, units: set[str]) -> None:
        """Plan without some units, from now on."""
        if units != self.left_out:
            self.left_out = set(units)
            self._forget_plans()

    def _forget_prices(self) -> None:
        """What plans and views say that actions cost is no longer believed."""
        self._views.clear()

    def _forget_plans(self) -> None:
        """What plans, peaks and views were made from is no longer believed."""
        self._actual_peaks.clear()
        self._views.clear()
        self.misses.plans_forgotten()

    def guarded(self) -> dict[str, str]:
        """Unit -> what is not done with it, and why."""
        kept, changed = "kept in full: results of", "came out different when made again"
        held = "its result is kept: it was changed before the next unit saved it, or held for longer than was seen"
        reasons = [
            *((unit, f"never recomputed: {reason}") for unit, reason in self.refused.items()),
            *((unit, f"{kept} {', '.join(names)}, which {changed}") for unit, names in self.different.items()),
            *((unit, held) for unit in sorted(self.spoiled)),
            *((unit, f"never split: {reason}") for unit, reason in self.indivisible.items()),
        ]
        found: dict[str, list[str]] = {}
        for unit, reason in reasons:
            found.setdefault(unit, []).append(reason)
        return {unit: "; ".join(all_of_them) for unit, all_of_them in found.items()}

    # --- state ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, as plain data."""
        return {
            "version": STATE_VERSION,
            "fingerprint": self.fingerprint,
            "tracker": self.tracker.state_dict(),
            "estimator": self.postures.usual(self.estimator).state_dict(),
            "surplus_bytes": self.misses.surplus_bytes,
            "penalties": self.penalties.state_dict(),
            "posture": self.postures.state_dict(),
            "beside_staying": self.beside_staying,
            "refused": dict(self.refused),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Take over what was learnt for the same model, precision and device; returns whether it was."""
        if state.get("version") != STATE_VERSION or state.get("fingerprint") != self.fingerprint:
            return False
        self.tracker.load_state_dict(state["tracker"])
        self.estimator.load_state_dict(state["estimator"])
        self.misses.surplus_bytes = int(state["surplus_bytes"])
        self.penalties.load_state_dict(state.get("penalties", {}))
        self.postures.load_state_dict(state.get("posture", ""))
        self.beside_staying = bool(state.get("beside_staying", False))
        self.refused = dict(state.get("refused", {}))
        return True
