"""Grades: what each action costs in time when every unit takes it, against what plans are charged for it.

Every unit of a workload is forced into one action at a time; its steps and plain ones run in turns (`frontier.timed`).
Plans compare actions, so both figures are also shown as shares of what recomputing every unit costs; the measured one
in processor time, which a busy machine disturbs less than the clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench.frontier import Runner, timed
from bench.large import LARGE
from bench.models import WORKLOADS, Workload
from lightning_mimose import Mimose
from lightning_mimose.predict.timeline import Timeline

ACTIONS = ("lean", "lean+masks", "lean+attention", "lean+expansions", "lean+products", "recompute", "recompute+lean")


class Forced(Runner):
    """A copy of the model all of whose units take one action; where a unit has not got it, its parts do."""

    def __init__(self, workload: Workload, action: str) -> None:
        super().__init__(workload, None, None)
        self.action = action
        self.charged = 0.0
        self.mimose = Mimose(self.model, budget=1.0, optimizer=self.optimizer, loss_fn=self._loss, planner=self._forced)

    def _forced(self, timeline: Timeline, budget_bytes: int) -> dict[str, str]:
        having = {option.unit for option in timeline.options if option.action == self.action}
        outermost = {unit for unit in having if not having & set(_around(timeline, unit))}
        charged = [o.added_seconds for o in timeline.options if o.unit in outermost and o.action == self.action]
        self.charged = max(self.charged, sum(charged))
        return {timeline.units[unit]: self.action for unit in outermost}


def _around(timeline: Timeline, unit: int) -> Iterator[int]:
    while (unit := timeline.parents[unit]) >= 0:
        yield unit


def rows(
    names: Sequence[str], steps: int, *, repeats: int, actions: Sequence[str] = ACTIONS, seed: int = 11
) -> Iterator[dict[str, Any]]:
    """One row per workload and action."""
    for name in names:
        workload = LARGE.get(name) or WORKLOADS[name]
        batches = workload.batches(steps, seed=seed, order="longest first")
        forced = {action: Forced(workload, action) for action in actions}
        everyone = {"control": Runner(workload, None, None), **forced}
        for runner in everyone.values():
            for index, batch in enumerate(batches * 3):
                runner.step(batch, index)
        added = timed(everyone, batches, repeats)
        recompute = forced["recompute"].charged if "recompute" in forced else 0.0
        recomputing = added["recompute"].processor_time if "recompute" in added else 0.0
        for action in ("control", *actions):
            charged = forced[action].charged if action in forced else 0.0
            yield {
                "model": name,
                "action": action,
                **added[action].columns(),
                "of recomputing, measured": _share(added[action].processor_time, recomputing),
                "of recomputing, charged": _share(charged, recompute),
            }


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if part and whole else None
