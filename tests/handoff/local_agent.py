"""A transfer agent for tests within one process: reads are copies, and a test may delay, break or corrupt them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

from bridge.transfer.agent import Memory, ReadRange, RemoteMemory
from bridge.transfer.errors import BadRange, TransferFailed, TransferTimeout


class LocalRegistration:
    def __init__(self, agent: LocalAgent, memory: Memory) -> None:
        self.agent, self.memory = agent, memory

    def release(self) -> None:
        self.agent.registered.discard(self)


class LocalTransfer:
    """Arrives when the agent's gate is open; fails when the agent says so."""

    def __init__(self, agent: LocalAgent, copies: Sequence[tuple[int, int, int]]) -> None:
        self.agent, self.copies = agent, copies
        self.nbytes = sum(size for _, _, size in copies)
        self.finished = False

    def done(self) -> bool:
        if self.agent.broken:
            raise TransferFailed("broken by the test")
        if not self.finished and self.agent.gate.is_set():
            for target, source, size in self.copies:
                ctypes.memmove(target, source, size)
            self.agent.after_copy(self.copies)
            self.finished = True
        return self.finished

    def release(self) -> None:
        if not self.agent.broken and not self.done():
            raise TransferTimeout("still under way")


class LocalPeer:
    def __init__(self, agent: LocalAgent) -> None:
        self.agent, self.name = agent, "local"
        self.disconnected = False
        self.failure: str | None = None

    def read(self, source: RemoteMemory, target: LocalRegistration, ranges: Sequence[ReadRange]) -> LocalTransfer:
        for item in ranges:
            if item.remote < 0 or item.remote + item.nbytes > source.nbytes or item.local + item.nbytes > target.memory.nbytes:
                raise BadRange(f"{item} is outside the registered memory")
        self.agent.reads += len(ranges)
        copies = [(target.memory.address + item.local, source.address + item.remote, item.nbytes) for item in ranges]
        return LocalTransfer(self.agent, copies)

    def disconnect(self) -> None:
        self.disconnected = True
        self.agent.broken = self.agent.broken or not self.agent.gate.is_set()


class LocalAgent:
    kind = "local"

    def __init__(self, name: str = "local") -> None:
        self.name = name
        self.registered: set[LocalRegistration] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False
        self.reads = 0
        self.after_copy: Callable[[Sequence[tuple[int, int, int]]], None] = lambda copies: None

    def metadata(self) -> bytes:
        return b"local"

    def register(self, memory: Memory) -> LocalRegistration:
        registration = LocalRegistration(self, memory)
        self.registered.add(registration)
        return registration

    def connect(self, metadata: bytes) -> LocalPeer:
        return LocalPeer(self)

    def transports(self) -> str:
        return "memcpy"

    def registered_bytes(self) -> int:
        return sum(item.memory.nbytes for item in self.registered)

    def close(self) -> None:
        self.registered.clear()
