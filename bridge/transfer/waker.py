"""Ends another thread's poll."""

from __future__ import annotations

import contextlib
import socket


class Waker:
    """Registered with a poller by its file descriptor."""

    def __init__(self) -> None:
        self._receive, self._send = socket.socketpair()
        self._receive.setblocking(False)
        self._send.setblocking(False)

    def fileno(self) -> int:
        return self._receive.fileno()

    def wake(self) -> None:
        """From any thread, also after close."""
        with contextlib.suppress(OSError):  # full: it is awake anyway
            self._send.send(b"w")

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            self._receive.recv(4096)

    def close(self) -> None:
        self._receive.close()
        self._send.close()
