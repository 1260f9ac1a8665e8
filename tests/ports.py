"""Ports that stay a test's own while nobody listens on them. One that was found free, or was given back, may be another's soon."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def kept_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port of `host` that refuses connections until somebody who knows its number listens; the system gives it to nobody else."""
    with socket.socket() as keeper:
        # Who listens has this option, too, and may then share the port with a socket that does not listen.
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind((host, 0))
        yield keeper.getsockname()[1]


@contextlib.contextmanager
def silent_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port of `host` that answers no connection: its queue is full."""
    with contextlib.ExitStack() as held:
        listening = held.enter_context(socket.socket())
        listening.bind((host, 0))
        listening.listen(0)
        for _ in range(8):
            one = held.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]
