"""Resident memory: parameters, buffers, gradients, optimizer state and the batch, in bytes.

Counted by storage, so that tied weights and views count once. What cannot change from step to step is counted
once and remembered; the rest is a short sum, because it runs on every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from operator import attrgetter, is_not, not_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_mimose.measure.optimizers import optimized, state_bytes, state_tensors
from lightning_mimose.parts import COMPRESSED, leaves_in, plain_parts, storage_bytes
from lightning_mimose.sharding import held_bytes

_REQUIRES_GRAD, _VERSION = attrgetter("requires_grad"), attrgetter("_version")
_FEW = 8
"""How many of the largest gradients are looked at in every step, and how many of all."""
_STRIDE = 4
"""Of how many parameters that are trained one is looked at again before the forward."""


def batch_bytes(batch: Any) -> int:
    """Bytes of a batch's tensors. A slice of a larger tensor counts as its own part, not the whole.

    Example:
        >>> import torch
        >>> batch_bytes({"x": torch.zeros(100)[:10]})
        40
    """
    if type(batch) is torch.Tensor and batch.layout is torch.strided and batch.is_contiguous():
        return batch.nbytes
    tensors = batch_tensors(batch)
    if all(map(_stands_alone, tensors)) and len({tensor.data_ptr() for tensor in tensors}) == len(tensors):
        return sum([tensor.nbytes for tensor in tensors])  # as a loader makes them: no storage need be asked for
    sizes: dict[int, int] = {}
    for tensor in tensors:
        for part in plain_parts(tensor):
            storage = part.untyped_storage()
            taken = storage.nbytes()
            if tensor.layout not in COMPRESSED:  # one of their two indices may be a part of what both were made in
                taken = min(taken, part.numel() * part.element_size())
            sizes[storage._cdata] = max(sizes.get(storage._cdata, 0), taken)
    return sum(sizes.values())


def _stands_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain, and all of its storage as far as torch knows: what was detached may share one."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return is_plain and tensor.is_contiguous() and not tensor._is_view()


def batch_tensors(batch: Any) -> list[torch.Tensor]:
    """Every tensor in a batch of any structure."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    values = batch.values() if type(batch) is dict else batch
    if isinstance(batch, (dict, list, tuple)) and all(isinstance(value, torch.Tensor) for value in values):
        return list(values)  # what almost every batch is, on every step
    return [leaf for leaf in leaves_in(batch) if isinstance(leaf, torch.Tensor)]  # of a BatchEncoding, a dataclass, too


def versions(parameters: Iterable[torch.Tensor]) -> int:
    """A number that grows whenever one of them is written: versions only grow."""
    return sum(map(_VERSION, parameters))


def _groups(optimizers: Iterable[Optimizer]) -> list[tuple[int, int, int]]:
    """Of their groups: how many parameters they have, and which are the first and the last."""
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    return [(len(group), id(group[0]), id(group[-1])) for group in groups if group]


def _is_filled(parameter: torch.Tensor) -> bool:
    """Whether a parameter has a gradient, or gets one."""
    return parameter.requires_grad or parameter.grad is not None


def _has_none(parameter: torch.Tensor) -> bool:
    return parameter.grad is None


class ResidentLedger:
    """Counts what is resident at a step's start and end.

    Args:
        model: The model that is trained.
        bucket_bytes: What a distributed wrapper keeps besides (DDP's gradient buckets).
    """

    def __init__(self, model: nn.Module, bucket_bytes: int = 0) -> None:
        self._model = model
        self.bucket_bytes = bucket_bytes
        self._optimizers: tuple[Optimizer, ...] = ()
        self._groups: Sequence[tuple[int, int, int]] = ()
        self._earlier: Sequence[weakref.ref[Optimizer]] = ()
        """Those before them: where somebody keeps one (a scheduler does), its state stays resident."""
        self._few: Sequence[tuple[Optimizer, torch.Tensor]] = ()
        self._growing_bytes = 0
        self._state_entries = -1
        self._state_bytes = self._earlier_bytes = 0
        self.gradient_bytes = 0
        """Bytes of the gradients that existed when they were last counted, but for those that stay."""
        self.gradient_capacity_bytes = 0
        """Bytes of all gradients once every trainable parameter has one, likewise."""
        self.staying_bytes = 0
        """Bytes of gradients that nobody takes away: of parameters that are trained, and that no optimizer has."""
        self.trained: tuple[bool, ...] | None = None
        """Which parameters are trained, in order; the same object until that changes."""
        self._frozen: Sequence[torch.Tensor] = ()
        self._training: Sequence[torch.Tensor] = ()
        self._present: Sequence[torch.Tensor] = ()
        self._absent: Sequence[torch.Tensor] = ()
        self._present_bytes = self._capacity_bytes = 0
        self._unwatched: Mapping[int, tuple[torch.Tensor, int]] | None = None
        """Those parameters with their bytes, by identity; None where that has to be looked up."""
        self._staying: frozenset[int] = frozenset()
        """Those whose gradients stay."""
        self.left_out: frozenset[int] = frozenset()
        """Parameters that no optimizer has, by identity, if a gradient of theirs has stayed in some step."""
        self.refresh()

    def refresh(self) -> None:
        """Count parameters and buffers again (after layers were frozen, added or converted)."""
        parameters = {id(p): p for p in self._model.parameters()}.values()
        self._tensors = list(parameters)
        tables = ((module, module._buffers) for module in self._model.modules())
        self._tables = [table for module, table in tables if table or not type(module).__module__.startswith("torch.")]
        self._buffers: list[weakref.ref[torch.Tensor]] = []
        self._fixed_bytes = storage_bytes(self._tensors) + self.bucket_bytes
        self._began_bytes = self._most_bytes = 0
        """Of these, at the beginning of a step; and the most there were at its end."""
        self._sizes = [held_bytes(p) for p in parameters]
        self.trained = None  # of other parameters
        self._present, self._absent = (), ()
        self.count_gradients()

    def swung_bytes(self) -> int:
        """By how much buffers are larger than when the step began, if they once were as large.

        They go up and down with the sizes then (a mask that every forward makes anew), and none has come to stay.
        """
        self._count_buffers()
        before, self._most_bytes = self._most_bytes, max(self._most_bytes, self._fixed_bytes)
        return self._fixed_bytes - self._began_bytes if self._fixed_bytes <= before else 0

    def _count_buffers(self) -> None:
        """Look at the buffers: forwards may set others (a table of positions or a bias for longer texts)."""
        every = (buffer for table in self._tables if table for buffer in table.values())
        now = [buffer for buffer in every if buffer is not None]
        if len(now) != len(self._buffers) or any(map(is_not, now, [ref() for ref in self._buffers])):
            self._buffers = [*map(weakref.ref, now)]  # those that are replaced are to go
            self._fixed_bytes = storage_bytes([*self._tensors, *now]) + self.bucket_bytes

    def watch(self, optimizers: Sequence[Optimizer], growing_bytes: int = 0) -> None:
        """Name the optimizers whose state is resident, and how much it grows to where it grows with every update."""
        now = set(map(id, optimizers))
        earlier = *self._living(), *self._optimizers
        self._earlier = [weakref.ref(optimizer) for optimizer in earlier if id(optimizer) not in now]
        self._optimizers, self._groups = tuple(optimizers), _groups(optimizers)
        every = [(optimizer, parameter) for optimizer in optimizers for parameter in optimized(optimizer)]
        self._few = every[:: max(1, len(every) // _FEW)]
        self._growing_bytes = growing_bytes
        self._state_entries = -1
        self._unwatched = None

    def watches(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether these are watched, and have the parameters that they had then, as far as is seen at once."""
        return tuple(optimizers) == self._optimizers and _groups(optimizers) == self._groups

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that are watched."""
        return self._optimizers

    def trains_more(self) -> bool:
        """Whether layers were unfrozen since gradients were counted."""
        return any(map(_REQUIRES_GRAD, self._frozen))

    def trains_fewer(self) -> bool:
        """Whether some were frozen, as far as a part of the parameters tells: whole layers are, mostly."""
        return not all(map(_REQUIRES_GRAD, self._training[::_STRIDE]))

    def trained_now(self) -> tuple[bool, ...]:
        """Which parameters are trained, in order, as far as a part of those tells that were: see `trains_fewer`."""
        if self.trained is None or self.trains_more() or self.trains_fewer():
            return tuple(map(_REQUIRES_GRAD, self._tensors))
        return self.trained

    def count_gradients(self) -> None:
        """Look at the gradients, once per step: layers may be frozen or unfrozen at any time; and at the buffers."""
        self._count_buffers()
        self._began_bytes = self._fixed_bytes
        self._count()
        if self._unwatched is None:
            among = set(map(id, optimized(*self._optimizers)))
            every = zip(self._tensors, self._sizes, strict=True)
            those = {id(each): (each, size) for each, size in every if id(each) not in among and _is_filled(each)}
            self._unwatched = those if self._optimizers else {}  # a loop may zero all of them
            self._staying = self._staying.intersection(self._unwatched)
            self.left_out = self.left_out.intersection(self._unwatched)
        staying = [self._unwatched[number] for number in self._staying]
        self.staying_bytes = sum([size for _, size in staying])
        self.gradient_bytes = self._present_bytes - self.staying_bytes
        self.gradient_capacity_bytes = self._capacity_bytes - sum(
            [size for each, size in staying if each.requires_grad]
        )

    def look_at_zeroed(self) -> None:
        """Gradients were zeroed for this step, and its backward begins: what is there stays."""
        if self._unwatched:
            found = self._unwatched.items()
            self._staying = frozenset([number for number, (each, _) in found if each.grad is not None])
            if self._staying:
                self.left_out = frozenset(self._unwatched)  # all of them: others may get theirs one after the other

    def _count(self) -> None:
        # What comes out hardly ever changes, and looking at every parameter is most of what a step costs here. None can
        # appear unseen; that some are freed is seen by the largest, and by a few more since most are freed together.
        same = self.trained is not None and not self.trains_more() and all(map(_REQUIRES_GRAD, self._training))
        if same and not any(map(_has_none, self._present)) and all(map(_has_none, self._absent)):
            return
        has = [parameter.grad is not None for parameter in self._tensors]
        present = [i for i, there in enumerate(has) if there]
        watched = {*sorted(present, key=self._sizes.__getitem__)[-_FEW:], *present[:: max(1, len(present) // _FEW)]}
        self._present = [self._tensors[i] for i in watched]
        self._absent = [parameter for parameter, there in zip(self._tensors, has, strict=True) if not there]
        if not same:
            self.trained = tuple(map(_REQUIRES_GRAD, self._tensors))
            self._capacity_bytes = sum(compress(self._sizes, self.trained))
            self._unwatched = None
            self._frozen = list(compress(self._tensors, map(not_, self.trained)))
            self._training = list(compress(self._tensors, self.trained))
        self._present_bytes = sum(compress(self._sizes, has))

    def state_bytes(self) -> int:
        """Bytes of optimizer state, counted again only when entries were added."""
        known = 0
        for optimizer in self._optimizers:
            known += len(optimizer.state)
        entries = known
        for optimizer, parameter in self._few:  # what comes later comes to all of them
            entries += len(optimizer.state.get(parameter, ()))
        for optimizer in self._living():
            entries += len(optimizer.state)
        if entries != self._state_entries or known == 1:  # LBFGS has one entry, whose lists grow
            self._state_entries = entries
            self._state_bytes = state_bytes((*self._optimizers, *self._living()))
            self._earlier_bytes = self._state_bytes - state_bytes(self._optimizers) if self._earlier else 0
        return self._state_bytes

    def _living(self) -> list[Optimizer]:
        """Earlier optimizers that somebody still has."""
        return [optimizer for each in self._earlier if (optimizer := each()) is not None]

    def lasting_bytes(self) -> int:
        """What is resident besides the batch and gradients that go: parameters, buffers, buckets, optimizer state."""
        return self._fixed_bytes + self.state_bytes() + self.unfilled_bytes() + self.staying_bytes

    def model_tensors(self) -> list[torch.Tensor]:
        """Parameters and buffers as they are now: any of them may be replaced in a step."""
        return [*self._model.parameters(), *self._model.buffers()]

    def lasting_tensors(self) -> list[torch.Tensor]:
        """Likewise, with the optimizers' state."""
        return [*self.model_tensors(), *state_tensors((*self._optimizers, *self._living()))]

    def there_bytes(self) -> int:
        """All that is there between two steps: with gradients, and without what is only reserved."""
        return self._fixed_bytes + self.state_bytes() + self._present_bytes

    def unfilled_bytes(self) -> int:
        """The part of it that is only reserved: state that grows and has not come yet."""
        return max(0, self._growing_bytes - (self.state_bytes() - self._earlier_bytes)) if self._growing_bytes else 0

    def parameters(self) -> list[tuple[nn.Parameter, int]]:
        """Every parameter with its bytes, but for those whose gradient stays."""
        every = zip(self._tensors, self._sizes, strict=True)
        return [(each, size) for each, size in every if id(each) not in self._staying]
