"""Closing the leases of trainings that were dropped without being closed.

The collector of garbage finds them. It runs wherever memory is allocated, also in a thread that is in the midst of
changing an account, or that holds the lock of one: there nothing may be changed, and no lock be waited for. So it only
notes what is to be closed. A thread does that at once, and whoever opens a lease does it before.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from lightning_mimose.shared.forks import in_child

log = logging.getLogger(__name__)


class Dropped:
    """What is to be closed."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._closing: deque[Callable[[], object]] = deque()
        self._news: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """Have a thread for what will be noted; not in `note`, for starting one takes locks."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mimose-dropped", daemon=True)
                self._thread.start()

    def note(self, close: Callable[[], object]) -> None:
        """Have something closed soon. May be called anywhere: it takes no lock, and both queues are reentrant."""
        self._closing.append(close)
        self._news.put(None)

    def close(self) -> None:
        """Close now what was noted; returns when all of it is closed."""
        with self._lock:
            while self._closing:
                close = self._closing.popleft()
                try:
                    close()
                except Exception:  # whose it was is not there to be told, and whoever asks has nothing to do with it
                    log.warning("mimose: a training that was dropped could not be closed", exc_info=True)

    def _run(self) -> None:
        while True:
            self._news.get()
            self.close()


DROPPED = Dropped()
"""One for the process."""

in_child(DROPPED.reset)
