"""What tests on an accelerator share."""

from __future__ import annotations

import os

import pytest
import torch

# Read by torch with the first product of matrices.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def device() -> torch.device:
    """The accelerator, with nothing of other tests in its allocator's cache."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    torch.accelerator.empty_cache()
    return torch.device(found.type, torch.accelerator.current_device_index())
