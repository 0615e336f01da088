"""Random timelines with the structure real ones have, and the brute-force answers to them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
from hypothesis import strategies as st

from lightning_mimose.plan.structure import Structure
from lightning_mimose.predict.timeline import Option, SharedHold, Timeline


def stacked(
    saved: list[int],
    seconds: list[float],
    *,
    transient: float = 0.2,
    kept_input: float = 0.06,
    inner: list[bool] | None = None,
    lean: bool = True,
    offset: int = 1000,
    gradient: int = 0,
    hold: int = 0,
    head: int = 0,
) -> Timeline:
    """The timeline of units in a row: forward, a gap each, the head, then recomputation, backward and a gap each.

    Args:
        saved: What each unit saves, in bytes.
        seconds: What each unit's forward takes.
        transient: Working set as a share of what is saved.
        kept_input: Share of what is saved that recomputing keeps.
        inner: Which units have two units inside.
        lean: Whether a cheap option that relieves a third is there too.
        offset: Resident bytes.
        gradient: Bytes each backward leaves.
        hold: Bytes of a storage that every recomputed unit would hold.
        head: Fixed bytes between forward and backward.
    """
    inner = inner or [False] * len(saved)
    chunks: list[tuple[int, int]] = []  # (bytes, working set) of every leaf of the tree, in forward order
    regions: list[tuple[str, int, int, int, float]] = []  # (name, parent, first chunk, last chunk, seconds)
    for index, (size, time) in enumerate(zip(saved, seconds, strict=True)):
        parts = [size // 2, size - size // 2] if inner[index] else [size]
        first, outer = len(chunks), len(regions)
        regions.append((f"layer{index}", -1, first, first + len(parts) - 1, time))
        for part, bytes_ in enumerate(parts):
            if inner[index]:
                regions.append((f"layer{index}.{part}", outer, first + part, first + part, time * 0.5))
            chunks.append((bytes_, int(bytes_ * transient)))
    count = len(chunks)
    after = np.cumsum([0, *(size for size, _ in chunks)])
    forward = 2 * np.arange(count)
    again = 2 * count + 1 + 3 * np.arange(count)[::-1]  # recomputation; backward and a gap follow it
    base = np.zeros(5 * count + 2, dtype=np.int64)
    labels = [""] * len(base)
    for chunk, (_, work) in enumerate(chunks):
        grads = gradient * (count - chunk)
        base[forward[chunk] : forward[chunk] + 2] = after[chunk + 1] + work, after[chunk + 1]
        base[again[chunk] : again[chunk] + 3] = after[chunk + 1], after[chunk + 1] + work, after[chunk]
        base[again[chunk] : again[chunk] + 3] += [grads - gradient, grads - gradient, grads]
        labels[forward[chunk]] = f"forward {chunk}"
        labels[forward[chunk] + 1] = f"after forward {chunk}"
        for shift, what in enumerate(("recompute", "backward", "after backward")):
            labels[again[chunk] + shift] = f"{what} {chunk}"
    base[2 * count], labels[2 * count] = after[-1] + head, "head"
    base[-1], labels[-1] = 2 * gradient * count, "update"
    options: list[Option] = []
    relief: list[np.ndarray] = []
    holders: list[int] = []
    for unit, (_, parent, first, last, time) in enumerate(regions):
        size = sum(bytes_ for bytes_, _ in chunks[first : last + 1])
        work = max(work for _, work in chunks[first : last + 1])
        kinds = [("recompute", 1 - kept_input, time, work)]
        if lean and parent < 0:
            kinds.append(("lean", 0.35, time * 0.0625, 0))
        for action, share, cost, raised in kinds:
            row = np.zeros(len(base), dtype=np.int64)
            row[forward[last] + 1 : again[last]] = int(size * share)
            row[again[last]] = -raised
            if action == "recompute" and parent < 0:
                holders.append(len(options))
            options.append(Option(unit, action, cost))
            relief.append(row)
    shared: tuple[SharedHold, ...] = ()
    if hold:
        mask = np.zeros((len(holders), len(base)), dtype=np.bool_)
        for row_index, holder in enumerate(holders):
            mask[row_index, 2 * count : again[regions[options[holder].unit][2]] + 2] = True
        shared = (SharedHold(hold, tuple(holders), mask),)
    return Timeline(
        units=tuple(region[0] for region in regions),
        parents=tuple(region[1] for region in regions),
        options=tuple(options),
        base_bytes=base + offset,
        relief_bytes=np.array(relief),
        shared=shared,
        labels=tuple(labels),
    )


@st.composite
def timelines(draw: st.DrawFn, max_units: int = 5, nested: bool = True) -> Timeline:
    """Timelines small enough to try every plan; seconds are exact in binary, so sums may be compared with `==`."""
    count = draw(st.integers(1, max_units))
    sizes = st.integers(0, 400) if draw(st.booleans()) else st.just(draw(st.integers(1, 400)))
    times = st.integers(1, 256).map(lambda sixteenths: sixteenths * 2.0**-10)
    inner = [nested and draw(st.booleans()) for _ in range(count)]
    return stacked(
        [draw(sizes) for _ in range(count)],
        [draw(times) for _ in range(count)],
        transient=draw(st.sampled_from([0.0, 0.1, 0.5, 1.2])),
        kept_input=draw(st.sampled_from([0.0, 0.06, 0.3])),
        inner=inner if sum(inner) <= 2 else [False] * count,
        lean=draw(st.booleans()),
        offset=draw(st.integers(0, 500)),
        gradient=draw(st.integers(0, 20)),
        hold=draw(st.sampled_from([0, 0, 30, 200])),
        head=draw(st.sampled_from([0, 0, 50, 600])),
    )


@st.composite
def problems(draw: st.DrawFn, max_units: int = 5, nested: bool = True) -> tuple[Timeline, int]:
    """A timeline and a budget: anything from hopeless to generous, the exact peaks of plans more often than others."""
    timeline = draw(timelines(max_units, nested))
    peaks = sorted({peak for peak, _, _ in every_plan(timeline)})
    budget = draw(st.one_of(st.sampled_from(peaks), st.integers(0, int(peaks[-1]) + 10)))
    return timeline, budget


def every_plan(timeline: Timeline) -> Iterator[tuple[int, float, dict[str, str]]]:
    """(peak, seconds, actions) of every plan there is."""
    structure = Structure.of(timeline)
    choices: list[list[int]] = [[-1] for _ in timeline.units]
    for index, option in enumerate(timeline.options):
        choices[option.unit].append(index)
    for picked in product(*choices):
        chosen = [option for option in picked if option >= 0]
        if not excluding(timeline, chosen):
            actions = {timeline.units[timeline.options[o].unit]: timeline.options[o].action for o in chosen}
            level = timeline.level_bytes(np.array(chosen, dtype=np.intp))
            yield int(level.max()), float(structure.cost[chosen].sum()), actions


def excluding(timeline: Timeline, chosen: list[int]) -> bool:
    """Whether two of the options are on one path from a root of the module tree, by looking at every path."""
    acting = {timeline.options[option].unit for option in chosen}
    for unit in acting:
        above = timeline.parents[unit]
        while above >= 0:
            if above in acting:
                return True
            above = timeline.parents[above]
    return False


def cheapest_by_brute_force(timeline: Timeline, budget_bytes: int) -> float | None:
    """The least seconds of any plan that fits, None if none does."""
    return min((seconds for peak, seconds, _ in every_plan(timeline) if peak <= budget_bytes), default=None)


def check(timeline: Timeline, plan: object, budget_bytes: int | None = None) -> None:
    """Assert that a plan is one of this timeline, says what the timeline predicts for it, and fits the budget."""
    from lightning_mimose.plan import Plan

    assert isinstance(plan, Plan)
    assert plan.units == timeline.units
    assert not excluding(timeline, timeline.chosen(plan.actions).tolist())
    assert plan.predicted_peak_bytes == timeline.peak_bytes(plan.actions)
    assert plan.added_seconds == timeline.added_seconds(plan.actions)
    if budget_bytes is not None:
        assert plan.predicted_peak_bytes <= budget_bytes


def realistic(kind: str, units: int = 24, seed: int = 0) -> Timeline:
    """A stack of blocks like a network's, in megabytes: `identical`, in `stages`, `nested` or with a `shared` hold."""
    random = np.random.default_rng(seed)
    stage = np.arange(units) * 4 // units if kind == "stages" else np.zeros(units, dtype=int)
    saved = (random.uniform(20e6, 120e6, 4)[stage]).astype(int).tolist()
    seconds = (random.uniform(1e-3, 6e-3, 4)[stage] * random.uniform(0.98, 1.02, units)).tolist()
    return stacked(
        saved,
        seconds,
        inner=[kind == "nested"] * units,
        offset=200_000_000,
        gradient=1_000_000,
        hold=60_000_000 if kind == "shared" else 0,
        head=10_000_000,
    )


KINDS = ("identical", "stages", "nested", "shared")
"""What `realistic` knows."""


def share_of(timeline: Timeline, share: float) -> int:
    """The budget that leaves this share of the activation memory."""
    peak, resident = int(timeline.base_bytes.max()), int(timeline.base_bytes.min())
    return int(resident + share * (peak - resident))
