"""What a budget would cost, before training: answers for some sizes of a model that small steps were learnt from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_mimose.budget import device_memory, format_bytes, parse_budget
from lightning_mimose.errors import BudgetInfeasibleError
from lightning_mimose.explain.learn import Knowledge, Size
from lightning_mimose.menu import LEAN, OFFLOAD, RECOMPUTE, SPLIT
from lightning_mimose.plan import Plan
from lightning_mimose.predict.timeline import Timeline
from lightning_mimose.report.text import Table

_STEP_OF_FORWARD = 3.0
"""Operations of a step in those of its forward: a backward takes two for each."""


_KINDS = {LEAN: "lean", RECOMPUTE: "recomputed", SPLIT: "split", OFFLOAD: "offloaded"}
"""What the names of actions begin with, as it is written above a column."""


@dataclass(frozen=True)
class Cost:
    """What one budget costs at one size.

    Attributes:
        budget: As it was asked for.
        budget_bytes: In bytes.
        fits: Whether any plan keeps the step inside it.
        fits_untrained: Whether it is kept even by a run's first batch, of which nothing is known yet.
        recomputed_units: Units that the plan recomputes.
        lean_units: Units that keep recipes instead of some of their tensors.
        split_units: Units that run a part of the batch at a time.
        offloaded_units: Units whose saved tensors go to host memory.
        predicted_peak_bytes: Peak under the plan; of the most saving one where nothing fits.
        added_share: What recomputing and rebuilding add, as a share of the step's operations.
        added_seconds: The same share of the step's estimated time.
        actions: Unit -> action of the units that do something else than keep.
    """

    budget: str
    budget_bytes: int
    fits: bool
    fits_untrained: bool
    lean_units: int
    recomputed_units: int
    split_units: int
    offloaded_units: int
    predicted_peak_bytes: int
    added_share: float
    added_seconds: float
    actions: dict[str, str]


@dataclass(frozen=True)
class Answer:
    """What is known about one size.

    Attributes:
        size: The dimensions asked for.
        unbudgeted_peak_bytes: Peak when everything is kept.
        smallest_feasible_bytes: The least budget that is sure to do, from the first batch on.
        step_seconds: Estimated time of a plain step: a measured smaller one, scaled by operations.
        expected_error: Expected error of the peaks, as a share of the activations' bytes.
        trusted: Whether a run would plan on this prediction; otherwise it is a guess from too little.
        smallest: What the smallest budget costs.
        budgets: What each budget asked about costs.
    """

    size: Size
    unbudgeted_peak_bytes: int
    smallest_feasible_bytes: int
    step_seconds: float
    expected_error: float
    trusted: bool
    smallest: Cost
    budgets: tuple[Cost, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def explain(knowledge: Knowledge, asked: Sequence[Size], budgets: Sequence[str]) -> list[Answer]:
    """Answer for every size.

    Args:
        knowledge: What `learn` found out about these sizes.
        asked: The sizes, in the same order.
        budgets: Budgets as users write them; a number of bytes may exceed this device, it may be meant for another.

    Raises:
        BudgetError: A budget that cannot be read.
    """
    amounts = [(budget, _budget_bytes(budget, knowledge)) for budget in budgets]
    advisor = knowledge.advisor
    here = _full_seconds(advisor.timeline(knowledge.reference)[0])
    answers = []
    for size, batch in zip(asked, knowledge.batches, strict=True):
        timeline, prediction = advisor.timeline(batch)
        full = _full_seconds(timeline)
        step_seconds = knowledge.reference_seconds * (full / here if here else 1.0)
        least = advisor.sure_bytes(timeline)
        ask = _Asker(knowledge, batch, least, 1.0 / (_STEP_OF_FORWARD * full) if full else 0.0, step_seconds)
        answers.append(
            Answer(
                size=dict(size),
                unbudgeted_peak_bytes=timeline.peak_bytes({}),
                smallest_feasible_bytes=least,
                step_seconds=step_seconds,
                expected_error=float(prediction.error),
                trusted=bool(prediction.trusted),
                smallest=ask.cost("smallest", least),
                budgets=tuple(ask.cost(budget, amount) for budget, amount in amounts),
            )
        )
    return answers


@dataclass(frozen=True)
class _Asker:
    """Asks for plans of one size."""

    knowledge: Knowledge
    batch: Any
    least: int
    share_per_second: float
    step_seconds: float

    def cost(self, budget: str, amount: int) -> Cost:
        advisor = self.knowledge.advisor
        timeline, prediction = advisor.timeline(self.batch)
        plan: Plan | None
        if prediction.trusted and not advisor.beyond(prediction):
            try:
                plan = advisor.plan(self.batch, amount)
            except BudgetInfeasibleError:
                plan = None
        else:
            # The margin a run would keep is as uncertain as the prediction, and would hide what is expected.
            plan = advisor.planner.scheduler.plan(advisor.menu(timeline), amount)
            if plan is None and amount >= self.least:
                plan = advisor.shelter_plan(timeline)
        if plan is None:
            return Cost(budget, amount, False, False, 0, 0, 0, 0, self.least, 0.0, 0.0, {})
        actions = dict(plan)
        lean, recomputed, split, offloaded = [
            sum(action.startswith(kind) for action in actions.values()) for kind in _KINDS
        ]
        share = plan.added_seconds * self.share_per_second
        return Cost(
            budget,
            amount,
            True,
            amount >= self.least,
            lean,
            recomputed,
            split,
            offloaded,
            plan.predicted_peak_bytes,
            share,
            share * self.step_seconds,
            actions,
        )


def tables(model: str, knowledge: Knowledge, answers: Sequence[Answer]) -> Iterator[Table]:
    """The answers as tables to read."""
    count = len(knowledge.units)
    yield Table(
        f"{model}: {count} units, learnt from {len(knowledge.sizes)} small steps on {knowledge.device}",
        (),
    )
    for answer in answers:
        words = ", ".join(f"{name}={value:,}" for name, value in answer.size.items())
        costs = [*answer.budgets, answer.smallest]
        kinds = [kind for kind in _KINDS if kind in (RECOMPUTE, LEAN) or any(_units(cost)[kind] for cost in costs)]
        rows = (
            ("none", *("" for _ in kinds), "", format_bytes(answer.unbudgeted_peak_bytes)),
            *(_row(cost, count, kinds) for cost in answer.budgets),
            (f"{format_bytes(answer.smallest_feasible_bytes)} (smallest)", *_row(answer.smallest, count, kinds)[1:]),
        )
        notes = [f"A plain step takes about {_seconds(answer.step_seconds)}."]
        if not answer.trusted:
            notes.append("Too little is known to be sure of these numbers: treat them as a guess.")
        if any(cost.fits and not cost.fits_untrained for cost in answer.budgets):
            notes.append(
                f"* once smaller batches have been seen; a run that starts with this one needs "
                f"{format_bytes(answer.smallest_feasible_bytes)}."
            )
        header = ("budget", *(_KINDS[kind] for kind in kinds), "added time", "predicted peak")
        yield Table(words, rows, header, " ".join(notes))


def _units(cost: Cost) -> dict[str, int]:
    counts = (cost.lean_units, cost.recomputed_units, cost.split_units, cost.offloaded_units)
    return dict(zip(_KINDS, counts, strict=True))


def _row(cost: Cost, units: int, kinds: Sequence[str]) -> tuple[str, ...]:
    name = format_bytes(cost.budget_bytes)
    rest = ("",) * (len(kinds) - 1)
    if not cost.fits:
        return name, "does not fit", *rest, "", f"{format_bytes(cost.predicted_peak_bytes)} at least"
    mark = "" if cost.fits_untrained else " *"
    peak = format_bytes(cost.predicted_peak_bytes)
    if not cost.actions:
        return name, "fits as is" + mark, *rest, "", peak
    added = f"{100 * cost.added_share:.1f} % ({_seconds(cost.added_seconds)})"
    counts = [_units(cost)[kind] for kind in kinds]
    first = next((i for i, count in enumerate(counts) if count), 0)
    told = [f"{count} of {units}{mark if i == first else ''}" if count else "" for i, count in enumerate(counts)]
    return name, *told, added, peak


def _full_seconds(timeline: Timeline) -> float:
    """What recomputing every unit would take: once the forward of all that can be planned."""
    options = timeline.only(lambda _, action: action == RECOMPUTE).options
    planned = {option.unit for option in options}

    def inside(unit: int) -> bool:
        parent = timeline.parents[unit]
        return parent >= 0 and (parent in planned or inside(parent))

    return sum(option.added_seconds for option in options if not inside(option.unit))


def _budget_bytes(budget: str, knowledge: Knowledge) -> int:
    parsed = parse_budget(budget)
    return int(parsed.amount) if parsed.kind == "bytes" else parsed.resolve(device_memory(knowledge.device))


def _seconds(seconds: float) -> str:
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{1e3 * seconds:.0f} ms"
        if seconds >= 0.01
        else f"{1e3 * seconds:.1f} ms"
    )
