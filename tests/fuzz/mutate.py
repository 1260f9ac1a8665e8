"""Mutations of honest containers that know where things lie. Each is made from a number alone, so that any can be made again.

Half are left as they are; half are repaired as an attacker with the payload's key could: sizes made consistent, tags recomputed, the
manifest sealed anew, so that the clauses behind seal and tags are reached.
"""

from __future__ import annotations

import hmac
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tests.attacks import build
from tests.attacks.build import Block, Field
from tests.fuzz.plain import read_pieces

MAX_REGROWN_TOKENS = 128
MAX_REGROWN_BYTES = 1 << 14


class Mutant(NamedTuple):
    """data: the bytes. how: the operators that made them. repaired: whether the key was used."""

    data: bytes
    how: str
    repaired: bool


@dataclass(frozen=True)
class Seed:
    """An honest container in pieces. fields: of the manifest, offsets from its beginning. sections: each with header and padding."""

    name: str
    data: bytes
    prelude: bytes
    manifest: bytes
    payload: bytes
    fields: tuple[Field, ...]
    sections: tuple[bytes, ...]
    blocks: tuple[Block, ...]


def make_seed(name: str, raw: build.RawContainer) -> Seed:
    data, fields = raw.pack_with_fields()
    manifest = raw.manifest()
    inner = tuple(Field(f.name, f.offset - 64, f.code) for f in fields if not f.name.startswith("prelude"))
    sections = []
    for section in raw.sections:
        out = bytearray()
        section.pack(out, [])
        sections.append(bytes(out))
    head = raw.section(build.PAYLOAD).head
    blocks = tuple(build.walk(head["chunk_tokens"], raw.groups, raw.codecs, raw.layers))
    return Seed(name, data, data[:64], manifest, raw.payload, inner, tuple(sections), blocks)


def make_seeds() -> list[Seed]:
    """Every honest container of the attacks, each also as another request's, another key's, and an earlier generation's."""
    tiny = build.honest([build.group(1, 16, 0, 7)], [build.codec(build.INT8, build.FP8)], [build.layer(0)], request_id=b"r")
    pair = build.honest(
        [build.group(2, 16, 0, 48)], [build.codec(build.FP8, build.INT8)], [build.layer(0), build.layer(1)], chunk_tokens=32
    )
    seeds = [make_seed("tiny", tiny), make_seed("pair", pair)]
    for name, make in build.HONEST.items():
        seeds.append(make_seed(name, make()))
        seeds.append(make_seed(f"{name}, another request", make(request_id=b"request-2", lease=8, key=build.KEY[::-1], seed=2)))
    seeds.append(make_seed("small, before", build.honest_small(generation=0, seed=3)))
    return seeds


@dataclass
class Draft:
    """A container under mutation. whole: set by mutations that no longer know pieces."""

    prelude: bytearray
    manifest: bytearray
    gap: bytearray
    payload: bytearray
    sized: bool = False
    """Whether sizes are part of the mutation, so that no repair may touch them."""

    def join(self) -> bytes:
        return bytes(self.prelude + self.manifest + self.gap + self.payload)


_INTERESTING = {
    "B": (0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 127, 128, 255),
    "H": (0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 32, 48, 64, 80, 96, 128, 255, 256, 1023, 1024, 1025, 1040, 4096, 4097, 32767, 32768, 65535),
    "I": (
        0,
        1,
        8,
        15,
        16,
        17,
        32,
        48,
        64,
        255,
        65535,
        65536,
        65552,
        1 << 20,
        (1 << 20) + 1,
        1 << 24,
        (1 << 24) + 1,
        1 << 31,
        2**32 - 16,
        2**32 - 1,
    ),
    "Q": (0, 1, 15, 16, 17, 32, 48, 1 << 24, (1 << 24) + 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 16, 2**64 - 1),
}
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-45, 3.4e38, float("inf"), float("-inf"), float("nan"), 1.0000001)
_TEXTS = (b"", b"\0", b"\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"x" * 256, b"x" * 257, "é".encode(), b"request-2", b"a\nb", b"\xe2\x82")
_WIDTHS = {"B": 1, "H": 2, "I": 4, "Q": 8, "f": 4}


def _value(rng: random.Random, code: str, old: bytes) -> bytes:
    """Another value for a field."""
    if code.endswith("s"):
        choice = rng.randrange(4)
        if choice == 0:
            return bytes(len(old))
        if choice == 1:
            return rng.randbytes(len(old))
        flipped = bytearray(old)
        if flipped:
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if code == "f":
        return struct.pack("<f", rng.choice(_FLOATS)) if rng.random() < 0.7 else rng.randbytes(4)
    width = _WIDTHS[code]
    number = int.from_bytes(old, "little")
    choice = rng.randrange(5)
    if choice == 0:
        number += rng.choice((-16, -8, -2, -1, 1, 2, 8, 16))
    elif choice == 1:
        number ^= 1 << rng.randrange(8 * width)
    elif choice == 2:
        return rng.randbytes(width)
    else:
        number = rng.choice(_INTERESTING[code])
    return (number % (1 << 8 * width)).to_bytes(width, "little")


class Mutator:
    """Makes mutants of the seeds. `make(number)` depends on the run's seed and the number only."""

    def __init__(self, seed: int, seeds: list[Seed] | None = None) -> None:
        self.seed = seed
        self.seeds = make_seeds() if seeds is None else seeds
        self.originals = frozenset(s.data for s in self.seeds)
        self._operators: list[tuple[Callable[[random.Random, Seed, Draft], None], int]] = [
            (_flip, 3),
            (_set_bytes, 3),
            (_set_number, 2),
            (_edit_fields, 14),
            (_edit_prelude, 2),
            (_sections, 6),
            (_rows, 4),
            (_text, 2),
            (_resize_bytes, 2),
            (_gap, 1),
            (_payload_bytes, 5),
            (_payload_places, 5),
            (_payload_zeros, 3),
            (_payload_size, 2),
            (_dimension, 3),
        ]
        self._choices = [operator for operator, weight in self._operators for _ in range(weight)]

    def make(self, number: int) -> Mutant:
        rng = random.Random(self.seed << 40 | number)
        # Some mutations change nothing (an exchange of equal bytes): then another is made.
        for _ in range(8):
            mutant = self._make(rng)
            if mutant.data not in self.originals:
                break
        return mutant

    def _make(self, rng: random.Random) -> Mutant:
        seed = rng.choice(self.seeds)
        draft = Draft(bytearray(seed.prelude), bytearray(seed.manifest), bytearray(-len(seed.manifest) % 64), bytearray(seed.payload))
        how = []
        repaired = rng.random() < 0.5
        if rng.random() < 0.12:
            how.append(self._cross(rng, seed, draft))
        if not how or rng.random() < 0.2:
            for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
                operator = rng.choice(self._choices)
                operator(rng, seed, draft)
                how.append(operator.__name__[1:])
        if repaired:
            how.append(_repair(rng, draft))
        data = draft.join()
        if rng.random() < 0.06:
            data = _cut(rng, data, rng.choice(self.seeds).data)
            how.append("cut")
        return Mutant(data, f"{seed.name}: {', '.join(how)}", repaired)

    def _cross(self, rng: random.Random, seed: Seed, draft: Draft) -> str:
        """Pieces of another container in place of this one's: prelude, key, manifest, payload, tags, or one block."""
        other = rng.choice(self.seeds)
        choice = rng.randrange(6)
        if choice == 0:
            draft.prelude[16:48] = other.prelude[16:48]
        elif choice == 1:
            draft.manifest, draft.gap = bytearray(other.manifest), bytearray(-len(other.manifest) % 64)
        elif choice == 2:
            draft.payload = bytearray(other.payload)
        elif choice == 3:
            for mine, theirs in zip(seed.blocks, other.blocks, strict=False):
                draft.payload[mine.tag : mine.tag + 8] = other.payload[theirs.tag : theirs.tag + 8]
        elif choice == 4:
            mine, theirs = rng.choice(seed.blocks), rng.choice(other.blocks)
            size = min(mine.nbytes, theirs.nbytes)
            draft.payload[mine.offset : mine.offset + size] = other.payload[theirs.offset : theirs.offset + size]
            draft.payload[mine.tag : mine.tag + 8] = other.payload[theirs.tag : theirs.tag + 8]
        else:
            position = rng.randrange(min(len(seed.sections), len(other.sections)))
            _set_sections(draft, [*seed.sections[:position], other.sections[position], *seed.sections[position + 1 :]])
        return f"cross {choice} with {other.name}"


# Operators. -----------------------------------------------------------------------------------------------------------------------


def _piece(rng: random.Random, draft: Draft) -> bytearray:
    piece = rng.choice((draft.prelude, draft.manifest, draft.manifest, draft.manifest, draft.payload, draft.payload))
    return piece if piece else draft.prelude


def _flip(rng: random.Random, seed: Seed, draft: Draft) -> None:
    piece = _piece(rng, draft)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        piece[rng.randrange(len(piece))] ^= 1 << rng.randrange(8)


def _set_bytes(rng: random.Random, seed: Seed, draft: Draft) -> None:
    piece = _piece(rng, draft)
    at, size = rng.randrange(len(piece)), rng.choice((1, 1, 2, 4, 8, 32))
    data = rng.randbytes(size) if rng.random() < 0.5 else bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF))]) * size
    piece[at : at + size] = data[: len(piece) - at]


def _set_number(rng: random.Random, seed: Seed, draft: Draft) -> None:
    piece, code = _piece(rng, draft), rng.choice("BHIQ")
    width = _WIDTHS[code]
    at = rng.randrange(max(len(piece) // width, 1)) * width
    old = bytes(piece[at : at + width])
    piece[at : at + width] = _value(rng, code, old.ljust(width, b"\0"))[: len(old)]


def _edit_fields(rng: random.Random, seed: Seed, draft: Draft) -> None:
    for _ in range(rng.choice((1, 1, 1, 2))):
        field = rng.choice(seed.fields)
        size = struct.calcsize("<" + field.code)
        if field.offset + size > len(draft.manifest):
            continue
        draft.manifest[field.offset : field.offset + size] = _value(
            rng, field.code, bytes(draft.manifest[field.offset : field.offset + size])
        )
        draft.sized |= field.name == "header.total"


_PRELUDE_FIELDS = ((0, "8s"), (8, "I"), (12, "I"), (16, "32s"), (48, "Q"), (56, "8s"))


def _edit_prelude(rng: random.Random, seed: Seed, draft: Draft) -> None:
    offset, code = rng.choice(_PRELUDE_FIELDS)
    size = struct.calcsize("<" + code)
    draft.prelude[offset : offset + size] = _value(rng, code, bytes(draft.prelude[offset : offset + size]))
    draft.sized |= offset in (8, 48)


def _set_sections(draft: Draft, sections: list[bytes], count: int | None = None) -> None:
    """Other sections, with the header's count and total to match."""
    body = b"".join(sections)
    draft.manifest[24:-32] = body
    draft.manifest[12:18] = struct.pack("<IH", 56 + len(body), (len(sections) if count is None else count) % 65536)


def _sections(rng: random.Random, seed: Seed, draft: Draft) -> None:
    sections = list(seed.sections)
    position, other = rng.randrange(len(sections)), rng.randrange(len(sections))
    choice, count = rng.randrange(8), None
    if choice == 0:
        sections[position], sections[other] = sections[other], sections[position]
    elif choice == 1:
        sections.insert(other, sections[position])
    elif choice == 2:
        del sections[position]
    elif choice == 3:
        kind, size, _ = rng.choice((0, 9, 99, 0x7FFF, 0x8000, 0x8001, 0xFFFF)), rng.choice((0, 1, 8, 13)), None
        data = struct.pack("<HHI", kind, 0, size) + rng.randbytes(size) + bytes(-size % 8)
        sections.insert(rng.choice((0, len(sections), other)), data)
        if rng.random() < 0.5:
            draft.manifest[10:12] = rng.choice((2, 9, 0xFFFF)).to_bytes(2, "little")
    elif choice == 4:
        section, delta = bytearray(sections[position]), rng.choice((-24, -8, -4, -1, 1, 4, 8, 20, 32, 80))
        size = max(int.from_bytes(section[4:8], "little") + delta, 0)
        body = bytes(section[8:]).ljust(size, b"\0")[:size]
        sections[position] = bytes(section[:4]) + struct.pack("<I", size) + body + bytes(-size % 8)
    elif choice == 5:
        section = bytearray(sections[position])
        section[4:8] = _value(rng, "I", bytes(section[4:8]))
        sections[position] = bytes(section)
    elif choice == 6:
        count = len(sections) + rng.choice((-2, -1, 1, 2, 56, 57))
    else:
        section = bytearray(sections[position])
        size = int.from_bytes(section[4:8], "little")
        if 8 + size < len(section):
            section[rng.randrange(8 + size, len(section))] = rng.randrange(1, 256)
        else:
            section += rng.randbytes(8)
        sections[position] = bytes(section)
    _set_sections(draft, sections, count)


_ROW_BYTES = {build.CONTENT: 40, build.GROUPS: 32, build.CODECS: 80, build.LAYERS: 20}


def _rows(rng: random.Random, seed: Seed, draft: Draft) -> None:
    """Rows of a counted section dropped, doubled, exchanged or many times over, count and size to match."""
    sections = list(seed.sections)
    position = rng.choice([i for i, s in enumerate(sections) if s[0] in _ROW_BYTES and s[1] == 0])
    section, width = sections[position], _ROW_BYTES[sections[position][0]]
    count = int.from_bytes(section[8:10], "little")
    rows = [section[16 + i * width : 16 + (i + 1) * width] for i in range(count)]
    choice, at, other = rng.randrange(5), rng.randrange(count), rng.randrange(count)
    if choice == 0:
        del rows[at]
    elif choice == 1:
        rows.insert(other, rows[at])
    elif choice == 2:
        rows[at], rows[other] = rows[other], rows[at]
    elif choice == 3:
        rows *= rng.choice((2, 17, 65))
    else:
        row = bytearray(rows[at])
        row[:2] = _value(rng, "H", bytes(row[:2]))
        rows.insert(rng.choice((0, at, count)), bytes(row))
    body = struct.pack("<HHI", len(rows), 0, 0) + b"".join(rows)
    sections[position] = section[:4] + struct.pack("<I", len(body)) + body + bytes(-len(body) % 8)
    _set_sections(draft, sections)


def _text(rng: random.Random, seed: Seed, draft: Draft) -> None:
    text = rng.choice(_TEXTS)
    sections = list(seed.sections)
    position = next(i for i, s in enumerate(sections) if s[:2] == b"\3\0")
    body = sections[position][8:20] + struct.pack("<HH", len(text), 0) + text
    sections[position] = struct.pack("<HHI", 3, 0, len(body)) + body + bytes(-len(body) % 8)
    _set_sections(draft, sections)


def _resize_bytes(rng: random.Random, seed: Seed, draft: Draft) -> None:
    """Bytes inserted, deleted or doubled anywhere in manifest or payload."""
    piece = rng.choice((draft.manifest, draft.payload))
    if not piece:
        return
    at, size = rng.randrange(len(piece)), rng.choice((1, 4, 8, 16, 64))
    choice = rng.randrange(3)
    if choice == 0:
        piece[at:at] = rng.randbytes(size)
    elif choice == 1:
        del piece[at : at + size]
    else:
        piece[at:at] = piece[at : at + size]
    if len(draft.manifest) < 56:
        draft.manifest.extend(bytes(56))


def _gap(rng: random.Random, seed: Seed, draft: Draft) -> None:
    if draft.gap and rng.random() < 0.7:
        draft.gap[rng.randrange(len(draft.gap))] = rng.randrange(256)
    else:
        draft.gap.extend(bytes(rng.choice((1, 8, 64))))
    draft.sized = True


def _payload_bytes(rng: random.Random, seed: Seed, draft: Draft) -> None:
    block = rng.choice(seed.blocks)
    at = block.offset + rng.randrange(block.nbytes) if rng.random() < 0.7 else block.tag + rng.randrange(8)
    if at < len(draft.payload):
        draft.payload[at] ^= 1 << rng.randrange(8)


def _payload_places(rng: random.Random, seed: Seed, draft: Draft) -> None:
    """Blocks, tags or both exchanged or copied between two places."""
    a, b = rng.choice(seed.blocks), rng.choice(seed.blocks)
    if a.nbytes != b.nbytes or max(a.plane_end, b.plane_end) > len(draft.payload):
        return
    spans = [(a.offset, b.offset, a.nbytes), (a.tag, b.tag, 8)]
    for x, y, size in rng.choice((spans, spans[:1], spans[1:])):
        first, second = bytes(draft.payload[x : x + size]), bytes(draft.payload[y : y + size])
        draft.payload[x : x + size] = second
        if rng.random() < 0.7:
            draft.payload[y : y + size] = first


def _payload_zeros(rng: random.Random, seed: Seed, draft: Draft) -> None:
    """Something in bytes that must be zero: rows outside the valid range, padding of a tag plane."""
    partial = [b for b in seed.blocks if b.first or b.end < 16 or b.plane_end - b.tag == 16]
    if not partial:
        return
    block = rng.choice(partial)
    places = list(range(block.tag + 8, block.plane_end)) if block.plane_end - block.tag == 16 else []
    at = block.offset
    for width in block.rows:
        for row in (*range(block.first), *range(block.end, 16)):
            if width:
                places.append(at + row * width + rng.randrange(width))
        at += 16 * width
    place = rng.choice(places)
    if place < len(draft.payload):
        draft.payload[place] = rng.randrange(1, 256)


def _dimension(rng: random.Random, seed: Seed, draft: Draft) -> None:
    """Another head dimension that some codecs carry and others do not."""
    for field in seed.fields:
        if field.name.endswith(".head_dim") and field.offset + 2 <= len(draft.manifest):
            draft.manifest[field.offset : field.offset + 2] = rng.choice((16, 32, 48, 64, 80, 96, 112, 128, 192, 256)).to_bytes(2, "little")


def _payload_size(rng: random.Random, seed: Seed, draft: Draft) -> None:
    size = rng.choice((1, 8, 16, 64, 1024))
    if rng.random() < 0.5:
        del draft.payload[-size:]
    else:
        draft.payload.extend(bytes(size) if rng.random() < 0.5 else rng.randbytes(size))


def _cut(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Truncated, extended, or spliced with another container."""
    choice, at = rng.randrange(4), rng.randrange(len(data) + 1)
    if choice == 0:
        return data[:at]
    if choice == 1:
        return data + rng.randbytes(rng.choice((1, 8, 64)))
    if choice == 2:
        return data[:at] + other[at:]
    return data[:at] + other[rng.randrange(len(other) + 1) :]


# Repairs. -------------------------------------------------------------------------------------------------------------------------


def _repair(rng: random.Random, draft: Draft) -> str:
    """What the key allows: consistent sizes, tags, the seal. Each only sometimes, so that every clause's own check is reached."""
    done = []
    key = bytes(draft.prelude[16:48])
    if rng.random() < 0.55 and _regrow(draft, key):
        done.append("tagged")
    if not draft.sized or rng.random() < 0.3:
        total = len(draft.manifest)
        draft.manifest[12:16] = total.to_bytes(4, "little")
        draft.gap = bytearray(-total % 64)
        draft.prelude[8:12] = total.to_bytes(4, "little")
        draft.prelude[48:56] = len(draft.payload).to_bytes(8, "little")
        done.append("sized")
    draft.manifest[-32:] = hmac.digest(key, bytes(draft.manifest[:-32]), "sha256")
    return " + ".join([*done, "sealed"])


def _regrow(draft: Draft, key: bytes) -> bool:
    """Makes the payload the size that the manifest asks for, states it, and computes every tag; False where that cannot be done."""
    try:
        plain = read_pieces(key, bytes(draft.manifest[:-32]), b"")
        tokens = max(g["end_token"] for g in plain.groups) - min(g["first_token"] for g in plain.groups)
        heads = sum(plain.groups[x["group"]]["head_count"] for x in plain.layers)
        if not 0 < tokens <= MAX_REGROWN_TOKENS or heads > 16 or not 16 <= plain.chunk_tokens <= 1 << 16:
            return False
        blocks = plain.blocks()
        if not blocks or blocks[-1].plane_end > MAX_REGROWN_BYTES:
            return False
        size = blocks[-1].plane_end
        payload = draft.payload[:size].ljust(size, b"\0")
        build.write_tags(payload, blocks, key, plain.lease, plain.generation)
        at = draft.manifest.index(b"\5\0\0\0\x10\0\0\0")
        draft.manifest[at + 16 : at + 24] = size.to_bytes(8, "little")
        draft.payload = payload
    except (struct.error, IndexError, KeyError, ValueError, ZeroDivisionError, OverflowError):
        return False
    return True
