"""Dispatch modes that may be entered by several threads at once."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch.utils._python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


class ThreadedMode(TorchDispatchMode):
    """A dispatch mode that leaves no trace in the process when threads enter and leave it in any order.

    Torch notes in globals whether any mode is active, each exit putting back what its entry found: two threads that
    overlap leave them set for ever, and torch.compile then treats all that follows as run under a mode.
    https://github.com/pytorch/pytorch/blob/v2.8.0/torch/utils/_python_dispatch.py#L101
    """

    _lock = threading.RLock()
    _active: ClassVar[list[ThreadedMode]] = []
    _before: ClassVar[list[bool]] = []

    def __enter__(self) -> Any:
        """Enter the mode."""
        with self._lock:
            if not self._active:
                self._before[:] = [bool(getattr(dispatch, flag, False)) for flag in _FLAGS]
            self._active.append(self)
            return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Leave it; the last thread of all puts back what the first one found."""
        with self._lock:
            try:
                super().__exit__(*error)  # type: ignore[no-untyped-call]
            finally:
                self._active.remove(self)
            found = [
                bool(self._active),
                any(not mode.is_infra_mode() for mode in self._active),
                any(not mode.ignore_compile_internals() for mode in self._active),
            ]
            for flag, now, before in zip(_FLAGS, found, self._before, strict=True):
                if hasattr(dispatch, flag):
                    setattr(dispatch, flag, now or before)
            tell = getattr(dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
            if tell is not None:
                tell(found[-1] or self._before[-1])
