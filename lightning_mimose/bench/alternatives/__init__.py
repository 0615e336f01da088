"""What a user could pick instead, each the real thing.

A new one is a function from `Case` to `Runner`, and a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_mimose.bench.alternatives import autosac, checkpointing, compiled, host, ours
from lightning_mimose.bench.runner import Case, Runner
from lightning_mimose.errors import MimoseError


@dataclass(frozen=True)
class Alternative:
    """One way to train.

    Attributes:
        name: What the command line calls it.
        title: What tables call it.
        make: Prepares a model; None for what is simulated on the recorded operations of a plain step.
        budgeted: Whether it is told the budget; otherwise it is the same under every budget, and run once.
        takes_minutes: Whether getting ready takes minutes, so that it only runs when asked for.
    """

    name: str
    title: str
    make: Callable[[Case], Runner] | None
    budgeted: bool
    takes_minutes: bool = False

    @property
    def simulated(self) -> bool:
        """Whether nothing of it runs."""
        return self.make is None


PLAIN, CONTROL = "plain", "plain-again"

ALTERNATIVES = {
    alternative.name: alternative
    for alternative in (
        Alternative(PLAIN, "plain", host.plain, False),
        Alternative(CONTROL, "plain again", host.plain, False),
        Alternative("layers", "every layer", checkpointing.every_layer, False),
        Alternative("chen", "Chen sqrt(n)", checkpointing.chen, False),
        Alternative("static", "static plan", ours.static, True),
        Alternative("paper", "Mimose paper", ours.paper, True),
        Alternative("greedy", "greedy", ours.greedy, True),
        Alternative("compile", "torch.compile", compiled.memory_budget, True, takes_minutes=True),
        Alternative("autosac", "AutoSAC", autosac.autosac, True),
        Alternative("save-on-cpu", "save_on_cpu", host.on_cpu, False),
        Alternative("dtr", "DTR (simulated)", None, True),
        Alternative("recompute", "ours, recompute", ours.recompute, True),
        Alternative("ours", "ours", ours.full, True),
    )
}
"""Every alternative by name, in the order of the table."""


def chosen(names: Sequence[str]) -> list[Alternative]:
    """The alternatives asked for, in the table's order, with the plain run and its control.

    Args:
        names: "all" stands for every one, none for those that are ready within seconds.

    Raises:
        MimoseError: A name that is none.
    """
    if "all" in names:
        return list(ALTERNATIVES.values())
    unknown = [name for name in names if name not in ALTERNATIVES]
    if unknown:
        raise MimoseError(
            f"There is no alternative {', '.join(unknown)}. There are {', '.join(ALTERNATIVES)}, and all."
        )
    quick = (name for name, alternative in ALTERNATIVES.items() if not alternative.takes_minutes)
    wanted = {PLAIN, CONTROL, *(names or quick)}
    return [alternative for name, alternative in ALTERNATIVES.items() if name in wanted]
