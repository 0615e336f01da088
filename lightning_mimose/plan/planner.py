"""From a timeline and a budget to a plan without making the training wait: known, made at once, or made beside it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lightning_mimose.plan.best import fastest_plan, small_plan, smallest_plan
from lightning_mimose.plan.cache import PlanCache
from lightning_mimose.plan.heuristic import least_peak_bound
from lightning_mimose.plan.plan import Plan
from lightning_mimose.plan.scheduler import PlannerChoice, Question, Scheduler
from lightning_mimose.plan.structure import best_incumbent, plan_of
from lightning_mimose.predict.timeline import Timeline

LEAST_SECONDS = 2.0
"""How long to look for a plan that fits before refusing a batch."""

ASK_AGAIN_SHARE = 0.002
"""By how much more room there has to be for a plan that was not found to be looked for once more."""

MOST_PUT_OFF_BYTES = 64 << 20
"""What questions that are put off may hold."""

SAVERS = 8
"""How many of the most saving plans are remembered."""


class Answer(NamedTuple):
    """What the planner says.

    Attributes:
        plan: The plan; None where something else has to be done this time.
        infeasible: Whether nothing fits, and the plan is the one with the least peak.
    """

    plan: Plan | None
    infeasible: bool


class Planner:
    """Makes plans, and remembers them.

    Args:
        planner: See `Scheduler`.

    Attributes:
        cache: Plans by what they were made for.
        scheduler: Who makes them.
        refuses: Whether training ends where nothing fits. Else it does not wait to be sure of that: it goes on with the
            most saving plan that is found at once.

    Example:
        >>> import numpy as np
        >>> from lightning_mimose.predict.timeline import Option
        >>> timeline = Timeline(
        ...     units=("a", "b"), parents=(-1, -1),
        ...     options=(Option(0, "recompute", 1.0), Option(1, "recompute", 2.0)),
        ...     base_bytes=np.array([10, 30, 20]), relief_bytes=np.array([[0, 8, 0], [0, 9, 0]]),
        ...     shared=(), labels=("forward a", "backward b", "backward a"))
        >>> planner = Planner()
        >>> planner.plan(128, timeline, 25, margin_bytes=2).plan.choices, planner.cache.get(128, 25) is None
        ((('a', 'recompute'),), False)
    """

    def __init__(self, planner: PlannerChoice = "auto") -> None:
        self.cache = PlanCache()
        self._answers = PlanCache(capacity=64)
        self.scheduler = Scheduler(planner)
        self.refuses = True
        self._savers: tuple[Plan, ...] = ()
        self._put_off: OrderedDict[tuple[Hashable, int], tuple[Question, int]] = OrderedDict()
        """For what, and under which budget -> what will be asked when it is wanted again, and the bytes it holds."""
        self._asked: dict[tuple[Hashable, int], int] = {}
        """For what, and under which budget -> the most bytes that a plan was looked for in beside the training."""

    def __getstate__(self) -> dict[str, Any]:
        """What is put off stays with the original, as its thread does."""
        return {**self.__dict__, "_put_off": OrderedDict()}

    def close(self) -> None:
        """Nothing is asked any more: end the thread, see `Scheduler.close`."""
        self._put_off.clear()
        self.scheduler.close()

    def forget(self, *, prices_only: bool = False) -> None:
        """What plans were made from is no longer believed. The most saving ones stay: every use judges them anew.

        Args:
            prices_only: Whether that goes for what actions cost alone: plans without any stay, too.
        """
        if prices_only:
            self.cache.clear_actions()
        else:
            self.cache.clear()
        self._answers.clear()
        self._asked.clear()
        self._put_off.clear()

    def drop(self, key: Hashable) -> None:
        """What plans for a size were made from is no longer believed."""
        self.cache.drop(key)
        self._answers.drop(key)
        for slots in (self._asked, self._put_off):
            for slot in [slot for slot in slots if slot[0] == key]:
                del slots[slot]

    def known(self, key: Hashable, budget_bytes: int) -> Plan | None:
        """The plan that is remembered.

        One that was made at once may be bettered beside the training, from now on: for a size that comes but once
        nobody would use the better one, and looking for it takes the training's processors.

        Args:
            key: What it is for (a size).
            budget_bytes: The budget.
        """
        plan = self.cache.get(key, budget_bytes)
        if plan is not None and (key, budget_bytes) in self._put_off:
            self.scheduler.beside(self._put_off.pop((key, budget_bytes))[0])
        return plan

    def plan(
        self,
        key: Hashable,
        menu: Timeline,
        budget_bytes: int,
        margin_bytes: int,
        *,
        can_wait: bool = False,
        missed_bytes: int = 0,
    ) -> Answer:
        """The plan to use now, which is remembered.

        Args:
            key: What it is for (a size).
            menu: The timeline, with the options that may be chosen.
            budget_bytes: The budget.
            margin_bytes: What plans leave free of it, unless there is no other. Not all of it may be used: a plan that
                did would be faster than that of a somewhat larger budget.
            can_wait: Whether there is something else to do this time if no plan fits. Then one that is hard to find
                is looked for beside the training.
            missed_bytes: The part of the margin by which a measured step was above its prediction. It is left free
                whatever plans there are, if there is something else to do.
        """
        if can_wait:
            most_bytes, margin_bytes = budget_bytes - missed_bytes, margin_bytes - missed_bytes
        else:
            most_bytes = budget_bytes
        used: list[Plan] = []

        def better(plan: Plan) -> None:
            # From the planner's thread, maybe after the step has started: the next batch of this size takes it.
            if used:
                self.cache.replace(key, budget_bytes, used[0], plan)

        known = [*self.cache.incumbents(key, budget_bytes), *self._savers]
        questions: list[Question] = []
        plan = self._quick(menu, most_bytes, margin_bytes, known, better, questions.append)
        infeasible = False
        if plan is None and can_wait and self.scheduler.planner == "auto":
            asked = self._asked.get((key, budget_bytes), 0)
            if most_bytes > asked * (1 + ASK_AGAIN_SHARE) and least_peak_bound(menu) <= most_bytes:
                self._asked[key, budget_bytes] = most_bytes
                self.scheduler.beside(partial(self._find_saver, menu, most_bytes, margin_bytes))
            return Answer(None, False)
        if plan is None and self.scheduler.planner == "auto":
            # Training waits for the exact answer only before it is ended.
            least = small_plan(menu)
            if least.predicted_peak_bytes <= most_bytes or not self.refuses:
                plan, infeasible = least, least.predicted_peak_bytes > most_bytes
                questions = [partial(self._find_better, menu, most_bytes, margin_bytes, least, better)]
        if plan is None:
            plan = self._hard(menu, most_bytes, margin_bytes)
            infeasible = plan.predicted_peak_bytes > most_bytes
            if infeasible and can_wait:
                return Answer(None, False)
            self._remember(plan)
        self.cache.put(key, budget_bytes, plan)
        used.append(plan)
        for question in questions:
            self._ask_later((key, budget_bytes), question, menu.relief_bytes.nbytes)
        return Answer(plan, infeasible)

    def keep(self, key: Hashable, timeline: Timeline, budget_bytes: int, margin_bytes: int) -> Plan | None:
        """The plan that keeps everything, which is remembered; None where that does not fit, or is not for us to say.

        Args:
            key: What it is for (a size).
            timeline: The timeline; its options do not matter.
            budget_bytes: The budget.
            margin_bytes: What plans leave free of it.
        """
        if self.scheduler.planner not in ("auto", "exact"):
            return None
        if int(timeline.base_bytes.max(initial=0)) > budget_bytes - margin_bytes:
            return None
        plan = plan_of(timeline, np.zeros(0, dtype=np.intp))
        self._put_off.pop((key, budget_bytes), None)
        self.cache.put(key, budget_bytes, plan)
        return plan

    def answer(self, key: Hashable, menu: Timeline, budget_bytes: int, margin_bytes: int) -> Plan | None:
        """As `plan`, for who asks outside of training and waits: training takes no notice. None if nothing fits."""
        known = [*self._answers.incumbents(key, budget_bytes), *self._savers]
        plan = self._quick(menu, budget_bytes, margin_bytes, known)
        if plan is None:
            hard = self._hard(menu, budget_bytes, margin_bytes)
            plan = hard if hard.predicted_peak_bytes <= budget_bytes else None
        if plan is not None:
            self._answers.put(key, budget_bytes, plan)
        return plan

    def least(self, menu: Timeline, budget_bytes: int) -> Plan:
        """The plan with the least peak: the quick answer if it fits, the exact one before anything is refused."""
        least = small_plan(menu)
        if least.predicted_peak_bytes <= budget_bytes:
            return least
        return smallest_plan(menu, time_limit_seconds=LEAST_SECONDS)

    def _quick(
        self,
        menu: Timeline,
        budget_bytes: int,
        margin_bytes: int,
        known: Sequence[Plan],
        on_better: Callable[[Plan], None] | None = None,
        put_off: Callable[[Question], None] | None = None,
    ) -> Plan | None:
        plan = self.scheduler.plan(
            menu, budget_bytes - margin_bytes, incumbents=known, on_better=on_better, put_off=put_off
        )
        if plan is None and self.scheduler.planner == "greedy":
            return self.scheduler.plan(menu, budget_bytes)
        return best_incumbent(menu, budget_bytes, known) if plan is None else plan

    def _ask_later(self, slot: tuple[Hashable, int], question: Question, nbytes: int) -> None:
        """Keep a question until its plan is wanted again; the oldest are forgotten, their plans stay as they are."""
        self._put_off.pop(slot, None)
        self._put_off[slot] = question, nbytes
        while len(self._put_off) > 1 and (
            len(self._put_off) > self.cache.capacity
            or sum(held for _, held in self._put_off.values()) > MOST_PUT_OFF_BYTES
        ):
            self._put_off.popitem(last=False)

    def _hard(self, menu: Timeline, budget_bytes: int, margin_bytes: int) -> Plan:
        """The fastest plan within the budget less its margin, or else the one with the least peak."""
        if self.scheduler.planner == "greedy" or callable(self.scheduler.planner):
            return self.least(menu, budget_bytes)
        least = smallest_plan(menu, time_limit_seconds=LEAST_SECONDS)
        target = max(least.predicted_peak_bytes, budget_bytes - margin_bytes)
        if target > budget_bytes:
            return least
        plan = fastest_plan(menu, target, time_limit_seconds=LEAST_SECONDS, incumbents=(least,))
        return least if plan is None else plan  # one that keeps everything is empty

    def _find_saver(self, menu: Timeline, budget_bytes: int, margin_bytes: int) -> None:
        """In the planner's thread: what `plan` had no time for."""
        plan = self._hard(menu, budget_bytes, margin_bytes)
        if plan.predicted_peak_bytes <= budget_bytes:
            self._remember(plan)

    def _find_better(
        self, menu: Timeline, budget_bytes: int, margin_bytes: int, used: Plan, better: Callable[[Plan], None]
    ) -> None:
        """Likewise, where a plan that saves much is used in the meantime."""
        plan = self._hard(menu, budget_bytes, margin_bytes)
        fits = plan.predicted_peak_bytes <= budget_bytes
        if fits:
            self._remember(plan)
        if used.predicted_peak_bytes > budget_bytes:
            is_better = plan.predicted_peak_bytes < used.predicted_peak_bytes
        else:
            is_better = fits and plan.added_seconds < used.added_seconds
        if is_better:
            better(plan)

    def _remember(self, plan: Plan) -> None:
        if plan not in self._savers:
            self._savers = (plan, *self._savers)[:SAVERS]
