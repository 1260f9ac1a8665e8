"""An agent that does what a broken network, library or network card does: a decorator over any Agent, one armed fault at a time.

Every fault but `hang` reports itself as real ones do: as an error, as silence, or as a success that is none. What follows from an
agent that goes on writing after it has reported success is not emulated at random moments: that breaks the Agent protocol itself.
Only `duplicate` does so, when the next read has arrived and nobody is landing yet.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bridge.transfer.agent import Agent, Memory, Peer, ReadRange, Registration, RemoteMemory, Transfer
from bridge.transfer.errors import TransferFailed, TransferTimeout

DATA_FAULTS = {
    "refuse": "the read cannot be started",
    "fail": "the read ends in an error, part of its bytes written",
    "drop": "the bytes and their notification never come",
    "hang": "the same, and the bytes come after the read was given up",
    "delay": "bytes and notification come late",
    "lose": "the notification comes without the bytes",
    "truncate": "the notification comes, the last bytes do not",
    "reorder": "the halves of the bytes change places",
    "misdirect": "the bytes of another request's chunk come",
    "corrupt": "some bits, a cache line or a page of the bytes are others",
    "duplicate": "the bytes come twice, the second time when the next read has arrived",
}
DELAY_SECONDS = (0.002, 0.06)


@dataclass
class Armed:
    """One fault that waits for its read. at: the number of the read since `arm`. elsewhere: byte of the source that `misdirect` reads."""

    kind: str
    at: int
    rng: random.Random
    elsewhere: int = 0
    done: bool = False


class FaultyTransfer:
    """A read that meets the fault, or the plain read where it is not its turn."""

    def __init__(self, peer: FaultyPeer, source: RemoteMemory, target: Registration, ranges: list[ReadRange], armed: Armed | None) -> None:
        self._agent, self._inner_peer, self._source, self._target = peer.agent, peer.inner, source, target
        self._ranges, self._kind = ranges, armed.kind if armed else "none"
        self._rng = armed.rng if armed else random.Random(0)
        self._elsewhere = armed.elsewhere if armed else 0
        self.nbytes = sum(item.nbytes for item in ranges)
        self._not_before = time.monotonic() + (self._rng.uniform(*DELAY_SECONDS) if self._kind == "delay" else 0)
        self._given_up = False
        self._finished = False
        self._inner: Transfer | None = None
        if self._kind not in ("drop", "hang", "lose", "delay"):
            self._inner = self._start()

    def _start(self) -> Transfer:
        return self._inner_peer.read(self._source, self._target, self._altered())

    def _altered(self) -> list[ReadRange]:
        first, last = self._ranges[0], self._ranges[-1]
        if self._kind in ("truncate", "fail"):
            return [*self._ranges[:-1], ReadRange(last.remote, last.local, self._rng.randrange(1, last.nbytes))]
        if self._kind == "reorder":
            half = first.nbytes // 2
            swapped = [ReadRange(first.remote + half, first.local, half), ReadRange(first.remote, first.local + half, half)]
            return swapped + self._ranges[1:]
        if self._kind == "misdirect":
            shift = self._elsewhere - first.remote
            return [ReadRange(item.remote + shift, item.local, item.nbytes) for item in self._ranges]
        return self._ranges

    def done(self) -> bool:
        if self._kind in ("drop", "hang") and not self._finished:
            if self._given_up:
                raise TransferFailed("given up")
            return False
        if self._kind == "delay" and self._inner is None and time.monotonic() >= self._not_before:
            self._inner = self._start()
        if self._finished:
            return True
        if self._kind != "lose" and (self._inner is None or not self._inner.done()):
            return False
        if self._kind == "fail":
            raise TransferFailed("the emulated link reports an error")
        self._finished = True
        self._agent.write_again()
        if self._kind == "corrupt":
            self._corrupt()
        if self._kind == "duplicate":
            item = self._rng.choice(self._ranges)
            address = self._target.memory.address + item.local
            self._agent.again.append((address, ctypes.string_at(address, item.nbytes)))
        return True

    def _corrupt(self) -> None:
        item = self._rng.choice(self._ranges)
        size = self._rng.choice([1, 1, 64, 4096])
        start = self._rng.randrange(max(item.nbytes - size, 1))
        size = min(size, item.nbytes - start)
        address = self._target.memory.address + item.local + start
        before = ctypes.string_at(address, size)
        after = bytes([before[0] ^ 1 << self._rng.randrange(8)]) if size == 1 else self._rng.randbytes(size)
        ctypes.memmove(address, after, size)

    def release(self) -> None:
        if self._kind == "hang" and not self._finished:
            self._given_up = True
            if not self._agent.healed.is_set():
                raise TransferTimeout("its bytes may still arrive")
            self._inner = self._inner or self._start()
            self._inner.done()
            self._finished = True
        self._given_up = True
        if self._inner is not None:
            self._inner.release()


class FaultyPeer:
    def __init__(self, agent: FaultyAgent, inner: Peer) -> None:
        self.agent, self.inner, self.name = agent, inner, inner.name

    @property
    def failure(self) -> str | None:
        return self.inner.failure

    def read(self, source: RemoteMemory, target: Registration, ranges: Sequence[ReadRange]) -> Any:
        armed = self.agent.next_read()
        if armed is not None and armed.kind == "refuse":
            raise TransferFailed("the emulated library refuses the read")
        return FaultyTransfer(self, source, target, list(ranges), armed)

    def disconnect(self) -> None:
        self.inner.disconnect()


class FaultyAgent:
    """Wraps an agent. `arm` names the next fault and the read that meets it; `heal` lets what hangs arrive, late."""

    def __init__(self, inner: Agent) -> None:
        self.inner, self.name, self.kind = inner, inner.name, inner.kind
        self.healed = threading.Event()
        self.again: list[tuple[int, bytes]] = []
        self._armed: Armed | None = None
        self._reads = 0
        self._lock = threading.Lock()

    def arm(self, kind: str | None, at: int = 0, rng: random.Random | None = None, elsewhere: int = 0) -> None:
        """kind: of DATA_FAULTS, None for no fault."""
        with self._lock:
            self._armed = Armed(kind, at, rng or random.Random(0), elsewhere) if kind else None
            self._reads = 0
            self.healed.clear()

    @property
    def met(self) -> bool:
        """Whether some read has met the fault."""
        return self._armed is not None and self._armed.done

    def heal(self) -> None:
        self.healed.set()

    def next_read(self) -> Armed | None:
        with self._lock:
            number, self._reads = self._reads, self._reads + 1
            if self._armed is None or self._armed.done or number != self._armed.at:
                return None
            self._armed.done = True
            return self._armed

    def write_again(self) -> None:
        """Bytes that come a second time, whoever their memory belongs to by now."""
        while self.again:
            address, data = self.again.pop()
            ctypes.memmove(address, data, len(data))

    def metadata(self) -> bytes:
        return self.inner.metadata()

    def register(self, memory: Memory) -> Registration:
        return self.inner.register(memory)

    def connect(self, metadata: bytes) -> FaultyPeer:
        return FaultyPeer(self, self.inner.connect(metadata))

    def transports(self) -> str:
        return f"faulty {self.inner.transports()}"

    def registered_bytes(self) -> int:
        return self.inner.registered_bytes()

    def close(self) -> None:
        self.inner.close()
