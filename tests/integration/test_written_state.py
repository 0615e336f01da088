"""State that a forward writes ends as in the plain run, bit for bit, however it is written."""

from __future__ import annotations

import pytest

from tests.helpers import blocks
from tests.helpers.blocks import Base, Net, data, everything, generators, train

KINDS = {
    "BatchNorm's running statistics": blocks.BatchNormed,
    "spectral norm (parametrization)": blocks.SpectralNormed,
    "spectral norm (hook)": blocks.OldSpectralNormed,
    "vector quantisation codebooks, written through .data": blocks.Codebook,
    "moving averages that replace their buffer": blocks.Average,
    "Python counters, lists, dictionaries, attributes made on the fly": blocks.Counting,
    "state that is first written after a warm-up": blocks.WarmingUp,
    "expert loads in a buffer and in a plain tensor": blocks.Experts,
    "torchmetrics inside blocks": blocks.Metered,
    "the generator of `random`": blocks.PythonRandom,
    "NumPy's generator": blocks.NumpyRandom,
    "generators that a block owns (torch, NumPy, random)": blocks.OwnRandom,
    "dropout": blocks.Dropping,
    "buffers registered in the forward, beside sparse and expanded ones": blocks.LateBuffer,
}
AREA = "State a forward writes"


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.conformance(AREA, what, "works")) for what, kind in KINDS.items()],
    ids=lambda kind: kind.__name__,
)
def test_it_ends_as_in_the_plain_run(kind: type[Base]) -> None:
    """Losses, weights, buffers, attributes, and what every generator gives next; with every block recomputed."""
    plain, losses, _ = train(lambda: Net(kind), data())
    after = generators()
    model, ours, mimose = train(lambda: Net(kind), data(), ["blocks.0", "blocks.1", "blocks.2"])
    assert mimose is not None
    assert ours == losses
    assert everything(model) == everything(plain)
    assert generators() == after
    planned = [record for record in mimose.records if not record.sheltered]
    assert planned
    assert all(len(record.actions) == 3 for record in planned)
