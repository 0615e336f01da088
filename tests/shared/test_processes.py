"""Trainings in several processes, and the coordinator between them."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import threading
import time

import pytest
import torch

from lightning_mimose import SharedBudget, SharedBudgetError
from lightning_mimose.shared import reach, wire
from lightning_mimose.shared.claim import Claim
from lightning_mimose.shared.connection import Connection
from lightning_mimose.shared.link import Link
from lightning_mimose.shared.remote import RemoteBroker
from lightning_mimose.shared.wire import Meeting
from tests.helpers import sharing
from tests.helpers.processes import broker, kill_coordinator, settled, soon

CPU = torch.device("cpu")


@pytest.mark.distributed
@pytest.mark.slow
def test_processes_end_as_they_would_alone_and_a_killed_one_gives_back_at_once(name):
    alone = {seed: sharing.train(seed, "1GB", 30).digest for seed in (1, 2)}
    records = sharing.train(1, "1GB").records
    peak, rest = max(r.measured_peak_bytes or 0 for r in records), records[-1].resident_bytes
    budget = int(3.5 * rest + 1.3 * (peak - rest))
    keeper = broker(name, budget)
    settled(keeper, keeper=1)
    trainings = [sharing.start(name, budget, seed, 30) for seed in (1, 2)]
    victim = sharing.start(name, budget, 3, 10_000)
    for process in (*trainings, victim):
        sharing.go(process)
    while sharing.said(victim) != "step 5":
        pass
    victim.kill()
    victim.communicate()
    assert [sharing.digest(process) for process in trainings] == [alone[1], alone[2]]
    soon(lambda: keeper.others("keeper") == {})
    shared = SharedBudget.connect(name, device="cpu")
    lease, _ = shared.open(CPU)
    lease.close()
    report = shared.report()
    assert report.highest_bytes <= budget
    held = report.stacked()[-1][1]
    assert len(held) >= 4
    assert [job for job, size in held.items() if size] == ["keeper"]
    keeper.leave("keeper")


def test_a_folder_and_a_socket_that_only_their_owner_can_read(name):
    one = broker(name)
    settled(one, a=10)
    meeting = Meeting(name)
    assert stat.S_IMODE(meeting.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(meeting.socket.stat().st_mode) == 0o600
    one.leave("a")


def test_several_brokers_see_each_other(name):
    one, two = broker(name), broker(name, None)
    assert two.budget_bytes == 1000
    settled(one, a=100)
    soon(lambda: one.alone("a"))
    settled(two, b=200)
    soon(lambda: not one.alone("a"))
    assert (one.room_bytes("a"), two.room_bytes("b")) == (800, 900)
    assert one.others("a") == {"b": 200}
    assert one.begin("a", Claim.of([300, 800]), 100).reach == 2
    assert two.begin("b", Claim.of([200, 900, 300]), 200).reach == 1
    assert two.ask("b").reach == 0
    one.end("a")
    assert two.wait("b") == 3
    two.leave("b")
    soon(lambda: one.alone("a"))
    assert one.room_bytes("a") == 1000
    one.leave("a")


def test_one_that_is_alone_gives_back_at_the_end_of_its_step_what_it_need_not_ask_for(name):
    one, two = broker(name), broker(name)
    settled(one, a=100)
    soon(lambda: one.alone("a"))
    assert one.begin("a", Claim.of([1000]), 150).reach == 1
    two.join("b", 1.0)
    assert two.settle("b", 200).reach == 0
    one.end("a")
    assert two.wait("b") == 1
    assert two.room_bytes("b") == 850  # it holds more between steps than it said at first
    one.leave("a")
    two.leave("b")


def test_another_coordinator_takes_over_and_knows_what_is_held(name):
    one, two = broker(name), broker(name)
    settled(one, a=100)
    settled(two, b=100)
    assert one.begin("a", Claim.of([500, 700]), 100).reach == 2
    assert two.begin("b", Claim.of([600]), 100).reach == 0
    killed = []
    for _ in range(3):
        killed.append(kill_coordinator(name, killed))
        assert two.room_bytes("b") == 900
        assert two.begin("b", Claim.of([600]), 100).reach == 0  # what a holds is not free because nobody counts it
    one.end("a")
    assert two.wait("b") == 1
    one.leave("a")
    two.leave("b")


def test_one_that_waits_is_served_by_the_coordinator_that_takes_over(name):
    one, two = broker(name), broker(name)
    settled(one, a=100)
    settled(two, b=100)
    one.begin("a", Claim.of([700]), 100)
    assert two.begin("b", Claim.of([600]), 100).reach == 0
    granted = []
    thread = threading.Thread(target=lambda: granted.append(two.wait("b")), daemon=True)
    thread.start()
    kill_coordinator(name)
    time.sleep(0.3)
    assert not granted
    one.end("a")
    thread.join(timeout=10)
    assert granted == [1]
    one.leave("a")
    two.leave("b")


@pytest.fixture
def survivors_locked_out(name):
    """A coordinator that was killed, and a job that it served which has not spoken to the next one yet."""
    meeting = Meeting(name)
    meeting.make()
    path = meeting.file_of("survivor")
    descriptor = wire.lock_file(path)
    yield meeting
    path.unlink(missing_ok=True)
    os.close(descriptor)


def in_thread(call):
    """Call a function in a thread; (its results or errors, the thread)."""
    found = []

    def run():
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return found, thread


def say(meeting, **message):
    """Speak as a job does; (the connection, the answer)."""
    connection = reach.connect(meeting)
    hello = {"version": wire.VERSION, "weight": 1.0, "budget": 1000, "device": "cpu", **message}
    return connection, reach.ask_once(connection, hello)


def test_a_newcomer_does_not_say_what_the_budget_is_while_survivors_come_back(name, survivors_locked_out):
    asked = [in_thread(lambda budget=budget: broker(name, budget).budget_bytes) for budget in (2000, None)]
    hello = {"op": "hello", "job": "newcomer", "budget": 2000}
    asked.append(in_thread(lambda: say(survivors_locked_out, **hello)))
    time.sleep(0.5)
    assert not any(found for found, _ in asked)
    state = {"rest": 100, "least": 0, "needs": [], "at": 0, "reach": 0}
    connection, said = say(survivors_locked_out, op="hello", job="survivor", state=state)
    assert said == {"budget": 1000}
    for _, thread in asked:
        thread.join(timeout=10)
    (refused,), (joined,), ((newcomer, error),) = (found for found, _ in asked)
    assert isinstance(refused, SharedBudgetError)
    assert "is 1.00 KB" in str(refused)
    assert joined == 1000
    assert error["error"] == "contradicts"
    connection.close()
    newcomer.close()


def test_newcomers_are_heard_when_no_survivor_is_left_to_come_back(name, survivors_locked_out):
    found, thread = in_thread(lambda: broker(name, 2000).budget_bytes)
    time.sleep(0.3)
    assert not found
    survivors_locked_out.file_of("survivor").unlink()
    thread.join(timeout=10)
    assert found == [2000]


def test_nobody_waits_for_a_newcomer_that_was_refused(name, survivors_locked_out):
    one = broker_without_asking(name, 2000)
    found, thread = in_thread(lambda: one.join("newcomer", 1.0))
    soon(lambda: survivors_locked_out.file_of("newcomer").exists())
    state = {"rest": 100, "least": 0, "needs": [], "at": 0, "reach": 0}
    connection, _ = say(survivors_locked_out, op="hello", job="survivor", state=state)
    thread.join(timeout=10)
    assert "was asked for" in str(found[0])
    with connection, connection.makefile() as lines:
        connection.sendall(wire.encode({"op": "others", "n": 1}))
        assert {"n": 1, "answer": {}} in map(json.loads, lines)


def broker_without_asking(name, budget):
    """A broker of a job whose coordinator has died since it asked what the budget is."""
    found = RemoteBroker.__new__(RemoteBroker)
    found.__dict__ |= {"_meeting": Meeting(name), "_device": "cpu", "budget_bytes": budget, "_links": {}}
    return found


def test_a_job_that_has_lost_its_coordinator_can_be_closed_before_the_others_come_back(name, monkeypatch):
    one, two = broker(name), broker(name)
    settled(one, a=100)
    settled(two, b=100)

    def fail(*_):
        raise OSError("no more processes")

    monkeypatch.setattr("lightning_mimose.shared.connection.connect", fail)
    kill_coordinator(name)
    for each, job in ((one, "a"), (two, "b")):
        with pytest.raises(SharedBudgetError, match="has lost the coordinator"):
            each.others(job)
    began = time.monotonic()
    one.leave("a")  # b's file is locked, and b will never come back
    assert time.monotonic() - began < 5
    assert not Meeting(name).file_of("a").exists()
    two.leave("b")


def test_a_stale_socket_is_no_obstacle(name):
    meeting = Meeting(name)
    meeting.make()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(meeting.socket))
    (meeting.jobs / "gone").touch()  # of a job that was killed together with its coordinator
    one = broker(name)
    settled(one, a=100)
    assert not (meeting.jobs / "gone").exists()
    one.leave("a")


def test_contradicting_budgets_devices_and_names(name):
    with pytest.raises(SharedBudgetError, match="does not exist yet"):
        broker(name, None)
    one = broker(name)
    settled(one, a=100)
    with pytest.raises(SharedBudgetError, match=r"is 1\.00 KB \(1,000 bytes\) on cpu, and one of 2\.00 KB"):
        broker(name, 2000)
    with pytest.raises(SharedBudgetError, match="on cuda:7"):
        broker(name, device="cuda:7")
    with pytest.raises(SharedBudgetError, match="has a job 'a' already"):
        broker(name).join("a", 1.0)
    assert one.room_bytes("a") == 1000  # nothing is lost
    one.leave("a")
    soon(lambda: broker(name, 2000).budget_bytes == 2000)  # nobody is bound by what earlier jobs had


def test_a_name_that_another_user_has(name, monkeypatch):
    meeting = Meeting(name)
    meeting.make()
    mine = os.getuid()
    monkeypatch.setattr(wire.os, "getuid", lambda: mine + 1)
    with pytest.raises(SharedBudgetError, match=f"is taken: .* belongs to user {mine}"):
        broker(name)
    monkeypatch.undo()
    meeting.remove()


def test_a_server_of_another_user_is_not_talked_to(name, monkeypatch):
    one = broker(name)
    settled(one, a=100)
    monkeypatch.setattr(reach, "peer_uid", lambda connection: os.getuid() + 1)
    with pytest.raises(SharedBudgetError, match="another user's"):
        broker(name)
    monkeypatch.undo()
    one.leave("a")


@pytest.mark.parametrize(
    "line",
    [
        b"no json\n",
        b"[1]\n",
        b'{"op": "fly"}\n',
        b'{"op": "hello"}\n',
        b'{"op":"hello","version":1,"job":"x","weight":-1,"budget":1000,"device":"cpu"}\n',
        b'{"op":"hello","version":1,"job":"x","weight":1,"budget":1e999,"device":"cpu"}\n',
        b'{"op":"hello","version":1,"job":"x","weight":1,"budget":1000,"device":"cpu",'
        b'"state":{"needs":[1],"rest":1,"least":1,"at":7,"reach":8}}\n',
        b"[" * 500_000 + b"]" * 500_000 + b"\n",
        b"x" * (2 << 20),
    ],
)
def test_who_talks_nonsense_is_shut_out_and_nobody_else_is(name, line):
    one = broker(name)
    settled(one, a=100)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(10)
        stranger.connect(str(Meeting(name).socket))
        try:
            stranger.sendall(line)
            answer = stranger.recv(1 << 16)
            assert json.loads(answer.splitlines()[-1])["error"] == "nonsense"
            assert stranger.recv(1 << 16) == b""
        except (ConnectionResetError, BrokenPipeError):
            pass  # it did not even wait for the end of the line
    assert one.begin("a", Claim.of([900]), 100).reach == 1
    one.end("a")
    one.leave("a")


def test_another_version_is_refused(name, monkeypatch):
    one = broker(name)
    settled(one, a=100)
    two = broker(name)
    monkeypatch.setattr("lightning_mimose.shared.connection.VERSION", 99)
    with pytest.raises(SharedBudgetError, match="another version"):
        two.join("b", 1.0)
    one.leave("a")


@pytest.mark.parametrize("bad", ["", "a/b", "../x", "x" * 65])
def test_names_are_checked(bad):
    with pytest.raises(SharedBudgetError, match="letters, digits"):
        SharedBudget.connect(bad, "1GB")


def test_a_forked_child_does_not_keep_the_lease_of_its_parent(name):
    one, two = broker(name), broker(name)
    settled(one, a=100)
    settled(two, b=100)
    child = os.fork()
    if not child:
        time.sleep(5)
        os._exit(0)
    one.leave("a")
    soon(lambda: two.others("b") == {})
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    two.leave("b")


def test_one_that_is_alone_and_settles_again_is_still_waited_for(name):
    one, two = broker(name), broker(name)
    settled(one, a=100)
    soon(lambda: one.alone("a"))
    assert one.settle("a", 300).reach == 1
    one.others("a")  # whatever was said about being alone was heard and answered before this was
    soon(lambda: one.alone("a"))
    one.others("a")
    assert one.begin("a", Claim.of([1000]), 300).reach == 1
    two.join("b", 1.0)
    assert two.settle("b", 200).reach == 0
    one.end("a")
    assert two.wait("b") == 1
    assert two.others("b") == {"a": 300}
    one.leave("a")
    two.leave("b")


def test_one_that_settles_within_a_step_of_its_own_does_not_keep_the_budget(name):
    one, two = broker(name), broker(name)
    settled(one, a=100)
    soon(lambda: one.alone("a"))
    assert one.begin("a", Claim.of([1000]), 100).reach == 1
    assert one.settle("a", 300).reach == 1
    soon(lambda: one.alone("a"))
    two.join("b", 1.0)
    assert two.settle("b", 200).reach or two.wait("b")
    assert two.others("b") == {"a": 300}
    one.leave("a")
    two.leave("b")


def test_a_report_does_not_disturb_a_job_that_waits(name):
    one, two = broker(name), broker(name)
    settled(one, a=100)
    settled(two, b=100)
    assert one.begin("a", Claim.of([800]), 100).reach
    assert two.begin("b", Claim.of([800]), 100).reach == 0
    granted = []
    thread = threading.Thread(target=lambda: granted.append(two.wait("b")), daemon=True)
    thread.start()
    assert two.history()["held"][-1][1:] == ["a", 800]
    one.end("a")
    thread.join(timeout=10)
    assert granted == [1]
    one.leave("a")
    two.leave("b")


@pytest.mark.parametrize(
    "line",
    [b"no json\n", b"[1]\n", b'{"alone": 1}\n', b'{"error": "nonsense", "text": "x"}\n', b"x" * (wire.MOST_BYTES + 1)],
)
def test_a_job_fails_where_it_cannot_understand_the_coordinator(name, monkeypatch, line):
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(Connection, "_connect", lambda self, state=None: ours)
    link = Link(Meeting(name), "a", 1.0, 1000, "cpu")
    with theirs:
        theirs.sendall(line)
        with pytest.raises(SharedBudgetError, match=r"Job 'a' has lost|does not understand this job"):
            link.request(op="others")
        assert not link.alone
        link.close()


@pytest.mark.parametrize("error", [OSError("no more processes"), subprocess.TimeoutExpired("python", 20.0)])
def test_a_job_fails_where_no_other_coordinator_can_be_started(name, monkeypatch, error):
    one, two = broker(name), broker(name)
    settled(one, a=100)
    settled(two, b=100)
    one.begin("a", Claim.of([800]), 100)
    assert two.begin("b", Claim.of([800]), 100).reach == 0

    def fail(*_):
        raise error

    monkeypatch.setattr("lightning_mimose.shared.connection.connect", fail)
    kill_coordinator(name)
    with pytest.raises(SharedBudgetError, match="Job 'b' has lost the coordinator"):
        two.wait("b")
    monkeypatch.undo()
    one.leave("a")
    two.leave("b")


@pytest.mark.parametrize("waits", [False, True])
def test_a_coordinator_that_dies_just_after_a_grant_has_granted(name, monkeypatch, waits):
    states, ends = [], []

    def connect(connection, state=None):
        states.append(state)
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        return ours

    monkeypatch.setattr(Connection, "_connect", connect)
    link = Link(Meeting(name), "a", 1.0, 1000, "cpu")
    granted = b'{"n":1,"answer":[2,900,false,false]}\n'
    ends[0].sendall(b'{"wanted":false}\n')
    threading.Timer(
        0.1,
        lambda: (
            ends[0].sendall(b'{"n":1,"answer":[0,900,false,false]}\n{"granted":2}\n' if waits else granted),
            ends[0].close(),
        ),
    ).start()
    link.request(Claim.of([500, 700]), op="begin", needs=[500, 700], rest=100)
    soon(lambda: len(states) == 2)
    assert states[1] == {"rest": 100, "least": 0, "needs": [500, 700], "at": 0, "reach": 2}
    link.close()
    ends[1].close()
