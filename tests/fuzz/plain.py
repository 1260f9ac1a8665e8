"""A second reading of a container's bytes: trusting, naive, sharing no line with the product's reader.

It believes every size and raises anything at all on bytes that are not well formed; it is only asked about bytes that a reader accepted
(or that a mutation wants to repair), and says what they mean.
"""

from __future__ import annotations

import hmac
import math
import struct
from dataclasses import dataclass
from typing import Any

from tests.attacks import build
from tests.attacks.build import Block, walk

_FORMATS = {
    kind: (struct.Struct("<" + "".join(code for _, code in layout)), [name for name, _ in layout])
    for kind, layout in build.ROWS_OF_SECTIONS.items()
}


def _rows(kind: int, body: bytes) -> list[dict[str, Any]]:
    layout, names = _FORMATS[kind]
    count = int.from_bytes(body[:2], "little")
    return [dict(zip(names, layout.unpack_from(body, 8 + i * layout.size), strict=True)) for i in range(count)]


@dataclass(frozen=True)
class Plain:
    """What a container says."""

    key: bytes
    minor: int
    sections: list[tuple[int, bytes]]
    model: bytes
    contents: list[dict[str, Any]]
    request_id: bytes
    lease: int
    generation: int
    shard: tuple[int, ...]
    chunk_tokens: int
    payload_bytes: int
    groups: list[dict[str, Any]]
    codecs: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    payload: bytes

    def blocks(self) -> list[Block]:
        return list(walk(self.chunk_tokens, self.groups, self.codecs, self.layers))

    def dump(self) -> tuple[Any, ...]:
        """Every field of the manifest, in the order of `judge.dump`."""
        groups = tuple(
            (g["kind"], g["head_dim"], g["heads"], g["head_first"], g["head_count"], g["window"], g["first_token"], g["end_token"])
            for g in self.groups
        )
        sides = ("kind", "bits", "element", "rotation", "row_bytes", "digest")
        codecs = tuple(tuple(c[f"{side}_{name}"] for name in sides) for c in self.codecs for side in ("key", "value"))
        layers = tuple(tuple(x.values()) for x in self.layers)
        contents = tuple((c["kind"], c["digest"]) for c in self.contents)
        place = (self.request_id, self.lease, self.generation, self.shard, self.chunk_tokens)
        return self.minor, self.model, contents, *place, groups, codecs, layers

    def known_manifest(self) -> bytes:
        """The manifest without the sections that this version skips, counted and sealed anew."""
        body = b""
        known = [(kind, data) for kind, data in self.sections if kind < 0x8000]
        for kind, data in known:
            body += struct.pack("<HHI", kind, 0, len(data)) + data + bytes(-len(data) % 8)
        body = struct.pack("<8sHHIHHI", b"KVBRIDGE", 0, self.minor, 24 + len(body) + 32, len(known), 0, 0) + body
        return body + hmac.digest(self.key, body, "sha256")


def read_plainly(data: bytes) -> Plain:
    """Raises whatever happens on bytes that are not a container."""
    size = int.from_bytes(data[8:12], "little")
    payload = data[64 + (size + 63) // 64 * 64 :]
    return read_pieces(data[16:48], data[64 : 64 + size], payload)


def read_pieces(key: bytes, manifest: bytes, payload: bytes) -> Plain:
    """From the file's key, its sealed manifest, and its payload."""
    minor, count = int.from_bytes(manifest[10:12], "little"), int.from_bytes(manifest[16:18], "little")
    sections, at = [], 24
    for _ in range(count):
        kind, size = struct.unpack_from("<HxxI", manifest, at)
        sections.append((kind, manifest[at + 8 : at + 8 + size]))
        at += 8 + (size + 7) // 8 * 8
    by_kind = dict(sections)
    lease, generation, name_bytes = struct.unpack_from("<QIH", by_kind[build.REQUEST])
    chunk_tokens, payload_bytes = struct.unpack("<I4xQ", by_kind[build.PAYLOAD])
    return Plain(
        key=key,
        minor=minor,
        sections=sections,
        model=by_kind[build.MODEL],
        contents=_rows(build.CONTENT, by_kind[build.CONTENT]),
        request_id=by_kind[build.REQUEST][16 : 16 + name_bytes],
        lease=lease,
        generation=generation,
        shard=struct.unpack("<4H", by_kind[build.SHARD]),
        chunk_tokens=chunk_tokens,
        payload_bytes=payload_bytes,
        groups=_rows(build.GROUPS, by_kind[build.GROUPS]),
        codecs=_rows(build.CODECS, by_kind[build.CODECS]),
        layers=_rows(build.LAYERS, by_kind[build.LAYERS]),
        payload=payload,
    )


# Values, element by element in Python's floats. -----------------------------------------------------------------------------------


def _bits(row: bytes, width: int, count: int) -> list[int]:
    stream = int.from_bytes(row, "little")
    return [stream >> width * i & (1 << width) - 1 for i in range(count)]


def _e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -value if code & 0x80 else value


def decode_row(codes: bytes, scalars: bytes, side: dict[str, Any], head_dim: int, scale: float) -> list[float]:
    """One side's vector of one token, in double precision. side: kind, bits, element as in the manifest. OPAQUE rows are their bytes."""
    kind, bits = side["kind"], side["bits"]
    if kind == 1:
        if side["element"] == 1:
            return [struct.unpack("<f", b"\0\0" + codes[i : i + 2])[0] for i in range(0, len(codes), 2)]
        return list(struct.unpack(f"<{head_dim}{'e' if side['element'] == 2 else 'f'}", codes))
    if kind == 2:
        return [_e4m3(code) * scale for code in codes]
    if kind == 3:
        book = build.BOOK_64_3
        entries = [book[i] for i in _bits(codes, bits, head_dim)]
        norm = struct.unpack("<e", scalars)[0]
        factor = norm / math.sqrt(sum(e * e for e in entries) + 1e-16) / math.sqrt(head_dim)
        signs = [[1 - 2 * ((i & j).bit_count() & 1) for j in range(head_dim)] for i in range(head_dim)]
        return [factor * sum(s * e for s, e in zip(row, entries, strict=True)) for row in signs]
    if kind == 4:
        step, zero = struct.unpack("<2e", scalars)
        return [code * step + zero for code in _bits(codes, bits, head_dim)]
    if kind == 5:
        (step,) = struct.unpack("<f", scalars)
        return [code * step for code in struct.unpack(f"<{len(codes)}b", codes)]
    return [float(byte) for byte in codes]
