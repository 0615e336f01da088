"""What was observed: sizes and their columns, for every shape that steps were seen to have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from lightning_mimose.predict.accumulating import either
from lightning_mimose.predict.handing import common
from lightning_mimose.predict.loops import Loops, Step
from lightning_mimose.predict.maxima import Maxima, Measured
from lightning_mimose.predict.paths import Habits, Key, Path, Waits, names_of
from lightning_mimose.predict.scatter import Scatter
from lightning_mimose.predict.structure import Structure

MAX_OBSERVATIONS = 48
MAX_STRUCTURES = 8
FEWEST_SIZES = 3
"""Sizes of a shape that say that there are more like these."""
FORGET_AFTER = 20
"""Steps in a row on the same part of the longest path seen, after which that one counts as a thing of the past."""


class Handing(NamedTuple):
    """What becomes of lean units' results, in steps of every shape.

    Attributes:
        handed_on: Unit -> up to which grade its result is handed on.
        takers: Unit whose result could be rebuilt -> the units that are given it.
        places: Unit of `handed_on` -> which of the storages that it returns is handed on, from 0.
    """

    handed_on: dict[str, int]
    takers: dict[str, frozenset[str]]
    places: dict[str, int]


class Observed:
    """Remembers measured steps, each by its size and its shape.

    Attributes:
        sizes: Shape of a step -> the sizes that were measured of it -> their columns, the newest last.
        varies: Whether steps were seen on several paths (layers dropped at random, tasks in turns).
        waits: Of every kind of batch: how many steps have yet to show whether there are more paths.
        habits: Sizes that always take one path.
        loops: Whether how often units are called goes by the size.
        scatter: By how much steps of one size differ.
        bare: Size of the step that found no gradients of an earlier one, as the very first does; None where several do,
            or once it was measured in another.
        oldest: Size of the very first step, until it was measured in another.
    """

    def __init__(self) -> None:
        self.sizes: dict[Structure, dict[Key, Measured]] = {}
        self.varies = False
        self.waits, self.habits, self.scatter = Waits(), Habits(), Scatter()
        self.loops = Loops()
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

    def add(self, key: Key, structure: Structure, measured: Measured, resident_bytes: int) -> bool:
        """Remember one measured step.

        Args:
            key: Its size.
            structure: Its shape.
            measured: Its columns.
            resident_bytes: What is resident besides activations: differences are shares of a step's whole peak.

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
        return self._add(self.loops.folded(step), resident_bytes)

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
        self.habits.add(key, structure.path)
        # One of another kind of batch (a text without images) is a path of its own.
        alike = self.alike(names)
        is_known = any(structure.path == other.path for other in alike)
        # What goes by the size is not left out by chance.
        by_size = names in self.loops.folds
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
                return False
        self._shorter = 0
        for other in alike:
            if not by_size and (other.path.is_part_of(structure.path) or structure.path.is_part_of(other.path)):
                rest = {k: each for k, each in self.sizes.pop(other).items() if names_of(k) != names}
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
        for other in self._may_have_been(structure, key):
            loose = {frozenset(other.calls[index].key for index in each.given) for each in other.loose}
            fates = {calls: last for calls, last in fates.items() if calls in loose}
        refined = structure.contradicted(fates, acting)
        if refined is None or refined not in self.sizes:
            return False
        self._known_as(refined)
        self._handing = None
        return True

    def _may_have_been(self, structure: Structure, key: Key) -> Iterator[Structure]:
        """Other shapes on the same path, that a step which was planned by one may have had: batches as large had them.

        The transposes of a batch of one are no copies: units save what they are given in their place.
        """
        batch = dict(key).get("batch")
        if key in self.sizes.get(structure, {}):
            return
        for other, known in self.sizes.items():
            as_large = any(dict(each).get("batch") == batch for each in known)
            if as_large and other != structure and other.path == structure.path:
                yield other

    @property
    def handing(self) -> Handing:
        """What becomes of lean units' results."""
        if self._handing is None:
            takers: dict[str, frozenset[str]] = {}
            places: dict[str, set[int]] = {}
            for structure in self.sizes:
                for each in structure.handing:
                    unit, taker = structure.calls[each.call].unit, structure.calls[each.taker].unit
                    takers[unit] = takers.get(unit, frozenset()) | {taker}
                    places.setdefault(unit, set()).add(each.place)
            limits = common(structure.handed_on for structure in self.sizes)
            always = {unit: min(found) for unit, found in places.items() if len(found) == 1}
            self._handing = Handing({unit: limit for unit, limit in limits.items() if unit in always}, takers, always)
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
        return {key: measured for key, measured in self.sizes[structure].items() if names_of(key) == names}

    def nearer(self, structure: Structure, key: Key) -> list[Structure]:
        """Other shapes of steps on the same path, with sizes that are nearer to one which was not measured.

        Short texts may be worked on in another way than long ones, by the same blocks: whatever was measured last, it
        says less of sizes far from its own than what was seen around those.

        Args:
            structure: A shape that was measured.
            key: A size.
        """
        names = names_of(key)
        spans = {
            other: known
            for other in self._beside(structure)
            if len(known := self.of(other, names)) >= FEWEST_SIZES or other == structure
        }
        if any(key in known for known in spans.values()):
            return []
        beyond = {other: _beyond(key, known) for other, known in spans.items()}
        return [other for other in spans if beyond[other] < beyond[structure]]

    def alone_with(self, structure: Structure, key: Key) -> Structure | None:
        """The shape that all steps on the same path had whose batches are as large as a size's, which is among theirs.

        Batches of one leave out what others need (masks, repeated positions).

        Args:
            structure: A shape that was measured.
            key: A size.
        """
        names, batch = names_of(key), dict(key).get("batch")
        shapes = self._beside(structure)
        if batch is None or len(shapes) < 2:
            return None
        seen = {other: [each for each in self.of(other, names) if dict(each)["batch"] == batch] for other in shapes}
        found = [other for other in shapes if seen[other]]
        if len(found) != 1 or len(seen[found[0]]) < FEWEST_SIZES or _beyond(key, seen[found[0]]) > 1:
            return None
        return found[0]

    def _beside(self, structure: Structure) -> list[Structure]:
        """The shapes on the same path, beside the same gradients of earlier steps."""
        gradients = structure.old_gradient_bytes
        return [each for each in self.sizes if each.path == structure.path and each.old_gradient_bytes == gradients]

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
        paths = []
        for entry in state["observed"]:
            structure = Structure.of(entry["structure"])
            paths.append(structure.path)
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


def _beyond(key: Key, known: Collection[Key]) -> float:
    """How many times a size is outside of what others span, in one dimension at least; 1 if it is in there."""
    if not known:
        return float("inf")
    spans = ([other[i][1] for other in known] for i in range(len(key)))
    outside = (
        (value / max(1, max(span)), min(span) / max(1, value)) for (_, value), span in zip(key, spans, strict=True)
    )
    return max((1.0, *(each for pair in outside for each in pair)))
