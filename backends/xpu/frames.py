"""What crosses between the emulated XPU's client and its worker: small typed messages in frames, and a block of shared memory.

A frame is a length (u32, little-endian) and that many bytes of MessagePack. Pages and payloads lie in the shared memory, whose file
descriptor the worker inherits; messages name places in it.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct

import msgspec
import numpy as np

from bridge.devices import DeviceError

MAX_FRAME = 16 << 20
_LENGTH = struct.Struct("<I")
ALIGNMENT = 64


class BadFrame(DeviceError):
    """A frame that is too long, or that is no message."""

    clause = "xpu_frame"
    remedy = "the two processes of the emulated XPU must be of one version of kvbridge"


class Tensor(msgspec.Struct, frozen=True):
    """A view on shared memory. place, nbytes: of its storage. offset, strides: in elements. dtype: as torch names it."""

    place: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Side(msgspec.Struct, frozen=True):
    """A bridge.pages.PageSide. coding: as the wire writes it."""

    coding: bytes
    codes: Tensor
    scalars: Tensor | None
    scale: float
    folded: bool


class Layer(msgspec.Struct, frozen=True):
    """One layer's pages. kind: "layer", "slots" or "opaque". meaning: of opaque rows."""

    index: int
    kind: str
    sides: tuple[Side, ...]
    head_dim: int
    meaning: str = ""


class Share(msgspec.Struct, frozen=True):
    """A bridge.devices.SpanShare. span: the fields of its LayerSpan. key, value: its codec's sides, as the wire writes them."""

    span: tuple[int, ...]
    key: bytes
    value: bytes
    index: int
    head_dim: int
    head_first: int
    head_count: int
    model_head: int
    offset: int
    key_scale: float
    value_scale: float


class Call(msgspec.Struct, frozen=True, tag="call"):
    """pack (write is None) or land. memory: bytes of shared memory. payload: (first byte, bytes). tags: key, lease, generation."""

    memory: int
    layers: tuple[Layer, ...]
    first_head: int
    table: tuple[int, ...]
    block_size: int
    shares: tuple[Share, ...]
    tags: tuple[bytes, int, int]
    payload: tuple[int, int]
    write: tuple[int, int] | None = None


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Asks who the worker is."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A call's end, or the worker's answer to Hello. report: a sentence."""

    report: str = ""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A typed error of the worker."""

    clause: str
    detail: str
    advice: str


_ENCODER = msgspec.msgpack.Encoder()
_TO_WORKER = msgspec.msgpack.Decoder(Call | Hello)
_TO_CLIENT = msgspec.msgpack.Decoder(Done | Failed)


def send(link: socket.socket, message: msgspec.Struct) -> None:
    """Raises BadFrame where the message is too long, and OSError where the other process is gone."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME:
        raise BadFrame(f"a message of {len(body)} bytes, the limit is {MAX_FRAME}", remedy="pack fewer layers in one call")
    link.sendall(_LENGTH.pack(len(body)) + body)


def _read(link: socket.socket, count: int) -> bytes | None:
    """`count` bytes, or None where the other end closed before the first. Raises BadFrame where it closed in the middle."""
    data = bytearray()
    while len(data) < count:
        part = link.recv(count - len(data))
        if not part:
            if data:
                raise BadFrame("the link ended in the middle of a frame")
            return None
        data += part
    return bytes(data)


def _receive(link: socket.socket, decoder: msgspec.msgpack.Decoder) -> object | None:
    head = _read(link, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME:
        raise BadFrame(f"a frame of {length} bytes, the limit is {MAX_FRAME}")
    body = _read(link, length)
    try:
        return decoder.decode(body or b"")
    except msgspec.DecodeError as error:
        raise BadFrame(f"a frame is no message: {error}") from None


def receive_call(link: socket.socket) -> Call | Hello | None:
    """The next message for the worker; None where the client is gone. Raises BadFrame."""
    return _receive(link, _TO_WORKER)  # type: ignore[return-value]


def receive_answer(link: socket.socket) -> Done | Failed | None:
    """The worker's answer; None where it is gone. Raises BadFrame, and TimeoutError as the socket says."""
    return _receive(link, _TO_CLIENT)  # type: ignore[return-value]


class SharedMemory:
    """A block of anonymous memory that two processes map. It only grows; it is gone when both have closed it."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("kvbridge-xpu") if descriptor is None else descriptor
        self._map: mmap.mmap | None = None
        self.bytes = np.zeros(0, np.uint8)

    def grow(self, nbytes: int) -> None:
        """Makes room for `nbytes`. The owner's call: views of before stay valid and are the old block's."""
        if nbytes > self.bytes.size:
            size = max(nbytes, 2 * self.bytes.size, 1 << 20)
            os.ftruncate(self.descriptor, size)
            self.map(size)

    def map(self, nbytes: int) -> None:
        """Maps the block's first `nbytes`, where it is not yet."""
        if nbytes > self.bytes.size:
            self._map = mmap.mmap(self.descriptor, nbytes)
            self.bytes = np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        self.bytes, self._map = np.zeros(0, np.uint8), None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
