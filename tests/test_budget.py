"""Budgets: what people write, what a device has, and what the two come to in bytes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mimose import budget as budget_module
from lightning_mimose.budget import AUTO_SHARE, Budget, DeviceMemory, device_memory, format_bytes, parse_budget
from lightning_mimose.errors import BudgetError, UnsupportedError

GB = 10**9
GIB = 2**30
DEVICE = DeviceMemory(total_bytes=16 * GB, free_bytes=10 * GB, description="cuda:0 (a card)")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("spec", "amount"),
    [
        ("8GB", 8 * GB),
        ("8GiB", 8 * GIB),
        ("8 gb", 8 * GB),
        ("  8\tGIB ", 8 * GIB),
        ("1.5 GB", 1_500_000_000),
        ("0.1GB", 100_000_000),
        (".5 KiB", 512),
        ("3KB", 3000),
        ("3MB", 3 * 10**6),
        ("3TB", 3 * 10**12),
        ("3KiB", 3072),
        ("3MiB", 3 * 2**20),
        ("3TiB", 3 * 2**40),
        ("7B", 7),
        ("1.9 B", 1),
        ("8_000 MB", 8 * GB),
        ("8,000 MB", 8 * GB),
        ("8_000_000_000", 8 * GB),
        ("8,000,000,000", 8 * GB),
        ("8000000000", 8 * GB),
        ("8e9", 8 * GB),
        ("8.0E+9", 8 * GB),
        ("1", 1),
        (1, 1),
        (8 * GB, 8 * GB),
        (8e9, 8 * GB),
        (2.0, 2),
    ],
)
def test_sizes(spec: str | float, amount: int) -> None:
    """Every way to write a size comes to the exact bytes, as an int."""
    budget = parse_budget(spec)
    assert budget == Budget(spec, "bytes", amount)
    assert type(budget.amount) is int


@pytest.mark.parametrize(
    ("spec", "share"),
    [("80%", 0.8), ("0.8", 0.8), (0.8, 0.8), ("12.5 %", 0.125), ("100%", 1.0), ("1.0", 1.0), (1.0, 1.0), ("5e-1", 0.5)],
)
def test_fractions(spec: str | float, share: float) -> None:
    """Percentages and floats in (0, 1] are shares of the device, and 1.0 is all of it while 1 is one byte."""
    assert parse_budget(spec) == Budget(spec, "fraction", share)


@pytest.mark.parametrize("spec", ["auto", "AUTO", " Auto "])
def test_auto(spec: str) -> None:
    """'auto' is read in any case."""
    assert parse_budget(spec).kind == "auto"


@pytest.mark.parametrize(
    "spec",
    [
        *(True, False, None, [], torch.zeros(1), 0, -1, 0.0, -0.5, -8e9, 1.5, 8.5e0, float("nan"), float("inf"), 2**63),
        *("", " ", "8 XB", "8G", "8 IB", "GB", "0", "0GB", "0.0", "0%", "101%", "-8GB", "-1", "1.5", "nan", "inf"),
        *("1e400", "8e999GB", "1,5 GB", "8,00 GB", "8__0", "8_", "8 GB free", "0x10", "٨GB", "8GB\n8GB", "9" * 5000),
    ],
    ids=lambda spec: repr(spec)[:20],
)
def test_refused(spec: Any) -> None:
    """Anything else is refused with what was given and what would be taken."""
    with pytest.raises(BudgetError) as caught:
        parse_budget(spec)
    message = str(caught.value)
    assert repr(spec) in message
    assert '"8GB"' in message
    assert '"auto"' in message


def test_numpy_scalars() -> None:
    """Numbers that come out of numpy count as numbers, and are kept as Python's own."""
    numpy = pytest.importorskip("numpy")
    assert parse_budget(numpy.int64(5)) == Budget(5, "bytes", 5)
    assert parse_budget(numpy.float32(0.5)) == Budget(0.5, "fraction", 0.5)
    assert type(parse_budget(numpy.int64(5)).spec) is int


@given(st.one_of(st.integers(-10, 2**64), st.floats()))
def test_strings_parse_like_numbers(number: float) -> None:
    """A number and the string that Python prints for it are the same budget, or are both refused."""
    try:
        expected = parse_budget(number)
    except BudgetError:
        with pytest.raises(BudgetError):
            parse_budget(repr(number))
    else:
        assert dataclasses.replace(parse_budget(repr(number)), spec=number) == expected


@given(st.text(max_size=30))
def test_no_other_error(text: str) -> None:
    """Whatever the text, it is a budget or a BudgetError."""
    try:
        budget = parse_budget(text)
    except BudgetError:
        return
    assert budget.amount > 0


@given(st.integers(1, 2**62))
def test_format_round_trips(n: int) -> None:
    """A formatted size is a budget of its own, equal to within the two places shown, and prints the same again."""
    text = format_bytes(n)
    read = parse_budget(text).amount
    assert abs(read - n) <= 0.005 * n
    assert format_bytes(int(read)) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 KB"), (999_994, "999.99 KB"), (999_996, "1.00 MB"), (8 * GB, "8.00 GB")],
)
def test_format(n: int, text: str) -> None:
    """Units change where the digits would run over."""
    assert format_bytes(n) == text
    assert format_bytes(-n) == (text if n == 0 else f"-{text}")
    assert format_bytes(5 * 10**15) == "5000.00 TB"


def test_resolve() -> None:
    """Each kind of budget comes to the bytes it promises."""
    assert parse_budget("16GB").resolve(DEVICE) == 16 * GB
    assert parse_budget("25%").resolve(DEVICE) == 4 * GB
    assert parse_budget(1.0).resolve(DEVICE) == 16 * GB
    assert parse_budget("auto").resolve(DEVICE) == int(10 * GB * AUTO_SHARE)
    assert parse_budget("auto").resolve(DEVICE, held_bytes=2 * GB) == int(12 * GB * AUTO_SHARE)


def test_resolve_above_the_device() -> None:
    """A budget above the device is refused with both numbers in both units."""
    with pytest.raises(BudgetError) as caught:
        parse_budget("16GiB").resolve(DEVICE)
    for part in ("'16GiB'", "17.18 GB", "16.00 GiB", "16.00 GB", "14.90 GiB", DEVICE.description):
        assert part in str(caught.value)


@pytest.mark.parametrize("spec", ["auto", 1e-12])
def test_resolve_to_nothing(spec: str | float) -> None:
    """A full device, or a share below one byte, leaves no budget to train in."""
    with pytest.raises(BudgetError, match="no bytes"):
        parse_budget(spec).resolve(DeviceMemory(GB, 0, "full"))


@given(
    total=st.integers(100, 2**50),
    free=st.integers(0, 2**50),
    held=st.integers(0, 2**50),
    more=st.integers(0, 2**50),
    shares=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
)
def test_resolve_is_monotone(total: int, free: int, held: int, more: int, shares: tuple[float, float]) -> None:
    """More free memory, more held or a larger share never gives a smaller budget, and none exceeds the device."""
    free = min(free + 2, total)
    memory, roomier = DeviceMemory(total, free, "d"), DeviceMemory(total, min(free + more, total), "d")
    auto = parse_budget("auto")
    assert 1 <= auto.resolve(memory, held) <= auto.resolve(memory, held + more) <= total
    assert auto.resolve(memory, held) <= auto.resolve(roomier, held)
    small, large = sorted(shares)
    assert 1 <= parse_budget(small).resolve(memory) <= parse_budget(large).resolve(memory) <= total


# The device


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:   1000 kB\nMemFree:   100 kB\nMemAvailable:   600 kB\nHugePages_Total:   0\n"}
CG = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        pytest.param({}, 1_024_000, 614_400, id="no cgroup"),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", f"{CG}/memory.max": "max\n", f"{CG}/memory.current": "5\n"},
            *(1_024_000, 614_400),
            id="v2 without a limit",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/\n",
                f"{CG}/memory.max": "500000\n",
                f"{CG}/memory.current": "300000\n",
                f"{CG}/memory.stat": "anon 1\nfile 90000\ninactive_file 80000\nactive_file 10000\n",
            },
            *(500_000, 280_000),
            id="v2, file cache is free",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/job/step\n",
                f"{CG}/job/memory.max": "400000\n",
                f"{CG}/job/memory.current": "50000\n",
                f"{CG}/job/step/memory.max": "900000\n",
                f"{CG}/job/step/memory.current": "880000\n",
            },
            *(400_000, 20_000),
            id="v2 nested, the tightest level counts for each",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/../other\n", f"{CG}/memory.max": "400000\n", "sys/fs/other/memory.max": "1\n"},
            *(400_000, 400_000),
            id="v2, path outside the mount",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", f"{CG}/memory.max": "400000\n", f"{CG}/memory.current": "500000\n"},
            *(400_000, 0),
            id="v2, above its limit",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n",
                f"{CG}/memory/memory.limit_in_bytes": "9223372036854771712\n",
                f"{CG}/memory/memory.usage_in_bytes": "123\n",
                f"{CG}/memory/job/memory.limit_in_bytes": "300000\n",
                f"{CG}/memory/job/memory.usage_in_bytes": "200000\n",
                f"{CG}/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 50000\n",
            },
            *(300_000, 150_000),
            id="v1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/docker/0123\n",
                f"{CG}/memory/memory.limit_in_bytes": "300000\n",
                f"{CG}/memory/memory.usage_in_bytes": "0\n",
            },
            *(300_000, 300_000),
            id="v1, the host's path inside a container",
        ),
        pytest.param(
            {"proc/self/cgroup": "1:cpu:/x\n0::/\n", f"{CG}/unified/memory.max": "200000\n"},
            *(200_000, 200_000),
            id="v2 beside v1",
        ),
    ],
)
def test_host_memory(tmp_path: Path, files: dict[str, str], total: int, free: int) -> None:
    """On CPU the machine's memory and every control group around the process bound the total and what is free."""
    memory = device_memory(CPU, write(tmp_path, MEMINFO | files))
    assert (memory.total_bytes, memory.free_bytes) == (total, free)
    assert ("control group" in memory.description) == (total < 1_024_000)


def test_host_memory_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc (macOS) sysconf gives the total, and without that the system is refused by name."""
    monkeypatch.setattr(budget_module.os, "sysconf", {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}.__getitem__)
    memory = device_memory(CPU, tmp_path)
    assert (memory.total_bytes, memory.free_bytes) == (40_960, 40_960)
    monkeypatch.delattr(budget_module.os, "sysconf")
    with pytest.raises(UnsupportedError, match="does not tell"):
        device_memory(CPU, tmp_path)


def test_host_memory_here() -> None:
    """On the machine that runs this test the numbers are plausible and usable."""
    memory = device_memory(CPU)
    assert 0 < memory.free_bytes <= memory.total_bytes < 2**50
    assert 0 < parse_budget("auto").resolve(memory) < memory.total_bytes


def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (3 * GB, 10 * GB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))


def fake_nvml(processes: list[Any], opened: list[str]) -> SimpleNamespace:
    return SimpleNamespace(
        nvmlInit=lambda: opened.append("nvml"),
        nvmlShutdown=opened.pop,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda uuid: processes if uuid == "GPU-uuid-1" else 1 / 0,
    )


@pytest.mark.parametrize(
    ("processes", "others"),
    [
        ([SimpleNamespace(pid=0, usedGpuMemory=2 * GB), SimpleNamespace(pid=-1, usedGpuMemory=5 * GB)], 5 * GB),
        ([SimpleNamespace(pid=0, usedGpuMemory=8 * GB)], 0),
        ([SimpleNamespace(pid=0, usedGpuMemory=None)], None),
        ([SimpleNamespace(pid=-1, usedGpuMemory=5 * GB)], None),
        (None, None),
    ],
    ids=["a neighbour", "none", "no numbers", "other pid namespace", "broken driver"],
)
def test_cuda_memory(monkeypatch: pytest.MonkeyPatch, processes: list[Any] | None, others: int | None) -> None:
    """On CUDA the driver's numbers count; NVML adds the neighbours, closes what it opened, and may fail in any way."""
    fake_cuda(monkeypatch)
    opened: list[str] = []
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(processes, opened))  # type: ignore[arg-type]
    monkeypatch.setattr(budget_module.os, "getpid", lambda: 0)
    memory = device_memory(torch.device("cuda"))
    assert (memory.total_bytes, memory.free_bytes, memory.others_bytes) == (10 * GB, 3 * GB, others)
    assert memory.description.startswith("cuda:1 (a card)")
    assert ("5.00 GB" in memory.description) == (others == 5 * GB)
    assert opened == []


def test_cuda_memory_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nvidia-ml-py nothing is missing but the neighbours."""
    fake_cuda(monkeypatch)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert device_memory(torch.device("cuda", 0)) == DeviceMemory(10 * GB, 3 * GB, "cuda:0 (a card)")


def test_other_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other accelerators answer through torch.accelerator, and without an answer are refused by name."""
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (GB, 2 * GB), raising=False)
    assert device_memory(torch.device("xpu", 0)) == DeviceMemory(2 * GB, GB, "xpu:0")
    monkeypatch.delattr(torch.accelerator, "get_memory_info")
    with pytest.raises(UnsupportedError, match="'xpu:0' cannot be read"):
        device_memory(torch.device("xpu", 0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_memory_here() -> None:
    """On a real card what this process takes is no longer free, and is not laid at other processes' door."""
    torch.cuda.empty_cache()
    before = device_memory(torch.device("cuda"))
    taken = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    after = device_memory(torch.device("cuda"))
    assert taken.is_cuda
    assert after.total_bytes == before.total_bytes
    assert before.free_bytes - after.free_bytes >= 2**28
    if before.others_bytes is not None and after.others_bytes is not None:
        assert after.others_bytes - before.others_bytes < 2**28
