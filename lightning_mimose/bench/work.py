"""The training work there is: models of `transformers` at three sizes, and models of the user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_mimose.bench.workload import CLASSES, Batch, Workload, causal, images, text, translation
from lightning_mimose.errors import MimoseError, is_out_of_memory
from lightning_mimose.explain.learn import loss_of
from lightning_mimose.explain.samples import batch_maker, build, loader_batches
from lightning_mimose.loop import own_loss

Scale = Literal["tiny", "small", "paper"]
SCALES: tuple[Scale, ...] = ("tiny", "small", "paper")


@dataclass(frozen=True)
class Work:
    """A model, its loss and the batches it is trained on.

    Attributes:
        name: What tables call it.
        description: One line about model and sizes.
        build: Makes the model, always with the same weights, in training mode.
        batches: One epoch.
        loss: (model, batch) -> the loss.
    """

    name: str
    description: str
    build: Callable[[], nn.Module]
    batches: tuple[Any, ...]
    loss: Callable[[nn.Module, Any], torch.Tensor]


_TASK = "single_label_classification"
"""What `transformers` would find out in the first forward and note in the configuration: a reason to compile again."""


@dataclass(frozen=True)
class _Shape:
    """How large a family is at one scale."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int = 4096

    def config(self, **other: Any) -> dict[str, Any]:
        """The words most configurations of `transformers` share."""
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": 4 * self.hidden,
            "num_labels": CLASSES,
            "problem_type": _TASK,
            **other,
        }


_SHAPES = {"tiny": _Shape(32, 4, 2), "small": _Shape(192, 6, 4), "paper": _Shape(768, 12, 12, 30522)}
_SHRINK = {"tiny": 8, "small": 1, "paper": 1}


def _bert(shape: _Shape) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**shape.config(vocab_size=shape.vocabulary)))


def _roberta(shape: _Shape) -> nn.Module:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    # Positions of RoBERTa begin behind the padding's.
    config = RobertaConfig(**shape.config(vocab_size=shape.vocabulary, max_position_embeddings=514))
    return RobertaForSequenceClassification(config)


def _gpt2(shape: _Shape) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocabulary,
            n_positions=512,
            n_embd=shape.hidden,
            n_layer=shape.layers,
            n_head=shape.heads,
            bos_token_id=None,  # the pretrained vocabulary's are outside this one
            eos_token_id=None,
        )
    )
    model.loss_type = "ForCausalLM"  # what transformers would take anyway, after a warning
    return model


def _t5(shape: _Shape) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "d_model": shape.hidden,
        "d_kv": shape.hidden // shape.heads,
        "d_ff": 4 * shape.hidden,
        "num_layers": shape.layers if shape.hidden >= 768 else max(3, shape.layers // 2),  # of each of its two halves
        "num_heads": shape.heads,
        "decoder_start_token_id": 0,
    }
    return T5ForConditionalGeneration(T5Config(**config))


def _vit(shape: _Shape) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**shape.config(image_size=224, patch_size=16)))


def _resnet(depths: Sequence[int], shape: _Shape) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config: dict[str, Any] = {"depths": list(depths), "num_labels": CLASSES, "problem_type": _TASK}
    if shape.hidden < 192:
        config.update(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2])
    return ResNetForImageClassification(ResNetConfig(**config))


@dataclass(frozen=True)
class _Kind:
    """A built-in work at any scale: the model's builder, its batches, sizes, and batch sizes (small, paper)."""

    description: str
    model: Callable[[_Shape], nn.Module]
    tensors: Callable[..., Batch]
    dims: Mapping[str, range]
    batch_sizes: tuple[int, int]
    extra: Mapping[str, Any] | None = None


def _scales(sides: range) -> dict[str, range]:
    return {"height": sides, "width": sides}


_KINDS = {
    "bert-squad": _Kind("BERT, lengths as in SQuAD", _bert, text, {"tokens": range(146, 513)}, (2, 12)),
    "roberta-swag": _Kind("RoBERTa, lengths as in SWAG", _roberta, text, {"tokens": range(35, 142)}, (6, 16)),
    "bert-qqp": _Kind("BERT, lengths as in QQP", _bert, text, {"tokens": range(30, 333)}, (4, 32)),
    "t5-translation": _Kind(
        "T5, two lengths", _t5, translation, {"source": range(40, 461), "target": range(40, 461)}, (2, 8)
    ),
    "gpt2": _Kind("GPT-2", _gpt2, causal, {"tokens": range(64, 385)}, (2, 8)),
    "resnet50-images": _Kind(
        "ResNet-50, images of many sizes", partial(_resnet, (3, 4, 6, 3)), images, _scales(range(64, 161, 32)), (4, 16)
    ),
    "resnet101-images": _Kind(
        "ResNet-101, images of many sizes",
        partial(_resnet, (3, 4, 23, 3)),
        images,
        _scales(range(64, 161, 32)),
        (4, 16),
    ),
    "vit-images": _Kind(
        "ViT, images of many sizes",
        _vit,
        images,
        _scales(range(128, 289, 32)),
        (4, 32),
        {"interpolate_pos_encoding": True},
    ),
}
BUILT_IN = tuple(_KINDS)
"""Names of the built-in works."""
DEFAULT = "bert-squad"


def workload(name: str, scale: Scale, batch_size: int | None = None) -> Workload:
    """A built-in work as a `Workload`.

    Args:
        name: One of `BUILT_IN`.
        scale: Its size.
        batch_size: Of its batches; None for what the scale has.

    Raises:
        MimoseError: There is no such work, or `transformers` is not installed.
    """
    if name not in _KINDS:
        raise MimoseError(f"There is no work {name!r}. There are {', '.join(_KINDS)}.")
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise MimoseError(
            f"The work {name!r} needs transformers, which is not installed. Run: pip install "
            '"lightning-mimose[bench]", or name a model of your own.'
        ) from error
    kind, shape = _KINDS[name], _SHAPES[scale]
    dims = {dim: _shrunk(allowed, _SHRINK[scale], kind.tensors is images) for dim, allowed in kind.dims.items()}
    if scale == "paper" and kind.tensors is images:
        dims = {dim: range(480, 801, 32) if kind.model is not _vit else range(192, 385, 32) for dim in dims}
    batch_size = kind.batch_sizes[scale == "paper"] if batch_size is None else batch_size
    return Workload(name, partial(kind.model, shape), kind.tensors, dims, batch_size, kind.extra)


def _shrunk(allowed: range, by: int, image: bool) -> range:
    if by == 1:
        return allowed
    return range(32, 97, 32) if image else range(max(4, allowed.start // by), max(8, allowed.stop // by))


def built_in(name: str, scale: Scale, steps: int, seed: int = 7, batch_size: int | None = None) -> Work:
    """A built-in work: sizes drawn evenly from its range, the largest last but one, a shorter last batch."""
    made = workload(name, scale, batch_size)
    sizes = ", ".join(f"{dim} {allowed[0]} to {allowed[-1]}" for dim, allowed in made.dims.items())
    shape = _SHAPES[scale]
    width = "" if name.startswith("resnet") else f", hidden {shape.hidden}, {shape.layers} layers"
    return Work(
        name,
        f"{_KINDS[name].description}{width}, batch {made.batch_size}, {sizes}",
        made.make,
        tuple(made.batches(steps, seed=seed, order="longest last")),
        lambda model, batch: made.loss(model, batch),
    )


def own(
    spec: str,
    init: Mapping[str, Any],
    sizes: Sequence[Mapping[str, int]],
    batch_spec: str | None,
    steps: int,
) -> Work:
    """A model or LightningModule of the user's own.

    Args:
        spec: `package.module:Name`, as `explain` takes it.
        init: Keyword arguments for it.
        sizes: One batch is made of each; none takes the first batches of `train_dataloader()`.
        batch_spec: A function that makes batches.
        steps: How many batches to take from a loader.

    Raises:
        MimoseError: The model or its batches cannot be had.
    """
    torch.manual_seed(0)
    model = build(spec, init)
    if isinstance(model, LightningModule):
        with loss_of(model):  # says at once if it cannot be trained from outside
            pass
    else:
        model.train()
    if sizes:
        make = batch_maker(model, spec, batch_spec)
        batches = tuple(make(size) for size in sizes)
    else:
        before = _copy_of(model)
        batches = tuple(loader_batches(model, steps))
        if before is not None and _copy_of(model) is None:  # for the data that it has set up
            if before.state_dict().keys() != model.state_dict().keys():
                raise MimoseError(
                    f"{type(model).__name__} cannot be copied any more once its setup() has run, and every alternative "
                    "trains a copy. Keep what cannot be copied (files, locks) out of the model, or make its layers "
                    "in __init__ or configure_model."
                )
            model = before
        if not batches:
            raise MimoseError(
                f"{type(model).__name__} has no train_dataloader() to take batches from, or it gives none. Name sizes: "
                "--size NAME=N,..., once for each batch."
            )
    return Work(
        spec.rpartition(":")[2], f"{spec}, {len(batches)} batches", partial(copy.deepcopy, model), batches, _loss
    )


def _copy_of(model: nn.Module) -> nn.Module | None:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    if not isinstance(model, LightningModule):
        return own_loss(model, batch)
    with loss_of(model) as loss:
        return loss(batch)


def on(work: Work, device: torch.device) -> Work:
    """The same work with its batches and models on a device."""
    from lightning.fabric.utilities.apply_func import move_data_to_device

    return replace(
        work,
        build=lambda: work.build().to(device),
        batches=tuple(move_data_to_device(batch, device) for batch in work.batches),
    )
