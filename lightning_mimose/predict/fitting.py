"""Fitting: what describes the sizes that were seen, and which of them are better left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from lightning_mimose.predict.checking import EXACT_ERROR, GOOD_ERROR, USABLE_ERROR
from lightning_mimose.predict.choice import BETTER, Choice, outlined
from lightning_mimose.predict.fit import Fit, Value
from lightning_mimose.predict.maxima import Measured
from lightning_mimose.predict.structure import Structure

FEWEST_LARGER = 5
"""Sizes that have to be left where the smallest are left out; and half of them."""


def best_fit(
    sizes: Sequence[Mapping[str, int]],
    measured: Sequence[Measured],
    structure: Structure,
    resident_bytes: int,
    without: Sequence[Value] = (),
) -> Fit:
    """The simplest basis that predicts every size from the others, or else the one that does so best.

    Kernels choose another way where a side gets small (a convolution over maps of 2 x 2 elements, on some processors),
    which no polynomial describes together with the rest. So where what is left is described exactly without the least
    value of one side after another (or usably, and all together not), the fit is one of the larger sizes, and holds for
    no smaller ones.

    Args:
        sizes: Named dimensions.
        measured: What was measured of each.
        structure: What the columns are.
        resident_bytes: What is resident besides activations: errors are shares of a step's whole peak.
        without: What had to be left out of fewer sizes: that is tried first.
    """
    everything = tuple(range(len(sizes)))
    fewest = max(FEWEST_LARGER, (len(sizes) + 1) // 2)

    @cache
    def simple(kept: tuple[int, ...]) -> Choice:
        known = [sizes[i] for i in kept], [measured[i] for i in kept]
        # With fewer dimensions only all of them: of every part there would be as many bases.
        return outlined(*known, structure, resident_bytes, fewer=kept == everything)

    @cache
    def detailed(kept: tuple[int, ...]) -> Choice:
        return simple(kept).detailed()

    def larger(kept: tuple[int, ...], name: str, least: int) -> tuple[int, ...]:
        return tuple(i for i in kept if sizes[i].get(name, 0) > least)

    def without_smallest(choose: Callable[[tuple[int, ...]], Choice]) -> tuple[Choice, list[Value]]:
        best, kept, out = choose(everything), everything, list[Value]()
        left = {name for name in best.dims if name != "batch"}
        while best.check.error > EXACT_ERROR:
            found: list[tuple[Choice, Value, tuple[int, ...]]] = []
            for name in sorted(left):
                least = min(sizes[i][name] for i in kept)
                rest = larger(kept, name, least)
                if len(rest) >= fewest:
                    found.append((choose(rest), (name, least), rest))
            if not found:
                break
            choice, value, rest = min(found, key=lambda each: each[0].rank)
            if choice.check.error >= BETTER * best.check.error:
                break
            left.discard(value[0])
            best, kept, out = choice, rest, [*out, value]
        return best, out

    kept = everything
    for name, least in without:
        kept = larger(kept, name, least)
    if fewest <= len(kept) < len(sizes) and detailed(kept).check.error <= EXACT_ERROR:
        return detailed(kept).fit(without)
    # Bases of single columns take longest to find: where one of all columns does, they are not looked for.
    if simple(everything).check.error > GOOD_ERROR:
        best, out = without_smallest(simple)
        if best.check.error <= EXACT_ERROR:
            return best.fit(out)
    whole = detailed(everything)
    if whole.check.error <= GOOD_ERROR:
        return whole.fit()
    best, out = without_smallest(detailed)
    # One that is no more than usable has the least error of several; it is better than none.
    if best.check.error <= EXACT_ERROR or whole.check.error > USABLE_ERROR >= best.check.error:
        return best.fit(out)
    return whole.fit()
