"""What a job in a process keeps from step to step while nobody waits, and gives back when somebody does."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from lightning_mimose.shared import link
from lightning_mimose.shared.claim import Claim
from lightning_mimose.shared.counter import Counter
from lightning_mimose.shared.lease import Lease
from lightning_mimose.shared.stops import Route
from tests.helpers.processes import broker, kill_coordinator, settled, soon


@pytest.fixture(autouse=True)
def calm(monkeypatch):
    """Nobody need have been calm for long."""
    monkeypatch.setattr(link, "CALM_SECONDS", 0.0)


@pytest.fixture
def said(monkeypatch):
    """What all jobs of this process have said."""
    said = []
    send = link.Link._send
    monkeypatch.setattr(
        link.Link, "_send", lambda self, message: (said.append((self.job, message["op"])), send(self, message))
    )
    return said


@pytest.fixture
def two_jobs(name):
    one, two = broker(name), broker(name)
    settled(one, a=100)
    settled(two, b=100)
    soon(lambda: not one.alone("a"))
    yield one, two
    one.leave("a")
    two.leave("b")


def steps(broker, job, *claims):
    for claim in claims:
        assert begun(broker, job, claim) == len(claim)
        broker.end(job)


def begun(broker, job, claim):
    """How far a step may run that waits as long as it must."""
    return broker.begin(job, Claim.of(claim), 100).reach or broker.wait(job)


def test_a_step_that_need_not_wait_says_nothing(two_jobs, said):
    one, _ = two_jobs
    steps(one, "a", [200, 700])
    said.clear()
    steps(one, "a", [200, 700], [700], [100, 300, 650])
    assert said == []
    steps(one, "a", [800], [800])  # it asks once for more
    assert said == [("a", "begin")]


def test_what_is_kept_between_steps_is_given_back_as_soon_as_somebody_waits(two_jobs):
    one, two = two_jobs
    steps(one, "a", [800], [800])
    assert begun(two, "b", [850]) == 1
    assert one.begin("a", Claim.of([800]), 100).reach == 0
    two.end("b")
    assert one.wait("a") == 1


def test_a_step_on_a_larger_ones_grant_gives_back_what_it_does_not_need(two_jobs):
    one, two = two_jobs
    steps(one, "a", [800])
    assert one.begin("a", Claim.of([500, 300]), 100).reach == 2
    one.place("a").at = 0
    assert begun(two, "b", [500]) == 1
    two.end("b")
    one.place("a").at = 1
    assert two.begin("b", Claim.of([600]), 100).reach == 0  # it may still hold 500, as far as was said
    one.advance("a", 1)
    assert two.wait("b") == 1


def test_whoever_takes_over_counts_the_step_and_not_what_was_kept(two_jobs, name):
    one, two = two_jobs
    steps(one, "a", [800])
    killed = [kill_coordinator(name)]
    assert two.begin("b", Claim.of([850]), 100).reach == 1
    two.end("b")
    steps(one, "a", [800])
    assert one.begin("a", Claim.of([500]), 100).reach == 1
    killed.append(kill_coordinator(name, killed))
    assert two.begin("b", Claim.of([600]), 100).reach == 0
    one.end("a")
    assert two.wait("b") == 1


def test_one_that_keeps_something_is_alone_again_when_the_others_have_left(name):
    one, two = broker(name), broker(name)
    settled(one, a=100)
    settled(two, b=100)
    steps(one, "a", [800])
    two.leave("b")
    soon(lambda: one.alone("a"))
    one.leave("a")


def test_plans_are_told_when_they_change(two_jobs, name, said):
    one, _ = two_jobs
    assert one.plan_bytes("a", 200, 900) == 550
    said.clear()
    three = broker(name)
    settled(three, c=400)
    soon(lambda: one.plan_bytes("a", 200, 900) == 300)
    assert one.plan_bytes("a", 150, 400) == 300  # a smaller batch has nothing to say
    three.leave("c")
    soon(lambda: one.plan_bytes("a", 200, 900) == 550)
    assert ("a", "plan") not in said


def test_one_that_was_alone_for_long_need_not_wait_as_long(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    counter = Counter(100)
    counter.join("a")
    assert counter.settle("a", 10).reach
    assert counter.give_all("a")
    now[0] += 600
    counter.join("b")
    counter.settle("b", 10)
    counter.take_back("a", 10, 0)
    served = dict.fromkeys("ab", 0)
    running = ""
    for job in "ab":
        if counter.begin(job, Claim.of([80]), 10).reach:
            running = job
    for _ in range(20):
        now[0] += 1
        served[running] += 1
        counter.end(running)
        counter.begin(running, Claim.of([80]), 10)
        running = next(job for job, account in counter.bank.accounts.items() if account.claim is not None)
        counter.answers.clear()
    assert min(served.values()) >= 9


def test_jobs_that_keep_what_they_have_never_exceed_the_budget(name):
    """Random steps of several jobs, each of which says truly what it holds."""
    budget, jobs, held, highest, errors = 1000, "abc", {}, [0], []
    lock = threading.Lock()

    def holds(job, size):
        with lock:
            held[job] = size
            highest[0] = max(highest[0], sum(held.values()))

    def train(job):
        try:
            lot, mine = random.Random(job), broker(name, budget)
            lease = Lease(mine, job, torch.device("cpu"), weight=1.0, own_generators=False, when_full="raise")
            lease.settle(50)
            holds(job, 50)
            for _ in range(60):
                most = lot.choice((250, 330, 700))  # often all fit beside each other, and sometimes two do not
                needs = [lot.randint(50, most) for _ in range(lot.randint(1, 8))]
                assert lease.begin(Route(Claim.of(needs), {}), 50)
                holds(job, needs[0])
                for stretch, need in enumerate(needs[1:], start=1):
                    holds(job, min(need, held[job]))
                    lease.arrive(stretch)
                    holds(job, need)
                    time.sleep(lot.choice((0, 0, 0.001)))
                holds(job, 50)
                lease.end()
            holds(job, 0)
            lease.close()
        except BaseException as error:
            errors.append(error)
            raise

    keeper = broker(name, budget)
    keeper.join("keeper", 1.0)
    threads = [threading.Thread(target=train, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    keeper.leave("keeper")
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    assert 330 < highest[0] <= budget
