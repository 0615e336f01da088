"""A region: what the collector has to do with one recomputed call, in its forward and when it runs again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning_mimose.measure.call import NOTHING_LEFT, Call, Left
from lightning_mimose.measure.replay import Survey

if TYPE_CHECKING:
    from lightning_mimose.measure.collector import StepRecorder


class Region:
    """Observes the runs of one recomputed call (see `actions.recompute.RegionObserver`), which may outlive the step."""

    stops_early = False

    def __init__(self, recorder: StepRecorder, call: Call, survey: Survey | None = None) -> None:
        self._recorder = weakref.ref(recorder)
        self.call, self._survey = call, survey

    def forward_run(self) -> AbstractContextManager[None]:
        """`StepRecorder.enter` has opened the call."""
        recorder = self._recorder()
        return nullcontext() if recorder is None else recorder.region_forward(self._survey)

    def recompute_run(self, given: Sequence[Any], results: list[Any]) -> AbstractContextManager[None]:
        """Count what the recomputation saves, as long as the step is being recorded."""
        recorder = self._recorder()
        return nullcontext() if recorder is None else recorder.replays.of(self.call, self._survey, results)

    def recomputed(self, out: Any, left: Callable[[], Left]) -> None:
        """Remember which storages the recomputation returned, and left in attributes."""
        recorder = self._recorder()
        if recorder is not None:
            recorder.region_again(self.call, out, left())
            if self._survey is not None and recorder.replays.running:
                self._survey.returned(out)

    def close(self, out: Any, left: Left = NOTHING_LEFT) -> None:
        """The forward has returned, and left activations in attributes."""
        recorder = self._recorder()
        if recorder is not None:
            recorder.region_left(self.call, out, left)
