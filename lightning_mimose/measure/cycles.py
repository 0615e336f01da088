"""Whether Python is looking for objects in cycles: what goes then goes at another moment in every step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


class Cycles:
    """Knows when the cyclic garbage collector runs.

    Attributes:
        searching: Whether it does so now.

    Example:
        >>> cycles = Cycles()
        >>> cycles.watch()
        >>> cycles.searching
        False
        >>> cycles.close()
    """

    def __init__(self) -> None:
        self.searching = False
        self._told: Any = None

    def watch(self) -> None:
        """Be told from now on."""
        this = weakref.ref(self)

        def told(phase: str, _: Mapping[str, int]) -> None:
            live = this()
            if live is not None:
                live.searching = phase == "start"
            else:
                with suppress(ValueError):  # another thread may have closed it since the collector read the list
                    gc.callbacks.remove(told)

        self.close()
        self._told = told
        gc.callbacks.append(told)

    def close(self) -> None:
        """No more."""
        with suppress(ValueError):
            gc.callbacks.remove(self._told)
        self._told, self.searching = None, False
