"""What ranks owe each other: one that fails alone must not leave the others waiting for it."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import count
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_mimose.sharding import let_go_of_groups

GRACE_SECONDS = 2.0
"""How long a rank that failed looks whether the others failed too."""

_failures = count()


def release_peers(strategy: Any) -> None:
    """Let the other ranks fail at once if this one failed alone.

    They wait for it in a collective, for half an hour by default, unless its process ends: a script may catch the
    error and go on, or spend minutes on its way out. If every rank failed, nobody waits, and the process group stays
    for the script's next fit; otherwise it is closed, and with it the connections that they wait on.

    Limitations:
        That is how gloo hears of it. With NCCL the others wait for its watchdog, or for this process to end; so they do
        where an earlier FSDP2 fit of this process has left a model that still holds the group.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if not hasattr(strategy, "process_group_backend"):
        return  # trains on one device: a group that is open is none of its business
    if torch.distributed.get_world_size() == 1 or _all_failed():
        return
    with suppress(RuntimeError):  # the others may have closed it already
        torch.distributed.destroy_process_group()
    # gloo closes its connections when nobody holds the group any more, and the traceback holds DDP's wrapper, or the
    # model that FSDP2 has sharded.
    wrapper = getattr(strategy, "model", None)
    if isinstance(wrapper, DistributedDataParallel):
        strategy.model = wrapper.module
        for name in ("logger", "reducer", "process_group"):
            vars(wrapper).pop(name, None)
    elif isinstance(wrapper, torch.nn.Module):
        let_go_of_groups(wrapper)


def _all_failed() -> bool:
    """Whether every rank says that it failed, within a short time."""
    ranks, key = torch.distributed.get_world_size(), f"lightning_mimose/failed/{next(_failures)}"
    until = time.monotonic() + GRACE_SECONDS
    # The store is no collective: any rank may ask it at any time. It is gone where its process has ended.
    with suppress(RuntimeError):
        store = torch.distributed.distributed_c10d._get_default_store()
        failed = store.add(key, 1)
        while failed < ranks and time.monotonic() < until:
            time.sleep(0.02)
            failed = store.add(key, 0)
        return bool(failed == ranks)
    return False
