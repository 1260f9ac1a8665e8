"""The manifest as bytes: sections, seal, and the parser that believes nothing before it is verified."""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import lru_cache

from bridge.wire import errors
from bridge.wire.alike import OfLayers
from bridge.wire.coding import CODING_BYTES, Element, SlotCodec
from bridge.wire.manifest import (
    MAJOR,
    MAX_CODECS,
    MAX_CONTENT_DIGESTS,
    MAX_GROUPS,
    MAX_LAYERS,
    MAX_MANIFEST_BYTES,
    MAX_SECTIONS,
    MINOR,
    ContentKind,
    Group,
    GroupKind,
    Layer,
    Manifest,
    Shard,
    bounded,
)
from bridge.wire.payload import PayloadMap

MAGIC = b"KVBRIDGE"
KEY_BYTES = 32
SEAL_BYTES = 32

_HEADER = struct.Struct("<8sHHIHHI")
_SECTION = struct.Struct("<HHI")
_CONTENT = struct.Struct("<HHI32s")
_REQUEST = struct.Struct("<QIHH")
_SHARD = struct.Struct("<HHHH")
_PAYLOAD = struct.Struct("<IIQ")
_GROUP = struct.Struct("<BBHHHHHIQQ")
_LAYER = struct.Struct("<HHHHff")
_COUNT = struct.Struct("<HHI")


class Section(IntEnum):
    MODEL = 1
    CONTENT = 2
    REQUEST = 3
    SHARD = 4
    PAYLOAD = 5
    GROUPS = 6
    CODECS = 7
    LAYERS = 8


OPTIONAL_SECTION = 0x8000
"""Sections from this number on may be skipped by a reader of a lower minor version; others may not."""


_SECTIONS = frozenset(Section)


def _pad8(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def _sections(m: Manifest, payload_bytes: int) -> Iterator[tuple[Section, bytes]]:
    yield Section.MODEL, m.model_digest
    content = b"".join(_CONTENT.pack(kind, 0, 0, digest) for kind, digest in m.content)
    yield Section.CONTENT, _COUNT.pack(len(m.content), 0, 0) + content
    name = m.request_id.encode()
    yield Section.REQUEST, _REQUEST.pack(m.lease, m.generation, len(name), 0) + name
    yield Section.SHARD, _SHARD.pack(m.shard.tp_rank, m.shard.tp_size, m.shard.pp_rank, m.shard.pp_size)
    yield Section.PAYLOAD, _PAYLOAD.pack(m.chunk_tokens, 0, payload_bytes)
    groups = b"".join(
        _GROUP.pack(g.kind, 0, g.head_dim, g.heads, g.head_first, g.head_count, 0, g.window, g.first_token, g.end_token) for g in m.groups
    )
    yield Section.GROUPS, _COUNT.pack(len(m.groups), 0, 0) + groups
    yield Section.CODECS, _COUNT.pack(len(m.codecs), 0, 0) + b"".join(codec.to_bytes() for codec in m.codecs)
    yield Section.LAYERS, _section_of_layers(m.layers)


def _packed_layers(layers: Sequence[Layer]) -> bytes:
    records = b"".join(_LAYER.pack(x.index, x.group, x.codec, x.source, x.key_scale, x.value_scale) for x in layers)
    return _COUNT.pack(len(layers), 0, 0) + records


_section_of_layers = OfLayers(_packed_layers)


def check_key(key: bytes) -> None:
    """Raises BadSeal unless a payload's key has its 32 bytes: nothing can be sealed or tagged with another."""
    if len(key) != KEY_BYTES:
        raise errors.BadSeal(f"a payload's key has {KEY_BYTES} bytes, this one has {len(key)}", remedy="make the key with new_key()")


def compute_seal(body: bytes, key: bytes) -> bytes:
    """HMAC-SHA256 (RFC 2104) over the manifest without its last 32 bytes, under the payload's key."""
    return hmac.digest(key, body, "sha256")


def seal(manifest: Manifest, key: bytes) -> bytes:
    """The manifest's bytes, sealed with the payload's 32-byte key. Raises the WireError of the first clause it breaks."""
    check_key(key)
    manifest.check()
    body = b""
    sections = list(_sections(manifest, PayloadMap(manifest).payload_bytes))
    for kind, data in sections:
        body += _SECTION.pack(kind, 0, len(data)) + _pad8(data)
    total = _HEADER.size + len(body) + SEAL_BYTES
    bounded(total, 0, MAX_MANIFEST_BYTES, errors.TooLarge, "the manifest's size")
    body = _HEADER.pack(MAGIC, MAJOR, manifest.minor, total, len(sections), 0, 0) + body
    return body + compute_seal(body, key)


def manifest_size(prefix: bytes) -> int:
    """Size in bytes of the manifest that begins with these at least 24 bytes; bounded, so that it may be allocated.

    Raises BadMagic, UnsupportedVersion, Truncated, TooLarge or ReservedNotZero.
    """
    if len(prefix) < _HEADER.size:
        raise errors.Truncated(f"a manifest header has {_HEADER.size} bytes, there are {len(prefix)}")
    magic, major, _, total, count, flags, reserved = _HEADER.unpack_from(prefix)
    if magic != MAGIC:
        raise errors.BadMagic(f"the magic is {magic!r}, not {MAGIC!r}")
    if major != MAJOR:
        raise errors.UnsupportedVersion(f"the manifest has major version {major}, this reader knows {MAJOR}")
    if flags or reserved:
        raise errors.ReservedNotZero("reserved bytes of the manifest header are not zero")
    if total > MAX_MANIFEST_BYTES or count > MAX_SECTIONS:
        raise errors.TooLarge(f"a manifest of {total} bytes and {count} sections is over the limit")
    if total < _HEADER.size + SEAL_BYTES:
        raise errors.Truncated(f"a manifest cannot have only {total} bytes")
    return total


def open_sealed(data: bytes, key: bytes) -> Manifest:
    """Parses and checks a sealed manifest: size, seal, structure, then every field.

    data: exactly the manifest. key: the payload's 32 bytes. Raises the WireError of the first clause that is broken.
    """
    total = manifest_size(data)
    if len(data) < total:
        raise errors.Truncated(f"the manifest says {total} bytes, there are {len(data)}")
    if len(data) > total:
        raise errors.TrailingBytes(f"the manifest says {total} bytes, there are {len(data)}")
    if not hmac.compare_digest(compute_seal(data[:-SEAL_BYTES], key), data[-SEAL_BYTES:]):
        raise errors.BadSeal("the manifest's seal does not match")
    return _parse(data[:-SEAL_BYTES])


def _split_sections(body: bytes) -> dict[Section, bytes]:
    _, _, minor, _, count, _, _ = _HEADER.unpack_from(body)
    found: dict[Section, bytes] = {}
    offset, previous = _HEADER.size, -1
    for _ in range(count):
        if offset + _SECTION.size > len(body):
            raise errors.Truncated("a section header lies beyond the manifest")
        kind, reserved, size = _SECTION.unpack_from(body, offset)
        offset += _SECTION.size
        padded = size + -size % 8
        if offset + padded > len(body):
            raise errors.Truncated(f"section {kind} lies beyond the manifest")
        if reserved or any(body[offset + size : offset + padded]):
            raise errors.ReservedNotZero(f"reserved or padding bytes of section {kind} are not zero")
        if kind <= previous:
            raise errors.SectionOrder(f"section {kind} follows section {previous}")
        previous = kind
        if kind in _SECTIONS:
            found[Section(kind)] = body[offset : offset + size]
        elif kind < OPTIONAL_SECTION or minor <= MINOR:
            raise errors.UnknownSection(f"section {kind} is not known to version {MAJOR}.{MINOR}")
        offset += padded
    if offset != len(body):
        raise errors.TrailingBytes(f"{len(body) - offset} bytes of the manifest belong to no section")
    for section in Section:
        if section not in found:
            raise errors.MissingSection(f"section {section.name} is missing")
    return found


def _fixed(data: bytes, layout: struct.Struct, section: Section) -> tuple:
    if len(data) != layout.size:
        raise errors.SectionSize(f"section {section.name} has {len(data)} bytes, not {layout.size}")
    return layout.unpack(data)


def _records(data: bytes, size: int, limit: int, section: Section) -> list[bytes]:
    """The records of a section that begins with their count. Raises SectionSize, TooLarge or ReservedNotZero."""
    if len(data) < _COUNT.size:
        raise errors.SectionSize(f"section {section.name} has only {len(data)} bytes")
    count, *reserved = _COUNT.unpack_from(data)
    if any(reserved):
        raise errors.ReservedNotZero(f"reserved bytes of section {section.name} are not zero")
    if count > limit:
        raise errors.TooLarge(f"section {section.name} has {count} records, the limit is {limit}")
    if len(data) != _COUNT.size + count * size:
        raise errors.SectionSize(f"section {section.name} has {len(data)} bytes for {count} records of {size}")
    return [data[i : i + size] for i in range(_COUNT.size, len(data), size)]


def _parse_content(record: bytes) -> tuple[ContentKind, bytes]:
    kind, *reserved, digest = _CONTENT.unpack(record)
    if any(reserved):
        raise errors.ReservedNotZero("reserved bytes of a content digest are not zero")
    if kind not in ContentKind.__members__.values():
        raise errors.BadContent(f"content digest of unknown kind {kind}")
    return ContentKind(kind), digest


def _parse_group(record: bytes) -> Group:
    kind, r1, head_dim, heads, head_first, head_count, r2, window, first, end = _GROUP.unpack(record)
    if r1 or r2:
        raise errors.ReservedNotZero("reserved bytes of a group are not zero")
    if kind not in GroupKind.__members__.values():
        raise errors.BadGroup(f"a group of unknown kind {kind}")
    if head_count == 0:
        raise errors.BadShard("a group carries no kv head")
    return Group(heads, head_dim, first, end, head_first, head_count, GroupKind(kind), window)


def _parse_layer(record: bytes) -> Layer:
    index, group, codec, source, key_scale, value_scale = _LAYER.unpack(record)
    if source not in Element.__members__.values():
        raise errors.BadCoding(f"layer {index} has a source type of unknown number {source}")
    return Layer(index, group, codec, key_scale, value_scale, Element(source))


@lru_cache(maxsize=16)
def _parse_layers(section: bytes) -> tuple[Layer, ...]:
    """The section LAYERS; it is the same in every payload of a model."""
    return tuple(_parse_layer(record) for record in _records(section, _LAYER.size, MAX_LAYERS, Section.LAYERS))


def _parse(body: bytes) -> Manifest:
    _, _, minor, _, _, _, _ = _HEADER.unpack_from(body)
    sections = _split_sections(body)
    if len(sections[Section.MODEL]) != 32:
        raise errors.SectionSize(f"section MODEL has {len(sections[Section.MODEL])} bytes, not 32")
    request = sections[Section.REQUEST]
    lease, generation, name_size, reserved = _fixed(request[: _REQUEST.size], _REQUEST, Section.REQUEST)
    if len(request) != _REQUEST.size + name_size:
        raise errors.SectionSize(f"section REQUEST has {len(request)} bytes for an id of {name_size}")
    if reserved:
        raise errors.ReservedNotZero("reserved bytes of section REQUEST are not zero")
    try:
        request_id = request[_REQUEST.size :].decode()
    except UnicodeDecodeError:
        raise errors.BadText("the request id is not UTF-8") from None
    chunk_tokens, reserved, payload_bytes = _fixed(sections[Section.PAYLOAD], _PAYLOAD, Section.PAYLOAD)
    if reserved:
        raise errors.ReservedNotZero("reserved bytes of section PAYLOAD are not zero")
    manifest = Manifest(
        model_digest=sections[Section.MODEL],
        content=tuple(_parse_content(r) for r in _records(sections[Section.CONTENT], _CONTENT.size, MAX_CONTENT_DIGESTS, Section.CONTENT)),
        request_id=request_id,
        lease=lease,
        generation=generation,
        chunk_tokens=chunk_tokens,
        groups=tuple(_parse_group(r) for r in _records(sections[Section.GROUPS], _GROUP.size, MAX_GROUPS, Section.GROUPS)),
        codecs=tuple(SlotCodec.from_bytes(r) for r in _records(sections[Section.CODECS], 2 * CODING_BYTES, MAX_CODECS, Section.CODECS)),
        layers=_parse_layers(bytes(sections[Section.LAYERS])),
        shard=Shard(*_fixed(sections[Section.SHARD], _SHARD, Section.SHARD)),
        minor=minor,
    )
    manifest.check()
    expected = PayloadMap(manifest).payload_bytes
    if payload_bytes != expected:
        raise errors.PayloadSize(f"the manifest states {payload_bytes} payload bytes, its fields give {expected}")
    return manifest
