"""Writes containers field by field, malformed ones too: nothing here uses the product's own writer, layouts or offsets.

A `RawContainer` is what stands in the bytes, sections as rows of named fields. `pack` turns it into bytes as it is; sizes, counts and the
seal are computed where they are None. `honest_*` are small well-formed ones; `walk` and `tag` are a second, naive reading of the
specification: where each block lies, and what its tag must be.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import operator
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

KEY = bytes(range(100, 132))
MODEL, CONTENT, REQUEST, SHARD, PAYLOAD, GROUPS, CODECS, LAYERS = range(1, 9)
NAMES = ("", "MODEL", "CONTENT", "REQUEST", "SHARD", "PAYLOAD", "GROUPS", "CODECS", "LAYERS")

PRELUDE_LAYOUT = (("magic", "8s"), ("manifest_bytes", "I"), ("reserved", "I"), ("key", "32s"), ("payload_bytes", "Q"), ("end", "8s"))
HEADER_LAYOUT = (("magic", "8s"), ("major", "H"), ("minor", "H"), ("total", "I"), ("count", "H"), ("flags", "H"), ("reserved", "I"))
SECTION_LAYOUT = (("kind", "H"), ("reserved", "H"), ("size", "I"))
COUNT_LAYOUT = (("count", "H"), ("reserved_a", "H"), ("reserved_b", "I"))
_CODING = (("kind", "B"), ("bits", "B"), ("element", "B"), ("rotation", "B"), ("row_bytes", "I"), ("digest", "32s"))

HEADS_OF_SECTIONS: dict[int, tuple[tuple[str, str], ...]] = {
    MODEL: (("digest", "32s"),),
    CONTENT: COUNT_LAYOUT,
    REQUEST: (("lease", "Q"), ("generation", "I"), ("name_bytes", "H"), ("reserved", "H")),
    SHARD: (("tp_rank", "H"), ("tp_size", "H"), ("pp_rank", "H"), ("pp_size", "H")),
    PAYLOAD: (("chunk_tokens", "I"), ("reserved", "I"), ("payload_bytes", "Q")),
    GROUPS: COUNT_LAYOUT,
    CODECS: COUNT_LAYOUT,
    LAYERS: COUNT_LAYOUT,
}
ROWS_OF_SECTIONS: dict[int, tuple[tuple[str, str], ...]] = {
    CONTENT: (("kind", "H"), ("reserved_a", "H"), ("reserved_b", "I"), ("digest", "32s")),
    GROUPS: (
        ("kind", "B"),
        ("reserved_a", "B"),
        ("head_dim", "H"),
        ("heads", "H"),
        ("head_first", "H"),
        ("head_count", "H"),
        ("reserved_b", "H"),
        ("window", "I"),
        ("first_token", "Q"),
        ("end_token", "Q"),
    ),
    CODECS: tuple((f"key_{n}", f) for n, f in _CODING) + tuple((f"value_{n}", f) for n, f in _CODING),
    LAYERS: (("index", "H"), ("group", "H"), ("codec", "H"), ("source", "H"), ("key_scale", "f"), ("value_scale", "f")),
}


class Field(NamedTuple):
    """A named field of a container: where it lies, and its struct code."""

    name: str
    offset: int
    code: str


def _write(out: bytearray, fields: list[Field], prefix: str, layout: tuple[tuple[str, str], ...], values: dict[str, Any]) -> None:
    for name, code in layout:
        fields.append(Field(prefix + name, len(out), code))
        out += struct.pack("<" + code, values[name])


@dataclass
class RawSection:
    """head, rows: values by the field names of the layouts above. tail: bytes behind them. count, size, padding: computed where None."""

    kind: int
    head: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    tail: bytes = b""
    reserved: int = 0
    size: int | None = None
    padding: bytes | None = None
    layout: int = 0
    """The section whose layout is used, where `kind` itself is a lie; 0: that of `kind`."""

    def pack(self, out: bytearray, fields: list[Field]) -> None:
        kind = self.layout or self.kind
        name = NAMES[kind] if kind < len(NAMES) else str(kind)
        body, inner = bytearray(), []
        head = dict(self.head)
        if "count" in head and head["count"] is None:
            head["count"] = len(self.rows)
        _write(body, inner, f"{name}.", HEADS_OF_SECTIONS.get(kind, ()), head)
        for number, row in enumerate(self.rows):
            _write(body, inner, f"{name}[{number}].", ROWS_OF_SECTIONS[kind], row)
        if self.tail:
            inner.append(Field(f"{name}.tail", len(body), f"{len(self.tail)}s"))
        body += self.tail
        header = {"kind": self.kind, "reserved": self.reserved, "size": len(body) if self.size is None else self.size}
        _write(out, fields, f"section {name}.", SECTION_LAYOUT, header)
        fields += [Field(n, o + len(out), c) for n, o, c in inner]
        body += bytes(-len(body) % 8) if self.padding is None else self.padding
        out += body


@dataclass
class RawContainer:
    """A container as it stands in its bytes. Fields that are None are computed by `pack`."""

    sections: list[RawSection]
    payload: bytes = b""
    key: bytes = KEY
    magic: bytes = b"KVBRIDGE"
    major: int = 0
    minor: int = 1
    total: int | None = None
    count: int | None = None
    flags: int = 0
    reserved: int = 0
    behind_sections: bytes = b""
    seal: bytes | None = None
    file_magic: bytes = b"KVBFILE\n"
    manifest_bytes: int | None = None
    file_reserved: int = 0
    stated_payload: int | None = None
    file_end: bytes = bytes(8)
    padding: bytes | None = None
    behind: bytes = b""

    def copy(self) -> RawContainer:
        return copy.deepcopy(self)

    def section(self, kind: int) -> RawSection:
        return next(s for s in self.sections if s.kind == kind)

    @property
    def request(self) -> dict[str, Any]:
        return self.section(REQUEST).head

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.section(GROUPS).rows

    @property
    def codecs(self) -> list[dict[str, Any]]:
        return self.section(CODECS).rows

    @property
    def layers(self) -> list[dict[str, Any]]:
        return self.section(LAYERS).rows

    def manifest(self, fields: list[Field] | None = None) -> bytes:
        """The manifest's bytes, sealed with `key` unless a seal is given."""
        fields = [] if fields is None else fields
        body, inner = bytearray(), []
        for section in self.sections:
            section.pack(body, inner)
        body += self.behind_sections
        header = {
            "magic": self.magic,
            "major": self.major,
            "minor": self.minor,
            "total": 24 + len(body) + 32 if self.total is None else self.total,
            "count": len(self.sections) if self.count is None else self.count,
            "flags": self.flags,
            "reserved": self.reserved,
        }
        out = bytearray()
        _write(out, fields, "header.", HEADER_LAYOUT, header)
        fields += [Field(n, o + len(out), c) for n, o, c in inner]
        out += body
        seal = hmac.digest(self.key, bytes(out), "sha256") if self.seal is None else self.seal
        fields.append(Field("seal", len(out), f"{len(seal)}s"))
        return bytes(out) + seal

    def pack(self) -> bytes:
        return self.pack_with_fields()[0]

    def pack_with_fields(self) -> tuple[bytes, list[Field]]:
        """The container's bytes, and where each of its fields lies in them."""
        fields: list[Field] = []
        inner: list[Field] = []
        manifest = self.manifest(inner)
        prelude = {
            "magic": self.file_magic,
            "manifest_bytes": len(manifest) if self.manifest_bytes is None else self.manifest_bytes,
            "reserved": self.file_reserved,
            "key": self.key,
            "payload_bytes": len(self.payload) if self.stated_payload is None else self.stated_payload,
            "end": self.file_end,
        }
        out = bytearray()
        _write(out, fields, "prelude.", PRELUDE_LAYOUT, prelude)
        fields += [Field(n, o + len(out), c) for n, o, c in inner]
        out += manifest
        out += bytes(-len(out) % 64) if self.padding is None else self.padding
        return bytes(out) + self.payload + self.behind, fields

    def tagged(self) -> RawContainer:
        """Itself, with the payload's size stated right and every tag recomputed with the key; the blocks' bytes stay as they are."""
        head = self.section(PAYLOAD).head
        blocks = list(walk(head["chunk_tokens"], self.groups, self.codecs, self.layers))
        size = blocks[-1].plane_end if blocks else 0
        head["payload_bytes"] = size
        payload = bytearray(self.payload[:size].ljust(size, b"\0"))
        write_tags(payload, blocks, self.key, self.request["lease"], self.request["generation"])
        self.payload = bytes(payload)
        return self


# Where blocks lie, by counting them one by one. -----------------------------------------------------------------------------------


class Block(NamedTuple):
    """One block of the payload order. offset, nbytes: its bytes. tag: where its tag lies. plane_end: where its run ends."""

    ordinal: int
    layer: int
    head: int
    number: int
    offset: int
    nbytes: int
    tag: int
    plane_end: int
    first: int
    end: int
    rows: tuple[int, int, int, int]
    """Bytes of a row of K codes, V codes, K scalars, V scalars."""


_SCALARS = {3: 2, 4: 4, 5: 4}


def row_bytes(codec: dict[str, Any], head_dim: int) -> tuple[int, int, int, int]:
    """Bytes of a row of each plane: K codes, V codes, K scalars, V scalars."""
    codes = [codec[f"{s}_row_bytes"] or head_dim * codec[f"{s}_bits"] // 8 for s in ("key", "value")]
    scalars = [_SCALARS.get(codec[f"{s}_kind"], 0) for s in ("key", "value")]
    return codes[0], codes[1], scalars[0], scalars[1]


def walk(chunk_tokens: int, groups: list[dict[str, Any]], codecs: list[dict[str, Any]], layers: list[dict[str, Any]]) -> Iterator[Block]:
    """Every block in payload order: chunk, layer, kv head, block."""
    offset = ordinal = 0
    start = min(g["first_token"] for g in groups) // chunk_tokens * chunk_tokens
    while start < max(g["end_token"] for g in groups):
        for position, layer in enumerate(layers):
            group, codec = groups[layer["group"]], codecs[layer["codec"]]
            first, end = max(group["first_token"], start), min(group["end_token"], start + chunk_tokens)
            if first >= end:
                continue
            numbers = range(first // 16, (end + 15) // 16)
            rows = row_bytes(codec, group["head_dim"])
            size, plane = 16 * sum(rows), (8 * len(numbers) + 15) // 16 * 16
            for head in range(group["head_count"]):
                tags = offset + size * len(numbers)
                for i, n in enumerate(numbers):
                    valid = max(first - 16 * n, 0), min(end - 16 * n, 16)
                    yield Block(ordinal, position, head, n, offset + i * size, size, tags + 8 * i, tags + plane, *valid, rows)
                    ordinal += 1
                offset = tags + plane
        start += chunk_tokens


# Tags, with Python's integers. ----------------------------------------------------------------------------------------------------


@lru_cache(512)
def _stream(key: bytes, nonce: bytes, counter: int) -> bytes:
    """4096 bytes of the ChaCha20 key stream (RFC 8439) from a block counter on."""
    return Cipher(ChaCha20(key, struct.pack("<I", counter) + nonce), mode=None).encryptor().update(bytes(4096))


@lru_cache(512)
def _words_of_stream(key: bytes, nonce: bytes, offset: int, count: int) -> tuple[int, ...]:
    out = b""
    page, skip = divmod(offset, 4096)
    while len(out) < skip + 8 * count:
        out += _stream(key, nonce, 64 * page)
        page += 1
    return struct.unpack_from(f"<{count}Q", out, skip)


def tag(block: bytes, first: int, end: int, ordinal: int, key: bytes, lease: int, generation: int) -> int:
    """The tag of one block: mask + k[0] * (first | end << 8) + sum of k[j + 1] * word[j], mod 2**64."""
    nonce = struct.pack("<QI", lease, generation)
    keys = _words_of_stream(key, nonce, 1 << 37, 1 + len(block) // 4)
    words = struct.unpack(f"<{len(block) // 4}I", block)
    mask = _words_of_stream(key, nonce, 8 * ordinal // 512 * 512, 64)[ordinal % 64]
    return (mask + sum(map(operator.mul, keys, (first | end << 8, *words)))) % 2**64


def write_tags(payload: bytearray, blocks: list[Block], key: bytes, lease: int, generation: int) -> None:
    """Computes every tag over what lies in the payload, padding of tag planes included."""
    for b in blocks:
        struct.pack_into(
            "<Q", payload, b.tag, tag(bytes(payload[b.offset : b.offset + b.nbytes]), b.first, b.end, b.ordinal, key, lease, generation)
        )
        if b.tag + 8 < b.plane_end and b.plane_end - b.tag == 16:
            payload[b.tag + 8 : b.plane_end] = bytes(8)


def fill(raw: RawContainer, seed: int) -> RawContainer:
    """Random bytes in every valid row of every plane, zeros elsewhere, tags; the payload's size stated."""
    generator = random.Random(seed)
    head = raw.section(PAYLOAD).head
    blocks = list(walk(head["chunk_tokens"], raw.groups, raw.codecs, raw.layers))
    payload = bytearray(blocks[-1].plane_end)
    for b in blocks:
        at = b.offset
        for width in b.rows:
            payload[at + b.first * width : at + b.end * width] = generator.randbytes((b.end - b.first) * width)
            at += 16 * width
    raw.payload = bytes(payload)
    return raw.tagged()


# Honest containers. ---------------------------------------------------------------------------------------------------------------

NO_DIGEST = bytes(32)


def coding(kind: int, bits: int = 0, element: int = 0, rotation: int = 0, row_bytes: int = 0, digest: bytes = NO_DIGEST) -> dict[str, Any]:
    return {"kind": kind, "bits": bits, "element": element, "rotation": rotation, "row_bytes": row_bytes, "digest": digest}


def codec(key: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    return {**{f"key_{n}": v for n, v in key.items()}, **{f"value_{n}": v for n, v in value.items()}}


NO_SIDE, BF16, FP32, FP8, INT8 = coding(0), coding(1, 16, 1), coding(1, 32, 3), coding(2, 8, 4), coding(5, 8)
AFFINE4, AFFINE3 = coding(4, 4), coding(4, 3)
OPAQUE16 = coding(6, row_bytes=16, digest=hashlib.sha256(b"tests/opaque").digest())
# The 3 bit code book for head dimension 64, as the specification's appendix lists it (upper half, big-endian float32).
_BOOK_64_3 = [struct.unpack(">f", bytes.fromhex(h))[0] for h in ("3cfadcfb", "3dc171fc", "3e2bed53", "3e899f54")]
BOOK_64_3 = [-x for x in reversed(_BOOK_64_3)] + _BOOK_64_3
ROTATED3 = coding(3, 3, rotation=1, digest=hashlib.sha256(struct.pack("<8f", *BOOK_64_3)).digest())


def group(heads: int, head_dim: int, first: int, end: int, **other: int) -> dict[str, Any]:
    row = {"kind": 1, "reserved_a": 0, "head_dim": head_dim, "heads": heads, "head_first": 0, "head_count": heads}
    return {**row, "reserved_b": 0, "window": 0, "first_token": first, "end_token": end, **other}


def layer(index: int, group: int = 0, codec: int = 0, source: int = 1, key_scale: float = 1.0, value_scale: float = 1.0) -> dict[str, Any]:
    return {"index": index, "group": group, "codec": codec, "source": source, "key_scale": key_scale, "value_scale": value_scale}


def content(kind: int = 1, digest: bytes = b"\x11" * 32) -> dict[str, Any]:
    return {"kind": kind, "reserved_a": 0, "reserved_b": 0, "digest": digest}


def _counted() -> dict[str, Any]:
    return {"count": None, "reserved_a": 0, "reserved_b": 0}


def honest(
    groups: list[dict[str, Any]],
    codecs: list[dict[str, Any]],
    layers: list[dict[str, Any]],
    *,
    chunk_tokens: int = 16,
    request_id: bytes = b"request-1",
    lease: int = 7,
    generation: int = 1,
    contents: list[dict[str, Any]] | None = None,
    key: bytes = KEY,
    seed: int = 1,
) -> RawContainer:
    """A well-formed container with a random payload."""
    request = {"lease": lease, "generation": generation, "name_bytes": len(request_id), "reserved": 0}
    sections = [
        RawSection(MODEL, {"digest": b"\x22" * 32}),
        RawSection(CONTENT, _counted(), contents or [content()]),
        RawSection(REQUEST, request, tail=request_id),
        RawSection(SHARD, {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}),
        RawSection(PAYLOAD, {"chunk_tokens": chunk_tokens, "reserved": 0, "payload_bytes": 0}),
        RawSection(GROUPS, _counted(), groups),
        RawSection(CODECS, _counted(), codecs),
        RawSection(LAYERS, _counted(), layers),
    ]
    return fill(RawContainer(sections, key=key), seed)


def honest_small(**more: Any) -> RawContainer:
    """raw bf16, one layer, one kv head, head dimension 16, tokens 3 to 36 in three blocks of one run: a tag plane with padding."""
    return honest([group(1, 16, 3, 36)], [codec(BF16, BF16)], [layer(0)], chunk_tokens=48, **more)


def honest_rotated(**more: Any) -> RawContainer:
    """Rotated 3 bit keys and affine 4 bit values, head dimension 64, two kv heads of four, chunks of one block."""
    heads = group(4, 64, 5, 30, head_first=2, head_count=2)
    return honest([heads], [codec(ROTATED3, AFFINE4)], [layer(0), layer(3)], **more)


def honest_mixed(**more: Any) -> RawContainer:
    """Full attention as fp8 with scales, a window as int8, a latent in raw fp32, a state; ranks, adapters, chunks of two blocks."""
    groups = [
        group(2, 16, 0, 40),
        group(1, 16, 20, 40, kind=2, window=20),
        group(1, 32, 0, 40, kind=3),
        group(1, 16, 32, 48, kind=4),
    ]
    codecs = [codec(FP8, AFFINE3), codec(INT8, INT8), codec(FP32, NO_SIDE), codec(OPAQUE16, NO_SIDE)]
    layers = [layer(0, key_scale=0.5), layer(1, 1, 1), layer(2, 2, 2, source=3), layer(3, 3, 3, source=0)]
    more.setdefault("contents", [content(), content(2, b"\x33" * 32), content(5, b"\x44" * 32)])
    raw = honest(groups, codecs, layers, chunk_tokens=32, **more)
    raw.section(SHARD).head.update(tp_rank=1, tp_size=2, pp_rank=2, pp_size=3)
    return raw


def honest_newer(**more: Any) -> RawContainer:
    """A later minor version with an optional section that this reader skips; opaque sides."""
    raw = honest([group(1, 16, 0, 16)], [codec(OPAQUE16, OPAQUE16)], [layer(65535)], **more)
    raw.minor = 9
    raw.sections.append(RawSection(0x8001, tail=b"later minors may say more"))
    return raw


HONEST = {"small": honest_small, "rotated": honest_rotated, "mixed": honest_mixed, "newer": honest_newer}
