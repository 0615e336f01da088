"""Workloads of a size at which time is spent in operations rather than between them: a step takes half a second."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from bench.models import CLASSES, VOCABULARY, WORKLOADS, Workload

_NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None}


def _bert() -> nn.Module:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            num_hidden_layers=8,
            num_attention_heads=4,
            intermediate_size=1024,
            num_labels=CLASSES,
        )
    )


def _gpt2() -> nn.Module:
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=256, n_embd=256, n_layer=8, n_head=4, **_NO_SPECIAL_TOKENS)
    )
    model.loss_type = "ForCausalLM"
    return model


def _llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            **_NO_SPECIAL_TOKENS,
        )
    )


def _vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            image_size=224,
            patch_size=16,
            hidden_size=256,
            num_hidden_layers=8,
            num_attention_heads=4,
            intermediate_size=1024,
            num_labels=CLASSES,
        )
    )


def _resnet50() -> nn.Module:
    return ResNetForImageClassification(ResNetConfig(num_labels=CLASSES))


def _resnet101() -> nn.Module:
    return ResNetForImageClassification(ResNetConfig(depths=[3, 4, 23, 3], num_labels=CLASSES))


def _of(name: str, build: object, **changes: object) -> Workload:
    return replace(WORKLOADS[name], build=build, **changes)  # type: ignore[arg-type]


_IMAGES = {"height": range(96, 161, 32), "width": range(96, 161, 32)}

LARGE: dict[str, Workload] = {
    "bert": _of("bert", _bert, dims={"tokens": range(72, 257)}),
    "gpt2": _of("gpt2", _gpt2, dims={"tokens": range(72, 257)}),
    "llama": _of("llama", _llama, dims={"tokens": range(72, 257)}),
    "vit": _of("vit", _vit, dims={"height": range(128, 257, 16), "width": range(128, 257, 16)}),
    "resnet50": replace(_of("resnet", _resnet50, dims=_IMAGES), name="resnet50"),
    "resnet101": replace(_of("resnet", _resnet101, dims=_IMAGES), name="resnet101"),
}
"""Every workload by name."""
