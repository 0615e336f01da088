"""The coordinator's sockets: lets callers in, hears whole messages, and lets go of whoever breaks off."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .wire import Lines, encode, peer_uid


class Caller:
    """One connection, and what its job was told last."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = Lines()
        self.job: str | None = None
        self.out = b""
        self.alone = False
        """Whether it was told that nobody else is there: it then holds the whole budget, and asks for nothing."""
        self.wanted = False
        """Whether it was told that somebody waits, so that it says what it gives back."""
        self.plan: list[int] = []
        """What it was told last that it may plan with."""
        self.standing = False
        """Whether it still does: what it was told is recalled, and it has not given it back yet."""
        self.grant = 0
        """How often it was told so. It says which one it gives back: an earlier one is not worth anything any more."""


class Switchboard:
    """Everybody's connection, served by one thread that waits for none of them.

    Args:
        listener: The socket, listening.
        heard: Given every message, and by whom.
        gone: Told of a caller whose connection is closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        heard: Callable[[Caller, dict[str, Any]], None],
        gone: Callable[[Caller], None],
    ) -> None:
        self._listener, self._heard, self._gone = listener, heard, gone
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        listener.setblocking(False)

    @property
    def is_empty(self) -> bool:
        """Whether nobody is connected."""
        return len(self._selector.get_map()) == 1  # the listener

    def serve(self, seconds: float) -> None:
        """Let in, hear and answer whoever is ready, waiting so long for the first."""
        for key, events in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            else:
                self._talk(key.data, events)

    def say(self, caller: Caller, message: dict[str, Any]) -> None:
        """Say something to a caller; what it does not take at once follows when it does.

        Raises:
            OSError: It has broken off.
        """
        caller.out += encode(message)
        self._flush(caller)

    def shut_out(self, caller: Caller, error: Exception) -> None:
        """Whoever breaks off, or talks nonsense of any kind, has lost its lease; nobody else is concerned."""
        if not isinstance(error, OSError):
            with suppress(OSError):
                self.say(caller, {"error": "nonsense", "text": f"{type(error).__name__}: {error}"})
        with suppress(KeyError, ValueError):
            self._selector.unregister(caller.connection)
        caller.connection.close()
        self._gone(caller)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            if peer_uid(connection) != os.getuid():
                connection.close()
                return
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, Caller(connection))

    def _talk(self, caller: Caller, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(caller)
            if events & selectors.EVENT_READ:
                data = caller.connection.recv(1 << 16)
                if not data:
                    raise ConnectionError
                for message in caller.lines.feed(data):
                    self._heard(caller, message)
        except BlockingIOError:
            pass
        except Exception as error:
            self.shut_out(caller, error)

    def _flush(self, caller: Caller) -> None:
        with suppress(BlockingIOError):
            caller.out = caller.out[caller.connection.send(caller.out) :]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.out else 0)
        self._selector.modify(caller.connection, wanted, caller)
