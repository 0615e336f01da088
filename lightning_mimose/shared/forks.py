"""What becomes of jobs in a forked child: nothing. They are its parent's; the child must neither use nor end them."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(do: Callable[[], None]) -> None:
    """Have something done in every child that is forked from now on, before anything else of this package runs there.

    Threads that the parent had are not there, and what they had locked stays locked: locks have to be made anew.
    """
    register = getattr(os, "register_at_fork", None)  # not on Windows, where nothing forks
    if register is not None:
        register(after_in_child=do)
