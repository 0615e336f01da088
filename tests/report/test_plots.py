"""The plots: files that are images, made without touching matplotlib's global state."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_mimose.errors import MimoseError
from lightning_mimose.report.plots import MAX_ROWS, _action, _short_names, _shown_units
from lightning_mimose.report.record import History, StepRecord
from lightning_mimose.report.report import Report

BASE = StepRecord(0, 0, 0, {"batch": 4, "x:1": 8}, False, False, False, 10**6, 10**5, 5 * 10**5, None, None, {}, 1e-5)


def report(*records: StepRecord, units: tuple[str, ...] = ("a", "a.b", "c")) -> Report:
    """The report of some steps."""
    history = History()
    for record in records:
        history.add(record)
    return Report(history, units, 10**6)


def drawn(paths: list[Path]) -> bool:
    """Whether all are PNG images of some size."""
    return all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000 for path in paths)


def test_three_pictures_of_a_run(tmp_path: Path) -> None:
    """Planned, sheltered, measured and unmeasured steps together; folders are made."""
    pytest.importorskip("matplotlib")
    one = report(
        replace(BASE, sheltered=True, predicted_peak_bytes=None, measured_peak_bytes=400_000),
        replace(BASE, sheltered=True, predicted_peak_bytes=None),
        *[replace(BASE, size={"batch": 4, "x:1": n}, actions={"a": "recompute", "c": "lean"}) for n in range(5, 9)],
        replace(BASE, measured_peak_bytes=501_000),
    )
    paths = one.plot(tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["peaks.png", "plans.png", "predictions.png"]
    assert drawn(paths)


@pytest.mark.parametrize(
    "records", [(), (replace(BASE, sheltered=True, predicted_peak_bytes=None),)], ids=["none", "shelter"]
)
def test_an_empty_run_draws_that_there_is_nothing(tmp_path: Path, records: tuple[StepRecord, ...]) -> None:
    """No step, or no planned one: pictures that say so."""
    pytest.importorskip("matplotlib")
    assert drawn(report(*records).plot(tmp_path))


def test_global_state_of_matplotlib_is_untouched(tmp_path: Path) -> None:
    """No pyplot figure is opened and the backend stays."""
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    report(replace(BASE, measured_peak_bytes=501_000)).plot(tmp_path)
    assert dict(matplotlib.rcParams) == before
    if "matplotlib.pyplot" in sys.modules:
        assert sys.modules["matplotlib.pyplot"].get_fignums() == []


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named."""
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MimoseError, match=r"lightning-mimose\[plots\]"):
        report(BASE).plot(tmp_path)


def test_hundreds_of_units_are_thinned_to_those_that_act(tmp_path: Path) -> None:
    """At most 60 rows, in forward order, the units that act most among them."""
    pytest.importorskip("matplotlib")
    units = tuple(f"net.{i}" for i in range(500))
    records = [replace(BASE, actions=dict.fromkeys(units[100 : 300 - n], "recompute")) for n in range(190)]
    one = report(*records, units=units)
    assert _shown_units(one) == list(units[100 : 100 + MAX_ROWS])
    assert drawn(one.plot(tmp_path))


def test_a_unit_inside_a_recomputed_one_is_shown_as_such() -> None:
    """Its own action, else its ancestor's, else keep; a name that only begins alike is no ancestor."""
    actions = {"net.1": "recompute", "net.2": "lean"}
    assert _action("net.1", actions) == "recompute"
    assert _action("net.1.mlp", actions) == "inside a recomputed unit"
    assert _action("net.10", actions) == "keep"
    assert _action("net.2.mlp", actions) == "keep"


def test_names_lose_the_path_they_share() -> None:
    """But keep the word before a number, and single or identical beginnings do no harm."""
    assert _short_names(["a.layer.0", "a.layer.1.mlp"]) == ["layer.0", "layer.1.mlp"]
    assert _short_names(["a.b.c"]) == ["c"]
    assert _short_names(["a", "a.b"]) == ["a", "a.b"]
    assert _short_names(["0", "1"]) == ["0", "1"]
    assert max(map(len, _short_names(["x" * 90, "y"]))) <= 36
