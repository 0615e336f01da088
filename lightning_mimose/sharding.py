"""Models whose parameters are sharded over ranks by FSDP2 (`fully_shard`): what a rank holds of them.

A sharded parameter is a DTensor of the whole shape, of which this rank has one part. Before a sharded module's forward
and before its backward its parameters are gathered, by hooks around `forward`, and freed afterwards by emptying their
storage. What autograd saves of them is empty in between, so it is no activation.

Told by names: `torch.distributed.fsdp` costs a third of a second to import, and moved between versions of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lightning_mimose.errors import UnsupportedError

_FOREIGN = {
    "FullyShardedDataParallel": "FSDP1's flat parameters are gathered inside the units: use fully_shard (FSDP2)",
    "DeepSpeedEngine": "it partitions parameters while a unit runs: use fully_shard (FSDP2) or DDP",
}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: the tensor itself, if it is not sharded.

    Example:
        >>> import torch
        >>> plain = torch.zeros(3)
        >>> local(plain) is plain
        True
    """
    part = getattr(tensor, "_local_tensor", None)
    return part if isinstance(part, torch.Tensor) else tensor


def held_bytes(parameter: torch.Tensor) -> int:
    """Bytes that a parameter takes on this rank, and so does its gradient; parts are padded to one length."""
    part = local(parameter)
    return part.numel() * part.element_size() if part is parameter else part.untyped_storage().nbytes()


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module itself.

    Example:
        >>> is_sharded(torch.nn.Linear(2, 2))
        False
    """
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def own_class(module: nn.Module) -> type:
    """A module's class, as it was before `fully_shard` put another in its place."""
    kinds = type(module).__mro__
    return next(kind for kind in kinds[2:] if kind.__name__ != "FSDPModule") if is_sharded(module) else kinds[0]


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that `fully_shard` was applied to."""
    return [module for module in model.modules() if is_sharded(module)]


def gathers_inside(module: nn.Module) -> bool:
    """Whether a part of a module gathers its parameters while the module runs."""
    return any(is_sharded(part) for part in module.modules() if part is not module)


def reshard(modules: list[nn.Module]) -> None:
    """Free what is still gathered: an evaluation leaves the outermost module's parameters there."""
    for module in modules:
        module.reshard()  # type: ignore[operator]


def let_go_of_groups(model: nn.Module) -> None:
    """Let the modules that `fully_shard` was applied to forget their process groups, which are closed.

    Limitations:
        Where another version of torch keeps them elsewhere, they stay until the model goes.
    """
    for module in sharded_modules(model):
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        for group in [*getattr(state, "_fsdp_param_groups", ()), getattr(state, "_fsdp_param_group", None)]:
            for info in (getattr(group, "mesh_info", None), getattr(group, "post_forward_mesh_info", None)):
                for name in [name for name in vars(info or object) if name.endswith("_process_group")]:
                    setattr(info, name, None)
                mesh = getattr(info, "mesh", None)
                for each in (mesh, getattr(mesh, "_root_mesh", None)):
                    getattr(each, "_pg_registry", {}).clear()


def sharing_ranks(model: nn.Module) -> tuple[int, ...]:
    """The ranks that gather this model's parameters together; none if it is not sharded.

    Raises:
        UnsupportedError: It is sharded in a way that was never tried.
    """
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _FOREIGN:
                raise UnsupportedError(f"{kind.__name__} is not supported: {_FOREIGN[kind.__name__]}.")
    meshes = {id(mesh): mesh for parameter in model.parameters() for mesh in _meshes(parameter)}
    if not meshes:
        return ()
    if not sharded_modules(model) or any(mesh.ndim > 1 for mesh in meshes.values()):
        raise UnsupportedError(
            "This model has DTensor parameters that are not those of plain FSDP2 (tensor parallel, a mesh of several "
            "dimensions), which was never tried. Supported is fully_shard(module) over a mesh of one dimension."
        )
    return tuple(sorted({int(rank) for mesh in meshes.values() for rank in mesh.mesh.flatten().tolist()}))


def _meshes(parameter: nn.Parameter) -> Iterator[Any]:
    if local(parameter) is not parameter:
        yield parameter.device_mesh  # type: ignore[attr-defined]
