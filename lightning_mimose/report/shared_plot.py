"""The picture of a shared budget."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_mimose.report.plots import canvas
from lightning_mimose.report.text import shorten

if TYPE_CHECKING:
    from lightning_mimose.report.shared import SharedReport

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_RED, _GREY = "#D55E00", "#555555"


def draw_shared(report: SharedReport, directory: Path) -> Path:
    """Draw a report.

    Args:
        report: What to draw.
        directory: Where the file goes; made where missing.

    Returns:
        shared.png.

    Raises:
        MimoseError: matplotlib is not installed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    axes = canvas((9.0, 4.8))
    jobs = [facts.job for facts in report.jobs]
    entries = report.stacked()
    begin = entries[0][0] if entries else 0.0
    when = np.array([moment - begin for moment, _ in entries])
    level = np.array([[now.get(job, 0) for job in jobs] for _, now in entries]).reshape(len(entries), len(jobs)) / 1e6
    below = np.zeros(len(entries))
    for i, (job, facts) in enumerate(zip(jobs, report.jobs, strict=True)):
        label = f"{shorten(job, 28)}: waited {facts.waited_seconds:.1f} s"
        colour = _COLOURS[i % len(_COLOURS)]
        axes.fill_between(when, below, below + level[:, i], step="post", color=colour, linewidth=0, label=label)
        below = below + level[:, i]
        # A bar under the stack where a job waited.
        spans = [(since - begin, until - since) for name, since, until in report.waits if name == job]
        top = (report.budget_bytes or 0) / 1e6
        axes.broken_barh(spans, (-0.03 * top * (i + 1), 0.02 * top), color=colour)
    if report.budget_bytes is not None:
        axes.axhline(report.budget_bytes / 1e6, color=_RED, linewidth=1.2, label="budget")
    axes.axhline(0, color=_GREY, linewidth=0.6)
    axes.set_xlabel("seconds (bars below: waiting)")
    axes.set_ylabel("granted, MB")
    axes.set_title("Jobs in a shared budget", loc="left")
    if jobs:
        axes.legend(loc="upper right", fontsize="small", framealpha=0.9)
    path = directory / "shared.png"
    axes.figure.savefig(os.fspath(path))
    return path
