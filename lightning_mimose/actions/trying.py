"""What is found out about a unit by trial, beside the step that calls it.

Whether it can be repeated, whether it goes on from what an earlier call left, whether it can be split, and which
recipes give the same bits. All of it is told to the session. A trial takes memory that was not planned for, so the
step says that something was compared within it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_mimose.actions.lean.saves import RETURNED, LeanSaves
from lightning_mimose.actions.lean.sites import Sites
from lightning_mimose.actions.proof import find_carried, prove
from lightning_mimose.actions.recompute import given_twice, unrepeatable_argument
from lightning_mimose.actions.session import Session
from lightning_mimose.actions.split import Divisible, Seam
from lightning_mimose.actions.state import WrittenState
from lightning_mimose.actions.trial import Candidate, Trial
from lightning_mimose.menu import GRADES


class Findings:
    """Finds things out about one unit, and tells the session; holds no module.

    Args:
        name: The unit's name.
        session: Says what is to be tried, and is told what was found.
        original: The unit's own forward.
        state: What it is known to write.
        sites: What is known about its places.
        compiled: Whether something in it is compiled: operators are not watched then, see `prove`.
    """

    def __init__(
        self,
        name: str,
        session: Session,
        original: Callable[..., Any],
        state: WrittenState,
        sites: Sites,
        compiled: bool,
    ) -> None:
        self._name, self._session, self._original = name, session, original
        self._state, self._sites, self._compiled = state, sites, compiled
        self._divisible = Divisible(state)

    def can_be_repeated(self, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call can be repeated; found out by trial where its state was never seen in the present mode.

        What else is to be tried in this step is tried then.

        Args:
            leaves: Those of the arguments.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        name, session = self._name, self._session
        unrepeatable = unrepeatable_argument(leaves) or given_twice(args, kwargs)
        if self._generator_is_out_of_sight(leaves):
            session.refuse(
                {name: "it is given no tensor on its device, so that device's generator would not be put back"}
            )
        elif unrepeatable:
            session.refuse({name: f"it is given a {unrepeatable}"})
        elif session.proves and not self._state.known():
            session.compared = True  # a planned step holds more than was planned
            with session.aside():
                session.refuse(prove(self._candidate(args, kwargs), watch=not self._compiled))
        session.unproven.discard(name)
        if name in session.refused:
            return False
        if name in session.tries:
            self.try_recipes(args, kwargs)
        if name in session.split_tries:
            self.try_splitting(args, kwargs)
        return True

    def carries(
        self, unsettled: Mapping[nn.Module, Sequence[str]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether it goes on from activations of an earlier call, found out by trial where it holds some.

        Args:
            unsettled: Those of which nobody knows, names by module.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        session = self._session
        session.compared = True
        with session.aside():
            found = find_carried(self._candidate(args, kwargs), unsettled, watch=not self._compiled)
        session.refuse(found)
        return bool(found)

    def try_splitting(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seam | None:
        """Find out beside the step whether the unit can be split.

        Args:
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            How to split a call with these arguments; None if it cannot be.
        """
        session = self._session
        session.news |= self._name in session.unsplit
        session.split_tries.discard(self._name)
        session.unsplit.discard(self._name)  # once: what is out of memory now would be again
        found = self._divisible.known(args, kwargs)
        if found is None:
            session.compared = True
            with session.aside():
                session.armed = False  # nested units are nobody's business here
                try:
                    found = self._divisible.learn(self._original, args, kwargs)
                finally:
                    session.armed = True
        if isinstance(found, Seam):
            session.news |= self._name not in session.divisible
            session.divisible.add(self._name)
            session.indivisible.pop(self._name, None)
            return found
        if found is None:  # a batch of one
            session.news = True
            session.unsplit.add(self._name)
        else:
            self._tell_indivisible(found)
        return None

    def refuse_split(self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> None:
        """Never split a call with such arguments: it turned out that the parts do not fit together.

        Args:
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            reason: Why, in words.
        """
        self._divisible.refuse(args, kwargs, reason)
        self._tell_indivisible(reason)

    def _tell_indivisible(self, reason: str) -> None:
        self._session.news = True
        self._session.divisible.discard(self._name)
        self._session.indivisible[self._name] = reason

    def try_recipes(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: WrittenState | None = None) -> None:
        """Compare every recipe with its tensor, beside the step.

        Args:
            args: The unit's positional arguments.
            kwargs: Its keyword arguments.
            state: What it is taken to write; None for what is known of it.
        """
        session = self._session
        session.tries.discard(self._name)
        session.compared = session.news = True
        with session.aside():
            self._compare_recipes(self._candidate(args, kwargs, state))

    def _compare_recipes(self, candidate: Candidate) -> None:
        """Run a trial that compares them; when this returns, nothing is left of it."""
        lean = LeanSaves(self._sites, len(GRADES), settles=False)
        failure = candidate.run(Trial(), lean=lean)
        if not failure:
            self._session.untried.discard(self._name)
        self.learn_from(lean)

    def learn_from(self, saves: LeanSaves) -> None:
        """Take over what comparisons have shown."""
        session, different = self._session, self._sites.different
        session.surprised |= not saves.spoiled <= session.spoiled
        session.spoiled |= saves.spoiled
        session.compared |= saves.verdicts.compared
        session.comparisons.made(self._name, *saves.compared_in)
        if saves.took:
            session.read.add((self._name, session.is_lean(self._name)))
        if saves.verdicts.differed:
            session.surprised = True
            names = {place.made_by or "a mask" for place in different if place.made_by != RETURNED}
            if names:
                session.different[self._name] = tuple(sorted(name.removesuffix("Backward0") for name in names))

    def _candidate(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: WrittenState | None = None) -> Candidate:
        return Candidate(self._name, self._original, args, kwargs, state or self._state, self._enter)

    def _enter(self, trial: Trial | None) -> None:
        self._session.trial = trial

    def _generator_is_out_of_sight(self, leaves: Sequence[Any]) -> bool:
        """Whether a checkpoint would not see whose generator to put back: it looks at the devices of its arguments."""
        device = self._state.device()
        if device.type == "cpu":
            return False
        return not any(isinstance(leaf, torch.Tensor) and leaf.device == device for leaf in leaves)
