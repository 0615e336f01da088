"""Processes that are forked in the midst of a training: loader workers, and whatever users start."""

from __future__ import annotations

import gc
import os
import signal
import traceback

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_mimose import Mimose, SharedBudget, SharedBudgetError, UnsupportedError
from lightning_mimose.shared.wire import Meeting
from tests.helpers.sharing import block, loss, train

CPU = torch.device("cpu")


def in_child(call):
    """Call a function in a forked child; what it raised, as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.alarm(60)
            call()
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as said:
        text = said.read()
    assert os.waitpid(child, 0)[1] == 0
    return text


def test_a_child_neither_uses_nor_ends_the_job_of_its_parent(name, tmp_path):
    shared = SharedBudget.connect(name, "1GB", device="cpu")
    with shared.job("parent", resident="1kB") as job:
        lease, _ = job.open(CPU)

        def child():
            with pytest.raises(SharedBudgetError, match="Job 'parent' is that of the process"):
                lease.room_bytes()
            with pytest.raises(SharedBudgetError, match="is that of the process"):
                lease.settle(10)
            mine = [(tmp_path / str(i)).open("w") for i in range(20)]  # they get the numbers of what was closed
            lease.end()
            lease.close()
            for link in shared._broker._links.values():
                link.close()
            for file in mine:
                file.write("still open")
                file.flush()
            assert Meeting(name).file_of("parent").exists()

        assert in_child(child) == ""
        assert Meeting(name).file_of("parent").exists()
        lease.settle(2000)
        assert lease.room_bytes() == 10**9


def test_a_child_leaves_alone_what_took_the_numbers_of_a_closed_job(name, tmp_path):
    shared = SharedBudget.connect(name, "1GB", device="cpu")
    with shared.job("parent", resident="1kB") as job:
        lease, _ = job.open(CPU)
        links = list(shared._broker._links.values())  # still there when they are closed
    lease.close()
    files = [(tmp_path / str(i)).open("w") for i in range(20)]

    def child():
        for file in files:
            file.write("still open")
            file.flush()

    assert links
    assert in_child(child) == ""
    for file in files:
        file.close()


def test_a_child_may_have_a_job_of_its_own_beside_its_parents(name):
    shared = SharedBudget.connect(name, "1GB", device="cpu")
    with shared.job("parent", resident="1MB") as job:
        lease, _ = job.open(CPU)

        def child():
            with shared.job("child", resident="1kB") as own:
                assert own.open(CPU)[0].room_bytes() == 10**9 - 10**6
                assert train(1, shared, 3).records

        assert in_child(child) == ""
        assert lease.room_bytes() == 10**9


def test_a_budget_of_threads_is_none_of_another_process(name):
    shared = SharedBudget("1GB", device="cpu")

    def child():
        with pytest.raises(UnsupportedError, match="connect"):
            shared.resolve(CPU)

    assert in_child(child) == ""
    assert shared.resolve(CPU) == 10**9


class Batches(Dataset):
    """Drawn in the loader's workers, which collect their parent's garbage there."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index % 4 == 0:  # once for each batch: it takes long in a process that has so much
            gc.collect()
        return torch.randn(32, generator=torch.Generator().manual_seed(index))


def test_loader_workers_leave_the_training_alone(name):
    def losses(budget):
        torch.manual_seed(1)
        model = torch.nn.Sequential(*(block() for _ in range(3)))
        found = []
        loader = DataLoader(Batches(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        with Mimose(model, budget=budget, loss_fn=loss) as mimose:
            for _ in range(2):  # the workers of the second epoch are forked in mid-training
                found += [mimose.step(batch).item() for batch in loader]
                if isinstance(budget, SharedBudget):
                    assert list(Meeting(name).jobs.iterdir())
        return found

    shared = SharedBudget.connect(name, "1GB", device="cpu")
    assert losses(shared) == losses("1GB")
