"""Architectures of `transformers` at tiny size, with random weights and dropout on, and batches of any size for them.

A configuration is what the library gives under a model type, made small; what is not named here is the library's
default (caches on, layers dropped at random, masks drawn by NumPy).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_mimose import Mimose
from lightning_mimose.predict.timeline import Timeline
from tests.helpers.fits import same
from tests.helpers.meter import PeakMeter
from tests.helpers.models import Batch

VOCABULARY = 64


def tokens(batch: int, length: int, seed: int) -> torch.Tensor:
    """Token numbers, none of them a special one (those are below 4)."""
    return torch.randint(4, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def causal(size: int, seed: int) -> Batch:
    """Sequences that are their own labels, the first of them padded."""
    ids, mask = tokens(4, size, seed), torch.ones(4, size, dtype=torch.long)
    mask[0, size // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def classified(size: int, seed: int) -> Batch:
    """Sequences, the first of them padded, and one label each."""
    return {**causal(size, seed), "labels": tokens(4, 1, seed).flatten() % 2}


def translated(size: int, seed: int) -> Batch:
    """Source sequences, and target sequences of one length."""
    made = causal(size, seed)
    return {**made, "labels": tokens(4, 24, seed + 1)}


def images(size: int, seed: int) -> Batch:
    """`size` images of 32 x 32 with one label each."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(size, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 2, (size,), generator=generator),
    }


def larger_images(size: int, seed: int) -> Batch:
    """Two square images of side `size`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(2, 3, size, size, generator=generator),
        "labels": torch.randint(0, 2, (2,), generator=generator),
    }


def segmented(size: int, seed: int) -> Batch:
    """Two square images of side `size`, every pixel with a label."""
    made = larger_images(size, seed)
    labels = torch.randint(0, 2, (2, size, size), generator=torch.Generator().manual_seed(seed))
    return {**made, "labels": labels}


def waves(size: int, seed: int) -> Batch:
    """Sound of `size` samples, and a transcript."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_values": torch.randn(2, size, generator=generator), "labels": tokens(2, 4, seed)}


def spectra(size: int, seed: int) -> Batch:
    """`size` spectra of 64 frames and their transcripts."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_features": torch.randn(size, 8, 64, generator=generator), "labels": tokens(size, 12, seed)}


def captioned(size: int, seed: int) -> Batch:
    """As many captions as images."""
    return {
        "input_ids": tokens(size, 16, seed),
        "pixel_values": images(size, seed)["pixel_values"],
        "return_loss": True,  # type: ignore[dict-item]
    }


# The largest first; the last ones are large enough that a plan has something to do.
TEXT = (96, 48, 64, 80, 56, 88)
COUNT = (12, 5, 7, 9, 6, 11)
SIDE = (112, 32, 64, 80, 48, 96, 112)
SOUND = (4800, 2400, 3200, 4000, 2800, 4400)


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        family: What it is for.
        kind: The model type, as `transformers` calls it.
        head: The auto class that builds it.
        batch: (size, seed) -> batch.
        sizes: The size of each batch, the largest first.
        settings: What differs from the default configuration.
    """

    family: str
    kind: str
    head: str
    batch: Callable[[int, int], Batch]
    sizes: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def build(self, **settings: Any) -> nn.Module:
        """The model, in training mode."""
        import transformers

        config = transformers.AutoConfig.for_model(self.kind, **(self.settings | settings))
        model: nn.Module = getattr(transformers, self.head).from_config(config)
        if getattr(model, "loss_type", "") is None:
            model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # what is taken anyway, after a warning
        return model.train()

    def batches(self) -> list[Batch]:
        """One batch of every size."""
        return [self.batch(size, i) for i, size in enumerate(self.sizes)]


_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    **_SPECIAL,
}
_LLAMA = _TEXT | {"num_key_value_heads": 2, "head_dim": 16, "attention_dropout": 0.1}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 128,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
    **_SPECIAL,
}
_VIT = {
    "image_size": 32,
    "patch_size": 4,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
_SPEECH = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (10, 4, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 4,
    "layerdrop": 0.0,  # steps of other layers are a test of their own
    "pad_token_id": 0,
}


def _decoder(kind: str, **settings: Any) -> Architecture:
    return Architecture("decoders", kind, "AutoModelForCausalLM", causal, TEXT, settings)


def _encoder(kind: str, **settings: Any) -> Architecture:
    return Architecture("encoders", kind, "AutoModelForSequenceClassification", classified, TEXT, settings)


def _translator(kind: str, **settings: Any) -> Architecture:
    return Architecture("encoder-decoders", kind, "AutoModelForSeq2SeqLM", translated, TEXT, settings)


def _vision(kind: str, make: Any = images, sizes: tuple[int, ...] = COUNT, **settings: Any) -> Architecture:
    return Architecture("vision", kind, "AutoModelForImageClassification", make, sizes, settings)


ARCHITECTURES: dict[str, Architecture] = {
    each.kind: each
    for each in (
        # Decoders
        _decoder("gpt2", vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=2, n_positions=128, **_SPECIAL),
        _decoder("llama", **_LLAMA | {"num_key_value_heads": 1}),
        _decoder("mistral", **_LLAMA, sliding_window=32),
        _decoder("qwen2", **_LLAMA),
        _decoder("qwen3", **_LLAMA),
        _decoder("gemma", **_LLAMA),
        _decoder("gemma2", **_LLAMA, sliding_window=32),
        _decoder("opt", **_TEXT, ffn_dim=64, word_embed_proj_dim=32),
        _decoder("gpt_neox", **_TEXT, attention_dropout=0.1, hidden_dropout=0.1),
        _decoder(
            "gpt_neo",
            **_TEXT
            | {"num_hidden_layers": 2, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
            resid_dropout=0.1,
            attention_dropout=0.1,
        ),
        _decoder(
            "bloom",
            vocab_size=VOCABULARY,
            hidden_size=32,
            n_layer=3,
            n_head=2,
            hidden_dropout=0.1,
            attention_dropout=0.1,
            **_SPECIAL,
        ),
        _decoder("falcon", **_TEXT, hidden_dropout=0.1, attention_dropout=0.1),
        _decoder("phi", **_TEXT, resid_pdrop=0.1, attention_dropout=0.1),
        _decoder("mixtral", **_LLAMA, num_local_experts=4, router_jitter_noise=0.1, output_router_logits=True),
        _decoder(
            "qwen2_moe",
            **_LLAMA,
            num_experts=4,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            output_router_logits=True,
        ),
        Architecture(
            "decoders",
            "mamba",
            "AutoModelForCausalLM",
            causal,
            (48, 24, 32, 40, 28, 44),  # it goes token by token on a CPU
            {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 3, **_SPECIAL},
        ),
        # Encoders
        _encoder("bert", **_TEXT),
        _encoder("roberta", **_TEXT),
        _encoder(
            "distilbert",
            vocab_size=VOCABULARY,
            dim=32,
            n_layers=3,
            n_heads=2,
            hidden_dim=64,
            max_position_embeddings=128,
        ),
        _encoder("albert", **_TEXT, embedding_size=16),
        _encoder("electra", **_TEXT, embedding_size=16),
        _encoder("deberta-v2", **_TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16),
        _encoder("mpnet", **_TEXT),
        _encoder("xlnet", vocab_size=VOCABULARY, d_model=32, n_layer=3, n_head=2, d_inner=64),
        _encoder("funnel", vocab_size=VOCABULARY, d_model=32, n_head=2, d_head=16, d_inner=64, block_sizes=[1, 1, 1]),
        _encoder(
            "modernbert",
            **_TEXT,
            attention_dropout=0.1,
            mlp_dropout=0.1,
            local_attention=32,
            cls_token_id=1,
            sep_token_id=2,
        ),
        # Encoder-decoders
        _translator(
            "t5",
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
        ),
        _translator("bart", **_BART),
        _translator("marian", **_BART),
        _translator("pegasus", **_BART),
        _translator("mbart", **_BART),
        # Vision
        _vision("vit", **_VIT),
        _vision("deit", **_VIT, architectures=["DeiTForImageClassification"]),
        _vision("beit", **_VIT, drop_path_rate=0.2),
        _vision("dinov2", **_VIT | {"mlp_ratio": 2}, drop_path_rate=0.2),
        _vision(
            "swin",
            larger_images,
            SIDE,
            image_size=112,
            patch_size=2,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            drop_path_rate=0.2,
        ),
        _vision(
            "resnet", larger_images, SIDE, embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic"
        ),
        _vision("regnet", larger_images, SIDE, embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], groups_width=4),
        _vision("convnext", larger_images, SIDE, hidden_sizes=[8, 16], num_stages=2, depths=[2, 2], drop_path_rate=0.2),
        Architecture(
            "vision",
            "segformer",
            "AutoModelForSemanticSegmentation",
            segmented,
            SIDE,
            {
                "num_encoder_blocks": 2,
                "depths": [2, 2],
                "sr_ratios": [4, 2],
                "hidden_sizes": [8, 16],
                "patch_sizes": [7, 3],
                "strides": [4, 2],
                "num_attention_heads": [1, 2],
                "mlp_ratios": [2, 2],
                "decoder_hidden_size": 16,
                "hidden_dropout_prob": 0.1,
                "attention_probs_dropout_prob": 0.1,
                "drop_path_rate": 0.2,
            },
        ),
        # Audio
        Architecture("audio", "wav2vec2", "AutoModelForCTC", waves, SOUND, _SPEECH),
        Architecture("audio", "hubert", "AutoModelForCTC", waves, SOUND, _SPEECH),
        Architecture(
            "audio",
            "whisper",
            "AutoModelForSpeechSeq2Seq",
            spectra,
            COUNT,
            _BART
            | {
                "num_mel_bins": 8,
                "max_source_positions": 32,
                "max_target_positions": 32,
                "dropout": 0.1,
                "begin_suppress_tokens": None,
            },
        ),
        # Images with text
        Architecture(
            "images with text",
            "clip",
            "AutoModel",
            captioned,
            COUNT,
            {
                "text_config": _TEXT | {"attention_dropout": 0.1},
                "vision_config": _VIT | {"attention_dropout": 0.1},
                "projection_dim": 16,
            },
        ),
    )
}
"""Model type -> architecture."""


@dataclass
class Trained:
    """What is left of a training.

    Attributes:
        model: The trained model.
        losses: The loss of every batch.
        peaks: The true peak of every batch, by the independent meter.
        residents: What was resident when each batch began.
        mimose: What kept the budget; None for a plain run.
    """

    model: nn.Module
    losses: list[torch.Tensor]
    peaks: list[int]
    residents: list[int]
    mimose: Mimose | None

    def budget(self, share: float) -> int:
        """The budget at which this share of the activation memory may be used."""
        resident = max(self.residents)
        return int(resident + share * (max(self.peaks) - resident))


def train(
    build: Callable[[], nn.Module],
    batches: Sequence[Batch],
    budget: int | str | None = None,
    loss_fn: Callable[[nn.Module, Batch], torch.Tensor] | None = None,
    **options: Any,
) -> Trained:
    """Trains a freshly seeded model in a plain loop, one step per batch, on the independent meter."""
    loss_of = loss_fn or (lambda model, batch: model(**batch).loss)
    pl.seed_everything(0, verbose=False)
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    pl.seed_everything(7, verbose=False)
    done = Trained(model, [], [], [], None)
    with ExitStack() as stack:
        if budget is not None:
            done.mimose = Mimose(model, budget=budget, optimizer=optimizer, loss_fn=loss_of, **options)
            stack.callback(done.mimose.close)
        for batch in batches:
            with PeakMeter(model, optimizer, batch) as meter:
                if done.mimose is not None:
                    loss = done.mimose.step(batch)
                else:
                    loss = loss_of(model, batch)
                    model.zero_grad(set_to_none=True)
                    loss.backward()
                    optimizer.step()
                done.losses.append(loss.detach())
                del loss
            done.peaks.append(meter.peak_bytes)
            done.residents.append(meter.resident_bytes)
    return done


@cache
def trained_plainly(name: str) -> Trained:
    """An architecture trained without a budget: once for all the tests that compare with it and change nothing."""
    return train(ARCHITECTURES[name].build, ARCHITECTURES[name].batches())


def equal(one: Trained, other: Trained) -> bool:
    """Whether losses, weights and buffers are the same bit for bit."""
    return all(map(torch.equal, one.losses, other.losses)) and same(one.model.state_dict(), other.model.state_dict())


def recompute_all(timeline: Timeline, budget_bytes: int) -> dict[str, str]:
    """A planner that recomputes every outermost unit that can be recomputed."""
    chosen: dict[str, str] = {}
    for unit, parent in zip(timeline.units, timeline.parents, strict=True):
        above = {timeline.units[index] for index in ancestors(timeline, parent)}
        if (unit, "recompute") in timeline.option_index and not above & chosen.keys():
            chosen[unit] = "recompute"
    return chosen


def ancestors(timeline: Timeline, index: int) -> Iterator[int]:
    """A unit and those that enclose it, by number, the nearest first."""
    while index >= 0:
        yield index
        index = timeline.parents[index]
