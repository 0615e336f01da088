"""On an accelerator: the allocator's own counters say that the budget is held, and the weights are the plain run's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_mimose import BudgetInfeasibleError, Mimose, MimoseCallback, MimoseError
from lightning_mimose.measure import counters
from tests.helpers.fits import same
from tests.helpers.models import Block, TinyKeywords, TinyText, text_batch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:(?s).*deterministic")]
LENGTHS = (256, 192, 384, 128, 320, 512, 224, 448, 160, 288)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    """Kernels that add up in any order would differ from run to run by themselves."""
    switch: Any = torch.use_deterministic_algorithms
    switch(True, warn_only=True)
    yield
    switch(False)


class FusedBlock(Block):
    """Attention in one of the device's own kernels, which leave what they save of a generator unfilled here."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, tokens, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, hidden)
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))


class FusedText(TinyText):
    """Without dropout."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__(0, hidden)
        self.layers = nn.ModuleList(FusedBlock(hidden, heads=4) for _ in range(layers))


class Training:
    """A run of the loop.

    Args:
        device: Where.
        budget: In bytes; None for a plain run.
        actions: What plans may do; None for what pays on the device.
        autocast: Whether it runs in bfloat16 where that is safe.

    Attributes:
        peaks: The most that was allocated in each step, of a plain run.
        reserved: What the allocator had from the device at the end of each step.
    """

    def __init__(
        self,
        device: torch.device,
        budget: int | None,
        kind: type[TinyText] = TinyText,
        actions: Sequence[str] | None = None,
        *,
        autocast: bool = False,
    ) -> None:
        torch.manual_seed(0)
        model = kind(layers=6, hidden=256).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        batches = [{k: v.to(device) for k, v in text_batch(8, n, i).items()} for i, n in enumerate(LENGTHS)]
        self.peaks: list[int] = []
        self.reserved: list[int] = []
        torch.manual_seed(1)

        def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                return model(**batch).loss

        mimose = None
        if budget is not None:
            mimose = Mimose(model, budget=budget, optimizer=optimizer, loss_fn=loss_of, actions=actions)
        for batch in (*batches, *batches):  # of ten steps one or two learn, and one may run again
            torch.accelerator.reset_peak_memory_stats()
            if mimose is not None:
                mimose.step(batch)
            else:
                loss = loss_of(model, batch)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                del loss
            self.peaks.append(int(torch.accelerator.max_memory_allocated()))
            self.reserved.append(int(torch.accelerator.memory_reserved()))
        self.records = [] if mimose is None else list(mimose.records)
        if mimose is not None:
            mimose.close()
        self.weights = {name: value.cpu() for name, value in model.state_dict().items()}


def check(ours: Training, plain: Training, budget: int) -> None:
    """Held at every step, as predicted, by doing something, and with the same result."""
    assert same(plain.weights, ours.weights)
    assert max(ours.reserved) <= budget
    assert max(record.reserved_peak_bytes or 0 for record in ours.records) <= budget
    planned = [record for record in ours.records if not record.sheltered and not record.retried]
    assert any(record.actions for record in planned)
    for record in planned:
        assert record.predicted_peak_bytes == pytest.approx(record.measured_peak_bytes, rel=0.01)


@pytest.mark.parametrize("kind", [TinyText, TinyKeywords], ids=lambda kind: kind.__name__)
def test_held_and_the_same(kind: type[TinyText], device: torch.device) -> None:
    """Dropout included, whose generator must be put back for units that get their tensors by keyword, too."""
    plain = Training(device, None, kind)
    budget = int(0.7 * max(plain.peaks))
    check(Training(device, budget, kind), plain, budget)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_blocks_with_fused_attention_are_recomputed(autocast: bool, device: torch.device) -> None:
    """The memory-efficient kernel and the flash one, as in Llama and ViT.

    Where torch may fall back on others with a warning, these add up in any order.
    """
    switch: Any = torch.use_deterministic_algorithms
    switch(True)
    plain = Training(device, None, FusedText, autocast=autocast)
    budget = int(0.7 * max(plain.peaks))
    ours = Training(device, budget, FusedText, ["recompute"], autocast=autocast)
    check(ours, plain, budget)
    assert all(record.actions for record in ours.records if record.sheltered)
    acting = {unit for record in ours.records for unit in record.actions}
    assert acting >= {f"layers.{number}" for number in range(6)}


@pytest.mark.parametrize("actions", [["recompute"], ["offload"]], ids=" ".join)
def test_held_by_one_action_alone(actions: list[str], device: torch.device) -> None:
    """Copies to the host overlap with what is computed, and are there when backward asks for them."""
    plain = Training(device, None)
    budget = int(0.7 * max(plain.peaks))
    ours = Training(device, budget, actions=actions)
    check(ours, plain, budget)
    planned = [record for record in ours.records if not record.sheltered and not record.retried]
    assert {action for record in planned for action in record.actions.values()} == set(actions)


def test_held_under_autocast(device: torch.device) -> None:
    """Casts of weights live as long as autocast's cache."""
    plain = Training(device, None, autocast=True)
    budget = int(0.7 * max(plain.peaks))
    check(Training(device, budget, autocast=True), plain, budget)


class HungryLoss(nn.Module):
    """A block, and a loss that takes memory of its own, which nothing can save."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        return (y @ y.T).exp().mean()  # 64 MiB thrice


@pytest.mark.parametrize("on_infeasible", ["raise", "warn"])
def test_a_budget_that_is_too_small(on_infeasible: Any, device: torch.device) -> None:
    """The allocator fails at it though the device has more: the error says so, or training goes on beyond it."""
    torch.manual_seed(0)
    model = HungryLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    batches = [torch.randn(4096, 64, device=device) for _ in range(4)]
    torch.accelerator.synchronize()
    budget = counters.read(device).requested_bytes + 100 * MIB
    mimose = Mimose(model, budget=budget, optimizer=optimizer, loss_fn=lambda m, x: m(x), on_infeasible=on_infeasible)
    with mimose:
        if on_infeasible == "raise":
            with pytest.raises(MimoseError, match=r"(?i)give (a larger budget|at least)"):
                mimose.step(batches[0])
        else:
            with pytest.warns(UserWarning, match="cannot be kept"):
                for batch in batches:
                    mimose.step(batch)
            assert len(mimose.records) == len(batches)
    assert torch.cuda.get_per_process_memory_fraction(device) == 1.0


def test_a_device_that_is_too_full_is_told_before_the_first_step(device: torch.device) -> None:
    """Else the user's own next tensor would not fit below the budget."""
    besides = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    model = HungryLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    with pytest.raises(BudgetInfeasibleError, match="what else is on the device"):
        Mimose(model, budget=besides.nbytes, optimizer=optimizer, loss_fn=lambda m, x: m(x))


def test_what_else_is_on_the_device_counts(device: torch.device) -> None:
    """Another model's weights, say: the budget is for all that the process has there."""
    plain = Training(device, None)
    besides = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    budget = int(0.7 * max(plain.peaks)) + besides.nbytes
    ours = Training(device, budget)
    check(ours, plain, budget)
    assert min(record.resident_bytes for record in ours.records) >= besides.nbytes


def test_the_measured_peak_is_what_tensors_asked_the_allocator_for(device: torch.device) -> None:
    """By its own counter; it gave them a little more."""
    before = counters.read(device)
    kept = torch.empty(3 * MIB + 5, dtype=torch.uint8, device=device)
    now = counters.read(device)
    assert now.requested_bytes - before.requested_bytes == kept.nbytes
    assert now.held_bytes >= torch.accelerator.memory_allocated() >= now.requested_bytes


class Module(pl.LightningModule):
    """The same model in Lightning."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = TinyText(layers=6, hidden=256)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_trainer_holds_it(precision: Any, device: torch.device, tmp_path: Any) -> None:
    """One callback, and the same weights."""

    def fit(callbacks: list[pl.Callback]) -> tuple[dict[str, torch.Tensor], int]:
        module = Module()
        batches = [text_batch(8, n, i) for i, n in enumerate(LENGTHS)]
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            precision=precision,
            max_epochs=2,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        torch.manual_seed(1)
        torch.accelerator.reset_peak_memory_stats()
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
        peak = int(torch.accelerator.max_memory_allocated())
        return {name: value.cpu() for name, value in module.state_dict().items()}, peak

    plain, peak = fit([])
    budget = int(0.7 * peak)
    callback = MimoseCallback(budget=budget)
    ours, _ = fit([callback])
    assert same(plain, ours)
    assert all((record.reserved_peak_bytes or 0) <= budget for record in callback.records)
    assert any(record.actions for record in callback.records if not record.sheltered)
