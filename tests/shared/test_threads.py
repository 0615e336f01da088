"""Trainings in threads of one process."""

from __future__ import annotations

import gc
import random
import threading
import time

import numpy as np
import pytest
import torch

from lightning_mimose import BudgetInfeasibleError, Mimose, MimoseError, SharedBudget, SharedBudgetError
from lightning_mimose.errors import UnitsError
from lightning_mimose.shared import baton, lease
from lightning_mimose.shared.bank import Bank
from tests.helpers.sharing import block, loss, train


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def eager(monkeypatch):
    """Jobs hand over wherever they may, so that steps of all of them are half-way at the same time."""
    monkeypatch.setattr(baton, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(lease, "SLICE_SECONDS", 0.0)


def needs(seed=1):
    """What a training takes alone: (peak, at rest)."""
    records = train(seed, "1GB").records
    return max(r.measured_peak_bytes or 0 for r in records), records[-1].resident_bytes


def together(function, *arguments):
    """Call a function in threads, one for each argument; an error in one of them is raised here."""
    results, errors = {}, []

    def run(argument):
        try:
            results[argument] = function(argument)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(argument,), daemon=True) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("share", [0.4, 1.0, 2.0])
def test_each_ends_as_it_would_alone_and_all_stay_in_the_budget(eager, share):
    peak, rest = needs()
    alone = {seed: train(seed, "1GB").digest for seed in (1, 2, 3)}
    shared = SharedBudget(int(3 * 1.1 * rest + share * (peak - rest)))
    found = together(shared.wrap(lambda seed: train(seed, shared)), 1, 2, 3)
    assert {seed: out.digest for seed, out in found.items()} == alone
    report = shared.report()
    assert report.highest_bytes <= report.budget_bytes
    assert all(
        r.measured_peak_bytes <= r.budget_bytes for o in found.values() for r in o.records if r.measured_peak_bytes
    )
    assert len(report.jobs) == 3


def test_steps_are_half_way_at_the_same_time(eager):
    peak, rest = needs()
    shared = SharedBudget(int(2.2 * rest + 1.3 * (peak - rest)))
    together(shared.wrap(lambda seed: train(seed, shared, 20)), 1, 2)
    levels = [tuple(now.values()) for _, now in shared.report().stacked()]
    assert any(len(both) == 2 and min(both) > 1.5 * rest for both in levels)
    assert shared.report().waits


def test_generators_of_python_and_numpy_are_the_jobs_own(eager):
    def draw(seed, budget):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        model = torch.nn.Sequential(*(block() for _ in range(3)))
        drawn = []
        with Mimose(model, budget=budget, loss_fn=loss) as mimose:
            for _ in range(6):
                drawn += [random.random(), np.random.rand(), torch.rand(()).item()]
                drawn.append(mimose.step(torch.randn(16, 32)).item())
        return drawn

    alone = {seed: draw(seed, "1GB") for seed in (1, 2)}
    shared = SharedBudget("1GB")
    assert together(shared.wrap(lambda seed: draw(seed, shared)), 1, 2) == alone


def test_a_job_that_fails_gives_all_back(eager):
    shared = SharedBudget("1GB")

    def objective(seed):
        def fail(step):
            if seed == 1 and step == 5:
                raise RuntimeError("pruned")

        return train(seed, shared, told=fail).digest

    with pytest.raises(RuntimeError, match="pruned"):
        together(shared.wrap(objective), 1, 2, 3)
    with shared.job() as job:
        lease, closes = job.open(torch.device("cpu"))
        assert lease.alone
        assert not closes
        assert lease.room_bytes() == 10**9


def test_one_that_is_dropped_without_being_closed_is_no_tenant_any_more():
    shared = SharedBudget("1GB")
    model = torch.nn.Sequential(block(), block())
    mimose = Mimose(model, budget=shared, loss_fn=loss)
    mimose.step(torch.randn(8, 32))
    del mimose
    assert together(lambda seed: train(seed, shared, 3).digest, 1)


def test_one_that_is_collected_while_accounts_are_changed_is_closed_after(monkeypatch):
    shared = SharedBudget("1GB", own_generators=False)
    held = [Mimose(torch.nn.Sequential(block(), block()), budget=shared, loss_fn=loss)]
    held[0].step(torch.randn(8, 32))
    other, _ = shared.open(torch.device("cpu"), "other")
    settle = Bank.settle

    def collects(bank, *args, **kwargs):
        before = list(bank.accounts)
        held.clear()
        gc.collect()
        assert list(bank.accounts) == before  # it holds the lock, and this thread would be let through
        return settle(bank, *args, **kwargs)

    monkeypatch.setattr(Bank, "settle", collects)
    other.settle(1000)
    monkeypatch.undo()
    until = time.monotonic() + 10
    while not other.alone:
        assert time.monotonic() < until
        time.sleep(0.01)
    other.close()


def test_a_thread_may_go_on_at_once_after_it_has_dropped_a_training():
    shared = SharedBudget("1GB")
    for _ in range(5):
        mimose = Mimose(torch.nn.Sequential(block(), block()), budget=shared, loss_fn=loss)
        mimose.step(torch.randn(8, 32))
        del mimose
        gc.collect()


def test_a_newcomer_shrinks_what_the_others_plan_with_and_gives_it_back():
    shared = SharedBudget("100MB", own_generators=False)
    with Mimose(torch.nn.Sequential(block(), block()), budget=shared, loss_fn=loss) as mimose:
        mimose.step(torch.randn(8, 32))
        assert mimose.records[-1].budget_bytes == 100_000_000
        inside, seen_by_owner, done = threading.Event(), threading.Event(), threading.Event()

        def visit():
            # Not `job()`: it would wait for the end of this step, which waits for it.
            lease, _ = shared.open(torch.device("cpu"))
            lease.settle(30_000_000)
            inside.set()
            seen_by_owner.wait(60)
            lease.close()
            done.set()

        thread = threading.Thread(target=visit, daemon=True)
        thread.start()
        seen = set()
        while not done.is_set():
            mimose.step(torch.randn(8, 32))
            seen.add(mimose.records[-1].budget_bytes)
            if inside.is_set() and 70_000_000 in seen:
                seen_by_owner.set()
        thread.join()
        assert 70_000_000 in seen
        assert seen <= {100_000_000, 70_000_000}
        mimose.step(torch.randn(8, 32))
        assert mimose.records[-1].budget_bytes == 100_000_000


def test_a_model_that_exceeds_the_budget_alone_is_refused_with_the_numbers():
    shared = SharedBudget(50_000)
    with pytest.raises(BudgetInfeasibleError, match="does not fit even alone") as raised:
        train(1, shared)
    assert raised.value.budget_bytes == 50_000
    assert raised.value.resident_bytes > 50_000


def test_a_job_that_does_not_fit_beside_others_is_refused_or_waits():
    for when_full in ("raise", "wait"):
        shared = SharedBudget(100, when_full=when_full, own_generators=False)
        first, _ = shared.open(torch.device("cpu"), "first")
        first.settle(70)
        second, _ = shared.open(torch.device("cpu"), "second")
        if when_full == "raise":
            with pytest.raises(BudgetInfeasibleError, match=r"'first' 70 B.*when_full"):
                second.settle(40)
        else:
            thread = threading.Thread(target=second.settle, args=(40,), daemon=True)
            thread.start()
            thread.join(timeout=0.1)
            assert thread.is_alive()
            first.close()
            thread.join(timeout=10)
            assert not thread.is_alive()
        first.close()
        second.close()


def test_an_infeasible_batch_says_what_others_hold():
    peak, rest = needs()
    shared = SharedBudget(int(rest * 1.05 + 0.5 * (peak - rest)), own_generators=False)
    other, _ = shared.open(torch.device("cpu"))
    other.settle(int(0.45 * (peak - rest)))
    with pytest.raises(BudgetInfeasibleError, match="that 2 jobs share, the others hold"):
        train(1, shared)
    other.close()


def test_what_contradicts_itself_is_refused():
    shared = SharedBudget("1GB")
    shared.resolve(torch.device("cpu"))
    with pytest.raises(SharedBudgetError, match="in use on cpu, and a training on meta"):
        shared.resolve(torch.device("meta"))
    with pytest.raises(SharedBudgetError, match="positive number"):
        shared.job(weight=-1.0)
    with pytest.raises(MimoseError, match="'raise' or 'wait'"):
        SharedBudget("1GB", when_full="later")
    with shared.job(), pytest.raises(SharedBudgetError, match="inside a job"), shared.job():
        pass


def test_a_name_that_is_there_is_refused():
    shared = SharedBudget("1GB", own_generators=False)
    lease, _ = shared.open(torch.device("cpu"), "a")
    with pytest.raises(SharedBudgetError, match="'a'"):
        shared.open(torch.device("cpu"), "a")
    lease.close()
    shared.open(torch.device("cpu"), "a")[0].close()


def test_the_report_counts_waits_and_draws(eager, tmp_path):
    peak, rest = needs()
    shared = SharedBudget(int(2.2 * rest + 1.1 * (peak - rest)))
    together(shared.wrap(lambda seed: train(seed, shared, 20)), 1, 2)
    report = shared.report()
    text = str(report)
    assert "most granted at once" in text
    assert sum(facts.waits for facts in report.jobs) == len(report.waits) > 0
    assert report.plot(tmp_path)[0].stat().st_size > 1000
    assert report.to_json(tmp_path / "r.json").exists()


def test_a_report_before_any_job_says_so(tmp_path):
    report = SharedBudget("1GB").report()
    assert "No job has joined yet" in str(report)
    assert report.plot(tmp_path)


def test_two_trainings_that_are_open_in_one_thread_are_refused_instead_of_waiting_for_each_other():
    shared = SharedBudget("100MB")
    first = Mimose(torch.nn.Sequential(block(), block()), budget=shared, loss_fn=loss)
    with pytest.raises(SharedBudgetError, match="has not ended"):
        Mimose(torch.nn.Sequential(block(), block()), budget=shared, loss_fn=loss)
    first.step(torch.randn(8, 32))
    first.close()
    with Mimose(torch.nn.Sequential(block(), block()), budget=shared, loss_fn=loss) as second:
        second.step(torch.randn(8, 32))


def test_all_models_of_a_job_count_and_each_plans_with_what_the_others_leave():
    shared = SharedBudget("100MB")
    models = [torch.nn.Sequential(*(block() for _ in range(depth))) for depth in (2, 6)]
    with shared.job("both") as job:
        lease, _ = job.open(torch.device("cpu"))
        trainings = [
            Mimose(model, budget=shared, loss_fn=loss, optimizer=torch.optim.Adam(model.parameters()))
            for model in models
        ]
        small, large = (
            4 * sum(p.nbytes for p in model.parameters()) for model in models
        )  # with gradients, two moments
        assert lease.rest_bytes == pytest.approx(small + large, rel=0.01)
        for _ in range(12):
            for mimose in trainings:
                mimose.step(torch.randn(8, 32))
        assert trainings[0].records[-1].budget_bytes == pytest.approx(10**8 - large, abs=10_000)
        assert trainings[1].records[-1].budget_bytes == pytest.approx(10**8 - small, abs=10_000)
        _, held = shared.report().stacked()[-1]
        assert held["both"] >= small + large
        trainings[1].close()
        trainings[0].step(torch.randn(8, 32))
        assert trainings[0].records[-1].budget_bytes == 10**8
        trainings[0].close()


def test_models_of_a_job_that_do_not_fit_together_are_refused():
    shared = SharedBudget(400_000)
    with shared.job():
        models = [
            torch.nn.Sequential(*(block() for _ in range(4))) for _ in range(3)
        ]  # 134 kB each, with gradients twice
        with Mimose(models[0], budget=shared, loss_fn=loss), pytest.raises(BudgetInfeasibleError):
            Mimose(models[1], budget=shared, loss_fn=loss)
        with Mimose(models[2], budget=shared, loss_fn=loss) as mimose:
            mimose.step(torch.randn(8, 32))


def test_a_training_that_is_refused_as_it_begins_holds_nothing_and_its_error_may_be_kept():
    shared = SharedBudget("100MB")
    with pytest.raises(UnitsError) as kept:
        Mimose(torch.nn.Sequential(block(), block()), budget=shared, loss_fn=loss, units=["nothing like it"])
    model = torch.nn.Sequential(block(), block())
    size = sum(p.nbytes for p in model.parameters())
    tight = SharedBudget(int(2.5 * size))  # parameters and gradients, and not the update's temporaries
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    with pytest.raises(BudgetInfeasibleError) as kept_too:
        Mimose(model, budget=tight, loss_fn=loss, optimizer=optimizer)
    for budget in (shared, tight):
        joined = threading.Event()

        def visit(budget=budget, joined=joined):
            with budget.job(resident="1kB"):
                joined.set()

        thread = threading.Thread(target=visit, daemon=True)
        thread.start()
        assert joined.wait(60)
        thread.join()
    assert kept.value is not kept_too.value


def wide():
    return torch.nn.Sequential(torch.nn.Linear(32, 4000), torch.nn.Linear(4000, 32))


def test_a_job_that_was_refused_may_try_a_smaller_model():
    shared = SharedBudget(400_000)
    with shared.job():
        with pytest.raises(BudgetInfeasibleError):
            Mimose(torch.nn.Sequential(wide(), wide()), budget=shared, loss_fn=loss)
        with Mimose(torch.nn.Sequential(block(), block()), budget=shared, loss_fn=loss) as mimose:
            mimose.step(torch.randn(8, 32))


def test_a_step_that_runs_again_gives_nothing_back_while_its_error_holds_memory():
    """Another job that waits gets what the first attempt held only after its error is gone."""
    shared = SharedBudget("100MB", own_generators=False)
    model = torch.nn.Sequential(block(), block(), block())
    held = []

    with Mimose(model, budget=shared, loss_fn=lambda m, x: fails_once(m, x)) as mimose:

        def fails_once(module, batch):
            out = module(batch).pow(2).mean()
            if len(mimose.records) == 2 and not held:
                (lease,) = [mimose._engine.tenancy._lease]
                held.append(lease._stepping)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
            if len(mimose.records) == 2:
                held.append(mimose._engine.tenancy._again is None)
            return out

        for _ in range(3):
            mimose.step(torch.randn(8, 32))
        assert mimose.records[-1].retried
    assert held == [True, True]
