"""The values of one call of a unit: how what its operations made is rebuilt from what is kept.

Each is looked for once, from the operation's node back to what was saved, to arguments or to parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import pairwise
from math import prod
from typing import Any

import torch

from lightning_mimose.actions.lean.constants import Constants
from lightning_mimose.actions.lean.handles import Handle, Kept
from lightning_mimose.actions.lean.node import Node
from lightning_mimose.actions.lean.recipe import Recipe
from lightning_mimose.actions.lean.recipes.table import TABLE, VIEW, Made, MissingError
from lightning_mimose.actions.lean.storages import Storages
from lightning_mimose.errors import is_out_of_memory
from lightning_mimose.menu import ATTENTION

LONGEST_CHAIN = 12
"""Operations that may lead from what is kept or saved to one tensor."""
MOST_OPERATIONS = 384
"""How many may be run for it, what is saved on the way made anew each time, as in a comparison: a loop's states are
each made from the last, twice in some loops. The most in seven models of `bench.models` was 76, in a GPT-2 whose
attention is rebuilt from pieces of one projection 145. Where there are more, a survey takes it to be kept in all
grades, also in those that have less to run."""

_LEAF = "torch::autograd::AccumulateGrad"

_ALIKE = {"ReshapeAliasBackward0": "ViewBackward0"}
"""One operation, whose node has another name beside a meter that sees every operation: its places are the same."""

Key = tuple[Any, int]
"""A value: the node of the operation that made it, and which of its outputs it is."""


class Values:
    """What is known of every value, by (node, output).

    Attributes:
        found: What it is rebuilt by, or kept; None where it cannot be had. Whoever packs a tensor enters it, too.
        missing: Of what was looked for in vain, the input that could not be had; None where it needs none.
        numbers: Which saved tensor it is, see `Handle.identity`.
        owner: Stands in handles for the call that they were made in.
        start: The number of autograd's next node when the call began.
        arguments: Storages that may be used again in backward.
        borrowed: Arguments that autograd would not look at again, as long as recipes use them: autograd itself
            keeps whoever packed a tensor to the end of the unit's backward.
        notes: What operations were called with.
        in_scores: While attention's scores are looked for.

    Args:
        grade: What may be rebuilt.
        leaves: Parameters that values may be rebuilt from, as long as nobody changes them; None for any.
    """

    def __init__(self, grade: int, leaves: Iterable[torch.Tensor] | None) -> None:
        self._grade = grade
        self._leaves = None if leaves is None else {id(leaf): leaf._version for leaf in leaves}
        self.found: dict[Key, Handle | None] = {}
        self.missing: dict[Key, Key | None] = {}
        self._latest_missing: Key | None = None
        self._changes = 0
        self.numbers: dict[Key, int] = {}
        self.owner = object()
        self.start = 0
        self.arguments = Storages()
        self.borrowed: list[weakref.ref[torch.Tensor]] = []
        self.notes = Constants(self.arguments)
        self.in_scores = False

    def forget(self) -> None:
        """Let go of everything that nodes do not hold."""
        self.found.clear()
        self.missing.clear()
        self._latest_missing = None
        self.numbers.clear()
        self.notes.forget()
        self.arguments.clear()

    def given(self, tensor: torch.Tensor) -> Handle | None:
        """A tensor without gradients, if it is an argument; one that would only live for a recipe is no gain.

        Nor a buffer: a unit may write its own after it has used it, which autograd would allow.
        """
        if not self.arguments.has_that_of(tensor) or tensor.is_inference():
            return None
        kept = Kept(tensor)
        self.borrowed.append(weakref.ref(kept.value()))
        kept.grade = ATTENTION  # from this grade on, timelines count that units keep their arguments alive
        return kept

    def enter(self, key: Key, handle: Handle | None) -> None:
        """A value was packed."""
        self.found[key] = handle
        self.missing.pop(key, None)

    def rebuilt(self, node: Any, output: int, depth: int, *, is_contiguous: bool = True) -> Handle | None:
        """The value of an operation's output, from what is kept.

        Args:
            node: The operation's node.
            output: Which of its outputs.
            depth: See `Node`.
            is_contiguous: Whether the value is; as far as is known, where it is not at hand.
        """
        key = (node, output)
        if len(self.notes.changed) != self._changes:
            self._forget_ways()
        if key in self.notes.changed:
            self._latest_missing = key
            return None
        if key not in self.found:
            self._latest_missing = None
            made = self.found[key] = self._from_table(node, output, depth, is_contiguous)
            if made is None:
                self.missing[key] = self._latest_missing
        found = self.found[key]
        if found is not None:
            found.identity = self.numbers.get(key, found.identity)
        self._latest_missing = key if found is None else None
        return found

    def _forget_ways(self) -> None:
        """A value was changed unseen: what was looked for on the way to others may be a view of it."""
        self._changes = len(self.notes.changed)
        for key in [key for key, found in self.found.items() if found is not None and key not in self.numbers]:
            del self.found[key]

    def awaited(self, key: Key) -> list[Key]:
        """What of the way to a value that was looked for in vain could not be had, the nearest first."""
        found: list[Key] = []
        following = self.missing.get(key)
        while following is not None and following not in found:
            found.append(following)
            following = self.missing.get(following)
        return found

    def enter_argument(self, key: Key, base: torch.Tensor) -> None:
        """An argument that was made before the call was packed."""
        if key not in self.found or key in self.missing:
            self.enter(key, Kept(base))

    def again(self, key: Key, *, is_contiguous: bool) -> tuple[Handle | None, list[Key]]:
        """A packed value from what is kept, once more: there is more of it by now. And what is missing still."""
        packed = self.found.pop(key, None)
        for each in self.missing:
            if each in self.found and self.found[each] is None:
                del self.found[each]
        self.missing.clear()
        found = self.rebuilt(*key, 0, is_contiguous=is_contiguous)
        awaited = self.awaited(key)
        self.enter(key, packed)
        return found, awaited

    def _from_table(self, node: Any, output: int, depth: int, is_contiguous: bool) -> Handle | None:
        name = node.name()
        if name == _LEAF:
            leaf = node.variable
            # One that was changed since the unit began is not what the operation was given.
            known = self._leaves is None or self._leaves.get(id(leaf)) == leaf._version
            return Kept(leaf) if known else None
        entry = TABLE.get(name)
        if entry is None or (output and not entry.all_outputs) or depth > LONGEST_CHAIN:
            return None
        own = ATTENTION if self.in_scores and name == "BmmBackward0" else entry.grade
        if own > self._grade:
            return None
        if node._sequence_nr() < self.start:  # somebody else's, made before; for those after, see `Node.saved`
            return None
        if entry.needs_first and self._leads_nowhere(node):
            return None
        try:
            view = Node(self, node, depth, output, is_contiguous)
            made: Made | None = entry.make(view)
        except MissingError:
            return None
        except Exception as error:  # as in `rebuilds`: one that cannot be made is no reason to end a training
            if is_out_of_memory(error):
                raise
            return None
        if made is None:
            return None
        own = own if own == ATTENTION else max(own, made.grade)
        if own > self._grade:
            return None
        grade, inputs = own, []
        for each in made.inputs:
            if each is None or not each.is_intact:
                return None
            inputs.append(each)
            grade = max(grade, each.needed_grade)
        shape = view.shape
        elements = prod(shape)
        work = made.work + made.work_per_element * elements
        is_view = made.work_per_element == VIEW and not made.work
        recipe = Recipe(
            made.rebuild,
            inputs,
            elements * view.dtype.itemsize,
            shape,
            grade,
            work,
            is_view=is_view,
            gives_away=made.gives_away,
            takes_out=made.takes_out,
            made_in=self.owner,
            own_grade=own,
        )
        if recipe.operations > MOST_OPERATIONS:
            return None
        recipe.identity = hash((_ALIKE.get(name, name), output, *[each.identity for each in inputs]))
        return recipe

    def _leads_nowhere(self, node: Any) -> bool:
        """Whether operations that need their first input lead to one without a recipe, looked at before any is made."""
        way: list[Key] = []
        leads_nowhere = False
        while True:
            key = node, _ = node.next_functions[0]
            if node is None:
                return True
            way.append(key)
            if key in self.found:
                leads_nowhere = self.found[key] is None
                break
            name: str = node.name()
            entry = TABLE.get(name)
            if entry is None:
                leads_nowhere = name != _LEAF
                break
            if node._sequence_nr() < self.start:  # somebody else's
                leads_nowhere = True
                break
            if entry.grade > self._grade:
                leads_nowhere = not self.in_scores
                break
            if not entry.needs_first:
                break
        if leads_nowhere:
            self.missing.update(pairwise(way))
            self._latest_missing = way[0]
        return leads_nowhere
