"""What an agent tells peers of itself, for the agents that name registered memory by region: stream and ucx.

A peer finds the region that holds the bytes it wants and asks for (region, offset, size); the owner checks these against what is
registered at that moment. So an edited table of regions gains a peer nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from operator import index as as_int

import msgspec

from bridge.transfer.agent import MAX_METADATA_BYTES, RemoteMemory
from bridge.transfer.errors import BadRange, PeerUnreachable, RegistrationFailed
from bridge.transfer.names import MAX_NAME_BYTES

MAX_REGIONS = 1 << 14
INSTANCE_BYTES = 16

_MAGIC = b"KVBA1\n"
_DIGEST_BYTES = 32
_ADDRESSES = 1 << 64


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Registered memory: its number, never used twice by one agent, its address in the owner's process, and its size in bytes."""

    number: int
    address: int
    nbytes: int


class Described(msgspec.Struct, frozen=True, array_like=True):
    """One running agent. instance: 16 random bytes, others after each restart. endpoint: how to reach it, as its kind defines."""

    kind: str
    name: str
    instance: bytes
    endpoint: bytes
    regions: list[Region]


def encode(described: Described) -> bytes:
    """Metadata: magic, SHA-256 of the rest, msgpack. Raises RegistrationFailed beyond 1 MiB or 16,384 regions."""
    body = msgspec.msgpack.encode(described)
    if len(body) > MAX_METADATA_BYTES - len(_MAGIC) - _DIGEST_BYTES or len(described.regions) > MAX_REGIONS:
        raise RegistrationFailed(
            f"the agent's metadata takes {len(body)} bytes and peers accept {MAX_METADATA_BYTES}", remedy="register fewer, larger memories"
        )
    return _MAGIC + hashlib.sha256(body).digest() + body


def decode(metadata: bytes, kind: str) -> Described:
    """Raises PeerUnreachable for anything that is not whole, or is another kind of agent's."""
    if not isinstance(metadata, (bytes, bytearray, memoryview)):
        raise PeerUnreachable("the peer's metadata is not bytes")
    if len(metadata) > MAX_METADATA_BYTES:
        raise PeerUnreachable(f"the peer's metadata has {len(metadata)} bytes, more than {MAX_METADATA_BYTES}")
    metadata = bytes(metadata)
    head = len(_MAGIC) + _DIGEST_BYTES
    if metadata[: len(_MAGIC)] != _MAGIC:
        raise PeerUnreachable(f"the peer's metadata is not that of a {kind} agent of kvbridge", remedy="use the same agent on both ends")
    if hashlib.sha256(metadata[head:]).digest() != metadata[len(_MAGIC) : head]:
        raise PeerUnreachable("the peer's metadata is damaged (SHA-256 differs)")
    try:
        described = msgspec.msgpack.decode(metadata[head:], type=Described)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise PeerUnreachable(f"the peer's metadata is not understood: {error}") from error
    if described.kind != kind:
        raise PeerUnreachable(
            f"the peer's agent is {described.kind[:32]!r} and this one is {kind!r}", remedy="use the same agent on both ends"
        )
    if len(described.instance) != INSTANCE_BYTES or not 0 < len(described.name.encode()) <= MAX_NAME_BYTES:
        raise PeerUnreachable("the peer's metadata has a name or an instance that cannot be")
    if len(described.regions) > MAX_REGIONS or any(
        r.number < 0 or r.number >= _ADDRESSES or r.address <= 0 or r.nbytes <= 0 or r.address + r.nbytes > _ADDRESSES
        for r in described.regions
    ):
        raise PeerUnreachable("the peer's metadata describes memory that cannot be")
    return described


def region_of(regions: Sequence[Region], source: RemoteMemory, peer: str) -> tuple[int, int]:
    """(region's number, byte of the region at which `source` starts). Raises BadRange where no region holds all of `source`."""
    address, nbytes = as_int(source.address), as_int(source.nbytes)
    for region in regions:
        if region.address <= address and address + nbytes <= region.address + region.nbytes:
            return region.number, address - region.address
    raise BadRange(f"{peer} has not registered these bytes")
