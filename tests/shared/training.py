"""A training in a process of its own: `python training.py NAME BUDGET SEED STEPS`; says what it does, line by line."""

from __future__ import annotations

import sys

import torch

from lightning_mimose import SharedBudget
from tests.helpers.sharing import train


def main(name: str, budget: str, seed: str, steps: str) -> None:
    torch.set_num_threads(1)
    given = SharedBudget.connect(name, int(budget) or None, device="cpu") if name else "1GB"
    print("ready", flush=True)
    sys.stdin.readline()
    out = train(int(seed), given, int(steps), told=lambda step: print("step", step, flush=True))
    print("digest", out.digest, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
