"""The simulator of DTR against cases worked out by hand, and the recorder that feeds it."""

from __future__ import annotations

import torch

from lightning_mimose.bench.dtr import Simulated, simulate
from lightning_mimose.bench.trace import Operation, Release, Trace, record


def chain(costs: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> Trace:
    """a -> b -> c forward; then backward asks for c, b and a, each once, and makes one gradient."""
    events: list[Operation | Release] = [
        Operation((), (0,), (), costs[0]),
        Operation((0,), (1,), (), costs[1]),
        Operation((1,), (2,), (), costs[2]),
        Operation((2,), (3,), (), 1.0),
        Release(2),
        Operation((1, 3), (4,), (), 1.0),
        Release(3),
        Release(1),
        Operation((0, 4), (5,), (), 1.0),
        Release(4),
        Release(0),
    ]
    return Trace(events, dict.fromkeys(range(6), 10))


def test_with_room_for_everything_nothing_is_evicted() -> None:
    assert simulate(chain(), 40) == Simulated(True, 40, 0.0, 0)


def test_what_is_stale_and_cheap_goes_first_and_is_made_again_when_asked_for() -> None:
    """With room for three, making the fourth evicts a: as dear as b, and used less recently. It comes back once."""
    assert simulate(chain(), 30) == Simulated(True, 30, 1.0, 1)


def test_cost_counts_against_staleness() -> None:
    """a is dear now, and about as stale as b after a long operation: b goes. Later there is no room for a either."""
    trace = chain(costs=(100.0, 1.0, 1.0))
    trace.events.insert(3, Operation((), (6,), (), 50.0))
    trace.sizes_bytes[6] = 0
    found = simulate(trace, 30)
    assert (found.fits, found.added_seconds, found.evictions) == (True, 1.0 + 100.0, 2)


def test_an_operation_that_needs_more_than_the_budget_does_not_fit() -> None:
    assert not simulate(chain(), 20).fits


def test_a_chain_that_was_evicted_is_made_again_from_its_start() -> None:
    """b was made from a, both are gone: asking for b costs both, and what gave way for it is made again in the end."""
    events: list[Operation | Release] = [
        Operation((), (0,), (), 1.0),
        Operation((0,), (1,), (), 2.0),
        Release(0),
        Operation((), (2,), (), 50.0),
        Operation((2,), (3,), (), 50.0),
        Release(2),
        Operation((1,), (4,), (), 1.0),
        Release(1),
    ]
    found = simulate(Trace(events, dict.fromkeys(range(5), 10)), 30)
    assert (found.fits, found.added_seconds) == (True, 0.0)
    found = simulate(Trace(events, {0: 10, 1: 10, 2: 10, 3: 15, 4: 0}), 25)
    assert (found.fits, found.added_seconds, found.evictions) == (True, 1.0 + 2.0 + 50.0 + 50.0, 2)


def test_a_recorded_step_holds_what_it_really_held() -> None:
    """Two linear layers: outputs and gradients, each with its bytes, in the order in which they die."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    x = torch.randn(16, 8)

    def step() -> None:
        model(x).pow(2).sum().backward()

    step()
    model.zero_grad()
    trace = record(step)
    made = {storage for event in trace.events if isinstance(event, Operation) for storage in event.outputs}
    dead = {event.storage for event in trace.events if isinstance(event, Release)}
    kept = sum(trace.sizes_bytes[storage] for storage in made - dead)
    assert kept == sum(parameter.nbytes for parameter in model.parameters())  # their gradients
    assert 16 * 32 * 4 in trace.sizes_bytes.values()
    assert trace.seconds > 0
    assert simulate(trace, 10**9).evictions == 0
