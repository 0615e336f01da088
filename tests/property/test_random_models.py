"""Random models, random sizes, random budgets: held, exact, refused rightly, monotone, and gone without a trace."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import event, example, given, note, reject, settings
from hypothesis import strategies as st
from torch import nn

from lightning_mimose import BudgetInfeasibleError, Mimose
from lightning_mimose.errors import MimoseError
from lightning_mimose.sizes import round_up_value
from tests.helpers.fits import check_kept, condition, same
from tests.helpers.loops import plain_step
from tests.helpers.meter import PeakMeter
from tests.helpers.random_models import Node, Training, loss_of, nodes, random_batch, trainings

PLENTY = "1GB"
EXAMPLES = settings.default.max_examples
FEWER = settings(max_examples=EXAMPLES // (5 if EXAMPLES > 50 else 10))

SHARED = Training(
    (
        Node("keywords", (Node("mlp"), Node("again"), Node("mlp")), which=1),
        *(Node("mlp", which=3), Node("tuples", (Node("mlp"),)), Node("dicts", (Node("mlp"),), which=1)),
        Node("dicts", (Node("inplace"), Node("again"), Node("mlp"))),
    ),
    tuple((16, tokens) for tokens in (33, 32, 37, 35, 34, 39, 33, 34, 32)),
    share=0.0,
    seed=1,
)
"""A module inside several units: what a unit and another one that calls it free must not count twice."""
TRIED = Training(
    (Node("mlp", which=2),),
    tuple((16, tokens) for tokens in (32, 33, 34, 35, 36, 37, 32, 32)),
    result="object",
    share=-0.3,
)
"""A ReLU after a wide layer: trying its recipes beside a sheltered step takes as much again as the step."""
RETURNED = Training((Node("layernorm"),), TRIED.sizes, result="object", share=-0.3)
"""A norm that saves nothing a recipe could make, but whose result is made again to try one."""


@dataclass
class Ran:
    """What a training left: per step its loss, the state after it, and its true peak."""

    losses: list[torch.Tensor] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    residents: list[int] = field(default_factory=list)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of weights and buffers."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def plain(training: Training) -> Ran:
    """The training without a budget."""
    model, ran = training.model(), Ran()
    optimizer = training.optimizer(model)
    ran.states.append(state_of(model))
    for batch in training.batches():
        with PeakMeter(model, optimizer, batch) as meter:
            loss = plain_step(model, optimizer, batch, lambda model, batch: loss_of(model(**batch)))
        ran.losses.append(loss)
        ran.states.append(state_of(model))
        ran.peaks.append(meter.peak_bytes)
        ran.residents.append(meter.resident_bytes)
    return ran


def budgeted(
    training: Training, budget: Any, wanted: Ran, metered: bool = True
) -> tuple[Mimose, BudgetInfeasibleError | None, int]:
    """The training under a budget, compared step by step.

    Args:
        training: What to train.
        budget: As `Mimose` takes it.
        wanted: The plain training.
        metered: Whether the independent meter watches; without it Mimose measures by the profiler itself.

    Returns:
        The closed Mimose, the refusal (None if the training went through), and the steps that were made.
    """
    model = training.model()
    optimizer, before = training.optimizer(model), condition(model)
    steps = 0
    try:
        mimose = Mimose(model, budget=budget, optimizer=optimizer)
    except BudgetInfeasibleError as error:
        assert condition(model) == before
        raise error
    refused = None
    with mimose:
        for step, batch in enumerate(training.batches()):
            meter = PeakMeter(model, optimizer, batch)
            try:
                with meter if metered else nullcontext():
                    loss = mimose.step(batch)
            except BudgetInfeasibleError as error:
                refused = error
                break
            assert torch.equal(loss, wanted.losses[step]), f"loss of step {step}"
            assert meter.peak_bytes <= mimose.budget_bytes, f"step {step}: {mimose.records[-1]}"
            steps += 1
    if refused is None:
        assert same(state_of(model), wanted.states[steps])
    else:  # no update was made; a forward that was refused only after it ran has written BatchNorm's statistics
        assert all(torch.equal(value, wanted.states[steps][name]) for name, value in model.named_parameters())
    assert condition(model) == before
    assert len(mimose.records) == steps
    return mimose, refused, steps


def by_size(training: Training) -> dict[str, torch.Tensor]:
    """The batch that needs most: the largest in tokens in all, the longer one first."""
    return max(training.batches(), key=lambda batch: (batch["y"].numel(), batch["y"].shape[1]))


@pytest.mark.conformance("How people train", "random module trees, batch sizes and budgets", "works")
@example(SHARED)
@example(TRIED)
@example(RETURNED)
@given(trainings())
def test_held_and_exact_or_refused_rightly(training: Training) -> None:
    """Under any budget each step is the plain one within the budget, or is refused with a budget that works."""
    wanted = plain(training)
    free, refused, steps = budgeted(training, PLENTY, wanted, metered=False)
    assert refused is None
    assert steps == len(training.sizes)
    high = max(wanted.peaks)
    try:
        low = free.smallest_feasible_bytes(by_size(training))
    except MimoseError:  # sizes too few to predict from
        low = max(wanted.residents)
    budget = int(low + training.share * (high - low)) if low < high else int(low * (1 + training.share / 4))
    budget = max(budget, 1)
    note(f"budget {budget:,} between {low:,} and {high:,}")
    made = -1
    for attempt in range(len(training.sizes) + 2):  # refused at once by its update, then each time by a later batch
        try:
            mimose, refused, steps = budgeted(training, budget, wanted)
        except BudgetInfeasibleError as error:
            assert attempt == 0, "refused at once under a budget that was named as enough"
            mimose, refused, steps = free, error, 0
        if refused is None:
            break
        assert refused.budget_bytes == budget
        assert refused.smallest_feasible_bytes is not None
        assert refused.smallest_feasible_bytes > budget
        assert steps > made or attempt == 1, "the same batch was refused under the budget that was named for it"
        note(f"refused in step {steps}: {refused}")
        budget, made = refused.smallest_feasible_bytes, steps
    assert refused is None
    planned = [record for record in mimose.records if not record.sheltered]
    event("planned" if planned else "never planned")
    if any(record.recomputed_units for record in planned):
        event("planned and recomputed")
    if any(record.lean_units for record in planned):
        event("planned and lean")
    if made >= 0:
        event("refused first")


def learnt(training: Training) -> Mimose:
    """What is known after the training under a budget that is no limit."""
    model = training.model()
    with Mimose(model, budget=PLENTY, optimizer=training.optimizer(model)) as mimose:
        for batch in training.batches():
            mimose.step(batch)
    return mimose


def allowed(mimose: Mimose, batch: dict[str, torch.Tensor], budget: int) -> bool:
    """Whether there is a plan for a batch under this budget."""
    try:
        mimose.plan(batch, budget)
    except BudgetInfeasibleError:
        return False
    return True


@pytest.mark.conformance("How people train", "more budget is never slower", "works")
@FEWER
@given(trainings(), st.lists(st.floats(-0.5, 1.2) | st.floats(0, 0.02), min_size=4, max_size=10))
def test_more_budget_is_never_slower(training: Training, shares: list[float]) -> None:
    """Plans of one size: each within its budget, never slower than that of a smaller one, none below the least."""
    mimose, batch = learnt(training), by_size(training)
    try:
        free = mimose.plan(batch)
    except MimoseError:
        reject()  # nothing is known about it
    check_kept(mimose, batch)
    sure = mimose.smallest_feasible_bytes(batch)
    assert mimose.plan(batch, sure).predicted_peak_bytes <= sure
    span = max(free.predicted_peak_bytes - sure, sure // 4)
    slowest, infeasible = float("inf"), 0
    least, low = sure, sure // 2
    while least - low > sure // 4096:  # there, what is kept free for errors no longer can be
        middle = (low + least) // 2
        low, least = (low, middle) if allowed(mimose, batch, middle) else (middle, least)
    budgets = {int(sure + share * span) for share in shares} | {int(least * (1 + more / 2000)) for more in range(7)}
    for budget in sorted(budgets):
        error = None
        try:
            plan = mimose.plan(batch, budget)
        except BudgetInfeasibleError as refused:
            error = refused
        if error is not None:
            assert slowest == float("inf"), f"{budget:,} is refused, a smaller budget was not"
            assert error.smallest_feasible_bytes is not None
            assert error.smallest_feasible_bytes > budget
            infeasible += 1
            continue
        assert plan.predicted_peak_bytes <= budget
        assert plan.added_seconds <= slowest, f"slower with {budget:,}: {plan}"
        slowest = plan.added_seconds
    event(f"refused: {infeasible > 0}, recomputed or rebuilt: {slowest > 0}")


@pytest.mark.conformance("How people train", "sizes of nearly the same length share a plan", "works")
@FEWER
@given(
    st.lists(nodes(), min_size=2, max_size=3),
    st.lists(st.integers(2049, 5000), min_size=5, max_size=5, unique=True),
    st.integers(2049, 5000),
    st.floats(0.05, 0.95),
)
def test_a_plan_for_the_rounded_size_fits_the_actual_one(
    trees: list[Node], lengths: list[int], tokens: int, share: float
) -> None:
    """Above 2048 sizes are rounded up: every size that shares a plan stays within the budget, by the meter."""
    rounded = round_up_value(tokens)
    sizes = [(1, n) for n in [*lengths, rounded]]
    training = Training(tuple(trees), tuple(sizes))
    free = learnt(training)
    try:
        low, high = free.smallest_feasible_bytes({"x:1": rounded}), free.plan({"x:1": rounded}).predicted_peak_bytes
    except MimoseError:
        reject()
    budget = int(low + share * (high - low)) if low < high else high
    model = training.model()
    optimizer = training.optimizer(model)
    with Mimose(model, budget=budget, optimizer=optimizer) as mimose:
        try:
            for batch in training.batches():
                mimose.step(batch)
        except BudgetInfeasibleError:  # of a longer one
            reject()
        of_rounded = mimose.plan({"x:1": rounded})
        sharing = [n for n in range(rounded - 8, rounded + 1) if round_up_value(n) == rounded]
        for index, n in enumerate([*sharing, sharing[0]]):
            batch = random_batch(1, n, n)
            with PeakMeter(model, optimizer, batch) as meter:
                mimose.step(batch)
            record = mimose.records[-1]
            assert meter.peak_bytes <= budget
            if not record.sheltered and index > len(sharing) - 1:
                event("planned")
                assert record.predicted_peak_bytes is not None
                assert record.predicted_peak_bytes <= of_rounded.predicted_peak_bytes
