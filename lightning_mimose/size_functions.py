"""Functions of the user's own that tell a batch's size."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from lightning_mimose.errors import SizeError

SizeFn: TypeAlias = Callable[[Any], int | Mapping[str, int]]
"""From a batch to an int, or to named dimensions."""


def check_size_fn(size_fn: object) -> None:
    """Check what is to read sizes.

    Raises:
        SizeError: It is neither a function nor None.

    Example:
        >>> check_size_fn(len)
    """
    if size_fn is not None and not callable(size_fn):
        raise SizeError(
            f"size_fn={size_fn!r} was asked for; it is a function from a batch to an int or to named dimensions, as "
            "size_fn=lambda batch: batch['input_ids'].shape[1]."
        )


def asked(size_fn: SizeFn, batch: Any) -> tuple[Any, dict[str, int]]:
    """What such a function says of a batch.

    Args:
        size_fn: The function.
        batch: What it is given.

    Returns:
        What it returned, and the dimensions by name: an int is called "size".

    Raises:
        SizeError: It raised an error, or returned something else.

    Example:
        >>> asked(len, "four"), asked(lambda batch: {"tokens": len(batch)}, "four")[1]
        ((4, {'size': 4}), {'tokens': 4})
    """
    try:
        answer: Any = size_fn(batch)
    except Exception as error:
        raise SizeError(
            f"size_fn raised {type(error).__name__}: {error}. It was given what the training step is given, here "
            f"{_described(batch)}."
        ) from error
    pairs = answer.items() if isinstance(answer, Mapping) else [("size", answer)]
    dims = {name: whole(value) for name, value in pairs if isinstance(name, str)}
    if not dims or len(dims) < len(pairs) or min(dims.values()) < 0:
        raise SizeError(
            f"size_fn returned {answer!r}. It must return a non-negative int, or a mapping of at least one name to "
            "such ints, for example {'tokens': 512}."
        )
    return answer, dims


def whole(value: Any) -> int:
    """`value` as an int, or -1 if it is none: numpy's and torch's integers are, True is not.

    Example:
        >>> whole(3), whole(True), whole(2.5)
        (3, -1, -1)
    """
    try:
        return -1 if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return -1


def _described(batch: Any) -> str:
    """What a batch is, in a few words."""
    kind = f"of type {type(batch).__name__}"
    if isinstance(batch, Tensor):
        return f"one {kind} and shape {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return f"one {kind} with the keys {', '.join(map(repr, batch))}"
    return f"one {kind} and length {len(batch)}" if isinstance(batch, Sequence) else f"one {kind}"
