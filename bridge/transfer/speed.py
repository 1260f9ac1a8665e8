"""Watches how fast each peer's bytes arrive, over any agent: a link slower than configured is a warning with the reason, or a refusal.

Transfer libraries fall back in silence, to TCP where RDMA was meant, or to a slower network. This looks at what really arrived.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from bridge.transfer.agent import Agent, Memory, Peer, ReadRange, Registration, RemoteMemory, Transfer
from bridge.transfer.errors import LinkTooSlow

WINDOW_BYTES = 64 << 20
"""How much must have arrived before a peer's speed is judged; less tells more of latency than of the link."""

_LOG = logging.getLogger("kvbridge.transfer")


class _Meter:
    """One peer's bytes, and the time in which at least one read of it was under way. Over all reads together: they share the link."""

    def __init__(self) -> None:
        self.gbps: float | None = None
        """Gigabytes a second (1e9) over the last whole window."""
        self.slow = 0
        """Whole windows below the minimum, in a row."""
        self._under_way = 0
        self._since = 0.0
        self._busy = 0.0
        self._bytes = 0

    def start(self, now: float) -> None:
        if not self._under_way:
            self._since = now
        self._under_way += 1

    def stop(self, now: float, arrived: int) -> bool:
        """Whether a window is whole."""
        self._under_way -= 1
        self._busy += now - self._since
        self._since = now
        self._bytes += arrived
        if self._bytes < WINDOW_BYTES:
            return False
        self.gbps = self._bytes / max(self._busy, 1e-9) / 1e9
        self._bytes, self._busy = 0, 0.0
        return True


class WatchedTransfer:
    """A read whose end is timed: at the poll that sees it, so within the poller's interval."""

    def __init__(self, peer: WatchedPeer, transfer: Transfer) -> None:
        self.nbytes = transfer.nbytes
        self._peer, self._transfer = peer, transfer
        self._open = True

    def done(self) -> bool:
        """As the agent's own."""
        try:
            done = self._transfer.done()
        except BaseException:
            self._end(0)
            raise
        if done:
            self._end(self.nbytes)
        return done

    def release(self) -> None:
        """As the agent's own."""
        self._end(0)
        self._transfer.release()

    def _end(self, arrived: int) -> None:
        if self._open:
            self._open = False
            self._peer._agent._ended(self._peer, arrived)


class WatchedPeer:
    """A peer whose reads are timed."""

    def __init__(self, agent: WatchedAgent, peer: Peer) -> None:
        self.name = peer.name
        self._agent, self._peer = agent, peer

    @property
    def failure(self) -> str | None:
        """As the agent's own."""
        return self._peer.failure

    def read(self, source: RemoteMemory, target: Registration, ranges: Sequence[ReadRange]) -> WatchedTransfer:
        """As the agent's own; also raises LinkTooSlow."""
        self._agent._check(self)
        transfer = self._peer.read(source, target, ranges)
        self._agent._started(self)
        return WatchedTransfer(self, transfer)

    def disconnect(self) -> None:
        """As the agent's own."""
        self._peer.disconnect()


class WatchedAgent:
    """An agent of any kind, watched.

    minimum_gbps: gigabytes a second (1e9 bytes) that a peer's link must reach over every 64 MiB that arrive, all its reads together.
    refuse: whether reads from a peer that missed it `strikes` times in a row raise LinkTooSlow; else each time is logged as a warning.
    A refused peer is judged anew when it is connected again.
    """

    def __init__(self, agent: Agent, minimum_gbps: float, *, refuse: bool = False, strikes: int = 3) -> None:
        self.agent, self.name, self.kind = agent, agent.name, agent.kind
        self.devices = getattr(agent, "devices", ())
        self.minimum_gbps, self.refuse, self.strikes = minimum_gbps, refuse, strikes
        self.warnings = 0
        """Windows that were too slow."""
        self._lock = threading.Lock()
        self._meters: dict[str, _Meter] = {}

    def metadata(self) -> bytes:
        """As the agent's own."""
        return self.agent.metadata()

    def register(self, memory: Memory) -> Registration:
        """As the agent's own."""
        return self.agent.register(memory)

    def connect(self, metadata: bytes) -> WatchedPeer:
        """As the agent's own; a peer that was refused gets another chance."""
        peer = WatchedPeer(self, self.agent.connect(metadata))
        with self._lock:
            meter = self._meters.setdefault(peer.name, _Meter())
            if meter.slow >= self.strikes:
                meter.slow = 0
        return peer

    def transports(self) -> str:
        """What the agent says, and the speed seen with each peer."""
        with self._lock:
            seen = [f"{name} {meter.gbps:.2f} GB/s" for name, meter in self._meters.items() if meter.gbps is not None]
        return f"{self.agent.transports()}; seen: {', '.join(seen) or f'less than {WINDOW_BYTES >> 20} MiB so far'}"

    def turned_away(self) -> dict[str, int]:
        """As the agent's own."""
        return self.agent.turned_away()

    def registered_bytes(self) -> int:
        """As the agent's own."""
        return self.agent.registered_bytes()

    def close(self) -> None:
        """As the agent's own."""
        self.agent.close()

    def seen_gbps(self, peer: str) -> float | None:
        """A peer's speed over its last 64 MiB, or None."""
        with self._lock:
            meter = self._meters.get(peer)
            return None if meter is None else meter.gbps

    def _check(self, peer: WatchedPeer) -> None:
        with self._lock:
            meter = self._meters[peer.name]
            refused = self.refuse and meter.slow >= self.strikes
        if refused:
            raise LinkTooSlow(self._sentence(peer.name, meter.gbps))

    def _started(self, peer: WatchedPeer) -> None:
        with self._lock:
            self._meters[peer.name].start(time.monotonic())

    def _ended(self, peer: WatchedPeer, arrived: int) -> None:
        with self._lock:
            meter = self._meters[peer.name]
            if not meter.stop(time.monotonic(), arrived) or meter.gbps is None:
                return
            slow = meter.gbps < self.minimum_gbps
            meter.slow = meter.slow + 1 if slow else 0
            self.warnings += slow
        if slow:
            _LOG.warning("%s", self._sentence(peer.name, meter.gbps))

    def _sentence(self, name: str, gbps: float | None) -> str:
        return f"{name} sends {gbps or 0:.2f} GB/s where {self.minimum_gbps:g} are configured ({self.agent.transports()})"
