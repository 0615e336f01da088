"""What `lightning-mimose explain` and `bench` work on: a model by name, and batches for it of any size."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_mimose.dims import raw_dims
from lightning_mimose.errors import MimoseError

MakeBatch = Callable[[Mapping[str, int]], Any]
"""From named dimensions to a batch."""
_METHODS = ("make_batch", "example_batch")


def load(spec: str) -> Any:
    """The object that `package.module:attribute` names; the working directory is importable.

    Raises:
        MimoseError: There is no such module or attribute, or importing it failed.

    Example:
        >>> load("collections:abc.Mapping").__name__
        'Mapping'
    """
    module_name, colon, path = spec.partition(":")
    if not colon or not module_name or not path or "/" in module_name:
        raise MimoseError(
            f"{spec!r} names nothing. Write package.module:Name, for example my_project.models:Classifier, and no path."
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
        for name in path.split("."):
            found = getattr(found, name)
    except (Exception, SystemExit) as error:
        raise MimoseError(f"{spec!r} could not be imported ({say(error)}).") from error
    return found


def build(spec: str, init: Mapping[str, Any]) -> nn.Module:
    """The model that a class, a function or an instance stands for.

    A model class of `transformers` is built from its configuration's defaults, `init` naming what differs. One of a
    LightningModule configures its model, as in a Trainer.

    Args:
        spec: `package.module:attribute`.
        init: Keyword arguments for it.

    Raises:
        MimoseError: It cannot be built, or is no `nn.Module`.
    """
    target = load(spec)
    if isinstance(target, nn.Module):
        if init:
            raise MimoseError(f"{spec!r} is a model already, so --init {', '.join(init)} has no effect. Leave it out.")
        return target
    if not callable(target):
        raise MimoseError(f"{spec!r} is a {type(target).__name__}; a model, its class, or a function is needed.")
    configuration = getattr(target, "config_class", None) if inspect.isclass(target) else None
    try:
        model = target(**init) if configuration is None else target(_complete(configuration(**init)))
        if inspect.isclass(target) and isinstance(model, LightningModule):  # what a function returns may be loaded
            _run_hook(model.configure_model)
    except Exception as error:
        raise MimoseError(
            f"{spec!r} could not be built ({say(error)}). Give its arguments with --init name=value, or name a "
            "function without arguments that returns the model."
        ) from error
    if not isinstance(model, nn.Module):
        raise MimoseError(f"{spec!r} gave a {type(model).__name__}; an nn.Module is needed.")
    return model


def _run_hook(hook: Callable[..., object], *given: Any) -> None:
    """Call a hook as a Trainer would; one that asks for the Trainer may do without."""
    try:
        hook(*given)
    except RuntimeError as error:
        if "not attached to a `Trainer`" not in str(error):
            raise


def _complete(config: Any) -> Any:
    """A configuration with what shifting a decoder's labels needs; a checkpoint's would have it."""
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def batch_maker(model: nn.Module, model_spec: str, batch_spec: str | None) -> MakeBatch:
    """How to make batches for a model.

    What is told the dimensions comes first, for it makes the very size that was asked for: the function that
    `batch_spec` names, then `make_batch` or `example_batch`, a method of the model or a function of its module; all are
    called with the dimensions as keyword arguments. Else a batch is taken and stretched: from `train_dataloader()`,
    or `example_input_array`, or, for models of `transformers`, made up from the configuration.

    Raises:
        MimoseError: There is none of these.
    """
    module = sys.modules.get(model_spec.partition(":")[0])
    makers = [load(batch_spec)] if batch_spec is not None else []
    makers += [getattr(place, name, None) for place in (model, module) for name in _METHODS]
    for maker in makers:
        if callable(maker):
            return _calling(maker)
    taken = _taken(model)
    if not taken and hasattr(model, "main_input_name") and hasattr(model, "config"):
        taken = [_made_up(model)]
    if not taken:
        raise MimoseError(
            f"No batch for {type(model).__name__} was found. Name a function that makes one with --batch "
            "package.module:function (it gets the dimensions of --size as keyword arguments), or give the model a "
            "method make_batch(**dims), a train_dataloader() or an example_input_array."
        )
    return lambda dims: stretch(taken, dims)


def _calling(maker: Callable[..., Any]) -> MakeBatch:
    def make(dims: Mapping[str, int]) -> Any:
        try:
            return maker(**dims)
        except Exception as error:
            name = getattr(maker, "__name__", type(maker).__name__)
            raise MimoseError(
                f"{name}({', '.join(f'{k}={v}' for k, v in dims.items())}) failed ({say(error)})."
            ) from error

    return make


def _taken(model: Any) -> list[Any]:
    """A few batches of the model's own."""
    taken = loader_batches(model, 3)
    example = getattr(model, "example_input_array", None)
    return taken or ([] if example is None else [example])


def loader_batches(model: Any, count: int) -> list[Any]:
    """The first batches of a LightningModule's own `train_dataloader()`, if it has one, as a Trainer would take them.

    Raises:
        MimoseError: The method failed.
    """
    loader = getattr(type(model), "train_dataloader", None)
    base = next(
        (kind for kind in type(model).__mro__ if kind.__module__.startswith(("lightning.", "pytorch_lightning."))), None
    )
    if base is None or loader is None or loader is getattr(base, "train_dataloader", None):
        return []
    try:
        _run_hook(model.prepare_data)
        _run_hook(model.setup, "fit")
        loaders = model.train_dataloader()
        several = isinstance(loaders, (list, tuple)) and all(isinstance(e, DataLoader) for e in tree_leaves(loaders))
        if several or isinstance(loaders, dict):  # else it may be a list of batches
            loaders = CombinedLoader(loaders, "max_size_cycle")
        taken = list(islice(loaders, count))
        return [batch for batch, _, _ in taken] if isinstance(loaders, CombinedLoader) else taken
    except Exception as error:
        raise MimoseError(f"{type(model).__name__}.train_dataloader() gave no batch ({say(error)}).") from error


def _made_up(model: Any) -> dict[str, torch.Tensor]:
    """A batch for a model of `transformers` from its configuration; every dimension that may vary has its own value."""
    config, kind = model.config, type(model).__name__
    labels = torch.arange(2) % max(1, int(getattr(config, "num_labels", 2)))
    if model.main_input_name == "pixel_values":
        image = getattr(config, "image_size", None) or 64
        height, width = (image, image) if isinstance(image, int) else image
        return {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), height, width), "labels": labels}
    if model.main_input_name != "input_ids":
        raise MimoseError(f"No batch can be made up for {kind}, whose input is {model.main_input_name!r}. Use --batch.")
    ids = torch.arange(2 * 16).reshape(2, 16) % int(config.vocab_size)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(config, "is_encoder_decoder", False):
        return {**batch, "labels": ids[:, :12].clone()}
    if "SequenceClassification" in kind:
        return {**batch, "labels": labels}
    if "QuestionAnswering" in kind:
        return {
            **batch,
            "start_positions": torch.zeros(2, dtype=torch.long),
            "end_positions": torch.ones(2, dtype=torch.long),
        }
    if "TokenClassification" in kind:
        return {**batch, "labels": ids % int(config.num_labels)}
    return {**batch, "labels": ids.clone()}


# --- stretching -----------------------------------------------------------------------------------------------


def stretch(batches: Sequence[Any], dims: Mapping[str, int]) -> Any:
    """The first batch, repeated or cut along its axes to named dimensions.

    Dimensions that are not named follow a named one that they were equal to in every batch given, or stay.

    Args:
        batches: Batches of one kind.
        dims: New values by name, as step records name dimensions.

    Raises:
        MimoseError: A name that the batch does not have.

    Example:
        >>> batch = {"ids": torch.zeros(2, 5), "mask": torch.ones(2, 5), "labels": torch.tensor([0, 1])}
        >>> {name: tuple(t.shape) for name, t in stretch([batch], {"batch": 4, "ids:1": 9}).items()}
        {'ids': (4, 9), 'mask': (4, 9), 'labels': (4,)}
    """
    seen = [raw_dims(batch) for batch in batches]
    base = seen[0]
    unknown = [name for name in dims if name not in base]
    if unknown:
        raise MimoseError(
            f"The batch has no dimension {', '.join(unknown)}; it has {', '.join(base)}. Name those, or make the batch "
            "yourself with --batch."
        )
    alike = [other for other in seen if other.keys() == base.keys()]
    values = {name: tuple(other[name] for other in alike) for name in base}
    leader = {values[name]: name for name in reversed(list(dims)) if name != "batch"}
    wanted = dict(dims)
    for name in base:
        if name not in dims:
            wanted[name] = dims[leader[values[name]]] if name != "batch" and values[name] in leader else base[name]
    return _stretched(batches[0], "", wanted, "batch" in base)


def _stretched(value: Any, path: str, dims: Mapping[str, int], shared: bool) -> Any:
    prefix = f"{path}." if path else ""
    if isinstance(value, torch.Tensor):
        for axis in range(value.dim()):
            name = "batch" if shared and axis == 0 else f"{path or 'input'}:{axis}"
            size = dims.get(name, value.shape[axis])
            if size != value.shape[axis]:
                value = value.index_select(axis, torch.arange(size, device=value.device) % value.shape[axis])
        return value
    if isinstance(value, Mapping):
        items = {key: _stretched(item, f"{prefix}{key}", dims, shared) for key, item in value.items()}
        if type(value) is dict:
            return items
        other: Any = copy.copy(value)
        for key, item in items.items():
            other[key] = item
        return other
    if isinstance(value, (tuple, list)):
        names: Iterable[Any] = getattr(value, "_fields", range(len(value)))
        parts = [_stretched(item, f"{prefix}{name}", dims, shared) for name, item in zip(names, value, strict=True)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts_by_name = {
            field.name: _stretched(getattr(value, field.name), f"{prefix}{field.name}", dims, shared)
            for field in dataclasses.fields(value)
            if field.init
        }
        return dataclasses.replace(value, **parts_by_name)
    return value


def say(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
