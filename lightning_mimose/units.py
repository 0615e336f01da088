"""Which submodules can be planned, and which of them shelter a step about which nothing is known yet.

A unit is a submodule whose forward can be recomputed as one region. Candidates are nested (a block and its
parts); a plan never acts on a unit and its ancestor at once. The *shelter* is one cut through the tree of
candidates that is recomputed while nothing is known. It balances the number of regions (each retains its
inputs until backward) against the size of the largest one (its working set exists at once in backward): the
trade behind Chen et al.'s sqrt(n) segments (arXiv 1604.06174), on the module tree instead of a chain. Networks
that stand side by side (a student and its teachers) are each cut as if there were no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import getattr_static
from typing import Any

import torch
from torch import nn

from lightning_mimose.errors import UnitsError
from lightning_mimose.networks import CONTAINERS, networks
from lightning_mimose.sharding import own_class

# Leaves of torch.nn whose forward holds far more than their inputs.
_HEAVY_LEAVES = (nn.RNNBase, nn.MultiheadAttention)
# What `torch.compile(module)` calls the module it wraps.
_COMPILED = "_orig_mod"


@dataclass(frozen=True)
class Unit:
    """A submodule that can be planned.

    Attributes:
        name: Qualified name in the model.
        module: The module itself.
        parent: Index of the nearest enclosing unit, -1 at the top.
        weight: Number of elementary layers inside; a stand-in for size before anything is measured.
        shelter: Whether the unit is recomputed while nothing is known.
    """

    name: str
    module: nn.Module
    parent: int
    weight: int
    shelter: bool


def find_units(model: nn.Module, patterns: Sequence[str] | None = None, *, closed: bool = True) -> tuple[Unit, ...]:
    """Find the units of a model, in the order of registration, parents before their parts.

    Args:
        model: Any module.
        patterns: fnmatch patterns on qualified names, or class names; None finds the units by itself.
        closed: Whether compiled and scripted modules are units at most as a whole: nothing reaches their parts.

    Raises:
        UnitsError: A pattern that matches nothing, no pattern at all, or a model in which nothing can be planned, as
            one that was scripted or traced as a whole.

    Example:
        >>> from torch import nn
        >>> block = lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        >>> model = nn.Sequential(block(), block(), block(), nn.Linear(8, 2))
        >>> [unit.name for unit in find_units(model) if unit.shelter]
        ['0', '1', '2']
    """
    if isinstance(model, torch.jit.ScriptModule):
        kind = getattr(model, "original_name", type(model).__name__)
        raise UnitsError(
            f"{kind} was scripted or traced as a whole: nothing reaches the blocks inside of it, so nothing can be "
            "planned. Train the model itself, and script it afterwards; or script or trace only parts of its blocks."
        )
    modules = [(name, module) for name, module in model.named_modules() if name]
    if closed:
        whole = tuple(f"{name}." for name, module in modules if _is_closed(module))
        modules = [(name, module) for name, module in modules if not name.startswith(whole)]
    if patterns is None:
        wanted = {name for name, module in modules if _is_candidate(module)}
    else:
        wanted = _matching(modules, patterns)
    weights = {name: _weight(module) for name, module in modules if name in wanted}
    parents = {name: _nearest(name, wanted) for name in weights}
    around_one = {part for part in model.modules() if _is_around_one(part)}
    # Blocks of one layer count one more, for what their forwards compute beside it: by layers alone they would seem to
    # hold what they are given and no more, so that all of them in one region cost as much as each in its own.
    bulks = {
        name: weights[name] + sum(part in around_one for part in module.modules())
        for name, module in modules
        if name in wanted
    }
    loops = _loops(modules, parents)
    shelter = {
        name
        for network in networks(model, weights)
        for name in _balanced_cut({unit: bulks[unit] for unit in weights if unit in network}, parents, loops)
    }
    if patterns is None:
        # Above the shelter a region would hold several blocks at once; it never lowers the peak where it counts.
        above = {ancestor for name in shelter for ancestor in _ancestors(name, parents)}
        weights = {name: weight for name, weight in weights.items() if name not in above}
        parents = {name: _nearest(name, set(weights)) for name in weights}
    if not weights:
        raise UnitsError(
            f"Found nothing to plan in {type(model).__name__}: it has {len(modules)} submodules, none of which is "
            "a block with layers of its own. Put the layers into blocks (nn.Sequential, or modules with a forward), "
            'or name them: units=["encoder.layer.*"] or units=["MyBlock"].'
        )
    index = {name: i for i, name in enumerate(weights)}
    by_name = dict(modules)
    return tuple(
        Unit(name, by_name[name], index.get(parents[name] or "", -1), weights[name], name in shelter)
        for name in weights
    )


def whole_graphs(model: nn.Module, units: Sequence[Unit]) -> dict[str, list[str]]:
    """Units that are one compiled graph of several blocks, with the blocks that nothing can plan for it."""
    compiled = [unit.name for unit in units if is_compiled(unit.module)]
    blocks = [unit.name for unit in find_units(model, closed=False) if unit.shelter] if compiled else []
    inside = {name: [block for block in blocks if block.startswith(f"{name}.")] for name in compiled}
    return {name: blocks for name, blocks in inside.items() if len(blocks) > 1}


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was given to `torch.compile`, or compiled in place by `module.compile()`."""
    return _COMPILED in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def runs_compiled(model: nn.Module) -> bool:
    """Whether a module of a model is compiled, or has an attribute that is a function for which code was generated."""
    parts = list(model.modules())
    return any(is_compiled(part) or any(map(_is_generated, vars(part).values())) for part in parts) or any(
        map(_calls_generated, {type(part) for part in parts})
    )


def _calls_generated(kind: type) -> bool:
    """Whether a method of a class is compiled, or its forward names a compiled function."""
    own = [value for base in kind.__mro__ if base is not nn.Module for value in vars(base).values()]
    return any(map(_is_generated, [*_named_by_forward(kind), *own]))


def _named_by_forward(kind: Any) -> list[object]:
    """What the forward of a class of modules names, of what is global there."""
    # Looked up without binding: the descriptor of a ScriptModule's class refuses to be read.
    forward = getattr_static(kind, "forward", None)
    code, known = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    return [known.get(name) for name in code.co_names] if code is not None else []


def _is_generated(value: object) -> bool:
    config = getattr(value, "get_compiler_config", None) if callable(value) else None
    return config is not None and config() is not None  # None for backends that call torch's operators


def runs_torchscript(module: nn.Module) -> bool:
    """Whether a module or a part of it was scripted, or calls a scripted function that its forward or it names.

    TorchScript watches its first runs and computes with other kernels from then on, so that one run more changes bits.
    """
    return any(_names_script(part) for part in module.modules())


def _names_script(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return True
    values = [*_named_by_forward(type(module)), *vars(module).values()]
    return any(isinstance(value, torch.jit.ScriptFunction) for value in values)


def _is_closed(module: nn.Module) -> bool:
    return is_compiled(module) or isinstance(module, torch.jit.ScriptModule)


def _uncompiled(module: nn.Module) -> nn.Module:
    return getattr(module, _COMPILED) if _COMPILED in module._modules else module


def _is_candidate(module: nn.Module) -> bool:
    """Whether a module may hold more than it is given: not a container, not a single elementary layer."""
    module = _uncompiled(module)
    if isinstance(module, CONTAINERS) or getattr_static(own_class(module), "forward") is nn.Module.forward:
        return False
    if isinstance(module, _HEAVY_LEAVES) or any(True for _ in module.children()):
        return True
    # A leaf written by somebody else (a custom activation or norm) computes with functions we cannot see.
    return not own_class(module).__module__.startswith("torch.nn.")


def _matching(modules: Sequence[tuple[str, nn.Module]], patterns: Sequence[str]) -> set[str]:
    wanted: set[str] = set()
    listed = isinstance(patterns, Collection) and not isinstance(patterns, str)
    if not listed or not all(isinstance(pattern, str) for pattern in patterns):
        names = [patterns] if isinstance(patterns, str) else ["encoder.layer.*"]
        raise UnitsError(f"units={patterns!r} was asked for; it is a list of patterns, as units={names!r}.")
    if not patterns:
        raise UnitsError(
            f"units={patterns!r} was asked for, which names nothing to plan. Leave units out and they are found, or "
            'name some, as units=["encoder.layer.*"] or units=["MyBlock"].'
        )
    for pattern in patterns:
        found = {
            name
            for name, module in modules
            if (fnmatchcase(name, pattern) or own_class(_uncompiled(module)).__name__ == pattern)
            and not isinstance(module, CONTAINERS)
        }
        if not found:
            classes = sorted({own_class(module).__name__ for _, module in modules})
            names = [name for name, _ in modules]
            raise UnitsError(
                f"The unit pattern {pattern!r} matches none of the {len(modules)} submodules. Names look like "
                f"{', '.join(map(repr, names[:: max(1, len(names) // 5)][:5]))}; classes are {', '.join(classes[:12])}."
            )
        wanted |= found
    return wanted


def _weight(module: nn.Module) -> int:
    """Elementary layers inside, counting a hand-written leaf by its parameters."""
    leaves = (child for child in module.modules() if not any(True for _ in child.children()))
    return sum(max(1, sum(1 for _ in leaf.parameters(recurse=False)) // 2) for leaf in leaves)


def _is_around_one(module: nn.Module) -> bool:
    """Whether somebody else's forward computes with one elementary layer, or with matrices of its own."""
    if not _is_candidate(module) or isinstance(module, (*_HEAVY_LEAVES, nn.Sequential)):
        return False
    children = list(module.children())
    if not children:
        return any(parameter.dim() > 1 for parameter in module.parameters())
    return len(children) == 1 and not any(True for _ in children[0].children()) and not _is_candidate(children[0])


def _nearest(name: str, wanted: set[str]) -> str | None:
    """The longest proper dotted prefix of `name` that is itself wanted."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in wanted:
            return name
    return None


def _ancestors(name: str, parents: dict[str, str | None]) -> Iterator[str]:
    parent = parents[name]
    while parent is not None:
        yield parent
        parent = parents[parent]


def _loops(modules: Sequence[tuple[str, nn.Module]], parents: dict[str, str | None]) -> set[str]:
    """Candidates that hold a list of one block and no other: they may call it many times, as ALBERT's encoder does.

    Recomputing such a unit as one region would hold every one of those calls at once; the block is the region.
    """
    by_name = dict(modules)
    composite = [name for name in parents if any(True for _ in by_name[name].children())]
    loops: set[str] = set()
    for name in composite:
        around, _, _ = name.rpartition(".")
        holder, owner = by_name.get(around), parents[name]
        if isinstance(holder, CONTAINERS) and len(list(holder.children())) == 1 and owner is not None:
            others = [other for other in composite if other.startswith(owner + ".") and other != name]
            if all(other.startswith(name + ".") for other in others):
                loops.add(owner)
    return loops


def _balanced_cut(weights: dict[str, int], parents: dict[str, str | None], loops: set[str]) -> set[str]:
    """The cut that minimises regions + layers of the largest region + layers in none, over all limits on a region's.

    Every candidate is in the cut, inside a unit of it, or above it.
    """
    with_parts = {parent for parent in parents.values() if parent is not None}
    best: set[str] = set()
    best_cost: float = float("inf")
    for limit in sorted(set(weights.values())):
        fits = {name for name, weight in weights.items() if weight <= limit or name not in with_parts} - loops
        cut = {name for name in fits if not any(a in fits for a in _ancestors(name, parents))}
        # How many layers there are in all changes nothing.
        cost = len(cut) + max(weights[name] for name in cut) - sum(weights[name] for name in cut)
        if cost <= best_cost:
            best, best_cost = cut, cost
    return best


def related(one: str, other: str) -> bool:
    """Whether two qualified names are the same, or one is inside the other."""
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


def fingerprint(model: nn.Module, device: torch.device, precision: str, units: Sequence[Unit]) -> str:
    """Identifies what memory depends on: parameters and which are trained, the units, precision and device."""
    digest = hashlib.sha256(precision.encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}\n".encode())
    digest.update("\n".join(unit.name for unit in units).encode())
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{type(model).__qualname__}/{kind}/{digest.hexdigest()[:16]}"
