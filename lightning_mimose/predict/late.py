"""Late results: what takes long is worked out beside the training, which goes on with what it had.

Most fits take a few milliseconds. One that no basis describes takes a hundred, after every size that is measured, and
is of no more use than the one before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

HEAD_START_SECONDS = 0.01
"""What training gets until the work begins: two threads that run Python wait for each other."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class _Job(Generic[T]):
    """Something that is worked out in a thread of its own."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._found: list[T] = []
        self._error: BaseException | None = None
        self.done = threading.Event()
        threading.Thread(target=self._run, name="mimose-fit", daemon=True).start()

    def _run(self) -> None:
        time.sleep(HEAD_START_SECONDS)
        try:
            assert self._work is not None
            self._found.append(self._work())
        except BaseException as error:  # whoever asks is told, as if it had done the work itself
            self._error = error
        finally:
            self._work = None
            self.done.set()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._found[0]


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
        if key not in self._jobs:
            self._jobs[key] = _Job(work)

    def arrived(self, *, wait: bool = False) -> Iterator[tuple[K, T]]:
        """What has come since, each once.

        Args:
            wait: Whether to wait for what has not.
        """
        for key, job in list(self._jobs.items()):
            if wait:
                job.done.wait()
            if job.done.is_set():
                del self._jobs[key]
                yield key, job.result()
