"""What holds data: the tensors in a structure, and of each itself, as a rule; several plain ones of a sparse one."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_mimose.sharding import local

_JAGGED = ("_values", "_offsets", "_lengths")
COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def plain_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that hold a tensor's data on this rank, if it is plain, sparse, jagged or a DTensor.

    Example:
        >>> import torch
        >>> [part.shape for part in plain_parts(torch.eye(3).to_sparse())]
        [torch.Size([2, 3]), torch.Size([3])]
    """
    if type(tensor) is not torch.Tensor:
        tensor = local(tensor)
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.jagged:
        return tuple(part for name in _JAGGED if (part := getattr(tensor, name, None)) is not None)
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return tuple(getattr(tensor, name)() for name in COMPRESSED.get(tensor.layout, ()))


_CLOSED = (torch.Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, nn.Module)
_PLAIN = frozenset({*_CLOSED, bool, nn.Parameter})


def leaves_in(tree: Any) -> list[Any]:
    """The leaves of a structure, as pytree has them; objects that it cannot take apart are replaced by what is in them.

    Limitations:
        One level deep: of objects in objects nothing is seen.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Output:
        ...     loss: float
        ...     hidden: list[float]
        >>> leaves_in([1, Output(2.0, [3.0, 4.0])])
        [1, 2.0, 3.0, 4.0]
    """
    found: list[Any] = []
    _gather(tree, found)
    return found


def _gather(tree: Any, found: list[Any]) -> None:
    """Takes apart what operators and modules are mostly given itself: pytree takes several times as long."""
    kind = type(tree)
    if kind in _PLAIN:
        found.append(tree)
    elif kind is tuple or kind is list:
        for each in tree:
            _gather(each, found)
    elif kind is dict:
        for each in tree.values():
            _gather(each, found)
    else:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, _CLOSED):
                found.append(leaf)
            else:
                found += _inside(leaf) or [leaf]


def _inside(leaf: Any) -> list[Any]:
    """The leaves of what an object holds; none where it does not say so plainly (it may be anybody's)."""
    try:
        if isinstance(leaf, (dict, UserDict)):
            return tree_leaves([*leaf.values()])
        own = getattr(leaf, "__dict__", None)
        values = [*own.values()] if isinstance(own, dict) else []
        slots = getattr(type(leaf), "__dataclass_fields__", {})
        values += [getattr(leaf, name, None) for name in slots if name not in (own or {})]
        return tree_leaves(values)
    except Exception:
        return []


def storages_in(tree: Any) -> Iterator[torch.UntypedStorage]:
    """The storage of every part of every tensor in a structure, in order."""
    return storages_of(leaves_in(tree))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors.

    Example:
        >>> import torch
        >>> weight = torch.zeros(4, 4)
        >>> storage_bytes([weight, weight.T])
        64
    """
    sizes: dict[int, int] = {}
    for tensor in tensors:
        for part in plain_parts(tensor):
            storage = part.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def storages_of(leaves: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """The storage of every part of every tensor among the leaves of a structure, in order."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            for part in plain_parts(leaf):
                yield part.untyped_storage()
