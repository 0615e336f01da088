"""What a job keeps from step to step while nobody waits, and gives back when somebody does; when it notices stops."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from lightning_mimose import Mimose, SharedBudget
from lightning_mimose.shared import counter as counter_module
from lightning_mimose.shared import lease as lease_module
from lightning_mimose.shared import link
from lightning_mimose.shared.baton import BATON
from lightning_mimose.shared.broker import LocalBroker
from lightning_mimose.shared.claim import Claim
from lightning_mimose.shared.connection import Connection
from lightning_mimose.shared.counter import Counter
from lightning_mimose.shared.lease import Lease
from lightning_mimose.shared.stops import Route, Stops
from tests.helpers.processes import broker, kill_coordinator, settled, soon
from tests.helpers.sharing import block, loss


@pytest.fixture(autouse=True)
def calm(monkeypatch):
    """Nobody need have been calm for long."""
    monkeypatch.setattr(link, "CALM_SECONDS", 0.0)


@pytest.fixture
def said(monkeypatch):
    """What all jobs of this process have said."""
    said = []
    say = Connection.say
    monkeypatch.setattr(
        Connection, "say", lambda self, message: (said.append((self.job, message["op"])), say(self, message))
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
    return reach(broker, job, claim) or broker.wait(job)


def reach(broker, job, claim):
    """How far a step may run at once."""
    claim = Claim.of(claim)
    return len(claim) if broker.resume(job, claim, 100) else broker.begin(job, claim, 100).reach


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
    assert reach(one, "a", [800]) == 0
    two.end("b")
    assert one.wait("a") == 1


def test_a_step_on_a_larger_ones_grant_gives_back_what_it_does_not_need(two_jobs):
    one, two = two_jobs
    steps(one, "a", [800])
    assert reach(one, "a", [500, 300]) == 2
    one.place("a").at = 0
    assert begun(two, "b", [500]) == 1
    two.end("b")
    one.place("a").at = 1
    assert reach(two, "b", [600]) == 0  # it may still hold 500, as far as was said
    one.advance("a", 1)
    assert two.wait("b") == 1


@pytest.mark.parametrize("where", ["threads", "processes"])
def test_every_step_begins_at_its_first_stretch(name, where):
    both = [LocalBroker(1000)] * 2 if where == "threads" else [broker(name), broker(name)]
    settled(both[0], a=100)
    place = both[0].place("a")
    if where == "processes":
        soon(lambda: both[0].alone("a"))

    def at(claim):
        place.at = 3
        assert begun(both[0], "a", claim)
        found, place.at = place.at, 2
        both[0].end("a")
        return found

    assert at([200, 100, 50, 20]) == 0  # alone
    settled(both[1], b=100)
    soon(lambda: not both[0].alone("a"))
    assert at([300, 100, 50, 20]) == 0  # asked for
    assert at([200, 100, 50, 20]) == 0  # on what is kept
    both[0].leave("a")
    both[1].leave("b")


def test_whoever_takes_over_counts_the_step_and_not_what_was_kept(two_jobs, name):
    one, two = two_jobs
    steps(one, "a", [800])
    killed = [kill_coordinator(name)]
    assert reach(two, "b", [850]) == 1
    two.end("b")
    steps(one, "a", [800])
    assert reach(one, "a", [500]) == 1
    killed.append(kill_coordinator(name, killed))
    assert reach(two, "b", [600]) == 0
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
    monkeypatch.setattr(counter_module, "time", SimpleNamespace(time=lambda: now[0]))
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


@pytest.mark.parametrize("where", ["threads", "processes"])
def test_jobs_that_keep_what_they_have_never_exceed_the_budget(name, where, monkeypatch):
    """Random steps of several jobs, each of which says truly what it holds, and stops only where it has to."""
    monkeypatch.setattr(lease_module, "WATCHED_STEPS", 3)
    budget, jobs, held, highest, errors = 1000, "abc", {}, [0], []
    watched = {True: 0, False: 0}
    lock, local = threading.Lock(), LocalBroker(budget)

    def holds(job, size):
        with lock:
            held[job] = size
            highest[0] = max(highest[0], sum(held.values()))

    def train(job):
        try:
            lot, mine = random.Random(job), local if where == "threads" else broker(name, budget)
            lease = Lease(mine, job, torch.device("cpu"), weight=1.0, own_generators=False, when_full="raise")
            lease.settle(50)
            holds(job, 50)
            for step in range(120):
                often = (250, 330, 700) if step < 60 else (250, 330)  # all fit beside each other, and sometimes not two
                most = lot.choice(often)
                needs = [lot.randint(50, most) for _ in range(lot.randint(1, 8))]
                assert lease.begin(Route(Claim.of(needs), {}), 50)
                watches = lease.watches
                with lock:
                    watched[watches] += 1
                holds(job, needs[0])
                for stretch, need in enumerate(needs[1:], start=1):
                    holds(job, min(need, held[job]))
                    if watches:
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

    if where == "processes":
        keeper = broker(name, budget)
        keeper.join("keeper", 1.0)
    threads = [threading.Thread(target=train, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    if where == "processes":
        keeper.leave("keeper")
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    assert 330 < highest[0] <= budget
    assert all(watched.values())


def test_threads_keep_what_nobody_waits_for_and_give_back_what_they_do_not_need():
    both = LocalBroker(1000)
    settled(both, a=100, b=100)
    steps(both, "a", [800])
    assert not both.resume("a", Claim.of([801]), 100)
    assert not both.resume("a", Claim.of([800]), 101)
    assert both.resume("a", Claim.of([800]), 100)
    both.end("a")
    assert both.resume("a", Claim.of([500, 300]), 100)
    assert not both.resume("b", Claim.of([100]), 100)
    assert begun(both, "b", [500]) == 1  # of the 800 it needs 500
    both.end("b")
    assert both.begin("b", Claim.of([600]), 100).reach == 0
    assert both.place("a").wanted
    both.advance("a", 1)
    assert both.wait("b") == 1
    both.end("a")
    both.end("b")


def test_time_that_a_thread_had_at_nobodys_cost_is_not_charged(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(counter_module, "time", SimpleNamespace(time=lambda: now[0]))
    both = LocalBroker(100)
    settled(both, a=10, b=10, c=10)
    steps(both, "a")
    for _ in range(10):  # nobody waits
        assert both.resume("a", Claim.of([60]), 10) or both.begin("a", Claim.of([60]), 10).reach
        now[0] += 10
        both.end("a")
    assert both.begin("c", Claim.of([80]), 10).reach
    now[0] += 1
    for job in "ab":  # a is the first in the row, and not behind b for what it had
        assert both.begin(job, Claim.of([80]), 10).reach == 0
    for job in "ab":
        now[0] += 1
        both.end("c" if job == "a" else "a")
        answered, _ = both._counter.answers.copy().popitem()
        assert answered == job
        assert both.wait(job) == 1


def lease_of(broker, job, *, own_generators=False):
    lease = Lease(broker, job, torch.device("cpu"), weight=1.0, own_generators=own_generators, when_full="raise")
    lease.settle(100)
    return lease


@pytest.fixture
def now(monkeypatch):
    """The time by which steps are measured."""
    now = [0.0]
    monkeypatch.setattr(lease_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def two_leases(now):
    """Two jobs of a process, on a clock of their own."""
    both = LocalBroker(1000)
    leases = [lease_of(both, job) for job in "ab"]
    return now, both, leases[0]


def watched(lease, steps, now, seconds=0.01, meanwhile=lambda: None):
    """Which of some steps notice their stops."""
    found = []
    for _ in range(steps):
        assert lease.begin(Route(Claim.of([300, 600, 300]), {}), 100)
        found.append(lease.watches)
        now[0] += seconds
        meanwhile()
        lease.end()
    return found


def evaluated(lease, batches, now, seconds=0.01):
    for _ in range(batches):
        assert lease.begin(Route.whole(300), 100, trains=False)
        now[0] += seconds
        lease.end()


FOR_A_WHILE = [True] * 32 + [False] * 8


def test_stops_are_noticed_at_first_and_for_a_while_after_somebody_waited(two_leases):
    now, both, lease = two_leases
    assert watched(lease, 40, now) == FOR_A_WHILE
    # Another job waits for the end of such a step, and does so but once.
    watched(lease, 1, now, meanwhile=lambda: both.begin("b", Claim.of([500]), 100))
    assert both.wait("b") == 1
    both.end("b")
    assert watched(lease, 40, now) == FOR_A_WHILE


def test_stops_are_noticed_for_a_while_after_a_step_that_had_to_wait(two_leases):
    now, both, lease = two_leases
    watched(lease, 40, now)
    assert both.begin("b", Claim.of([800]), 100).reach

    def leave():
        soon(lambda: both.place("b").wanted)
        both.end("b")

    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    assert watched(lease, 1, now) == [True]
    thread.join()
    assert watched(lease, 40, now) == FOR_A_WHILE


def test_a_step_that_was_granted_in_part_notices_its_stops(two_leases):
    now, both, lease = two_leases
    watched(lease, 40, now)
    assert both.begin("b", Claim.of([500]), 100).reach
    assert watched(lease, 1, now) == [True]
    both.end("b")
    assert watched(lease, 40, now) == FOR_A_WHILE


@pytest.mark.parametrize("where", ["threads", "processes"])
def test_a_wait_that_began_and_ended_in_the_midst_of_a_step_counts(now, name, where):
    each = [LocalBroker(1000)] * 3 if where == "threads" else [broker(name) for _ in range(3)]
    leases = [lease_of(*pair) for pair in zip(each, "abc", strict=True)]
    soon(lambda: not each[0].alone("a"))
    watched(leases[0], 40, now)
    soon(lambda: not each[0].place("a").waited)

    def others():
        assert each[1].begin("b", Claim.of([300]), 100).reach
        assert each[2].begin("c", Claim.of([150]), 100).reach == 0
        soon(lambda: each[0].place("a").wanted)
        each[1].end("b")
        assert each[2].wait("c") == 1
        soon(lambda: not each[0].place("a").wanted)

    assert watched(leases[0], 1, now, meanwhile=others) == [False]
    each[2].end("c")
    assert watched(leases[0], 40, now) == FOR_A_WHILE
    for lease in leases:
        lease.close()


def test_steps_that_find_somebody_waiting_notice_their_stops(two_leases):
    now, both, lease = two_leases
    watched(lease, 40, now)
    third = lease_of(both, "c")
    assert both.begin("b", Claim.of([700]), 100).reach
    assert both.begin("c", Claim.of([800]), 100).reach == 0
    assert lease.watches
    both.end("b")
    both.wait("c")
    third.close()


def test_stops_are_noticed_for_a_while_after_a_long_step(two_leases):
    now, _, lease = two_leases
    watched(lease, 40, now)
    assert watched(lease, 1, now, seconds=0.3) == [False]
    assert watched(lease, 40, now) == FOR_A_WHILE


def test_long_steps_always_notice_their_stops_whatever_runs_between_them(two_leases):
    now, _, lease = two_leases
    for _ in range(20):
        assert watched(lease, 1, now, seconds=5.0) == [True]
        assert watched(lease, 2, now, seconds=0.05) == [True, True]
        evaluated(lease, 40, now)


def test_evaluation_is_no_step_after_a_wait_and_none_that_takes_long(two_leases):
    now, both, lease = two_leases
    watched(lease, 40, now)
    evaluated(lease, 3, now, seconds=5.0)
    assert watched(lease, 1, now) == [False]
    watched(lease, 1, now, meanwhile=lambda: both.begin("b", Claim.of([500]), 100))
    both.wait("b")
    both.end("b")
    evaluated(lease, 40, now)
    assert watched(lease, 40, now) == FOR_A_WHILE


def test_whoever_waits_for_its_turn_counts_as_well(now):
    both = LocalBroker(1000)
    ended, lease = threading.Event(), lease_of(both, "a", own_generators=True)
    watched(lease, 40, now)

    def other():
        second = lease_of(both, "b", own_generators=True)
        second.close()
        ended.set()

    thread = threading.Thread(target=other, daemon=True)

    def comes():
        thread.start()
        soon(lambda: BATON.queue)

    assert watched(lease, 1, now, meanwhile=comes) == [False]
    BATON.give(lease._runner)
    assert ended.wait(20)
    BATON.take(lease._runner)
    assert watched(lease, 40, now) == FOR_A_WHILE
    lease.close()


@pytest.mark.parametrize("where", ["threads", "processes"])
def test_a_signals_handler_may_ask_and_close_in_the_midst_of_anything(name, where):
    each = LocalBroker(1000) if where == "threads" else broker(name)
    lease = lease_of(each, "a")
    locks = [lease._closing, each._changed if where == "threads" else each._links["a"]._changed]

    def handler():  # as one that interrupts this thread while it holds a lock
        for lock in locks:
            with lock:
                assert lease.begin(Route.whole(200), 100)
                lease.update()
                lease.end()
                assert each.history()
        for lock in locks:
            with lock:
                lease.close()

    thread = threading.Thread(target=handler, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert lease._closed


def test_threads_on_an_accelerator_always_notice_their_stops(now):
    lease = Lease(LocalBroker(1000), "a", torch.device("meta"), weight=1.0, own_generators=True, when_full="raise")
    lease.settle(100)
    assert watched(lease, 40, now) == [True] * 40
    lease.close()


def test_a_stop_leaves_the_gradients_as_they_are():
    arrived = []
    unit, batch = torch.nn.Linear(3, 3), torch.ones(2, 3)
    stops = Stops(Route(Claim.of([1, 1, 1, 1]), {"unit": (1, 2)}), lambda stretch: arrived.append(stretch) or (None,))
    stops.call("unit", lambda args, kwargs: unit(*args), (batch,), {}).sum().backward()
    assert arrived == [1, 2]
    assert torch.equal(unit.bias.grad, torch.full((3,), 2.0))


def test_units_are_only_stopped_at_where_stops_are_noticed(monkeypatch):
    monkeypatch.setattr(lease_module, "LONG_SECONDS", float("inf"))
    shared = SharedBudget("100MB", own_generators=False, device="cpu")
    other, _ = shared.open(torch.device("cpu"), "other")
    other.settle(1000)
    model = torch.nn.Sequential(block(), block(), block())
    seen = []

    def noted(model, batch):
        found = loss(model, batch)
        seen.append(mimose._engine.session.stops is not None)
        return found

    with Mimose(model, budget=shared, loss_fn=noted) as mimose:
        for _ in range(50):
            mimose.step(torch.randn(8, 32))
    other.close()
    assert any(seen[:32])
    assert not any(seen[32:])
