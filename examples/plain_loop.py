"""A plain PyTorch loop inside a memory budget, without Lightning.

`Mimose.step` runs forward, backward and the optimizer's step. A GPT-2 with random weights learns to write Python from
the source of the standard library, in windows of different lengths.

    python examples/plain_loop.py
    python examples/plain_loop.py --budget 110MB
"""

from __future__ import annotations

import argparse
import random
import sysconfig
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_mimose import Mimose


def windows(steps: int, batch_size: int = 4) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of bytes of source, each 32 to 256 long."""
    choose = random.Random(0)
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = b"".join(path.read_bytes() for path in sorted(folder.glob("a*.py")))
    for _ in range(steps):
        length = choose.randint(32, 256)
        starts = [choose.randrange(len(source) - length) for _ in range(batch_size)]
        tokens = torch.tensor([list(source[start : start + length]) for start in starts])
        yield {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Trains inside the budget and prints the report."""
    parser = argparse.ArgumentParser(description="A language model trained inside a memory budget, without Lightning.")
    parser.add_argument("--budget", default="130MB", help='as Mimose takes it: "130MB", "60%%", 0.6, ...')
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps is at least 1")

    torch.manual_seed(7)
    config = GPT2Config(
        vocab_size=256,
        n_positions=256,
        n_embd=256,
        n_layer=4,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # what transformers would take anyway, after a warning
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with closing(Mimose(model, budget=args.budget, optimizer=optimizer)) as mimose:
        for step, batch in enumerate(windows(args.steps)):
            loss = mimose.step(batch)
            if step % 10 == 0:
                print(f"step {step:3d}: {batch['input_ids'].shape[1]:3d} tokens, loss {loss.item():.3f}")
    print(mimose.report())


if __name__ == "__main__":
    main()
