"""Jobs of a coordinator, without trainings."""

from __future__ import annotations

import os
import signal
import time

from lightning_mimose.shared.remote import RemoteBroker
from lightning_mimose.shared.wire import Meeting


def broker(name, budget=1000, device="cpu"):
    return RemoteBroker(Meeting(name), budget, device)


def kill_coordinator(name, killed=()):
    """Kill it, and return its process id."""
    soon(lambda: Meeting(name).lock.read_text().strip() not in ("", *map(str, killed)))
    pid = int(Meeting(name).lock.read_text())
    os.kill(pid, signal.SIGKILL)
    return pid


def settled(broker, **rests):
    for job, rest in rests.items():
        broker.join(job, 1.0)
        verdict = broker.settle(job, rest)
        assert verdict.reach or broker.wait(job)


def soon(condition):
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
