"""Fates: which inputs of units die before backward, where no unit has to hold them; told by planned steps.

A mask is given to every block of an encoder, and saved by none of them. In a sheltered step the blocks hold it until
they have been recomputed: if it is still there after that, somebody else holds it; if not, nobody can tell how long it
would live without them, to the encoder's end or to backward. Planned steps can tell, where the blocks are kept: the
first ones, and those that are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, TypeAlias

from lightning_mimose.menu import KEEP
from lightning_mimose.predict.structure import Structure

Holders: TypeAlias = frozenset[str]
"""Keys of all calls that are given a storage."""


class Fates:
    """What became of inputs that nothing saves; until that is known, they are taken to live until backward.

    Example:
        >>> fates, mask, bias = Fates(), frozenset({"encoder.0", "encoder.1"}), frozenset({"decoder.0"})
        >>> fates.learn({mask: {"encoder.1"}, bias: None}, [mask, bias], {})
        True
        >>> fates.ends(mask), fates.ends(bias), fates.ends(frozenset({"head"}))
        (frozenset({'encoder.1'}), None, None)
    """

    def __init__(self) -> None:
        self.prompt: bool | None = None
        """Whether what dies before the next call begins, or before backward, is gone when that stretch has its peak."""
        self._died: dict[Holders, frozenset[str]] = {}
        self._lasting: set[Holders] = set()
        self._held: set[Holders] = set()
        """In backward of the latest sheltered step, by somebody else."""
        self._let_go: set[tuple[Holders, str, str]] = set()

    @property
    def any_dies(self) -> bool:
        """Whether any of them dies early."""
        return bool(self._died)

    def learn_held(self, structure: Structure) -> None:
        """Take in what a sheltered step showed: what was there when its backward was over, somebody else holds."""
        outliving = {
            each for shape, each in zip(structure.loose, structure.loose_holders, strict=True) if shape.outlives
        }
        # The latest step counts: somebody may have held on to the first batch's.
        self._held = self._held.difference(structure.loose_holders) | outliving

    def learn_from(
        self,
        seen: Mapping[Holders, Collection[str] | None],
        structure: Structure,
        actions: Mapping[str, str],
        grades: Sequence[str],
    ) -> bool:
        """Take in what a planned step showed.

        Args:
            seen: See `learn`.
            structure: The step.
            actions: Unit -> what it did.
            grades: The grades of lean saves, the least first: what one may hold, those before it may.

        Returns:
            Whether anything is new.
        """
        acting = [unit for unit, action in actions.items() if action != KEEP]
        holding = [unit for unit in acting if actions[unit] not in grades]
        unit_of = {call.key: call.unit for call in structure.calls}

        def touched(holders: Holders, units: Sequence[str]) -> bool:
            return any(f"{unit_of[call]}.".startswith(f"{unit}.") for call in holders for unit in units)

        waiting = zip(structure.loose, structure.loose_holders, strict=True)
        loose = [each for shape, each in waiting if shape.was_held and not touched(each, holding)]
        so_far = {unit: grades[: grades.index(actions[unit]) + 1] for unit in acting if unit not in holding}
        lean = {
            each: [(unit, grade) for unit, known in so_far.items() if touched(each, [unit]) for grade in known]
            for each in loose
            if touched(each, list(so_far))
        }
        return self.learn(seen, loose, lean)

    def learn(
        self,
        seen: Mapping[Holders, Collection[str] | None],
        loose: Iterable[Holders],
        lean: Mapping[Holders, Collection[tuple[str, str]]],
    ) -> bool:
        """Take in what became of inputs.

        Args:
            seen: Holders of a storage -> the calls that had begun last when such storages died; None where one did not.
            loose: Those that nothing saves, and that no call held for what its unit did.
            lean: Of these, those that a recipe may have held -> units and grades of lean saves that may have done so.
                What dies all the same would have died without them, and none of them needs it.

        Returns:
            Whether anything is new.
        """
        before = dict(self._died), len(self._lasting), len(self._let_go)
        for holders in loose:
            if holders not in seen:
                continue
            last = seen[holders]
            if last is None and holders not in lean:
                self._died.pop(holders, None)
                self._lasting.add(holders)
            elif last is not None and holders not in self._lasting:
                self._died[holders] = self._died.get(holders, frozenset()) | frozenset(last)
                self._let_go.update((holders, *each) for each in lean.get(holders, ()))
        return before != (self._died, len(self._lasting), len(self._let_go))

    def ends(self, holders: Holders) -> Collection[str] | None:
        """After the forward of which calls a storage is gone; None: not before backward.

        One that was never seen dies with the last call that is given it, if all that were seen die early.
        """
        if self.lasts(holders):
            return None
        if holders in self._died:
            return self._died[holders]
        return frozenset() if self._died and not self._lasting else None

    def lasts(self, holders: Holders) -> bool:
        """Whether somebody else holds a storage, in backward too."""
        return holders in self._lasting or holders in self._held

    def borrows(self, holders: Holders, unit: str, grade: str) -> bool:
        """Whether a grade of lean saves of one of the holders may keep a storage alive, for all that is known."""
        return (holders, unit, grade) not in self._let_go

    def judge(
        self, predicted_bytes: int, measured_bytes: int, tolerated_bytes: int, predict: Callable[[Fates], int]
    ) -> tuple[int, bool]:
        """Tell whether inputs that die between two calls are gone when memory is highest there.

        Until that was measured they are taken to be there, and for good if it ever turns out so.

        Args:
            predicted_bytes: A planned step's peak, as it was predicted.
            measured_bytes: As it was.
            tolerated_bytes: By how much it may be above its prediction all the same.
            predict: What would be predicted by other fates.

        Returns:
            What was to be predicted, and whether that is news.
        """
        if self.prompt is None:
            early_bytes = predict(self.if_prompt())
            if early_bytes < predicted_bytes:
                self.prompt = measured_bytes <= early_bytes + tolerated_bytes
                return early_bytes if self.prompt else predicted_bytes, True
        elif self.prompt and measured_bytes > predicted_bytes + tolerated_bytes:
            self.prompt = False
            return predicted_bytes, True
        return predicted_bytes, False

    def if_prompt(self) -> Fates:
        """The same, if what dies before the next call begins is gone when that stretch has its peak."""
        other = copy(self)  # to be read: what was learnt stays shared
        other.prompt = True
        return other

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, as plain data."""
        return {
            "prompt": self.prompt,
            "died": [[sorted(holders), sorted(last)] for holders, last in self._died.items()],
            "lasting": [[sorted(holders)] for holders in self._lasting],
            "held": [sorted(holders) for holders in self._held],
            "let_go": [[sorted(holders), [unit, grade]] for holders, unit, grade in self._let_go],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what others learnt."""
        self.prompt = state["prompt"]
        self._died = {frozenset(holders): frozenset(last) for holders, last in state["died"]}
        self._lasting = {frozenset(holders) for (holders,) in state["lasting"]}
        self._held = set(map(frozenset, state.get("held", ())))
        self._let_go = {(frozenset(holders), unit, grade) for holders, (unit, grade) in state["let_go"]}
