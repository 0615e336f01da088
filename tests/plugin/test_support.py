"""What the plugin reads of Lightning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_mimose.plugin.support import (
    FREED_IN_A_ROW,
    GradientHabits,
    TrainingStepHook,
    bucket_bytes,
    is_first_of_accumulation,
    precision_of,
    settle_buckets,
    trained_parameters,
)
from tests.helpers.models import Task, TinyText


class Strategy:
    """A strategy as far as the hook knows it."""

    precision_plugin = MixedPrecision("bf16-mixed", "cpu")

    def training_step(self, value: int) -> int:
        """Double it."""
        return 2 * value


def test_the_training_step_hook_leaves_no_trace() -> None:
    """Neither on the class nor on the instance."""
    strategy, seen = Strategy(), list[int]()
    hook = TrainingStepHook(strategy, lambda: seen.append(1))
    assert (strategy.training_step(4), seen) == (8, [1])
    hook.remove()
    assert vars(strategy) == {}


def test_the_training_step_hook_gives_back_what_was_there() -> None:
    """Somebody else's replacement is not lost."""
    strategy = Strategy()
    own = strategy.training_step = lambda value: 3 * value  # type: ignore[method-assign]
    hook = TrainingStepHook(strategy, lambda: None)
    assert strategy.training_step(4) == 12
    hook.remove()
    assert strategy.training_step is own


def test_buckets_count_trained_parameters_only() -> None:
    """And only where a reducer holds them."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].requires_grad_(False)
    wrapped = SimpleNamespace(model=SimpleNamespace(reducer=object()))
    assert bucket_bytes(wrapped, model) == 64
    assert bucket_bytes(SimpleNamespace(model=model), model) == 0


def test_precision_is_named() -> None:
    """By plugin and setting."""
    assert precision_of(Strategy()) == "MixedPrecision bf16-mixed"


def test_freezing_is_seen() -> None:
    """And unfreezing is the way back."""
    model = TinyText()
    before = trained_parameters(model)
    model.head.requires_grad_(False)
    assert trained_parameters(model) != before
    model.head.requires_grad_(True)
    assert trained_parameters(model) == before


def zeroes(task: Any, batch_idx: int, accumulate: int = 1) -> bool:
    """Ask once."""
    trainer = SimpleNamespace(accumulate_grad_batches=accumulate)
    return GradientHabits(task).zeroes(task, is_first_of_accumulation(trainer, task, batch_idx))


def test_gradients_are_freed_on_the_first_batch_of_an_accumulation() -> None:
    """And never in manual optimization, where nobody knows."""
    task = Task(TinyText())
    assert [zeroes(task, i, 3) for i in range(4)] == [True, False, False, True]
    task.automatic_optimization = False
    assert not zeroes(task, 0)


class Own(Task):
    """Overrides the hook."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """However."""


def test_an_overridden_hook_is_watched() -> None:
    """Its gradients are taken to stay until they are seen to go."""
    task = Own(nn.Linear(2, 2))
    habits = GradientHabits(task)
    assert not habits.zeroes(task, True)
    habits.look(task)  # nothing was there that could have been freed
    task.model(torch.ones(1, 2)).sum().backward()
    assert not habits.zeroes(task, True)
    task.zero_grad()
    habits.look(task)
    assert habits.zeroes(task, True)


def test_a_hook_may_change_its_mind() -> None:
    """Gradients that stay are believed at once, those that go after several batches in a row; and back again."""
    task = Own(nn.Linear(2, 2))
    habits, seen = GradientHabits(task), list[bool]()
    for stays in [False] * 2 + [True] + [False] * (FREED_IN_A_ROW + 1) + [True, False]:
        task.model(torch.ones(1, 2)).sum().backward()
        seen.append(habits.zeroes(task, True))
        task.zero_grad(set_to_none=not stays)
        habits.look(task)
    assert seen == [False, True, True] + [False] * FREED_IN_A_ROW + [True, True, False]
    assert not habits.zeroes(task, False)


def test_buckets_are_settled_where_there_are_any() -> None:
    """Of any other strategy nothing is asked."""
    calls = list[int]()
    settle_buckets(
        SimpleNamespace(model=SimpleNamespace(reducer=SimpleNamespace(_rebuild_buckets=lambda: calls.append(1))))
    )
    settle_buckets(SimpleNamespace(model=nn.Linear(2, 2)))
    settle_buckets(SimpleNamespace())
    assert calls == [1]
