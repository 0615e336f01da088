"""What `torch.nn.utils.parametrize.cached()` holds: what runs beside the step, or again, finds it as the unit did.

Inside it a parametrized weight is made once, and taken from a table of the process afterwards. A recomputation comes
when the table is gone; a trial would leave what it made there, for the step to take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

Table = dict[tuple[int, str], Any]
"""By a module's identity and a name: its weight."""
_AS_IT_IS: AbstractContextManager[None] = nullcontext()


def cached_in(modules: Callable[[], Sequence[nn.Module]]) -> Table | None:
    """What is cached of some modules' weights; None where nothing is cached at all.

    Args:
        modules: Tells those of a unit: the weights of others would be held for nothing.
    """
    if not parametrize._cache_enabled:
        return None
    own = {id(module) for module in modules()}
    return {key: weight for key, weight in parametrize._cache.items() if key[0] in own}


def cached_again(table: Table | None) -> AbstractContextManager[None]:
    """Around what is to find just that cached; what it caches itself goes with it.

    Args:
        table: See `cached_in`.
    """
    return _AS_IT_IS if table is None and not parametrize._cache_enabled else _cached_again(table)


@contextmanager
def _cached_again(table: Table | None) -> Iterator[None]:
    before = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = int(table is not None), dict(table or {})
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = before
