"""Late results: each comes once, failures too, and what is being worked out hinders no copy."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest

from lightning_mimose.predict.late import Late


def test_one_at_a_time() -> None:
    """What is asked for once more meanwhile is not worked out."""
    late, go_on = Late[str, int](), threading.Event()
    late.begin("a", lambda: int(go_on.wait()) + 1)
    late.begin("a", lambda: 7)
    late.begin("b", lambda: 3)
    assert ("a", 2) not in list(late.arrived())
    go_on.set()
    late.begin("b", lambda: 4)
    rest = dict(late.arrived(wait=True))
    assert rest["a"] == 2
    assert not list(late.arrived(wait=True))


def test_a_failure_is_told_to_whoever_asks() -> None:
    """And not lost in a thread; the next one is worked out as ever."""
    late = Late[str, int]()
    late.begin("a", lambda: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        list(late.arrived(wait=True))
    late.begin("a", lambda: 5)
    assert list(late.arrived(wait=True)) == [("a", 5)]


def test_copies() -> None:
    """They begin with nothing."""
    late, go_on = Late[str, int](), threading.Event()
    late.begin("a", lambda: int(go_on.wait()))
    for other in (copy.deepcopy(late), pickle.loads(pickle.dumps(late))):
        assert not list(other.arrived(wait=True))
        other.begin("a", int)
        assert list(other.arrived(wait=True)) == [("a", 0)]
    go_on.set()
    assert list(late.arrived(wait=True)) == [("a", 1)]
