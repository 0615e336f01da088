"""Tells a forward whether it is running again, for what must happen once per step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_here = threading.local()


def is_recomputing() -> bool:
    """Whether the forward that asks is a recomputation (or a trial) of one that counts elsewhere.

    For effects that nothing can put back: a line that is printed, a counter in another process. Buffers, attributes of
    modules and generators need no such care.

    Example:
        >>> is_recomputing()
        False
    """
    return getattr(_here, "depth", 0) > 0


@contextmanager
def running_again() -> Iterator[None]:
    """Inside it `is_recomputing` is true, in this thread."""
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        yield
    finally:
        _here.depth -= 1
