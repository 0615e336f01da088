"""Who plans, and when: an answer at once, and a better one from a thread beside the training."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeAlias

from lightning_mimose import threads
from lightning_mimose.errors import PlanError
from lightning_mimose.menu import KEEP
from lightning_mimose.plan.best import fastest_plan
from lightning_mimose.plan.exhaustive import are_few
from lightning_mimose.plan.greedy import plan_greedy
from lightning_mimose.plan.heuristic import plan_heuristic
from lightning_mimose.plan.plan import Plan
from lightning_mimose.plan.starts import Starts
from lightning_mimose.plan.structure import Incumbent, Structure, plan_of
from lightning_mimose.predict.timeline import Timeline

PlannerChoice: TypeAlias = Literal["auto", "exact", "greedy"] | Callable[[Timeline, int], Plan | Mapping[str, str]]

Question: TypeAlias = Callable[[], None]
"""What the thread is asked."""

WAITING = 4
"""Questions that may wait for the thread, the oldest forgotten first. Each holds a timeline: up to 50 MB."""

IDLE_SECONDS = 5.0
"""How long the thread waits for another question before it ends; the next question starts a new one."""

NICENESS = 10
"""By how much the thread gives way to the training, where threads can: it has all the time that steps leave."""

EXACT_SECONDS = 5.0
"""How long an exact answer may take. It cannot be interrupted, so this is also how long `close` may wait."""

logger = logging.getLogger(__name__)


def check_planner(planner: object) -> None:
    """Check who is asked to plan.

    Raises:
        PlanError: It is none of the names there are, and cannot be called with a timeline and a budget.

    Example:
        >>> check_planner("exact")
    """
    if planner in ("auto", "exact", "greedy"):
        return
    if not callable(planner) or not _takes_two(planner):
        raise PlanError(
            f"planner={planner!r} was asked for; it is 'auto', 'exact', 'greedy', or a callable "
            "(timeline, budget_bytes) -> plan."
        )


def _takes_two(planner: Callable[..., Any]) -> bool:
    try:
        inspect.signature(planner).bind("timeline", "budget_bytes")
    except TypeError:
        return False
    except ValueError:  # some that are written in C do not tell
        return True
    return True


class Scheduler:
    """Makes the plan for a timeline and a budget.

    Args:
        planner: `"auto"`: a heuristic answers at once, the exact answer follows from a thread. `"exact"`: the exact
            answer at once. `"greedy"`: the Mimose paper's. Or a function of timeline and budget, so that any plan
            can be forced: what it returns is checked for being a plan of these units, but not against the budget.

    Example:
        >>> import numpy as np
        >>> from lightning_mimose.predict.timeline import Option
        >>> timeline = Timeline(
        ...     units=("a", "b"), parents=(-1, -1),
        ...     options=(Option(0, "recompute", 1.0), Option(1, "recompute", 2.0)),
        ...     base_bytes=np.array([10, 30, 20]), relief_bytes=np.array([[0, 8, 0], [0, 9, 0]]),
        ...     shared=(), labels=("forward a", "backward b", "backward a"))
        >>> Scheduler("auto").plan(timeline, 30).choices, Scheduler("auto").plan(timeline, 22).choices
        ((), (('a', 'recompute'),))
        >>> Scheduler(lambda timeline, budget: {"b": "recompute"}).plan(timeline, 1).predicted_peak_bytes
        21
    """

    def __init__(self, planner: PlannerChoice = "auto") -> None:
        check_planner(planner)
        self.planner = planner
        self._questions: deque[Question] = deque(maxlen=WAITING)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = False
        self._closed = False
        self._starts = Starts()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the same planner; thread and questions stay with the original."""
        return type(self), (self.planner,)

    def plan(
        self,
        timeline: Timeline,
        budget_bytes: int,
        incumbents: Sequence[Incumbent] = (),
        on_better: Callable[[Plan], None] | None = None,
        put_off: Callable[[Question], None] | None = None,
    ) -> Plan | None:
        """The plan to use now.

        Args:
            timeline: What the step would hold, and the options there are.
            budget_bytes: What no position may exceed.
            incumbents: Plans known already; except for a forced plan and the greedy one, the result is never slower
                than one of them that fits.
            on_better: Called from the planner's thread when it has a plan that is strictly faster than the one
                returned. Only with `"auto"`.
            put_off: Given what the thread would be asked for that, instead of the thread; for `beside`, later.

        Returns:
            The plan; None when none that fits was found.

        Raises:
            PlanError: A callable planner returned something that is not a plan of these units.
        """
        if callable(self.planner):
            return _forced(timeline, self.planner(timeline, budget_bytes))
        if self.planner == "greedy":
            return plan_greedy(timeline, budget_bytes)
        if self.planner == "exact" or are_few(timeline):
            return fastest_plan(timeline, budget_bytes, time_limit_seconds=EXACT_SECONDS, incumbents=incumbents)
        fits = int(timeline.base_bytes.max(initial=0)) <= budget_bytes
        # Where a better one follows, one that takes a fraction of the time does.
        plan = plan_heuristic(timeline, budget_bytes, incumbents, None if on_better is None else self._starts)
        if on_better is not None and plan is not None and not (fits and len(plan) == 0):
            ask = put_off or self.beside
            ask(partial(self._better, timeline, budget_bytes, plan, tuple(incumbents), on_better))
        return plan

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the thread has answered everything; False when the time was over first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._questions and not self._busy, timeout_seconds)

    def close(self) -> None:
        """Forget what waits, end the thread and wait for it. Nobody is called back afterwards; may be called twice."""
        thread = self._end()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _end(self) -> threading.Thread | None:
        """Let the thread end, if there is one."""
        with self._changed:
            self._closed = True
            self._questions.clear()
            self._changed.notify_all()
            return self._thread

    def beside(self, question: Question) -> None:
        """Have a question answered by the thread, which is started if there is none."""
        with self._changed:
            if self._closed:
                return
            self._questions.append(question)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threads.start("mimose-planner", self._answer_all, self._end)

    def _answer_all(self) -> None:
        """The thread: the newest question first, since its batch was the last one seen."""
        if sys.platform == "linux":  # elsewhere the whole process would
            with suppress(OSError):
                niceness = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, niceness))
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._questions or self._closed, IDLE_SECONDS)
                if self._closed or not self._questions:
                    self._thread = None  # under the lock: whoever asks next starts another one
                    return
                question = self._questions.pop()
                self._busy = True
            try:
                question()
            except Exception:
                # The plan in use is valid; failing to better it must not end a training run, nor go unseen.
                logger.warning("Looking for a better plan failed; the present one stays.", exc_info=True)
            finally:
                del question
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _better(
        self,
        timeline: Timeline,
        budget_bytes: int,
        known: Plan | None,
        incumbents: tuple[Incumbent, ...],
        on_better: Callable[[Plan], None],
    ) -> None:
        """Solve exactly and report what is strictly better."""
        incumbents = incumbents if known is None else (known, *incumbents)
        plan = fastest_plan(timeline, budget_bytes, time_limit_seconds=EXACT_SECONDS, incumbents=incumbents)
        if plan is None or self._closed:
            return
        if known is None or plan.added_seconds < known.added_seconds:
            self._starts.better(timeline, budget_bytes, plan)
            on_better(plan)


def _forced(timeline: Timeline, answer: object) -> Plan:
    """A callable planner's answer as a plan of this timeline."""
    actions = answer.actions if isinstance(answer, Plan) else answer
    if not isinstance(actions, Mapping):
        raise PlanError(
            f"Expected the planner to return a Plan or a mapping of unit name to action, but got {answer!r}"
        )
    unknown = sorted(str(unit) for unit in actions if unit not in timeline.units)
    if unknown:
        raise PlanError(
            f"The planner names {len(unknown)} unit(s) that are not planned: {', '.join(unknown)}. "
            f"Planned are: {', '.join(timeline.units)}"
        )
    for unit, action in actions.items():
        if action != KEEP and (unit, action) not in timeline.option_index:
            known = [name for owner, name in timeline.option_index if owner == unit]
            raise PlanError(
                f"The planner gives unit {unit!r} the action {action!r}, which it does not have. "
                f"It has: {', '.join([KEEP, *known])}"
            )
    chosen = timeline.chosen(actions)
    conflict = Structure.of(timeline).conflict(chosen.tolist())
    if conflict is not None:
        outer, inner = (timeline.units[timeline.options[option].unit] for option in conflict)
        raise PlanError(
            f"The planner acts on {inner!r} and on {outer!r}, which contains it. "
            f"At most one unit on a path from the root may act: keep one of them"
        )
    return plan_of(timeline, chosen)
