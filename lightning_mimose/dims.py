"""Every tensor in a batch, and the names of its dimensions.

A dimension is named after where it was found: path in the batch and axis, "input_ids:1", "0:1" (axis 1 of a tuple's
first item), "text.mask:1" (nested), "input:1" (a bare tensor). A leading axis that all tensors share is "batch".
Only shapes are read, never values, so nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_mimose.errors import SizeError

BATCH = "batch"
Leaf = tuple[str, tuple[int, ...]]
"""A tensor: its path in the batch, and its shape."""
_PLAIN = frozenset({str, bytes, int, float, bool, complex, type(None)})
_OPAQUE = (type, FunctionType, ModuleType, torch.nn.Module)  # things whose attributes are no part of a batch


def raw_dims(batch: Any) -> dict[str, int]:
    """Every dimension of every tensor in the batch, by name, in order of occurrence.

    Reads tensors (sparse ones by their shape, nested ones as items and elements in all), mappings, sequences, named
    tuples, dataclasses, and, as a last resort, the attributes of any other object. Everything else in it is ignored;
    tensors without axes have no dimensions.

    Raises:
        SizeError: If there is no tensor in it.

    Example:
        >>> ids = torch.zeros(8, 128, dtype=torch.long)
        >>> raw_dims({"input_ids": ids, "labels": ids[:, 0]})
        {'batch': 8, 'input_ids:1': 128}
        >>> raw_dims((torch.zeros(4, 3), torch.zeros(7)))
        {'0:0': 4, '0:1': 3, '1:0': 7}
    """
    return names_of(leaves_of(batch))


def leaves_of(batch: Any) -> list[Leaf]:
    """Every tensor in a batch.

    Raises:
        SizeError: There is none.
    """
    leaves: list[Leaf] = []
    _collect(batch, "", leaves, {})
    if not leaves:
        if isinstance(batch, Mapping) and any(map(_is_no_size, batch.values())):
            raise SizeError(f"Sizes are whole numbers, of at least 0; {dict(batch)} was given.")
        raise SizeError(_tells_none(batch, "tensor"))
    return leaves


def sized_leaves(batch: Any) -> list[Leaf]:
    """As `leaves_of`: single numbers tell no size by themselves.

    Raises:
        SizeError: No tensor in the batch has axes.
    """
    leaves = leaves_of(batch)
    if not any(shape for _, shape in leaves):
        raise SizeError(_tells_none(batch, "tensor with dimensions"))
    return leaves


def _tells_none(batch: Any, missing: str) -> str:
    return (
        f"There is no {missing} in this batch, a {type(batch).__name__}, so its size cannot be read. Pass "
        "size_fn, a function from the batch to an int or to a mapping of names to ints such as {'tokens': 512}."
    )


def _is_no_size(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and value < 0)


def _collect(value: Any, path: str, leaves: list[Leaf], seen: dict[int, Any]) -> None:
    """Append (path, shape) of every tensor below `value`; `seen` keeps the objects read, which may be cyclic, by id."""
    kind = type(value)
    if kind in _PLAIN:
        return
    if isinstance(value, Tensor):
        # A nested tensor has no shape in plain ints; its memory goes with its elements.
        leaves.append((path or "input", (value.size(0), value.numel()) if value.is_nested else value.shape))
        return
    prefix = f"{path}." if path else ""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, (dict, Mapping)):
        items = value.items()
    elif isinstance(value, (tuple, list)):
        names = getattr(kind, "_fields", None)
        items = enumerate(value) if names is None else zip(names, value, strict=False)
    elif isinstance(value, _OPAQUE) or id(value) in seen:
        return
    else:
        seen[id(value)] = value
        items = _attributes(value)
    for name, item in items:
        if type(item) not in _PLAIN:
            _collect(item, f"{prefix}{name}", leaves, seen)


def _attributes(value: Any) -> Iterable[tuple[Any, Any]]:
    fields = getattr(type(value), "__dataclass_fields__", None)
    if fields is not None:
        return [(name, getattr(value, name, None)) for name in fields]
    # Only what is stored: methods of a stranger may do anything (asking PyG's HeteroData for a key creates it).
    return list(getattr(value, "__dict__", {}).items())


def names_of(leaves: Sequence[Leaf], share: bool = True) -> dict[str, int]:
    """Names of all dimensions; `share=False` leaves a shared leading axis under its own names."""
    dims: dict[str, int] = {}
    first = 0
    if share:
        leading = {shape[0] for _, shape in leaves if shape}
        if len(leading) == 1:
            dims[BATCH] = leading.pop()
            first = 1
    for path, shape in leaves:
        for axis in range(first, len(shape)):
            name = f"{path}:{axis}"
            while name in dims:  # {"a.b": x, "a": {"b": y}}
                name += "'"
            dims[name] = shape[axis]
    return dims


def dims_text(named: Mapping[str, int]) -> str:
    """Named dimensions, for a line of text."""
    return ", ".join(f"{name}={value}" for name, value in named.items())
