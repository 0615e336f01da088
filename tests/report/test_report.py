"""The report: numbers, text, JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from lightning_mimose.report.record import MAX_RECORDS, History, StepRecord
from lightning_mimose.report.report import Report
from lightning_mimose.report.text import WIDTH, Table, plain, rich_tables

UNITS = ("model.layers.0", "model.layers.1")
BUDGET = 1_000_000


def record(tokens: int = 8, **changes: object) -> StepRecord:
    """A planned, measured step that kept everything."""
    plain_record = StepRecord(
        step=0,
        batch_idx=0,
        epoch=0,
        size={"batch": 4, "input_ids:1": tokens},
        sheltered=False,
        cache_hit=False,
        retried=False,
        budget_bytes=BUDGET,
        resident_bytes=100_000,
        predicted_peak_bytes=500_000,
        measured_peak_bytes=500_000,
        reserved_peak_bytes=None,
        actions={},
        planning_seconds=1e-5,
    )
    return replace(plain_record, **changes)  # type: ignore[arg-type]


def report(*records: StepRecord, **options: object) -> Report:
    """The report of some steps."""
    history = History()
    for one in records:
        history.add(one)
    return Report(history, UNITS, BUDGET, **options)  # type: ignore[arg-type]


def sheltered(**changes: object) -> StepRecord:
    """A sheltered step."""
    return record(sheltered=True, predicted_peak_bytes=None, actions=dict.fromkeys(UNITS, "recompute"), **changes)


def test_a_share_is_of_the_budget_that_was_in_force() -> None:
    """A lower one that came later was not broken by what ran before it."""
    assert "(50.0 % of the budget)" in str(report(record(), record()))
    text = str(report(record(measured_peak_bytes=3_600_000, budget_bytes=4_000_000), record()))
    assert "3.60 MB (at most 90.0 % of the budget in force)" in text
    earlier = record(measured_peak_bytes=1_100_000)
    many = [record(measured_peak_bytes=900_000, budget_bytes=2_000_000)] * MAX_RECORDS
    assert "1.10 MB (110.0 % of the budget)" in str(report(earlier, *many))


def test_labels_of_rows_are_not_cut_to_less_than_can_be_read() -> None:
    """However wide the other columns are."""
    wide = Table("Costs", (("21.89 MB (smallest)", "x" * 70),), header=("budget", "y"))
    assert "21.89 MB (smallest)" in plain([wide])


def test_nothing_recorded_is_said() -> None:
    """An empty history gives a sentence, not zeros and a division."""
    empty = Report(History(), (), None)
    assert "No training step was recorded" in str(empty)
    assert empty.to_dict()["records"] == []
    assert empty.prediction_error is None
    assert empty.size_groups == ()


def test_report_is_a_snapshot() -> None:
    """Steps that follow do not change a report made before."""
    history = History()
    history.add(record())
    early = Report(history, UNITS, BUDGET)
    history.add(record(measured_peak_bytes=BUDGET + 1))
    assert len(early.records) == early.aggregates.steps == 1
    assert early.aggregates.over_budget == 0
    assert Report(history, UNITS, BUDGET).aggregates.over_budget == 1


def test_prediction_error_counts_planned_measured_steps_only() -> None:
    """Sheltered and unmeasured steps have no error; the others are shares of the measured peak."""
    error = report(
        sheltered(),
        record(measured_peak_bytes=None),
        record(predicted_peak_bytes=110, measured_peak_bytes=100),
        record(predicted_peak_bytes=100, measured_peak_bytes=100),
        record(predicted_peak_bytes=98, measured_peak_bytes=100),
    ).prediction_error
    assert error is not None
    assert error.steps == 3
    assert error.median == pytest.approx(0.02)
    assert error.largest == pytest.approx(0.10)


def test_sizes_are_grouped_into_quarters() -> None:
    """Four groups of equal number over the dimension that varied, each with its mean and its largest peak."""
    steps = [
        record(n, predicted_peak_bytes=1000 * n, actions={UNITS[0]: "recompute"} if n > 12 else {})
        for n in range(1, 17)
    ]
    one = report(sheltered(), *steps)
    assert one.axis.dims == ("input_ids:1",)
    assert [(g.smallest, g.largest, g.steps) for g in one.size_groups] == [
        (1, 4, 4),
        (5, 8, 4),
        (9, 12, 4),
        (13, 16, 4),
    ]
    assert [g.recomputed_units for g in one.size_groups] == [0, 0, 0, 1]
    assert one.size_groups[-1].predicted_peak_bytes == 16_000


def test_one_size_is_never_split_over_groups() -> None:
    """Most steps of one size: fewer groups, and every step in exactly one."""
    groups = report(*[record(8)] * 30, record(9), record(10)).size_groups
    assert sum(group.steps for group in groups) == 32
    assert all(a.largest < b.smallest for a, b in pairwise(groups))


def test_records_with_fewer_names_do_not_disturb_the_size_axis() -> None:
    """The first records of a run name fewer dimensions than the later ones."""
    first = record(size={"batch": 4})
    one = report(first, *[record(n) for n in (3, 5, 7)])
    assert one.axis.dims == ("input_ids:1",)
    assert sum(group.steps for group in one.size_groups) == 3


def test_two_varying_dimensions_are_multiplied() -> None:
    """The size axis is the product of what varied, and says so."""
    one = report(record(size={"batch": 2, "input_ids:1": 5}), record(size={"batch": 4, "input_ids:1": 7}))
    assert one.axis.label == "batch x input_ids:1"
    assert [group.largest for group in one.size_groups] == [10, 28]


def test_text_says_what_matters() -> None:
    """Budget, peaks, errors, steps, cache, units and evaluation are all there."""
    text = str(
        report(
            sheltered(),
            record(9, cache_hit=True, measured_peak_bytes=505_000, actions={UNITS[1]: "recompute"}),
            record(11, measured_peak_bytes=BUDGET + 1),
            evaluation_peaks={"validation": 700_000},
        )
    )
    for part in (
        "budget 1.00 MB",
        "1 of 3 measured",
        "3 (2 planned, 1 sheltered)",
        "1.0 of 2 on average",
        "700.00 KB (outside the budget's promise)",
        "prediction error, 2 steps",
        "model.layers.1",
    ):
        assert part in text


def test_text_fits_a_terminal_and_has_no_escapes() -> None:
    """At most 80 columns of plain ASCII, however long the units' names are."""
    name = "encoder." + "very_long_name." * 12 + "attention"
    text = str(report(*[record(n, actions={name: "recompute"}) for n in range(1, 50)]))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "\x1b" not in text
    assert text.isascii()


def test_reserved_peaks_decide_on_an_accelerator() -> None:
    """What the allocator reserved is what the budget bounds, so it is shown and counted."""
    text = str(report(record(reserved_peak_bytes=BUDGET + 5)))
    assert "largest reserved peak" in text
    assert "1 of 1 measured" in text


def test_json_holds_everything_and_makes_folders(tmp_path: Path) -> None:
    """The file reads back as `to_dict`, and its records rebuild the real ones."""
    one = report(sheltered(), record(9, actions={UNITS[0]: "recompute"}), evaluation_peaks={"validation": 5})
    path = one.to_json(tmp_path / "a" / "b" / "report.json")
    read = json.loads(path.read_text())
    assert read == one.to_dict()
    assert [StepRecord(**entry) for entry in read["records"]] == list(one.records)
    assert read["most_recomputed"] == [{"unit": UNITS[0], "steps": 1}]


def test_totals_outlive_the_records_that_are_kept() -> None:
    """Of many steps the newest are kept, and the totals are of all."""
    history = History()
    for _ in range(MAX_RECORDS + 10):
        history.add(record())
    one = Report(history, UNITS, BUDGET)
    assert len(one.records) == MAX_RECORDS
    assert one.records[0].step == 10
    assert "10,010 (10,010 planned, 0 sheltered)" in str(one)


def test_rich_shows_the_same() -> None:
    """`rich.print` shows every cell that the text has."""
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=100, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(report(record(9, actions={UNITS[1]: "recompute"}), record(11)))
    assert "model.layers.1" in capture.get()
    assert "2 (2 planned, 0 sheltered)" in capture.get()


def test_rich_markup_in_names_is_text() -> None:
    """Square brackets in a cell are no markup."""
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=100)
    with console.capture() as capture:
        console.print(*rich_tables([Table("t", (("[red]x[/red]", "1"),), ("name", "n"))]))
    assert "[red]x[/red]" in capture.get()


def test_plain_wraps_long_facts() -> None:
    """A long value goes on in the value's column."""
    lines = plain([Table("t", (("label", "word " * 30),))]).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[3].startswith(" " * 30 + "word")
