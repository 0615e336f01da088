"""Puts the plan's hand on a model's units, and takes it away: which are patched, and which are left alone and why."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn

from lightning_mimose.actions.caches import CacheSwitch, checkpointed_layers, checkpointing_way_out
from lightning_mimose.actions.calls import patch_unit
from lightning_mimose.actions.patch import is_patched, undoing
from lightning_mimose.actions.session import Session
from lightning_mimose.actions.trial import COLLECTIVE
from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.errors import UnitsError, UnsupportedError
from lightning_mimose.measure.cap import ReservedCap
from lightning_mimose.menu import RECOMPUTE
from lightning_mimose.sharding import gathers_inside
from lightning_mimose.units import Unit, related, runs_torchscript, whole_graphs

SCRIPTED = "it runs TorchScript, whose first runs differ from later ones in their last bits"
"""Why a scripted unit is left alone."""
GATHERS = "its parts gather their parameters from other ranks"
"""Why a unit with `fully_shard` inside it is left alone."""


class _Places(NamedTuple):
    """Where units are held, and what is around them: by which modules, under which names."""

    children: list[dict[str, nn.Module | None]]
    names: list[str]

    @classmethod
    def of(cls, model: nn.Module, units: Sequence[Unit]) -> _Places:
        """Those of some units of a model."""
        paths = [unit.name.split(".") for unit in units]
        around = sorted({tuple(path[:depth]) for path in paths for depth in range(1, len(path) + 1)})
        children = [model.get_submodule(".".join(path[:-1]))._modules for path in around]
        return cls(children, [path[-1] for path in around])

    def now(self) -> list[nn.Module | None]:
        """What is there; asked for in every step."""
        return [*map(dict.get, self.children, self.names)]


class Attachment:
    """The patched units of one model.

    Args:
        model: The model.
        units: What can be planned in it.
        session: What the units consult.
        advisor: Told what plans and shelter have to do without.
        cap: The allocator's limit, in force while units are patched.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], session: Session, advisor: Advisor, cap: ReservedCap
    ) -> None:
        self._model, self._units, self._session, self._advisor, self._cap = model, units, session, advisor, cap
        self._caches = CacheSwitch()
        self._patched: tuple[Unit, ...] = ()
        self._places, self._held = _Places([], []), list[nn.Module | None]()
        self._left_out: set[str] = set()
        self._told: set[str] = set()
        self._gave_way = False
        self._undo: Callable[[], object] = bool
        """Leaves the model as it was; called when the training is dropped without being closed, too."""

    def attach(self) -> None:
        """Patch the units, and switch off what would defeat them.

        Raises:
            UnitsError: Every unit is checkpointed already.
            UnsupportedError: Another training has patched them.
        """
        if any(is_patched(unit.module) for unit in self._units):
            gc.collect()  # by one that was dropped, maybe
        if any(is_patched(unit.module) for unit in self._units):
            raise UnsupportedError(
                f"{type(self._model).__name__} is planned by another Mimose or MimoseCallback already. Close that one "
                "first (mimose.close(), or let trainer.fit end)."
            )
        own = checkpointed_layers(self._model)
        left_out = {unit.name for unit in self._units if any(related(unit.name, layer) for layer in own if layer)}
        usable = [unit for unit in self._units if unit.name not in left_out]
        if not usable:
            raise UnitsError(
                f"All {len(self._units)} units of {type(self._model).__name__} are checkpointed by Hugging Face's own "
                f"switch. {checkpointing_way_out(self._model)} to let the budget decide."
            )
        if left_out:
            warnings.warn(
                f"Hugging Face gradient checkpointing is switched on in {len(own)} modules ({own[-1]!r}, ...): they "
                "recompute on every batch, whether it fits or not, and are left alone. "
                f"{checkpointing_way_out(self._model)} to let the budget decide.",
                stacklevel=4,
            )
        for name, blocks in whole_graphs(self._model, usable).items():
            warnings.warn(
                f"{name!r} is one torch.compile graph of {len(blocks)} blocks ({blocks[0]!r}, ...): plans are made "
                "outside compiled code, so it can only be recomputed as a whole, which lowers no peak. Compile each "
                "block instead (block.compile()), or use torch._functorch.config.activation_memory_budget.",
                stacklevel=4,
            )
        modules = [weakref.ref(unit.module) for unit in usable]
        self._undo = undoing(self, modules, self._caches.restore, self._cap.restore)
        self._caches.off(self._model)
        self._cap.apply()
        self._patched = tuple(usable)
        self._places = _Places.of(self._model, usable)
        self._held = self._places.now()
        for unit in usable:
            patch_unit(unit, self._session)
        self._left_out = left_out
        self._session.parts = {
            unit.name: [part.name for part in self._units if part.parent == index and part.name not in left_out]
            for index, unit in enumerate(self._units)
        }
        # Statistics reduced over all ranks: every rank would have to recompute in the same steps.
        synced = [u.name for u in usable if any(isinstance(m, nn.SyncBatchNorm) for m in u.module.modules())]
        scripted = [unit.name for unit in usable if runs_torchscript(unit.module)]
        known = dict.fromkeys(synced, COLLECTIVE) | dict.fromkeys(scripted, SCRIPTED)
        known |= {unit.name: GATHERS for unit in usable if gathers_inside(unit.module)}
        self._session.refuse(known | self._advisor.refused)
        self.take_refusals()

    @property
    def is_capped(self) -> bool:
        """Whether the allocator fails beyond the budget, whatever the device has."""
        return self._cap.in_force

    @property
    def may_exceed(self) -> bool:
        """Whether the allocator has a limit that may give way."""
        return self._cap.may_give_way

    def exceed_budget(self) -> bool:
        """The most saving plan does not fit: let the allocator have more, where the user wants to go on with it.

        Returns:
            Whether it may have more, until a step has fitted.
        """
        gives_way = self._cap.give_way()
        if gives_way and not self._gave_way:
            self._gave_way = True
            self._advisor.announce(
                "mimose: this step fits no plan: the allocator may go beyond the budget until one does"
            )
        return gives_way

    def keep_budget(self) -> None:
        """A step has fitted: hold the allocator to the budget again."""
        self._cap.renew()

    @property
    def has_news(self) -> bool:
        """Whether units were refused that plans still count on."""
        return len(self._session.refused) != len(self._told)

    def lost_units(self) -> bool:
        """Whether a unit, or what is around it, was replaced in the model since this was asked last; the user is told.

        Limitations:
            What has taken its place is no unit in this fit: it is measured with the rest of the step.
        """
        now = self._places.now()
        if now == self._held:
            return False
        self._held = now
        warnings.warn(
            f"Blocks of {type(self._model).__name__} were replaced by others after training had begun. Those are kept "
            "in every step, for only what was there at the beginning is planned, and steps are measured anew. Replace "
            "blocks before training begins if you can.",
            stacklevel=5,
        )
        return True

    def take_refusals(self) -> None:
        """Let plans and shelter do without the units that turned out not to be repeatable."""
        refused = self._session.refused
        self._advisor.refused = dict(refused)
        self._advisor.leave_out(self._left_out | refused.keys())
        cut = {unit.name: RECOMPUTE for unit in self._patched if unit.shelter}
        self._advisor.shelter = self._session.standing(cut)
        self._session.news = True
        by_reason: dict[str, list[str]] = {}
        for unit in [name for name in refused if name not in self._told]:
            self._told.add(unit)
            by_reason.setdefault(refused[unit], []).append(unit)
        for reason, names in by_reason.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            self._advisor.announce(f"mimose: never recomputed: {', '.join(names[:3])}{more} ({reason})")

    def detach(self) -> None:
        """Leave the model as it was."""
        try:
            self._undo()
        finally:
            self._patched, self._places, self._held = (), _Places([], []), []
