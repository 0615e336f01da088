"""One forward and backward pass, plainly and with lean saves, and what of it stayed in memory in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_mimose.actions.lean.saves import LeanSaves
from lightning_mimose.actions.lean.sites import SURE, Sites
from lightning_mimose.menu import GRADES

EVERYTHING = len(GRADES)


class Watch:
    """Told of intermediate tensors; says which of them are still in memory."""

    def __init__(self) -> None:
        self._storages: list[StorageWeakRef] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        self._storages.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def alive(self) -> list[bool]:
        """For each, in order."""
        return [not storage.expired() for storage in self._storages]


Function = Callable[..., torch.Tensor]


class Pass:
    """A forward and backward pass.

    Attributes:
        sites: What lean saves learned.
        alive: For each watched tensor, whether it outlived the forward.
        names: The graph's operations.
        bits: The output and every gradient.
    """

    def __init__(
        self,
        function: Function,
        inputs: Sequence[torch.Tensor],
        grade: int | None,
        *,
        autocast: bool = False,
        sites: Sites | None = None,
    ) -> None:
        self.sites = Sites() if sites is None else sites
        watch = Watch()
        lean = nullcontext() if grade is None else LeanSaves(self.sites, grade, given=inputs).active()
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), lean:
            out = function(watch, *inputs)
        self.alive = watch.alive()
        self.names = operations(out)
        wanted = [each for each in inputs if each.requires_grad]
        torch.manual_seed(6)
        gradients = torch.autograd.grad(out, wanted, torch.randn_like(out), allow_unused=True)
        self.bits = [out.detach(), *(torch.zeros(0) if each is None else each for each in gradients)]


def operations(out: torch.Tensor) -> set[str]:
    """Names of all nodes of a graph."""
    found, todo, names = set(), [out.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            names.add(node.name())
            todo += [following for following, _ in node.next_functions]
    return names


def same_bits(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """All equal, in dtype and layout as well; what is not a number equals itself."""
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.stride() == b.stride() and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))
        for a, b in zip(one, other, strict=True)
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def assert_lean(
    function: Function, inputs: Sequence[torch.Tensor], grade: int = EVERYTHING, *, autocast: bool = False
) -> Pass:
    """Everything that is watched is kept by a plain pass and by no lean one, however often, and no bit differs."""
    plain = Pass(function, inputs, None, autocast=autocast)
    assert plain.alive
    assert all(plain.alive)
    first = Pass(function, inputs, grade, autocast=autocast)
    later = (Pass(function, inputs, grade, autocast=autocast, sites=first.sites) for _ in range(SURE + 1))
    for lean in (first, *later):
        assert same_bits(lean.bits, plain.bits)
        assert not any(lean.alive)
        assert lean.sites.checked
        assert not lean.sites.different
    return plain
