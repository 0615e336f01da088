"""What the parts of an action cost: operations on the device, and what the host does besides.

On an accelerator both go on at once, and a step takes as long as the slower of them: where the device is what takes the
time, what an action adds on the host costs nothing, and where it waits for the host anyway, what is computed again does
not. Of each kind of action it is asked what a step would take in which all units did it, forward and backward apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.menu import GRADES, RECOMPUTE, RECOMPUTE_LEAN
from lightning_mimose.predict.structure import Structure

LOOK_SECONDS = 1e-4
"""What it costs lean saves to look at one of the tensors that a call saves, and to hand out what was rebuilt. Measured
on a slow host where hardly anything else takes time: 50 to 150 us, in BERT, mixers, linear attention in a loop."""
AGAIN_SECONDS = 5e-5
"""What hooks on a tensor that is recomputed cost, there too."""
REGION_SECONDS = 1e-4
"""What a recomputed region costs besides its operations and that: the checkpoint."""
BACKWARD = 2
"""Operations of backward, in those of the forward."""
FORWARD_SHARE = 0.5
"""Of what the host takes for forward and backward."""
LEAST = 0.1
"""What is hidden costs that much of what it would cost alone: of two that are both hidden the lesser is chosen."""


class _HostWork(NamedTuple):
    """What an action adds on the host where all units take it, in host time of forward and backward without it.

    Measured where the host is what takes the time: BERT on two CPU cores, and on an NVIDIA H100, which gave the same.
    """

    share: float
    in_forward: float


LEAN_WORK, AGAIN_WORK = _HostWork(0.7, 0.65), _HostWork(1.25, 0.3)


@dataclass(frozen=True)
class Rates:
    """What an action's parts cost. As it comes, where one thing is done after another.

    Attributes:
        seconds_per_operation: Of the device.
        again_share: How much of that a step gets longer by, where something is recomputed.
        rebuilt_share: The same of what lean saves rebuild.
        look_seconds: For each tensor that a lean call saves.
        region_seconds: For each call that is recomputed.
        again_seconds: For each tensor that it saves.

    Example:
        >>> Rates(1e-12, again_share=0.5).again_per_operation
        5e-13
    """

    seconds_per_operation: float
    again_share: float = 1.0
    rebuilt_share: float = 1.0
    look_seconds: float = LOOK_SECONDS
    region_seconds: float = REGION_SECONDS
    again_seconds: float = 0.0

    @property
    def again_per_operation(self) -> float:
        """Seconds for an operation that is recomputed."""
        return self.seconds_per_operation * self.again_share

    @property
    def rebuilt_per_operation(self) -> float:
        """Seconds for an operation of what lean saves rebuild."""
        return self.seconds_per_operation * self.rebuilt_share


def overlapped(
    structure: Structure, values: NDArray[np.float64], seconds_per_operation: float, host_seconds: float
) -> Rates:
    """Where an accelerator computes while the host goes on.

    Args:
        structure: A step's shape.
        values: Shape (columns,); the columns for its size.
        seconds_per_operation: Of the device.
        host_seconds: What the host takes for forward and backward of a step in which everything is kept.
    """
    tensors = structure.tensors(values)
    if not (tensors and structure.surveyed):
        return Rates(seconds_per_operation)
    forward = structure.forward_operations(values) * seconds_per_operation
    rebuilding = float(values[[shape.work for shape in structure.surveyed]].sum()) * seconds_per_operation
    phases = _Phases(host_seconds, forward)
    look, rebuilt = phases.shares(LEAN_WORK, rebuilding)
    again_host, again = phases.shares(AGAIN_WORK, forward)
    per_tensor = host_seconds / tensors
    return Rates(
        seconds_per_operation,
        again_share=again,
        rebuilt_share=rebuilt,
        look_seconds=LEAN_WORK.share * look * per_tensor,
        region_seconds=0.0,
        again_seconds=AGAIN_WORK.share * again_host * per_tensor,
    )


class _Phases(NamedTuple):
    """Forward and backward of a step in which everything is kept.

    Attributes:
        host_seconds: Of both on the host.
        device_seconds: Of the forward on the device.
    """

    host_seconds: float
    device_seconds: float

    def shares(self, work: _HostWork, more_device: float) -> tuple[float, float]:
        """By what share of its own an action's work on the host lengthens the step, and that on the device.

        Args:
            work: What all units add on the host.
            more_device: What they add on the device, in backward.
        """
        more = self.host_seconds * work.share
        first, last = more * work.in_forward, more * (1 - work.in_forward)
        host, device = self.host_seconds * FORWARD_SHARE, self.device_seconds
        shown = max(host + first, device) - max(host, device)
        host, device = self.host_seconds - host, BACKWARD * device
        longer = max(host + last, device + more_device) - max(host, device)
        if host + last > device + more_device:
            return max(LEAST, (shown + longer) / more), LEAST
        return max(LEAST, shown / more), max(LEAST, longer / more_device) if more_device else 1.0


def host_work(structure: Structure, values: NDArray[np.float64], actions: Mapping[str, str]) -> float:
    """What a plan adds on the host, in what it takes there for forward and backward without one.

    Args:
        structure: A step's shape.
        values: Shape (columns,); the columns for its size.
        actions: Unit -> what it does.
    """
    tensors = structure.tensors(values)
    work = 0.0
    for call, count in zip(structure.calls, values[structure.layout.columns["tensors"]].tolist(), strict=True):
        action = actions.get(call.unit)
        again = action in (RECOMPUTE, RECOMPUTE_LEAN)
        work += count * (AGAIN_WORK.share * again + LEAN_WORK.share * (action in GRADES or action == RECOMPUTE_LEAN))
    return work / tensors if tensors else 0.0
