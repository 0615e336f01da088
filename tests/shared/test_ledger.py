"""What the jobs held, over a time that is longer than what can be noted of it."""

from __future__ import annotations

import random

from lightning_mimose.report.shared import SharedReport
from lightning_mimose.shared.ledger import MOST, Ledger
from lightning_mimose.shared.wire import MOST_BYTES, encode


def reported(jobs, steps, wait=False):
    """A ledger after many steps, and what it was told: job -> its highest, the highest of all, all true levels."""
    ledger, rng, level, highest, total, true = Ledger(), random.Random(1), {}, {}, 0, {}
    for step in range(steps):
        level[rng.choice(jobs)] = rng.randrange(10**9, 10**11)
        now = 1.7e9 + step / 7
        ledger.note(level, now)
        if wait:
            ledger.waits_from(now, jobs[0])
            ledger.waits_no_more(now + 0.1, jobs[0])
        highest = {job: max(size, highest.get(job, 0)) for job, size in level.items()}
        total = max(total, sum(level.values()))
        true[now] = dict(level)
    return ledger, highest, total, true


def test_a_long_training_is_thinned_to_moments_that_were_and_its_highest_are_kept():
    jobs = ["a", "b", "c"]
    ledger, highest, total, true = reported(jobs, 10 * MOST)
    assert MOST // 4 < len(ledger.held) <= MOST
    report = SharedReport(10**12, ledger.held, ledger.waits)
    assert report.highest_bytes == total
    assert {facts.job: facts.highest_bytes for facts in report.jobs} == highest
    last = dict(report.stacked())  # after all that changed at a moment
    assert all(true[now] == level for now, level in last.items())
    assert max(last) == max(true)


def test_more_jobs_than_entries():
    ledger, *_ = reported([f"job-{i}" for i in range(MOST)], MOST + 9)
    assert len(ledger.held) <= MOST


def test_what_is_kept_fits_into_one_line():
    jobs = [letter * 255 for letter in "abc"]  # the longest name that a file can have
    ledger, *_ = reported(jobs, 2 * MOST, wait=True)
    assert len(ledger.waits) == MOST
    most = len(encode({"n": 1, "answer": ledger.to_dict()})) * MOST * 2 / (len(ledger.held) + len(ledger.waits))
    assert most < MOST_BYTES
