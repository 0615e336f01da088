"""From a batch to its size: the named dimensions that its memory depends on (see `dims`), followed over a training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from lightning_mimose.dims import BATCH, Leaf, names_of, sized_leaves
from lightning_mimose.errors import SizeError
from lightning_mimose.labels import Labels
from lightning_mimose.layouts import Layout
from lightning_mimose.size_functions import SizeFn, asked, check_size_fn, whole

_KNOWN_SHAPES = 256  # batches whose shapes were met, and so need not be read again


def round_up_value(n: int) -> int:
    """A dimension rounded up by at most 1/1024 of itself; below 2048 it stays as it is.

    Batches of nearly the same size then share a plan. Rounding up may cost at most 0.5 % of the predicted peak: even
    where memory is quadratic in two dimensions, four factors of 1 + 1/1024 come to 0.4 %.

    Example:
        >>> round_up_value(2047), round_up_value(2049), round_up_value(100_001)
        (2047, 2050, 100032)
    """
    step = 1 << max(0, n.bit_length() - 11)  # 2 ** floor(log2(n / 1024))
    return -(-n // step) * step


@dataclass(frozen=True)
class BatchSize:
    """The size of one batch: hashable, so a key for plans.

    Attributes:
        dims: (name, value) of every dimension, those that never vary included, in order of occurrence.
        layout: Which of its tracker's sets of names these are; sizes of different layouts are not comparable.
    """

    dims: tuple[tuple[str, int], ...]
    layout: int = 0

    @cached_property
    def _rounded(self) -> BatchSize | None:
        dims = tuple([(name, round_up_value(value)) for name, value in self.dims])
        return None if dims == self.dims else BatchSize(dims, self.layout)

    def rounded_up(self) -> BatchSize:
        """This size with every dimension through `round_up_value`; the same object where that changes nothing.

        Example:
            >>> BatchSize((("batch", 8), ("pixels", 100_001))).rounded_up().dims
            (('batch', 8), ('pixels', 100032))
        """
        return self._rounded or self


UNSIZED = BatchSize(())
"""Stands for the size of a batch that is not known yet."""


class Place(NamedTuple):
    """Where sizes are read, see `engine.inlets`.

    Attributes:
        level: How far inside the model, 0 for the batch itself.
        entries: Whether several calls of the model make a size.
        with_batch: Whether what the batch itself tells is part of sizes that are read further inside.
    """

    level: int
    entries: bool = False
    with_batch: bool = False


class SizeTracker:
    """Reads the size of every batch and learns which dimensions matter.

    Dimensions that were equal in every batch so far go by the first one's name ("batch" stays by itself), and those
    that never changed are not named, once anything has changed. Batches with other names (a key more, an axis less)
    are another layout, watched by itself.

    Example:
        >>> import torch
        >>> tracker = SizeTracker()
        >>> for tokens in (128, 64):
        ...     ids = torch.zeros(8, tokens, dtype=torch.long)
        ...     size = tracker.observe({"input_ids": ids, "attention_mask": ids})
        >>> size.dims
        (('batch', 8), ('input_ids:1', 64), ('attention_mask:1', 64))
        >>> tracker.named(size), tracker.varying
        ({'batch': 8, 'input_ids:1': 64}, ('input_ids:1',))
    """

    def __init__(self, size_fn: SizeFn | None = None) -> None:
        """Start with nothing seen.

        Args:
            size_fn: Reads the size in place of `raw_dims`: from a batch to an int, which is then called "size", or to a
                mapping of names to ints.
        """
        check_size_fn(size_fn)
        self.size_fn = size_fn
        self.place = Place(0)
        self.ignored: set[str] = set()
        """Modules whose inputs follow from no size, see `engine.inlets`."""
        self.labels = Labels()
        """What batches of the same dimensions are told apart by, if by anything."""
        self._kind: tuple[str, str] | None = None  # what sizes are read from: (kind, type of the first one)
        self._layouts: list[Layout] = []
        self._index: dict[frozenset[str], int] = {}
        self._apart = False  # a layout was seen whose tensors do not share their leading axis
        self._by_shapes: dict[Any, BatchSize] = {}

    @property
    def level(self) -> int:
        """How far inside the model sizes are read, 0 for the batch itself."""
        return self.place.level

    @property
    def entries(self) -> bool:
        """Whether several calls of the model make a size."""
        return self.place.entries

    def observe(self, batch: Any) -> BatchSize:
        """The size of this batch, which is remembered.

        Raises:
            SizeError: If no tensor in the batch has dimensions, if `size_fn` raises or returns anything but an int or a
                mapping of names to ints, or if the type of the batch, or of that result, is not what it was before.
        """
        shapes = _shapes(batch) if self.size_fn is None else None
        if shapes is None:
            return self._observe(batch)
        self.labels.clear()
        known = self._by_shapes.get(shapes)
        if known is None:  # another batch of these shapes would teach nothing
            known = self._observe(batch)
            if len(self._by_shapes) >= _KNOWN_SHAPES:
                self._by_shapes.clear()
            self._by_shapes[shapes] = known
        return known

    def _observe(self, batch: Any) -> BatchSize:
        self.labels.observe(batch)
        dims = self._read(batch) if self.size_fn is None else self._ask(batch, self.size_fn)
        return self._see(dims | self.labels.dims)

    def observe_leaves(self, leaves: Sequence[Leaf]) -> BatchSize:
        """The size of these tensors, which is remembered: what the model is called with (see `level`)."""
        return self._see(self._named(leaves) | self.labels.dims)

    def _see(self, dims: dict[str, int]) -> BatchSize:
        index = self._index.get(frozenset(dims))
        if index is None:
            index = self._add(Layout.of(tuple(dims), tuple(dims.values())))
        else:
            layout = self._layouts[index]
            if layout.names != tuple(dims):  # the same keys in another order
                dims = {name: dims[name] for name in layout.names}
            layout.see(tuple(dims.values()))
        return BatchSize(tuple(dims.items()), index)

    def named(self, size: BatchSize) -> dict[str, int]:
        """The dimensions of this size that are worth naming, by what is known now."""
        return {size.dims[i][0]: size.dims[i][1] for i in self._layouts[size.layout].shown} if size.dims else {}

    def look(self, batch: Any) -> BatchSize:
        """The size of a batch, or of named dimensions, without learning from it.

        Args:
            batch: A batch as `observe` takes it, or a mapping of names to ints. Dimensions that a mapping does not
                name follow the named one they always were equal to, or else keep their largest value so far.

        Raises:
            SizeError: For a name that no batch so far had, or a mapping before any batch was seen.
        """
        if not is_size(batch):
            if self.level:
                raise SizeError(
                    f"The size of this batch is read where the model is called, in {list(self.names)}: it shows when "
                    "the step runs. Name these dimensions in place of a batch."
                )
            dims = self._read(batch) if self.size_fn is None else self._ask(batch, self.size_fn)
            dims |= self.labels.dims_of(batch)
            return BatchSize(tuple(dims.items()), self._index.get(frozenset(dims), len(self._layouts)))
        fitting = [index for index, layout in enumerate(self._layouts) if set(batch) <= set(layout.names)]
        if fitting:  # of those that have a label where batches are told apart by one, the first that was seen
            return self._filled(batch, max(fitting, key=lambda index: self.labels.told_in(self._layouts[index].names)))
        known = [list(layout.names) for layout in self._layouts]
        raise SizeError(
            f"Sizes were asked for {sorted(batch)}, but the batches so far had {known or 'not been seen'}. Name "
            "dimensions as the step records do, or give a batch."
        )

    def complete(
        self, leaves: Sequence[Leaf], fill: Callable[[dict[str, int], Collection[str]], dict[str, int]]
    ) -> BatchSize | None:
        """The size of tensors of which only some are there; None where nothing like it was observed.

        Args:
            leaves: Those that are there. For the rest see `look`.
            fill: Dimensions, and the names of those that are there -> the same with what follows from others.
        """
        for each in (names_of(leaves), names_of(leaves, share=False)):
            there = each | self.labels.dims
            fitting = [i for i, layout in enumerate(self._layouts) if there.keys() <= set(layout.names)]
            if fitting:  # the longest: what is not there is still to come
                size = self._filled(there, max(fitting, key=lambda i: len(self._layouts[i].names)))
                return BatchSize(tuple(fill(dict(size.dims), there).items()), size.layout)
        return None

    def holds(self, leaves: Sequence[Leaf], size: BatchSize) -> bool:
        """Whether a size that tensors were completed to is at least as large as those that are there by now."""
        dims = dict(size.dims)
        return any(
            all(value <= dims.get(name, -1) for name, value in names_of(leaves, share).items())
            for share in (True, False)
        )

    def _filled(self, part: Mapping[str, Any], index: int) -> BatchSize:
        layout = self._layouts[index]
        values = list(layout.high)
        place = {name: i for i, name in enumerate(layout.names)}
        for name, value in part.items():
            for i in next(group for group in layout.groups if place[name] in group):
                values[i] = whole(value)
        for name, value in part.items():
            values[place[name]] = whole(value)  # named itself: even if it always was equal to another
        return BatchSize(tuple(zip(layout.names, values, strict=True)), index)

    @property
    def names(self) -> tuple[str, ...]:
        """The dimensions worth naming, of all layouts, in order of occurrence."""
        return _unique(layout.names[i] for layout in self._layouts for i in layout.shown)

    @property
    def varying(self) -> tuple[str, ...]:
        """Those of `names` that had at least two values within a layout."""
        return _unique(layout.names[i] for layout in self._layouts for i in layout.varying())

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as plain data; `size_fn` is not part of it."""
        layouts = [
            {"names": x.names, "low": x.low, "high": x.high, "groups": x.groups, "seen": x.seen} for x in self._layouts
        ]
        read = {**self.place._asdict(), "ignored": sorted(self.ignored), "labels": list(self.labels.told)}
        return copy.deepcopy({**read, "kind": self._kind, "layouts": layouts})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, in place of all that was learned here."""
        self.restart(state["level"], state["entries"], state.get("with_batch", False))
        self.ignored.clear()
        self.ignored.update(state["ignored"])
        self.labels = Labels(state.get("labels", ()))
        self._kind = state["kind"] and tuple(state["kind"])  # JSON makes lists of tuples
        for saved in copy.deepcopy(state["layouts"]):
            layout = Layout(tuple(saved["names"]), saved["low"], saved["high"], saved["groups"])
            layout.seen = saved.get("seen", 0)
            layout.update_shown()
            self._add(layout)

    def restart(self, level: int, entries: bool = False, with_batch: bool = False) -> None:
        """Forget all sizes: from now on they are read elsewhere, and are not comparable."""
        self.place, self._kind = Place(level, entries, with_batch), None
        self._layouts, self._index, self._apart, self._by_shapes = [], {}, False, {}

    def _add(self, layout: Layout) -> int:
        self._index[frozenset(layout.names)] = len(self._layouts)
        self._layouts.append(layout)
        self._by_shapes.clear()  # names depend on what layouts there are
        self._apart = self._apart or BATCH not in layout.names
        return len(self._layouts) - 1

    def _read(self, batch: Any) -> dict[str, int]:
        leaves = sized_leaves(batch)
        self._same_kind(_kind(batch), batch, "batch")
        return self._named(leaves)

    def _named(self, leaves: Sequence[Leaf]) -> dict[str, int]:
        dims = names_of(leaves)
        if self._apart and BATCH in dims:
            # Unrelated leading axes that happen to agree this once are no shared axis and no new layout. But where they
            # mostly agree, and did not once (one of two loaders had a shorter last batch), they go on to be shared.
            apart = names_of(leaves, share=False)
            index, shared = (self._index.get(frozenset(each | self.labels.dims)) for each in (apart, dims))
            if index is not None and (shared is None or self._layouts[shared].seen <= self._layouts[index].seen):
                return apart
        return dims

    def _ask(self, batch: Any, size_fn: SizeFn) -> dict[str, int]:
        answer, dims = asked(size_fn, batch)
        self._same_kind("mapping" if isinstance(answer, Mapping) else "int", answer, "result of size_fn")
        return dims

    def _same_kind(self, kind: str, value: Any, what: str) -> None:
        if self._kind is None:
            self._kind = (kind, type(value).__name__)
        elif self._kind[0] != kind:
            raise SizeError(
                f"The {what} is a {type(value).__name__}, but it was a {self._kind[1]} before. Give every batch the "
                "same structure, or pass a size_fn that returns the same type for all of them."
            )


def is_size(value: Any) -> bool:
    """Whether something is named dimensions rather than a batch.

    Example:
        >>> is_size({"batch": 8, "ids:1": 52}), is_size({"ids": [1, 2]})
        (True, False)
    """
    return isinstance(value, Mapping) and bool(value) and all(whole(each) >= 0 for each in value.values())


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _kind(batch: Any) -> str:
    if isinstance(batch, (dict, Mapping)):
        return "mapping"
    if isinstance(batch, (tuple, list)):
        return "sequence"
    return "tensor" if isinstance(batch, Tensor) else "object"


def _shapes(batch: Any) -> Any:
    """Tells batches of different sizes apart where they are a tensor or tensors side by side; None for any other."""
    kind = type(batch)
    if kind is Tensor:
        return None if batch.is_nested else batch.shape
    if kind is dict:
        names, tensors = tuple(batch), batch.values()
    elif kind is list or kind is tuple:
        names, tensors = (kind,), batch
    else:
        return None
    shapes = tuple([tensor.shape for tensor in tensors if type(tensor) is Tensor and not tensor.is_nested])
    return (names, shapes) if len(shapes) == len(batch) > 0 else None
