"""What a planned step's peak says: of its prediction, and to the user where it broke the budget."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from lightning_mimose.actions.session import Session
from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.budget import format_bytes
from lightning_mimose.engine.step import Step
from lightning_mimose.engine.unlike import Unlike


class Judge:
    """Holds what planned steps of one model reached against what was predicted.

    Args:
        advisor: Has predicted it.
        session: What the units did.
        unlike: Looks for what tells steps apart that were taken for alike.
    """

    def __init__(self, advisor: Advisor, session: Session, unlike: Unlike) -> None:
        self._advisor, self._session, self._unlike = advisor, session, unlike
        self._warned = False

    def compare(self, step: Step, peak: int, *, whole: bool) -> None:
        """A planned step: hold what it reached against what was predicted.

        Args:
            step: The step.
            peak: What it reached.
            whole: Whether it comes no further in its update.
        """
        plan = step.advice.plan
        if plan is not None and step.advice.bounded and peak > plan.predicted_peak_bytes:
            self._advisor.estimator.bounds.refute()  # strange or not: as nobody foresaw it, it may come again
        if not step.strange:  # else it says nothing of the steps that it was taken for
            self._judge(step, peak, whole=whole)
        self._warn_of(step, peak)

    def _judge(self, step: Step, peak: int, *, whole: bool) -> None:
        """See `compare`: what plans and predictions are worth."""
        advisor, budget = self._advisor, self._advisor.budget_bytes
        plan, predicted = step.advice.plan, step.advice.predicted_peak_bytes
        exact = plan is not None and dict(plan) == step.actions  # not a bound for what another rank has planned
        # What was compared beside it took memory of its own, but never more than the budget leaves.
        clean = not self._session.compared or peak > budget
        # Nor had one that ran again the old gradients, which had been let go of.
        clean &= not step.retried or (predicted is not None and peak > predicted)
        # Without a backward it says no more than that (a batch that was skipped).
        clean &= not self._session.met and (step.in_backward or (predicted is not None and peak > predicted))
        if plan is not None and predicted is not None and exact and clean and whole:
            reached = max(peak, step.resident.end_bytes + step.left_bytes)
            if not step.by_the_way or reached > predicted:
                advisor.verify(step.size, step.resident, plan, predicted, reached, anew=step.inputs_taught)
                self._unlike.compare(predicted, reached)
        if plan is not None and predicted is None and not step.advice.bounded and budget < peak:
            advisor.not_beyond_shelter(step.size, step.resident, plan if exact and clean else None, peak)

    def _warn_of(self, step: Step, peak: int) -> None:
        """Tell the user, once, that a planned step broke the budget though it was not expected to."""
        advisor, budget = self._advisor, self._advisor.budget_bytes
        predicted = step.advice.predicted_peak_bytes
        if budget < peak and (predicted is None or predicted <= budget) and not self._warned:
            self._warned = True
            known = "a plan predicted to stay inside it. The next batches are planned with what was missing kept free."
            unknown = "the leanest plan for a size that is not known well yet."
            if step.strange:
                known = unknown = (
                    "a plan for steps without all of its operations (a loss that is added, or goes back twice, in some "
                    "steps?). Where such steps come in a pattern, they are planned by what they take themselves from "
                    "now on."
                )
            elif step.mixed:
                unknown = "a plan for less than the model was called with in the end: only the last units recomputed."
            elif step.advice.bounded:
                unknown = "no plan: the budget had seemed ample" if not step.actions else "what seemed to fit for sure"
                unknown += ". Such batches recompute as much as they can from now on."
            elif self._session.met:
                known = unknown = (
                    f"a plan that knew nothing of {named_shortly(self._session.met)}, which was called all the same. "
                    "The next batches are measured, to learn what that takes."
                )
            warnings.warn(
                f"A batch of {advisor.tracker.named(step.size)} reached {format_bytes(peak)}, above the "
                f"budget of {format_bytes(budget)}, under {unknown if predicted is None else known}",
                stacklevel=6,
            )


def named_shortly(units: Sequence[str]) -> str:
    """The first one, and how many more there are.

    Example:
        >>> named_shortly(["layers.0", "layers.1"])
        "'layers.0' and 1 more"
    """
    return f"{units[0]!r}" + (f" and {len(units) - 1} more" if len(units) > 1 else "")
