"""What a whole step writes is learnt, copied cheaply, and put back."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from lightning_mimose.actions import step_state
from lightning_mimose.actions.step_state import LARGE_BYTES, StepState
from lightning_mimose.errors import RecomputeError
from lightning_mimose.measure.meters.profiler import ProfilerMeter


class Model(nn.Module):
    """State of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("large", torch.zeros(LARGE_BYTES))
        self.register_buffer("constant", torch.ones(8))
        self.seen: list[int] = []
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.late = self.calls
        return self.norm(x)


def snapshot(model: Model) -> tuple[object, ...]:
    """All of it."""
    tensors = {name: value.tolist() for name, value in model.named_buffers() if name != "large"}
    return tensors, list(model.seen), model.calls, getattr(model, "late", None), float(model.large.sum())


def test_the_first_step_can_be_undone_already() -> None:
    """Nothing is known of it: all but large tensors is suspected."""
    model = Model()
    state, before = StepState(lambda: list(model.modules())), snapshot(model)
    copy = state.copy(learning=True)
    model(torch.randn(6, 4))
    assert snapshot(model) != before
    assert copy.put_back()
    assert snapshot(model) == before
    assert not hasattr(model, "late")


def test_later_only_what_was_written_is_copied() -> None:
    model = Model()
    state = StepState(lambda: list(model.modules()))
    copy = state.copy(learning=True)
    model(torch.randn(6, 4))
    copy.learn()
    names = {name for _, name in state.known()}
    assert names == {"running_mean", "running_var", "num_batches_tracked", "seen", "calls", "late"}
    before = snapshot(model)
    copy = state.copy(learning=False)
    model(torch.randn(6, 4))
    assert copy.put_back()
    assert snapshot(model) == before


def test_a_large_tensor_is_told_of_and_then_copied() -> None:
    """On mere suspicion it is not copied; once it was seen to be written, it is."""
    model = Model()
    state = StepState(lambda: list(model.modules()))
    copy = state.copy(learning=True)
    model.large += 1
    assert not copy.put_back()
    copy = state.copy(learning=False)
    model.large += 1
    assert copy.put_back()
    assert float(model.large.sum()) == LARGE_BYTES


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("learning", [True, False])
def test_what_a_step_replaces_is_not_kept_alive(
    learning: bool, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And yet it can be put back: another tensor with the same content; on an accelerator the copy is there, too."""
    if on_device:
        monkeypatch.setattr(step_state, "_content", lambda tensor: tensor.detach().flatten().clone())
    model = Model()
    state = StepState(lambda: list(model.modules()))
    for _ in range(4):
        copy = state.copy(learning=learning)
        before, constant = snapshot(model), model.constant
        old = weakref.ref(model.large.untyped_storage())
        model.large = model.large + 1
        assert old() is None
        copy.learn()
    assert copy.put_back()
    assert snapshot(model) == before
    assert model.constant is constant
    assert type(model.large) is torch.Tensor
    assert "large" in dict(model.named_buffers())


def test_one_tensor_in_two_places_is_one_again() -> None:
    """Although a step replaces it in both, and nothing holds the old one."""
    model = Model()
    state = StepState(lambda: list(model.modules()))
    for learning in (True, False):
        model.large = model.also = torch.full((LARGE_BYTES,), 2.0)
        if learning:  # large tensors are copied only when it is known that they are replaced
            state.copy(learning=True).learn()
        copy = state.copy(learning=learning)
        model.large = model.also = torch.zeros(LARGE_BYTES)
        copy.learn()
    assert copy.put_back()
    assert model.large is model.also
    assert float(model.large.sum()) == 2 * LARGE_BYTES


def test_tensors_that_share_memory_go_on_sharing_it() -> None:
    """`b = a.data` is no view of `a`: once a step has replaced `a`, another tensor with its content would be apart."""
    model = Model()
    model.register_buffer("same", model.constant.data)
    state = StepState(lambda: list(model.modules()))
    for _ in range(step_state.FIRST_STEPS + 2):
        copy = state.copy(learning=False)
        model.constant = model.constant + 1
        copy.learn()
        assert copy.put_back()
        assert model.constant.data_ptr() == model.same.data_ptr()
        assert model.same.tolist() == [1.0] * 8


@pytest.mark.parametrize("resized", ["data", "in place"])
def test_a_tensor_that_grows_is_put_back(resized: str) -> None:
    """A queue that is filled up step by step; also in steps that copy only what they know to be written."""
    model = Model()
    model.register_buffer("queue", torch.zeros(2))
    queue = model.queue
    state = StepState(lambda: list(model.modules()))
    for step in range(step_state.FIRST_STEPS + 2):
        for _ in range(2):  # what is put back the first time is done again
            before = queue.tolist()
            copy = state.copy(learning=False)
            if resized == "data":
                queue.data = torch.cat([queue, torch.full((1,), float(step))])
            else:
                queue.set_(torch.cat([queue, torch.full((1,), float(step))]))
            copy.learn()
            after = queue.tolist()
            assert copy.put_back()
            assert queue.tolist() == before
            assert model.queue is queue
        model.queue.data = torch.tensor(after)


def test_a_tensor_with_attributes_is_put_back_itself() -> None:
    """Another one would be told from it."""
    model = Model()
    model.constant.origin = "here"
    copy = StepState(lambda: list(model.modules())).copy(learning=True)
    model.constant = model.constant + 1
    assert copy.put_back()
    assert model.constant.origin == "here"
    assert model.constant.tolist() == [1.0] * 8


def test_on_the_host_a_copy_is_no_tensor() -> None:
    """What is kept aside is not part of what the step is measured to hold."""
    model = Model()
    state = StepState(lambda: list(model.modules()))
    copy = state.copy(learning=True)
    model(torch.randn(6, 4))
    copy.learn()
    meter = ProfilerMeter()
    meter.start()
    kept = state.copy(learning=False)
    meter.mark()
    assert meter.stop()[-1].level_bytes == 0
    assert kept.put_back()


def test_a_place_in_a_list_is_there_again_though_what_was_in_it_is_gone() -> None:
    """An activation of the step before, which the failed attempt had replaced: the next one puts its own there."""
    model = Model()
    model.seen = [torch.ones(2, requires_grad=True) * 2, 5]
    state = StepState(lambda: list(model.modules()))
    copy = state.copy(learning=True)
    model.seen[0] = torch.zeros(2, requires_grad=True) * 3
    assert copy.put_back()
    assert len(model.seen) == 2
    assert model.seen[1] == 5
    with pytest.raises(RecomputeError, match="gone"):
        model.seen[0] + 1
    again = state.copy(learning=True)  # and so may the next one
    model.seen[0] = torch.zeros(2, requires_grad=True) * 4
    assert again.put_back()
    assert len(model.seen) == 2
