"""Hugging Face caches in training: switched off for the fit, and back on afterwards.

Decoders default to `use_cache=True` and fill a cache even in training. It keeps all keys and values alive for
the whole step, and a recomputed block would append to it twice. Encoder-decoder models keep a copy of the
config per stack, so every config in the module tree is visited.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_off: dict[int, int] = {}
"""Identity of a config, which its switches hold -> how many have it off: models may share one."""


class CacheSwitch:
    """Turns `use_cache` off in every config of a model, and on again where no other switch has it off."""

    def __init__(self) -> None:
        self._found: list[Any] = []

    def off(self, model: nn.Module) -> None:
        """Switch caches off."""
        seen: set[int] = set()
        for module in model.modules():
            config = getattr(module, "config", None)
            if config is None or id(config) in seen:
                continue
            seen.add(id(config))
            if getattr(config, "use_cache", None) is True or id(config) in _off:
                self._found.append(config)
                _off[id(config)] = _off.get(id(config), 0) + 1
                config.use_cache = False

    def restore(self) -> None:
        """Put every value back."""
        while self._found:
            config = self._found.pop()
            _off[id(config)] -= 1
            if not _off[id(config)]:
                del _off[id(config)]
                config.use_cache = True


def checkpointed_layers(model: nn.Module) -> list[str]:
    """Names of the outermost modules that Hugging Face's own gradient checkpointing recomputes.

    The switch is an attribute of the layers that recompute themselves. Models that hold them and parts inside them
    carry it too, which says nothing of their rest; where no such layer is, the innermost that carry it count.
    """
    on = {
        name: module for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", 0) is True
    }
    layers = [name for name, module in on.items() if _checkpoints_itself(module)]
    innermost = [name for name in on if not any(_inside(other, name) for other in on)]
    found = [*layers, *(name for name in innermost if name not in layers)]
    return [name for name in found if not any(_inside(name, layer) for layer in layers)]


def _checkpoints_itself(module: nn.Module) -> bool:
    # By name: transformers need not be installed.
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


def _inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def checkpointing_way_out(model: nn.Module) -> str:
    """How to switch that checkpointing off, by the name that the installed release has for it.

    Transformers 5 calls it `activation_checkpointing_disable`, and warns of the name it had before.
    """
    for method in ("activation_checkpointing_disable", "gradient_checkpointing_disable"):
        for name, module in model.named_modules():
            if callable(getattr(module, method, None)):
                where = f" ({name!r})" if name else ""
                return f"Call {method}() on {type(module).__name__}{where}"
    return "Set gradient_checkpointing = False on them"
