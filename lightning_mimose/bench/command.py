"""What `lightning-mimose bench` does once its arguments are read."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from lightning_mimose.bench.alternatives import chosen
from lightning_mimose.bench.entries import Ask, Raced
from lightning_mimose.bench.output import LEGEND, document, tables, write
from lightning_mimose.bench.plots import draw
from lightning_mimose.bench.progress import Progress
from lightning_mimose.bench.race import race
from lightning_mimose.bench.work import BUILT_IN, DEFAULT, SCALES, Work, built_in, on, own
from lightning_mimose.budget import parse_budget
from lightning_mimose.errors import BudgetError, MimoseError, UnsupportedError
from lightning_mimose.explain.learn import training_device
from lightning_mimose.report.plots import canvas
from lightning_mimose.report.text import Table


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        model: A model of the user's own, as `package.module:Name`; None for built-in works.
        works: Names of built-in works; "all" stands for every one.
        scale: Their size.
        sizes: Named dimensions, one batch each, for a model of the user's own.
        init: Its arguments.
        batch: What makes its batches.
        budgets: Shares of the plain run's activation memory, or bytes.
        alternatives: Names; none for all.
        batch_size: Of a built-in work's batches; None for what its scale has.
        steps: Batches of an epoch.
        repeats: How often everything is taken.
        output: Where JSON and plots go; None writes nothing.
        force: Whether the paper's size runs on a CPU.
    """

    model: str | None = None
    works: Sequence[str] = ()
    scale: str = "small"
    sizes: Sequence[Mapping[str, int]] = ()
    init: Mapping[str, Any] = field(default_factory=dict)
    batch: str | None = None
    budgets: Sequence[str] = ("0.5",)
    alternatives: Sequence[str] = ()
    batch_size: int | None = None
    steps: int = 8
    repeats: int = 5
    output: Path | None = None
    force: bool = False


def bench(options: Options, show: Callable[[Sequence[Table]], None]) -> dict[str, Any]:
    """Run it.

    Args:
        options: What was asked for; everything is checked before anything runs.
        show: Given the tables of each work as soon as it is done.

    Returns:
        The JSON document.

    Raises:
        MimoseError: Something asked for does not exist, cannot be read or cannot be done.
    """
    alternatives = chosen(options.alternatives)
    asks = _asks(options.budgets)
    device = training_device()
    if options.steps < 1 or options.repeats < 1:
        raise MimoseError("--steps and --repeats must be 1 or more.")
    if options.batch_size is not None and options.batch_size < 1:
        raise MimoseError(f"--batch-size {options.batch_size} must be 1 or more.")
    if options.output is not None:
        _check_output(options.output)
    works = [on(make(), device) for make in list(_works(options, device))]
    races: list[Raced] = []
    content: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    asked = {name: value for name, value in vars(options).items() if name != "output"}
    texts = [ask.text for ask in asks]
    with _quiet(), _without_native_lines(), Progress() as progress:
        for work in works:
            try:
                raced = race(work, device, asks, alternatives, repeats=options.repeats, progress=progress)
            except MimoseError as error:  # the other works can still be run
                if len(works) == 1:
                    raise
                left_out[work.name] = " ".join(str(error).split())
                continue
            races.append(raced)
            content = {**document(races, asked, device), "left_out": left_out}
            with progress.aside():
                show(list(tables(raced, texts)))
            if options.output is not None:  # after each work, so that stopping loses the last one only
                write(options.output / "bench.json", content)
                draw(raced, texts, options.output)
    if not races:
        raise MimoseError(" ".join(left_out.values()))
    if left_out:
        show([Table("Works that were left out", tuple(left_out.items()))])
        if options.output is not None:
            write(options.output / "bench.json", content)
    show([Table("How to read this", (("columns", LEGEND),))])
    return content


def _works(options: Options, device: torch.device) -> Iterator[Callable[[], Work]]:
    if options.model is not None:
        if options.works:
            raise MimoseError("--work names a built-in work, and a model of your own was named too. Choose one.")
        if options.batch_size is not None:
            raise MimoseError("--batch-size is for built-in works; a model's own loader or --size says it for yours.")
        yield lambda: own(str(options.model), options.init, options.sizes, options.batch, options.steps)
        return
    if options.sizes or options.init or options.batch:
        raise MimoseError("--size, --init and --batch are for a model of your own: name it as package.module:Name.")
    scale = next((scale for scale in SCALES if scale == options.scale), None)
    if scale is None:
        raise MimoseError(f"There is no scale {options.scale!r}. There are {', '.join(SCALES)}.")
    if scale == "paper" and device.type == "cpu" and not options.force:
        raise UnsupportedError(
            "The paper's size (BERT-base, batch 12 to 32, budgets of 4 to 8 GB) is meant for a GPU, and none is "
            "here: a step would take half a minute. --force runs it all the same."
        )
    names = list(options.works) or [DEFAULT]
    for name in BUILT_IN if names == ["all"] else dict.fromkeys(names):
        yield lambda name=name: built_in(  # type: ignore[misc]
            name, scale, options.steps, batch_size=options.batch_size
        )


def _check_output(folder: Path) -> None:
    """Nothing is measured that could not be written afterwards; makes the folder.

    Raises:
        MimoseError: The folder cannot be written to, or pictures cannot be drawn.
    """
    canvas((1.0, 1.0))
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise MimoseError(f"--output {folder}: {there} is a file. Name a folder; it is made where missing.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):  # whether one may, nothing else says for sure
            pass
    except OSError as error:
        raise MimoseError(f"--output {folder} cannot be written to ({error.strerror}). Name another folder.") from error


def _asks(texts: Sequence[str]) -> list[Ask]:
    """Every budget once, however often and in whatever unit it was asked for."""
    asks: dict[tuple[str, float], Ask] = {}
    for ask in map(_ask, texts):
        asks.setdefault((ask.budget.kind, ask.budget.amount), ask)
    return list(asks.values())


def _ask(text: str) -> Ask:
    try:
        budget = parse_budget(text)
    except BudgetError:  # which names what has another meaning here
        budget = None
    if budget is None or budget.kind not in ("bytes", "fraction"):
        raise BudgetError(
            f"The budget {text!r} has no meaning here. Write a share of the plain run's activation memory, above 0 and "
            "at most 1 (0.5), or bytes (2GB)."
        )
    return Ask(text, budget)


@contextmanager
def _without_native_lines() -> Iterator[None]:
    """Lets only Python write to stderr.

    torch's allocator writes a line there for every thousandth block that is older than a measurement, and whether it
    may is decided when torch is imported; compilers write theirs.
    """
    with os.fdopen(os.dup(2), "w", buffering=1) as screen:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        try:
            with ExitStack() as stack:
                if sys.stderr is sys.__stderr__:  # else somebody reads it already, and does not read the descriptor
                    stack.enter_context(redirect_stderr(screen))
                    stack.enter_context(redirect_stdout(screen))
                yield
        finally:
            os.dup2(screen.fileno(), 2)


@contextmanager
def _quiet() -> Iterator[None]:
    """No chatter between the rows of a table; what alternatives have to say is in their notes."""
    logs = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning_mimose", "transformers", "torch")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
