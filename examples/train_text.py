"""A BERT-style text classifier inside a memory budget, and the proof that it stayed there.

The task: is this text a docstring or code? The texts are functions and docstrings of Python's standard library, three
tokens to several hundred, so batches differ in length and a plain run's memory differs from step to step.

    python examples/train_text.py                    # budget: half of what the activations need
    python examples/train_text.py --share 0.35       # less
    python examples/train_text.py --budget 150MB     # as you would write it for `MimoseCallback`

The only line you need for your own training is `callbacks=[MimoseCallback(budget=...)]`; the rest here measures.
"""

from __future__ import annotations

import argparse
import ast
import logging
import random
import re
import sysconfig
import warnings
import zlib
from dataclasses import dataclass
from itertools import chain, compress
from pathlib import Path

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from lightning_mimose import MimoseCallback, MimoseError
from meter import MeterCallback, StepTimes

VOCABULARY, MAX_TOKENS, BATCH_SIZE = 8192, 256, 4


def read_texts(limit: int) -> list[tuple[str, int]]:
    """Docstrings (label 0) and code (label 1) of the functions and classes of the standard library."""
    texts: list[tuple[str, int]] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a few modules hold escape sequences that the compiler complains about
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        lines = source.splitlines()
        for node in ast.walk(tree):
            docstring = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.ClassDef) else None
            if docstring:
                texts.append((docstring, 0))
                texts.append(("\n".join(lines[node.body[0].end_lineno : node.end_lineno]), 1))
        if len(texts) > 4 * limit:
            break
    random.Random(0).shuffle(texts)
    return texts[:limit]


def tokenize(text: str) -> list[int]:
    """Words and signs to numbers by hashing; 0 is padding, 1 begins every text."""
    words = re.findall(r"\w+|[^\w\s]", text)
    return [1, *(2 + zlib.crc32(word.encode()) % (VOCABULARY - 2) for word in words)][:MAX_TOKENS]


def collate(samples: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
    """Pads a batch to its own longest text, so each batch has a length of its own."""
    tokens = [torch.tensor(tokenize(text)) for text, _ in samples]
    input_ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    labels = torch.tensor([label for _, label in samples])
    return {"input_ids": input_ids, "attention_mask": (input_ids != 0).long(), "labels": labels}


class TextClassifier(pl.LightningModule):
    """A small BERT with random weights."""

    def __init__(self, layers: int = 4, hidden: int = 256) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=4 * hidden,
            max_position_embeddings=MAX_TOKENS,
        )
        self.bert = BertForSequenceClassification(config)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        return self.bert(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


@dataclass
class Run:
    """What one training run left behind."""

    weights: dict[str, torch.Tensor]
    peaks: list[int]
    residents: list[int]
    seconds: list[float]


def train(texts: list[tuple[str, int]], steps: int, *callbacks: pl.Callback, metered: bool) -> Run:
    """Trains from the same seed each time, either metering memory or timing steps: metering would slow them."""
    pl.seed_everything(7, verbose=False)
    model = TextClassifier()
    loader = DataLoader(texts, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    meter, times = MeterCallback(), StepTimes()
    trainer = pl.Trainer(
        accelerator="cpu",  # the meter counts CPU memory; without it any accelerator will do
        max_steps=steps,
        callbacks=[meter if metered else times, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    return Run(model.state_dict(), meter.peaks, meter.residents, times.seconds)


def main() -> None:
    """Trains without and with the plugin and compares."""
    parser = argparse.ArgumentParser(description="A text classifier trained inside a memory budget.")
    parser.add_argument("--budget", help='as MimoseCallback takes it: "150MB", "60%%", ... (default: from --share)')
    parser.add_argument("--share", type=float, default=0.5, help="share of the activation memory to allow")
    parser.add_argument("--steps", type=int, default=40, help="training steps per run")
    parser.add_argument("--plots", metavar="DIR", help="draw the report's plots here")
    args = parser.parse_args()
    if args.steps < 1 or not 0 < args.share <= 1:
        parser.error("--steps is at least 1, and --share above 0 and at most 1")
    if args.budget:  # said now, not after the plain run
        try:
            MimoseCallback(budget=args.budget)
        except MimoseError as error:
            parser.error(str(error))
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # Lightning 2.6 with torch 2.13
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # six runs: not each one's greetings
    torch.set_num_threads(2)
    texts = read_texts(limit=BATCH_SIZE * args.steps)

    plain = train(texts, args.steps, metered=True)
    peak, resident = max(zip(plain.peaks, plain.residents, strict=True))
    budget = args.budget or resident + int(args.share * (peak - resident))

    mimose = MimoseCallback(budget=budget)
    budgeted = train(texts, args.steps, mimose, metered=True)

    plain_seconds, budgeted_seconds = list[list[float]](), list[list[float]]()
    for _ in range(2):  # turn about, so that whatever else the machine does falls on both
        plain_seconds.append(train(texts, args.steps, metered=False).seconds)
        budgeted_seconds.append(train(texts, args.steps, MimoseCallback(budget=budget), metered=False).seconds)
    # Batches differ, so that steps compare one by one. The first one is not timed.
    sheltered = [record.sheltered for record in mimose.records][1:]

    def total(runs: list[list[float]], *, learning: bool) -> str:
        return f"{sum(compress(chain(*runs), [each is learning for each in sheltered] * len(runs))) / len(runs):.1f}"

    limit = mimose.records[-1].budget_bytes
    equal = all(torch.equal(tensor, budgeted.weights[name]) for name, tensor in plain.weights.items())
    table = Table(title=f"{args.steps} steps, budget {limit / 1e6:.1f} MB, of it resident {resident / 1e6:.1f} MB")
    for column in ("", "plain", "lightning-mimose"):
        table.add_column(column, justify="right" if column else "left")
    for name, value in {
        "true peak, MB": lambda run, _: f"{max(run.peaks) / 1e6:.1f}",
        "steps over the budget": lambda run, _: str(sum(peak > limit for peak in run.peaks)),
        f"time of the {sum(sheltered)} steps that learn, s": lambda _, runs: total(runs, learning=True),
        f"time of the {len(sheltered) - sum(sheltered)} others, s": lambda _, runs: total(runs, learning=False),
    }.items():
        table.add_row(name, value(plain, plain_seconds), value(budgeted, budgeted_seconds))
    table.add_row("final weights", "", "equal bit for bit" if equal else "DIFFERENT")
    Console().print(table)
    print(mimose.report())
    if args.plots:
        print("plots:", *mimose.report().plot(args.plots), sep="\n  ")


if __name__ == "__main__":
    main()
