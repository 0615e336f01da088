"""Inputs that nothing saves, read off a step: since when only regions hold them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_mimose.measure.interval import Interval
from lightning_mimose.measure.lent import Lent, pieces_beside
from lightning_mimose.measure.loose import endings
from lightning_mimose.measure.observe import observe
from lightning_mimose.measure.trace import IS_GONE, LET_GO, Mark, Piece, StepTrace
from lightning_mimose.predict.shapes import NEVER, LooseShape
from tests.helpers.recording import recorded

TOKENS, WIDTH = 32, 16


def cut(*pieces: tuple[int, int | None]) -> StepTrace:
    """One interval of pieces: the peak of each, and the storage whose end opens it."""
    found = tuple(Piece(0, 0, peak, None if number is None else ("", LET_GO, number)) for peak, number in pieces)
    return StepTrace((), (Mark("step", "start", 0, 0),), (Interval(0, max(peak for peak, _ in pieces)),), pieces=found)


def ended(trace: StepTrace, sizes: dict[int, int], *lends: Lent) -> dict[int, int]:
    """By how much the interval would be lower without them."""
    return endings(trace, sizes, pieces_beside(trace, lends))


@pytest.mark.parametrize(
    ("before", "after", "lower"), [(100, 120, 20), (100, 110, 10), (100, 90, 0), (100, 200, 20), (0, 10, 10)]
)
def test_an_interval_is_lower_only_where_memory_was_highest_after_the_end(before: int, after: int, lower: int) -> None:
    """By the whole size at most."""
    assert ended(cut((before, None), (after, 1)), {1: 20}) == {1: lower}


def test_ends_within_one_interval_add_up() -> None:
    """To what it is without all of them."""
    trace = cut((100, None), (110, 1), (120, 2), (118, None))
    assert ended(trace, {1: 20, 2: 30}) == {1: 20, 2: 0}
    assert ended(trace, {2: 30}) == {2: 10}
    assert ended(trace, {}) == {}


def test_an_interval_counts_as_if_everything_had_been_kept() -> None:
    """In a sheltered step what a block returned and would save is gone at its start; kept, it is there to the end."""
    end = ("block", IS_GONE, 7)
    returned = Lent(True, 60, 1, frozenset({7}), ((end, 60),))
    pieces = (Piece(0, 100, 100), Piece(0, 100, 100, end, rest_bytes=50), Piece(0, 50, 55, ("", LET_GO, 1)))
    trace = StepTrace((), (Mark("step", "start", 0, 0),), (Interval(100, 100),), pieces=pieces)
    assert ended(trace, {1: 20}) == {1: 0}
    assert ended(trace, {1: 20}, returned) == {1: max(100, 50 + 60, 55 + 60) - max(100, 50 + 60, 55 + 60 - 20)}


def test_results_that_end_one_after_the_other_count_until_each_of_them_does() -> None:
    """The second is there as long as the first alone is gone, and is not added to itself."""
    first, second = ("block", IS_GONE, 7), ("block", IS_GONE, 8)
    returned = Lent(True, 60, 1, frozenset({7, 8}), ((first, 10), (second, 50)))
    pieces = (Piece(0, 100, 100), Piece(0, 90, 90, first, rest_bytes=80), Piece(0, 80, 80, second, rest_bytes=30))
    trace = StepTrace((), (Mark("step", "start", 0, 0),), (Interval(100, 100),), pieces=pieces)
    assert pieces_beside(trace, [returned]) == [100, 90, 90]


class Block(nn.Module):
    """Adds a table's mean, and keeps nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """One layer."""
        y: torch.Tensor = torch.tanh(self.linear(x)) + table.mean(1, keepdim=True)
        return y


class Model(nn.Module):
    """Three blocks and a table that is let go of at some point."""

    def __init__(self, until: str) -> None:
        super().__init__()
        self.until = until
        self.first, self.blocks, self.last = (
            nn.Linear(WIDTH, WIDTH),
            nn.ModuleList([Block(), Block()]),
            nn.Linear(WIDTH, 4),
        )
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.first(x)
        table = torch.zeros(TOKENS, 40 * WIDTH).add_(0.1)
        for block in self.blocks:
            x = block(x, table)
        self.kept = table if self.until == "the end" else None
        if self.until == "the last block":
            del table
        found: torch.Tensor = self.last(x).square().mean()
        return found


def table_of(until: str) -> tuple[LooseShape, dict[str, int]]:
    """What was seen of the table, and when calls began and ended."""
    model = Model(until)
    seen = observe(recorded(model, torch.ones(TOKENS, WIDTH), ["blocks.*", "last"], lambda model, x: model(x)), 0)
    largest = max(seen.structure.loose, key=lambda shape: seen.values[shape.size])
    assert seen.values[largest.size] == TOKENS * 40 * WIDTH * 4
    times = {call.key: call.out_time for call in seen.structure.calls}
    return largest, times | {"last in": next(c.in_time for c in seen.structure.calls if c.key == "last")}


def test_a_table_is_let_go_of_where_the_caller_does() -> None:
    """Though every block's region holds it."""
    shape, times = table_of("the last block")
    assert shape.since_time == times["blocks.1"] + 1 == times["last in"]
    assert not shape.lasts


def test_a_local_lives_to_the_end_of_the_forward() -> None:
    """Beyond the last unit."""
    shape, times = table_of("the forward")
    assert shape.since_time == times["last"] + 1
    assert not shape.lasts


def test_what_somebody_holds_in_backward_lasts() -> None:
    """Whether or not regions do."""
    shape, _ = table_of("the end")
    assert shape.since_time == NEVER
    assert shape.lasts
