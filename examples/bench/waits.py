"""How long training waits for plans: batches that are all of new sizes, in processes of their own.

Fits and all that is imported for the first of them are part of it; steps that learn are counted, too.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from bench.models import WORKLOADS
from bench.running import figure
from lightning_mimose import Mimose

TEXTS = 150
"""Lengths of texts that are trained on, all different."""
PAIRS = 150
"""Batches of sentences and their translations, whose lengths vary on their own: hardly any two are alike."""
IMAGES = 60
"""Batches of images whose sides vary on their own."""


class Waits(NamedTuple):
    """What planning took in one training.

    Attributes:
        thread_seconds: Of every step, processor time of its thread until its plan was in force.
        seconds: The same on the clock.
        whole_seconds: Of the whole training.
        units: How many there are.
    """

    thread_seconds: list[float]
    seconds: list[float]
    whole_seconds: float
    units: int


def rows() -> Iterator[dict[str, Any]]:
    """One row per figure."""
    bar = "<= 10 ms"
    works = (
        (texts, f"{TEXTS} lengths of text"),
        (pairs, f"{PAIRS} pairs of lengths"),
        (images, f"{IMAGES} batches of images of any sides"),
    )
    for measure, what in works:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found = pool.submit(measure).result()
        what = f"{what}, {found.units} units"
        yield figure(f"{what}: a step's planning takes (median)", 1e3 * median(found.thread_seconds), "ms", "")
        yield figure(f"{what}: the longest that planning held up a step", 1e3 * max(found.seconds), "ms", bar)
        yield figure(f"{what}: planning, of all the time", 100 * sum(found.seconds) / found.whole_seconds, "%", "")


def texts() -> Waits:
    """A BERT at half of its activation memory."""
    config = BertConfig(
        vocab_size=512,
        hidden_size=32,
        num_hidden_layers=6,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=512,
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    lengths = random.Random(0).sample(range(32, 400), TEXTS)

    def batch(length: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(512, (2, length))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(2, dtype=torch.long)}

    return _waits(model, [batch(length) for length in lengths], "24MB", lambda model, batch: model(**batch).loss)


def pairs() -> Waits:
    """A T5 at somewhat more than half of what its largest batch takes."""
    return _of_workload("t5", PAIRS, "120MB")


def images() -> Waits:
    """A ResNet at about two thirds of what its largest batch takes."""
    return _of_workload("resnet", IMAGES, "70MB")


def _of_workload(name: str, count: int, budget: str) -> Waits:
    workload = WORKLOADS[name]
    torch.set_num_threads(2)
    return _waits(workload.make(), workload.batches(count, seed=5), budget, workload.loss)


def _waits(
    model: nn.Module, batches: Sequence[Any], budget: str, loss: Callable[[nn.Module, Any], torch.Tensor]
) -> Waits:
    warnings.filterwarnings("ignore")
    took, waited = [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Mimose(model, budget=budget, optimizer=optimizer, loss_fn=loss) as mimose:
        engine = mimose._engine
        assert engine is not None
        begin = engine.begin_step

        def timed(*given: Any, **named: Any) -> None:
            clock, began = time.perf_counter(), time.thread_time()
            begin(*given, **named)
            took.append(time.thread_time() - began)
            waited.append(time.perf_counter() - clock)

        engine.begin_step = timed  # type: ignore[method-assign]
        start = time.perf_counter()
        for batch in batches:
            mimose.step(batch)
        whole = time.perf_counter() - start
        del engine.begin_step
        assert any(record.actions for record in mimose.records if not record.sheltered)
        return Waits(took, waited, whole, len(engine.units))
