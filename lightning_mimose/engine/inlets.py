"""Where a step's size is read: in its batch, or where the model is given what the step has made of it.

Many steps make their inputs themselves: they tokenise texts, resize and pad images, draw a resolution, cut off what
is padding. The batch then tells nothing, or too little; what memory depends on is known when the model is called.
Sizes are read in the batch until something shows that they do not tell enough, see `places`. Calls with lists of
tensors do not count, for these are mostly made into one tensor further inside. A step that turns out to be given
something else than its size has told recomputes all it may from there on.

A step may call the model several times before its backward, on inputs of sizes that do not follow from the first
(`entries`): then they are part of the size, and where a step is planned what is still to come is taken to be as large
as it ever was. Calls without gradients count nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from torch import nn

from lightning_mimose.actions.foreign import in_backward
from lightning_mimose.actions.session import Session
from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.dims import Leaf
from lightning_mimose.engine.arguments import (
    first_tensor,
    has_lists,
    leaves_in,
    named,
    positional_names,
    wants_gradient,
)
from lightning_mimose.engine.entries import Entries
from lightning_mimose.engine.gates import Gates
from lightning_mimose.engine.inputs import Inputs
from lightning_mimose.engine.places import Doubt, Places, shape_of
from lightning_mimose.errors import SizeError
from lightning_mimose.sizes import BatchSize, Place
from lightning_mimose.units import Unit

FEW_LEAVES = 4
"""Tensors in a batch that are part of sizes which are read further inside; of more, as in a detector's, none is."""


class Sized(Protocol):
    """The step that is running, as far as its size goes."""

    def decide(self, size: BatchSize | None) -> None:
        """Its size is known, and none of its units has run that was given a tensor; None: it cannot be known."""

    def shelter(self) -> None:
        """Its size has told something else than the model is given; no unit has run yet."""

    def distrust(self) -> None:
        """It may run backward in its midst, which its plan knows nothing of; no unit has run yet."""

    def look_at_posture(self) -> None:
        """See whether modules were switched to another mode since it was decided about; no unit has run yet."""

    def shelter_rest(self) -> None:
        """As `shelter`, of the units that are still to run."""

    def resize(self, size: BatchSize) -> None:
        """Its forward is over, and this was its size."""


class Inlets:
    """Reads the sizes of a model's steps.

    Args:
        model: The model.
        units: What can be planned in it.
        advisor: Has the tracker of sizes; what it learnt by other sizes is forgotten, or laid aside.
        session: Tells when the first unit is called.
        fixed: Whether sizes are read in the batch whatever they tell: a `size_fn` says what decides, or others (ranks,
            jobs) have to know a step's plan before it begins.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], advisor: Advisor, session: Session, *, fixed: bool
    ) -> None:
        self._advisor, self._tracker, self._session, self._fixed = advisor, advisor.tracker, session, fixed
        self._model = type(model).__name__
        self._modules = {unit.name: unit.module for unit in units}
        self._names: dict[str, Sequence[str]] = {}
        self._gates = Gates(model, units)
        self._inputs, self._entries = Inputs(units, self._tracker.ignored), Entries()
        self._places = Places(advisor, (self._inputs.forget, self._entries.forget), fixed=fixed)
        self._doubt: Doubt | None = None
        self._step: Sized | None = None
        self._waits = self._called = self._blind = False
        self._passed = 0
        self._size: BatchSize | None = None
        self._of_batch: list[Leaf] = []
        self.outside = False

    # --- between steps ----------------------------------------------------------------------------------------

    def size_of(self, batch: Any) -> BatchSize | None:
        """The size of a batch; None where it will be read later in its step.

        Raises:
            SizeError: It cannot be read, now or later.
        """
        self._places.turn()
        if self._tracker.level:
            self._tracker.labels.observe(batch)
        else:
            try:
                size = self._tracker.observe(batch)
                self._watch_calls(batch)
                return size
            except SizeError:
                if leaves_in(batch) or not self._places.may_go_inside():
                    raise
            self._places.move(Place(1))
            self._advisor.announce(
                f"mimose: no tensor in this batch, a {type(batch).__name__}, has dimensions: sizes are read where the "
                "model is called"
            )
        self._blind = not (self._tracker.names or leaves_in(batch))
        self._of_batch = _few_leaves(batch) if self._tracker.place.with_batch else []
        self._gates.attach(self)
        return None

    def _watch_calls(self, batch: Any) -> None:
        """See in this step whether the model is called with something else than its batch holds, if that is asked."""
        doubt = self._doubt
        if doubt is None:
            return
        if doubt.looking:  # no call has shown any: lists count further inside
            doubt.over = True
            self._places.rise(doubt.why, with_batch=False)
        if doubt.over:
            self._gates.detach()
        else:
            doubt.begin(leaves_in(batch))
            self.outside = True
            self._gates.attach(self)

    def doubt(self, why: str) -> None:
        """Sizes tell hardly anything: read them further inside, unless the model is called with just what batches hold.

        Args:
            why: For the log.
        """
        if self._tracker.level:
            self._places.rise(why, with_batch=False)
        elif not self._fixed and self._doubt is None:
            self._doubt = Doubt(why)

    def look(self, size: BatchSize) -> None:
        """A step was learnt from: see whether what came to its first unit tells more of it than its batch."""
        self._places.look(self._inputs.given, size)

    def detach(self) -> None:
        """Leave the model as it was."""
        self.close()
        self._gates.detach()

    # --- in a step --------------------------------------------------------------------------------------------

    def wait(self, step: Sized) -> None:
        """A step begins without a size, which it is told before the first unit that is given a tensor runs."""
        self._step, self._waits, self.outside = step, True, True
        self._passed, self._called, self._places.at_unit, self._size = 0, False, False, None
        self._entries.begin()
        self._session.await_call(self._unit_is_called)

    def watch(self, step: Sized, size: BatchSize, *, learns: bool) -> None:
        """A step has a size: see that units are given what they were given at such sizes before.

        Not where it has several entries: then it is a guess of what the later ones are.
        """
        if not (self._places.stay or self._tracker.entries):
            self._inputs.begin(learns=learns)
            self._session.await_call(partial(self._compare, step, size))
        elif self._step is None:  # else that was looked at when it was decided about
            self._session.await_call(lambda *_: step.look_at_posture())

    def end_forward(self) -> None:
        """The forward is over; where nothing has shown the size yet, another one may follow."""
        step = self._step
        if self._waits:
            return
        if step is not None and self._tracker.entries and self._places.next is None:
            step.resize(self._tracker.observe_leaves(self._entries.together()))
        self.close()

    def check(self, *, in_backward: bool) -> None:
        """The step comes to its end.

        Args:
            in_backward: Whether it has run a backward.

        Raises:
            SizeError: There was nothing to read its size in.
        """
        untouched = self._blind and not self._session.passed_by
        if self._waits and in_backward and (self._called or untouched):
            raise SizeError(
                f"There is no tensor in this batch, nor in what the blocks of {self._model} are called with, so its "
                "size cannot be read. Pass size_fn, a function from the batch to an int or to a mapping of names to "
                "ints such as {'tokens': 512}."
            )

    def close(self) -> None:
        """The step is over."""
        self._step, self._waits, self.outside = None, False, False
        self._entries.begin()
        self._session.await_none()

    def offer(self, name: str, leaves: Sequence[Leaf]) -> bool:
        """See `gates.Calls`."""
        if not self._tracker.level:
            self.outside = False
            if self._doubt is not None and self._doubt.is_confirmed_by(leaves):
                self._places.rise(self._doubt.why, with_batch=False)
            return False
        if self._waits:
            self._passed += 1
            if self._passed < self._tracker.level:
                self._pass(leaves)
                return False
            if self._tells_nothing(leaves):
                self._pass(leaves)
                self._tracker.restart(self._tracker.level + 1, with_batch=True)
                return False
            self._settle(leaves)
        else:
            self._enter(name, leaves)
        return True

    def _pass(self, leaves: Sequence[Leaf]) -> None:
        """What a call tells further outside than sizes are read stays part of them, as what the batch tells does."""
        if self._tracker.place.with_batch and len(leaves) <= FEW_LEAVES:
            self._of_batch += [(f"{self._passed}.call.{path}", shape) for path, shape in leaves]

    def _tells_nothing(self, leaves: Sequence[Leaf]) -> bool:
        """Whether what the model is called with is what the batch has told, in the first step that is read here."""
        if not self._tracker.place.with_batch or self._tracker.names or self._places.risen:
            return False
        return set(map(shape_of, leaves)) <= set(map(shape_of, self._of_batch))

    def end_call(self) -> None:
        """See `gates.Calls`."""
        self.outside = self._step is not None

    def _unit_is_called(self, unit: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if in_backward():  # of a checkpoint of the user's own
            self._session.await_call(self._unit_is_called)
            return
        module = self._modules[unit]
        if unit not in self._names:
            self._names[unit] = positional_names(type(module).forward)
        given = named(self._names[unit], args, kwargs)
        self._called = True
        # One without parameters that is given lists makes the model's inputs of them.
        leaves = leaves_in(given)
        if leaves and not (has_lists(given) and next(module.parameters(), None) is None):
            self._places.at_unit, self.outside = True, False
            step = self._step
            self._settle(leaves)
            if step is not None:
                self._look_for_penalty(step, args, kwargs)
        else:
            self._session.await_call(self._unit_is_called)

    def _settle(self, leaves: Sequence[Leaf]) -> None:
        step, tracker, self._waits = self._step, self._tracker, False
        assert step is not None
        step.look_at_posture()
        if tracker.entries:
            self._size = tracker.complete(leaves, self._advisor.estimator.completed)
        else:
            self._size = tracker.observe_leaves([*leaves, *self._of_batch])
        self._entries.add(leaves)
        step.decide(self._size)

    def _enter(self, name: str, leaves: Sequence[Leaf]) -> None:
        """The model is called once more in a step that was decided by what it was called with before."""
        step, size, entries = self._step, self._size, self._entries
        if not entries.add(leaves) or step is None or size is None or self._places.next:
            return
        if self._tracker.entries:
            if not self._tracker.holds(entries.together(), size):
                step.shelter_rest()
        elif not entries.follows(name):
            self._places.read_all_calls(
                "the model is called several times in a step, on inputs whose sizes do not follow from the first: "
                "all of them"
            )
            step.shelter_rest()

    def _compare(self, step: Sized, size: BatchSize, unit: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = self._inputs
        if not inputs.started:
            step.look_at_posture()
            self._look_for_penalty(step, args, kwargs)
        if not inputs.differ(size, unit, args, kwargs):
            if inputs.awaits_more:
                self._session.await_call(partial(self._compare, step, size))
            return
        told = f"batches of {self._tracker.named(size)} came to {unit!r} in different shapes"
        if not inputs.started:
            self._places.rise(told, with_batch=True)
            step.shelter()
        elif self._is_cured_of(unit, told):
            step.shelter_rest()
        else:
            inputs.take(unit)
            self._session.await_call(partial(self._compare, step, size))

    def _look_for_penalty(self, step: Sized, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The first unit of a step is called."""
        if self._session.wants_gradient is not None:
            return
        tensor = first_tensor([*args, *kwargs.values()])
        if tensor is not None:
            self._session.wants_gradient = wants_gradient(tensor)
            if self._advisor.penalties.may_come(self._session.wants_gradient):
                step.distrust()

    def _is_cured_of(self, unit: str, told: str) -> bool:
        """A unit that is not the first is given other shapes than before; whether sizes are read elsewhere for it."""
        if self._tracker.level and len(self._entries) > 1:  # it is in a later call of the model
            self._places.read_all_calls(f"{told}: all inputs of the model's calls")
            return True
        return self._places.cures(unit, self._inputs.around(unit), told)


def _few_leaves(batch: Any) -> list[Leaf]:
    leaves = leaves_in(batch)
    return [(f"batch.{path}", shape) for path, shape in leaves] if len(leaves) <= FEW_LEAVES else []
