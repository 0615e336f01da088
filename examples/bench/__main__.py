"""The benchmark: `python -m bench held|used|exact|cheap|waits|frontier|work|grades|largest|shared|device|all`.

From the folder `examples`. Prints a table for each question; writes JSON, with date and versions, to `bench/results/`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from bench import cheap, device, exact, frontier, grades, held, largest, shared, used, waits, work
from bench.large import LARGE
from bench.models import WORKLOADS
from bench.running import quiet, show

QUESTIONS = ("held", "used", "exact", "cheap", "waits", "frontier", "work", "grades", "largest", "shared", "device")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is asked for; the exit code is 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("question", choices=(*QUESTIONS, "all"))
    parser.add_argument("--models", default=",".join(WORKLOADS), help="comma-separated names of workloads")
    parser.add_argument("--steps", type=int, default=20, help="batches per epoch")
    parser.add_argument("--repeats", type=int, default=3, help="frontier, grades, device: how often each step is timed")
    parser.add_argument(
        "--shares", default="0.75,0.6,0.5,0.4,0.33", help="frontier, work: budgets, of activation memory"
    )
    parser.add_argument("--menus", default="all,recompute", help="frontier, work: which actions plans may use")
    parser.add_argument("--parts", default="schedules,cost,compare,largest,kills", help="shared: what to look at")
    parser.add_argument("--kills", type=int, default=200, help="shared: how many trainings are killed")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="folder for the JSON")
    given = parser.parse_args(argv)
    quiet()
    torch.set_num_threads(2)
    names = given.models.split(",")
    large = [name for name in names if name in LARGE]
    shares, menus = [float(share) for share in given.shares.split(",")], given.menus.split(",")
    makers = {
        "held": lambda: held.rows(names, given.steps),
        "used": lambda: used.rows(names, given.steps),
        "exact": lambda: exact.rows(names),
        "cheap": cheap.rows,
        "waits": waits.rows,
        "frontier": lambda: frontier.rows(
            large, given.steps, given.results, repeats=given.repeats, shares=shares, menus=menus
        ),
        "work": lambda: work.rows(large, given.steps, given.results, shares=shares, menus=menus),
        "grades": lambda: grades.rows(names, given.steps, repeats=given.repeats),
        "device": lambda: device.rows(given.repeats),
        "shared": lambda: shared.rows(given.parts, given.kills),
        "largest": lambda: largest.rows(
            [n for n in names if n in ("resnet50", "resnet101")] or ["resnet50", "resnet101"],
            given.repeats,
            menus,
        ),
    }
    broken = False
    for question in QUESTIONS if given.question == "all" else (given.question,):
        console = Console(stderr=True)
        rows = list(track(makers[question](), description=question, console=console, total=None, transient=True))
        title = question if names == list(WORKLOADS) else f"{question}: {given.models}"
        show(title, rows, given.results / f"{question}.json", Console(width=160))
        broken = broken or any(row.get("steps over") or row.get("bit-equal") == "NO" for row in rows)
    return int(broken)


if __name__ == "__main__":
    raise SystemExit(main())
