"""What holds the data of tensors that are no plain ones."""

from __future__ import annotations

import pytest
import torch

from lightning_mimose.parts import plain_parts, storages_in


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors(layout: str) -> None:
    """Values, and where they are."""
    dense = torch.eye(6)
    blocks = {"blocksize": (2, 2)} if layout.startswith("b") else {}
    parts = plain_parts(getattr(dense, f"to_sparse_{layout}", dense.to_sparse)(**blocks))
    assert sum(part.is_floating_point() for part in parts) == 1
    assert all(part.layout is torch.strided for part in parts)
    assert len(parts) == (2 if layout == "coo" else 3)


def test_jagged_tensors_share_their_offsets() -> None:
    """Two of them: two storages of values, one of offsets."""
    one = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=torch.jagged)
    both = {storage._cdata: storage.nbytes() for storage in storages_in({"x": one, "y": [one * 2]})}
    assert sorted(filter(None, both.values())) == [3 * 8, 8 * 4 * 4, 8 * 4 * 4]
