"""Regions that never ran again, for nobody went back through their results: a probe, a metric, a branch not taken.

What others save is seen in their recomputation. Of these only the forward is known, in which they saved nothing: what
they would have saved was noted, and when nobody held it any more.
"""

from __future__ import annotations

from lightning_mimose.measure.call import Call
from lightning_mimose.measure.trace import IS_GONE, StepTrace


def peaks_kept(trace: StepTrace, region: Call) -> dict[int, int]:
    """Peaks of the intervals of a region's forward, had it been kept; relative as in `Interval`.

    Args:
        trace: The recorded step.
        region: A call that was to be recomputed and was not.

    Returns:
        Index of the interval -> bytes.
    """
    peaks: dict[int, int] = {}
    gone = 0
    for index, piece in enumerate(trace.pieces):
        if not region.marks["in"] <= piece.mark < region.marks["out"]:
            continue
        peak = piece.peak_bytes + gone
        if piece.event is not None and piece.event[:2] == (region.key, IS_GONE):
            before, gone = gone, gone + region.saved.get(piece.event[2], 0)
            peak = max(piece.level_bytes + before, trace.reached_without(index) + gone)
        peaks[piece.mark] = max(peaks.get(piece.mark, 0), peak)
    return peaks
