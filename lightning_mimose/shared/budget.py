"""One budget for several trainings: what users hold in their hands."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, TypeVar

import torch

from lightning_mimose.budget import device_memory, parse_budget
from lightning_mimose.errors import MimoseError, SharedBudgetError, UnsupportedError
from lightning_mimose.shared.broker import Broker, LocalBroker
from lightning_mimose.shared.dropped import DROPPED
from lightning_mimose.shared.lease import Lease

if TYPE_CHECKING:
    from lightning_mimose.report.shared import SharedReport

Given = ParamSpec("Given")
Result = TypeVar("Result")

_numbers = count(1)


class SharedBudget:
    """A budget that several trainings on one device keep together.

    Give it to each of them as `budget`: `MimoseCallback(budget=shared)`, `Mimose(model, budget=shared)`. At every step
    each plans with what the others do not hold; where not all peaks fit beside each other they take turns, in the
    midst of their steps.

    Trainings in threads of one process run one at a time, each with its own random generators, so that each ends as it
    would alone. What a thread draws before its training begins (initial weights) is its own only inside
    `with shared.job():`, or in a function that `shared.wrap` has wrapped; there building the model counts too.

    For trainings in several processes see `connect`.

    Args:
        budget: All of them together, written as for `MimoseCallback`.
        own_generators: False lets trainings in threads compute at the same time, and draw from one generator: only for
            those that draw nothing (no dropout), or whose results need not be repeatable.
        when_full: What a training does that does not fit beside the others: `"raise"` a `BudgetInfeasibleError` with
            the numbers, or `"wait"` until one of them ends. What it built waits outside the budget.
        device: Where they train; None for the accelerator if there is one.

    Example:
        >>> from torch import nn
        >>> from lightning_mimose import Mimose, SharedBudget
        >>> shared = SharedBudget("1GB")
        >>> block = lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        >>> @shared.wrap
        ... def objective(width):
        ...     model = nn.Sequential(*[block() for _ in range(4)])
        ...     with Mimose(model, budget=shared, loss_fn=lambda m, x: m(x).pow(2).mean()) as mimose:
        ...         return [mimose.step(torch.randn(width, 16)).item() for _ in range(3)][-1]
        >>> objective(8) > 0
        True
    """

    def __init__(
        self,
        budget: str | int | float,
        *,
        own_generators: bool = True,
        when_full: Literal["raise", "wait"] = "raise",
        device: torch.device | str | None = None,
    ) -> None:
        if when_full not in ("raise", "wait"):
            raise MimoseError(f"when_full={when_full!r} was asked for; it is 'raise' or 'wait'.")
        self.budget = budget
        self._spec = parse_budget(budget)
        self._own_generators, self._when_full = own_generators, when_full
        self._device = None if device is None else torch.device(device)
        self._broker: Broker | None = None
        self._lock = threading.Lock()
        self._here = threading.local()
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.budget!r})"

    def __reduce__(self) -> Any:
        raise self._of_another_process()

    @classmethod
    def connect(
        cls,
        name: str,
        budget: str | int | float | None = None,
        *,
        own_generators: bool = True,
        when_full: Literal["raise", "wait"] = "raise",
        device: torch.device | str | None = None,
    ) -> SharedBudget:
        """The shared budget of a name, for trainings in several processes of this user on this machine.

        Whoever comes first starts a small process that keeps the account, and that ends with the last training. A
        training that is killed gives back what it held at once; if that process is killed, another one takes over.

        Args:
            name: Letters, digits, dots, dashes, underscores.
            budget: As for `SharedBudget`; None to join one that is there.
            own_generators: As for `SharedBudget`; matters where a process has several trainings.
            when_full: As for `SharedBudget`.
            device: As for `SharedBudget`.

        Raises:
            SharedBudgetError: The name is another user's, or stands for another budget or device, or nothing.
        """
        # Not at the top: sockets and file locks, which not every system has; and it is a `SharedBudget` itself.
        from lightning_mimose.shared.named import NamedBudget

        return NamedBudget(name, budget, own_generators=own_generators, when_full=when_full, device=device)

    def job(self, name: str | None = None, *, weight: float = 1.0, resident: str | int | None = None) -> Job:
        """One training's part: a budget with a name and a weight, and a block in which everything counts.

        Args:
            name: How reports call it; one of its own.
            weight: How much memory and time it gets where not all can have what they want, relative to the others.
            resident: What the model, its gradients and its optimizer's state will take. With it the block begins as
                soon as there is so much; without it, while nobody else is in a step.

        Example:
            >>> shared = SharedBudget("1GB")
            >>> with shared.job("large", weight=2.0) as job:
            ...     job
            Job('large', weight=2.0)
        """
        return Job(self, name, weight, None if resident is None else parse_budget(resident).resolve(self._memory()))

    def wrap(self, function: Callable[Given, Result]) -> Callable[Given, Result]:
        """A function, each call of which is a job: an objective of a search that runs several at a time.

        Args:
            function: Builds and trains a model, with this budget.
        """

        @functools.wraps(function)
        def run(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            with self.job():
                return function(*args, **kwargs)

        return run

    def report(self) -> SharedReport:
        """What the jobs held so far, and what each waited."""
        from lightning_mimose.report.shared import SharedReport

        broker = self._broker
        history = {"held": [], "waits": []} if broker is None else broker.history()
        return SharedReport(None if broker is None else broker.budget_bytes, history["held"], history["waits"])

    # --- what the engine asks ---------------------------------------------------------------------------------

    def resolve(self, device: torch.device) -> int:
        """The budget in bytes.

        Raises:
            SharedBudgetError: It is in use on another device.
            UnsupportedError: The training runs in several ranks.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            ranks = torch.distributed.get_world_size()
            if ranks > 1:  # one rank would wait for memory that another holds while it waits for the first
                raise UnsupportedError(
                    f"A SharedBudget was given to a training of {ranks} ranks, which wait for each other in every "
                    "step. Give every rank a budget of its own."
                )
        return self._broker_on(device).budget_bytes

    def open(self, device: torch.device, name: str | None = None, weight: float = 1.0) -> tuple[Lease, bool]:
        """The lease for a training, and whether it ends with the training.

        The lease is that of the `job` around it, if there is one in this thread.
        """
        DROPPED.watch()
        DROPPED.close()  # this thread may have dropped one just now, whose turn would still last
        around = self._around()
        broker = self._broker_on(device)
        if around is not None:
            return around, False
        lease = Lease(
            broker,
            name or f"{os.getpid()}.{next(_numbers)}",
            device,
            weight=weight,
            own_generators=self._own_generators,
            when_full=self._when_full,
        )
        return lease, True

    def enter(self, name: str | None, weight: float, resident_bytes: int | None) -> Lease:
        """Begin a job in this thread."""
        if self._around() is not None:
            raise SharedBudgetError("This thread is inside a job of this SharedBudget already. Leave that one first.")
        lease, _ = self.open(self._usual_device(), name, weight)
        try:
            if resident_bytes is None:
                lease.build()
            else:
                lease.settle(resident_bytes)
        except BaseException:
            lease.close()
            raise
        self._here.lease = lease
        return lease

    def leave(self) -> None:
        """End the job of this thread."""
        lease: Lease = self._here.lease
        self._here.lease = None
        lease.close()

    def _around(self) -> Lease | None:
        """The lease of the `job` around, in this thread; not if that was entered before this process was forked."""
        lease: Lease | None = getattr(self._here, "lease", None)
        return None if lease is None or lease.is_the_parents else lease

    @staticmethod
    def _of_another_process() -> UnsupportedError:
        return UnsupportedError(
            "A SharedBudget of one process cannot be used in another one. Several processes share one by name: "
            'SharedBudget.connect("name", "16GB") in each of them.'
        )

    def _forked(self) -> None:
        """This process was forked from the one in which the budget was made."""
        raise self._of_another_process()

    def _usual_device(self) -> torch.device:
        if self._device is None:
            return (
                torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
            )
        return self._device

    def _memory(self) -> Any:
        return device_memory(self._usual_device())

    def _broker_on(self, device: torch.device) -> Broker:
        if self._process != os.getpid():
            self._forked()
        with self._lock:
            if self._broker is None:
                self._broker = self._make_broker(device)
                self._device = device
            elif self._device is not None and device != self._device:
                raise SharedBudgetError(
                    f"{self!r} is in use on {self._device}, and a training on {device} was given it too. Make one "
                    f"SharedBudget for every device; SharedBudget(..., device={str(device)!r}) says where it is meant."
                )
            return self._broker

    def _make_broker(self, device: torch.device) -> Broker:
        return LocalBroker(self._spec.resolve(device_memory(device)))


class Job:
    """One training's part of a shared budget, see `SharedBudget.job`. Give it as `budget`, or use it as a block."""

    def __init__(self, shared: SharedBudget, name: str | None, weight: float, resident_bytes: int | None) -> None:
        if not 0 < weight < float("inf"):
            raise SharedBudgetError(f"weight={weight!r} was asked for; it is a positive number.")
        self.shared, self.name, self.weight, self.resident_bytes = shared, name, weight, resident_bytes

    def __repr__(self) -> str:
        return f"Job({self.name!r}, weight={self.weight})"

    def __enter__(self) -> Job:
        self.shared.enter(self.name, self.weight, self.resident_bytes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shared.leave()

    def resolve(self, device: torch.device) -> int:
        """See `SharedBudget.resolve`."""
        return self.shared.resolve(device)

    def open(self, device: torch.device) -> tuple[Lease, bool]:
        """See `SharedBudget.open`."""
        return self.shared.open(device, self.name, self.weight)


AnyBudget: TypeAlias = str | int | float | SharedBudget | Job
"""What may be given as a budget."""
SHARED_BUDGETS = (SharedBudget, Job)
"""What several trainings keep together; every other budget is one that `parse_budget` understands."""
