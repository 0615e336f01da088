"""Inputs of units followed through a forward."""

from __future__ import annotations

import torch

from lightning_mimose.measure.inputs import InputWatch


def test_inputs_are_told_by_their_calls_and_the_last_call_before_their_end() -> None:
    """One after the other where the same calls were given several; parameters and the batch are nobody's input."""
    weight, batch = torch.ones(2), torch.ones(3)
    watch = InputWatch([weight, batch])
    mask, twin, kept = torch.ones(4), torch.ones(4), torch.ones(5)
    watch.enters("a", (mask, weight), {"more": [twin, batch]})
    watch.enters("b", (mask.view(2, 2),), {"more": twin})
    del mask
    watch.enters("c", (kept,), {})
    del twin
    watch.enters("c", (torch.ones(1),), {})
    assert watch.fates() == {frozenset({"a", "b"}): ["b", "c"], frozenset({"c"}): [None], frozenset({"c#1"}): ["c#1"]}
    assert kept.shape == (5,)
