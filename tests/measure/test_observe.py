"""From a trace to columns: what recomputing each unit frees, and what only recomputed units hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from lightning_mimose.measure.call import RNG_STATE_BYTES
from lightning_mimose.measure.observe import Observation, observe
from lightning_mimose.predict.assemble import assemble
from lightning_mimose.predict.rates import Rates
from lightning_mimose.predict.shapes import Resident
from tests.helpers.hub import HUB
from tests.helpers.models import TinyNested, TinyText, TinyVision, image_batch, text_batch
from tests.helpers.recording import alive_before_backward, recorded


def freed(seen: Observation, unit: str) -> int:
    """Bytes that recomputing a unit frees between forward and backward, what it alone then holds taken off."""
    calls = [i for i, call in enumerate(seen.structure.calls) if call.unit == unit]
    saved = sum(seen.values[seen.structure.calls[i].saved] for i in calls)
    loose = sum(seen.values[shape.size] for shape in seen.structure.loose if set(shape.holders) & set(calls))
    return round(saved - loose)


def buffers(model: nn.Module, unit: str) -> int:
    """Bytes of a unit's buffers, of which a region keeps copies where its forward writes them."""
    return sum(b.numel() * b.element_size() for b in model.get_submodule(unit).buffers())


@pytest.mark.parametrize("name", HUB)
def test_recomputing_a_unit_frees_what_was_observed(name: str) -> None:
    """Per unit worth recomputing: live bytes after a forward that keeps it, less those after one that does not."""
    make, batch_of = HUB[name]
    model, batch = make(), batch_of(2, 32)
    seen = observe(recorded(model, batch), 0)
    keep = alive_before_backward(model, batch, {})
    kinds = {type(model.get_submodule(c.unit)): c.unit for c in seen.structure.calls if seen.values[c.saved] > 0}
    assert len(kinds) > 1
    for unit in kinds.values():
        truth = keep - alive_before_backward(model, batch, {unit: "recompute"})
        assert 0 <= freed(seen, unit) - truth <= buffers(model, unit), unit


def test_several_units_free_the_sum() -> None:
    """Two blocks and a part of a third, at once."""
    model, batch = TinyText(layers=3), text_batch(4, 32)
    seen = observe(recorded(model, batch), 0)
    units = ("layers.0", "layers.1.mlp", "layers.2")
    both = alive_before_backward(model, batch, dict.fromkeys(units, "recompute"))
    assert alive_before_backward(model, batch, {}) - both == sum(freed(seen, unit) for unit in units)


def test_a_shared_bias_is_loose_and_counted_once() -> None:
    """T5 hands one position bias to every block of a stack; no operation saves it, but recomputed blocks hold it."""
    make, batch_of = HUB["t5"]
    model, batch = make(), batch_of(2, 32)
    seen = observe(recorded(model, batch), 0)
    bias = 2 * 32 * 32 * 4  # heads x length x length, without a mask the same for the whole batch
    keys = [call.key for call in seen.structure.calls]
    largest = max(seen.structure.loose, key=lambda shape: seen.values[shape.size])
    assert seen.values[largest.size] == bias
    holders = [keys[i] for i in largest.holders]
    assert "encoder.block.1.layer.0" in holders
    assert not any(key.startswith("decoder") for key in holders)
    # Two recomputed units hold it once.
    model = HUB["t5"][0]()
    model.encoder.block.append(
        type(model.encoder.block[1])(model.config, has_relative_attention_bias=False, layer_idx=2)
    )
    seen = observe(recorded(model, batch), 0)
    units = ["encoder.block.1.layer.0", "encoder.block.2.layer.0"]
    keep = alive_before_backward(model, batch, {})
    truth = keep - alive_before_backward(model, batch, dict.fromkeys(units, "recompute"))
    assert truth == sum(freed(seen, unit) for unit in units) + bias


def test_an_output_that_its_own_unit_saves_is_not_freed() -> None:
    """A unit that ends in ReLU saves what it returns, which the next unit holds as its input anyway."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()) for _ in "ab")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)).sum()

    model, x = Net(), torch.randn(64, 32)
    seen = observe(recorded(model, x, ["Sequential"], lambda m, b: m(b)), 0)
    # Of a: the result of the first ReLU (which the second layer saves, too). Its own result stays.
    assert freed(seen, "a") == 64 * 64 * 4 - RNG_STATE_BYTES


def test_a_module_called_twice_is_two_calls_of_one_unit() -> None:
    """Each call frees the same; one action frees both."""
    model, batch = TinyNested(), text_batch(4, 32)
    seen = observe(recorded(model, batch), 0)
    calls = [call for call in seen.structure.calls if call.unit == "shared"]
    assert seen.values[calls[0].saved] == seen.values[calls[1].saved] > 0
    truth = alive_before_backward(model, batch, {}) - alive_before_backward(model, batch, {"shared": "recompute"})
    assert freed(seen, "shared") == truth


def test_units_that_save_next_to_nothing_free_nothing() -> None:
    """A unit whose saved bytes are less than a region's own fixed cost is planned as one that frees nothing."""
    make, batch_of = HUB["gpt2"]
    seen = observe(recorded(make(), batch_of(2, 8)), 0)
    tiny = [call for call in seen.structure.calls if call.unit.endswith("c_proj")]
    assert tiny
    assert all(seen.values[call.saved] <= 0 for call in tiny)
    timeline = assemble(seen.structure, seen.values, Resident(0, 0, True, 0), rates=Rates(1e-9), minimum_share=0.0)
    assert timeline.options
    assert not any(timeline.units[option.unit].endswith("c_proj") for option in timeline.options)


def test_what_units_save_follows_their_size_where_it_is_next_to_nothing() -> None:
    """Cut off at zero, it would follow no polynomial, and another one than the right one by chance."""
    lengths = 2, 6, 10
    seen = [observe(recorded(TinyText(), text_batch(1, tokens)), 0) for tokens in lengths]
    saved = [[each.values[call.saved] for call in each.structure.calls if call.unit == "layers.1.mlp"] for each in seen]
    (small,), (middle,), (large,) = saved
    assert small < 0 < middle
    assert large - middle == middle - small


def test_every_value_but_what_is_freed_is_no_less_than_zero_and_the_batch_is_a_column() -> None:
    """One value per column; the batch's bytes are among them."""
    batch = image_batch(2, 16, 16)
    seen = observe(recorded(TinyVision(), batch), 12345)
    assert seen.values.shape == (seen.structure.columns,)
    freed_by_calls = [call.saved for call in seen.structure.calls]
    assert (np.delete(seen.values, freed_by_calls) >= 0).all()
    assert seen.values[seen.structure.batch] == 12345


def test_the_same_step_at_another_size_has_the_same_structure() -> None:
    """Sizes change the numbers, not the shape; that is what lets the estimator compare them."""
    model = TinyText()
    small, large = (observe(recorded(model, text_batch(4, tokens)), 0) for tokens in (16, 40))
    assert small.structure == large.structure
    assert hash(small.structure) == hash(large.structure)
    assert (small.values != large.values).any()


def test_observations_repeat_to_the_byte() -> None:
    """Measuring the same step again gives the same bytes; only seconds differ."""
    model, batch = TinyText(), text_batch()
    recorded(model, batch)  # torch makes a number of its own (4 bytes) in the first of a process
    first, second = (observe(recorded(model, batch), 0) for _ in range(2))
    assert first.structure == second.structure
    assert (first.values == second.values).all()
