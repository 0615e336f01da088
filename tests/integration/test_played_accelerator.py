"""Whole trainings with the counters of a caching allocator, which is played on the CPU: see `tests.helpers.allocator`.

What holds on a real accelerator is in `tests/gpu`; here every step is held against what that allocator saw.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from lightning_mimose import Mimose, UnsupportedError
from lightning_mimose.engine.lessons import TIMED_STEPS
from lightning_mimose.measure import counters
from lightning_mimose.predict.misses import MISSED_SHARE
from lightning_mimose.predict.pace import operations_of
from lightning_mimose.report.record import StepRecord
from lightning_mimose.sizes import BatchSize
from tests.helpers.allocator import play
from tests.helpers.fits import same
from tests.helpers.hub import HUB
from tests.helpers.models import TinyText, text_batch

MODELS = {"text": (partial(TinyText, layers=6, hidden=64), text_batch), **HUB}
LENGTHS = (64, 48, 96, 32, 80, 128, 56, 112, 40, 72, 100, 60, 120, 88, 104, 44)
BESIDES_BYTES = 200_000


class Seen(NamedTuple):
    """What the allocator saw of one step, in bytes: at its start, at most, and what it had from the device."""

    resident_bytes: int
    peak_bytes: int
    reserved_bytes: int


class Training:
    """One of them, with something else on the device that nobody told the package of (another model, say).

    Args:
        monkeypatch: Has the package take the CPU for an accelerator.
        name: Of the model.
        budget: In bytes, which the device has no more than; None for a plain training on one with enough.
        fragments: Whether the allocator does.
        scratch_bytes: What its kernels take while they run.
        rounds: How often it goes over its batches.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        name: str = "text",
        budget: int | None = None,
        *,
        fragments: bool = True,
        scratch_bytes: Callable[[Any, Any], int] | None = None,
        rounds: int = 1,
    ) -> None:
        self.seen: list[Seen] = []
        self.records: list[StepRecord] = []
        accelerator = play(monkeypatch, fragments=fragments)
        if scratch_bytes is not None:
            accelerator.scratch_bytes = scratch_bytes
        allocator = accelerator.allocator
        allocator.limit_bytes = budget
        with accelerator:
            torch.manual_seed(0)
            make, batch_of = MODELS[name]
            model = make()
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            besides = torch.zeros(BESIDES_BYTES, dtype=torch.uint8)
            mimose = None if budget is None else Mimose(model, budget=budget, optimizer=optimizer)
            step = _plain_step(model, optimizer) if mimose is None else mimose.step
            torch.manual_seed(1)
            for number, length in enumerate(LENGTHS * rounds):
                batch = batch_of(8, length, number)
                resident = allocator.read().requested_bytes
                allocator.watch()
                step(batch)
                self.seen.append(Seen(resident, allocator.highest_bytes, allocator.most_reserved_bytes))
            if mimose is not None:
                self.records = list(mimose.records)
                mimose.close()
            del besides
        self.weights = {name: value.clone() for name, value in model.state_dict().items()}


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[dict[str, torch.Tensor]], None]:
    def step(batch: dict[str, torch.Tensor]) -> None:
        loss = model(**batch).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def budget_at(share: float, plain: Training) -> int:
    """A budget with so much of what the plain training takes besides what is resident."""
    resident = max(seen.resident_bytes for seen in plain.seen)
    return int(resident + share * (max(seen.peak_bytes for seen in plain.seen) - resident))


@pytest.mark.parametrize("fragments", [False, True], ids=["expandable", "segments"])
@pytest.mark.parametrize("share", [0.8, 0.5])
def test_the_budget_bounds_what_the_allocator_reserves(
    share: float, fragments: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has no more than the budget; what else lies on it counts, and what falls between blocks.

    The segments are as coarse for this model as 20 MiB are for one that takes a gigabyte, so that may be a fifth of the
    budget. It is learnt from what was held, at worst by a step or two that fail and run again.
    """
    plain = Training(monkeypatch)
    budget = budget_at(share, plain)
    ours = Training(monkeypatch, budget=budget, fragments=fragments)
    assert same(plain.weights, ours.weights)
    assert max(seen.reserved_bytes for seen in ours.seen) <= budget
    pairs = list(zip(ours.seen, ours.records, strict=True))
    assert sum(record.retried for record in ours.records) <= (2 if fragments else 0)
    planned = [(seen, record) for seen, record in pairs if not record.sheltered]
    assert len(planned) >= len(LENGTHS) // 2
    assert any(record.actions for _, record in planned if not record.retried)
    for seen, record in planned:
        if record.retried:  # without the old gradients, and after an attempt that the allocator has seen, too
            continue
        assert record.predicted_peak_bytes == pytest.approx(seen.peak_bytes, rel=0.002)
        assert record.measured_peak_bytes == seen.peak_bytes
        assert record.reserved_peak_bytes == seen.reserved_bytes


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_peaks_are_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within half a per cent; where an input may live longer than was seen so far, a little too high."""
    plain = Training(monkeypatch, name)
    ours = Training(monkeypatch, name, budget_at(0.5, plain), fragments=False)
    assert same(plain.weights, ours.weights)
    pairs = zip(ours.seen, ours.records, strict=True)
    planned = [(seen, record) for seen, record in pairs if not record.sheltered]
    assert len(planned) >= len(LENGTHS) // 4
    assert any(record.actions for _, record in planned)
    for seen, record in planned:
        assert record.predicted_peak_bytes is not None
        assert -0.005 <= record.predicted_peak_bytes / seen.peak_bytes - 1 <= 0.01


def test_an_allocator_that_counts_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was plugged in, say: before anything is attached, and in words."""
    play(monkeypatch)
    monkeypatch.setattr(counters, "can_be_read", lambda device: False)
    model = TinyText()
    with pytest.raises(UnsupportedError, match="no memory counters"):
        Mimose(model, budget="1GB", optimizer=torch.optim.SGD(model.parameters(), 1e-3))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("accumulates", [False, True], ids=["one batch", "two batches"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, CheckpointError], ids=lambda error: error.__name__)
def test_a_step_that_runs_again_is_measured_as_it_is(
    error: type[Exception], accumulates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left of the attempt that failed in backward, but for gradients that it had added to."""
    accelerator = play(monkeypatch, fragments=False)
    allocator, calls, fails = accelerator.allocator, [0], [False]

    def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        calls[0] += 1
        if calls[0] > 1:
            allocator.watch()
        return model(**batch).loss

    def fail(_: torch.Tensor) -> None:
        if fails.pop():
            fails.append(False)
            raise error("as if")
        fails.append(False)

    with accelerator:
        model = TinyText(layers=6, hidden=64)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        mimose = Mimose(model, budget=18_000_000, optimizer=optimizer, loss_fn=loss_of, actions=["recompute"])
        next(model.layers[0].parameters()).register_post_accumulate_grad_hook(fail)
        for number in range(20):
            calls[:], fails[:] = [0], [number == 17]
            mimose.step(text_batch(8, 100 + 4 * (number % 3), number), update=not accumulates or number % 2 == 1)
            if number == 17:
                retried, highest = mimose.records[-1], allocator.highest_bytes
        assert not mimose.records[-1].sheltered
        mimose.close()
    assert retried.retried
    assert retried.measured_peak_bytes == highest


def test_planned_steps_are_timed_and_planned_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that takes a picosecond for each operation, whatever measuring takes beside it."""
    batches = [text_batch(8, length, number) for number, length in enumerate(2 * LENGTHS)]
    with play(monkeypatch):
        model = TinyText(layers=6, hidden=64)
        mimose = Mimose(model, budget="1GB", optimizer=torch.optim.SGD(model.parameters(), 1e-3))
        advisor, timed = mimose._advisor, list[dict[str, int]]()
        pace_of = advisor.learn_pace

        def learn(size: BatchSize, actions: dict[str, str], seconds: float, host_seconds: float) -> None:
            timed.append(dict(size.dims))
            assert seconds > 0
            assert host_seconds > 0
            prediction = advisor.estimator.predict(dict(size.dims))
            assert prediction is not None
            counted = operations_of(prediction.structure, prediction.values, actions)
            assert counted is not None
            pace_of(size, actions, 1e-12 * counted)

        monkeypatch.setattr(advisor, "learn_pace", learn)
        for batch in batches:
            mimose.step(batch)
        planned = [record for record in mimose.records if not record.sheltered]
        assert len(timed) == TIMED_STEPS < len(planned)
        assert advisor.estimator.pace.seconds_per_operation == pytest.approx(1e-12)
        assert advisor.estimator.seconds_per_operation() == pytest.approx(1e-12)
        advisor.forget()
        assert advisor.estimator.pace.seconds_per_operation == pytest.approx(1e-12)
        mimose.close()


def by_remainder(func: Any, args: Any) -> int:
    """Kernels that work on the rows of 64 take scratch memory that goes by how these can be shared out."""
    rows = args[0].numel() // 64 if args and isinstance(args[0], torch.Tensor) and args[0].dim() > 1 else 0
    return 150_000 * (rows % 7)


def test_kernels_scratch_memory_is_no_reason_to_learn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A per cent or two of a small budget: it is kept free, and sizes are measured no more often than without it."""
    plain = Training(monkeypatch, rounds=3)
    budget = budget_at(0.6, plain)
    ours = Training(monkeypatch, budget=budget, fragments=False, scratch_bytes=by_remainder, rounds=3)
    assert same(plain.weights, ours.weights)
    assert max(seen.reserved_bytes for seen in ours.seen) <= budget
    planned = [record for record in ours.records if not (record.sheltered or record.retried)]
    missed = [(r.measured_peak_bytes or 0) / (r.predicted_peak_bytes or 1) - 1 for r in planned]
    assert max(missed) > MISSED_SHARE, "there is something to overlook"
    assert not any(record.sheltered for record in ours.records[len(LENGTHS) :])
