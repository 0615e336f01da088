"""Proof: before a unit is recomputed for the first time it runs twice beside the step, and both runs must agree.

A forward that takes another path when it runs again (routers with near ties, randomness that nobody stashes,
kernels that save memory nobody wrote) would end in torch's `CheckpointError` or, worse, in wrong gradients. So
number, shapes and content of everything it saves for backward are compared, the second run on memory that is
filled where it would be uninitialised. Its inputs must be left alone, and no collective may be in it. Nested
units are proven along with it. Nothing of the two runs stays: saved tensors are dropped as they come, written
state and generators are put back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from lightning_mimose.actions.stored import watched
from lightning_mimose.actions.trial import (
    CHANGES_INPUT,
    WRITES_PARAMETERS,
    Candidate,
    Trial,
    WritesInputError,
    WritesParameterError,
)

CARRIES = "it carries {} from call to call, as its attribute"
DIFFERS = "its forward saves other tensors when it runs again"


def prove(call: Candidate, watch: bool = True) -> dict[str, str]:
    """Run a unit's forward twice, and compare.

    Args:
        call: What is run.
        watch: Whether operators may be watched; compiled code would be compiled again for it.

    Returns:
        Unit -> why it cannot be recomputed; empty when everything agrees.
    """
    first, second = Trial(), Trial()
    for trial in (first, second):
        try:
            failure = call.run(trial, watch=watch, fill=trial is second)
            reasons = {call.unit: failure} if failure else {}
        except WritesParameterError:
            writing = [running.unit for running in trial.calls if running.last < 0] or [call.unit]
            reasons = dict.fromkeys(writing, WRITES_PARAMETERS)
        if reasons:
            # Nested units were not compared: they are proven by themselves.
            for state in first.learnt + second.learnt:
                state.forget()
            return reasons
    reasons = first.reasons | second.reasons
    if len(first.calls) != len(second.calls):
        return {each.unit: DIFFERS for trial in (first, second) for each in trial.calls} | reasons
    for one, other in zip(first.calls, second.calls, strict=True):
        if one.unit != other.unit or first.packed[one.first : one.last] != second.packed[other.first : other.last]:
            reasons.setdefault(one.unit, DIFFERS)
    return reasons


def find_carried(call: Candidate, unknown: Mapping[nn.Module, Sequence[str]], watch: bool = True) -> dict[str, str]:
    """Run the forward of a unit that was proven once more, and see what it does with activations that it holds.

    As often as that is done in planned steps, it must not take more memory than was planned: inputs are not copied.

    Args:
        call: What is run; its state learns which activations are left alone.
        unknown: The activations, names by module.
        watch: As in `prove`.

    Returns:
        Unit -> why it cannot be recomputed, if it goes on from what it left in an earlier call: that is gone by then.
    """
    trial = Trial()
    with watched(unknown) as looks:
        try:
            failure = call.run(trial, watch=watch, lend=True) or trial.reasons.get(call.unit)
        except WritesParameterError:
            failure = WRITES_PARAMETERS
        except WritesInputError:
            failure = CHANGES_INPUT
    if failure:
        return {call.unit: failure}
    carried = call.state.settings.settle(unknown, looks)
    return {call.unit: CARRIES.format(", ".join(map(repr, carried)))} if carried else {}
