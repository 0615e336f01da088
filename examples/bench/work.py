"""Work: what each budget adds to what the processor has to do, by which actions; nothing of it depends on the machine.

The time that a step takes differs by several percent from one equal step to the next where a machine is shared; what it
does is always the same. So the operations of matrix products and the bytes that all operations read and write are
counted, of planned steps and of plain ones, over all batches. What Python does between operations and what the
allocator takes is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from bench.frontier import Runner, draw, outcome, prepared
from bench.large import LARGE
from bench.models import Batch

_NO_BYTES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"}
"""Operations that neither read nor write, besides views."""

LABELS = {"products": "added operations of matrix products, %", "traffic": "added bytes read and written, %"}


class Work(NamedTuple):
    """What steps do.

    Attributes:
        operations: Of matrix products, convolutions and attention, as `FlopCounterMode` counts them.
        traffic_bytes: Read and written by all operations, as if each read its tensors once and wrote its results once.
    """

    operations: int
    traffic_bytes: int


class _Traffic(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.traffic_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in _NO_BYTES:
            tensors = [each for each in tree_leaves((args, kwargs, results)) if isinstance(each, torch.Tensor)]
            self.traffic_bytes += sum(each.nbytes for each in tensors)
        return results


def done(runner: Runner, batches: Sequence[Batch], *, plain: bool = False) -> Work:
    """What one step on every batch does."""
    with FlopCounterMode(display=False) as products, _Traffic() as traffic:
        for index, batch in enumerate(batches):
            runner.step(batch, index, plain=plain)
    return Work(products.get_total_flops(), traffic.traffic_bytes)


def rows(
    names: Sequence[str], steps: int, results: Path, *, shares: Sequence[float], menus: Sequence[str], seed: int = 11
) -> Iterator[dict[str, Any]]:
    """One row per workload, menu and budget; draws both curves of each workload."""
    for name in names:
        batches = LARGE[name].batches(steps, seed=seed, order="longest first")
        plain, runners = prepared(LARGE[name], batches, menus, shares)
        whole = done(plain, batches)
        added = {
            key: Work(*(now - before for now, before in zip(done(runner, batches), whole, strict=True)))
            for key, runner in runners.items()
            if runner.error is None
        }
        for (menu, share), runner in runners.items():
            yield {
                "model": name,
                "menu": menu,
                "budget share": f"{share}",
                **_columns(added.get((menu, share)), whole),
                **outcome(runner, batches),
            }
        for index, (what, label) in enumerate(LABELS.items()):
            drawn = [(*key, work[index] / whole[index]) for key, work in added.items()]
            draw(name, drawn, results / f"work-{what}-{name}.png", label)


def _columns(added: Work | None, whole: Work) -> Mapping[str, float | None]:
    shares = (None, None) if added is None else (round(a / w, 4) for a, w in zip(added, whole, strict=True))
    return dict(zip(("added products", "added traffic"), shares, strict=True))
