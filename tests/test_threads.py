"""Threads of the package's own end before the interpreter does."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

ENDS = """
    import sys, threading, time
    from lightning_mimose.plan import Scheduler
    from lightning_mimose.predict.late import Late

    began = threading.Event()

    def work() -> None:
        began.set()
        time.sleep(0.5)
        print("worked", flush=True)

    if sys.argv[1] == "planner":
        scheduler = Scheduler("auto")
        scheduler.beside(work)
    else:
        late = Late()
        late.begin("fit", work)
    began.wait()
    print("over", flush=True)
    if sys.argv[2] == "fails":
        raise SystemExit(3)
"""


@pytest.mark.parametrize("thread", ["planner", "fit"])
@pytest.mark.parametrize(("way", "code"), [("ends", 0), ("fails", 3)])
def test_what_runs_beside_the_training_is_not_killed(thread: str, way: str, code: int) -> None:
    """A solver in C++ that is aborts the process, after a training that went well and was not closed."""
    command = [sys.executable, "-c", textwrap.dedent(ENDS), thread, way]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (code, ["over", "worked"], "")


FORKS = """
    import os, sys, threading
    from lightning_mimose.plan import Scheduler

    scheduler, go_on, began = Scheduler("auto"), threading.Event(), threading.Event()
    scheduler.beside(lambda: (began.set(), go_on.wait()))
    began.wait()
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        go_on.set()
        print(os.waitstatus_to_exitcode(status))
    else:
        sys.exit(5)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked on POSIX only")
def test_a_fork_does_not_wait_for_threads_that_it_has_not() -> None:
    """They are its parent's."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORKS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["5"], "")
