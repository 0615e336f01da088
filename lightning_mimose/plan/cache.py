"""Plans by input size and budget, the least recently used forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from threading import Lock
from typing import Any

from lightning_mimose.plan.plan import Plan

VERSION = 1
"""Of the format of `PlanCache.state`; another version's state is not read."""


def _encode(key: Hashable) -> Any:
    """Keys made of strings, numbers, None and tuples of those; JSON knows no tuple, so they become lists."""
    if isinstance(key, tuple):
        return [_encode(part) for part in key]
    if key is None or isinstance(key, str | int | float):
        return key
    raise TypeError(
        f"A cache key of type {type(key).__name__} needs its own `encode` and `decode` to be saved: {key!r}"
    )


def _decode(data: Any) -> Hashable:
    """The inverse of `_encode`."""
    return tuple(_decode(part) for part in data) if isinstance(data, list) else data


class PlanCache:
    """Plans known for (key, budget). Safe to use from the training loop and a planner's thread at once.

    A key is any hashable that stands for an input size; for a conservative cache round the size up (and a budget
    down) before asking, so that a plan is never used for more than it was made for.

    Attributes:
        capacity: How many plans are kept.
        hits: How many times `get` had an answer.
        misses: How many times it had none.

    Example:
        >>> cache = PlanCache(capacity=2)
        >>> plan = Plan.of({"a": "recompute"}, predicted_peak_bytes=90, added_seconds=0.5)
        >>> cache.put((8, 128), 100, plan)
        >>> cache.get((8, 128), 100) == plan, cache.get((8, 128), 120), cache.incumbents((8, 128), 120) == [plan]
        (True, None, True)
    """

    def __init__(self, capacity: int = 1024) -> None:
        if capacity < 1:
            raise ValueError(f"Expected `capacity` to be at least 1, but got {capacity}")
        self.capacity = capacity
        self.hits = 0
        self.misses = 0
        self._plans: OrderedDict[tuple[Hashable, int], Plan] = OrderedDict()
        self._budgets: dict[Hashable, set[int]] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        """How many plans are known."""
        return len(self._plans)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the lock, so that what holds a cache can be copied and sent to another process."""
        with self._lock:
            return {
                **self.__dict__,
                "_lock": None,
                "_plans": self._plans.copy(),
                "_budgets": {key: set(budgets) for key, budgets in self._budgets.items()},
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The inverse of `__getstate__`."""
        self.__dict__.update(state, _lock=Lock())

    def get(self, key: Hashable, budget_bytes: int) -> Plan | None:
        """The plan for this size and budget, or None."""
        with self._lock:
            slot = (key, budget_bytes)
            plan = self._plans.get(slot)
            if plan is None:
                self.misses += 1
                return None
            self._plans.move_to_end(slot)
            self.hits += 1
            return plan

    def put(self, key: Hashable, budget_bytes: int, plan: Plan) -> None:
        """Remember a plan; where the cache is full, forget the one that was not asked for the longest."""
        with self._lock:
            self._plans[key, budget_bytes] = plan
            self._plans.move_to_end((key, budget_bytes))
            self._budgets.setdefault(key, set()).add(budget_bytes)
            while len(self._plans) > self.capacity:
                self._remove(*next(iter(self._plans)))

    def _remove(self, key: Hashable, budget_bytes: int) -> None:
        del self._plans[key, budget_bytes]
        budgets = self._budgets[key]
        budgets.discard(budget_bytes)
        if not budgets:
            del self._budgets[key]

    def replace(self, key: Hashable, budget_bytes: int, old: Plan, new: Plan) -> bool:
        """Put a better plan where `old` still stands; nothing else moves.

        A planner's thread answers late: by then the plan may have been forgotten or made anew from other numbers, and
        an answer to the old question must not take its place.

        Returns:
            Whether it was replaced.
        """
        with self._lock:
            if self._plans.get((key, budget_bytes)) != old:
                return False
            self._plans[key, budget_bytes] = new
            return True

    def incumbents(self, key: Hashable, budget_bytes: int) -> list[Plan]:
        """Plans made for the same size and this budget or a smaller one, the largest budget first.

        They fit a more generous budget too, so no plan for it may be slower.
        """
        with self._lock:
            budgets = sorted((b for b in self._budgets.get(key, ()) if b <= budget_bytes), reverse=True)
            return [self._plans[key, budget] for budget in budgets]

    def drop(self, key: Hashable) -> None:
        """Forget the plans for a size, under all budgets."""
        with self._lock:
            for budget_bytes in list(self._budgets.get(key, ())):
                self._remove(key, budget_bytes)

    def clear_actions(self) -> None:
        """Forget all plans but those that do nothing, when what actions cost is no longer believed."""
        with self._lock:
            for key, budget_bytes in [slot for slot, plan in self._plans.items() if plan.choices]:
                self._remove(key, budget_bytes)

    def clear(self) -> None:
        """Forget all plans, when what they were made from is no longer believed. The counters stay."""
        with self._lock:
            self._plans.clear()
            self._budgets.clear()

    def state(self, encode: Callable[[Hashable], Any] = _encode) -> dict[str, Any]:
        """Plain data for JSON, the least recently used plan first.

        Args:
            encode: Makes a key plain data; the default knows strings, numbers, None and tuples of them.
        """
        with self._lock:
            plans = [[encode(key), budget, plan.to_dict()] for (key, budget), plan in self._plans.items()]
        return {"version": VERSION, "plans": plans}

    def load_state(self, state: Mapping[str, Any], decode: Callable[[Any], Hashable] = _decode) -> None:
        """Replace what is known by what `state` gave; a state of another version is ignored."""
        self.clear()
        if state.get("version") != VERSION:
            return
        for key, budget_bytes, plan in state["plans"]:
            self.put(decode(key), int(budget_bytes), Plan.from_dict(plan))
