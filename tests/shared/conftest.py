"""What the tests of shared budgets have in common."""

from __future__ import annotations

import os
import time

import pytest

from lightning_mimose.shared.wire import Meeting


@pytest.fixture
def name():
    """A name of the test's own; afterwards no coordinator, socket or file of it may be left."""
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    yield name
    meeting = Meeting(name)
    until = time.monotonic() + 15
    while meeting.folder.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not meeting.folder.exists()
