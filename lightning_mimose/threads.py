"""Threads beside the training, which have ended when the interpreter does.

One that it has to kill ends wherever it next asks for the interpreter's lock. Inside a solver in C++ that aborts the
process, after a training that went well: https://docs.python.org/3/c-api/init.html#c.PyGILState_Ensure
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from functools import cache
from weakref import WeakKeyDictionary

_running: WeakKeyDictionary[threading.Thread, tuple[int, Callable[[], object] | None]] = WeakKeyDictionary()
"""With the process that started it, and what lets it end soon."""


def start(name: str, run: Callable[[], object], stop: Callable[[], object] | None = None) -> threading.Thread:
    """Run something in a thread.

    Args:
        name: Of the thread.
        run: What it runs.
        stop: Called when the interpreter ends, before any thread is waited for; does not wait itself.

    Returns:
        The thread, which runs.

    Example:
        >>> found = []
        >>> start("mimose-example", lambda: found.append(1)).join()
        >>> found
        [1]
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    _ending()
    _running[thread] = os.getpid(), stop
    return thread


@cache
def _ending() -> None:
    """At the first use, and once."""
    atexit.register(_end)


def _end() -> None:
    mine = [(thread, stop) for thread, (process, stop) in [*_running.items()] if process == os.getpid()]
    for _, stop in mine:
        if stop is not None:
            stop()
    for thread, _ in mine:
        thread.join()
