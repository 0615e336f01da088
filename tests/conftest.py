"""What holds for every test: a fixed seed, one thread, and nothing left behind for the next one."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest

# Threads that spin while somebody else has the core: on two busy ones a convolution is ten times slower for it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported: see bench/meter.py

import lightning.pytorch as pl
import torch
from hypothesis import HealthCheck, settings

from tests.helpers.conformance import Conformance

# The same examples every time, so that a change is judged by itself; `--hypothesis-profile=nightly` looks for new ones.
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True, suppress_health_check=SLOW)
settings.register_profile("nightly", max_examples=500, deadline=None, suppress_health_check=SLOW, print_blob=True)
settings.load_profile("ci")

# What Lightning and torch set on purpose and leave: a seed, the launcher's variables. Each is taken away again below.
ALLOWED_VARIABLES = frozenset(
    {"PL_GLOBAL_SEED", "PL_SEED_WORKERS", "CUBLAS_WORKSPACE_CONFIG", "PYTEST_CURRENT_TEST", "KINETO_LOG_LEVEL"}
    | {"LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "OMP_NUM_THREADS"}
    | {
        "CUDA_DEVICE_ORDER",
        "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
    }
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the switch that writes the table of conformance."""
    parser.addoption("--conformance", action="store_true", help="write docs/conformance.md from the tests that pass")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leaves what was imported and collected to the end: to look through it for garbage took a sixth of all time."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Collects the table's rows."""
    config.pluginmanager.register(Conformance(config))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread, so that a laptop, CI and a big machine run the same kernels, and two tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Every test starts from the same seed, whichever ran before it, and puts the generators back."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    pl.seed_everything(1234, verbose=False)
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture(autouse=True)
def _torch_settings() -> Iterator[None]:
    """Global settings of torch end as they began."""
    dtype = torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    grad, anomaly = torch.is_grad_enabled(), torch.is_anomaly_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.set_grad_enabled(grad)
    torch.autograd.set_detect_anomaly(anomaly)


@pytest.fixture(autouse=True)
def _process_group_closed() -> Iterator[None]:
    """A test that opened a process group leaves none."""
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _no_hooks_left() -> Iterator[None]:
    """No saved-tensor hook, dispatch mode or profiler outlives a test: it would falsify every later measurement."""
    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "saved-tensor hooks left behind"
    assert torch._C._len_torch_dispatch_stack() == 0, "dispatch mode left behind"
    assert not torch.autograd._profiler_enabled(), "profiler left running"


@pytest.fixture(autouse=True)
def _no_variable_leaks() -> Iterator[None]:
    """The environment ends as it began; what leaked beyond Lightning's own variables fails the test."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    os.environ.clear()
    os.environ.update(before)
    leaked = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not leaked - ALLOWED_VARIABLES, f"environment variables changed by the test: {leaked - ALLOWED_VARIABLES}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs an accelerator where there is none, and says so."""
    if torch.accelerator.is_available():
        return
    skip = pytest.mark.skip(reason="needs an accelerator; torch.accelerator.is_available() is False here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
