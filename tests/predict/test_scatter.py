"""What is learnt where steps of one size differ."""

from __future__ import annotations

import pytest
import torch

from lightning_mimose import Mimose
from lightning_mimose.measure.observe import observe
from lightning_mimose.predict.estimator import Estimator
from lightning_mimose.predict.scatter import REMEASURED, Scatter
from tests.helpers.models import TinyText, text_batch
from tests.helpers.recording import recorded


def test_the_largest_of_the_latest_differences_counts() -> None:
    """As a share of the peak, what is resident besides included; what the first steps had is forgotten in time."""
    observation = observe(recorded(TinyText(), text_batch(2, 8)), 0)
    structure, values = observation.structure, observation.values
    peak = int(structure.summary(values[None])[0, 0])
    scatter = Scatter()
    scatter.add(structure, values, values, peak)
    assert scatter.error_on(structure.path) == 0
    scatter.add(structure, 1.2 * values, values, peak)
    assert scatter.error_on(structure.path) >= 0.09
    for _ in range(REMEASURED):
        scatter.add(structure, 1.01 * values, values, peak)
    assert 0.004 <= scatter.error_on(structure.path) < 0.09


@pytest.mark.parametrize(("share", "trusted"), [(0.0, True), (0.01, True), (0.5, False)])
def test_sizes_are_predicted_with_the_error_of_those_that_were_measured_again(share: float, trusted: bool) -> None:
    """Measured ones and fitted ones; beyond what is usable none is trusted."""
    observation = observe(recorded(TinyText(), text_batch(2, 8)), 0)
    estimator = Estimator()
    for tokens in (8, 10, 13, 17, 24):
        estimator.add({"batch": 2, "ids:1": tokens}, observation.structure, tokens * observation.values)
    estimator.add({"batch": 2, "ids:1": 10}, observation.structure, 10 * (1 + share) * observation.values)
    for tokens in (10, 20):
        predicted = estimator.predict({"batch": 2, "ids:1": tokens})
        assert predicted is not None
        assert predicted.trusted == trusted or tokens == 20  # of a fit the residuals count, too
        assert predicted.error >= 0.3 * share


def test_steps_that_do_the_same_differ_by_nothing() -> None:
    """Not even the first one, beside which there were no older gradients, and no state of the optimizer."""
    torch.manual_seed(0)
    model = TinyText(3)
    optimizer = torch.optim.AdamW(model.parameters())
    with Mimose(model, budget="1GB", optimizer=optimizer, loss_fn=lambda model, batch: model(**batch).loss) as mimose:
        for _ in range(4):
            mimose._engine.advisor.estimator.distrust()  # so that the next step is sheltered
            mimose.step(text_batch(2, 8))
        assert [record.sheltered for record in mimose.records] == [True] * 4
        observed = mimose._engine.advisor.estimator.observed
        assert [observed.scatter.error_on(structure.path) for structure in observed.sizes] == [0]
