"""The state of the step that is running: is the engine armed, what is every unit to do, and what came of it?"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from lightning_mimose.actions.compared import TELLS_APART, Verdict
from lightning_mimose.actions.lean.returned import Returned
from lightning_mimose.actions.offload import Offloader
from lightning_mimose.actions.pieces import Pieces
from lightning_mimose.actions.stored import Replaced
from lightning_mimose.actions.trial import CHANGES_INPUT, Trial
from lightning_mimose.measure.collector import StepRecorder
from lightning_mimose.measure.inputs import InputWatch
from lightning_mimose.menu import GRADES, RECOMPUTE, RECOMPUTE_LEAN, SPLITS
from lightning_mimose.predict.comparing import Comparisons
from lightning_mimose.shared.stops import Stops

REPEATING = (RECOMPUTE, RECOMPUTE_LEAN, *SPLITS)
"""Actions that run a unit's forward again."""


NextCall: TypeAlias = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
"""Told of a call of a unit before it runs: unit, arguments by position, and by name."""

MOST_MODES = 16
"""Of which it is remembered what was tried in them."""

BYPASSED = "its parts are called without it"
"""Why a unit is left alone whose own forward is not called."""


@dataclass
class Session:
    """The state of the step that is running, shared by the units of one model.

    Attributes:
        armed: Whether a step is under way; otherwise every unit runs its own forward.
        actions: Unit name -> action, for this step; never written, because steps of one plan share it.
        recorder: Records the units' calls, in the steps that learn.
        next_call: Waits for the next call of a unit.
        passed_by: Whether units were called without gradients.
        wants_gradient: Whether the first unit of this step was given an input that a gradient is to be taken by; None
            where nobody has looked.
        watch: Follows what they are given in the forward of some planned steps.
        inside: Depth of regions whose forward is running; nested units then do as their own forward says.
        strangers: Units that the plan knows nothing of: they are recomputed if they are called all the same.
        met: Those that this step has called.
        ran: Identities of all units' modules that were called since its forward began, whatever they did.
        foreign: Whether units were seen inside somebody else's checkpoint or saved-tensor hooks.
        parts: Unit name -> the units right inside it, which stand in for it where it must not be recomputed.
        refused: Unit name -> why it is never recomputed, over all steps.
        verdicts: Kind of module, and of those right inside -> whether it computes the same in backward.
        replaced: Which containers of activations forwards replace without a look at them, in any of the units.
        trial: The run beside the step that a unit is proven by, while it lasts.
        given: What this step's regions were given: (unit, tensor, version then).
        latest: The unit that was recomputed last.
        proves: Whether units are proven before they are recomputed for the first time.
        lean: Whether lean saves may be planned, so that recomputations are surveyed for them.
        tries: Units for which this step has the memory to try recipes beside it.
        untried: Units whose recipes were not tried yet: none of them is kept lean before.
        unproven: Units that were not proven yet, as all are where a run goes on from a checkpoint; none after a
            sheltered step.
        comparisons: Which recipes were compared so far.
        compared: Whether a recipe was tried within this step, for want of memory beside an earlier one.
        surprised: Whether a recipe was found to give other bits: what was surveyed before took it for right.
        different: Unit -> the operations whose results it was.
        offloader: Moves what units save to host memory, if that may be planned.
        splits: Whether splitting may be planned, so that units are tried for it.
        unsplit: Units for which that was not tried yet, or not with arguments such as they have now.
        split_tries: Units for which this step has the memory to try it.
        divisible: Units that can be split.
        indivisible: Unit -> why it cannot be.
        stops: Where this step may have to wait for other jobs, if it may.
        hands_on: Unit whose result the next one saves -> up to which grade of lean saves that one rebuilds it; beyond
            it keeps it, so that the unit itself need not rebuild it.
        takers: Those next ones, by that unit.
        places: Which of the storages that the unit returns it is, from 0.
        taking: All of them.
        returned: What they may rebuild.
        read: (unit, whether it was lean) that was seen to save what it was given as it was returned, bit for bit.
        spoiled: Units whose results were changed before they were saved, or that others held for longer than was seen.
        learning_steps: Steps, this one included, that learn what is written: a unit began to write something else.
        news: Whether units were tried or left out since plans were last told of it.
        own_nodes: How many of autograd's nodes were made that the model has not made, in this step's forward, or since
            its latest backward.
    """

    armed: bool = False
    actions: dict[str, str] = field(default_factory=dict)
    recorder: StepRecorder | None = None
    next_call: NextCall | None = None
    passed_by: bool = False
    wants_gradient: bool | None = None
    watch: InputWatch | None = None
    inside: int = 0
    strangers: frozenset[str] = frozenset()
    met: list[str] = field(default_factory=list)
    ran: set[int] = field(default_factory=set)
    foreign: bool = False
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    verdicts: dict[tuple[type, ...], Verdict] = field(default_factory=dict)
    replaced: Replaced = field(default_factory=Replaced)
    trial: Trial | None = None
    given: list[tuple[str, weakref.ref[torch.Tensor], int]] = field(default_factory=list)
    latest: str | None = None
    proves: bool = True
    lean: bool = False
    tries: set[str] = field(default_factory=set)
    untried: set[str] = field(default_factory=set)
    unproven: set[str] = field(default_factory=set)
    _units: dict[str, bool] = field(default_factory=dict)
    _marks: dict[int, int] = field(default_factory=dict)
    """Identity of a unit's module -> a number that goes by the unit's name; sums of them stand for sets."""
    comparisons: Comparisons = field(default_factory=Comparisons)
    compared: bool = False
    surprised: bool = False
    different: dict[str, tuple[str, ...]] = field(default_factory=dict)
    offloader: Offloader | None = None
    splits: bool = False
    unsplit: set[str] = field(default_factory=set)
    split_tries: set[str] = field(default_factory=set)
    divisible: set[str] = field(default_factory=set)
    indivisible: dict[str, str] = field(default_factory=dict)
    stops: Stops | None = None
    hands_on: Mapping[str, int] = field(default_factory=dict)
    takers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)
    taking: frozenset[str] = frozenset()
    returned: Returned = field(default_factory=Returned)
    read: set[tuple[str, bool]] = field(default_factory=set)
    spoiled: set[str] = field(default_factory=set)
    learning_steps: int = 0
    news: bool = False
    own_nodes: int = 0
    _pieces: Pieces = field(default_factory=Pieces)
    _armed_besides: bool = False
    _modes: Hashable = None
    _tried: dict[Hashable, tuple[set[str], set[str]]] = field(default_factory=dict)
    """Modes before the present ones -> what was not proven, and not tried, in them."""

    def enter(self, unit: str, *, lean: bool) -> None:
        """A unit is patched, of which nothing was tried yet; `lean` says whether it may be kept lean."""
        self._units[unit] = lean
        self.unproven.add(unit)
        self.untried |= {unit} if lean else set()
        self.news = True

    def mark(self, unit: str, module: int) -> None:
        """A unit's module is patched, and will say by its identity that it was called."""
        self._marks[module] = zlib.crc32(unit.encode())

    def try_anew(self) -> None:
        """Forwards do something else now: what was tried before says nothing of them."""
        self.unproven |= self._units.keys()
        self.untried |= {unit for unit, lean in self._units.items() if lean}
        self.news = True

    def take_modes(self, modes: Hashable) -> bool:
        """Modules are set like that: what was tried when they were set otherwise says nothing, but what was then does.

        Args:
            modes: How they are set.

        Returns:
            Whether they were set otherwise before.
        """
        before, self._modes = self._modes, modes
        if before is None or before == modes:
            return False
        if len(self._tried) > MOST_MODES:
            self._tried.clear()
        self._tried[before] = self.unproven, self.untried
        self.unproven, self.untried = set(), set()
        if modes in self._tried:
            self.unproven, self.untried = self._tried.pop(modes)
            self.news = True
        else:
            self.try_anew()
        return True

    def arm(
        self,
        actions: dict[str, str],
        recorder: StepRecorder | None,
        strangers: frozenset[str] = frozenset(),
    ) -> None:
        """Put a plan in force until `disarm`; a step that keeps everything and records nothing needs no arming."""
        self.recorder, self.inside, self.trial, self.latest = recorder, 0, None, None
        self.compared, self.watch, self.strangers, self.met, self.next_call = False, None, strangers, [], None
        self.passed_by, self.own_nodes = False, 0
        self._pieces.end()
        self.given.clear()
        self.returned.clear()
        self.actions = self.standing(actions)
        if self.offloader is not None:
            self.offloader.begin()
        self.armed = bool(self.actions or strangers) or recorder is not None

    def path(self) -> int:
        """Stands for the set of units that were called, also in another process."""
        # Another set would take memory, and who asks for some first after a backward waits until malloc has tidied up.
        return sum([self._marks[each] for each in self.ran])

    def record(self, recorder: StepRecorder) -> None:
        """Record the units' calls from now on."""
        self.recorder, self.armed = recorder, True

    def follow_inputs(self, watch: InputWatch) -> None:
        """Follow what the units are given, until the forward is over."""
        self.watch, self.armed = watch, True

    def disarm(self, *, ran: bool = True) -> None:
        """Let every unit run its own forward again.

        Args:
            ran: Whether the step ran, and did not only ask whether it may.
        """
        self.armed, self.recorder, self.inside, self.trial, self.stops = False, None, 0, None, None
        self.watch = self.next_call = self.wants_gradient = None
        if ran and self.learning_steps:
            self.learning_steps -= 1
        self.given.clear()
        self.returned.clear()

    def act_from_now(self, actions: dict[str, str]) -> None:
        """Let the units that are still to run do something else."""
        self.await_none()
        self.actions, self.armed = self.standing(actions), True

    def await_call(self, next_call: NextCall) -> None:
        """Be told of the next call of a unit with gradients, once, before it runs; units report until then."""
        if self.next_call is None:
            self._armed_besides = self.armed
        self.next_call, self.armed = next_call, True

    def await_none(self) -> None:
        """That call is of no interest any more."""
        if self.next_call is not None:
            self.next_call = None
            self.armed = self._armed_besides or self.recorder is not None or self.watch is not None

    def called(self, unit: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A unit is called: tell who waits for it."""
        next_call = self.next_call
        self.await_none()
        if next_call is not None:
            next_call(unit, args, kwargs)

    def hand_on(
        self, units: Mapping[str, int], takers: Mapping[str, frozenset[str]], places: Mapping[str, int]
    ) -> None:
        """Say what becomes of lean units' results from now on: see `hands_on`, `takers` and `places`."""
        if takers is not self.takers:
            self.taking = frozenset().union(*takers.values())
        self.hands_on, self.takers, self.places = units, takers, places

    def end_forward(self) -> None:
        """Let go of results; those that are still there although they are handed on are held by somebody else."""
        outliving = self.returned.units() if self.returned else set()
        self.surprised |= not outliving <= self.spoiled
        self.spoiled |= outliving
        self.returned.clear()

    def is_lean(self, unit: str) -> bool:
        """Whether a unit is kept lean in this step."""
        return self.actions.get(unit) in GRADES

    def unread(self, unit: str) -> bool:
        """Whether somebody who is given a unit's result has not yet been seen to save it as it was returned."""
        return any((taker, self.is_lean(taker)) not in self.read for taker in self.takers.get(unit, ()))

    def meet(self, name: str) -> str | None:
        """A unit is called that the plan knows nothing of; returns what it is to do."""
        if name in self.refused:  # by an earlier call of this step
            return None
        self.met.append(name)
        self.actions = {**self.actions, name: RECOMPUTE}
        return RECOMPUTE

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around what runs beside the step: it is no part of what is recorded, nor of the step's operations."""
        with self.counting_own(), nullcontext() if self.recorder is None else self.recorder.aside():
            yield

    @contextmanager
    def counting_own(self) -> Iterator[None]:
        """Around operations with gradients that are not the model's."""
        before = torch._C._autograd._get_sequence_nr()
        try:
            yield
        finally:
            self.own_nodes += torch._C._autograd._get_sequence_nr() - before

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Never recompute some units; the parts of those that were to be recomputed in this step take their place."""
        for name, reason in reasons.items():
            if reason != TELLS_APART:  # such a unit can be repeated with what it was given
                self.refused.setdefault(name, reason)
        self.actions = self.standing(self.actions)

    def cut_short(self) -> None:
        """The step ended in its midst, or runs again."""
        self._pieces.cut_short()

    def passes_by(self, name: str) -> None:
        """A unit is called without gradients (a teacher, a target): a moment of the step, in one that is recorded."""
        self.passed_by, recorder = True, self.recorder
        if recorder is None or self.inside or self.trial is not None or recorder.replays.running:
            return
        if name in self.actions:
            self._pieces.begin(name)
        elif not self._pieces.is_one(name):
            return
        recorder.mark("step", f"{name} without gradients")

    def bypass(self, name: str) -> bool:
        """A unit is called outside of those that act: none around it is to be recomputed then, but its parts are.

        Args:
            name: The unit.

        Returns:
            Whether there was one: its own forward is not called (`backbone.forward_features(x)`, `tower.encode(x)`).
        """
        around = name
        while "." in around:
            around = around.rpartition(".")[0]
            if self.actions.get(around) in REPEATING:
                if self.recorder is not None and self.recorder.has_called(around):
                    return False  # it is called as well
                self.refuse({around: BYPASSED})
                return True
        return False

    def standing(self, actions: dict[str, str]) -> dict[str, str]:
        """Actions without refused units, whose parts stand in for them; the same dictionary if none is among them."""
        if self.refused.keys().isdisjoint(actions):
            return actions
        found: dict[str, str] = {}
        waiting = list(reversed(list(actions.items())))
        while waiting:
            name, action = waiting.pop()
            changed = self.refused.get(name) == CHANGES_INPUT and action in GRADES
            if changed:
                continue  # its recipes may need that input again
            if name in self.refused and action in REPEATING:
                waiting.extend((part, action) for part in reversed(self.parts.get(name, ())))
            else:
                found[name] = action
        return found

    def changed_inputs(self) -> dict[str, str]:
        """Units whose input was changed after their forward, and so cannot be given to them again."""
        changed = {}
        for name, ref, version in self.given:
            tensor = ref()
            if tensor is not None and tensor._version != version:
                changed[name] = CHANGES_INPUT
        return changed
