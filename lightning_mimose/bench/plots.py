"""Two kinds of pictures: what budgets cost in time, and every step's peak against the budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_mimose.bench.alternatives import ALTERNATIVES, CONTROL, PLAIN
from lightning_mimose.bench.entries import Raced
from lightning_mimose.bench.figures import figures
from lightning_mimose.report.plots import canvas

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart; ours stand out.
_GREY = "#999999"
_LOOKS = {
    "ours": ("#D55E00", "o", "-"),
    "recompute": ("#E69F00", "o", "-"),
    "static": ("#0072B2", "s", "-"),
    "paper": ("#56B4E9", "v", "--"),
    "greedy": ("#0072B2", "^", "--"),
    "compile": ("#009E73", "D", "-"),
    "autosac": ("#CC79A7", "P", "-"),
    "dtr": ("#666666", "X", ":"),
    "layers": ("#000000", "s", ""),
    "chen": ("#000000", "*", ""),
    "save-on-cpu": ("#F0E442", "x", ""),
    PLAIN: (_GREY, "o", ""),
}


def draw(raced: Raced, asks: Sequence[str], directory: Path) -> list[Path]:
    """Draw what a race found.

    Args:
        raced: The race.
        asks: Its budgets.
        directory: Where the files go; made where missing.

    Returns:
        The PNG files.

    Raises:
        MimoseError: matplotlib is not installed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in raced.work.name)
    paths = []
    pictures: list[tuple[str, Any]] = [(f"frontier-{name}", lambda axes: _frontier(raced, asks, axes))]
    for ask in asks:
        pictures.append((f"peaks-{name}-{ask}", lambda axes, ask=ask: _peaks(raced, ask, axes)))
    for title, paint in pictures:
        axes = canvas((9.0, 5.4))
        paint(axes)
        path = directory / f"{title}.png"
        axes.figure.savefig(path)
        paths.append(path)
    return paths


def _frontier(raced: Raced, asks: Sequence[str], axes: Any) -> None:
    """True peak across, time up: down and to the left is better. Open markers broke the budget they were given."""
    scale = raced.resident_bytes
    for alternative in ALTERNATIVES:
        points = []
        for ask in asks:
            budget_bytes = raced.budgets_bytes[ask]
            for measured in raced.under(ask):
                found = figures(measured, raced.plain, budget_bytes)
                if measured.name != alternative or measured.status not in ("ran", "simulated") or not found.time:
                    continue
                peak = max(map(max, measured.peaks_bytes))
                over = ALTERNATIVES[alternative].budgeted and peak > budget_bytes
                points.append((peak, found.time, over, measured.title))
        if not points or alternative == CONTROL:
            continue
        colour, marker, line = _LOOKS[alternative]
        points = sorted(set(points), key=lambda point: point[0])
        x = [peak / 1e6 for peak, *_ in points]
        y = [time.value for _, time, *_ in points]
        spread = [[time.value - time.low for _, time, *_ in points], [time.high - time.value for _, time, *_ in points]]
        axes.errorbar(
            x, y, yerr=spread, color=colour, linestyle=line or "none", linewidth=1.2, elinewidth=0.7, capsize=2
        )
        for at, (_, time, over, _) in zip(x, points, strict=True):
            axes.plot(
                at, time.value, marker=marker, color=colour, markersize=7, markerfacecolor="white" if over else colour
            )
        axes.plot([], [], marker=marker, color=colour, linestyle=line or "none", label=points[0][3])
    for index, ask in enumerate(asks):
        axes.axvline(
            raced.budgets_bytes[ask] / 1e6,
            color="#BBBBBB",
            linewidth=1,
            linestyle="--",
            zorder=0,
            label="budgets" if not index else None,
        )
    axes.axhline(1.0, color="#BBBBBB", linewidth=0.8, zorder=0)
    axes.set_title(
        f"{raced.work.name}: time against true peak (left and down is better; open: over its budget)", fontsize="medium"
    )
    axes.set_xlabel(f"highest true peak of a step, MB ({scale / 1e6:,.0f} MB of it resident)")
    axes.set_ylabel("time of an epoch / plain (bars: all repeats)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def _peaks(raced: Raced, ask: str, axes: Any) -> None:
    """Every step's true peak in the order of training: the first epoch, then the later ones."""
    budget_bytes = raced.budgets_bytes[ask]
    ran = [m for m in raced.under(ask) if m.status in ("ran", "simulated") and m.peaks_bytes and m.name != CONTROL]
    steps = len(raced.work.batches)
    shown = 2 if any(len(m.peaks_bytes) > 1 for m in ran) else 1
    for measured in ran:
        colour, marker, line = _LOOKS[measured.name]
        peaks = [peak / 1e6 for epoch in measured.peaks_bytes[:shown] for peak in epoch]
        axes.plot(
            range(1, len(peaks) + 1),
            peaks,
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1,
            linestyle=line or "-.",
            label=measured.title,
            zorder=3 if measured.name == "ours" else 2.5 if measured.name == PLAIN else 2,
        )
    axes.axhline(budget_bytes / 1e6, color="#D00000", linewidth=2, label="budget", zorder=1)
    axes.axhspan(0, raced.resident_bytes / 1e6, color=_GREY, alpha=0.2, linewidth=0, label="resident")
    if shown == 2:
        axes.axvline(steps + 0.5, color="#BBBBBB", linewidth=1)
        axes.text(
            steps + 0.6, 0.02, "second epoch", transform=axes.get_xaxis_transform(), fontsize="small", color="#666666"
        )
    axes.text(0.6, 0.02, "first epoch", transform=axes.get_xaxis_transform(), fontsize="small", color="#666666")
    axes.set_ylim(0, None)
    axes.set_title(f"{raced.work.name}, budget {ask}: true peak of every step", fontsize="medium")
    axes.set_xlabel("training step")
    axes.set_ylabel("MB alive at the peak")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
