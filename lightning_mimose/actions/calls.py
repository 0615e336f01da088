"""What happens when a patched unit is called: it does what the session says."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from threading import get_ident
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_mimose.actions.compared import GOES_BY_OTHERS, Compared, Verdict
from lightning_mimose.actions.foreign import out_of_reach
from lightning_mimose.actions.lean.handles import is_plain, unpack
from lightning_mimose.actions.lean.region import LeanRegion
from lightning_mimose.actions.lean.returned import make_in_backward
from lightning_mimose.actions.lean.saves import LeanSaves
from lightning_mimose.actions.lean.sites import Sites
from lightning_mimose.actions.lean.survey import LeanSurvey
from lightning_mimose.actions.offload import Offloader
from lightning_mimose.actions.patch import patch
from lightning_mimose.actions.recompute import RegionObserver, flattened, recompute
from lightning_mimose.actions.session import REPEATING, Session
from lightning_mimose.actions.setting import Setting
from lightning_mimose.actions.split import CannotSplitError, run_split
from lightning_mimose.actions.state import WrittenState
from lightning_mimose.actions.stored import Place, left_in
from lightning_mimose.actions.trying import Findings
from lightning_mimose.errors import RecomputeError
from lightning_mimose.measure.region import Region
from lightning_mimose.menu import CHUNKS, GRADES, INSIDE, OFFLOAD, RECOMPUTE_LEAN, SPLITS
from lightning_mimose.parts import leaves_in, storages_in
from lightning_mimose.units import Unit, is_compiled

RAISED = "its forward ends in an error that is caught outside"


def patch_unit(unit: Unit, session: Session) -> None:
    """Make a unit do what the session says whenever its forward is called."""
    session.mark(unit.name, id(unit.module))
    patch(unit.module, partial(_Calls, unit, session), session, session.ran)


class _Calls:
    """What happens when a patched unit is called; holds no module.

    Args:
        unit: The unit.
        session: What it is to do.
        original: Its own forward.
    """

    def __init__(self, unit: Unit, session: Session, original: Callable[..., Any]) -> None:
        self._name, self._session, self._original = unit.name, session, original
        self._state = WrittenState(unit.module, session.replaced)
        self._state.settings.unit = unit.name
        # A container says nothing by itself.
        kind = tuple(type(module) for module in (unit.module, *unit.module.children()))
        self._verdict = session.verdicts.setdefault(kind, Verdict())
        self._usual: object = None
        self._compiled = any(is_compiled(module) for module in unit.module.modules())
        self._sites, self._taken = Sites(), Sites()
        self._findings = Findings(unit.name, session, original, self._state, self._sites, self._compiled)
        if session.splits:
            session.unsplit.add(unit.name)
        session.enter(unit.name, lean=self._may_be_lean())

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stops = self._session.stops
        return self._act(args, kwargs) if stops is None else stops.call(self._name, self._act, args, kwargs)

    def _act(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, session, original = self._name, self._session, self._original
        if session.next_call is not None and torch.is_grad_enabled():
            session.called(name, args, kwargs)
        # Gated on gradients, never on `.training`: a frozen or eval block whose input needs gradients
        # saves as much as any.
        if not session.armed:
            return original(*args, **kwargs)
        if not torch.is_grad_enabled():
            session.passes_by(name)
            return original(*args, **kwargs)
        if session.trial is not None:
            session.unproven.discard(name)
            return session.trial.nested(name, self._state, original, args, kwargs)
        if session.watch is not None:
            session.watch.enters(name, args, kwargs)
        action = session.actions.get(name)
        if action is None and name in session.strangers and not session.inside and not out_of_reach(name, session):
            action = session.meet(name)
        if session.returned and name in session.taking and self._may_take(action, args, kwargs):
            return self._taking(action, args, kwargs)
        return self._in_reach(action, args, kwargs)

    def _in_reach(self, action: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, session, original, recorder = self._name, self._session, self._original, self._session.recorder
        if action is None and recorder is None and session.offloader is None and name not in session.tries:
            return original(*args, **kwargs)  # kept and watched by nobody, as most calls of a planned step are
        if session.inside or (recorder is not None and recorder.replays.running):
            return self._kept(args, kwargs)
        if out_of_reach(name, session):
            return original(*args, **kwargs)
        if action is None and recorder is not None and session.bypass(name):
            action = session.actions.get(name)
        out = self._planned(action, args, kwargs)
        if session.offloader is not None:
            session.offloader.ran(out)
        return out

    def _may_take(self, action: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it is given what another unit has returned, and saves it by no hook of its own, as lean units do."""
        session = self._session
        again = session.recorder is not None and session.recorder.replays.running
        if action in GRADES or session.inside or again:
            return False
        tensors = (leaf for leaf in leaves_in((args, kwargs)) if isinstance(leaf, torch.Tensor) and is_plain(leaf))
        if not any(session.returned.of(tensor.untyped_storage()) for tensor in tensors):
            return False
        return not out_of_reach(self._name, session)

    def _taking(self, action: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        saves = LeanSaves(self._taken, 0, returned=self._session.returned)
        try:
            with saved_tensors_hooks(saves.pack, unpack):
                out = self._in_reach(action, args, kwargs)
            make_in_backward(saves.taken, out)
            return out
        finally:
            saves.close()
            self._findings.learn_from(saves)

    def _planned(self, action: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._name in self._session.tries and action not in REPEATING:
            self._findings.try_recipes(args, kwargs, self._state.blank())
        if action in GRADES:
            return self._lean(GRADES.index(action) + 1, args, kwargs)
        if action == OFFLOAD and self._session.offloader is not None:
            return self._offloaded(self._session.offloader, args, kwargs)
        if action in REPEATING:
            flat = flattened(args, kwargs)
            settings = self._state.settings
            self._usual = settings.usual()
            if self._verdict.goes_by_others:
                self._session.refuse({self._name: GOES_BY_OTHERS})
            if self._findings.can_be_repeated(flat[0], args, kwargs):
                setting = settings.note()
                unsettled = settings.unsettled(setting)
                if unsettled and self._findings.carries(unsettled, args, kwargs):
                    return self._kept(args, kwargs)
                if action in SPLITS:
                    return self._split(CHUNKS[SPLITS.index(action)], flat, args, kwargs)
                setting = settings.note() if unsettled else setting
                return self._recomputed(flat, args, kwargs, setting, lean=action == RECOMPUTE_LEAN)
        return self._kept(args, kwargs)

    def _kept(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self._session.recorder
        if recorder is None:
            return self._original(*args, **kwargs)
        state = self._state
        return recorder.run_kept(
            self._name,
            self._original,
            args,
            kwargs,
            state.copied_bytes,
            lambda: left_in(state.modules()),
            state.stashed_bytes,
        )

    def _split(self, chunks: int, flat: tuple[list[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        # Arguments may have another form than those that were tried (a mask, where there was none), or the unit
        # another mode: to run it both ways now takes less memory than to recompute it as a whole.
        seam = self._findings.try_splitting(args, kwargs)
        if seam is not None:
            self._note_given(flat[0])
            session.inside += 1
            try:
                return run_split(self._original, args, kwargs, seam, chunks, self._state)
            except CannotSplitError as error:
                self._findings.refuse_split(args, kwargs, str(error))
            finally:
                session.inside -= 1
        session.compared = True  # more than was planned: nothing is to be learnt from this step
        return self._recomputed(flat, args, kwargs)

    def _note_given(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and not leaf.is_inference():
                self._session.given.append((self._name, weakref.ref(leaf), leaf._version))

    def _may_be_lean(self) -> bool:
        """Compiled code would be compiled again for what looks at its operations."""
        return self._session.lean and not self._compiled

    def _offloaded(self, offloader: Offloader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        held = (*leaves_in((args, kwargs)), *self._state.buffers(), *self._state.parameters())
        session.inside += 1
        try:
            with offloader.around(held):
                return self._original(*args, **kwargs)
        finally:
            session.inside -= 1

    def _lean(self, grade: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        saves = LeanSaves(
            self._sites,
            grade,
            leaves=self._state.parameters(),
            held=self._state.buffers(),
            given=leaves_in((args, kwargs)),
            returned=session.returned,
        )
        session.inside += 1
        try:
            with saves.closing():
                with saves.watching():
                    out = self._original(*args, **kwargs)
                if self._name in session.hands_on:
                    self._return(saves, out, session.hands_on[self._name] >= grade)
            make_in_backward(saves.taken, out)
            self._findings.learn_from(saves)
            self._note_given(saves.borrowed)
            return out
        finally:
            session.inside -= 1

    def _return(self, saves: LeanSaves, out: Any, hands_on: bool) -> None:
        """Say what its result is rebuilt by, or that it need not be."""
        session = self._session
        taken = next(islice(storages_in(out), session.places[self._name], None), None)
        if taken is None:
            return
        if not hands_on:
            saves.keep_results(out, taken)
            return
        for base, recipe in saves.results(out, taken):
            recipe.is_handed_on = True
            session.returned.add(base, recipe, self._name, read=session.unread(self._name))

    def _recomputed(
        self,
        flat: tuple[list[Any], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        setting: Setting | None = None,
        lean: bool = False,
    ) -> Any:
        name, session, original, state = self._name, self._session, self._original, self._state
        recorder, leaves = session.recorder, flat[0]
        region: Region | None = None
        observer: RegionObserver | None = None
        originals: dict[int, weakref.ref[torch.Tensor]] = {}
        if recorder is not None:
            if not self._verdict.tells_apart:
                with session.counting_own():
                    leaves[:], originals = recorder.inputs.of(leaves)
            survey: LeanSurvey | None = None
            if self._may_be_lean():
                survey = LeanSurvey(
                    self._sites, state.buffers(), leaves, state.parameters(), partial(session.comparisons.missing, name)
                )
            lent = [] if setting is None else setting.lent()
            observer = region = recorder.region(name, args, kwargs, survey, lent, state.stashed_bytes())
        elif lean and name not in session.untried and self._may_be_lean():
            observer = LeanRegion(self._sites, INSIDE, state.parameters, state.buffers(), self._findings.learn_from)
        if recorder is not None:
            original = Compared(name, original, originals.values(), self._verdict)
        self._note_given(leaves)
        out: Any = None
        left: dict[Place, list[torch.Tensor]] = {}
        ran, returned, began, thread = False, False, torch._C._autograd._get_sequence_nr(), get_ident()

        def tracked(*inner_args: Any, **inner_kwargs: Any) -> Any:
            nonlocal ran, returned
            if not ran:  # torch before 2.13 makes one to hold what the region is given
                session.own_nodes += torch._C._autograd._get_sequence_nr() - began
                ran = True
                with nullcontext() if recorder is None or self._compiled else state.watched():
                    found = original(*inner_args, **inner_kwargs)
                returned = True
                return found
            if not returned:
                raise RecomputeError({name: RAISED})
            session.latest = name
            # A backward in the midst of the forward: what is counted there is counted in its thread.
            with session.counting_own() if get_ident() == thread else nullcontext():
                return original(*inner_args, **inner_kwargs)

        session.inside += 1
        try:
            out = recompute(tracked, args, kwargs, state, observer, flat, setting, originals)
            left = left_in(state.modules()) if region is not None else {}
            if state.wrote_late:
                session.learning_steps = 2  # the present attempt has begun without knowing
        finally:
            session.inside -= 1
            if region is not None:
                region.close(out, left)
        return out
