"""The plan: which unit takes which action for one batch size. A value that touches no tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from lightning_mimose.menu import KEEP


@lru_cache(maxsize=4096)
def _pair(unit: str, action: str) -> tuple[str, str]:
    """One object for equal pairs: a thousand plans of one model are made of the same few."""
    return unit, action


@dataclass(frozen=True)
class Plan:
    """Unit name -> action, with what it is predicted to cost. Frozen, hashable, serialisable.

    Attributes:
        choices: The units that do something else than *keep*, with their action, sorted by name.
        units: Every unit that was planned, in forward order.
        predicted_peak_bytes: Peak of the step under this plan, resident bytes included.
        added_seconds: Time that the plan adds to the step.

    Example:
        >>> plan = Plan.of({"a": "recompute", "b": "keep"}, predicted_peak_bytes=100, added_seconds=0.5)
        >>> plan.actions["a"], plan.actions["b"], len(plan)
        ('recompute', 'keep', 1)
        >>> Plan.from_dict(plan.to_dict()) == plan
        True
    """

    choices: tuple[tuple[str, str], ...]
    units: tuple[str, ...]
    predicted_peak_bytes: int
    added_seconds: float

    @classmethod
    def of(cls, actions: Mapping[str, str], *, predicted_peak_bytes: int, added_seconds: float) -> Plan:
        """Build a plan from a mapping of unit name to action that names every unit, in forward order."""
        choices = tuple(sorted(_pair(unit, action) for unit, action in actions.items() if action != KEEP))
        return cls(choices, tuple(actions), int(predicted_peak_bytes), float(added_seconds))

    @property
    def actions(self) -> Mapping[str, str]:
        """Unit name -> action, every planned unit in forward order (read-only)."""
        chosen = dict(self.choices)
        return MappingProxyType({unit: chosen.get(unit, KEEP) for unit in self.units})

    def __len__(self) -> int:
        """Number of units that do something else than *keep*."""
        return len(self.choices)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """The (unit, action) pairs that are not *keep*."""
        return iter(self.choices)

    def __str__(self) -> str:
        """One line: how many units act, what the step will reach, what it costs."""
        return (
            f"{len(self)} of {len(self.units)} units act, peak {self.predicted_peak_bytes:,} bytes, "
            f"+{self.added_seconds * 1e3:.2f} ms"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "actions": dict(self.actions),
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "added_seconds": self.added_seconds,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of `to_dict`."""
        return cls.of(
            data["actions"],
            predicted_peak_bytes=data["predicted_peak_bytes"],
            added_seconds=data["added_seconds"],
        )
