"""What the optimizers' updates need besides what is resident, reserved before the first of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import ne

import torch
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from lightning_mimose.measure.optimizers import OptimizerCost, optimized, probe_optimizer
from lightning_mimose.measure.resident import ResidentLedger, versions
from lightning_mimose.predict.shapes import Resident

ENOUGH_SIGHTS = 3
"""Planned steps that show what an update holds, after which what sheltered ones have shown counts no more."""
SHELTERED_SLACK = 1.25
"""By how much what such an update holds may be above what sheltered steps have shown of it."""


CONFIRMED = 2
"""Updates in a row that have to have taken something for it to be expected of the next."""


class UpdateReserve:
    """Knows what a step's updates reach.

    Args:
        ledger: What is resident.

    Attributes:
        cost: What all optimizers add together.
    """

    def __init__(self, ledger: ResidentLedger) -> None:
        self._ledger = ledger
        self._costs: list[tuple[Optimizer, OptimizerCost]] = []
        self._entries: dict[int, int] = {}
        self._versions: list[int] = []
        self._nodes = 0
        self._trained: torch.Tensor | None = None
        self._gradient: TensorWeakRef | None = None
        self.cost = OptimizerCost(0, 0)
        self._seen_bytes = self._guessed_bytes = self._sights = 0
        self._reached: deque[tuple[int, int]] = deque(maxlen=CONFIRMED)
        """What the latest updates reached above what lasted at their step's start, and what of that stayed."""

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Name the optimizers; each is probed."""
        self._entries = {id(optimizer): len(optimizer.state) for optimizer in optimizers}
        self._costs = [(optimizer, probe_optimizer(optimizer)) for optimizer in optimizers]
        self._reached.clear()
        self._ledger.watch(optimizers, sum(cost.growing_bytes for _, cost in self._costs))
        self.cost = OptimizerCost(
            sum(cost.state_bytes for _, cost in self._costs),
            max((cost.transient_bytes for _, cost in self._costs), default=0),
        )

    def begins(self) -> None:
        """An update is about to be measured."""
        self._nodes = torch._C._autograd._get_sequence_nr()
        every = optimized(*(optimizer for optimizer, _ in self._costs))
        self._trained = next((parameter for parameter in every if parameter.grad is not None), None)
        grad = None if self._trained is None else self._trained.grad
        self._gradient = None if grad is None else TensorWeakRef(grad)
        self._versions = self._versions_now()

    @property
    def grows(self) -> bool:
        """Whether an optimizer's state grows from update to update: all that it will be is resident from the start."""
        return any(cost.growing_bytes for _, cost in self._costs)

    @property
    def evaluates(self) -> bool:
        """Whether there was another backward since it began (SAM's, a closure's): a graph, and another gradient."""
        if self._trained is None or self._gradient is None or torch._C._autograd._get_sequence_nr() <= self._nodes:
            return False
        return self._trained.grad is not None and self._gradient() is not self._trained.grad

    def measured(self, transient_bytes: int) -> None:
        """The update as it really is replaces what was measured on small copies.

        One in which an optimizer wrote nothing (a scaler skipped it, it has its turn in another step) says only what is
        needed at least.
        """
        if self.grows:
            return  # a part of it is state
        whole = all(map(ne, self._versions_now(), self._versions))
        least = 0 if whole else self.cost.transient_bytes
        self.cost = OptimizerCost(self.cost.state_bytes, max(least, transient_bytes))

    def reached(self, peak_bytes: int, stayed_bytes: int) -> None:
        """Note what an update reached, in which the loss was not evaluated again.

        One in which an optimizer wrote nothing, or whose state grows, says nothing of the next.

        Args:
            peak_bytes: That, above what lasted at its step's start, with the gradients.
            stayed_bytes: What of it was there when it was over: state that has come, or is made once by others.
        """
        if not self.grows and all(map(ne, self._versions_now(), self._versions)):
            self._reached.append((peak_bytes, max(0, stayed_bytes)))

    def surely_bytes(self, lasting_bytes: int) -> tuple[int, int]:
        """What the next update takes for sure if it is like the latest ones, and what is sure to do for it.

        What stayed of one is part of what lasts by now, or else need not come again. Of a single one nothing is sure:
        things are made and tuned in the first.

        Args:
            lasting_bytes: Parameters, buffers, state and the batch.
        """
        if len(self._reached) < CONFIRMED:
            return lasting_bytes, lasting_bytes
        least_bytes = min(peak_bytes - stayed_bytes for peak_bytes, stayed_bytes in self._reached)
        return lasting_bytes + least_bytes, lasting_bytes + max(peak_bytes for peak_bytes, _ in self._reached)

    def evaluated(self, pass_bytes: int, peak_bytes: int, *, planned: bool) -> None:
        """The loss was evaluated again in an update, not for the first time in a step.

        Args:
            pass_bytes: The peak of the step's own pass.
            peak_bytes: That of the update.
            planned: Whether that was a planned step. A sheltered one has its peak where less may be held.
        """
        more_bytes = peak_bytes - pass_bytes
        if planned and more_bytes > 0:
            self._seen_bytes = max(self._seen_bytes, more_bytes)
            self._sights += 1
        self._guessed_bytes = max(self._guessed_bytes, int(SHELTERED_SLACK * more_bytes))

    @property
    def again_bytes(self) -> int:
        """What updates hold that evaluate the loss again, besides what the step's own pass does."""
        if self._sights < ENOUGH_SIGHTS:
            return max(self._seen_bytes, self._guessed_bytes)
        return self._seen_bytes

    def _versions_now(self) -> list[int]:
        return [versions(optimized(optimizer)) for optimizer, _ in self._costs]

    def rest_bytes(self, resident: Resident) -> int:
        """What lasts when a step has ended, its batch included."""
        return resident.update_bytes - self.cost.transient_bytes

    def peak_bytes(self, lasting_bytes: int) -> int:
        """What an update reaches.

        Args:
            lasting_bytes: Parameters, buffers, state and the batch.
        """
        capacity = self._ledger.gradient_capacity_bytes
        return lasting_bytes + capacity + self._pending_bytes() + self.cost.transient_bytes

    def later(self, resident: Resident) -> Resident:
        """What will be resident in such a step once every optimizer has made an update."""
        old = max(resident.old_gradient_bytes, self._ledger.gradient_capacity_bytes)
        return resident._replace(lasting_bytes=resident.lasting_bytes + self._pending_bytes(), old_gradient_bytes=old)

    def _pending_bytes(self) -> int:
        # Every optimizer's state is still to come until its own first update (`watch` may find one that has some).
        pending = 0
        for optimizer, cost in self._costs:
            if len(optimizer.state) == self._entries[id(optimizer)]:
                pending += cost.state_bytes
        return pending
