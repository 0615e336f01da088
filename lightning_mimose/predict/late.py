"""Late results: what takes long is worked out beside the training, which goes on with what it had.

Most fits take a few milliseconds. One that no basis describes takes a hundred, after every size that is measured, and
is of no more use than the one before it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

from lightning_mimose import threads

log = logging.getLogger(__name__)

HEAD_START_SECONDS = 0.01
"""What training gets until the work begins: two threads that run Python wait for each other."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class _Job(Generic[T]):
    """Something that is worked out in a thread of its own."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.process = os.getpid()
        self.found: T | None = None
        self.done = threading.Event()
        threads.start("mimose-fit", partial(self._run, work))

    def _run(self, work: Callable[[], T]) -> None:
        time.sleep(HEAD_START_SECONDS)
        try:
            self.found = work()
        except Exception:
            log.debug("What was worked out beside the training failed.", exc_info=True)
        finally:
            self.done.set()


class Late(Generic[K, T]):
    """Works things out, one at a time for every key.

    Example:
        >>> late, go_on = Late[str, int](), threading.Event()
        >>> late.begin("slow", lambda: int(go_on.wait()))
        >>> list(late.arrived())
        []
        >>> go_on.set()
        >>> list(late.arrived(wait=True)), list(late.arrived(wait=True))
        ([('slow', 1)], [])
    """

    def __init__(self) -> None:
        self._jobs: dict[K, _Job[T]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: what is being worked out cannot be copied or sent to another process."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The inverse of `__getstate__`."""
        self._jobs = {}

    def begin(self, key: K, work: Callable[[], T]) -> None:
        """Have something worked out, unless something else still is for this key.

        Args:
            key: What it is for.
            work: Works it out, and changes nothing.
        """
        job = self._jobs.get(key)
        if job is None or job.process != os.getpid():  # a fork's threads are not there
            self._jobs[key] = _Job(work)

    def arrived(self, *, wait: bool = False) -> Iterator[tuple[K, T | None]]:
        """What has come since, each once; None for what has failed.

        Args:
            wait: Whether to wait for what has not.
        """
        for key, job in list(self._jobs.items()):
            if job.process != os.getpid():
                del self._jobs[key]
                continue
            if wait:
                job.done.wait()
            if job.done.is_set():
                del self._jobs[key]
                yield key, job.found
