"""A bar on stderr, if somebody is there to see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any


class Progress:
    """Counts steps. Shows nothing where stderr is no terminal or rich is not installed."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        """Shows the bar."""
        try:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar
        except ImportError:
            return self
        console = Console(stderr=True)
        columns = (
            BarColumn(bar_width=16),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self._bar = Bar(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._bar.start()
        self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Gives the screen to somebody else meanwhile."""
        if self._bar is None:
            yield
            return
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def begin(self, work: str, steps: int) -> None:
        """Another work of so many steps."""
        if self._bar is not None:
            self._bar.reset(self._task, total=steps, description=work)

    def tell(self, text: str) -> None:
        """What is going on."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)

    def advance(self, steps: int = 1) -> None:
        """So many steps are done."""
        if self._bar is not None:
            self._bar.advance(self._task, steps)
