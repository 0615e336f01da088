"""The actions there are, by name, and which of them plans may use."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_mimose.errors import UnsupportedError

KEEP = "keep"
"""The action of a unit that is left alone: autograd keeps what it saves."""
RECOMPUTE = "recompute"
OFFLOAD = "offload"
LEAN = "lean"
GRADES = (LEAN, "lean+masks", "lean+attention", "lean+expansions", "lean+products")
"""Grades of lean saves, each of which rebuilds what the one before does and more.

Element-wise operations and norms; masks as bits, and products with them; softmax from its scores; products whose result
is wider than what it is made from, so that a byte of it costs little; all matrix products and convolutions.
"""
ELEMENTWISE, MASKS, ATTENTION, EXPANSIONS, PRODUCTS = range(1, 6)
RECOMPUTE_LEAN = "recompute+lean"
"""Recomputation whose own saves are lean (softmax included), so that less is there while its backward runs."""
INSIDE = ATTENTION
"""The grade of lean saves in a unit that is recomputed leanly."""
GRADE_INSIDE = GRADES[INSIDE - 1]
SPLIT = "split"
CHUNKS = (2, 4, 8)
SPLITS = tuple(f"{SPLIT}{chunks}" for chunks in CHUNKS)
"""Recomputation of one of so many parts of the batch at a time."""

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
    unknown = [name for name in actions if not isinstance(name, str) or name not in _MENU]
    if unknown or not actions:
        families = {action: family for family, members in _MENU.items() for action in members}
        known = {name: families[name] for name in unknown if isinstance(name, str) and name in families}
        degrees = "".join(f" {name!r} is chosen by plans where {family!r} may be." for name, family in known.items())
        raise UnsupportedError(
            f"actions={list(actions)!r} was asked for; this version plans with {', '.join(map(repr, _MENU))}.{degrees} "
            f"Leave actions out for {' and '.join(map(repr, _DEFAULT))}, or pass some, as actions=['{RECOMPUTE}']."
        )
    both = (RECOMPUTE_LEAN,) if {LEAN, RECOMPUTE} <= set(actions) else ()
    return (*(action for name in dict.fromkeys(actions) for action in _MENU[name]), *both)
