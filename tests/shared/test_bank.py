"""The bank: schedules at random, and the rules one by one."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_mimose.shared.bank import Bank
from lightning_mimose.shared.claim import Claim
from tests.helpers.schedules import simulate


@given(seed=st.integers(0, 2**63), jobs=st.integers(1, 6))
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_schedule_deadlocks_starves_or_exceeds(seed, jobs):
    outcome = simulate(random.Random(seed), jobs)
    assert outcome.highest_bytes <= outcome.budget_bytes
    assert outcome.finished == outcome.jobs


def settled(bank, **rests):
    for job, rest in rests.items():
        bank.join(job)
        assert bank.settle(job, rest).reach
    return bank


def test_peaks_interleave():
    bank = settled(Bank(100), a=10, b=10)
    assert bank.begin("a", Claim.of([40, 90, 60, 20]), 10, 0.0).reach == 4
    assert bank.begin("b", Claim.of([10, 30, 60, 90]), 10, 0.0).reach == 1
    bank.advance("a", 2)  # 60 from here on
    assert bank.ask("b", 0.0).reach == 2
    bank.advance("a", 3)
    assert bank.ask("b", 0.0).reach == 3
    assert bank.ask("b", 0.0).reach == 0
    assert bank.held_bytes <= 100
    bank.end("a", 1.0)
    assert bank.poll(1.0) == {"b": 4}


def test_two_that_could_block_each_other_halfway_do_not():
    bank = settled(Bank(100), a=0, b=0)
    bank.begin("a", Claim.of([50, 80]), 0, 0.0)
    # 50 and 50 would fit, but then neither could get its 80.
    assert bank.begin("b", Claim.of([50, 80]), 0, 0.0).reach == 0


def test_a_claim_beyond_its_room_is_refused_and_says_what_there_is():
    bank = settled(Bank(100), a=10, b=30)
    verdict = bank.begin("a", Claim.of([71]), 10, 0.0)
    assert verdict.refused
    assert verdict.room_bytes == 70
    assert not bank.begin("a", Claim.of([70]), 10, 0.0).refused


def test_no_step_begins_before_one_that_waits():
    bank = settled(Bank(100), a=0, b=0, c=0)
    bank.begin("a", Claim.of([60]), 0, 0.0)
    assert bank.begin("b", Claim.of([80]), 0, 0.0).reach == 0
    assert bank.begin("c", Claim.of([30]), 0, 0.0).reach == 0  # it would fit
    bank.end("a", 1.0)
    assert list(bank.poll(1.0)) == ["b"]
    bank.end("b", 2.0)
    assert list(bank.poll(2.0)) == ["c"]


def test_turns_follow_the_weights():
    bank = Bank(100)
    for job, weight in (("a", 1.0), ("b", 3.0)):
        bank.join(job, weight)
        bank.settle(job, 0)
    now, served = 0.0, {"a": 0, "b": 0}
    running = "a"
    bank.begin("a", Claim.of([100]), 0, now)
    bank.begin("b", Claim.of([100]), 0, now)
    for _ in range(400):
        now += 1.0
        bank.end(running, now)
        bank.begin(running, Claim.of([100]), 0, now)
        bank.poll(now)
        running = next(job for job, account in bank.accounts.items() if account.claim is not None)
        served[running] += 1
    assert served["b"] / served["a"] == pytest.approx(3.0, rel=0.05)


def test_a_job_that_leaves_gives_back_all_at_once():
    bank = settled(Bank(100), a=20, b=20)
    bank.begin("a", Claim.of([80]), 20, 0.0)
    assert bank.begin("b", Claim.of([70]), 20, 0.0).reach == 0
    bank.leave("a")
    assert bank.poll(0.0) == {"b": 1}
    assert bank.room_bytes("b") == 100


def test_a_newcomer_waits_for_a_leaver_and_does_not_hold_the_others_up():
    bank = Bank(100)
    bank.join("a")
    bank.settle("a", 20, least_bytes=70)
    bank.join("b")
    assert bank.settle("b", 40).full  # a could not go on
    assert bank.poll(0.0) == {"b": 0}
    assert bank.settle("b", 40, patient=True).reach == 0
    assert bank.begin("a", Claim.of([70]), 20, 0.0).reach == 1
    bank.end("a", 1.0)
    assert bank.poll(1.0) == {}
    bank.leave("a")
    assert bank.poll(1.0) == {"b": 1}


def test_a_rest_that_exceeds_the_budget_is_refused():
    bank = settled(Bank(100), a=20)
    bank.join("b")
    assert bank.settle("b", 101).refused
    assert bank.settle("b", 10, least_bytes=101).refused


def test_one_whose_room_shrank_while_it_waited_is_told_to_ask_for_less():
    bank = settled(Bank(100), a=10, b=10)
    bank.begin("b", Claim.of([20]), 10, 0.0)
    bank.end("b", 5.0)  # it was served for long, so newcomers come before it
    bank.begin("a", Claim.of([50]), 10, 5.0)
    assert bank.begin("b", Claim.of([90]), 10, 5.0).reach == 0
    bank.join("c")
    assert bank.settle("c", 5).reach
    bank.end("a", 6.0)
    assert bank.poll(6.0) == {"b": 0}
    assert bank.begin("b", Claim.of([bank.room_bytes("b")]), 10, 6.0).reach == 1


def test_a_large_claim_among_small_ones_is_served_soon():
    lot, bank = random.Random(7), settled(Bank(100), big=0, a=0, b=0, c=0)
    now, longest, began, waits = 0.0, 0, 0, False
    for _ in range(3000):
        now += 1.0
        job = lot.choice("abc")
        if bank.accounts[job].claim is not None:
            bank.end(job, now)
        elif job not in bank.waiting:
            began += bool(bank.begin(job, Claim.of([40]), 0, now).reach)
        if not waits and bank.accounts["big"].claim is None:
            waits, began = not bank.begin("big", Claim.of([100]), 0, now).reach, 0
        elif bank.accounts["big"].claim is not None:
            bank.end("big", now)
        granted = bank.poll(now)
        if "big" in granted:
            longest, waits = max(longest, began), False
    assert longest <= 6  # steps of others that began while it waited


def test_names_and_weights_are_checked():
    bank = settled(Bank(100), a=10)
    with pytest.raises(ValueError, match="already"):
        bank.join("a")
    with pytest.raises(ValueError, match="positive"):
        bank.join("b", 0.0)
    with pytest.raises(ValueError, match="at least one"):
        Claim.of([])
