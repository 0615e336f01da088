"""What the engine tells a shared budget about its steps, and what it hears from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lightning_mimose.actions.session import Session
from lightning_mimose.advise.advice import StepView
from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.engine.step import Step
from lightning_mimose.predict.shapes import Resident
from lightning_mimose.shared.dropped import DROPPED
from lightning_mimose.shared.lease import Lease
from lightning_mimose.shared.stops import Route, Stops, route_of
from lightning_mimose.sizes import BatchSize


class Tenancy:
    """One model's part in a shared budget. A job may have several: what the others hold is none of this one's plans.

    Args:
        lease: The job's lease.
        closes: Whether the lease ends with the model's training; not where a `with shared.job()` encloses it.
        advisor: Plans with what the lease allows.
        session: Calls units, between which a step may have to wait.
    """

    def __init__(self, lease: Lease, closes: bool, advisor: Advisor, session: Session) -> None:
        self._lease, self._closes = lease, closes
        self._advisor, self._session = advisor, session
        self._on_cpu = lease.device.type == "cpu"
        self._arrive = lease.arrive if self._on_cpu else self._arrive_on_accelerator  # called at every stop
        self._view: StepView | None = None
        """What the step that was allowed looks like: it is the one that begins next."""
        self._batch_bytes = 0
        self._backward = False
        self._again: tuple[Step, int] | None = None
        self._part = object()
        self.close: Callable[[], object] = lease.close if closes else partial(lease.parts.pop, self._part, None)
        self.drop = partial(DROPPED.note, self.close)
        """To be called where garbage is collected, in place of `close`."""

    def settle(self, rest_bytes: int) -> None:
        """The model is there, and its optimizer is known.

        Args:
            rest_bytes: What lasts between steps, gradients and the optimizer's state included.

        Raises:
            BudgetInfeasibleError: It does not fit beside what other jobs hold.
        """
        self._lease.settle(rest_bytes + self._aside)
        self._lease.parts[self._part] = rest_bytes
        self._advisor.budget_bytes = self._room()

    def allow(self, size: BatchSize, resident: Resident) -> None:
        """Let the next step be planned with what the job may have now."""
        view = self._view = self._advisor.step_view(size, resident)
        if view is None or not view.trusted:
            self._advisor.budget_bytes = self._room()
        else:
            aside = self._aside
            plan = self._lease.plan_bytes(view.least_bytes + aside, view.wants_bytes + aside)
            self._advisor.budget_bytes = plan - aside

    @property
    def _aside(self) -> int:
        return self._lease.aside(self._part)

    def _room(self) -> int:
        """What a step of this model may take at most."""
        return self._lease.room_bytes() - self._aside

    def begin(self, step: Step, rest_bytes: int) -> bool:
        """Wait until a step that was planned may begin.

        Args:
            step: The step.
            rest_bytes: What lasts when it has ended, its batch included.

        Returns:
            Whether it may; if not, what the job may have has changed, and it must be planned anew.
        """
        self._batch_bytes = max(self._batch_bytes, step.batch_bytes)
        # The next batch may be there before this one is gone.
        rest = rest_bytes - step.batch_bytes + 2 * self._batch_bytes
        route = self._route(step)
        # Never more than the step itself: where that is what there is, asking for more would never be granted.
        rest = min(rest + self._aside, route.claim.peak_bytes)
        if not self._lease.begin(route, rest):
            return False
        self._lease.parts[self._part] = rest - self._aside
        self._session.stops = Stops(route, self._arrive) if route.places and self._lease.watches else None
        return True

    def begin_evaluation(self, peak_bytes: int | None) -> None:
        """Wait until an evaluation batch may run; `end` ends it.

        Args:
            peak_bytes: What it takes, resident memory included; None where that is not known: it claims all.
        """
        claim = None if peak_bytes is None else peak_bytes + self._aside
        rest = self._lease.rest_bytes
        while claim is None or not self._lease.begin(Route.whole(claim), min(rest, claim), trains=False):
            claim = self._lease.room_bytes()

    def _route(self, step: Step) -> Route:
        allowed, aside, session = self._advisor.budget_bytes, self._aside, self._session
        beside = session.tries or session.split_tries or session.learning_steps  # units run more often than once
        view = self._view
        if view is None or step.advice.predicted_peak_bytes is None or step.retried or beside or self._lease.alone:
            return Route.whole(allowed + aside)
        if not view.timeline.times:  # of several paths: which of them the step takes is not known
            return Route.whole(allowed + aside)
        key = (*step.actions.items(), allowed, aside)
        route: Route | None = view.routes.get(key)
        if route is None:
            margin = max(0, min(view.margin_bytes, allowed - (step.advice.predicted_peak_bytes or allowed)))
            route = route_of(view.structure, view.timeline, step.actions, margin + aside, allowed + aside)
            view.routes[key] = route
        return route

    def _arrive_on_accelerator(self, stretch: int) -> None:
        # In backward an accelerator's one thread serves all jobs: it must not wait for any of them.
        self._lease.arrive(stretch, wait=not self._backward)

    def again(self, step: Step, rest_bytes: int) -> None:
        """A step that failed is to run again: from the start, with all the room there is.

        What it holds is only free when the error's frames are gone, so nothing is given back before its forward begins.
        """
        self._again = step, rest_bytes

    def begin_forward(self) -> None:
        """Forward begins, of a step that runs again maybe."""
        if self._again is None:
            return
        (step, rest_bytes), self._again = self._again, None
        self.end()
        self._advisor.budget_bytes = self._room()
        while not self.begin(step, rest_bytes):
            self._advisor.budget_bytes = self._room()

    def begin_backward(self) -> None:
        """Forward is done."""
        self._backward = True
        if not self._on_cpu:
            self._lease.all_ahead()

    def update(self) -> None:
        """Backward is done."""
        self._lease.update()

    def end(self) -> None:
        """The step is over, or given up."""
        self._backward = False
        self._session.stops = self._again = None
        self._lease.end()

    def turn(self) -> None:
        """Let another job run, if it is its turn; not while an error's frames hold what this one had."""
        self._lease.turn()

    def beside(self) -> str:
        """What other jobs hold, in words."""
        return self._lease.beside()
