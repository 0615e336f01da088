"""Structures that are taken apart and put together again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mimose.actions.structures import flatten, unflatten


@dataclass
class State:
    """What blocks hand on."""

    hidden: torch.Tensor
    pair: tuple[torch.Tensor, int]
    later: Any = field(default=None, init=False)


@dataclass(frozen=True)
class Frozen:
    """The same, which nobody changes."""

    hidden: torch.Tensor


@dataclass
class Slots:
    """Has no dictionary, and nothing at one of its names."""

    __slots__ = ("hidden", "unset")
    hidden: torch.Tensor
    unset: Any


@dataclass
class Block(nn.Module):
    """No structure."""

    width: int


@dataclass
class Table(dict):  # type: ignore[type-arg]
    """Holds more than its fields."""

    width: int


def test_objects_are_others_with_what_they_held() -> None:
    """Also what was put into one besides, and at whatever place it is."""
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    state, frozen, slots = State(one, (two, 7)), Frozen(three), Slots.__new__(Slots)
    state.later, slots.hidden = "later", one
    state.besides = [three]  # type: ignore[attr-defined]
    leaves, structure = flatten(([one, state], {"frozen": frozen, "slots": slots, "last": 3}))
    assert [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] == [one, one, two, three, three, one]
    (first, made), others = unflatten(leaves, structure)
    assert first is one
    assert made is not state
    assert vars(made) == vars(state)
    assert made.besides is not state.besides  # type: ignore[attr-defined]
    assert others["frozen"].hidden is three
    assert others["slots"].hidden is one
    assert not hasattr(others["slots"], "unset")
    assert others["last"] == 3
    assert flatten(unflatten(leaves, structure))[1] == structure
    assert hash(structure) == hash(flatten(([one, state], {"frozen": frozen, "slots": slots, "last": 3}))[1])


def test_what_changes_one_of_them_changes_no_other() -> None:
    leaves, structure = flatten(State(torch.ones(1), (torch.ones(2), 7)))
    unflatten(leaves, structure).hidden = None
    assert torch.equal(unflatten(leaves, structure).hidden, torch.ones(1))


def test_an_object_that_is_given_twice_is_one() -> None:
    """Whatever is between and behind."""
    state, other = State(torch.ones(1), (torch.ones(2), 7)), Frozen(torch.ones(3))
    leaves, structure = flatten(([state, 1], other, state, {"again": state, "last": other}, 2))
    assert len(leaves) == 7
    (first, one), second, third, last, two = unflatten(leaves, structure)
    assert first is third is last["again"]
    assert second is last["last"]
    assert first is not state
    assert (one, two) == (1, 2)


class Base:
    """Has room for what is no field."""

    __slots__ = ("cache",)


@dataclass
class Derived(Base):
    """Inherits it."""

    hidden: int


@pytest.mark.parametrize("leaf", [Derived(3), Table(3), State(State, (torch.ones(1), 1)), State, object()])  # type: ignore[arg-type]
def test_others_are_leaves(leaf: Any) -> None:
    """Whatever class it is, of which nobody knows how its objects are made; and inside a dataclass's object."""
    found = flatten([State(leaf, (torch.ones(1), 1)) if isinstance(leaf, State) else leaf])[0]
    assert any(each is leaf for each in found)
