"""The Agent protocol: how packed bytes move from the prefiller's staging memory into the decoder's.

The prefiller registers its staging memory and describes itself by an opaque blob; the decoder connects with that blob and reads.
Every call is bounded in time. Memory under an unfinished transfer belongs to the agent until `Transfer.release()` has returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

MAX_METADATA_BYTES = 1 << 20
"""What Agent.metadata returns at most."""


@dataclass(frozen=True)
class Memory:
    """A range of this process's memory. device: "cpu", or a device type such as "cuda"; index: its ordinal.

    owner: whatever keeps the memory allocated. The agent holds it until it is closed, since late reads may still touch the memory.
    """

    address: int
    nbytes: int
    device: str = "cpu"
    index: int = 0
    owner: object = None


@dataclass(frozen=True)
class RemoteMemory:
    """A range of the peer's registered memory, as it described it."""

    address: int
    nbytes: int
    device: str = "cpu"
    index: int = 0


@dataclass(frozen=True)
class ReadRange:
    """Read `nbytes` from byte `remote` of the peer's memory to byte `local` of ours; both relative to their memory's start."""

    remote: int
    local: int
    nbytes: int


class Registration(Protocol):
    """Registered memory, which must stay allocated until `release` has returned."""

    memory: Memory

    def release(self) -> None:
        """Idempotent. Raises TransferTimeout while an unfinished transfer may still write into it."""
        ...


class Transfer(Protocol):
    """A read under way."""

    nbytes: int

    def done(self) -> bool:
        """Whether all bytes have arrived. It also moves the transfer on, so poll it; it never waits for the peer.

        Raises TransferFailed when the transfer failed or was given up. Its target is safe only after `release` has returned.
        """
        ...

    def release(self) -> None:
        """Gives the handle back; gives the transfer up if it is unfinished.

        Raises TransferTimeout while bytes may still arrive: the target must then stay quarantined. Call it again later: it returns
        when no byte can arrive any more. Where that never comes (a peer that hangs but lives), only Agent.close ends it.
        """
        ...


class Peer(Protocol):
    """A connected remote agent."""

    name: str

    @property
    def failure(self) -> str | None:
        """Why no read from this peer can succeed any more, in a few words; None while the agent knows of nothing. Never waits.

        A connection that failed does not come back: connect again, with the peer's current metadata, and disconnect this one.
        """
        ...

    def read(self, source: RemoteMemory, target: Registration, ranges: Sequence[ReadRange]) -> Transfer:
        """Starts one read of all ranges. Raises BadRange or TransferFailed."""
        ...

    def disconnect(self) -> None:
        """Ends the use of this peer, idempotent. Its unfinished transfers are given up, as by Transfer.release.

        What had already been asked for may still arrive, because a library may not be able to call it back (NIXL: measured). So this
        makes no target safe: that is said by Transfer.release of each transfer, or by Agent.close.
        """
        ...


class Agent(Protocol):
    """One process's end of a transfer library.

    An agent that registers more than host memory has `devices`, the types that it takes besides "cpu"; see `takes`.
    """

    name: str
    """The agent's unique name, by which peers know it."""
    kind: str
    """The library: "nixl", "ucx", "stream". Both ends must use the same."""

    def metadata(self) -> bytes:
        """What a peer needs to connect: valid for memory that is registered when it is called."""
        ...

    def register(self, memory: Memory) -> Registration: ...

    def connect(self, metadata: bytes) -> Peer:
        """Raises PeerUnreachable."""
        ...

    def transports(self) -> str:
        """Which transports may carry the bytes, as the library last reported it. Never waits: it may be asked on an event loop."""
        ...

    def registered_bytes(self) -> int:
        """Bytes that are registered now; zero after every release."""
        ...

    def turned_away(self) -> dict[str, int]:
        """What peers asked of this agent and were refused, or what could not be understood, by kind, as far as the library tells."""
        ...

    def close(self) -> None:
        """Releases everything, idempotent. No byte of any transfer arrives afterwards."""
        ...


class Guard(Protocol):
    """Says who may read which bytes of a registration. Called from the threads that send."""

    def enter(self, reader: str, ranges: Sequence[tuple[int, int]]) -> Any:
        """What `leave` is given once the ranges (offset, bytes) were read; None where this reader may not read all of them now."""
        ...

    def leave(self, entered: Any) -> None:
        """The ranges were read: from now on their bytes may become others'."""
        ...


class _Nobody:
    def enter(self, reader: str, ranges: Sequence[tuple[int, int]]) -> None:
        return None

    def leave(self, entered: Any) -> None:
        pass


NOBODY: Guard = _Nobody()
"""For memory that is only written into."""


@runtime_checkable
class GuardedRegistration(Protocol):
    """Of an agent whose connections show who reads. It asks before each frame, so that a reader gets nothing that is no longer its own."""

    guard: Guard | None
    """None: every configured peer may read all of it."""


def takes(agent: Agent, device: str) -> bool:
    """Whether the agent registers memory of this device type: "cpu", or one that its `devices` names."""
    return device == "cpu" or device in getattr(agent, "devices", ())
