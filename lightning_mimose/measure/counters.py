"""What an accelerator's caching allocator counts, read on the host and without a synchronisation.

All at once: each of torch's own getters (`torch.cuda.memory_allocated`) collects some hundred counters for one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Counters(NamedTuple):
    """One reading, in bytes.

    Attributes:
        requested_bytes: What live tensors have asked for. What they were given goes with the blocks that happened to be
            free: up to a megabyte more for each, and not the same twice.
        requested_peak_bytes: The largest since peaks were reset.
        held_bytes: What the allocator could not do without: what was in use at most, or is now together with the rest
            of the segments that this lies in. Segments that nothing lies in it gives back before it fails.
        reserved_bytes: What it has from the device.
        reserved_peak_bytes: The largest since peaks were reset.
    """

    requested_bytes: int
    requested_peak_bytes: int
    held_bytes: int
    reserved_bytes: int
    reserved_peak_bytes: int


def exist(device: torch.device) -> bool:
    """Whether a device has an allocator that counts; the host's has none.

    Example:
        >>> exist(torch.device("cpu")), exist(torch.device("cuda"))
        (False, True)
    """
    return device.type != "cpu"


def can_be_read(device: torch.device) -> bool:
    """Whether torch can read them on a device that should have them."""
    try:
        something = torch.empty(1, device=device)  # before there is any, every device has no more than nothing to tell
        return read(device).requested_bytes >= something.nbytes
    except (RuntimeError, AttributeError, AssertionError, ValueError):  # a plugged-in allocator may count nothing
        return False


def read(device: torch.device) -> Counters:
    """Read all counters of an accelerator.

    Args:
        device: The accelerator.
    """
    value = _values(device)
    # Of another allocator than torch's own (cudaMallocAsync, a plugged-in one) this is 0.
    asked = "requested_bytes" if value("requested_bytes", "peak") else "allocated_bytes"
    # In use are blocks too that were freed while another stream may still read them.
    given, unused = (value(name, "current") for name in ("active_bytes", "inactive_split_bytes"))
    return Counters(
        requested_bytes=value(asked, "current"),
        requested_peak_bytes=value(asked, "peak"),
        held_bytes=max(value("allocated_bytes", "peak"), value("active_bytes", "peak"), given + unused),
        reserved_bytes=value("reserved_bytes", "current"),
        reserved_peak_bytes=value("reserved_bytes", "peak"),
    )


def reset_peaks(device: torch.device) -> None:
    """Peaks begin anew, at what there is now."""
    (torch.cuda if device.type == "cuda" else torch.accelerator).reset_peak_memory_stats(device)


def _values(device: torch.device) -> Callable[[str, str], int]:
    if device.type == "cuda":
        nested: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)
        return lambda name, kind: int(nested[name]["all"][kind]) if name in nested else 0
    flat: dict[str, Any] = torch.accelerator.memory_stats(device)
    return lambda name, kind: int(flat.get(f"{name}.all.{kind}", 0))
