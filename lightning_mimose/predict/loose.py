"""Loose storages on a timeline: inputs that nothing holds in backward but options that are chosen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.structure import Structure
from lightning_mimose.predict.timeline import SharedHold

Mask = NDArray[np.bool_]


class Places(NamedTuple):
    """Positions of a timeline.

    Attributes:
        when: Shape (positions,); their times.
        backward: Shape (positions,); which of them are in backward.
        second: Shape (positions,); which of them are the second ones of their time, see `highest_twice`.
    """

    when: NDArray[np.int64]
    backward: Mask
    second: Mask


class Gone(NamedTuple):
    """Where a loose storage is gone, if no chosen option holds it.

    Attributes:
        number: Which one.
        nbytes: By how much that is lower without it.
        where: Shape (positions,).
        counts: Whether it is higher by so much if an option holds it.
    """

    number: int
    nbytes: int
    where: Mask
    counts: bool = True


def highest_twice(structure: Structure, value: NDArray[np.int64]) -> list[int]:
    """Times at which memory was highest both before and after a loose storage is let go of, as far as is known.

    What is there before that has it in it, whoever holds it; what is there afterwards does if an option holds it. So
    there are two positions of such a time. Where letting go changes nothing of one, and as much of another as it has,
    memory was highest once, between the two.

    Args:
        structure: The step's shape.
        value: Shape (columns,); the fitted columns for its size.
    """
    found = {}
    for each in structure.loose:
        ends_there = each.was_held and not each.lasts and each.ends_there
        if ends_there and each.since_time is not None and 0 < value[each.ending] < value[each.size]:
            found[each.since_time - 1] = True
    return list(found)


def gone(structure: Structure, value: NDArray[np.int64], places: Places) -> Iterator[Gone]:
    """What of loose storages is gone, and where.

    Args:
        structure: The step's shape.
        value: Shape (columns,); the fitted columns for its size.
        places: The timeline's positions.
    """
    when, backward, second = places
    for number, loose in enumerate(structure.loose):
        if loose.was_held and loose.lasts:
            continue  # it is there, whoever holds it besides
        size = int(value[loose.size])
        # A fit may say that more than all of it goes, where memory was highest before that in some of its sizes.
        ending = min(int(value[loose.ending]), size)
        if not loose.was_held:  # what was measured after its last use is without it
            last_out = max(structure.calls[i].out_time for i in loose.holders)
            yield Gone(number, size, backward | (when >= last_out))
        elif loose.since_time is None:  # in a second forward of the step, not in the backward before it
            first_in = min(structure.calls[i].in_time for i in loose.holders)
            yield Gone(number, size, backward & (when >= first_in))
        else:
            after, within = when >= loose.since_time, when == loose.since_time - 1
            if not loose.ends_there:
                yield Gone(number, size, after)
            elif ending == size and not np.any(within & second):
                yield Gone(number, size, after | within)
            else:
                yield Gone(number, size, after | (within & second))
                yield Gone(number, ending, within & ~second, counts=False)


def take_out(structure: Structure, base: NDArray[np.int64], places: Places, found: Gone) -> None:
    """Take what is gone out of the live bytes.

    Args:
        structure: The step's shape.
        base: Shape (positions,); changed.
        places: The timeline's positions.
        found: What is gone.
    """
    base -= np.where(found.where & (places.when <= structure.loose[found.number].lasts_until), found.nbytes, 0)


def shared_holds(
    structure: Structure,
    value: NDArray[np.int64],
    base: NDArray[np.int64],
    places: Places,
    runs_again: Iterable[tuple[int, int, int]],
    borrows: Iterable[tuple[int, int, int]],
) -> list[SharedHold]:
    """What only chosen options hold; takes it out of the live bytes.

    Args:
        structure: The step's shape.
        value: Shape (columns,); the fitted columns for its size.
        base: Shape (positions,); changed.
        places: The timeline's positions.
        runs_again: (option, call that it runs again, what that takes).
        borrows: (option, loose storage, call) that keeps one of the call's arguments alive, besides those.
    """
    options_of: dict[int, list[int]] = {}
    for option, index, _ in runs_again:
        options_of.setdefault(index, []).append(option)
    borrowers: dict[tuple[int, int], list[int]] = {}
    for option, number, index in borrows:
        borrowers.setdefault((number, index), []).append(option)
    shared = []
    for each in gone(structure, value, places):
        take_out(structure, base, places, each)
        if not each.counts:
            continue
        holders: dict[int, Mask] = {}
        loose = structure.loose[each.number]
        for index in sorted(loose.holders, key=lambda i: -structure.calls[i].held_until):
            for option in (*options_of.get(index, ()), *borrowers.get((each.number, index), ())):
                holders.setdefault(option, each.where & (places.when <= structure.calls[index].held_until))
        if holders:
            shared.append(SharedHold(each.nbytes, tuple(holders), np.array(list(holders.values()))))
    return shared
