"""What was observed: sizes and their columns, for every shape that steps were seen to have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from lightning_mimose.predict.accumulating import either
from lightning_mimose.predict.handed import Handing
from lightning_mimose.predict.loops import Loops, Step, paths_at
from lightning_mimose.predict.maxima import Maxima, Measured
from lightning_mimose.predict.nearby import may_have_been, of_kind
from lightning_mimose.predict.parting import Parting
from lightning_mimose.predict.paths import Habits, Key, Path, Waits, names_of
from lightning_mimose.predict.scatter import Scatter
from lightning_mimose.predict.structure import Structure

MAX_OBSERVATIONS = 48
MAX_STRUCTURES = 8
FORGET_AFTER = 20
"""Steps in a row on the same part of the longest path seen, after which that one counts as a thing of the past."""


class Observed:
    """Remembers measured steps, each by its size and its shape.

    Attributes:
        sizes: Shape of a step -> the sizes that were measured of it -> their columns, the newest last.
        varies: Whether steps were seen on several paths (layers dropped at random, tasks in turns).
        waits: Of every kind of batch: how many steps have yet to show whether there are more paths.
        habits: Sizes that always take one path.
        loops: Whether how often units are called goes by the size.
        parting: Whether it does which of them are called.
        scatter: By how much steps of one size differ.
        bare: Size of the step that found no gradients of an earlier one, as the very first does; None where several do,
            or once it was measured in another.
        oldest: Size of the very first step, until it was measured in another.
    """

    def __init__(self) -> None:
        self.sizes: dict[Structure, dict[Key, Measured]] = {}
        self.varies = False
        self.waits, self.habits, self.scatter = Waits(), Habits(), Scatter()
        self.loops, self.parting = Loops(), Parting()
        self.bare: Key | None = None
        self.oldest: Key | None = None
        self._steps = 0
        self._bare_steps = 0
        self._latest: dict[tuple[str, ...], Structure] = {}
        """Of every kind of batch (names of dimensions), the newest last."""
        self._first: Structure | None = None
        """The very first step's, as long as there is none alike."""
        self._shorter = 0
        self._shorter_path: Structure | None = None
        self._handing: Handing | None = None

    def __len__(self) -> int:
        """Number of distinct sizes observed."""
        return sum(len(sizes) for sizes in self.sizes.values())

    def add(
        self, key: Key, structure: Structure, measured: Measured, resident_bytes: int, units: int | None = None
    ) -> bool:
        """Remember one measured step.

        Args:
            key: Its size.
            structure: Its shape.
            measured: Its columns.
            resident_bytes: What is resident besides activations: differences are shares of a step's whole peak.
            units: Stands for the units that were called, see `Parting.called`; None where nobody knows.

        Returns:
            Whether it was: one that leaves calls out needs less than the next one may, so of paths that are parts of
            each other only the longest is learnt from.
        """
        step = Step(key, structure, measured)
        instead = self.loops.saw(step)
        if instead is not None:
            self._forget(names_of(key))
            for other in instead:
                if other.key != key:
                    self._add(self.loops.folded(other), resident_bytes)
        step = self.loops.folded(step)
        self.habits.add(key, step.structure.path)
        if units is not None:
            self.parting.took(key, units, step.structure.path)
        return self._add(step, resident_bytes)

    def _forget(self, names: tuple[str, ...]) -> None:
        """Forget all batches with these dimensions."""
        for structure, known in list(self.sizes.items()):
            self.sizes[structure] = {key: each for key, each in known.items() if names_of(key) != names}
            if not self.sizes[structure]:
                del self.sizes[structure]
                self._first = None if self._first is structure else self._first
        self._latest.pop(names, None)
        self._handing, self._shorter = None, 0
        self.waits.left[names] = 0
        self.habits.forget(names)
        self.parting.forget(names)

    def called(self, key: Key, units: int, resident_bytes: int) -> bool:
        """A step, measured or planned, called a set of units; see `Parting.called`, and `add`."""
        news = self.parting.called(key, units)
        for aside in self.parting.laid_aside(names_of(key)) if news else ():
            self._add(aside, resident_bytes)
        return news

    def by_size(self, names: tuple[str, ...]) -> bool:
        """Whether it goes by the size which path batches with these dimensions take."""
        return names in self.loops.folds or names in self.parting.parts

    def likely(self, key: Key, paths: Collection[Path]) -> set[Path]:
        """Those of some paths that steps of a size may take, as far as it goes by the size; none if it is another one.

        Args:
            key: The size.
            paths: Paths that batches with its dimensions took.
        """
        names, found = names_of(key), set(paths)
        if names in self.loops.folds:
            found = paths_at(key, {path: [*self.taken(path, names)] for path in paths})
        return found & self.parting.likely(key) if names in self.parting.parts else found

    def _add(self, step: Step, resident_bytes: int) -> bool:
        """Remember one measured step that counts as what it is; see `add`."""
        key, structure, measured = step
        names = names_of(key)
        structure, others = either(structure, self.sizes)
        for other in others:
            if other is not self._first:
                structure = structure.with_holds_of(other)
        for other in others:
            self._rename(other, structure)
        # One of another kind of batch (a text without images) is a path of its own.
        alike = self.alike(names)
        is_known = any(structure.path == other.path for other in alike)
        by_size = self.by_size(names)  # then it is not left out by chance
        is_part = not by_size and any(structure.path.is_part_of(other.path) for other in alike)
        self.varies |= bool(alike) and not is_known
        if is_known or is_part:
            self.waits.known(names)
        else:
            one_of_several = not by_size and not all(other.path.is_part_of(structure.path) for other in alike)
            self.waits.new(names, one_of_several=one_of_several)
        if is_part:
            self._shorter = self._shorter + 1 if structure == self._shorter_path else 1
            self._shorter_path = structure
            if self._shorter < FORGET_AFTER:
                self.parting.lay_aside(step)
                return False
        self._shorter = 0
        for other in alike:
            if not by_size and (other.path.is_part_of(structure.path) or structure.path.is_part_of(other.path)):
                known = self.sizes.pop(other)
                rest = {k: each for k, each in known.items() if names_of(k) != names}
                for k in known.keys() - rest.keys():
                    self.parting.lay_aside(Step(k, other, known[k]))
                if rest:
                    self.sizes[other] = rest
        before = next((other for other in self.sizes if other == structure), None)
        if before is None:
            self._first = self._first if self.sizes else structure
        elif before is self._first:
            self._first = None  # others may hold on to the first batch's inputs for good, which says nothing of others
        else:
            structure = before.with_holds_of(structure)  # they may hold them longer in some steps than in others
        known = self._known_as(structure)
        if key in known:
            before_it = known.pop(key)
            if key != self.bare:
                self.scatter.add(structure, before_it.values, measured.values, resident_bytes)
        known[key] = measured
        if len(self.sizes) > MAX_STRUCTURES:
            del self.sizes[next(s for s in self.sizes if s != structure)]
        if len(known) > MAX_OBSERVATIONS:
            # Oldest first, but never the extremes of a dimension, which span the range that is trusted.
            most, _ = Counter(map(names_of, known)).most_common(1)[0]
            like = [other for other in known if names_of(other) == most]
            ranges = [[other[i][1] for other in like] for i in range(len(most))]
            low, high = [min(values) for values in ranges], [max(values) for values in ranges]
            inner = (k for k in like if all(low[i] < k[i][1] < high[i] or low[i] == high[i] for i in range(len(k))))
            known.pop(next(inner, like[0]))
        self._latest.pop(names, None)
        self._latest[names], self._handing = structure, None
        return True

    def note_gradients(self, key: Key, *, bare: bool) -> None:
        """Note whether a step of some size found no gradients of an earlier one."""
        self._bare_steps += bare
        self._steps += 1
        self.oldest = key if self._steps == 1 else None if self.oldest == key else self.oldest
        if bare:  # steps that often find none are no exceptions
            self.bare = key if self._bare_steps == 1 else None
        elif self.bare == key:
            self.bare = None

    def drop(self, key: Key) -> None:
        """Forget what was measured of a size: it is not believed any more."""
        self.bare = None if self.bare == key else self.bare
        self.oldest = None if self.oldest == key else self.oldest
        for structure in [each for each, known in self.sizes.items() if key in known]:
            del self.sizes[structure][key]
            if not self.sizes[structure]:
                del self.sizes[structure]
                self._first = None if self._first is structure else self._first
        self._latest = {kind: structure for kind, structure in self._latest.items() if structure in self.sizes}
        self._handing = None

    def _rename(self, other: Structure, structure: Structure) -> None:
        """The sizes that were observed of one shape are those of another from now on."""
        if other != structure:
            self.sizes[structure] = self.sizes.pop(other) | self.sizes.get(structure, {})
            self._latest = {kind: structure if each == other else each for kind, each in self._latest.items()}
            self._first = None if self._first is other else self._first

    def _known_as(self, structure: Structure) -> dict[Key, Measured]:
        """The sizes that were observed of an equal structure, from now on of this very one.

        One object: comparing two equal ones takes milliseconds.
        """
        if not any(other is structure for other in self.sizes):
            self._latest = {kind: structure if other == structure else other for kind, other in self._latest.items()}
            self.sizes[structure] = self.sizes.pop(structure, {})
        return self.sizes[structure]

    def refine(
        self,
        structure: Structure,
        key: Key,
        fates: Mapping[frozenset[str], Sequence[str | None]],
        acting: Collection[str],
    ) -> bool:
        """Learn from a planned step which inputs live longer, see `Structure.contradicted`; whether there are any.

        Not of inputs that units save themselves in steps of another shape, where this may have been one.
        """
        for other in may_have_been(self.sizes, structure, key):
            loose = {frozenset(other.calls[index].key for index in each.given) for each in other.loose}
            fates = {calls: last for calls, last in fates.items() if calls in loose}
        refined = structure.contradicted(fates, acting)
        if refined is None or refined not in self.sizes:
            return False
        self._known_as(refined)
        self._handing = None
        return True

    @property
    def handing(self) -> Handing:
        """What becomes of lean units' results."""
        if self._handing is None:
            self._handing = Handing.of(self.sizes)
        return self._handing

    def latest(self, names: tuple[str, ...]) -> Structure | None:
        """The newest shape of batches with these dimensions."""
        found = self._latest.get(names)
        return found if found in self.sizes else None

    def newest(self) -> tuple[tuple[str, ...], Structure] | None:
        """The dimensions of the newest batch, and its shape."""
        return next(reversed(self._latest.items()), None)

    def alike(self, names: tuple[str, ...]) -> list[Structure]:
        """The shapes that steps of batches with these dimensions were seen to have."""
        return [structure for structure, known in self.sizes.items() if any(names_of(key) == names for key in known)]

    def of(self, structure: Structure, names: tuple[str, ...]) -> dict[Key, Measured]:
        """The sizes with these dimensions that were measured of a shape."""
        return of_kind(self.sizes[structure], names)

    def taken(self, path: Path, names: tuple[str, ...]) -> Iterator[Key]:
        """The sizes with these dimensions that were seen to take a path."""
        for structure, known in self.sizes.items():
            if structure.path == path:
                yield from (key for key in known if names_of(key) == names)

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, as plain data."""
        number = {structure.path: i for i, structure in enumerate(self.sizes)}
        return {
            "varies": self.varies,
            **self.loops.state_dict(),
            **self.parting.state_dict(number),
            "waits": [[list(kind), left] for kind, left in self.waits.left.items()],
            "bare": None if self.bare is None else list(map(list, self.bare)),
            "observed": [
                {
                    "structure": asdict(structure),
                    "sizes": [
                        [list(map(list, key)), measured.values.tolist(), measured.maxima.state_dict(), measured.seconds]
                        for key, measured in known.items()
                    ],
                }
                for structure, known in self.sizes.items()
            ],
            "habits": [
                [number[path], list(map(list, key)), steps]
                for key, (path, steps) in self.habits.steps.items()
                if path in number
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another one remembered."""
        self.varies = bool(state.get("varies", False))
        self.loops.load_state_dict({**state, "calls": ()})
        structures = [Structure.of(entry["structure"]) for entry in state["observed"]]
        paths = [structure.path for structure in structures]
        self.parting.load_state_dict(state, paths)
        for structure, entry in zip(structures, state["observed"], strict=True):
            for pairs, values, maxima, seconds in entry["sizes"]:
                key = tuple(sorted((name, int(value)) for name, value in pairs))
                measured = Measured(np.array(values, dtype=np.float64), Maxima.from_state(maxima), float(seconds))
                step = Step(key, structure, measured)
                if names_of(key) in self.loops.folds:  # it is folded already: how many calls it had is not known
                    self._add(step, 0)
                else:
                    self.add(*step, 0)
        self.loops.load_state_dict(state)  # how often units were called in sizes that are not known any more, too
        bare = state.get("bare")
        self.bare = None if bare is None else tuple((name, int(value)) for name, value in bare)
        for kind, left in state["waits"]:
            self.waits.left[tuple(kind)] = int(left)
        for number, pairs, steps in state["habits"]:
            self.habits.steps[tuple((name, int(value)) for name, value in pairs)] = paths[number], int(steps)
        self.scatter = Scatter()  # what is loaded was measured by somebody else
