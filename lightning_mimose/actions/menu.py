"""Which actions plans may use, by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_mimose.actions.lean.grades import GRADES
from lightning_mimose.actions.split import SPLITS
from lightning_mimose.errors import UnsupportedError

RECOMPUTE = "recompute"
LEAN = "lean"
RECOMPUTE_LEAN = "recompute+lean"
"""Recomputation whose own saves are lean (softmax included), so that less is there while its backward runs."""
OFFLOAD = "offload"
SPLIT = "split"

_MENU = {LEAN: GRADES, RECOMPUTE: (RECOMPUTE,), OFFLOAD: (OFFLOAD,), SPLIT: SPLITS}
_DEFAULT = (LEAN, RECOMPUTE)  # bit-equal, and known to pay on every device


def check_actions(actions: Sequence[str] | None) -> tuple[str, ...]:
    """Names of the actions to plan with; a family of actions that differ in degree is asked for by one name.

    Raises:
        UnsupportedError: A name that is no action of this version.

    Example:
        >>> check_actions(["lean"])
        ('lean', 'lean+masks', 'lean+attention', 'lean+expansions', 'lean+products')
    """
    if actions is None:
        actions = list(_DEFAULT)
    if isinstance(actions, str) or not isinstance(actions, Collection):
        names = [actions] if isinstance(actions, str) else [RECOMPUTE]
        raise UnsupportedError(f"actions={actions!r} was asked for; it is a list, as actions={names!r}.")
    unknown = [name for name in actions if name not in _MENU]
    if unknown or not actions:
        raise UnsupportedError(
            f"actions={list(actions)!r} was asked for; this version plans with {', '.join(map(repr, _MENU))}. Leave "
            f"actions out for {' and '.join(map(repr, _DEFAULT))}, or pass some, as actions=['{RECOMPUTE}']."
        )
    both = (RECOMPUTE_LEAN,) if {LEAN, RECOMPUTE} <= set(actions) else ()
    return (*(action for name in dict.fromkeys(actions) for action in _MENU[name]), *both)
