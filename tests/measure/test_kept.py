"""A sheltered step tells what a step takes in which everything is kept."""

from __future__ import annotations

import pytest
import torch

from lightning_mimose.measure.kept import KeptStep
from lightning_mimose.measure.regions import region_around
from tests.helpers.models import MODELS, TinyNested, text_batch
from tests.helpers.recording import alive_before_backward, recorded


@pytest.mark.parametrize("name", MODELS)
def test_what_regions_dropped_is_there_at_the_start_of_backward_if_all_is_kept(name: str) -> None:
    """As measured in a step that keeps it, but for what only regions hold: what they are given, copies of buffers."""
    make, batch_of = MODELS[name]
    model, batch = make(), batch_of(4, 32)
    kept = KeptStep(recorded(model, batch))
    truth = alive_before_backward(model, batch, {})
    sheltered = alive_before_backward(model, batch, dict.fromkeys((c.unit for c in kept.regions), "recompute"))
    assert len(kept.regions) > 1
    beside = sum(size for size, _ in kept.inputs.values()) + sum(buffer.nbytes for buffer in model.buffers())
    assert 0 <= int(kept.dropped[kept.began]) - (truth - sheltered) <= beside < 0.01 * truth


def test_the_regions_of_nested_calls_are_the_outermost_that_were_recomputed() -> None:
    """All calls inside are of its family, and none is of two."""
    kept = KeptStep(recorded(TinyNested(), text_batch(2, 16)))
    members = [call for family in kept.family.values() for call in family]
    assert sorted(map(id, members)) == sorted(map(id, kept.trace.calls))
    for region in kept.regions:
        assert region_around(region) is region
        assert all(region_around(call) is region for call in kept.family[id(region)])
    assert any(len(kept.family[id(region)]) > 1 for region in kept.regions)


def test_marks_where_nothing_is_otherwise_are_as_measured() -> None:
    """Before the first region has run, and in the peak of an interval that is given instead."""
    kept = KeptStep(recorded(TinyNested(), text_batch(2, 16)))
    assert kept.reached_in(0) == tuple(map(tuple, kept.tops[0]))
    gradients = kept.trace.marks[kept.began].new_gradient_bytes
    dropped = int(kept.dropped[kept.began])
    assert kept.reached_in(kept.began, {kept.began: ((1000 + gradients,),)}) == ((1000 + dropped,),)
    assert torch.is_grad_enabled()
