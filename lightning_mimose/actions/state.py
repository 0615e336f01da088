"""State that a forward writes: found by identity and content, put back around a recomputation.

BatchNorm's running statistics change with no change of `_version`, `.data` writes bump nothing, and
`self.buffer = ...` replaces the object: so identity and content are compared, once per unit and mode. State is
every buffer and every plain attribute of the module and its submodules (counters, lists, metrics, generators), and
what their forwards name outside of modules (see `outside`). A tensor that requires a gradient is an activation, not
state.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from lightning_mimose.actions.contents import is_readable
from lightning_mimose.actions.copies import (
    Entry,
    Place,
    Saved,
    appeared,
    changes,
    copy_all,
    copy_places,
    entries_of,
    places,
    put_back,
    value_at,
)
from lightning_mimose.actions.late import LateWrites, Look
from lightning_mimose.actions.setting import Settings
from lightning_mimose.actions.stored import Replaced, hollow, is_activation, lost
from lightning_mimose.errors import MimoseError

_HOST = torch.device("cpu")


class WrittenState:
    """The state that a unit's forward writes, learnt the first time it runs in each mode.

    A norm that was frozen in eval mode writes nothing, until somebody switches it to training. What a later forward
    begins to write is noticed (see `late`). The module is not kept alive.

    Args:
        module: The unit.
        replaced: What units share of what they know about containers of activations.

    Attributes:
        wrote_late: Whether the latest forward wrote what none before it had written.
        settings: What forwards find in the unit, and do not write.
    """

    def __init__(self, module: nn.Module, replaced: Replaced | None = None) -> None:
        self._modules = [weakref.ref(inner) for inner in module.modules()]
        self.settings = Settings(self._modules, self.written)
        self._mode: tuple[bool, ...] = ()
        self._written: dict[tuple[bool, ...], list[Place]] = {}
        self._unwritten: dict[tuple[bool, ...], LateWrites] = {}
        self._look: Look | None = None
        self._outside: Saved = []
        self._replaced = Replaced() if replaced is None else replaced
        self.wrote_late = False

    def modules(self) -> list[nn.Module]:
        """The module and those inside it, as far as they are alive."""
        return [module for ref in self._modules if (module := ref()) is not None]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the module and those inside it."""
        return [p for module in self.modules() for p in module._parameters.values() if p is not None]

    def buffers(self) -> list[torch.Tensor]:
        """The buffers of the module and those inside it."""
        return [b for module in self.modules() for b in module._buffers.values() if b is not None]

    def blank(self) -> WrittenState:
        """The same unit's, with nothing known: everything is copied, and nothing can be written too late."""
        other = WrittenState(nn.Identity())
        other._modules = self._modules
        return other

    def device(self) -> torch.device:
        """Where the first of its parameters is; the host if it has none."""
        for ref in self._modules:
            module = ref()
            for parameter in module._parameters.values() if module is not None else ():
                if parameter is not None:
                    return parameter.device
        return _HOST

    def known(self) -> bool:
        """Whether a forward in the present mode was seen before."""
        return self._mode_now() in self._written

    def forget(self) -> None:
        """Let nothing be known of forwards in the present mode."""
        for seen in (self._written, self._unwritten):
            seen.pop(self._mode_now(), None)

    def watch_anew(self) -> None:
        """See once more what is to be watched: hooks, which may write, were off just now."""
        self._unwritten.pop(self._mode, None)

    def _mode_now(self) -> tuple[bool, ...]:
        return tuple([module.training for ref in self._modules if (module := ref()) is not None])

    def written(self, anyhow: bool) -> set[tuple[int, str]]:
        """Where forwards are known to write: identities of modules, and names in them.

        Args:
            anyhow: In any mode, or in the present one.
        """
        known = [*self._written.values()] if anyhow else [self._written.get(self._mode_now(), [])]
        return {(id(ref()), name) for places_ in known for ref, name in places_ if ref is not None}

    def before_forward(self) -> Saved:
        """Copy what the forward may write (all there is until it is known which it does)."""
        self._mode = self._mode_now()
        known = self._written.get(self._mode)
        if known is None:
            return copy_all(self.modules())
        self._look = self._late(self._mode, known).look()
        return copy_places(known) if known else []

    def _late(self, mode: tuple[bool, ...], known: list[Place]) -> LateWrites:
        late = self._unwritten.get(mode)
        if late is None:
            late = self._unwritten[mode] = LateWrites(list(entries_of(self.modules())), known)
        return late

    def copied_bytes(self) -> int:
        """Bytes of what is copied for the forward alone, once it is known what forwards write; 0 until then."""
        mode = self._mode_now()
        known = self._written.get(mode)
        return 0 if known is None else self._late(mode, known).copied_bytes()

    def stashed_bytes(self) -> int:
        """Bytes of what is copied for the recomputation, likewise."""
        values = [value_at(ref(), name) for ref, name in self._written.get(self._mode_now(), []) if ref is not None]
        written = (value for value in values if isinstance(value, torch.Tensor) and not is_activation(value))
        return sum(value.nbytes for value in written if is_readable(value))

    def after_forward(self, before: Saved) -> Saved:
        """Learn what was written; returns its copies from before the forward.

        If one piece of the unit's state is written, all that were seen written stay watched from then on.

        Raises:
            MimoseError: A large buffer was written for the first time: it was not copied and cannot be put back.
        """
        self.wrote_late, self._outside = False, []
        if self._mode in self._written:
            return [self._let_go(entry) for entry in before] + self._written_late()
        changed = changes(before) + appeared(self.modules(), before)
        # Activations are the setting's: an older one must not live on for the sake of a recomputation.
        self._written[self._mode] = places([e for e in changed if not is_activation(value_at(e.owner, e.name))])
        return changed

    def watched(self) -> AbstractContextManager[None]:
        """Around a forward, after `before_forward`: learn which containers of activations it replaces unseen."""
        known = ((ref(), name) for ref, name in self._written.get(self._mode, []) if ref is not None)
        return self._replaced.watched((owner, name) for owner, name in known if owner is not None)

    def _let_go(self, entry: Entry) -> Entry:
        """Without the activations of a container that was replaced: the plain run holds them no longer."""
        if (id(entry.owner), entry.name) not in self._replaced or value_at(entry.owner, entry.name) is entry.value:
            return entry
        emptied = hollow(entry.value)
        return entry if emptied is None else entry._replace(value=emptied)

    def _written_late(self) -> Saved:
        look, self._look = self._look, None
        if look is None:
            return []
        self._outside = [Entry(None, *each) for each in look.outside]
        seen = self._unwritten[self._mode].written_since(look)
        if seen.lost:
            raise MimoseError(
                f"A unit that is recomputed began to write {', '.join(seen.lost)}, which no earlier step wrote: it "
                "cannot be put back for its recomputation, so results would differ. Nothing was updated in this step. "
                "Leave the unit out with units=[...], or let its first training step write the buffer too."
            )
        late = [Entry(*entry) for entry in seen.written]
        if seen.grown:
            known = [*look.places(), *((ref(), name) for ref, name in self._written[self._mode] if ref is not None)]
            late += appeared(seen.grown, known)
        if late:
            self.wrote_late = True
            self._written[self._mode] += places(late)
            del self._unwritten[self._mode]
        return late

    def found_outside(self) -> Saved:
        """What the latest forward found outside of modules, and did not write: others may, before it runs again."""
        found, self._outside = self._outside, []
        return found

    @contextmanager
    def restored(self, before: Saved, outside: Sequence[Entry] = ()) -> Iterator[None]:
        """Run a recomputation on the state the forward saw, and leave the state as it was found.

        Args:
            before: What the forward has written, as it was before.
            outside: What it found outside of modules besides.
        """
        before = [*before, *changes(outside)] if outside else before
        if not before:
            yield
            return
        now = copy_places(places(before), activations=True)
        put_back(before, lost())
        try:
            yield
        finally:
            put_back(now)
