"""The benchmark's models: small ones from `transformers` with random weights, and batches whose size varies.

A training step takes 50 to 200 ms on two cores at a typical size.

Example:
    >>> workload = WORKLOADS["bert"]
    >>> batches = workload.batches(steps=4, seed=0)
    >>> fit(Task(workload, seed=0), batches).global_step
    4
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from lightning_mimose.bench.workload import (
    CLASSES,
    VOCABULARY,
    Batch,
    Order,
    Workload,
    causal,
    images,
    text,
    translation,
)

__all__ = ["CLASSES", "VOCABULARY", "WORKLOADS", "Batch", "Order", "Task", "Workload", "fit", "trainer"]


def _bert() -> nn.Module:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            num_hidden_layers=6,
            num_attention_heads=4,
            intermediate_size=768,
            num_labels=CLASSES,
        )
    )


# Token numbers of the pretrained vocabularies are outside this one.
_NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None}


def _gpt2() -> nn.Module:
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=256,
            n_embd=192,
            n_layer=4,
            n_head=4,
            **_NO_SPECIAL_TOKENS,
        )
    )
    model.loss_type = "ForCausalLM"  # what transformers would take anyway, after a warning
    return model


def _llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            **_NO_SPECIAL_TOKENS,
        )
    )


def _t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=192,
            d_kv=48,
            d_ff=768,
            num_layers=3,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )


def _resnet() -> nn.Module:
    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=16,
            hidden_sizes=[32, 64, 128, 256],
            depths=[2, 2, 2, 2],
            layer_type="basic",
            num_labels=CLASSES,
        )
    )


def _vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            image_size=128,
            patch_size=16,
            hidden_size=192,
            num_hidden_layers=6,
            num_attention_heads=4,
            intermediate_size=768,
            hidden_dropout_prob=0.1,
            num_labels=CLASSES,
        )
    )


def _swin() -> nn.Module:
    return SwinForImageClassification(
        SwinConfig(
            image_size=128,
            patch_size=4,
            embed_dim=48,
            depths=[2, 2, 2],
            num_heads=[2, 4, 8],
            window_size=4,
            num_labels=CLASSES,
        )
    )


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("bert", _bert, text, {"tokens": range(16, 161)}),
        Workload("gpt2", _gpt2, causal, {"tokens": range(16, 129)}),
        Workload("llama", _llama, causal, {"tokens": range(16, 129)}),
        Workload("t5", _t5, translation, {"source": range(16, 129), "target": range(8, 97)}),
        Workload("resnet", _resnet, images, {"height": range(64, 193, 16), "width": range(64, 193, 16)}),
        Workload(
            "vit",
            _vit,
            images,
            {"height": range(64, 161, 16), "width": range(64, 161, 16)},
            extra={"interpolate_pos_encoding": True},
        ),
        # Never so small that a stage is no larger than its window: Swin then changes its window for good.
        Workload("swin", _swin, images, {"height": range(96, 161, 16), "width": range(96, 161, 16)}),
    )
}
"""Every workload by name."""


class Task(pl.LightningModule):
    """A workload under Lightning.

    Args:
        workload: The model and its batches.
        seed: Of the weights.
        lr: AdamW's learning rate.
    """

    def __init__(self, workload: Workload, seed: int = 0, lr: float = 1e-3) -> None:
        super().__init__()
        self.workload, self.lr = workload, lr
        self.model = workload.make(seed)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        return self.workload.loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A `Trainer` for one epoch on the CPU that writes nothing to disk or screen; `options` go before its defaults."""
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(callbacks=list(callbacks), **(defaults | options))


def fit(task: Task, batches: Sequence[Batch], *callbacks: pl.Callback, seed: int = 0, **options: Any) -> pl.Trainer:
    """Trains on the given batches in their order, dropout seeded, and returns the trainer."""
    pl.seed_everything(seed, verbose=False)
    quiet = trainer(*callbacks, **options)
    quiet.fit(task, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return quiet
