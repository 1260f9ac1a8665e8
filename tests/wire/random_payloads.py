"""Random valid containers, single mutations of them, and what the Python reader says: the property-style source of the format's tests.

Everything follows from a numpy Generator, so a failing case is its seed.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bridge.codecs import reference, tables
from bridge.wire import (
    BLOCK_TOKENS,
    Coding,
    CodingKind,
    ContentKind,
    Element,
    Group,
    GroupKind,
    Layer,
    LayerSpan,
    Manifest,
    PayloadMap,
    Rotation,
    Shard,
    SlotCodec,
    TagKeys,
    seal,
    write_tags,
)
from bridge.wire.coding import opaque
from bridge.wire.container import MAGIC as FILE_MAGIC
from bridge.wire.container import read_stream, verify_contents
from bridge.wire.errors import WireError
from bridge.wire.manifest import MAX_TOKENS, MINOR
from bridge.wire.sealing import SEAL_BYTES, compute_seal
from bridge.wire.tags import split_runs
from bridge.wire.verify import spans_in_order

NONE = Coding(CodingKind.NONE)


@dataclass(frozen=True)
class Container:
    """A valid container in its parts. sealed: the manifest's bytes, optional sections included."""

    manifest: Manifest
    key: bytes
    sealed: bytes
    payload: bytes

    def to_bytes(self) -> bytes:
        return assemble(self.sealed, self.key, self.payload)


def assemble(sealed: bytes, key: bytes, payload: bytes) -> bytes:
    """A container around these parts, whatever they are; its prelude states their sizes."""
    prelude = struct.pack("<8sII32sQ8s", FILE_MAGIC, len(sealed), 0, key, len(payload), bytes(8))
    return prelude + sealed + bytes(-len(sealed) % 64) + payload


def reseal(body: bytes, key: bytes) -> bytes:
    """The manifest `body` (without its seal), with the seal that is valid for it."""
    return body + compute_seal(body, key)


# --- valid containers


def _pick(rng: np.random.Generator, *options):
    return options[int(rng.integers(len(options)))]


def _coding(rng: np.random.Generator, head_dim: int) -> Coding:
    kinds = [CodingKind.RAW, CodingKind.FP8, CodingKind.AFFINE, CodingKind.INT8, CodingKind.OPAQUE]
    if head_dim in tables.head_dims():
        kinds += [CodingKind.CODEBOOK] * 2
    kind = _pick(rng, *kinds)
    if kind is CodingKind.RAW:
        element = _pick(rng, Element.BF16, Element.FP16, Element.FP32)
        return Coding(kind, element.bits, element)
    if kind is CodingKind.FP8:
        return Coding(kind, 8, Element.E4M3FN)
    if kind is CodingKind.INT8:
        return Coding(kind, 8)
    if kind is CodingKind.OPAQUE:
        return opaque(_pick(rng, "a/int4", "b/nvfp4", "c/state"), int(_pick(rng, 1, 3, 8, 36, 200)))
    bits = _pick(rng, 3, 4)
    if kind is CodingKind.AFFINE:
        return Coding(kind, bits)
    return Coding(kind, bits, rotation=Rotation.SYLVESTER_HADAMARD, digest=tables.digest(head_dim, bits))


def _group(rng: np.random.Generator, base: int) -> Group:
    kind = _pick(rng, *GroupKind, GroupKind.FULL_ATTENTION)
    heads = int(_pick(rng, 1, 2, 3, 8, 1024))
    first = int(rng.integers(heads))
    count = int(min(heads - first, rng.integers(1, 4)))
    head_dim = int(_pick(rng, 16, 32, 48, 64, 64, 80, 128, 128, 256, 512, 1024))
    begin = int(rng.integers(base, base + 70))
    end = begin + int(_pick(rng, 1, 15, 16, 17, 40, rng.integers(1, 90))) * 64 // max(head_dim, 64)
    end = max(end, begin + 1)
    window = int(_pick(rng, 1, 8, 128, MAX_TOKENS)) if kind is GroupKind.SLIDING_WINDOW else 0
    if kind is GroupKind.STATE:
        begin -= begin % BLOCK_TOKENS
        end = begin + BLOCK_TOKENS
    if end > MAX_TOKENS:
        begin, end = MAX_TOKENS - BLOCK_TOKENS, MAX_TOKENS
    return Group(heads, head_dim, begin, end, first, count, kind, window)


def _codec(rng: np.random.Generator, group: Group) -> SlotCodec:
    key, value = _coding(rng, group.head_dim), _coding(rng, group.head_dim)
    if group.kind is GroupKind.LATENT:
        value = NONE
    if group.kind is GroupKind.STATE:
        key, value = opaque("d/state", int(rng.integers(1, 90))), _pick(rng, NONE, opaque("d/state", 5))
    return SlotCodec(key, value)


def random_manifest(rng: np.random.Generator) -> Manifest:
    """Any manifest that obeys the rules and describes a payload of some kilobytes to some hundred."""
    base = int(_pick(rng, 0, 0, 0, 5, 1000, MAX_TOKENS - 200))
    groups = [_group(rng, base) for _ in range(_pick(rng, 1, 1, 2, 3))]
    if rng.random() < 0.1 and base == 0:
        groups.append(_group(rng, MAX_TOKENS // 2))
    of_layers = list(range(len(groups))) + [int(rng.integers(len(groups))) for _ in range(_pick(rng, 0, 0, 1, 2))]
    rng.shuffle(of_layers)
    per_layer = [_codec(rng, groups[group]) for group in of_layers]
    codecs = list(dict.fromkeys(per_layer))
    rng.shuffle(codecs)
    indices = np.sort(rng.choice(int(_pick(rng, 8, 64, 65536)), len(of_layers), replace=False))

    def scale(coding: Coding) -> float:
        values = (1.0, 0.5, 0.0371, 1e-44, 3e38) if coding.scaled else (1.0,)
        return float(np.float32(_pick(rng, *values)))

    layers = tuple(
        Layer(int(index), group, codecs.index(codec), scale(codec.key), scale(codec.value), _pick(rng, *Element))
        for index, group, codec in zip(indices, of_layers, per_layer, strict=True)
    )
    kinds = [ContentKind.TOKENS, *(kind for kind in ContentKind if kind is not ContentKind.TOKENS and rng.random() < 0.3)]
    tp, pp = (int(_pick(rng, 1, 2, 3, 4096)) for _ in range(2))
    return Manifest(
        model_digest=rng.bytes(32),
        content=tuple((kind, rng.bytes(32)) for kind in kinds),
        request_id=_pick(rng, "r", "cmpl-123", "x" * 256, "größer", "請求", "\U0001f511\x00", "\ud7ff\ue000\U0010ffff"),
        lease=int(_pick(rng, 0, 2**64 - 1, rng.integers(1 << 62))),
        generation=int(_pick(rng, 0, 2**32 - 1, rng.integers(1 << 31))),
        chunk_tokens=int(_pick(rng, 16, 32, 48, 64, 112, 65536)),
        groups=tuple(groups),
        codecs=tuple(codecs),
        layers=layers,
        shard=Shard(int(rng.integers(tp)), tp, int(rng.integers(pp)), pp),
        minor=int(_pick(rng, MINOR, MINOR, 0, MINOR + 1, 65535)),
    )


def _rows(rng: np.random.Generator, coding: Coding, head_dim: int, scale: float, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scalars u8 [heads, tokens, bytes]: half of the time encoded vectors with corner cases, half of the time any bytes."""
    code_bytes, scalar_bytes = coding.code_bytes(head_dim), coding.scalar_bytes()
    if coding.kind in (CodingKind.NONE, CodingKind.OPAQUE) or rng.random() < 0.5:
        codes = rng.integers(256, size=(*shape, code_bytes), dtype=np.uint8)
        return codes, rng.integers(256, size=(*shape, scalar_bytes), dtype=np.uint8)
    with np.errstate(over="ignore"):
        x = rng.standard_normal((*shape, head_dim), dtype=np.float32) * np.float32(_pick(rng, 1, 1e-42, 1e-9, 300, 1e6, 1e38))
    corner = _pick(rng, None, 0.0, -0.0, 3.0, np.nan, np.inf, -np.inf)
    if corner is not None:
        at = tuple(int(rng.integers(n)) for n in x.shape)
        x[at if rng.random() < 0.5 else at[:2]] = np.float32(corner)
    with np.errstate(all="ignore"):
        return reference.encode(x, coding, scale)


def write_rows(blocks: np.ndarray, span: LayerSpan, codec: SlotCodec, head_dim: int, planes: list[np.ndarray]) -> None:
    """Puts rows (u8 [heads, tokens, bytes], one array a plane) into a span's zeroed blocks (u8 [heads, blocks, block_bytes])."""
    start = span.first_token - span.first_block * BLOCK_TOKENS
    for plane, rows in zip(codec.planes(head_dim), planes, strict=True):
        whole = np.zeros((span.heads, span.blocks * BLOCK_TOKENS, plane.row_bytes), np.uint8)
        whole[:, start : start + rows.shape[1]] = rows
        blocks[..., plane.offset : plane.offset + plane.nbytes] = whole.reshape(span.heads, span.blocks, plane.nbytes)


def random_payload(rng: np.random.Generator, manifest: Manifest, key: bytes) -> bytes:
    data = np.full(PayloadMap(manifest).payload_bytes, 0xCD, np.uint8)
    keys = TagKeys(key, manifest.lease, manifest.generation)
    for span in spans_in_order(PayloadMap(manifest)):
        layer = manifest.layers[span.layer]
        codec, head_dim = manifest.codecs[layer.codec], manifest.groups[layer.group].head_dim
        part = data[span.offset : span.offset + span.nbytes]
        shape = (span.heads, span.end_token - span.first_token)
        k = _rows(rng, codec.key, head_dim, layer.key_scale, shape)
        v = _rows(rng, codec.value, head_dim, layer.value_scale, shape)
        write_rows(split_runs(part, span)[0], span, codec, head_dim, [k[0], v[0], k[1], v[1]])
        write_tags(part, span, keys)
    return data.tobytes()


def add_section(sealed: bytes, key: bytes, kind: int, contents: bytes) -> bytes:
    """The manifest with one more section at its end, resealed; kinds and limits are not looked at."""
    body = bytearray(sealed[:-SEAL_BYTES])
    body += struct.pack("<HHI", kind, 0, len(contents)) + contents + bytes(-len(contents) % 8)
    return reseal(_with_total(body, 1), key)


def _with_total(body: bytearray, more_sections: int) -> bytes:
    struct.pack_into("<I", body, 12, len(body) + SEAL_BYTES)
    struct.pack_into("<H", body, 16, max(0, struct.unpack_from("<H", body, 16)[0] + more_sections))
    return bytes(body)


def random_container(rng: np.random.Generator) -> Container:
    """A valid container; those of a higher minor often have an optional section."""
    manifest, key = random_manifest(rng), rng.bytes(32)
    sealed = seal(manifest, key)
    if manifest.minor > MINOR and rng.random() < 0.7:
        sealed = add_section(sealed, key, int(rng.integers(0x8000, 0x10000)), rng.bytes(int(rng.integers(20))))
    return Container(manifest, key, sealed, random_payload(rng, manifest, key))


# --- what the Python reader says


def python_verdict(data: bytes) -> str:
    """ "ok", or the clause that the Python reader names. Any other exception is a fault and passes through."""
    try:
        verify_contents(*read_stream(io.BytesIO(data), len(data)))
    except WireError as error:
        return error.clause
    return "ok"


def python_dump(manifest: Manifest) -> str:
    """The manifest in the C reader's text form."""
    m = manifest
    lines = [f"version 0 {m.minor}", f"id {m.request_id.encode().hex()}", f"model {m.model_digest.hex()}"]
    lines += [f"content {kind:d} {digest.hex()}" for kind, digest in m.content]
    lines += [f"request {m.lease} {m.generation}"]
    lines += [f"shard {m.shard.tp_rank} {m.shard.tp_size} {m.shard.pp_rank} {m.shard.pp_size}"]
    lines += [f"payload {m.chunk_tokens} {PayloadMap(m).payload_bytes}"]
    for g in m.groups:
        lines += [f"group {g.kind:d} {g.head_dim} {g.heads} {g.head_first} {g.head_count} {g.window} {g.first_token} {g.end_token}"]
    for codec in m.codecs:
        for c in (codec.key, codec.value):
            lines += [f"coding {c.kind:d} {c.bits} {c.element:d} {c.rotation:d} {c.row_bytes} {c.digest.hex()}"]
    for x in m.layers:
        scales = " ".join(struct.pack("<f", s).hex() for s in (x.key_scale, x.value_scale))
        lines += [f"layer {x.index} {x.group} {x.codec} {x.source:d} {scales}"]
    return "\n".join(lines) + "\n"


def python_rows(manifest: Manifest, payload: bytes, layer: int, side: int) -> np.ndarray:
    """u8 [heads, tokens, row bytes]: one side of a layer as fp32 bytes with every NaN as 0x7fc00000, or an opaque side's own bytes."""
    entry = manifest.layers[layer]
    codec, group = manifest.codecs[entry.codec], manifest.groups[entry.group]
    coding, scale = ((codec.key, entry.key_scale), (codec.value, entry.value_scale))[side]
    planes, parts = codec.planes(group.head_dim), []
    data = np.frombuffer(payload, np.uint8)
    for span in spans_in_order(PayloadMap(manifest)):
        if span.layer != layer:
            continue
        blocks, _ = split_runs(data[span.offset : span.offset + span.nbytes], span)
        start = span.first_token - span.first_block * BLOCK_TOKENS

        def rows(index: int, blocks=blocks, span=span, start=start) -> np.ndarray:
            plane = planes[index]
            part = blocks[..., plane.offset : plane.offset + plane.nbytes]
            part = part.reshape(span.heads, span.blocks * BLOCK_TOKENS, plane.row_bytes)
            return np.ascontiguousarray(part[:, start : start + span.end_token - span.first_token])

        if coding.kind is CodingKind.OPAQUE:
            parts.append(rows(side))
            continue
        with np.errstate(all="ignore"):
            values = reference.decode(rows(side), rows(side + 2), coding, group.head_dim, scale)
        bits = np.where(np.isnan(values), np.uint32(0x7FC00000), np.ascontiguousarray(values).view(np.uint32))
        parts.append(bits.astype("<u4").view(np.uint8))
    return np.concatenate(parts, axis=1)


# --- mutations


def manifest_fields(body: bytes) -> list[tuple[int, int]]:
    """(offset, size) of every field of a valid manifest without its seal: header, section headers, records."""
    fields = [(0, 8), (8, 2), (10, 2), (12, 4), (16, 2), (18, 2), (20, 4)]
    records = {2: "HHI", 6: "BBHHHHHIQQ", 7: "BBBBI" + "Q" * 4 + "BBBBI" + "Q" * 4, 8: "HHHHII"}
    plain = {1: "QQQQ", 3: "QIHH", 4: "HHHH", 5: "IIQ"}
    step = {2: 40, 6: 32, 7: 80, 8: 16}

    def add(offset: int, layout: str) -> None:
        for letter in layout:
            size = struct.calcsize("<" + letter)
            fields.append((offset, size))
            offset += size

    for kind, at, size in sections(body):
        add(at - 8, "HHI")
        if kind in plain:
            add(at, plain[kind])
        if kind in records:
            add(at, "HHI")
            for offset in range(at + 8, at + size, step[kind]):
                add(offset, records[kind])
        if kind == 3:
            fields.append((at + 16, size - 16))
    return fields


def sections(body: bytes) -> list[tuple[int, int, int]]:
    """(kind, offset of the contents, size) of every section of a valid manifest."""
    found, at = [], 24
    while at < len(body):
        kind, _, size = struct.unpack_from("<HHI", body, at)
        found.append((kind, at + 8, size))
        at += 8 + size + -size % 8
    return found


def _flip(rng: np.random.Generator, data: bytes, low: int = 0, high: int | None = None) -> bytes:
    out = bytearray(data)
    out[int(rng.integers(low, len(data) if high is None else high))] ^= 1 << int(rng.integers(8))
    return bytes(out)


def _any_bit(rng: np.random.Generator, c: Container) -> bytes:
    data = c.to_bytes()
    return _flip(rng, data, 0, len(data) if rng.random() < 0.5 else 64 + len(c.sealed))


def _resized(rng: np.random.Generator, c: Container) -> bytes:
    data = c.to_bytes()
    if rng.random() < 0.3:
        return data + bytes(int(rng.integers(1, 70)))
    return data[: int(_pick(rng, rng.integers(64), rng.integers(len(data)), len(data) - 1))]


def _prelude(rng: np.random.Generator, c: Container) -> bytes:
    data = bytearray(c.to_bytes())
    offset, size = _pick(rng, (0, 8), (8, 4), (12, 4), (16, 32), (48, 8), (56, 8))
    data[offset : offset + size] = _interesting(rng, bytes(data[offset : offset + size]))
    return bytes(data)


def _interesting(rng: np.random.Generator, old: bytes) -> bytes:
    bits, value = 8 * len(old), int.from_bytes(old, "little")
    edges = (16, 17, 32, 56, 64, 65, 256, 257, 1024, 1025, 4096, 4097, 65536, 1 << 20, (1 << 20) + 1, 1 << 24, (1 << 24) + 1)
    floats = (0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0x7FC00000, 0x00000001, 0xFF800000)
    options = [
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        value + 1,
        value - 1,
        value * 2,
        value // 2,
        value ^ 1,
        value | 1 << (bits - 1),
        (1 << bits) - 1,
    ]
    options += [value + 16, value - 16, int(_pick(rng, *edges)), int(_pick(rng, *edges)), int.from_bytes(rng.bytes(len(old)), "little")]
    if len(old) == 4:
        options += [_pick(rng, *floats), _pick(rng, *floats)]
    return (int(_pick(rng, *options)) % (1 << bits)).to_bytes(len(old), "little")


def _field(rng: np.random.Generator, c: Container) -> bytes:
    body = bytearray(c.sealed[:-SEAL_BYTES])
    fields = manifest_fields(body)
    offset, size = fields[int(rng.integers(len(fields)))]
    body[offset : offset + size] = _interesting(rng, bytes(body[offset : offset + size]))
    return assemble(reseal(bytes(body), c.key), c.key, c.payload)


def _manifest_bit(rng: np.random.Generator, c: Container) -> bytes:
    return assemble(reseal(_flip(rng, c.sealed[:-SEAL_BYTES]), c.key), c.key, c.payload)


def _section(rng: np.random.Generator, c: Container) -> bytes:
    """Drops, repeats, moves, shortens, lengthens or adds a section, with consistent sizes and seal."""
    body = c.sealed[:-SEAL_BYTES]
    parts = [body[at - 8 : at + size + -size % 8] for _, at, size in sections(body)]
    i, j = (int(n) for n in rng.integers(len(parts), size=2))
    kind, at, size = sections(body)[i]

    def resized(contents: bytes) -> bytes:
        return struct.pack("<HHI", kind, 0, len(contents)) + contents + bytes(-len(contents) % 8)

    action = _pick(rng, "drop", "repeat", "swap", "shorten", "lengthen", "add", "more", "empty")
    if action == "drop":
        del parts[i]
    elif action == "repeat":
        parts.insert(j, parts[i])
    elif action == "swap":
        parts[i], parts[j] = parts[j], parts[i]
    elif action == "shorten":
        parts[i] = resized(body[at : at + int(rng.integers(size + 1))])
    elif action == "lengthen":
        parts[i] = resized(body[at : at + size] + rng.bytes(int(rng.integers(1, 50))))
    elif action == "add":
        contents = rng.bytes(int(rng.integers(12)))
        number = int(_pick(rng, 0, 9, 0x7FFF, 0x8000, 0xFFFF))
        parts.insert(len(parts) if number else 0, struct.pack("<HHI", number, 0, len(contents)) + contents + bytes(-len(contents) % 8))
    elif action == "empty":
        parts[i] = resized(struct.pack("<HHI", 0, 0, 0))
    elif size > 8 and kind in (2, 6, 7, 8):
        step = {2: 40, 6: 32, 7: 80, 8: 16}[kind]
        count = int(_pick(rng, 0, 2, 16, 17, 65, 1025))
        records = (body[at + 8 : at + 8 + step] * count)[: 60000 // step * step]
        parts[i] = resized(struct.pack("<HHI", len(records) // step, 0, 0) + records)
    whole = bytearray(body[:24] + b"".join(parts))
    return assemble(reseal(_with_total(whole, len(parts) - len(sections(body))), c.key), c.key, c.payload)


def _payload_byte(rng: np.random.Generator, c: Container) -> bytes:
    return assemble(c.sealed, c.key, _flip(rng, c.payload))


def _retagged(rng: np.random.Generator, c: Container) -> bytes:
    """A changed byte of a block or tag plane, with tags that are valid for it: only bytes that must be zero are refused."""
    data = np.frombuffer(c.payload, np.uint8).copy()
    span = _pick(rng, *spans_in_order(PayloadMap(c.manifest)))
    part = data[span.offset : span.offset + span.nbytes]
    blocks, planes = split_runs(part, span)
    padding = planes.shape[1] - 8 * span.blocks
    head = int(rng.integers(span.heads))
    on_padding = padding and rng.random() < 0.4
    if not on_padding:
        edge = _pick(rng, 0, span.blocks - 1, int(rng.integers(span.blocks)))
        blocks[head, edge, int(rng.integers(span.block_bytes))] ^= 1 << int(rng.integers(8))
    write_tags(part, span, TagKeys(c.key, c.manifest.lease, c.manifest.generation))
    if on_padding:
        planes[head, -int(rng.integers(1, 9))] = int(rng.integers(1, 256))
    return assemble(c.sealed, c.key, data.tobytes())


def _other_key(rng: np.random.Generator, c: Container) -> bytes:
    """The manifest of another lease, generation, order of layers or key over the same payload, with a valid seal."""
    body = bytearray(c.sealed[:-SEAL_BYTES])
    key, at = c.key, {kind: offset for kind, offset, _ in sections(body)}[3]
    if rng.random() < 0.3:
        key = rng.bytes(32)
    else:
        body[at + int(rng.integers(12))] ^= 1 << int(rng.integers(8))
    return assemble(reseal(bytes(body), key), key, c.payload)


def _codebook(rng: np.random.Generator, c: Container) -> bytes:
    """Another digest of a code book or meaning, or the book of another head dimension or width."""
    body = bytearray(c.sealed[:-SEAL_BYTES])
    at, size = {kind: (offset, size) for kind, offset, size in sections(body)}[7]
    codings = [o for o in range(at + 8, at + size, 40) if any(body[o + 8 : o + 40])] or [at + 8]
    offset = _pick(rng, *codings)
    digest = _pick(rng, tables.digest(int(_pick(rng, *tables.head_dims())), int(_pick(rng, 3, 4))), rng.bytes(32), bytes(32))
    body[offset + 8 : offset + 40] = digest
    return assemble(reseal(bytes(body), c.key), c.key, c.payload)


def _telling(rng: np.random.Generator, c: Container) -> bytes:
    """A value, seldom met by chance, that breaks one rule of a field."""
    body = bytearray(c.sealed[:-SEAL_BYTES])
    at = {kind: offset for kind, offset, _ in sections(body)}
    group = at[6] + 8 + 32 * int(rng.integers(len(c.manifest.groups)))
    layer = at[8] + 8 + 16 * int(rng.integers(len(c.manifest.layers)))
    offset, layout, values = _pick(
        rng,
        (8, "H", (1, 256)),
        (group + 2, "H", (48, 80, 1008, 24, 1040, 8, 0)),
        (group + 2, "H", (48, 96, 112, 384)),
        (group + 4, "H", (0, 1025, 65535)),
        (group + 16, "Q", (1 << 24, 1 << 63, (1 << 64) - 1)),
        (group + 24, "Q", (0, (1 << 24) + 1, 1 << 63)),
        (at[3] + 16, "B", (0xFF, 0x80, 0xC0, 0xF5, 0xED)),
        (at[3] + 12, "H", (0, 257)),
        (at[5], "I", (0, 8, 24, 65552, 1 << 31)),
        (layer + 2, "H", (len(c.manifest.groups), 65535)),
        (layer + 8, "f", (np.nan, np.inf, -1.0, 0.0)),
    )
    struct.pack_into("<" + layout, body, offset, _pick(rng, *values))
    return assemble(reseal(bytes(body), c.key), c.key, c.payload)


MUTATIONS: tuple[Callable[[np.random.Generator, Container], bytes], ...] = (
    _any_bit, _resized, _prelude, _field, _field, _field, _field, _manifest_bit, _section, _section, _payload_byte, _retagged, _retagged,
    _other_key, _codebook, _telling, _telling,
)  # fmt: skip


UNSEALED = (_any_bit, _resized, _prelude, _payload_byte)
"""Mutations that nobody makes who has the key: whatever they change must be refused."""


def mutate(rng: np.random.Generator, container: Container) -> tuple[bytes, bool]:
    """One mutation, and whether seal and tags were made valid for it. Those may be harmless: a scale that is still positive."""
    mutation = _pick(rng, *MUTATIONS)
    return mutation(rng, container), mutation not in UNSEALED
