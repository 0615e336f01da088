"""A ResNet on images of many sizes inside a memory budget.

The task: which of scikit-learn's two sample photographs (a Chinese temple, a flower) is this crop from? Every batch has
a height and a width of its own, between 64 and 224 pixels, so activation memory differs by a factor of twelve.

    python examples/train_vision.py
    python examples/train_vision.py --budget 85MB --steps 60
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections.abc import Iterator

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader, IterableDataset
from transformers import ResNetConfig, ResNetForImageClassification

from lightning_mimose import MimoseCallback, MimoseError


class MultiScaleCrops(IterableDataset[dict[str, torch.Tensor]]):
    """Batches of random crops of the photographs, each batch in a size of its own.

    Args:
        batches: How many batches an epoch has.
        batch_size: Crops per batch; the last batch has half of them.
    """

    def __init__(self, batches: int, batch_size: int = 8) -> None:
        photographs = load_sample_images().images
        self.photographs = [torch.from_numpy(image.copy()).permute(2, 0, 1) / 255 - 0.5 for image in photographs]
        self.batches, self.batch_size = batches, batch_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        choose = random.Random(0)
        for index in range(self.batches):
            height, width = 32 * choose.randint(2, 7), 32 * choose.randint(2, 7)
            crops, labels = [], []
            for _ in range(self.batch_size if index < self.batches - 1 else self.batch_size // 2):
                label = choose.randrange(2)
                image = self.photographs[label]
                top, left = choose.randint(0, image.shape[1] - height), choose.randint(0, image.shape[2] - width)
                crops.append(image[:, top : top + height, left : left + width])
                labels.append(label)
            yield {"pixel_values": torch.stack(crops), "labels": torch.tensor(labels)}


class ImageClassifier(pl.LightningModule):
    """A small ResNet with random weights; its BatchNorm is as exact under the budget as without."""

    def __init__(self) -> None:
        super().__init__()
        config = ResNetConfig(
            embedding_size=16, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2], layer_type="basic", num_labels=2
        )
        self.resnet = ResNetForImageClassification(config)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        loss: torch.Tensor = self.resnet(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Trains inside the budget and prints the plugin's report."""
    parser = argparse.ArgumentParser(description="An image classifier trained inside a memory budget.")
    parser.add_argument("--budget", default="75MB", help='as MimoseCallback takes it: "75MB", "60%%", 0.6, ...')
    parser.add_argument("--steps", type=int, default=40, help="batches in the one epoch")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps is at least 1")
    try:
        mimose = MimoseCallback(budget=args.budget)
    except MimoseError as error:
        parser.error(str(error))
    warnings.filterwarnings("ignore", ".*does not have many workers")

    pl.seed_everything(7, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",  # so that the default budget means the same everywhere
        max_epochs=1,
        callbacks=[mimose],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(ImageClassifier(), DataLoader(MultiScaleCrops(args.steps), batch_size=None))
    print(mimose.report())


if __name__ == "__main__":
    main()
