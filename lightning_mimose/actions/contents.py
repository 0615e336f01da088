"""What is inside an object that may be state: copied, compared and put back, without replacing the object."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.weak import TensorWeakRef

from lightning_mimose.actions.stored import is_activation, is_lost


class _Kind(NamedTuple):
    copy: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    fill: Callable[[Any, Any], None]


def _items(value: Any) -> list[Any]:
    # An activation in a container is not kept alive by the copy of the container.
    return [TensorWeakRef(i) if is_activation(i) and not is_lost(i) else i for i in value]


def _held(content: list[Any]) -> list[Any]:
    return [item() if isinstance(item, TensorWeakRef) else item for item in content]


def _alive(content: list[Any]) -> list[Any]:
    return [each for each, item in zip(_held(content), content, strict=True) if each is not None or item is None]


def _same_items(value: Any, content: list[Any]) -> bool:
    return len(value) == len(content) and all(one is other for one, other in zip(value, _held(content), strict=True))


def _fill_list(value: list[Any], content: list[Any]) -> None:
    value[:] = _alive(content)


def _copy_dict(value: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
    return list(value), _items(list(value.values()))  # at once: another thread may be writing to it


def _fill_dict(value: dict[Any, Any], content: tuple[list[Any], list[Any]]) -> None:
    keys, items = content
    held = _held(items)  # before it lets go of them: nobody else may hold them
    value.clear()
    for key, found, item in zip(keys, held, items, strict=True):
        if found is not None or item is None:
            value[key] = found


def _fill_other(value: Any, content: Any) -> None:
    value.clear()
    value.update(content)


def _fill_deque(value: deque[Any], content: list[Any]) -> None:
    alive = _alive(content)
    value.clear()
    value.extend(alive)


def _same_dict(value: dict[Any, Any], content: tuple[list[Any], list[Any]]) -> bool:
    return _same_items(value, content[0]) and _same_items(value.values(), content[1])


def _same_tensor(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    # NaN is unequal to itself and then counts as written, which is safe.
    return tensor.shape == copy.shape and torch.equal(tensor.detach(), copy)


def _fill_tensor(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    # `.data` leaves the version counter alone: autograd may have saved this very tensor for backward.
    if tensor.shape == copy.shape:
        tensor.data.copy_(copy)
    else:  # resized by its writer, as observers of quantisation do
        tensor.data = copy.clone()


def _numpy_state(generator: Any) -> bytes:
    return pickle.dumps(_bits(generator).state)


def _bits(generator: Any) -> Any:
    return getattr(generator, "bit_generator", None) or generator._bit_generator


def _fill_numpy(generator: Any, state: bytes) -> None:
    _bits(generator).state = pickle.loads(state)


_KINDS: dict[type, _Kind] = {
    torch.Tensor: _Kind(lambda t: t.detach().clone(), _same_tensor, _fill_tensor),
    list: _Kind(_items, _same_items, _fill_list),
    deque: _Kind(_items, _same_items, _fill_deque),
    dict: _Kind(_copy_dict, _same_dict, _fill_dict),
    set: _Kind(set, lambda value, content: bool(value == content), _fill_other),
    random.Random: _Kind(lambda r: r.getstate(), lambda r, s: bool(r.getstate() == s), lambda r, s: r.setstate(s)),
    np.random.RandomState: _Kind(_numpy_state, lambda g, s: _numpy_state(g) == s, _fill_numpy),
    np.random.Generator: _Kind(_numpy_state, lambda g, s: _numpy_state(g) == s, _fill_numpy),
    torch.Generator: _Kind(
        lambda g: g.get_state(), lambda g, s: torch.equal(g.get_state(), s), lambda g, s: g.set_state(s)
    ),
}


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's content can be copied and written: strided, in memory, every element its own."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_nested:
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False
    return all(stride or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _kind_of(value: Any) -> _Kind | None:
    if isinstance(value, torch.Tensor) and not is_readable(value):
        return None  # told apart by identity alone
    kind = _KINDS.get(type(value))
    if kind is not None:
        return kind
    return next((known for base, known in _KINDS.items() if isinstance(value, base)), None)


def content_of(value: Any, *, holding: bool = False) -> Any:
    """A copy of what can change inside an object; None for an object that is what it is.

    Containers are copied one level deep: what they hold is told apart by identity.

    Args:
        value: The object.
        holding: Whether the copy of a container keeps the activations in it alive.

    Example:
        >>> counts = [1, 2]
        >>> before = content_of(counts)
        >>> counts.append(3); same_content(counts, before)
        False
        >>> put_content(counts, before); counts
        [1, 2]
    """
    kind = _kind_of(value)
    if holding and isinstance(value, (list, deque)):
        return list(value)
    if holding and isinstance(value, dict):
        return list(value), list(value.values())
    return None if kind is None else kind.copy(value)


def same_content(value: Any, content: Any) -> bool:
    """Whether an object still holds what `content_of` copied."""
    if content is None:
        return True
    kind = _kind_of(value)
    return kind is not None and kind.same(value, content)


def put_content(value: Any, content: Any, instead: Any = None) -> None:
    """Give an object the content that was copied.

    Args:
        value: The object.
        content: Its content.
        instead: Stands in a container for activations that are gone; None to leave them out.
    """
    kind = _kind_of(value)
    if kind is None or content is None:
        return
    if instead is not None and isinstance(value, dict):
        content = content[0], _with(content[1], instead)
    elif instead is not None and isinstance(value, (list, deque)):
        content = _with(content, instead)
    kind.fill(value, content)


def _with(items: list[Any], instead: Any) -> list[Any]:
    return [instead if isinstance(item, TensorWeakRef) and item() is None else item for item in items]
