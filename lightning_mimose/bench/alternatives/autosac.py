"""AutoSAC: torch's planner of selective activation checkpointing (`torch.distributed._tools.sac_ilp`).

It plans once, for one batch under a fake tensor mode: which modules to checkpoint, what share of their activations to
discard, and (per module) which operations to run again. The plan is then applied with torch's selective checkpointing
contexts to every batch. Shipped, it runs on CUDA only: on a CPU its timing calls are replaced, see `_clock`.
"""

from __future__ import annotations

import copy
import io
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_mimose.actions.caches import CacheSwitch
from lightning_mimose.bench.runner import Case, NotRun, Runner
from lightning_mimose.units import find_units

SHIM = (
    "It times operations with CUDA events; here those calls are replaced by a clock (a shim of ours), and its plan is "
    "its own, but dropout's masks are always drawn again. It plans for the largest batch only, and knows nothing of "
    "the optimizer's state: that is taken off its budget."
)


@dataclass(frozen=True)
class _Measured:
    """What its estimators say about the largest batch, whatever the budget.

    Attributes:
        graph: Its tree of modules, with bytes and milliseconds.
        stats: Module -> its operations.
        units: What may be checkpointed.
        state_bytes: The optimizer's, which it does not count.
        seconds: What finding this out took.
    """

    graph: Any
    stats: Mapping[str, Any]
    units: Sequence[str]
    state_bytes: int
    seconds: float


def autosac(case: Case) -> Runner:
    """Its plan for the largest batch, applied to all."""
    try:
        import pulp  # noqa: F401
        import pwlf  # noqa: F401
        from torch.distributed._tools import sac_ilp  # noqa: F401
    except ImportError as error:
        raise NotRun(f"{error.name} is not installed" if error.name else str(error)) from error
    if "autosac" not in case.shared:
        case.tell("AutoSAC: measuring")
        case.shared["autosac"] = _measure(case)
    measured = case.shared["autosac"]
    case.tell("AutoSAC: solving")
    began = time.perf_counter()
    policies = _solve(measured, case.budget_bytes)
    seconds = measured.seconds + time.perf_counter() - began
    ops = sum(len(policy) - sum(policy) for policy in policies.values())
    notes = [SHIM] if case.device.type == "cpu" else []
    notes.append(f"{len(policies)} modules checkpointed, {ops} operations run again.")
    return Runner(case, prepare=partial(_apply, policies), notes=notes, planning_seconds=seconds)


class _Root(nn.Module):
    """Calls the model and returns its loss: a module whose result is a tensor, at the top of the tree."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss(self.model, batch)


_PREFIX = f"{_Root.__name__}.model."
"""What its names of modules begin with."""


def _measure(case: Case) -> _Measured:
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
    from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
    from torch.distributed._tools.mem_tracker import MemTracker, _ModState
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    began = time.perf_counter()
    real = case.work.build()
    CacheSwitch().off(real)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        model = _Root(copy.deepcopy(real), case.work.loss)
    batch = tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, case.largest)
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    optimizer = torch.optim.AdamW(model.parameters())

    memory, runtime, operations = MemTracker(), RuntimeEstimator(), SACEstimator()
    with mode, _clock(case.device), _quiet(), _kept_alive():
        memory.track_external(model, optimizer, *tensors)
        with memory:
            for repeat in range(2):
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                if not repeat:
                    memory.reset_mod_stats()
        with runtime("operator-level-benchmark"):
            model(batch).backward()
        with operations("operator-level-benchmark"):
            model(batch)
        for module, seen in list(memory.memory_tracking.items()):
            if _ModState.PRE_BW not in seen.snapshots:  # its results are in an object that torch cannot look into
                del memory.memory_tracking[module]
        for name, trade in list(operations.sac_mod_stats.items()):
            if not sum(trade.memory):  # a module that keeps nothing; it divides by that
                del operations.sac_mod_stats[name]
        info = aggregate_stats(model, memory, runtime, operations, case.device)
    known = {stats["fqn"] for stats in info["mod_stats"]}
    orders: Any = info["mod_order"]
    for order in orders.values():  # its graph takes each module once, and only those of the model
        order[:] = dict.fromkeys(name for name in order if name in known)
    for stats in info["mod_stats"]:
        if not np.isfinite(stats["slopes"]).all():  # a module without a trade to make; its program refuses NaN
            stats["is_leaf"], stats["n_segments"] = True, 0
    graph = parse_module_info(info)
    units = [f"{_PREFIX}{unit.name}" for unit in find_units(real) if unit.shelter]
    state_bytes = 2 * sum(parameter.nbytes for parameter in real.parameters() if parameter.requires_grad)
    return _Measured(graph, operations.sac_mod_stats, units, state_bytes, time.perf_counter() - began)


def _solve(measured: _Measured, budget_bytes: int) -> dict[str, list[int]]:
    """Module -> for each of its operations in order, whether its result is kept."""
    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp

    with _quiet():
        shares, _, peak = sac_milp(
            measured.graph, memory_budget=(budget_bytes - measured.state_bytes) / 2**30, ac_units=list(measured.units)
        )
        if peak < 0:
            raise NotRun("its solver finds no plan for the largest batch under this budget")
        return {
            name.removeprefix(_PREFIX): get_optimal_checkpointing_policy_per_module(measured.stats[name], 1 - share)
            for name, share in shares.items()
            if share > 0
        }


def _apply(policies: Mapping[str, Sequence[int]], model: nn.Module) -> None:
    CacheSwitch().off(model)
    for name, policy in policies.items():
        module = model.get_submodule(name)
        contexts = partial(_contexts, tuple(policy))
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, context_fn=contexts)


def _contexts(policy: Sequence[int]) -> tuple[Any, Any]:
    """Contexts for a region's forward and its recomputation, each of which counts the operations anew."""
    from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP

    counts = {False: 0, True: 0}

    def decide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in OPS_TO_ALWAYS_SKIP:
            return CheckpointPolicy.PREFER_RECOMPUTE
        index = counts[context.is_recompute]
        counts[context.is_recompute] += 1
        # Kept, what is written in place would be found as the last write left it, and its plans were seen to keep one
        # write and not the next. Dropout's mask on a CPU is made so: all of them are drawn again.
        if operation._schema.is_mutable or operation.name().startswith("aten::empty"):
            return CheckpointPolicy.PREFER_RECOMPUTE
        keeps = index < len(policy) and policy[index]
        return CheckpointPolicy.PREFER_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    found: tuple[Any, Any] = create_selective_checkpoint_contexts(decide)
    return found


class _Event:
    """A point in time, for what asks for CUDA's."""

    def __init__(self, **_: Any) -> None:
        self._seconds = 0.0

    def record(self, *_: Any) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, later: _Event) -> float:
        """Milliseconds, as CUDA's events tell them."""
        return 1e3 * (later._seconds - self._seconds)


@contextmanager
def _clock(device: torch.device) -> Iterator[None]:
    """On a CPU, lets the estimators time operations with a clock instead of an accelerator's events.

    CUDA's own until torch 2.13, any accelerator's from 2.14 on.
    """
    if device.type != "cpu":
        yield
        return
    nothing: Callable[..., Any] = lambda *_: None  # noqa: E731
    with (
        mock.patch.object(torch, "Event", _Event),
        mock.patch.object(torch.accelerator, "current_stream", nothing),
        mock.patch.object(torch.accelerator, "synchronize", nothing),
        mock.patch.object(torch.cuda, "Event", _Event),
        mock.patch.object(torch.cuda, "current_stream", nothing),
        mock.patch.object(torch.cuda, "synchronize", nothing),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        yield


@contextmanager
def _kept_alive() -> Iterator[None]:
    """Holds modules that a forward makes and forgets (a loss, say): its tracker follows them into backward."""
    held: list[nn.Module] = []
    handle = register_module_forward_pre_hook(lambda module, _: held.append(module))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    log = logging.getLogger("torch.distributed._tools.sac_ilp")  # which has a level of its own
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
