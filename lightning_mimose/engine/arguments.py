"""What a module is called with, by name: as far as sizes are read off it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_mimose import parts
from lightning_mimose.dims import Leaf, leaves_of, sized_leaves
from lightning_mimose.errors import SizeError

MOST_NODES = 64
"""Operations that are looked at for what has made a tensor."""


def positional_names(forward: Callable[..., Any]) -> Sequence[str]:
    """What the forward of a kind of module calls its arguments by position.

    Example:
        >>> import torch
        >>> positional_names(torch.nn.Linear.forward)
        ['input']
    """
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # it is no Python function
        return []
    return [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD][1:]


def named(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name; those by position that have none, by their number.

    Example:
        >>> named(["ids"], (1, 2), {"mask": 3})
        {'ids': 1, '1': 2, 'mask': 3}
    """
    return {(names[i] if i < len(names) else str(i)): each for i, each in enumerate(args)} | dict(kwargs)


def has_tensors(value: Any) -> bool:
    """Whether there are tensors in it."""
    try:
        return bool(leaves_of(value))
    except SizeError:
        return False


def leaves_in(given: Any) -> list[Leaf]:
    """The tensors among arguments, say: none, where none of them has dimensions.

    Example:
        >>> import torch
        >>> leaves_in({"ids": torch.zeros(2, 3), "scale": torch.tensor(1.0), "name": "a"})
        [('ids', torch.Size([2, 3])), ('scale', torch.Size([]))]
    """
    try:
        return sized_leaves(given)
    except SizeError:
        return []


def has_lists(given: Mapping[str, Any]) -> bool:
    """Whether there are lists or tuples of tensors, mostly of as many shapes as there are samples.

    Example:
        >>> import torch
        >>> has_lists({"images": [torch.zeros(2)]}), has_lists({"images": torch.zeros(2), "names": ["a", "b"]})
        (True, False)
    """
    return any(isinstance(value, (list, tuple)) and has_tensors(value) for value in given.values())


def wants_gradient(tensor: Tensor) -> bool:
    """Whether a tensor is, or was made from, one that a gradient is to be taken by and that is no parameter.

    Example:
        >>> import torch
        >>> image = torch.zeros(2, 3)
        >>> stem = torch.nn.Linear(3, 3)
        >>> wants_gradient(stem(image)), wants_gradient(stem(image.clone().requires_grad_()))
        (False, True)
    """
    if tensor.grad_fn is None:
        return tensor.requires_grad and not isinstance(tensor, nn.Parameter)
    waiting, known = [tensor.grad_fn], {tensor.grad_fn}
    while waiting and len(known) < MOST_NODES:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in known:
                known.add(node)
                is_leaf = node.name() == "torch::autograd::AccumulateGrad"
                if is_leaf and not isinstance(getattr(node, "variable", None), nn.Parameter):
                    return True
                waiting.append(node)
    return False


def first_tensor(values: Iterable[Any]) -> Tensor | None:
    """The first tensor, be it in a container; None where there is none, or a nested one, which has no shape in numbers.

    Example:
        >>> import torch
        >>> first_tensor([None, {"tokens": torch.zeros(2, 3)}, torch.zeros(4)]).shape
        torch.Size([2, 3])
    """
    for value in values:
        each = (value,) if isinstance(value, Tensor) else parts.leaves_in(value)
        found = next((leaf for leaf in each if isinstance(leaf, Tensor)), None)
        if found is not None:
            return None if found.is_nested else found
    return None
