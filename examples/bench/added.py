"""What the plugin itself takes: host time of a planned step, and memory of its own.

Two whole steps differ by more than what is looked for, even two without a budget. So a clock runs while the plugin's
own code does, and stops while it has called the loss, the backward or the loop; the median of many steps counts, and of
several runs. To that comes what patching adds to a unit's call: that of one that does nothing, less what it takes by
itself, or with a `torch.utils.checkpoint` written by hand if it is recomputed.
"""

from __future__ import annotations

import gc
import random
import time
import timeit
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.running import figure
from lightning_mimose import Mimose, MimoseCallback, StepRecord
from lightning_mimose.actions.calls import patch_unit
from lightning_mimose.actions.patch import unpatch
from lightning_mimose.actions.session import Session
from lightning_mimose.engine.attempts import Attempts
from lightning_mimose.engine.core import Engine
from lightning_mimose.report.record import History
from lightning_mimose.units import Unit

UNITS, WIDTH, ROWS = 48, 16, 64
STEPS = 250
DISTINCT_SIZES = 10_000
ROUNDS = 7
LAPS = 300


class Block(nn.Module):
    """A residual MLP of six parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to its input."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """48 blocks with 288 parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(UNITS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean square."""
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


HALF = tuple(range(0, UNITS, 2))


def half(timeline: Any, budget_bytes: int) -> Mapping[str, str]:
    """A planner that recomputes every other unit."""
    return dict.fromkeys((unit for unit in timeline.units if int(unit.split(".")[-1]) in HALF), "recompute")


class Training(pl.LightningModule):
    """The stack in Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """The loss."""
        loss: torch.Tensor = self.stack(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def rows() -> Iterator[dict[str, Any]]:
    """One row per figure."""
    steps = {"that fits": ("auto", 0), "half recomputed": (half, len(HALF))}
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(ROUNDS):  # in turn, for the machine has faster and slower minutes
        for name, (planner, acting) in steps.items():
            calls = (UNITS - acting) * _kept_seconds({"another": "recompute"} if acting else {})
            found[name, "plain loop"].append(plain_loop(planner) + calls)
            found[name, "Lightning"].append(lightning(planner) + calls)
    for (name, door), seconds in found.items():
        what = f"a step {name}, {UNITS} units, known size: added on the host, {door}"
        yield figure(what, 1e6 * median(seconds), "us", "<= 150 us")
        yield figure(f"{what}, in the fastest of {ROUNDS} runs", 1e6 * min(seconds), "us", "")
    yield figure("a recomputed call, beyond a checkpoint by hand", 1e6 * _recomputed_seconds(), "us", "(per unit)")
    for what, seconds in block_seconds().items():
        yield figure(
            f"a block of attention and MLP, {what}: added on the host, forward and backward", 1e6 * seconds, "us", ""
        )
    yield figure(f"own memory after {DISTINCT_SIZES:,} sizes", own_bytes() / 1e6, "MB", "< 10 MB")


class Clock:
    """Runs while the plugin's own code does."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None

    def mine(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the plugin's."""

        def run(*given: Any, **named: Any) -> Any:
            if self._since is not None:
                return call(*given, **named)
            self._since = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                self.seconds += time.perf_counter() - self._since
                self._since = None

        return run

    def theirs(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function that the plugin calls and that would run without it."""

        def run(*given: Any, **named: Any) -> Any:
            if self._since is None:
                return call(*given, **named)
            self.seconds += time.perf_counter() - self._since
            self._since = None
            try:
                return call(*given, **named)
            finally:
                self._since = time.perf_counter()

        return run

    @contextmanager
    def running(self) -> Iterator[None]:
        """While this is entered."""
        with ExitStack() as undone:

            def replace(owner: Any, name: str, call: Callable[..., Any]) -> None:
                undone.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, call)

            for name in ("begin_step", "begin_forward", "begin_backward", "before_update", "end_step"):
                replace(Engine, name, self.mine(getattr(Engine, name)))
            for name in (
                "on_train_batch_start",
                "on_before_backward",
                "on_before_optimizer_step",
                "on_train_batch_end",
            ):
                replace(MimoseCallback, name, self.mine(getattr(MimoseCallback, name)))
            replace(History, "add", self.mine(History.add))
            replace(Mimose, "_zero_gradients", self.mine(Mimose._zero_gradients))
            replace(torch.optim.SGD, "zero_grad", self.theirs(torch.optim.SGD.zero_grad))
            run = self.mine(Attempts.run)
            replace(Attempts, "run", lambda attempts, once: run(attempts, self.theirs(once)))
            yield


def plain_loop(planner: Any) -> float:
    """Median seconds that a step of the plain loop spends in the plugin, its units' calls left out."""
    model, clock = Stack(), Clock()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = []
    with clock.running(), Mimose(model, budget="4GB", optimizer=optimizer, planner=planner) as mimose:
        for rows_ in (ROWS, 512, 256, 384, 128, *[ROWS] * STEPS):
            clock.seconds = 0.0
            mimose.step(torch.randn(rows_, WIDTH))
            if _is_plain(mimose.records[-1]):
                found.append(clock.seconds)
    return median(found)


def _is_plain(record: StepRecord) -> bool:
    return record.cache_hit and record.measured_peak_bytes is None


class _Laps(pl.Callback):
    def __init__(self, mimose: MimoseCallback, clock: Clock) -> None:
        self._mimose, self._clock = mimose, clock
        self.found: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        if _is_plain(self._mimose.records[-1]):
            self.found.append(self._clock.seconds)
        self._clock.seconds = 0.0


def lightning(planner: Any) -> float:
    """The same of a step in Lightning."""
    batches: Any = [torch.randn(rows_, WIDTH) for rows_ in (ROWS, 512, 256, 384, 128, *[ROWS] * STEPS)]
    clock, mimose = Clock(), MimoseCallback(budget="4GB", planner=planner)
    laps = _Laps(mimose, clock)
    with clock.running():
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=[mimose, laps],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Training(), torch.utils.data.DataLoader(batches, batch_size=None))
    return median(laps.found)


class _Identity(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Unity(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0


def _kept_seconds(actions: dict[str, str]) -> float:
    """Seconds that are added to one call of a unit that is kept, while others act: its backward is as it was."""
    plain, patched, x = _Identity(), _Identity(), torch.zeros(1, requires_grad=True)
    session = Session()
    patch_unit(Unit("identity", patched, -1, 1, True), session)
    session.arm(actions, None)
    return _difference(lambda: plain(x), lambda: patched(x), patched, 2000)


def _recomputed_seconds() -> float:
    """Seconds that are added to one recomputed call of a unit, forward and backward, beyond a checkpoint by hand."""
    plain, patched, x = _Unity(), _Unity(), torch.zeros(1, requires_grad=True)
    session = Session()
    patch_unit(Unit("unity", patched, -1, 1, True), session)
    session.arm({"unity": "recompute"}, None)

    def ours() -> None:
        session.given.clear()
        patched(x).backward()

    ours()  # proves it
    return _difference(lambda: checkpoint(plain, x, use_reentrant=False).backward(), ours, patched, 300)


def block_seconds() -> dict[str, float]:
    """Seconds that each action adds to a block so small that the host is what takes the time, forward and backward."""
    x = torch.randn(2, ROWS // 2, 4 * WIDTH, requires_grad=True)
    blocks = {what: _attention_block() for what in ("kept", "checkpointed by hand", "recompute", "lean", "lean+masks")}
    plain, by_hand = blocks["kept"], blocks["checkpointed by hand"]
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "kept": lambda: plain(x),
        "checkpointed by hand": lambda: checkpoint(by_hand, x, use_reentrant=False),
    }
    for action in [what for what in blocks if what not in runs]:
        session = Session()
        patch_unit(Unit("block", blocks[action], -1, 1, True), session)
        session.arm({"block": action}, None)
        runs[action] = partial(_call, session, blocks[action], x)
    laps: dict[str, list[float]] = {what: [] for what in runs}
    for _ in range(LAPS):
        for what, run in runs.items():
            run().sum().backward()  # what the one before has left in the processor's caches is another's
            began = time.perf_counter()
            run().sum().backward()
            laps[what].append(time.perf_counter() - began)
    for what, block in blocks.items():
        if what not in ("kept", "checkpointed by hand"):
            unpatch(block)
    found = {what: median(seconds) for what, seconds in laps.items()}
    return {what: seconds - found["kept"] for what, seconds in found.items() if what != "kept"}


def _attention_block() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(4 * WIDTH, 4, 16 * WIDTH, batch_first=True, activation="gelu")


def _call(session: Session, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    session.given.clear()
    out: torch.Tensor = block(x)
    return out


def _difference(plain: Callable[[], Any], ours: Callable[[], Any], patched: nn.Module, number: int) -> float:
    """Seconds by which one call takes longer than another: the least of each, measured in turns."""
    least = [float("inf"), float("inf")]
    for _ in range(15):
        for which, call in enumerate((plain, ours)):
            least[which] = min(least[which], timeit.timeit(call, number=number) / number)
    unpatch(patched)
    return least[1] - least[0]


def own_bytes(sizes: int = DISTINCT_SIZES) -> int:
    """Python's and numpy's memory that a `Mimose` holds after batches that are all of different sizes.

    Their plans recompute half of the units each, and all differ. Batches are planned for and recorded, but not run.
    """
    random_ = random.Random(0)
    names = [f"blocks.{index}" for index in range(UNITS)]

    def planner(timeline: Any, budget_bytes: int) -> Mapping[str, str]:
        return dict.fromkeys(random_.sample(names, UNITS // 2), "recompute")

    model = Stack()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with Mimose(model, budget="4GB", planner=planner) as mimose:
            for rows_ in (512, 64, 4096, 2048, 1024, 128):
                mimose.step(torch.randn(rows_, WIDTH))
            engine = mimose._engine
            assert engine is not None
            for rows_ in range(1, sizes + 1):
                engine.begin_step(torch.empty(1, 1).expand(rows_, WIDTH))  # no memory of its own
                record = engine.end_step()
                assert record is not None
                mimose._history.add(record)
            acting = [len(record.actions) for record in mimose.records if not record.sheltered]
            assert min(acting) == UNITS // 2
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
