"""A program with Lightning's command line, with a budget from flags or from YAML.

Nothing in an ordinary `LightningCLI` program changes; the flags name the callback:

    python examples/cli.py fit --trainer.callbacks+=lightning_mimose.MimoseCallback --trainer.callbacks.budget=8GB

`MimoseCLI` has a shorter flag for the same:

    python examples/cli.py fit --mimose.budget=8GB

In YAML (`python examples/cli.py fit --config budget.yaml`):

    trainer:
      callbacks:
        - class_path: lightning_mimose.MimoseCallback
          init_args: {budget: 8GB}

This net is so small that 8GB is plenty: `--data.largest=12 --mimose.budget=60MB` gives the plugin something to do.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

Batch = Sequence[torch.Tensor]


class DigitClassifier(pl.LightningModule):
    """A small convolutional net with residual blocks.

    Args:
        channels: Width of the net.
        blocks: Depth of the net.
        lr: The learning rate.
    """

    def __init__(self, channels: int = 16, blocks: int = 4, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.GELU())
                for _ in range(blocks)
            )
        )
        self.head = nn.Linear(channels, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores for ten digits."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        images, labels = batch
        loss = functional.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


class Digits(pl.LightningDataModule):
    """Scikit-learn's handwritten digits, each batch enlarged by a factor of its own.

    Args:
        batch_size: Digits per batch.
        largest: The largest factor; 8 x 8 pixels become up to this many times as wide and high.
    """

    def __init__(self, batch_size: int = 32, largest: int = 6) -> None:
        super().__init__()
        self.batch_size, self.largest = batch_size, largest

    def setup(self, stage: str) -> None:
        """Reads the digits."""
        images, labels = load_digits(return_X_y=True)
        pixels = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
        self.digits = TensorDataset(pixels, torch.from_numpy(labels).long())
        self.choose = random.Random(0)

    def enlarge(self, samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        """One batch, in one size."""
        images, labels = (torch.stack(column) for column in zip(*samples, strict=True))
        factor = self.choose.randint(1, self.largest)
        return functional.interpolate(images, scale_factor=factor), labels

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches of different sizes."""
        return DataLoader(self.digits, self.batch_size, shuffle=True, collate_fn=self.enlarge)


def main(cli: type[LightningCLI] = LightningCLI) -> None:
    """Runs the command line."""
    defaults = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    cli(DigitClassifier, Digits, trainer_defaults=defaults, seed_everything_default=7, save_config_callback=None)


if __name__ == "__main__":
    if any(argument.startswith("--mimose") for argument in sys.argv):  # to show both; a program picks one
        from lightning_mimose.plugin.cli import MimoseCLI

        main(MimoseCLI)
    else:
        main()
