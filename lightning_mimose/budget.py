"""What was asked for, in bytes, and what the device has.

A budget is written once, by a person ("8GB", 0.8, "auto"); inside the package there are only bytes. Sizes are
decimal unless they say otherwise: 1 GB is 10**9 bytes, 1 GiB is 2**30.
"""

from __future__ import annotations

import math
import numbers
import os
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

import torch

from lightning_mimose.errors import BudgetError, UnsupportedError

AUTO_SHARE = 0.95
"""Share of what can be had that "auto" asks for: the rest is for fragmentation, kernel workspaces and neighbours."""

_LARGEST_BYTES = 2**63 - 1  # torch counts bytes in int64
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SCALES = {"b": 1, **_DECIMAL, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
# A comma must separate groups of three digits: "1,5 GB" is somebody's 1.5, and to read it as 15 would be a bad guess.
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+(?:_\d+)*)"
_NUMBER = re.compile(rf"((?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:e[+-]?\d{{1,3}})?)\s*(%|b|[kmgt]i?b)?", re.ASCII | re.I)
_FORMS = 'a size ("8GB", "7.5 GiB"), a share of the device ("80%", 0.8), whole bytes (8000000000, 8e9) or "auto"'


@dataclass(frozen=True)
class Budget:
    """A budget as it was asked for, not yet tied to a device.

    Attributes:
        spec: What the user wrote.
        kind: Whether `amount` is bytes, a fraction of the device, or left to the device ("auto").
        amount: Bytes (int) for "bytes", a number in (0, 1] for "fraction", `AUTO_SHARE` for "auto".
    """

    spec: str | int | float
    kind: Literal["bytes", "fraction", "auto"]
    amount: int | float

    def resolve(self, memory: DeviceMemory, held_bytes: int = 0) -> int:
        """The budget in bytes on this device.

        "auto" is `AUTO_SHARE` of what is free now plus what this process holds already, for a budget bounds everything
        the process has on the device, resident memory included.

        Args:
            memory: What the device has.
            held_bytes: Bytes this process has on the device already, so not part of the free ones. With a caching
                allocator that is what it reserved (`torch.cuda.memory_reserved`): its cached blocks are not free.

        Returns:
            Bytes, from 1 to `memory.total_bytes`.

        Raises:
            BudgetError: If the budget exceeds the device, or nothing is left on it.

        Example:
            >>> gpu = DeviceMemory(total_bytes=16 * 10**9, free_bytes=10 * 10**9, description="cuda:0")
            >>> parse_budget("8GB").resolve(gpu), parse_budget("25%").resolve(gpu)
            (8000000000, 4000000000)
            >>> parse_budget("auto").resolve(gpu, held_bytes=2 * 10**9)
            11400000000
        """
        total = memory.total_bytes
        if self.kind == "bytes":
            if self.amount > total:
                raise BudgetError(
                    f"The budget {self.spec!r} is {_both(int(self.amount))}, but {memory.description} has "
                    f'{_both(total)} in all. Ask for at most that, for a share such as "80%", or for "auto".'
                )
            return int(self.amount)
        within = total if self.kind == "fraction" else min(total, memory.free_bytes + held_bytes)
        resolved = int(within * self.amount)
        if resolved < 1:
            raise BudgetError(
                f"The budget {self.spec!r} comes to no bytes at all: {memory.description} has {_both(total)}, of which "
                f"{_both(memory.free_bytes)} are free. Free memory on it or ask for a larger budget."
            )
        return resolved


def parse_budget(value: str | int | float) -> Budget:
    """Read a budget as people write it.

    Strings parse like numbers: an int is bytes (1 is one byte), a float in (0, 1] is a fraction of the device, an
    integral float above 1 is bytes. Units are B, KB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of
    1024), in any case; part bytes are dropped. Digits may be grouped: "8_000_000_000", "8,000,000,000".

    Args:
        value: A size, a share, a number of bytes, or "auto".

    Raises:
        BudgetError: If it is none of these, or not positive.

    Example:
        >>> parse_budget("1.5 GB")
        Budget(spec='1.5 GB', kind='bytes', amount=1500000000)
        >>> parse_budget("80%").amount, parse_budget(0.8).kind, parse_budget("auto").kind
        (0.8, 'fraction', 'auto')
        >>> parse_budget(1.5)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        lightning_mimose.errors.BudgetError: The budget 1.5 is neither a share of the device, in (0, 1], nor ...
    """
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):  # numpy's scalars are numbers.Real too
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
        return _from_number(number, number)
    raise BudgetError(f"The budget {value!r} is a {type(value).__name__}. Give {_FORMS}.")


def budget_in_bytes(value: str | int | float) -> int:
    """Read a budget where no device is at hand, so that it can be no share of one.

    Raises:
        BudgetError: As `parse_budget`, or it is a share of a device.

    Example:
        >>> budget_in_bytes("8GB")
        8000000000
    """
    budget = parse_budget(value)
    if budget.kind != "bytes":
        raise BudgetError(f'The budget {value!r} depends on the device. Give bytes here, as a number or as "8GB".')
    return int(budget.amount)


def _parse_text(spec: str) -> Budget:
    text = spec.strip()
    if text.lower() == "auto":
        return Budget(spec, "auto", AUTO_SHARE)
    match = _NUMBER.fullmatch(text) if len(text) <= 100 else None
    if match is None:
        raise BudgetError(f"The budget {spec!r} could not be read. Give {_FORMS}.")
    digits, unit = match[1].replace(",", "").replace("_", ""), (match[2] or "").lower()
    if not unit:
        return _from_number(spec, int(digits) if digits.isdigit() else float(digits))
    number = Fraction(digits.rstrip("."))  # exact: 0.1 GB is 100,000,000 bytes
    if unit == "%":
        if not 0 < number <= 100:
            raise BudgetError(f"The budget {spec!r} must be above 0% and at most 100% of the device. Give {_FORMS}.")
        return Budget(spec, "fraction", float(number / 100))
    return _in_bytes(spec, int(number * _SCALES[unit]))


def _from_number(spec: str | int | float, number: int | float) -> Budget:
    if isinstance(number, int):
        return _in_bytes(spec, number)
    if 0 < number <= 1:
        return Budget(spec, "fraction", number)
    if math.isfinite(number) and number.is_integer():
        return _in_bytes(spec, int(number))
    raise BudgetError(
        f"The budget {spec!r} is neither a share of the device, in (0, 1], nor a whole, positive number of bytes. "
        f"Give {_FORMS}."
    )


def _in_bytes(spec: str | int | float, amount: int) -> Budget:
    if not 1 <= amount <= _LARGEST_BYTES:
        raise BudgetError(f"The budget {spec!r} must be from 1 to 2**63 - 1 bytes. Give {_FORMS}.")
    return Budget(spec, "bytes", amount)


def format_bytes(n: int) -> str:
    """Bytes for people to read: decimal units, two places.

    Example:
        >>> format_bytes(8 * 10**9), format_bytes(512), format_bytes(2**20)
        ('8.00 GB', '512 B', '1.05 MB')
    """
    text = f"{n} B"
    for unit, scale in _DECIMAL.items():
        if abs(n) >= (1000 if unit == "kb" else 999.995 * scale / 1000):  # what would read "1000.00 KB" is "1.00 MB"
            text = f"{n / scale:.2f} {unit.upper()}"
    return text


def _both(n: int) -> str:
    """Decimal and binary, for messages in which the difference may be the very mistake."""
    return f"{format_bytes(n)} ({n / 2**30:.2f} GiB)"


@dataclass(frozen=True)
class DeviceMemory:
    """What a device has, in bytes, at one moment.

    Attributes:
        total_bytes: All that this process could ever have.
        free_bytes: What can be had now on top of what this process holds.
        description: The device in words, for messages.
        others_bytes: What other processes hold on the device, where that can be known.
    """

    total_bytes: int
    free_bytes: int
    description: str
    others_bytes: int | None = None


def device_memory(device: torch.device, root: Path = Path("/")) -> DeviceMemory:
    """What the device has now.

    On CPU the limits of the control groups (containers, batch systems) count as much as the machine's memory, and file
    cache that the kernel would give back counts as free. Where only the total is known (macOS), it counts as free.

    Args:
        device: The device to train on; without an index, the current one.
        root: Where /proc and /sys are found (for tests).

    Raises:
        UnsupportedError: If neither the system nor this torch can tell the device's memory.

    Example:
        >>> memory = device_memory(torch.device("cpu"))
        >>> 0 <= memory.free_bytes <= memory.total_bytes
        True
    """
    if device.type == "cpu":
        return _host_memory(root)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        free, total = torch.cuda.mem_get_info(index)
        others = _others_on_cuda(index, total - free)
        name = f"cuda:{index} ({torch.cuda.get_device_name(index)})"
        if others:
            name += f", of which other processes hold {format_bytes(others)},"
        return DeviceMemory(total, free, name, others)
    try:
        free, total = torch.accelerator.get_memory_info(device)  # AttributeError: not in torch 2.6
    except (AttributeError, RuntimeError, ValueError) as error:
        raise UnsupportedError(
            f"The memory of the device {str(device)!r} cannot be read by torch {torch.__version__} ({error}). "
            "Train on cpu or cuda, or use a newer torch."
        ) from error
    return DeviceMemory(total, free, str(device))


def _others_on_cuda(index: int, used_bytes: int) -> int | None:
    """Bytes of `used_bytes` that are not this process's, or None where NVML is absent or cannot tell."""
    try:
        import pynvml  # type: ignore[import-untyped,unused-ignore]  # nvidia-ml-py, which ships no types

        pynvml.nvmlInit()
        try:
            # By UUID: NVML's indices know nothing of CUDA_VISIBLE_DEVICES.
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
            own = [p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()]
        finally:
            pynvml.nvmlShutdown()
        # In a container NVML may list processes under the host's ids, or none: then it cannot tell whose is what.
        return max(0, used_bytes - sum(own)) if own else None
    except Exception:  # whatever NVML does, it only adds words to messages
        return None


def _host_memory(root: Path) -> DeviceMemory:
    lines = [line.split() for line in _read(root / "proc/meminfo").splitlines()]
    kib = {line[0]: int(line[1]) for line in lines if len(line) > 1}
    try:
        total = kib["MemTotal:"] * 1024 if kib else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError) as error:
        raise UnsupportedError("This system does not tell how much memory it has: train on an accelerator.") from error
    free = kib.get("MemAvailable:", kib.get("MemFree:", 0)) * 1024 if kib else total
    description = "this machine"
    for folder, limit, left in _cgroups(root):
        if limit < total:
            total, description = limit, f"this process's control group (limit in {folder})"
        free = min(free, left)
    return DeviceMemory(total, max(0, min(free, total)), description)


def _cgroups(root: Path) -> list[tuple[Path, int, int]]:
    """(folder, limit, what is left of it) of every control group around this process that has a memory limit."""
    v1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    v2 = ("memory.max", "memory.current", "inactive_file")
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        places = [("", *v2), ("unified", *v2)] if number == "0" else [v1] if "memory" in controllers.split(",") else []
        # A container may show the host's path here while its own group is mounted as the root: missing folders are
        # skipped on the way up, and of a path that leaves the mount ("/../x") only the root can be seen.
        inner = Path("." if ".." in path.split("/") else path.strip("/"))
        for mount, limit_file, usage_file, cache_key in places:
            for folder in (root / "sys/fs/cgroup" / mount / part for part in (inner, *inner.parents)):
                limit = _read(folder / limit_file).strip()
                if limit.isdigit():  # v2 says "max" where there is none; v1's "none" is a number beyond any machine
                    stat = dict(pair.split() for pair in _read(folder / "memory.stat").splitlines())
                    used = int(_read(folder / usage_file) or 0) - int(stat.get(cache_key, 0))
                    found.append((folder, int(limit), int(limit) - used))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
