"""Where a step may stop: the boundaries of its units, what it needs between them, and how they are noticed.

Stops are the calls of the units that the shelter recomputes, an even cut through the model: before each one's forward,
and before its backward. What a step needs in the stretch behind a stop is the highest point of its timeline there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from lightning_mimose.measure.call import call_key
from lightning_mimose.parts import leaves_in
from lightning_mimose.predict.shapes import NEVER
from lightning_mimose.predict.structure import Structure
from lightning_mimose.predict.timeline import Timeline
from lightning_mimose.shared.claim import Claim


@dataclass(frozen=True)
class Route:
    """A step's way from stop to stop.

    Attributes:
        claim: What it needs in each stretch; the last one is the optimizer's update.
        places: Key of a call -> the stretches that its forward and its backward begin (None if it has no backward).
    """

    claim: Claim
    places: Mapping[str, tuple[int, int | None]]

    @cached_property
    def units(self) -> frozenset[str]:
        """The units whose calls these are."""
        return frozenset(key.rpartition("#")[0] or key for key in self.places) | self.places.keys()

    @classmethod
    def whole(cls, peak_bytes: int) -> Route:
        """A step that nothing is known about but its peak."""
        return cls(Claim.of([peak_bytes]), {})


def route_of(
    structure: Structure, timeline: Timeline, actions: Mapping[str, str], margin_bytes: int, most_bytes: int
) -> Route:
    """The way of a step.

    Args:
        structure: Its shape.
        timeline: What it holds, position by position, for its size.
        actions: The plan.
        margin_bytes: What is claimed besides, for what no prediction describes.
        most_bytes: No stretch claims more: what the plan was made to stay within.
    """
    known = {unit: action for unit, action in actions.items() if (unit, action) in timeline.option_index}
    level = timeline.level_bytes(timeline.chosen(known))
    when = np.array(timeline.times)
    # Of a loop it is not known in which of its calls a step is.
    calls = [call for call in structure.calls if call.region and call.unit not in structure.looped]
    ends = [call.backward_time for call in calls if call.backward_time != NEVER]
    times = sorted({*(call.in_time for call in calls), *ends})
    stretch = {time: number for number, time in enumerate(times, start=1)}
    inside = when >= 0  # the update has no time of its own: it comes last
    numbers = np.searchsorted(times, when[inside], side="right")
    needs = np.zeros(len(times) + 2, dtype=np.int64)
    np.maximum.at(needs, numbers, level[inside])
    needs[-1] = level[~inside].max(initial=0)
    for i in np.flatnonzero(needs[:-1] == 0):  # nothing was marked there: what is around it
        needs[i] = max(needs[max(0, i - 1)], needs[i + 1])
    claim = Claim.of([min(most_bytes, int(need) + margin_bytes) for need in needs])
    return Route(claim, {call.key: (stretch[call.in_time], stretch.get(call.backward_time)) for call in calls})


class Stops:
    """Notices the stops of one step.

    Args:
        route: Where they are.
        arrive: Called with the number of the stretch that begins.
    """

    def __init__(self, route: Route, arrive: Callable[[int], None]) -> None:
        self._places = route.places
        self._units = route.units
        self._arrive = arrive
        self._seen: dict[str, int] = {}

    def call(
        self,
        name: str,
        run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call of a unit, with a stop before it and one before its backward."""
        if name not in self._units or not torch.is_grad_enabled():
            return run(args, kwargs)
        occurrence = self._seen.get(name, 0)
        self._seen[name] = occurrence + 1
        # A recomputation is a later call than any of the forward, and so has no place.
        place = self._places.get(call_key(name, occurrence))
        if place is None:
            return run(args, kwargs)
        forward, backward = place
        arrive = self._arrive
        arrive(forward)
        out = run(args, kwargs)
        if backward is not None:
            node = _node(out)
            if node is not None:
                node.register_prehook(partial(_before_backward, arrive, backward))
        return out


def _before_backward(arrive: Callable[[int], None], stretch: int, gradients: Any) -> None:
    """Anything but None would take the gradients' place."""
    arrive(stretch)


def _node(out: Any) -> torch.autograd.graph.Node | None:
    """The first node of what a call returned: its backward begins there."""
    leaves = (out,) if isinstance(out, torch.Tensor) else leaves_in(out)
    return next((t.grad_fn for t in leaves if isinstance(t, torch.Tensor) and t.grad_fn is not None), None)
