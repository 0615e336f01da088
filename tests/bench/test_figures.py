"""From measurements to figures, by hand."""

from __future__ import annotations

import pytest

from lightning_mimose.bench.figures import Measured, Spread, figures, relative_time

PLAIN = Measured("plain", "plain", peaks_bytes=[[50, 100, 200]] * 2, seconds=[[1, 2, 3], [1, 2, 5]], operations=100)
PLAIN.gradients = ["a", "b", "c"]


def measured(**values: object) -> Measured:
    """An alternative that was measured."""
    return Measured("x", "x", **values)  # type: ignore[arg-type]


def test_steps_over_are_counted_in_each_epoch_and_the_first_is_told_apart() -> None:
    found = figures(measured(peaks_bytes=[[50, 121, 130], [50, 100, 120]]), PLAIN, 120)
    assert found.steps_over == Spread(1, 0, 2)
    assert found.first_steps_over == 2
    assert found.worst_peak == Spread(pytest.approx(250 / 240), 1.0, pytest.approx(130 / 120))


def test_utilisation_looks_only_at_steps_whose_plain_peak_is_over_the_budget() -> None:
    found = figures(measured(peaks_bytes=[[50, 60, 90]]), PLAIN, 100)
    assert found.utilisation is not None
    assert found.utilisation.value == pytest.approx(0.9)
    assert figures(measured(peaks_bytes=[[50, 60, 90]]), PLAIN, 300).utilisation is None


def test_time_is_a_ratio_of_medians_and_its_spread_that_of_single_repeats() -> None:
    found = relative_time([[1, 2, 6], [2, 4, 6], [1, 3, 9]], [[1, 2, 3], [1, 2, 5], [1, 2, 4]])
    assert found == Spread(pytest.approx(10 / 7), pytest.approx(10 / 7), pytest.approx(13 / 7))
    assert relative_time([], PLAIN.seconds) is None


def test_time_of_other_repeats_is_held_against_all_of_the_plain_run() -> None:
    assert relative_time([[2, 4, 8]], PLAIN.seconds) == Spread(2.0, 2.0, 2.0)


def test_operations_errors_and_bits() -> None:
    found = figures(
        measured(operations=133, predictions=[(99, 100), (101, 100), (104, 100)], gradients=["a", "b", "c"]), PLAIN, 120
    )
    assert found.added_operations == pytest.approx(0.33)
    assert found.prediction_error == pytest.approx(0.04)
    assert found.bit_equal is True
    assert figures(measured(gradients=["a", "b", "d"]), PLAIN, 120).bit_equal is False


def test_what_did_not_run_has_no_figures() -> None:
    found = figures(measured(status="not run", why="no compiler"), PLAIN, 120)
    assert set(found.to_dict().values()) == {None}
