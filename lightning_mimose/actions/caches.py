"""Hugging Face caches in training: switched off for the fit, and back on afterwards.

Decoders default to `use_cache=True` and fill a cache even in training. It keeps all keys and values alive for
the whole step, and a recomputed block would append to it twice. Encoder-decoder models keep a copy of the
config per stack, so every config in the module tree is visited.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class CacheSwitch:
    """Turns `use_cache` off in every config of a model, and restores each value it found."""

    def __init__(self) -> None:
        self._found: list[tuple[Any, Any]] = []

    def off(self, model: nn.Module) -> None:
        """Switch caches off."""
        seen: set[int] = set()
        for module in model.modules():
            config = getattr(module, "config", None)
            if config is None or id(config) in seen:
                continue
            seen.add(id(config))
            if getattr(config, "use_cache", None) is True:
                self._found.append((config, config.use_cache))
                config.use_cache = False

    def restore(self) -> None:
        """Put every value back."""
        while self._found:
            config, value = self._found.pop()
            config.use_cache = value


def checkpointed_layers(model: nn.Module) -> list[str]:
    """Names of the modules that Hugging Face's own gradient checkpointing recomputes.

    The switch is an attribute of the layers; a model that holds them carries it too, which says nothing of its rest.
    """
    on = [name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False) is True]
    inside = {name: f"{name}." if name else "" for name in on}
    return [name for name in on if not any(other != name and other.startswith(inside[name]) for other in on)]
