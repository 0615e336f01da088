"""Tells a forward whether it is running again, for what must happen once per step."""

from __future__ import annotations

import threading

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


class running_again:  # a class, for a generator's context takes five times as long to enter
    """Inside it `is_recomputing` is true, in this thread."""

    def __enter__(self) -> None:
        _here.depth = getattr(_here, "depth", 0) + 1

    def __exit__(self, *error: object) -> None:
        _here.depth -= 1
