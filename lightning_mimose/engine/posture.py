"""How a model is set when a step begins: what decides which operations run and save something, and is in no batch.

Evaluation mode switches dropout and norms' statistics off; a rate of 0 switches dropout off, too; what is frozen saves
less, and what comes before it nothing. What a step takes is another thing then, at every size.
"""

from __future__ import annotations

import weakref
from operator import is_
from typing import Any

from torch import nn

MOST_TURNS, MOST_FOUND = 8, 12
"""Postures that steps began in, and how many of their forwards are remembered. A period of up to half as many steps is
told of them (networks that take turns, one that is trained five times as often), or what two found in a row."""
_ANYHOW = {
    *(nn.Linear, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Identity),
    *(nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.ModuleList, nn.ModuleDict, nn.Sequential),
}
"""Kinds that do the same in any mode, more than half of all modules: looking at each in every step adds up."""


class Posture:
    """Reads it.

    Args:
        model: The model; it is not kept alive.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
        >>> posture = Posture(model)
        >>> posture.now()
        (True, True)
        >>> model[1].p = 0.0
        >>> posture.now()
        (True, False)
        >>> _ = model.eval()
        >>> posture.now()
        (False, False)
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._asking: list[weakref.ref[nn.Module]] = []
        self._rates: list[tuple[weakref.ref[nn.Module], str]] = []
        self._read: list[Any] = []
        self._now: tuple[bool, ...] = ()
        """What was read in them, the last time."""
        self._began: tuple[bool, ...] | None = None
        self._turned: dict[tuple[bool, ...], list[tuple[bool, ...]]] = {}
        """As steps began -> as their forwards found them, the latest last."""
        self.look()

    def look(self) -> None:
        """Find the modules and their rates of dropout, at the start and when the model has become another."""
        model = self._model()
        modules = [] if model is None else list(model.modules())
        rates = [
            (module, name)
            for module in modules
            for name, value in vars(module).items()
            if (name == "p" or "drop" in name) and type(value) in (int, float)
        ]
        # A mode is set for all of a module at once, as a rule: what is inside one stands for it.
        have_rates, asking, standing = {id(module) for module, _ in rates}, list[nn.Module](), set[int]()
        for module in reversed(modules):  # parts come after what they are in
            inside = any(id(part) in standing for part in module.children())
            asks = id(module) in have_rates or not (inside or type(module) in _ANYHOW)
            if asks:
                asking.append(module)
            if asks or inside:
                standing.add(id(module))
        self._asking = [weakref.ref(module) for module in asking]
        self._rates = [(weakref.ref(module), name) for module, name in rates]
        self._read = []

    def expected(self, trained: tuple[bool, ...] = ()) -> tuple[bool, ...]:
        """How they will be set in the forward of the step that begins, as far as is known; see `now`."""
        self._began = self.now(trained)
        return self._expected(self._began)

    def _expected(self, began: tuple[bool, ...]) -> tuple[bool, ...]:
        found = self._turned.get(began, []) if self._turned else []
        for period in range(1, len(found) // 2 + 1):
            if found[period:] == found[:-period]:
                return found[-period]
        return found[-1] if found and found[-2:-1] == found[-1:] else began

    def turned(self, trained: tuple[bool, ...] = ()) -> bool:
        """A unit is called; returns whether they are set otherwise than was expected, by a hook of the user's, say."""
        if self._began is None:
            return False
        now, began = self.now(trained), self._began
        if now is began and not self._turned:
            return False
        self._began = None  # a step turns once: what is decided about it anew asks again
        expected = self._expected(began)
        if len(self._turned) >= MOST_TURNS and began not in self._turned:
            self._turned.clear()
        found = self._turned.setdefault(began, [])
        found.append(now)
        del found[:-MOST_FOUND]
        return now != expected

    def of_modules(self, modes: tuple[bool, ...]) -> tuple[bool, ...]:
        """The part of a posture that is no parameter's."""
        return modes[: len(self._read) - 1]

    def now(self, trained: tuple[bool, ...] = ()) -> tuple[bool, ...]:
        """Whether each module trains that asks for it, each rate is more than 0, and each parameter is trained.

        Args:
            trained: The last of these, in order; the same object for as long as they are the same.
        """
        modes = [module.training for ref in self._asking if (module := ref()) is not None]
        rates = [vars(module).get(name, 0) for ref, name in self._rates if (module := ref()) is not None]
        before, self._read = self._read, [*modes, *rates, trained]
        if len(before) != len(self._read) or not all(map(is_, before, self._read)):
            # A tensor's value would have to be waited for.
            are_used = (rate != 0 if isinstance(rate, (int, float)) else True for rate in rates)
            self._now = (*modes, *are_used, *trained)
        return self._now
