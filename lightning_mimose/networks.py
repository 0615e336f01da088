"""Which of a model's units belong to networks that stand beside one another: a student and its teachers, towers.

Blocks of one network run one after the other, and what they take adds up. Networks that stand side by side need not:
a teacher runs without gradients, whether or not its parameters are frozen, and nothing of it is there in backward.
Which one is trained cannot be seen in a module tree, so none of them may decide how another one is cut.

What can be seen is which parts are given what the model itself is given. Blocks in a chain are given what the layers
before them make, and only the first of a chain is given what comes from outside. Where that does not tell, what is
frozen as a whole stands apart from what is trained: that may change in mid-run, and is right for either then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from inspect import getattr_static

from torch import nn

from lightning_mimose.sharding import own_class

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
# What layers of torch.nn, and most others, call the number of features that they take, and that they give.
_TAKES = ("in_features", "in_channels", "input_size", "num_features", "num_channels")
_GIVES = ("out_features", "out_channels", "hidden_size", "embedding_dim", "num_features", "num_channels")
# A layer that is given numbers of words.
_WORDS = -1


def networks(model: nn.Module, units: Collection[str], within: str = "") -> list[set[str]]:
    """Units, apart by the networks they belong to; a unit that holds several networks belongs to none.

    Networks in one `nn.ModuleList` are taken for alike (an ensemble, several teachers), and stay together but for those
    that are frozen.

    Args:
        model: Any module.
        units: Qualified names of submodules.
        within: What comes before the model's own names in them.

    Example:
        >>> from torch import nn
        >>> net = lambda: nn.Sequential(nn.Linear(3, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2))
        >>> networks(nn.ModuleDict({"student": net(), "teacher": net()}), ["student.1", "teacher.1"])
        [{'student.1'}, {'teacher.1'}]
        >>> len(networks(nn.Sequential(net(), net()), ["0.1", "1.1"]))
        1
    """
    parts = _parts(model, within, units)
    while len(parts) == 1 and len(parts[0]) == 1:
        ((name, model),) = parts[0].items()
        within = f"{name}."
        parts = _parts(model, within, units)
    if getattr_static(own_class(model), "forward") is nn.Sequential.forward:
        return [set(units)]
    groups: list[set[str]] = []
    for alike in _side_by_side(model, parts):
        if len(alike) == 1:
            ((name, network),) = alike.items()
            groups += networks(network, _inside(alike, units), f"{name}.")
        else:
            groups.append(_inside(alike, units))
    others = {unit for unit in units if not within.startswith(f"{unit}.")}.difference(*groups)
    still = [part for part in parts if all(map(_is_frozen, part.values()))]
    frozen = {unit for part in still if len(still) < len(parts) for unit in _inside(part, others)}
    groups += [group for group in (frozen, others - frozen) if group]
    return groups if len(groups) > 1 else [set(units)]


def _inside(names: Collection[str], units: Collection[str]) -> set[str]:
    return {unit for unit in units if any(unit == name or unit.startswith(f"{name}.") for name in names)}


def _parts(model: nn.Module, within: str, units: Collection[str]) -> list[dict[str, nn.Module]]:
    """What a module consists of, as far as it has parameters, and is a unit or has some in it; a list is one part."""
    named = {f"{within}{name}": child for name, child in model.named_children()}
    parts: list[dict[str, nn.Module]] = [{}] if isinstance(model, nn.ModuleList) else []
    for name, child in named.items():
        if not _inside([name], units) or not _has_parameters(child):
            continue
        if isinstance(model, nn.ModuleList):
            parts[0][name] = child
        elif isinstance(child, CONTAINERS):
            parts += _parts(child, f"{name}.", units)
        else:
            parts.append({name: child})
    return [part for part in parts if part]


def _side_by_side(model: nn.Module, parts: list[dict[str, nn.Module]]) -> list[dict[str, nn.Module]]:
    """The parts that are given what the model is given, where there are several; frozen ones apart."""
    given = next((_takes(layer) for layer in _layers(model)), None)
    found: list[dict[str, nn.Module]] = []
    for part in parts:
        if given is not None and all(_begins(member, given) for member in part.values()):
            frozen = {name: member for name, member in part.items() if _is_frozen(member)}
            trained = {name: member for name, member in part.items() if name not in frozen}
            found += [alike for alike in (frozen, trained) if alike]
    return found if len(found) > 1 else []


def _is_frozen(module: nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in module.parameters())


def _begins(part: nn.Module, given: int) -> bool:
    """Whether a part can be the beginning of a network that is given so many features, and no block further on in it.

    A block in a chain gives what it takes, and takes it in other layers, too: in its norms, in what a residual
    connection leads around.
    """
    layers = list(_layers(part))
    if not layers or _takes(layers[0]) != given:
        return False
    return given == _WORDS or _gives(layers[-1]) != given or given not in map(_takes, layers[1:])


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Elementary layers of which is known how many features they take, as they are registered."""
    for layer in module.modules():
        if not any(True for _ in layer.children()) and _takes(layer) is not None and _has_parameters(layer):
            yield layer


def _takes(layer: nn.Module) -> int | None:
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        return _WORDS
    return _count(layer, _TAKES)


def _gives(layer: nn.Module) -> int | None:
    return _count(layer, _GIVES)


def _count(layer: nn.Module, names: tuple[str, ...]) -> int | None:
    """The first of some attributes that a layer has; a layer norm counts by its last axis."""
    shape = getattr(layer, "normalized_shape", None)
    counts = [getattr(layer, name, None) for name in names] + [shape[-1] if shape else None]
    return next((count for count in counts if isinstance(count, int)), None)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
