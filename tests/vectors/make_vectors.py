"""Writes the test vectors, and the parts of docs/wire-format.md that are derived from the code and from them.

python -m tests.vectors.make_vectors: rewrites everything. Nothing here is random: bytes come from SHAKE-128 of the vector's name.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bridge.codecs import CODECS, reference, tables
from bridge.wire import (
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
    Shard,
    SlotCodec,
    TagKeys,
    seal,
    token_digest,
    write_container,
    write_tags,
)
from bridge.wire.coding import opaque
from bridge.wire.tags import hash_blocks, split_runs
from bridge.wire.verify import spans_in_order
from tests.wire.random_payloads import add_section, assemble, python_dump, python_rows, write_rows

FOLDER = Path(__file__).parent
DOCUMENT = FOLDER.parent.parent / "docs" / "wire-format.md"

NONE = Coding(CodingKind.NONE)
FP8, INT8 = Coding(CodingKind.FP8, 8, Element.E4M3FN), Coding(CodingKind.INT8, 8)
BF16, FP16, FP32 = (Coding(CodingKind.RAW, element.bits, element) for element in (Element.BF16, Element.FP16, Element.FP32))
AFFINE3, AFFINE4 = Coding(CodingKind.AFFINE, 3), Coding(CodingKind.AFFINE, 4)
INT4 = opaque("example/int4_per_token_head", 12)


@dataclass(frozen=True)
class Vector:
    """One container. encoded: whether rows are encoded vectors with corner cases among them, or any bytes. later: an optional section."""

    name: str
    manifest: Manifest
    encoded: bool = True
    later: bool = False

    @property
    def key(self) -> bytes:
        return stream(self.name + "/key", 32)


def stream(label: str, count: int) -> bytes:
    return hashlib.shake_128(label.encode()).digest(count)


def gaussian_like(label: str, shape: tuple[int, ...]) -> np.ndarray:
    """fp32 numbers, sums of twelve bytes: exact in every arithmetic."""
    raw = np.frombuffer(stream(label, 12 * math.prod(shape)), np.uint8).reshape(*shape, 12)
    return ((raw.astype(np.int32).sum(axis=-1) - 1530) / 256).astype(np.float32)


def corners(x: np.ndarray) -> np.ndarray:
    """x (fp32 [tokens, D]) with one corner case in each of its first rows, as far as there are rows."""
    cases = [0.0, -0.0, 3.0, np.nan, np.inf, -np.inf, 8192.0, 1e30, 1e-40]
    for row, value in enumerate(cases[: len(x) - 1]):
        if np.isfinite(value):
            x[row] = value
        else:
            x[row, row] = value
    return x


def manifest_of(name: str, groups: tuple[Group, ...], codecs: tuple[SlotCodec, ...], layers: tuple[Layer, ...], **more) -> Manifest:
    fields = {
        "model_digest": hashlib.sha256(b"example model").digest(),
        "content": ((ContentKind.TOKENS, token_digest([1, 2, 3])),),
        "request_id": name,
        "lease": 7,
        "generation": 3,
        "chunk_tokens": 16,
        "groups": groups,
        "codecs": codecs,
        "layers": layers,
    }
    return Manifest(**{**fields, **more})


def _one(name: str, group: Group, key: Coding, value: Coding, scales: tuple[float, float] = (1.0, 1.0), **more) -> Manifest:
    layer = Layer(0, 0, 0, float(np.float32(scales[0])), float(np.float32(scales[1])), more.pop("source", Element.NONE))
    return manifest_of(name, (group,), (SlotCodec(key, value),), (layer,), **more)


def vectors() -> Iterator[Vector]:
    """All vectors, in the order of their names in the folder's index."""
    small = Group(1, 16, 5, 7)
    yield Vector("small", _one("small", small, FP8, AFFINE4))
    for name, coding in (("raw_bf16", BF16), ("raw_fp16", FP16), ("raw_fp32", FP32)):
        manifest = _one(name, Group(2, 16, 3, 37), coding, coding, source=coding.element, chunk_tokens=32)
        yield Vector(name, manifest)
        yield Vector(name + "_any", _one(name + "_any", Group(1, 16, 0, 16), coding, coding), encoded=False)
    yield Vector("fp8_scaled", _one("fp8_scaled", Group(2, 48, 30, 50), FP8, FP8, (0.0371, 0.5), source=Element.BF16))
    yield Vector("int8", _one("int8", Group(1, 80, 0, 20), INT8, INT8, source=Element.FP16, chunk_tokens=64))
    for name, head_dim in (("k8v4", 64), ("4bit_nc", 128), ("k3v4_nc", 64), ("3bit_nc", 256)):
        codec = CODECS["turboquant_" + name].for_layer(head_dim, Element.BF16)
        manifest = _one("turboquant_" + name, Group(2, head_dim, 7, 30), codec.key, codec.value, source=Element.BF16, chunk_tokens=32)
        yield Vector("turboquant_" + name, manifest)
        yield Vector(f"turboquant_{name}_any", _one(name, Group(1, head_dim, 0, 16), codec.key, codec.value), encoded=False)
    rotated = CODECS["turboquant_4bit_nc"].for_layer(512, Element.BF16).key
    yield Vector("asymmetric", _one("asymmetric", Group(1, 512, 1, 12), BF16, rotated, source=Element.BF16))
    yield Vector("reversed", _one("reversed", Group(2, 64, 9, 20), AFFINE3, FP32, source=Element.FP32))
    yield Vector("opaque", _one("opaque", Group(2, 64, 10, 35), INT4, opaque("example/nvfp4", 5)), encoded=False)
    yield Vector("latent", _one("latent", Group(1, 576, 0, 9, kind=GroupKind.LATENT), BF16, NONE, source=Element.BF16))
    yield Vector("latent_fp8", _one("latent_fp8", Group(1, 576, 16, 36, kind=GroupKind.LATENT), FP8, NONE, (0.25, 1.0)))
    window = Group(2, 32, 45, 70, kind=GroupKind.SLIDING_WINDOW, window=24)
    layers = (Layer(0, 0, 0, source=Element.BF16), Layer(1, 1, 1), Layer(2, 1, 0, source=Element.BF16), Layer(5, 0, 1))
    codecs = (SlotCodec(BF16, AFFINE4), SlotCodec(INT8, FP8))
    yield Vector("sliding_window", manifest_of("sliding_window", (Group(2, 32, 20, 70), window), codecs, layers, chunk_tokens=32))
    state = Group(1, 16, 32, 48, kind=GroupKind.STATE)
    groups = (Group(2, 16, 0, 40), state)
    codecs = (SlotCodec(FP16, FP16), SlotCodec(opaque("example/ssm", 24), NONE), SlotCodec(opaque("example/ssm", 24), INT4))
    layers = (Layer(0, 1, 1), Layer(1, 0, 0), Layer(2, 1, 2))
    yield Vector("state", manifest_of("state", groups, codecs, layers, chunk_tokens=48), encoded=False)
    for rank, (first, count) in enumerate(((0, 3), (3, 2))):
        name = f"tp_rank{rank}"
        manifest = _one(name, Group(5, 32, 0, 33, first, count), INT8, AFFINE3, shard=Shard(rank, 2, 1, 4), chunk_tokens=32)
        yield Vector(name, manifest)
    yield Vector("chunks", _one("chunks", Group(1, 16, 40, 200), FP8, FP8, chunk_tokens=48, lease=2**64 - 1, generation=2**32 - 1))
    groups = (Group(1, 16, 3, 5), Group(1, 16, (1 << 24) - 18, 1 << 24))
    layers = (Layer(1, 1, 0), Layer(65535, 0, 0))
    yield Vector("distant", manifest_of("distant", groups, (SlotCodec(INT8, INT8),), layers, request_id="größer 請求 \U0001f511"))
    content = tuple((kind, hashlib.sha256(kind.name.encode()).digest()) for kind in ContentKind)
    yield Vector("later_minor", _one("later_minor", small, BF16, INT8, minor=2, content=content), later=True)


def _rows(vector: Vector, label: str, coding: Coding, head_dim: int, scale: float, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    sizes = coding.code_bytes(head_dim), coding.scalar_bytes()
    if not vector.encoded or coding.kind in (CodingKind.NONE, CodingKind.OPAQUE):
        codes, scalars = (
            np.frombuffer(stream(f"{label}/{i}", shape[0] * shape[1] * size), np.uint8).reshape(*shape, size)
            for i, size in enumerate(sizes)
        )
        return codes, scalars
    x = gaussian_like(label, (*shape, head_dim))
    x[0] = corners(x[0]) if shape[1] > 2 else x[0]
    with np.errstate(all="ignore"):
        return reference.encode(x, coding, scale)


def payload_of(vector: Vector) -> bytes:
    m = vector.manifest
    data = np.full(PayloadMap(m).payload_bytes, 0xCD, np.uint8)
    for span in spans_in_order(PayloadMap(m)):
        layer = m.layers[span.layer]
        codec, head_dim = m.codecs[layer.codec], m.groups[layer.group].head_dim
        part, shape = data[span.offset : span.offset + span.nbytes], (span.heads, span.end_token - span.first_token)
        label = f"{vector.name}/{span.chunk}/{span.layer}/"
        k = _rows(vector, label + "K", codec.key, head_dim, layer.key_scale, shape)
        v = _rows(vector, label + "V", codec.value, head_dim, layer.value_scale, shape)
        blocks, _ = split_runs(part, span)
        blocks[...] = 0
        write_rows(blocks, span, codec, head_dim, [k[0], v[0], k[1], v[1]])
        write_tags(part, span, TagKeys(vector.key, m.lease, m.generation))
    return data.tobytes()


def container_of(vector: Vector) -> bytes:
    if vector.later:
        sealed = add_section(seal(vector.manifest, vector.key), vector.key, 0x8001, b"a later minor's section")
        return assemble(sealed, vector.key, payload_of(vector))
    file = io.BytesIO()
    write_container(file, vector.manifest, vector.key, payload_of(vector))
    return file.getvalue()


def description_of(vector: Vector) -> dict:
    """What a reader of the container must find: its fields, spans, tags, and SHA-256 of each side's decoded rows."""
    m, payload = vector.manifest, payload_of(vector)

    def tags(span: LayerSpan) -> list[list[str]]:
        _, planes = split_runs(np.frombuffer(payload, np.uint8)[span.offset : span.offset + span.nbytes], span)
        return [[f"{tag:016x}" for tag in row] for row in np.ascontiguousarray(planes[:, : 8 * span.blocks]).view("<u8").tolist()]

    def sides() -> Iterator[dict]:
        for i, layer in enumerate(m.layers):
            for side, coding in enumerate((m.codecs[layer.codec].key, m.codecs[layer.codec].value)):
                if coding.kind is not CodingKind.NONE:
                    for head, rows in enumerate(python_rows(m, payload, i, side)):
                        digest = hashlib.sha256(rows.tobytes()).hexdigest()
                        yield {
                            "layer": i,
                            "head": head,
                            "side": "KV"[side],
                            "rows": len(rows),
                            "row_bytes": rows.shape[1],
                            "sha256": digest,
                        }

    fields = ("chunk", "layer", "offset", "heads", "blocks", "block_bytes", "first_block", "first_ordinal", "first_token", "end_token")
    return {
        "manifest": python_dump(m).splitlines(),
        "key": vector.key.hex(),
        "spans": [
            {**{field: getattr(s, field) for field in fields}, "run_bytes": s.run_bytes, "tags": tags(s)}
            for s in spans_in_order(PayloadMap(m))
        ],
        "decoded": list(sides()),
    }


def files() -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of every file of this folder that is derived."""
    for vector in vectors():
        yield vector.name + ".kvb", container_of(vector)
        description = description_of(vector)
        lists = {name: [json.dumps(entry) for entry in value] for name, value in description.items() if isinstance(value, list)}
        text = ",\n".join(
            f' "{name}": [\n  ' + ",\n  ".join(lists[name]) + "\n ]" if name in lists else f' "{name}": {json.dumps(value)}'
            for name, value in description.items()
        )
        yield vector.name + ".json", f"{{\n{text}\n}}\n".encode()


# --- the document's derived parts


def code_books() -> str:
    lines = ["| D | bits | upper half, ascending | digest |", "| --- | --- | --- | --- |"]
    for head_dim in tables.head_dims():
        for bits in (3, 4):
            upper = tables.centroids(head_dim, bits)[2 ** (bits - 1) :].view(np.uint32)
            lines.append(f"| {head_dim} | {bits} | {' '.join(f'{w:08x}' for w in upper)} | {tables.digest(head_dim, bits).hex()} |")
    return "\n".join(lines)


def tag_table() -> str:
    """Tags of three blocks of 32 bytes, and the parts that they are made of."""
    key, lease, generation = bytes(range(32)), 0x0102030405060708, 0x090A0B0C
    keys = TagKeys(key, lease, generation)
    lines = [
        "```",
        f"key         {key.hex()}",
        f"lease       0x{lease:016x}",
        f"generation  0x{generation:08x}",
        f"nonce       {struct.pack('<QI', lease, generation).hex()}",
    ]
    lines += [f"mask[{i}]{' ' * (12 - len(f'mask[{i}]'))}{int(keys.masks(i, 1)[0]):016x}" for i in (0, 1, 8)]
    lines += [f"k[{j}]        {int(k):016x}" for j, k in enumerate(keys.hash_keys(32))]
    lines += ["```", "", "| ordinal | first, end | block | tag |", "| --- | --- | --- | --- |"]
    counting = bytes(range(32))
    partial = bytes(6) + bytes(range(1, 5)) + bytes(22)
    for ordinal, (first, end), block in ((0, (0, 16), bytes(32)), (1, (0, 16), counting), (8, (3, 5), partial)):
        words = np.frombuffer(block, np.uint8)[None]
        tag = hash_blocks(words, np.array([first | end << 8], np.uint64), keys.hash_keys(32)) + keys.masks(ordinal, 1)
        lines.append(f"| {ordinal} | {first}, {end} | `{block.hex()}` | `{int(tag[0]):016x}` |")
    return "\n".join(lines)


_PRELUDE = (("magic KVBFILE\\n", 8), ("manifest_bytes", 4), ("reserved", 4), ("key", 32), ("payload_bytes", 8), ("reserved", 8))
_HEADER = (("magic KVBRIDGE", 8), ("major", 2), ("minor", 2), ("total", 4), ("count", 2), ("flags", 2), ("reserved", 4))
_CODING = [("kind", 1), ("bits", 1), ("element", 1), ("rotation", 1), ("row_bytes", 4), ("digest", 32)]
_SECTIONS = {
    1: ("MODEL", (("digest", 32),), ()),
    2: ("CONTENT", (), (("kind", 2), ("reserved", 2), ("reserved", 4), ("digest", 32))),
    3: ("REQUEST", (("lease", 8), ("generation", 4), ("id_bytes", 2), ("reserved", 2), ("request id", 0)), ()),
    4: ("SHARD", (("tp_rank", 2), ("tp_size", 2), ("pp_rank", 2), ("pp_size", 2)), ()),
    5: ("PAYLOAD", (("chunk_tokens", 4), ("reserved", 4), ("payload_bytes", 8)), ()),
    6: (
        "GROUPS",
        (),
        (
            *(("kind", 1), ("reserved", 1), ("head_dim", 2), ("heads", 2), ("head_first", 2), ("head_count", 2), ("reserved", 2)),
            *(("window", 4), ("first_token", 8), ("end_token", 8)),
        ),
    ),
    7: ("CODECS", (), tuple((f"{side} {name}", size) for side in "KV" for name, size in _CODING)),
    8: ("LAYERS", (), (("index", 2), ("group", 2), ("codec", 2), ("source", 2), ("key_scale", 4), ("value_scale", 4))),
}


def _explained(data: bytes) -> Iterator[tuple[int, int, str]]:
    """(offset, size, meaning) of every byte of small.kvb, without a gap."""
    at = 0

    def walk(fields, prefix: str = "") -> Iterator[tuple[int, int, str]]:
        nonlocal at
        for name, size in fields:
            part = data[at : at + size]
            number = "" if size > 8 or name.startswith(("magic", "reserved")) else f" = {int.from_bytes(part, 'little')}"
            if name.endswith("_scale"):
                number = f" = {struct.unpack('<f', part)[0]:g}"
            yield at, size, prefix + name + number
            at += size

    def padding(until: int, what: str) -> Iterator[tuple[int, int, str]]:
        nonlocal at
        if until > at:
            yield at, until - at, what
            at = until

    yield from walk(_PRELUDE, "prelude: ")
    start = at
    total, count = struct.unpack_from("<IH", data, at + 12)
    yield from walk(_HEADER, "header: ")
    for _ in range(count):
        kind, _, size = struct.unpack_from("<HHI", data, at)
        name, plain, record = _SECTIONS[kind]
        yield from walk((("kind", 2), ("reserved", 2), ("size", 4)), f"{name}: ")
        end = at + size
        if plain:
            sizes = sum(n for _, n in plain)
            for field, n in plain:
                if n:
                    yield from walk(((field, n),), "  ")
                else:
                    yield at, size - sizes, f"  {field} = {data[at : at + size - sizes].decode()!r}"
                    at += size - sizes
        else:
            yield from walk((("count", 2), ("reserved", 2), ("reserved", 4)), "  ")
            while at < end:
                yield from walk(record, "  ")
        yield from padding(end + -size % 8, "  padding")
    yield at, 32, "seal"
    at += 32
    yield from padding(start + (total + 63) // 64 * 64, "padding to a multiple of 64")
    for plane, row in (("K codes", 16), ("V codes", 8), ("K scalars", 0), ("V scalars", 4)):
        yield from padding(at + 5 * row, f"{plane}: rows 0 to 4, not valid")
        for t in (5, 6):
            yield from padding(at + row, f"{plane}: row {t}" + (": scale, zero" if row == 4 else ""))
        yield from padding(at + 9 * row, f"{plane}: rows 7 to 15, not valid")
    yield from padding(at + 8, "tag of the block, valid range [5, 7)")
    yield from padding(at + 8, "tag plane: padding, since the run has an odd number of blocks")


def hex_dump(data: bytes) -> str:
    """Offset, bytes and meaning, a field a line; a field of zeros only is one line."""
    lines = ["```"]
    for at, size, meaning in _explained(data):
        part = data[at : at + size]
        if size > 16 and not any(part):
            lines.append(f"{at:04x}  {f'00 (x {size})':<48} {meaning}")
            continue
        for i in range(0, size, 16):
            lines.append(f"{at + i:04x}  {part[i : i + 16].hex(' '):<48} {meaning if i == 0 else ''}".rstrip())
    rows = [
        np.frombuffer(python_rows(next(vectors()).manifest, data[-464:], 0, side)[0].tobytes(), "<f4").reshape(2, 16) for side in (0, 1)
    ]
    lines += ["```", "", "Decoded, tokens 5 and 6:", "", "```"]
    for side, values in zip("KV", rows, strict=True):
        for token, row in zip((5, 6), values, strict=True):
            lines.append(f"{side} {token}  " + " ".join(f"{x:.9g}" for x in row))
    return "\n".join([*lines, "```"])


def document(text: str) -> str:
    """The document's text with its derived parts as they must be."""
    parts = {"code books": code_books(), "tags": tag_table(), "small.kvb": hex_dump(container_of(next(vectors())))}
    for name, part in parts.items():
        begin = f"<!-- begin: {name} (generated by tests/vectors/make_vectors.py) -->\n"
        pattern = re.escape(begin) + r".*?" + re.escape(f"<!-- end: {name} -->")
        text, found = re.subn(pattern, lambda _, b=begin, p=part, n=name: f"{b}{p}\n<!-- end: {n} -->", text, flags=re.DOTALL)
        if found != 1:
            raise ValueError(f"the document has {found} places for {name}")
    return text


def main() -> None:
    for old in (*FOLDER.glob("*.kvb"), *FOLDER.glob("*.json")):
        old.unlink()
    total = 0
    for name, data in files():
        (FOLDER / name).write_bytes(data)
        total += len(data)
    DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{total} bytes of vectors")


if __name__ == "__main__":
    main()
