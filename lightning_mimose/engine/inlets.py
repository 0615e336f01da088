"""Where a step's size is read: in its batch, or where the model is given what the step has made of it.

Many steps make their inputs themselves: they tokenise texts, resize and pad images, draw a resolution, cut off what
is padding. The batch then tells nothing, or too little; what memory depends on is known when the model is called.
Sizes are read in the batch (level 0) until one of these is seen:

- There is no tensor with dimensions in the first batch. (In a later one that is an error.)
- Batches of one size came to the first unit, or to the first one right inside a module around units, in tensors of
  different shapes (`inputs`). Such a step recomputes all it may from there on, and from the next one on sizes are read
  one level further inside; where that does not help a unit that is not the first, they are read where they were again.
  What a batch of few tensors tells itself stays part of the size: what the step has drawn is not all that decides (the
  tokens that were masked out come back in a decoder, a loss is taken at the resolution of the labels).
- After many steps that learnt, batches vary in far too many dimensions (a list of images, each of its own size), and
  the model is called with something else than these hold.
- Steps go by the shape of what comes to the first unit, and by what batches show they are described badly (two texts
  that are padded to the longer one).

Level n is the nth call, from outside, of a module that holds units: level 1 is mostly the whole model's. Calls with
lists of tensors do not count, for these are mostly made into one tensor further inside. The first unit's own call is
the last level.

A step may call the model several times before its backward, on inputs of sizes that do not follow from the first
(`entries`): then they are part of the size, and where a step is planned what is still to come is taken to be as large
as it ever was. Calls without gradients count nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
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
from lightning_mimose.errors import SizeError
from lightning_mimose.predict.estimator import Estimator
from lightning_mimose.sizes import BatchSize, Place
from lightning_mimose.units import Unit

MOST_RISES = 2
"""How often sizes are read further inside for a unit that is not the step's first."""
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
        self._inputs = Inputs(units, self._tracker.ignored)
        self._risen: tuple[Place, str] | None = None
        """Where sizes were read before, for a unit that is not the first, they were read further inside, and what is
        around that."""
        self._rises = 0
        self._left: tuple[dict[str, Any], Estimator, int] | None = None
        """What was known of sizes where they were read before that, and of their steps, and when it was left."""
        self._next: Place | None = None
        """Where sizes are read from the next step on."""
        self._step: Sized | None = None
        self._vain: str | None = None
        """Why sizes are to be read further inside if the model is called with something else than the batch holds."""
        self._held: frozenset[tuple[int, ...]] | None = None
        """What the batch of the step holds in which that is looked at; nothing once it was."""
        self._looked_at = 0
        """Of how many sizes it was seen whether what the model is given tells more."""
        self._waits = self._at_unit = self._called = self._blind = False
        self._passed = 0
        self._size: BatchSize | None = None
        self._of_batch: list[Leaf] = []
        self._entries = Entries()
        self.outside = False

    # --- between steps ----------------------------------------------------------------------------------------

    def size_of(self, batch: Any) -> BatchSize | None:
        """The size of a batch; None where it will be read later in its step.

        Raises:
            SizeError: It cannot be read, now or later.
        """
        if self._next is not None:
            self._read_at(self._next)
        if self._fixed and self._tracker.level:  # learnt by a run that could read them elsewhere
            self._read_at(Place(0))
        if self._tracker.level:
            self._tracker.labels.observe(batch)
        else:
            try:
                size = self._tracker.observe(batch)
                self._watch_calls(batch)
                return size
            except SizeError:
                if self._fixed or self._tracker.names or leaves_in(batch):
                    raise
            self._read_at(Place(1))
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
        if self._vain is not None and self._held is None:
            self._held, self.outside = frozenset(map(_shape, leaves_in(batch))), True
            self._gates.attach(self)
        elif self._held is not None and self._next is None:
            self._gates.detach()
            if self._held:  # no call has shown any: lists count further inside
                self._held = frozenset()
                self.rise(self._vain or "", with_batch=False)

    def doubt(self, why: str) -> None:
        """Sizes tell hardly anything: read them further inside, unless the model is called with just what batches hold.

        Args:
            why: For the log.
        """
        if self._tracker.level:
            self.rise(why, with_batch=False)
        elif not self._fixed:
            self._vain = self._vain or why

    def look(self, size: BatchSize) -> None:
        """A step was learnt from: see whether what came to its first unit tells more of it than its batch."""
        estimator = self._advisor.estimator
        if self._fixed or len(estimator) == self._looked_at:  # no size is new
            return
        self._looked_at = len(estimator)
        told_better = estimator.is_told_better_by(self._inputs.given, size.dims)
        if told_better and self.rise("what the model is given tells more of steps than their batches do"):
            self._risen = None  # sizes are not read again where they were before that

    def rise(self, why: str, *, with_batch: bool | None = None) -> bool:
        """Read sizes further inside from the next step on; returns whether that is possible.

        Args:
            why: For the log.
            with_batch: Whether what the batch tells itself is part of them; None for as it was.
        """
        if self._fixed or self._next or (self._tracker.level and self._at_unit):
            return False
        here = self._tracker.place
        self._next = Place(here.level + 1, with_batch=here.with_batch if with_batch is None else with_batch)
        self._advisor.announce(f"mimose: {why}: sizes are read further inside the model from now on")
        return True

    def _read_at(self, place: Place) -> None:
        tracker, advisor, left = self._tracker, self._advisor, self._left
        before = tracker.state_dict(), advisor.estimator
        self._next = self._left = None
        self._inputs.forget()
        self._entries.forget()
        if left is not None and (*place, advisor.forgotten) == (*(left[0][name] for name in Place._fields), left[2]):
            tracker.load_state_dict({**left[0], "ignored": tracker.ignored.copy()})
            advisor.forget(left[1])
            return
        tracker.restart(*place)
        advisor.forget()
        if self._risen is not None and place.level == self._risen[0].level + 1:
            self._left = *before, advisor.forgotten

    def detach(self) -> None:
        """Leave the model as it was."""
        self.close()
        self._gates.detach()

    # --- in a step --------------------------------------------------------------------------------------------

    def wait(self, step: Sized) -> None:
        """A step begins without a size, which it is told before the first unit that is given a tensor runs."""
        self._step, self._waits, self.outside = step, True, True
        self._passed, self._called, self._at_unit, self._size = 0, False, False, None
        self._entries.begin()
        self._session.await_call(self._unit_is_called)

    def watch(self, step: Sized, size: BatchSize, *, learns: bool) -> None:
        """A step has a size: see that units are given what they were given at such sizes before.

        Not where it has several entries: then it is a guess of what the later ones are.
        """
        last = self._tracker.level and self._at_unit
        if not (self._fixed or self._next or self._tracker.entries or last):
            self._inputs.begin(learns=learns)
            self._session.await_call(partial(self._compare, step, size))
        elif self._step is None:  # else that was looked at when it was decided about
            self._session.await_call(lambda *_: step.look_at_posture())

    def end_forward(self) -> None:
        """The forward is over; where nothing has shown the size yet, another one may follow."""
        step = self._step
        if self._waits:
            return
        if step is not None and self._tracker.entries and self._next is None:
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
            held, self._held = self._held or frozenset(), frozenset()
            if self._vain is not None and not frozenset(map(_shape, leaves)) <= held:
                self.rise(self._vain, with_batch=False)
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
        if not self._tracker.place.with_batch or self._tracker.names or self._risen is not None:
            return False
        return set(map(_shape, leaves)) <= set(map(_shape, self._of_batch))

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
            self._at_unit, self.outside = True, False
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
        if not entries.add(leaves) or step is None or size is None or self._next:
            return
        if self._tracker.entries:
            if not self._tracker.holds(entries.together(), size):
                step.shelter_rest()
        elif not entries.follows(name):
            self._next = Place(self._tracker.level, entries=True)
            self._advisor.announce(
                "mimose: the model is called several times in a step, on inputs whose sizes do not follow from the "
                "first: all of them are read from now on"
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
            self.rise(told, with_batch=True)
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
        """A unit that is not the first is given other shapes than before; whether sizes will be read elsewhere for it.

        What it is given may follow from what is in a batch (tokens that are routed, a detector's proposals), and from
        no size at all: then to read them further inside does not help.
        """
        tracker, around = self._tracker, self._inputs.around(unit)
        if tracker.level and len(self._entries) > 1:  # it is in a later call of the model
            self._next = Place(tracker.level, entries=True)
            self._advisor.announce(f"mimose: {told}: all inputs of the model's calls are read from now on")
            return True
        here = tracker.place
        if self._risen is None and self._rises < MOST_RISES and self.rise(told, with_batch=True):
            self._risen = here, around
            self._rises += 1
            return True
        tracker.ignored.add(around)
        if self._risen is not None and self._risen[1] == around:
            self._next, self._risen = self._risen[0], None
            self._advisor.announce(f"mimose: {told} all the same: sizes are read where they were")
            return True
        return False


_shape = itemgetter(1)


def _few_leaves(batch: Any) -> list[Leaf]:
    leaves = leaves_in(batch)
    return [(f"batch.{path}", shape) for path, shape in leaves] if len(leaves) <= FEW_LEAVES else []
