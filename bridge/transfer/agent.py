"""The Agent protocol: how packed bytes move from the prefiller's staging memory into the decoder's.

The prefiller registers its staging memory and describes itself by an opaque blob; the decoder connects with that blob and reads.
Every call is bounded in time. Memory under an unfinished transfer belongs to the agent until `Transfer.done()` says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Memory:
    """A range of this process's memory. device: "cpu", or a device type such as "cuda"; index: its ordinal."""

    address: int
    nbytes: int
    device: str = "cpu"
    index: int = 0


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
    """Registered memory. `release` is idempotent."""

    memory: Memory

    def release(self) -> None: ...


class Transfer(Protocol):
    """A read under way."""

    nbytes: int

    def done(self) -> bool:
        """Whether all bytes have arrived. Never blocks. Raises TransferFailed."""
        ...

    def release(self) -> None:
        """Gives the handle back. Raises TransferTimeout while bytes may still arrive: the target must then stay quarantined."""
        ...


class Peer(Protocol):
    """A connected remote agent."""

    name: str

    def read(self, source: RemoteMemory, target: Registration, ranges: Sequence[ReadRange]) -> Transfer:
        """Starts one read of all ranges. Raises BadRange or TransferFailed."""
        ...

    def disconnect(self) -> None:
        """Closes the endpoint, idempotent. No byte of an unfinished transfer of this peer arrives afterwards."""
        ...


class Agent(Protocol):
    """One process's end of a transfer library."""

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
        """Which transports may carry the bytes, as the library reports it."""
        ...

    def registered_bytes(self) -> int:
        """Bytes that are registered now; zero after every release."""
        ...

    def close(self) -> None:
        """Releases everything, idempotent."""
        ...
