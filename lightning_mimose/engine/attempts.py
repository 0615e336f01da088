"""Attempts: a step that failed before its update, run again as if it had not begun.

Two things end a step in a way that another plan cures: the device is out of memory all the same, and a unit turns
out not to be repeatable (its input was changed in place, its recomputation saved something else). Before the update
nothing is lost yet: generators, buffers, attributes of modules, logged values and gradients are put back, and the
step runs again under the most saving plan, or without that unit. Both the plain loop and Lightning's closure
(forward, zeroing, backward) run inside `Attempts.run`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from lightning_mimose.actions.proof import DIFFERS
from lightning_mimose.actions.step_state import StepState
from lightning_mimose.actions.stored import LATEST
from lightning_mimose.errors import MimoseError, RecomputeError, is_out_of_memory
from lightning_mimose.measure.resident import versions

if TYPE_CHECKING:
    from collections.abc import Iterator

Result = TypeVar("Result")

MOST_FAILURES_IN_A_ROW = 10
"""Steps in a row that may run out of memory before the budget is called unrealistic."""


class Repeatable(Protocol):
    """The step that is running, as far as attempts need it."""

    @property
    def stepping(self) -> bool:
        """Whether a step is under way that may still be run again."""

    @property
    def learning(self) -> bool:
        """Whether the step is one of those in which things are learnt."""

    @property
    def gradients(self) -> Literal["freed", "zeroed", "kept"]:
        """What becomes of gradients from before the step, before its backward."""

    @property
    def latest_region(self) -> str | None:
        """The unit that was recomputed last."""

    def again(self, *, leaner: bool, why: str, allocator_failed: bool = False) -> bool:
        """Prepare the step to run again; False if there is no plan that could help."""

    def refuse(self, reasons: dict[str, str]) -> None:
        """Never recompute some units."""

    def out_of_memory(self, error: BaseException, hint: str) -> BaseException:
        """What to raise where the step cannot run again."""


class Attempts:
    """Runs a step's forward and backward, again if need be.

    Args:
        running: The step that is running, whichever that is.
        model: What the step writes besides gradients.
        zeroed: Parameters whose gradients are zeroed between forward and backward, where any are.
        device: Whose generator it uses.
        retry: Whether to run again when out of memory.
        keep: Called before an attempt; returns what puts back other things that it may write (logged values).
        forbids: Asked after a failure; says why the step cannot run again, or nothing.
    """

    def __init__(
        self,
        running: Repeatable,
        model: nn.Module,
        zeroed: Sequence[nn.Parameter],
        device: torch.device,
        *,
        retry: bool,
        keep: Callable[[], Callable[[], None]] = lambda: lambda: None,
        forbids: Callable[[], str] = lambda: "",
    ) -> None:
        self._running = running
        self._model = model
        self.zeroes(zeroed)
        self._device = device
        self._retry = retry
        self._keep = keep
        self._forbids = forbids
        self._state = StepState(lambda: list(model.modules()))
        self._failures_in_a_row = 0
        with torch.inference_mode(False), torch.enable_grad():
            self._leaf = torch.ones((), requires_grad=True)
            self._oldest = self._leaf + 1

    def zeroes(self, parameters: Sequence[nn.Parameter]) -> None:
        """Name the parameters whose gradients are zeroed between forward and backward from now on."""
        self._zeroed = list(parameters)
        among = {id(parameter) for parameter in self._zeroed}
        self._others = [parameter for parameter in self._model.parameters() if id(parameter) not in among]
        self._every = [*self._zeroed, *self._others]

    def run(self, once: Callable[[], Result]) -> Result:
        """Call `once`; where it fails in a way that another plan cures, put everything back and call it again.

        Args:
            once: Forward, zeroing of gradients, backward.

        Raises:
            DeviceMemoryError: Out of memory, and running again cannot help; it says where the memory went.
            RecomputeError: A unit cannot be repeated, and neither can the step.
        """
        if not self._running.stepping:
            return once()
        aside: ExitStack | None = None  # few steps fail, and every step is here
        try:
            while True:
                before = _Before(self._state, self._device, self._keep(), self._every, learning=self._running.learning)
                before.note_gradients(self._every if self._running.gradients == "kept" else self._others)
                try:
                    result = once()
                except Exception as error:
                    failed = f"{type(error).__name__}: {error}"
                    self._cure(error, before)
                else:
                    before.learn()
                    self._failures_in_a_row = 0
                    return result
                # Only here: until the `except` block ends, the error's frames hold every activation.
                aside = aside or ExitStack()
                if not before.put_back(aside):
                    raise MimoseError(
                        "A step that failed could not be run again: it had written a large buffer that no other step "
                        f"wrote. Nothing was updated. It had failed with {failed}"
                    )
                if self._running.gradients == "freed":
                    for parameter in self._zeroed:
                        parameter.grad = None
                gc.collect()
                # On a CPU what a backward that failed had still to do waits for the next one, and keeps its graph. The
                # newest comes first: by the turn of what is older than all steps, the rest was thrown away.
                torch.autograd.grad(self._oldest, self._leaf, retain_graph=True)
                if self._device.type != "cpu":
                    # `torch.accelerator` has had memory functions since torch 2.9.
                    getattr(getattr(torch, "accelerator", None), "empty_cache", torch.cuda.empty_cache)()
        finally:
            if aside is not None:
                aside.close()

    def _cure(self, error: Exception, before: _Before) -> None:
        """Prepare another attempt, or raise what ends the step."""
        running = self._running
        forbidden = self._forbids() or before.lost()
        if isinstance(error, RecomputeError):
            if LATEST in error.reasons and running.latest_region is not None:
                error = RecomputeError({running.latest_region: error.reasons[LATEST]})
            running.refuse(error.reasons)
            if forbidden or not running.again(leaner=False, why=error.told):
                raise error
        elif isinstance(error, CheckpointError) and running.latest_region is not None:
            unit, text = running.latest_region, str(error).splitlines()[0]
            running.refuse({unit: DIFFERS})
            if forbidden or not running.again(leaner=False, why=f"{unit}: {text}"):
                raise RecomputeError({unit: f"{DIFFERS} ({text})"}) from error
        elif is_out_of_memory(error):
            self._failures_in_a_row += 1
            if not self._retry:
                raise running.out_of_memory(error, 'on_oom="retry" would run the step again under it.') from error
            if forbidden:
                raise running.out_of_memory(error, f"It was not run again: {forbidden}.") from error
            if self._failures_in_a_row > MOST_FAILURES_IN_A_ROW:
                hint = f"{MOST_FAILURES_IN_A_ROW} steps in a row ran out of memory: give a smaller budget."
                raise running.out_of_memory(error, hint) from error
            # Libraries fail without it, with memory that it has cached and would have given back.
            allocator_failed = isinstance(error, torch.OutOfMemoryError)
            if not running.again(leaner=True, why="out of memory", allocator_failed=allocator_failed):
                raise running.out_of_memory(error, "The most saving plan was in force already.") from error
        else:
            raise error


class _Before:
    """What an attempt found, to be put back if it fails."""

    def __init__(
        self,
        state: StepState,
        device: torch.device,
        undo: Callable[[], None],
        parameters: Sequence[nn.Parameter],
        *,
        learning: bool,
    ) -> None:
        self._device, self._undo = device, undo
        # No tensor, which would be measured as something that the step holds, and no call of an operator.
        self._host_generator = torch.default_generator.clone_state()
        self._device_generator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._copy = state.copy(learning=learning)
        self._gradients: list[tuple[nn.Parameter, torch.Tensor | None, int]] = []
        self._parameters, self._versions = parameters, versions(parameters)

    def note_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Backward will add to these gradients; which it has added to is told by their versions, at no cost."""
        self._gradients = [(p, p.grad, p.grad._version if p.grad is not None else 0) for p in parameters]

    def lost(self) -> str:
        """Why nothing can be put back, if so: parameters are too large to be copied on every step."""
        written = versions(self._parameters) != self._versions
        return "the failed attempt had written parameters" if written else ""

    def learn(self) -> None:
        """The attempt succeeded: see what such a step writes."""
        self._copy.learn()

    def put_back(self, aside: ExitStack) -> bool:
        """Make it as if the attempt had not begun; `aside` is closed when the step has succeeded.

        Returns:
            Whether everything could be put back.
        """
        whole = self._copy.put_back()
        self._undo()
        torch.set_rng_state(self._host_generator.get_state())
        if self._device_generator is not None:
            torch.cuda.set_rng_state(self._device_generator, self._device)
        for parameter, gradient, version in self._gradients:
            if gradient is not None and gradient._version != version:
                # What this batch adds is in it already: the next attempt's share is thrown away as soon as it is there.
                parameter.grad = None
                aside.enter_context(_discarded(parameter, gradient))
            else:
                parameter.grad = gradient
        return whole


@contextmanager
def _discarded(parameter: nn.Parameter, gradient: torch.Tensor) -> Iterator[None]:
    def discard(found: torch.Tensor) -> None:
        found.grad = gradient

    handle = parameter.register_post_accumulate_grad_hook(discard)
    try:
        yield
    finally:
        handle.remove()
        parameter.grad = gradient
