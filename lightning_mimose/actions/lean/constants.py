"""What recipes have to know and autograd's nodes do not keep: numbers, and whether a value was changed unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_mimose.actions.lean.attention import Masked, argument
from lightning_mimose.actions.lean.handles import base_of
from lightning_mimose.actions.lean.storages import Storages


class Constants(TorchFunctionMode):
    """Sees what operations are called with and their nodes do not keep.

    Attributes:
        seen: Node -> the numbers, by name.
        dropout: While a dropout runs, the probability that it was called with.
        masked: While attention runs that masks its scores, by what.
        versions: (node, output) -> the version that the tensor has by autograd's own doing: in-place operations, also
            that of `linear` on its own result.
        changed: (node, output) whose tensor was another than the node's result when an operation was given it:
            written under `no_grad`, through `detach()` or a view, handed out by `.data`, or replaced by way of it.

    Args:
        arguments: Storages of what the unit was given. Tensors of its own would only live for being noted.
    """

    def __init__(self, arguments: Storages) -> None:
        super().__init__()
        self._arguments = arguments
        self.seen: dict[Any, dict[str, Any]] = {}
        self.dropout: float | None = None
        self.masked: Masked | None = None
        self.versions: dict[Place, int] = {}
        self.changed: set[Place] = set()
        self._running: list[tuple[torch.Tensor, int, Any]] = []
        self._attends = False
        """Whether torch's own multi-head attention runs, whose operations are not seen."""

    def forget(self) -> None:
        """Let go of every node."""
        self.seen.clear()
        self.versions.clear()
        self.changed.clear()

    def begins_with(self, given: Iterable[Any]) -> None:
        """Take what the unit was given as it is now, whatever was written on it before."""
        for tensor in given:
            if isinstance(tensor, torch.Tensor):
                base = base_of(tensor)
                if base._version and base.grad_fn is not None:
                    self.versions[base.grad_fn, base.output_nr] = base._version

    def is_result(self, base: torch.Tensor) -> bool:
        """Whether a tensor is what its node has made, and no one has written it since."""
        place = base.grad_fn, base.output_nr
        if place in self.changed:
            return False
        if base._version == self.versions.get(place, 0) or (self._attends and _is_linear(base)):
            return True
        # An in-place operation that is still running saves its result.
        return any(
            other is base
            and node is not place[0]
            and base._version == version + 1
            and (node, base.output_nr) not in self.changed
            for other, version, node in self._running
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS and not _has_written(args, kwargs):  # most of what a block does
            note = _NOTES.get(func)
            return func(*args, **kwargs) if note is None else note(self, func, args, kwargs)
        hands_out = False
        if getattr(func, "__name__", "") in _ACCESSES:
            hands_out = func in _DATA
            if not hands_out:
                # Shapes, dtypes and the like, the greater part of all calls. Autograd also sets hooks in the midst of
                # an in-place function on a view, and would wait for itself if asked for that view's `grad_fn` there.
                return func(*args, **kwargs)
        return self._looked_at(func, args, kwargs, hands_out=hands_out)

    def _looked_at(self, func: Any, args: Any, kwargs: Any, *, hands_out: bool) -> Any:
        """Call a function, and see what it is given and what it writes."""
        before = []
        for tensor in _tensors(args, kwargs):
            base = base_of(tensor)  # of the view itself autograd may refuse to tell, if it was made under `no_grad`
            node = base.grad_fn
            if node is None:  # a leaf's: nothing is rebuilt
                continue
            version = base._version
            # What nobody has ever written is its node's result; nearly all tensors are.
            if hands_out or (version and not self.is_result(base)):
                self.changed.add((node, base.output_nr))
            before.append((base, version, node))
        running, self._running = self._running, before
        try:
            note = _NOTES.get(func)
            out = func(*args, **kwargs) if note is None else note(self, func, args, kwargs)
        finally:
            self._running = running
        for base, version, node in before:
            if base._version != version and base.grad_fn is not node and base.grad_fn is not None:
                self.versions[base.grad_fn, base.output_nr] = base._version
                # What was no more the result of its own node is none of the next one's.
                if (node, base.output_nr) in self.changed:
                    self.changed.add((base.grad_fn, base.output_nr))
        return out

    def _dropout(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, position, default = _DROPOUTS[func]
        before = self.dropout, self.masked, self._attends
        self.dropout, self.masked = argument(args, kwargs, position, name, default), Masked.of(func, args, kwargs)
        self._attends = func is functional.multi_head_attention_forward
        try:
            return func(*args, **kwargs)
        finally:
            self.dropout, self.masked, self._attends = before

    def _sum(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if len(args) > 1 and isinstance(args[1], (int, float)):
            self._note(out, operand=args[1], swapped=_SUMS[func])
        elif func in _ADDITIONS and len(args) > 1 and isinstance(args[1], torch.Tensor):
            without = [i for i in (0, 1) if isinstance(args[i], torch.Tensor) and not args[i].requires_grad]
            if len(without) == 1 and self._arguments.has_that_of(args[without[0]]):
                self._note(out, operand=args[without[0]], swapped=without == [0])  # a mask, which the node knows not
        return out

    def _linear(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        # Of what other functions write on their results nobody can tell whether autograd knows of it.
        if isinstance(out, torch.Tensor) and out.requires_grad and _is_linear(out):
            self.versions[out.grad_fn, out.output_nr] = 1
        return out

    def _norm(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        self._note(out, eps=argument(args, kwargs, 4, "eps", 1e-5))
        return out

    def _batch_norm(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        weight, bias = (argument(args, kwargs, place, name, None) for place, name in _AFFINE[func])
        if isinstance(out, torch.Tensor):
            self._note(base_of(out), affine=weight is not None or bias is not None)
        return out

    def _threshold(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        self._note(out, value=argument(args, kwargs, 2, "value", None))
        return out

    def _note(self, out: Any, **constants: Any) -> None:
        if isinstance(out, torch.Tensor) and out.grad_fn is not None:
            self.seen[out.grad_fn] = constants


def _is_linear(out: torch.Tensor) -> bool:
    """Whether a tensor is as `linear` makes it of an input that is not contiguous: it adds the bias in place."""
    if out._version != 1 or out._is_view():
        return False
    node = out.grad_fn
    return node is not None and node.name() == "AddBackward0"


def _has_written(args: Any, kwargs: Any) -> bool:
    """Whether any argument with gradients was ever written, as its views count it, too, or is about to be.

    Every update writes parameters; nothing has made them, so nothing of them is changed.
    """
    if kwargs:
        if "out" in kwargs or kwargs.get("inplace"):
            return True
        args = (*args, *kwargs.values())
    for value in args:  # no generator: this is asked at every call
        if type(value) is torch.nn.Parameter or not isinstance(value, torch.Tensor):
            continue
        if value.requires_grad and value._version:  # what is made in inference mode has none
            return True
    return False


_ADDITIONS = {torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__}


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += [each for each in value if isinstance(each, torch.Tensor)]
    return found


Place = tuple[Any, int]
_ACCESSES = {"__get__", "__set__"}
_DATA = {torch.Tensor.data.__get__, torch.Tensor.data.__set__}  # type: ignore[attr-defined]
_DROPOUTS: dict[Any, tuple[str, int, float]] = {
    functional.dropout: ("p", 1, 0.5),
    torch.dropout: ("p", 1, 0.5),
    functional.scaled_dot_product_attention: ("dropout_p", 4, 0.0),
    functional.multi_head_attention_forward: ("dropout_p", 10, 0.0),
}
_NORMS = {functional.layer_norm, torch.layer_norm, functional.group_norm, torch.group_norm}
_AFFINE: dict[Any, tuple[tuple[int, str], tuple[int, str]]] = {
    functional.batch_norm: ((3, "weight"), (4, "bias")),
    functional.instance_norm: ((3, "weight"), (4, "bias")),
    torch.batch_norm: ((1, "weight"), (2, "bias")),
    torch.instance_norm: ((1, "weight"), (2, "bias")),
}
_SUMS = {
    torch.add: False,
    torch.Tensor.add: False,
    torch.Tensor.__add__: False,
    torch.Tensor.__radd__: True,
    torch.sub: False,
    torch.Tensor.sub: False,
    torch.Tensor.__sub__: False,
    torch.rsub: False,
    torch.Tensor.__rsub__: False,
}
_READING = (
    *("add", "sub", "mul", "div", "true_divide", "neg", "matmul", "bmm", "baddbmm", "pow", "square", "sqrt", "rsqrt"),
    *("exp", "log", "abs", "tanh", "sigmoid", "softmax", "log_softmax", "mean", "sum", "where", "masked_fill", "clone"),
    *("reshape", "transpose", "permute", "flatten", "unsqueeze", "squeeze", "chunk", "split"),
)
"""Functions of torch and methods of tensors that write nothing on what they are given."""
_METHODS = (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__matmul__", "__neg__"),
    *("__pow__", "__getitem__", "size", "dim", "numel", "is_contiguous", "stride"),
    *("view", "contiguous", "expand", "unflatten", "repeat", "to", "float", "half", "bfloat16", "type_as"),
)
_FUNCTIONAL = (
    *("linear", "layer_norm", "gelu", "scaled_dot_product_attention", "softmax", "conv1d", "conv2d", "conv3d"),
    *("dropout", "relu", "silu"),
)
_READS = frozenset(
    (
        *(getattr(each, name) for each in (torch, torch.Tensor) for name in _READING if hasattr(each, name)),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        *(getattr(functional, name) for name in _FUNCTIONAL),
    )
)
"""Functions that write nothing on tensors with gradients, unless they are told to (`out`, and `inplace`, which
`functional` always hands on by name), and take no lists of them."""
_NOTES: dict[Any, Callable[[Constants, Any, Any, Any], Any]] = {
    **dict.fromkeys(_DROPOUTS, Constants._dropout),
    **dict.fromkeys(_SUMS, Constants._sum),
    **dict.fromkeys(_NORMS, Constants._norm),
    **dict.fromkeys(_AFFINE, Constants._batch_norm),
    **dict.fromkeys((functional.threshold, torch.threshold), Constants._threshold),
    functional.linear: Constants._linear,
}
"""Functions that something is noted of, and how they are then called."""
