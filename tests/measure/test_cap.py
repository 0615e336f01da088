"""The allocator's own limit, with torch's functions for it in the place of a device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightning_mimose.measure import cap, counters
from lightning_mimose.measure.cap import PAGE_BYTES, ReservedCap

DEVICE = torch.device("cuda", 0)
TOTAL_BYTES, BUDGET_BYTES = 80 << 30, 4 << 30


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the process may have of the device, in shares, as it was set; the last is in force."""
    found = [0.9]
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: found[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: found.append(share))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=TOTAL_BYTES))
    monkeypatch.setattr(counters, "read", lambda device: SimpleNamespace(reserved_bytes=0))
    return found


def test_the_limit_is_the_budget_and_goes_with_it(limits: list[float]) -> None:
    """What was in force before is again; a second `restore` changes nothing."""
    limit = ReservedCap(DEVICE, BUDGET_BYTES)
    limit.apply()
    assert limits[-1] * TOTAL_BYTES == BUDGET_BYTES
    limit.restore()
    limit.restore()
    assert limits == [0.9, BUDGET_BYTES / TOTAL_BYTES, 0.9]


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_that_grow_stay_inside(variable: str, limits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator rounds up to whole pages after it has looked at its limit."""
    monkeypatch.setenv(variable, "expandable_segments:True")
    ReservedCap(DEVICE, BUDGET_BYTES).apply()
    assert limits[-1] * TOTAL_BYTES == BUDGET_BYTES - PAGE_BYTES
    ReservedCap(DEVICE, PAGE_BYTES).apply()
    assert limits[-1] * TOTAL_BYTES == PAGE_BYTES / 2


def test_what_is_cached_beyond_it_is_returned_at_once(limits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would stay until the allocator fails."""
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    for reserved_bytes in (BUDGET_BYTES, BUDGET_BYTES + 1):
        monkeypatch.setattr(counters, "read", lambda device, n=reserved_bytes: SimpleNamespace(reserved_bytes=n))
        ReservedCap(DEVICE, BUDGET_BYTES).apply()
    assert emptied == [True]


@pytest.mark.parametrize("last", [False, True])
def test_of_several_the_latest_holds_in_whatever_order_they_go(last: bool, limits: list[float]) -> None:
    """A training that is dropped is gone when Python finds it; what was there before all of them comes last."""
    one, other = ReservedCap(DEVICE, BUDGET_BYTES), ReservedCap(DEVICE, BUDGET_BYTES // 2)
    one.apply()
    other.apply()
    (other if last else one).restore()
    assert limits[-1] * TOTAL_BYTES == (BUDGET_BYTES if last else BUDGET_BYTES // 2)
    (one if last else other).restore()
    assert limits[-1] == 0.9


def test_a_cpu_has_none(limits: list[float]) -> None:
    """Nothing is set, nothing put back."""
    limit = ReservedCap(torch.device("cpu"), BUDGET_BYTES)
    limit.apply()
    limit.restore()
    assert limits == [0.9]
    assert not cap.expands_segments()


def test_it_gives_way_only_where_it_may(limits: list[float]) -> None:
    """Where training goes on beyond the budget (`on_infeasible="warn"`), and once: what was in force is again."""
    lasting, other = ReservedCap(DEVICE, BUDGET_BYTES), ReservedCap(DEVICE, BUDGET_BYTES, lasts=False)
    assert not other.give_way()
    lasting.apply()
    assert not lasting.give_way()
    assert lasting.in_force
    lasting.restore()
    other.apply()
    assert other.give_way()
    assert not other.in_force
    assert not other.give_way()
    assert limits[-1] == 0.9


def test_it_gives_way_for_one_step(limits: list[float]) -> None:
    """Batches after it are held to the budget again; nothing is set where it did not give way, or is detached."""
    limit = ReservedCap(DEVICE, BUDGET_BYTES, lasts=False)
    limit.apply()
    capped = limits[-1]
    limit.renew()
    assert len(limits) == 2
    assert limit.give_way()
    assert limits[-1] == 0.9
    limit.renew()
    assert limits[-1] == capped
    assert limit.give_way()
    limit.restore()
    limit.renew()
    assert limits[-1] == 0.9
    assert not limit.in_force
