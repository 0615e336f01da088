"""An independent meter: the true peak of a training step, on CPU to the byte.

It shares no code with what measures, predicts and plans in `lightning_mimose`, so what it says about a budget is
evidence: this module imports nothing of the package. On CPU the peak is

    resident bytes (parameters, buffers, gradients, optimizer state, batch; every storage once)
    + the highest running sum of what `torch.profiler` saw allocated and freed during the step.

Use it around any code::

    with PeakMeter(model, optimizer, batch) as meter:
        step(batch)
    print(meter.peak_bytes)

or as the *first* callback of a `Trainer`, where it measures every batch from `on_train_batch_start` to
`on_train_batch_end`. A profiled step is a tenth slower or more: never time a metered run.

On CUDA it is what was resident plus how far the allocator's highest mark rose above where the step began.

Limitation: tensors that lived before the step and belong to none of the above are not counted.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

# Without these, Kineto prints a line per session, and torch one about memory that is older than the session. The first
# is read before the first session, the second when torch is imported: where that came first, its line appears, once.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch._C._profiler import RecordScope
from torch.autograd import profiler
from torch.autograd.profiler import profile
from torch.utils._pytree import tree_leaves

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


def _tensors(tree: object, inside: bool = True) -> Iterator[torch.Tensor]:
    """Every tensor in nested containers, mappings that pytree does not know (`BatchEncoding`) included.

    Args:
        tree: What they are in.
        inside: Whether attributes of objects are looked at (those of a dataclass, of a graph), but not of theirs.
    """
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from _tensors(dict(leaf), inside)
        elif inside and not isinstance(leaf, (type, torch.nn.Module)):
            named = {name: getattr(leaf, name, None) for name in getattr(leaf, "__dataclass_fields__", ())}
            yield from _tensors({**getattr(leaf, "__dict__", {}), **named}, inside=False)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages behind tensors, each once, by address; of a DTensor only this rank's part is here."""
    parts = (part for tensor in tensors for part in _dense(getattr(tensor, "_local_tensor", tensor)))
    storages = (part.untyped_storage() for part in parts)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _dense(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold a sparse one's indices and values, or a jagged one's offsets; any other is its own."""
    if tensor.layout == torch.jagged:
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor._indices(), tensor._values()] if tensor.layout == torch.sparse_coo else [tensor]


class DeviceMeter:
    """The same on CUDA, from the allocator's counters. What others hold on the device is left out.

    Whoever puts the allocator's mark back meanwhile does not take away what it has reached before.

    Args:
        meter: Knows what is resident; its own session is not started.
        device: The accelerator.

    Attributes:
        resident_bytes: What was there when the block began.
        peak_bytes: The highest point of the block, what is resident included.
    """

    def __init__(self, meter: PeakMeter, device: torch.device) -> None:
        self.resident_bytes = self.peak_bytes = meter.resident_bytes
        self._device, self._began_bytes, self._highest_bytes = device, 0, 0
        self._patches = ExitStack()

    def __enter__(self) -> DeviceMeter:
        """Puts the allocator's mark back."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._began_bytes = torch.cuda.memory_allocated(self._device)
        for module in (torch.cuda, torch.accelerator):
            reset = partial(self._reset, module.reset_peak_memory_stats)
            self._patches.enter_context(mock.patch.object(module, "reset_peak_memory_stats", reset))
        return self

    def _reset(self, reset: Callable[..., None], *device: Any) -> None:
        self._read()
        reset(*device)

    def _read(self) -> None:
        self._highest_bytes = max(self._highest_bytes, torch.cuda.max_memory_allocated(self._device))

    def __exit__(self, *exception: Any) -> None:
        """Reads the mark."""
        self._patches.close()
        self._read()
        self.peak_bytes += self._highest_bytes - self._began_bytes


def meter_of(
    device: torch.device, model: torch.nn.Module, optimizer: Optimizers = None, batch: object = None
) -> PeakMeter | DeviceMeter:
    """The meter for a device."""
    meter = PeakMeter(model, optimizer, batch)
    return meter if device.type == "cpu" else DeviceMeter(meter, device)


class _MemoryProfile(profile):
    """A session without operators: they are most of what is recorded, and here nobody asks for them."""

    def _start_trace(self) -> None:
        # As in torch, but for the scopes, which `profile` does not take.
        self.entered = True
        profiler._run_on_profiler_start()
        enable: Any = torch._C._autograd._enable_profiler
        enable(profile.config(self), self.kineto_activities, {RecordScope.USER_SCOPE})
        self.profiling_start_time_ns = time.perf_counter_ns()


class PeakMeter:
    """Measures the peak of the code in its `with` block.

    Args:
        model: The module whose parameters, buffers and gradients are resident.
        optimizer: The optimizer, or several, whose state is resident.
        batch: The batch, in any nesting.

    Attributes:
        resident_bytes: What was there when the block began.
        peak_bytes: The highest point of the block, what is resident included.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizers = None, batch: object = None) -> None:
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or [])
        gradients = _storages(p.grad for p in model.parameters() if p.grad is not None)
        state = (tensor for each in optimizers for tensor in _tensors(list(each.state.values())))
        replaceable = _storages([*model.parameters(), *model.buffers(), *state]) | gradients
        resident = _storages(_tensors(batch)) | replaceable
        self._resident = {address: storage.nbytes() for address, storage in resident.items()}
        self.resident_bytes = sum(self._resident.values())
        self.peak_bytes = self.resident_bytes
        # The profiler reports no free of a block that was allocated outside any session. Gradients go away during a
        # step (`zero_grad`), and so does what is replaced (`parameter.data = ...`), so their end is also noted here.
        self._freed: list[tuple[int, int]] = []
        self._finalizers = [
            weakref.finalize(storage, lambda address: self._freed.append((time.time_ns(), address)), address)
            for address, storage in replaceable.items()
        ]
        self._profile: profile = _MemoryProfile(use_kineto=True, profile_memory=True)

    def __enter__(self) -> PeakMeter:
        """Starts the profiler's session."""
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Ends the session and walks its events."""
        self._profile.__exit__(*exception)
        for finalizer in self._finalizers:
            finalizer.detach()
        results = self._profile.kineto_results
        if results is not None:
            self.peak_bytes = self._walk(_memory_events(results.experimental_event_tree()))

    def _walk(self, events: list[tuple[int, int, int]]) -> int:
        """The highest running sum over (time, address, bytes), frees having negative bytes."""
        resident, live = dict(self._resident), dict[int, int]()
        current = peak = self.resident_bytes
        notes = [(at, address, 0) for at, address in self._freed]
        for _, address, size in sorted([*events, *notes], key=lambda event: event[0]):
            if size > 0:
                live[address] = size
                current += size
                peak = max(peak, current)
            elif address in live and size < 0:
                current -= live.pop(address)
            else:  # a resident block; one that is neither was there before and belongs to nobody we know
                current -= resident.pop(address, 0)
        return peak


def _memory_events(tree: Iterable[Any]) -> list[tuple[int, int, int]]:
    """(time in ns, address, bytes) of every allocation and free below the given events, in order of time."""
    found: list[tuple[int, int, int]] = []
    pending = list(tree)
    while pending:
        event = pending.pop()
        fields = event.extra_fields  # made anew each time that it is asked for
        size = getattr(fields, "alloc_size", None)
        if size is None:
            pending.extend(event.children)
        else:
            found.append((event.start_time_ns, fields.ptr, size))
    return sorted(found, key=lambda event: event[0])


class MeterCallback(Callback):
    """Measures every training batch of a Lightning `Trainer`. Must come first in `callbacks`.

    Attributes:
        peaks: The true peak of each batch, in bytes.
        residents: What was resident when each batch began, in bytes.
    """

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self.residents: list[int] = []
        self._meter: PeakMeter | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Starts measuring."""
        self._meter = PeakMeter(pl_module, trainer.optimizers, batch)
        self._meter.__enter__()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Ends measuring."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends measuring a batch that failed; its peak up to there counts."""
        self._stop()

    def _stop(self) -> None:
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.__exit__(None, None, None)
            self.peaks.append(meter.peak_bytes)
            self.residents.append(meter.resident_bytes)


class StepTimes(Callback):
    """Times every training batch, from its start to the next one's: whatever a callback does in between counts.

    Attributes:
        seconds: One figure per batch, the first left out (it pays for what torch sets up once).
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Notes the time."""
        self._starts.append(time.perf_counter())

    def on_train_end(self, *_: Any) -> None:
        """Ends the last batch."""
        ends = [*self._starts[1:], time.perf_counter()]
        self.seconds = [end - start for start, end in zip(self._starts, ends, strict=True)][1:]
