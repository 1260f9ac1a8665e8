"""What the bytes of one side (K or V) of a slot are: the description that stands in the manifest, and the sizes that follow from it."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from bridge.wire import errors

BLOCK_TOKENS = 16
"""Tokens of a wire block. Blocks lie on the absolute grid of multiples of this number."""

CODING_BYTES = 40
_CODING = struct.Struct("<BBBBI32s")
NO_DIGEST = bytes(32)


class CodingKind(IntEnum):
    NONE = 0
    """No bytes: the value side of a cache that keeps one vector a token (MLA latents, indexer keys)."""
    RAW = 1
    """Elements as the engine keeps them."""
    FP8 = 2
    """Eight-bit floats; one scale a layer and side stands in the manifest."""
    CODEBOOK = 3
    """Rotated, normalised, nearest entry of a scalar code book; the vector's norm as fp16 beside it."""
    AFFINE = 4
    """Unsigned integers between the vector's least and greatest element; (scale, zero) as fp16 beside them."""
    INT8 = 5
    """Signed integers of the vector over its greatest magnitude; the scale as fp32 beside them."""
    OPAQUE = 6
    """Bytes of a declared meaning that this format does not interpret: `row_bytes` of them a token."""


_SCALAR_BYTES = {CodingKind.CODEBOOK: 2, CodingKind.AFFINE: 4, CodingKind.INT8: 4}
MAX_OPAQUE_BYTES = 1 << 20


class Element(IntEnum):
    NONE = 0
    BF16 = 1
    FP16 = 2
    FP32 = 3
    E4M3FN = 4

    @property
    def bits(self) -> int:
        return {Element.NONE: 0, Element.BF16: 16, Element.FP16: 16, Element.FP32: 32, Element.E4M3FN: 8}[self]


class Rotation(IntEnum):
    NONE = 0
    SYLVESTER_HADAMARD = 1
    """Sylvester's matrix of +1 and -1, over the square root of the head dimension; no random signs."""


@dataclass(frozen=True)
class Coding:
    """One side of a codec.

    kind, element, bits: what a code is. rotation: what the vector went through first. row_bytes: bytes a token of an OPAQUE side.
    digest: SHA-256 of the code book's little-endian fp32 entries (CODEBOOK; it depends on the head dimension), or of the meaning's
    name (OPAQUE); zeros otherwise.
    """

    kind: CodingKind
    bits: int = 0
    element: Element = Element.NONE
    rotation: Rotation = Rotation.NONE
    row_bytes: int = 0
    digest: bytes = NO_DIGEST

    @property
    def scaled(self) -> bool:
        """Whether one scale a layer and side stands in the manifest."""
        return self.kind is CodingKind.FP8

    def code_bytes(self, head_dim: int) -> int:
        """Bytes of one vector's codes."""
        return self.row_bytes or head_dim * self.bits // 8

    def scalar_bytes(self) -> int:
        """Bytes of one vector's scalars: norm fp16; scale and zero fp16; scale fp32."""
        return _SCALAR_BYTES.get(self.kind, 0)

    def check(self) -> None:
        """Raises BadCoding where the parameters contradict each other, or are plain numbers that stand for a name."""
        types = type(self.kind), type(self.element), type(self.rotation), type(self.digest)
        if types != (CodingKind, Element, Rotation, bytes):  # answers are remembered, and 3 equals CodingKind.CODEBOOK
            raise errors.BadCoding(f"{self!r} has a field of another type than Coding says")
        if not _consistent(self):
            raise errors.BadCoding(
                f"a coding of kind {self.kind.name} with {self.bits} bits, element {self.element.name}, rotation {self.rotation.name}, "
                f"{self.row_bytes} bytes a row"
            )

    def check_head_dim(self, head_dim: int) -> None:
        """Raises BadHeadDim where vectors of this length cannot be coded."""
        if self.rotation is not Rotation.NONE and head_dim & (head_dim - 1):
            raise errors.BadHeadDim(f"head dimension {head_dim} is no power of two, which the Hadamard rotation of this codec needs")
        if head_dim * self.bits % 8:
            raise errors.BadHeadDim(f"{head_dim} codes of {self.bits} bits do not fill whole bytes")

    def to_bytes(self) -> bytes:
        return _CODING.pack(self.kind, self.bits, self.element, self.rotation, self.row_bytes, self.digest)

    @classmethod
    def from_bytes(cls, data: bytes) -> Coding:
        """Parses CODING_BYTES bytes. Raises BadCoding."""
        kind, bits, element, rotation, row_bytes, digest = _CODING.unpack(data)
        try:
            coding = cls(CodingKind(kind), bits, Element(element), Rotation(rotation), row_bytes, digest)
        except ValueError as error:
            raise errors.BadCoding(f"unknown coding: {error}") from None
        coding.check()
        return coding


@lru_cache(maxsize=256)
def _consistent(coding: Coding) -> bool:
    kind, element, bits = coding.kind, coding.element, coding.bits
    consistent = {
        CodingKind.NONE: element is Element.NONE and bits == 0,
        CodingKind.RAW: element in (Element.BF16, Element.FP16, Element.FP32) and bits == element.bits,
        CodingKind.FP8: element is Element.E4M3FN and bits == 8,
        CodingKind.CODEBOOK: element is Element.NONE and bits in (3, 4),
        CodingKind.AFFINE: element is Element.NONE and bits in (3, 4),
        CodingKind.INT8: element is Element.NONE and bits == 8,
        CodingKind.OPAQUE: element is Element.NONE and bits == 0,
    }[kind]
    rotated = coding.rotation is not Rotation.NONE
    consistent &= rotated == (kind is CodingKind.CODEBOOK)
    consistent &= (coding.digest != NO_DIGEST) == (kind in (CodingKind.CODEBOOK, CodingKind.OPAQUE))
    consistent &= (1 <= coding.row_bytes <= MAX_OPAQUE_BYTES) if kind is CodingKind.OPAQUE else coding.row_bytes == 0
    consistent &= len(coding.digest) == len(NO_DIGEST)
    return consistent


def codebook_digest(entries: bytes) -> bytes:
    """SHA-256 over a code book's little-endian fp32 entries in ascending order."""
    return hashlib.sha256(entries).digest()


def opaque(meaning: str, row_bytes: int) -> Coding:
    """The coding of `row_bytes` bytes a token whose meaning both sides know by this name, such as "vllm-0.32/int4_per_token_head".

    Raises BadCoding for a name with characters that UTF-8 does not have.
    """
    try:
        name = meaning.encode()
    except UnicodeEncodeError:
        raise errors.BadCoding("the name of an opaque side's meaning holds characters that UTF-8 does not have") from None
    return Coding(CodingKind.OPAQUE, row_bytes=row_bytes, digest=hashlib.sha256(name).digest())


@dataclass(frozen=True)
class Plane:
    """A contiguous part of a block: 16 rows of `row_bytes`, one a token, from byte `offset` of the block on."""

    name: str
    offset: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return BLOCK_TOKENS * self.row_bytes


@dataclass(frozen=True)
class SlotCodec:
    """How K and V of one token and kv head travel: the unit that a manifest's codec table lists."""

    key: Coding
    value: Coding

    def slot_bytes(self, head_dim: int) -> int:
        """Bytes of one token and kv head, K and V, codes and scalars."""
        return sum(side.code_bytes(head_dim) + side.scalar_bytes() for side in (self.key, self.value))

    def block_bytes(self, head_dim: int) -> int:
        """Bytes of a wire block, without its tag."""
        return BLOCK_TOKENS * self.slot_bytes(head_dim)

    def planes(self, head_dim: int) -> tuple[Plane, Plane, Plane, Plane]:
        """K codes, V codes, K scalars, V scalars, in the order of the block; a side without scalars has a plane of no bytes."""
        rows = (
            ("K codes", self.key.code_bytes(head_dim)),
            ("V codes", self.value.code_bytes(head_dim)),
            ("K scalars", self.key.scalar_bytes()),
            ("V scalars", self.value.scalar_bytes()),
        )
        planes, offset = [], 0
        for name, row_bytes in rows:
            planes.append(Plane(name, offset, row_bytes))
            offset += BLOCK_TOKENS * row_bytes
        return planes[0], planes[1], planes[2], planes[3]

    def check(self) -> None:
        """Raises BadCoding where a side's parameters contradict each other, or where there is no key side."""
        self.key.check()
        self.value.check()
        if self.key.kind is CodingKind.NONE:
            raise errors.BadCoding("a codec without a key side carries nothing")

    def check_head_dim(self, head_dim: int) -> None:
        """Raises BadHeadDim where this codec cannot carry vectors of this length."""
        self.key.check_head_dim(head_dim)
        self.value.check_head_dim(head_dim)

    def to_bytes(self) -> bytes:
        return self.key.to_bytes() + self.value.to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> SlotCodec:
        """Parses 2 * CODING_BYTES bytes. Raises BadCoding."""
        codec = cls(Coding.from_bytes(data[:CODING_BYTES]), Coding.from_bytes(data[CODING_BYTES:]))
        codec.check()
        return codec
