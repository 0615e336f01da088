"""Each alternative is the real thing: what it keeps, that it saves, and that it changes no gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_mimose.bench.alternatives import ALTERNATIVES, autosac, chosen
from lightning_mimose.bench.alternatives.checkpointing import chains
from lightning_mimose.bench.runner import Case, NotRun, Runner
from lightning_mimose.bench.work import Work, built_in
from lightning_mimose.errors import MimoseError
from tests.helpers.meter import PeakMeter

CPU = torch.device("cpu")


def peaks(runner: Runner, work: Work) -> list[int]:
    """True peaks of a second epoch."""
    found = []
    for _ in range(2):
        found = []
        for seed, batch in enumerate(work.batches):
            torch.manual_seed(seed)
            with PeakMeter(runner.model, runner.optimizer, batch) as meter:
                runner.step(batch)
            found.append(meter.peak_bytes)
    return found


def case(work: Work, budget_bytes: int = 0) -> Case:
    """For alternatives that are told no budget, or this one."""
    return Case(work, CPU, budget_bytes, max(work.batches, key=_size), 0)


def _size(batch: object) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(batch))


def gradients(runner: Runner) -> list[torch.Tensor | None]:
    """As the last step left them."""
    return [parameter.grad for parameter in runner.model.parameters()]


@pytest.mark.parametrize("work", ["bert-squad", "gpt2", "vit-images", "resnet50-images"])
@pytest.mark.parametrize("name", ["layers", "chen"])
def test_checkpointing_saves_and_keeps_the_gradients(name: str, work: str) -> None:
    this = built_in(work, "tiny", 3)
    make: Callable[[Case], Runner] | None = ALTERNATIVES[name].make
    assert make is not None
    plain, saving = Runner(case(this)), make(case(this))
    assert max(peaks(saving, this)) < max(peaks(plain, this))
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(saving), strict=True) if a is not None)


def test_segments_of_chen_are_as_many_as_they_are_long() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()) for _ in range(9)])
    assert [len(chain) for chain in chains(model)] == [9]
    work = Work("chain", "", lambda: model, (torch.randn(4, 8),), lambda m, batch: m(batch).pow(2).sum())
    make = ALTERNATIVES["chen"].make
    assert make is not None
    runner = make(case(work))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        runner.step(work.batches[0])
    heads = [index for index, block in enumerate(model) if "_hand_on" not in repr(block.forward)]
    assert heads == [0, 3, 6]


def test_blocks_that_hand_on_several_tensors_make_no_segments() -> None:
    work = built_in("t5-translation", "tiny", 2)
    make = ALTERNATIVES["chen"].make
    assert make is not None
    runner = make(case(work))
    with pytest.raises(NotRun, match="more than one tensor"):
        runner.step(work.batches[0])


def test_a_static_plan_is_the_same_for_every_batch() -> None:
    work = built_in("bert-squad", "tiny", 6)
    plain = peaks(Runner(case(work)), work)
    make = ALTERNATIVES["static"].make
    assert make is not None
    runner = make(case(work, int(0.95 * max(plain))))
    assert max(peaks(runner, work)) <= 0.95 * max(plain)
    planned = [record.actions for record in runner.mimose.records if not record.sheltered]  # type: ignore[attr-defined]
    assert planned
    assert set(planned[0].values()) == {"recompute"}
    assert all(actions == planned[0] for actions in planned)


def test_autosac_plans_and_keeps_the_gradients() -> None:
    pytest.importorskip("pulp", reason="AutoSAC's solver")
    pytest.importorskip("pwlf", reason="AutoSAC's curves")
    work = built_in("bert-squad", "tiny", 2)
    plain = Runner(case(work))
    make = ALTERNATIVES["autosac"].make
    assert make is not None
    saving = make(case(work, int(0.75 * max(peaks(plain, work)))))
    assert saving.planning_seconds
    assert any("clock" in note for note in saving.remarks())
    peaks(saving, work)
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(saving), strict=True) if a is not None)


@pytest.mark.parametrize("kept", [(), (1, 2, 3, 4), (2, 3, 4), (0, 1, 5, 6), (3,), (4,), (2,), (7,), (3, 7), (3, 4, 8)])
def test_autosac_may_keep_what_is_written_in_place(kept: tuple[int, ...]) -> None:
    """Dropout on a CPU makes a mask (2, 6), draws it (3, 7) and scales it (4, 8) in place."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 8))
    policy = tuple(int(operation in kept) for operation in range(13))
    inputs = torch.randn(4, 8)

    def gradient() -> torch.Tensor:
        torch.manual_seed(0)
        given = inputs.clone().requires_grad_()
        model(given).square().sum().backward()
        assert given.grad is not None
        return given.grad

    plain = gradient()
    autosac._apply({"": policy}, model)
    assert torch.equal(plain, gradient())


@pytest.mark.slow
@pytest.mark.skip(reason="compiling takes minutes on two cores; `bench --scale tiny --alternatives compile` runs it")
def test_a_ratio_is_found_whose_peak_keeps_the_budget() -> None:
    work = built_in("bert-squad", "tiny", 2)
    make = ALTERNATIVES["compile"].make
    assert make is not None
    budget_bytes = int(0.95 * max(peaks(Runner(case(work)), work)))
    assert max(peaks(make(case(work, budget_bytes)), work)) <= budget_bytes


def test_no_compiler_is_a_reason_not_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    make = ALTERNATIVES["compile"].make
    assert make is not None
    with pytest.raises(NotRun, match="no C\\+\\+ compiler"):
        make(case(built_in("bert-squad", "tiny", 2)))


def test_plain_and_its_control_always_run() -> None:
    assert [each.name for each in chosen(["ours"])] == ["plain", "plain-again", "ours"]
    assert [each.name for each in chosen(["all"])] == list(ALTERNATIVES)
    assert "compile" not in [each.name for each in chosen([])]
    with pytest.raises(MimoseError, match="no alternative magic"):
        chosen(["ours", "magic"])
