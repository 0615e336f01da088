"""Tiny models of `transformers` with random weights, and batches of any size for them. They need no download."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.helpers.models import Batch, image_batch, text_batch


def bert(layers: int = 3, dropout: float = 0.1) -> nn.Module:
    """A BERT classifier."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config)


def gpt2(layers: int = 3, dropout: float = 0.1) -> nn.Module:
    """A GPT-2 language model; its cache is on."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=layers,
        n_head=2,
        n_positions=256,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return GPT2LMHeadModel(config)


def t5(layers: int = 2, dropout: float = 0.1) -> nn.Module:
    """A T5 encoder-decoder: tied embeddings, a position bias that every block is given, a cache."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=layers,
        num_heads=2,
        dropout_rate=dropout,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def resnet() -> nn.Module:
    """A ResNet classifier: BatchNorm, convolutions with scratch memory."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=2)
    return ResNetForImageClassification(config)


def swin() -> nn.Module:
    """A Swin classifier: stages of blocks of different sizes."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=2
    )
    return SwinForImageClassification(config)


def classified_text(batch: int = 4, tokens: int = 32, seed: int = 0) -> Batch:
    """Tokens, a mask with padding in it, and labels."""
    made = text_batch(batch, tokens, seed)
    mask = torch.ones(batch, tokens, dtype=torch.long)
    mask[0, tokens // 2 :] = 0
    return {**made, "attention_mask": mask}


def language(batch: int = 4, tokens: int = 32, seed: int = 0) -> Batch:
    """Tokens that are their own labels."""
    input_ids = text_batch(batch, tokens, seed)["input_ids"]
    return {"input_ids": input_ids, "labels": input_ids}


def translation(batch: int = 4, tokens: int = 32, seed: int = 0, target: int | None = None) -> Batch:
    """Source tokens, and target tokens of another length."""
    labels = text_batch(batch, target or tokens // 2, seed + 1)["input_ids"]
    return {"input_ids": text_batch(batch, tokens, seed)["input_ids"], "labels": labels}


def pixels(batch: int = 4, side: int = 32, seed: int = 0) -> Batch:
    """Square images and labels."""
    return image_batch(batch, side, side, seed)


HUB: dict[str, tuple[Callable[[], nn.Module], Callable[..., Batch]]] = {
    "bert": (bert, classified_text),
    "gpt2": (gpt2, language),
    "t5": (t5, translation),
    "resnet": (resnet, pixels),
    "swin": (swin, pixels),
}
"""Name -> how to build the model, and a batch for it of (batch, length or side, seed)."""
