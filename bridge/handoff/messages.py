"""The control channel's messages: typed, bounded, msgpack. Unknown fields are ignored, so that minors of the protocol interoperate.

The decoder connects and says Hello; the prefiller answers Welcome. Then, for each request:

    decoder                       prefiller
    Claim             ->
                      <-          Grant, or Refusal
                      <-          Ready, once a chunk
    Taken             ->          once a chunk
    Commit            ->
                      <-          Released
    Abandon           ->          at any time instead of Commit
                      <-          Revoked, at any time before Commit
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from bridge.handoff.errors import ProtocolError
from bridge.transfer.agent import MAX_METADATA_BYTES
from bridge.wire.manifest import MAX_MANIFEST_BYTES, MAX_RANKS

PROTOCOL_MAJOR, PROTOCOL_MINOR = 0, 2
MAX_MESSAGE_BYTES = 2 * MAX_MANIFEST_BYTES

U32: TypeAlias = Annotated[int, Meta(ge=0, lt=2**32)]
U64: TypeAlias = Annotated[bytes, Meta(min_length=8, max_length=8)]
"""Little-endian: msgpack integers of other libraries may be signed."""
Offset: TypeAlias = Annotated[int, Meta(ge=0, lt=2**62)]
Text: TypeAlias = Annotated[str, Meta(max_length=1024)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Digest: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]
MAX_CHUNKS = 1 << 16
ChunkIndex: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_CHUNKS)]


class Hello(msgspec.Struct, tag="hello"):
    """The decoder's first message."""

    major: U32
    minor: U32
    agent: Name


class Welcome(msgspec.Struct, tag="welcome"):
    """The prefiller's answer: how to read its staging memory."""

    major: U32
    minor: U32
    agent: Name
    agent_metadata: Annotated[bytes, Meta(min_length=1, max_length=MAX_METADATA_BYTES)]
    address: U64
    nbytes: Offset
    device: Annotated[str, Meta(min_length=1, max_length=32)]
    index: U32


class Claim(msgspec.Struct, tag="claim"):
    """A decoder wants the payload: reader number `reader` of `readers` that take all or part of it (a decoder's TP ranks).

    model: the digest of the model that it holds.
    """

    sequence: U32
    request_id: Name
    lease: U64
    generation: U32
    reader: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    readers: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    model: Digest


class Slot(msgspec.Struct, array_like=True):
    """A packed chunk lies at byte `offset` of the staging memory."""

    chunk: ChunkIndex
    offset: Offset


class Grant(msgspec.Struct, tag="grant"):
    """The sealed manifest, its key, and the chunks that are packed already."""

    sequence: U32
    manifest: Annotated[bytes, Meta(max_length=MAX_MANIFEST_BYTES)]
    key: Digest
    ready: Annotated[list[Slot], Meta(max_length=MAX_CHUNKS)]


class Refusal(msgspec.Struct, tag="refusal"):
    """The claim failed by this clause."""

    sequence: U32
    clause: Name
    detail: Text
    remedy: Text


class Ready(msgspec.Struct, tag="ready"):
    """A chunk was packed into the staging memory."""

    lease: U64
    generation: U32
    slot: Slot


class Taken(msgspec.Struct, tag="taken"):
    """The decoder has the chunk's bytes; its staging memory may be reused."""

    lease: U64
    generation: U32
    chunk: ChunkIndex


class Commit(msgspec.Struct, tag="commit"):
    """Every block was verified and landed."""

    lease: U64
    generation: U32


class Released(msgspec.Struct, tag="released"):
    """The prefiller has freed the lease after a Commit."""

    lease: U64
    generation: U32


class Abandon(msgspec.Struct, tag="abandon"):
    """The decoder gives up."""

    lease: U64
    generation: U32
    clause: Name
    detail: Text


class Revoked(msgspec.Struct, tag="revoked"):
    """The prefiller takes the lease back."""

    lease: U64
    generation: U32
    clause: Name
    detail: Text
    remedy: Text


class Ping(msgspec.Struct, tag="ping"):
    """Keeps an idle channel alive; any message does."""


Message: TypeAlias = Hello | Welcome | Claim | Grant | Refusal | Ready | Taken | Commit | Released | Abandon | Revoked | Ping

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The message as msgpack."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Parses one message. Raises ProtocolError for anything that is not exactly one well-formed message within its bounds."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a control message cannot be read: {error}") from None


def u64(value: int) -> bytes:
    """A 64-bit field of a message."""
    return value.to_bytes(8, "little")


def from_u64(data: bytes) -> int:
    """The value of a 64-bit field."""
    return int.from_bytes(data, "little")
