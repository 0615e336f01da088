"""Activations that are nested tensors: sequences of several lengths without padding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_mimose import BudgetInfeasibleError, Mimose
from tests.helpers.loops import plain_step, train
from tests.helpers.meter import PeakMeter

WIDTH = 32


class Block(nn.Module):
    """A residual block of operations that nested tensors of either layout have."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to its input."""
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return out


def model() -> nn.Sequential:
    """Six of them."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(6)])


def sequences(count: int = 16) -> list[list[torch.Tensor]]:
    """Batches of eight sequences each."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 200, (count, 8), generator=generator).tolist()
    return [[torch.randn(n, WIDTH, generator=generator) for n in row] for row in lengths]


def jagged(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The loss of a batch that is jagged."""
    loss: torch.Tensor = model(batch).values().square().mean()
    return loss


def made_inside(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """The loss of sequences of which a nested tensor of strided layout is made."""
    return torch.cat(model(torch.nested.as_nested_tensor(batch)).unbind()).square().mean()


def test_jagged_activations_are_counted() -> None:
    """Equal, within the budget at every step, and predicted; a part is recomputed."""
    batches = [torch.nested.nested_tensor(batch, layout=torch.jagged) for batch in sequences()]
    plain, peaks = model(), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for batch in batches:
        with PeakMeter(plain, optimizer, batch) as meter:
            plain_step(plain, optimizer, batch, jagged)
        peaks.append(meter.peak_bytes)
    budget = int(0.6 * max(peaks))
    ours = model()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
    with Mimose(ours, budget=budget, optimizer=optimizer, loss_fn=jagged) as mimose:
        for batch in batches:
            with PeakMeter(ours, optimizer, batch) as meter:
                mimose.step(batch)
            assert meter.peak_bytes <= budget
            predicted = mimose.records[-1].predicted_peak_bytes
            assert predicted is None or predicted == pytest.approx(meter.peak_bytes, rel=0.01)
        planned = [record for record in mimose.records if not record.sheltered]
    assert len(planned) > len(batches) // 2
    assert any(record.recomputed_units for record in planned)
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_are_kept() -> None:
    """torch's checkpoint cannot save them: units are left alone, and a budget that needs them is refused by name."""
    batches = sequences(6)
    plain, ours = model(), model()
    train(plain, batches, made_inside, planned=False)
    records = train(ours, batches, made_inside, planned=True)
    assert not records[-1].recomputed_units
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))
    with pytest.raises(BudgetInfeasibleError):
        train(model(), batches, made_inside, planned=True, budget=3_000_000)
