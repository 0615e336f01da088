"""Which actions plans may use, by name."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_mimose.errors import UnsupportedError


def check_actions(actions: Sequence[str] | None) -> tuple[str, ...]:
    """Names of the actions to plan with.

    Raises:
        UnsupportedError: A name that is no action of this version.
    """
    if actions is None:
        return ("recompute",)
    unknown = [name for name in actions if name != "recompute"]
    if unknown or not actions:
        raise UnsupportedError(
            f"actions={list(actions)!r} was asked for; this version plans with 'recompute' only. Leave actions out, or "
            "pass actions=['recompute']."
        )
    return tuple(actions)
