"""Pieces of state, of modules and outside of them: copied, compared and put back where they were found."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_mimose.actions.contents import content_of, is_readable, put_content, same_content
from lightning_mimose.actions.outside import ABSENT, NO_STATE, found, keys_of, look, put
from lightning_mimose.actions.stored import OWN, activations_in, is_activation
from lightning_mimose.errors import MimoseError, is_out_of_memory


class Entry(NamedTuple):
    """One piece of state: where it is found (what is outside of modules has no owner), the object, its content."""

    owner: nn.Module | None
    name: str
    value: Any
    content: Any


Saved = list[Entry]
Place = tuple["weakref.ref[nn.Module] | None", str]


def entries_of(modules: Sequence[nn.Module]) -> Iterator[Entry]:
    """Everything that may be state of some modules, with no content."""
    return (Entry(owner, name, value, None) for owner, name, value in state_of(modules))


def state_of(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module | None, str, Any]]:
    """Everything that may be state of some modules: (owner, name, value)."""
    for owner in modules:
        for name, value in [*owner._buffers.items(), *vars(owner).items()]:
            if name not in OWN and not is_activation(value):
                yield owner, name, value
    for name in dict.fromkeys(key for kind in {type(owner): None for owner in modules} for key in keys_of(kind)):
        value = look(name)
        if value is not NO_STATE:
            yield None, name, value


def held_in(modules: Sequence[nn.Module]) -> list[list[torch.Tensor]]:
    """The activations in containers that may be state of modules: whoever has these holds them, as no copy does."""
    return [activations_in(value) for _, _, value in state_of(modules)]


def copy_all(modules: Sequence[nn.Module], *, tensors: bool = True) -> Saved:
    """Copies of everything that may be state of some modules, tensors whose content can be read or not."""
    return [
        Entry(owner, name, value, content_of(value))
        for owner, name, value in state_of(modules)
        if tensors or not (isinstance(value, torch.Tensor) and is_readable(value))
    ]


def copy_places(known: Sequence[Place], *, activations: bool = False, tensors: bool = True) -> Saved:
    """Copies of the state found at some places now.

    Args:
        known: The places.
        activations: Whether to note all that is there: activations too, alone and in containers, which stay alive as
            long as the copy, and what is no state (any more) outside of modules.
        tensors: Whether to copy the content of tensors.
    """
    entries = []
    for ref, name in known:
        owner = ref() if ref is not None else None
        if ref is None or owner is not None:
            value = value_at(owner, name)
            if owner is None and not activations and look(name) is NO_STATE:
                continue
            if not is_activation(value):
                wanted = tensors or not isinstance(value, torch.Tensor)
                entries.append(Entry(owner, name, value, content_of(value, holding=activations) if wanted else None))
            elif activations:
                entries.append(Entry(owner, name, value, None))
    return entries


def changes(before: Sequence[Entry]) -> Saved:
    """The entries whose object or content is another one now."""
    return [
        entry
        for entry in before
        if (value := value_at(entry.owner, entry.name)) is not entry.value or not same_content(value, entry.content)
    ]


def appeared(modules: Sequence[nn.Module], before: Sequence[tuple[Any, ...]]) -> Saved:
    """Entries for attributes that were not there when everything was copied: entries begin with owner and name."""
    known = {(id(owner), name) for owner, name, *_ in before}
    return [
        Entry(owner, name, ABSENT, None)
        for owner in modules
        for name, value in [*owner._buffers.items(), *vars(owner).items()]
        if name not in OWN and not is_activation(value) and (id(owner), name) not in known
    ]


def places(entries: Saved) -> list[Place]:
    """Where entries were found, without keeping a module alive."""
    return [(weakref.ref(owner) if owner is not None else None, name) for owner, name, _, _ in entries]


def put_back(saved: Saved, instead: Any = None) -> None:
    """Put objects and contents where they were.

    Args:
        saved: What was found.
        instead: Stands in containers for activations that are gone; None to leave them out.

    Raises:
        MimoseError: Something could not be put back; all the rest was.
    """
    failed: list[str] = []
    for owner, name, value, content in saved:
        try:
            if owner is not None:
                _put(owner, name, value)
            else:
                put(name, value)
            put_content(value, content, instead)
        except Exception as error:  # it may share memory with a parameter, which nobody may write
            if is_out_of_memory(error):
                raise
            if same_content(value, content):
                continue
            where = name if owner is None else f"{type(owner).__name__}.{name}"
            failed.append(f"{where} ({type(error).__name__}: {error})")
    if failed:
        raise MimoseError(
            f"What a forward has written could not be put back: {'; '.join(failed)}. Nothing was updated in this step, "
            "but these are not as they were: load them anew, and leave the unit that holds them out with units=[...]."
        )


def _put(owner: nn.Module, name: str, value: Any) -> None:
    if value is ABSENT:
        owner._buffers.pop(name, None)
        vars(owner).pop(name, None)
    elif name in owner._buffers:
        owner._buffers[name] = value
    else:
        vars(owner)[name] = value


def value_at(owner: nn.Module | None, name: str) -> Any:
    """What is there now; `ABSENT` where nothing is."""
    if owner is None:
        return found(name)
    return owner._buffers[name] if name in owner._buffers else vars(owner).get(name, ABSENT)
