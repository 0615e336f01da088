"""Late results: each comes once, failures too, and what is being worked out hinders no copy."""

from __future__ import annotations

import copy
import os
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


def test_a_failure_comes_as_nothing() -> None:
    """The next one is worked out as ever."""
    late = Late[str, int]()
    late.begin("a", lambda: int("x"))
    assert list(late.arrived(wait=True)) == [("a", None)]
    late.begin("a", lambda: 5)
    assert list(late.arrived(wait=True)) == [("a", 5)]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_waits_for_no_thread_of_its_parent() -> None:
    """Threads are not there in it."""
    late, go_on = Late[str, int](), threading.Event()
    late.begin("a", lambda: int(go_on.wait()))
    child = os.fork()
    if child == 0:
        os._exit(len(list(late.arrived(wait=True))))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    go_on.set()
    assert list(late.arrived(wait=True)) == [("a", 1)]


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
