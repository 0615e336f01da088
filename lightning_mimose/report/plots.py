"""The report's three pictures. Drawn on figures of their own: pyplot's global state and backend stay untouched."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_mimose.errors import MimoseError
from lightning_mimose.menu import GRADES
from lightning_mimose.report.text import shorten

if TYPE_CHECKING:
    from lightning_mimose.report.report import Report

MAX_ROWS = 60
"""Units that the picture of plans shows."""
MAX_COLUMNS = 200
"""Sizes that it shows."""
# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
_BLUE, _ORANGE, _RED, _GREY, _SKY = "#0072B2", "#E69F00", "#D55E00", "#999999", "#56B4E9"
_KEEP, _INSIDE, _OTHERS = "keep", "inside a recomputed unit", ("#CC79A7", "#F0E442", _RED)
_LEAN, _LEAN_COLOURS = GRADES, ("#DDF2EA", "#ABDDCB", "#73C6A7", "#36AF85", "#008562")


def draw(report: Report, directory: Path) -> list[Path]:
    """Draw a report.

    Args:
        report: What to draw.
        directory: Where the files go; made where missing.

    Returns:
        The PNG files: peaks.png, plans.png, predictions.png.

    Raises:
        MimoseError: matplotlib is not installed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, paint, size in (
        ("peaks", _peaks, (9.0, 4.8)),
        ("plans", _plans, (9.0, _plans_height(report))),
        ("predictions", _predictions, (6.4, 6.2)),
    ):
        axes = canvas(size)
        paint(report, axes)
        path = directory / f"{name}.png"
        axes.figure.savefig(os.fspath(path))
        paths.append(path)
    return paths


def canvas(size: tuple[float, float]) -> Any:
    """Axes on a figure of their own.

    Args:
        size: Width and height in inches.

    Raises:
        MimoseError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MimoseError(
            'Plots need matplotlib, which is not installed. Run: pip install "lightning-mimose[plots]"'
        ) from error
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure.add_subplot()


# --- peaks against the budget ---------------------------------------------------------------------------------


def _peaks(report: Report, axes: Any) -> None:
    axes.set_title("Peak memory of each training step against the budget")
    axes.set_xlabel("training step")
    records = report.records
    if not records:
        return _nothing(axes, "no training step was recorded")
    steps = np.array([record.step for record in records])
    budget = np.array([record.budget_bytes for record in records], dtype=float)
    resident = np.array([record.resident_bytes for record in records], dtype=float)
    predicted = np.array([_or_nan(record.predicted_peak_bytes) for record in records])
    measured = np.array([_or_nan(record.measured_peak_bytes) for record in records])
    sheltered = np.array([record.sheltered for record in records])
    top = float(np.nanmax([*budget, *predicted, *measured]))
    scale, unit = _unit(top)

    axes.fill_between(
        steps,
        0,
        resident / scale,
        step="mid",
        color=_GREY,
        alpha=0.3,
        linewidth=0,
        label="resident at the step's start",
    )
    axes.plot(steps, budget / scale, color=_RED, linewidth=1.8, label="budget")
    axes.plot(steps, predicted / scale, color=_SKY, linewidth=0.9, label="predicted", zorder=2)
    size = 16 if len(records) <= 300 else 5
    for chosen, colour, marker, label in (
        (~sheltered, _BLUE, "o", "measured"),
        (sheltered, _ORANGE, "s", "measured, sheltered"),
    ):
        chosen = chosen & ~np.isnan(measured)
        if chosen.any():
            axes.scatter(
                steps[chosen],
                measured[chosen] / scale,
                s=size,
                c=colour,
                marker=marker,
                linewidths=0,
                label=label,
                zorder=3,
            )
    # Where nothing was measured, say that it was sheltered all the same: a tick on the floor.
    unseen = sheltered & np.isnan(measured)
    if unseen.any():
        axes.scatter(steps[unseen], np.zeros(unseen.sum()), s=40, c=_ORANGE, marker="|", label="sheltered", zorder=3)
    axes.set_ylabel(f"bytes alive ({unit})")
    axes.set_ylim(0, top / scale * 1.06)
    axes.margins(x=0.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=5, frameon=False, fontsize="small")
    return None


# --- plans by input size --------------------------------------------------------------------------------------


def _shown_units(report: Report) -> list[str]:
    """The units to draw, in forward order: all if there is room, else those that act, the most active first chosen."""
    if len(report.units) <= MAX_ROWS:
        return list(report.units)
    acting: dict[str, int] = {}
    for record in report.planned:
        for unit in record.actions:
            acting[unit] = acting.get(unit, 0) + 1
    chosen = set(sorted(acting, key=lambda unit: -acting[unit])[:MAX_ROWS])
    return [unit for unit in report.units if unit in chosen]


def _plans_height(report: Report) -> float:
    return min(11.0, max(3.6, 2.0 + 0.19 * len(_shown_units(report))))


def _plans(report: Report, axes: Any) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    axes.set_title("Plan by input size")
    units = _shown_units(report)
    # The newest plan of each size stands: plans get better while the run learns.
    newest = dict(report.axis.place(report.planned))
    sizes = _thinned(sorted(newest))
    if not sizes or not units:
        return _nothing(axes, "no step was planned" if units else "no unit acted in any plan")
    records = [newest[size] for size in sizes]
    taken = {action for record in records for action in record.actions.values()}
    others = sorted(taken - {"recompute", _KEEP, *_LEAN})
    kinds = [_KEEP, *_LEAN, _INSIDE, "recompute", *others]
    colours = ["#EFEFEF", *_LEAN_COLOURS, "#A9CCE3", _BLUE, *(_OTHERS[i % len(_OTHERS)] for i in range(len(others)))]
    codes = {kind: code for code, kind in enumerate(kinds)}
    image = np.array([[codes[_action(unit, record.actions)] for record in records] for unit in units])

    axes.pcolormesh(
        np.arange(len(sizes) + 1),
        np.arange(len(units) + 1),
        image,
        cmap=ListedColormap(colours),
        vmin=-0.5,
        vmax=len(kinds) - 0.5,
        edgecolors="white",
        linewidth=0.4 if len(sizes) <= 80 else 0.0,
    )
    axes.invert_yaxis()  # the first unit of the forward on top
    font = "small" if len(units) <= 30 else "xx-small"
    axes.set_yticks(np.arange(len(units)) + 0.5, _short_names(units), fontsize=font, family="monospace")
    places = np.unique(np.linspace(0, len(sizes) - 1, min(10, len(sizes))).round().astype(int))
    axes.set_xticks(places + 0.5, [f"{sizes[place]:,}" for place in places])
    axes.tick_params(length=2)
    left_out = len(report.units) - len(units)
    axes.set_xlabel(f"input size: {report.axis.label} (one column per size seen, ordered)")
    axes.set_ylabel("units in forward order" + (f" ({left_out} that act least or never left out)" if left_out else ""))
    present = np.unique(image)
    axes.figure.legend(
        handles=[Patch(facecolor=colours[code], edgecolor=_GREY, label=kinds[code]) for code in present],
        loc="outside lower center",
        ncols=len(present),
        frameon=False,
        fontsize="small",
    )
    return None


def _thinned(sizes: Sequence[int]) -> list[int]:
    if len(sizes) <= MAX_COLUMNS:
        return list(sizes)
    return [sizes[i] for i in np.unique(np.linspace(0, len(sizes) - 1, MAX_COLUMNS).round().astype(int))]


def _action(unit: str, actions: Mapping[str, str]) -> str:
    """What happens to a unit: its own action, or that a unit around it is recomputed, or that it is kept."""
    if unit in actions:
        return actions[unit]
    parts = unit.split(".")
    above = (".".join(parts[:end]) for end in range(1, len(parts)))
    return _INSIDE if any(actions.get(name, "").startswith(("recompute", "split")) for name in above) else _KEEP


def _short_names(units: Sequence[str]) -> list[str]:
    """Names without the path that all of them share.

    Example:
        >>> _short_names(["bert.encoder.layer.0", "bert.encoder.layer.1.attention"])
        ['layer.0', 'layer.1.attention']
    """
    paths = [unit.split(".") for unit in units]
    drop = 0
    while all(len(path) > drop + 1 and path[drop] == paths[0][drop] for path in paths):
        drop += 1
    # "layer" says what the numbers below it count, so one name before a number stays.
    if drop and all(path[drop].isdigit() for path in paths):
        drop -= 1
    return [shorten(".".join(path[drop:]), 36) for path in paths]


# --- predicted against measured -------------------------------------------------------------------------------


def _predictions(report: Report, axes: Any) -> None:
    axes.set_title("Predicted against measured peak")
    pairs = [
        (record.measured_peak_bytes, record.predicted_peak_bytes)
        for record in report.planned
        if record.measured_peak_bytes is not None and record.predicted_peak_bytes is not None
    ]
    if not pairs:
        return _nothing(axes, "no planned step was measured")
    scale, unit = _unit(max(max(pair) for pair in pairs))
    measured, predicted = np.array(pairs, dtype=float).T / scale
    low, high = min(measured.min(), predicted.min()), max(measured.max(), predicted.max())
    margin = 0.06 * (high - low) or 0.02 * high
    ends = np.array([max(0.0, low - margin), high + margin])
    axes.fill_between(ends, 0.99 * ends, 1.01 * ends, color=_GREY, alpha=0.35, linewidth=0, label="within 1 %")
    axes.plot(ends, ends, color="black", linewidth=0.8, label="exact")
    size = 18 if len(pairs) <= 300 else 7
    axes.scatter(measured, predicted, s=size, c=_BLUE, linewidths=0, alpha=0.75, label="measured step", zorder=3)
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_aspect("equal")
    axes.set_xlabel(f"measured peak ({unit})")
    axes.set_ylabel(f"predicted peak ({unit})")
    axes.grid(alpha=0.25)
    error = report.prediction_error
    if error is not None:
        lines = (
            f"{error.steps:,} steps",
            f"median error {100 * error.median:.2f} %",
            f"95 % of them within {100 * error.percentile_95:.2f} %",
        )
        axes.text(0.97, 0.04, "\n".join(lines), transform=axes.transAxes, ha="right", va="bottom", fontsize="small")
    axes.legend(loc="upper left", frameon=False, fontsize="small")
    return None


def _nothing(axes: Any, why: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color=_GREY)


def _or_nan(value: int | None) -> float:
    return float("nan") if value is None else float(value)


def _unit(largest_bytes: float) -> tuple[float, str]:
    return (1e9, "GB") if largest_bytes >= 1e9 else (1e6, "MB")
