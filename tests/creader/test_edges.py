"""Both readers on the two sides of every limit: the last number that is allowed, and the first one that is not."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from bridge.codecs import CODECS
from bridge.wire import ContentKind, Element, Group, GroupKind, Layer, Manifest, PayloadMap, SlotCodec, TagKeys, seal, write_tags
from bridge.wire.coding import Coding, CodingKind, opaque
from bridge.wire.sealing import SEAL_BYTES
from bridge.wire.verify import spans_in_order
from tests.creader.build import load
from tests.wire.random_payloads import add_section, assemble, python_verdict, reseal, sections

KEY = bytes(range(32))
FP8 = Coding(CodingKind.FP8, 8, Element.E4M3FN)
NONE = Coding(CodingKind.NONE)


def _manifest(minor: int = 2) -> Manifest:
    """One group and layer of each of four kinds: window over fp8, latent, opaque full attention, rotated."""
    groups = (
        Group(4, 64, 16, 32, 1, 2, GroupKind.SLIDING_WINDOW, 8),
        Group(1, 64, 16, 32, kind=GroupKind.LATENT),
        Group(2, 64, 16, 32),
        Group(2, 64, 16, 32),
    )
    rotated = CODECS["turboquant_4bit_nc"].for_layer(64, Element.BF16)
    codecs = (SlotCodec(FP8, FP8), SlotCodec(FP8, NONE), SlotCodec(opaque("example/a", 4), opaque("example/b", 4)), rotated)
    layers = tuple(Layer(i, i, i) for i in range(4))
    return Manifest(bytes(32), ((ContentKind.TOKENS, bytes(32)),), "edge", 1, 1, 16, groups, codecs, layers, minor=minor)


def _payload(manifest: Manifest) -> bytes:
    data = np.zeros(PayloadMap(manifest).payload_bytes, np.uint8)
    for span in spans_in_order(PayloadMap(manifest)):
        write_tags(data[span.offset : span.offset + span.nbytes], span, TagKeys(KEY, manifest.lease, manifest.generation))
    return data.tobytes()


def _both(data: bytes) -> str:
    verdict = python_verdict(data)
    assert load().verdict(data) == verdict
    return verdict


GROUP, CODEC, LAYER = 32, 80, 16
# (section, offset in its contents, format, {value: verdict}); offsets of records count from 8.
FIELDS = {
    "content kind": (2, 8, "H", {0: "bad_content", 1: "ok", 2: "bad_content", 5: "bad_content", 6: "bad_content"}),
    "tp_size": (4, 2, "H", {0: "bad_shard", 1: "ok", 4096: "ok", 4097: "bad_shard"}),
    "tp_rank": (4, 0, "H", {0: "ok", 1: "bad_shard"}),
    "pp_size": (4, 6, "H", {0: "bad_shard", 4096: "ok", 4097: "bad_shard"}),
    "pp_rank": (4, 4, "H", {0: "ok", 1: "bad_shard"}),
    "chunk_tokens": (5, 0, "I", {0: "bad_chunking", 15: "bad_chunking", 16: "ok", 24: "bad_chunking", 65536: "ok", 65552: "bad_chunking"}),
    "group kind": (6, 8, "B", {0: "bad_group", 1: "bad_group", 2: "ok", 4: "bad_group", 5: "bad_group"}),
    "head_dim": (
        6,
        10,
        "H",
        {0: "bad_group", 15: "bad_group", 16: "payload_size", 72: "bad_group", 1024: "payload_size", 1040: "bad_group"},
    ),
    "heads": (6, 12, "H", {0: "bad_group", 2: "bad_shard", 3: "ok", 1024: "ok", 1025: "bad_group"}),
    "head_first": (6, 14, "H", {2: "ok", 3: "bad_shard", 65535: "bad_shard"}),
    "head_count": (6, 16, "H", {0: "bad_shard", 1: "payload_size", 3: "payload_size", 4: "bad_shard", 1025: "bad_shard"}),
    "window": (6, 20, "I", {0: "bad_group", 1: "ok", 1 << 24: "ok", (1 << 24) + 1: "bad_group"}),
    "first_token": (6, 24, "Q", {31: "bad_tag", 32: "bad_token_range", 1 << 63: "bad_token_range"}),
    "end_token": (6, 32, "Q", {0: "bad_token_range", 16: "bad_token_range", 17: "bad_tag", 1 << 24: "payload_size"}),
    "end_token, above": (6, 32, "Q", {(1 << 24) + 1: "bad_token_range", (1 << 64) - 1: "bad_token_range"}),
    "window of a full group": (6, 2 * GROUP + 20, "I", {0: "ok", 1: "bad_group"}),
    "coding kind": (7, 8, "B", {0: "bad_coding", 1: "bad_coding", 7: "bad_coding", 255: "bad_coding"}),
    "element": (7, 10, "B", {0: "bad_coding", 3: "bad_coding", 4: "ok", 5: "bad_coding"}),
    "rotation": (7, 11, "B", {0: "ok", 1: "bad_coding", 2: "bad_coding"}),
    "rotation of a code book": (7, 3 * CODEC + 11, "B", {0: "bad_coding", 1: "ok", 2: "bad_coding"}),
    "bits of a code book": (7, 3 * CODEC + 9, "B", {2: "bad_coding", 3: "payload_size", 4: "ok", 5: "bad_coding"}),
    "head_dim of a rotation": (6, 3 * GROUP + 10, "H", {32: "payload_size", 48: "bad_head_dim", 64: "ok", 1024: "payload_size"}),
    "row_bytes": (7, 2 * CODEC + 12, "I", {0: "bad_coding", 1: "payload_size", 1 << 20: "payload_size", (1 << 20) + 1: "bad_coding"}),
    "row_bytes of fp8": (7, 12, "I", {0: "ok", 1: "bad_coding"}),
    "layer index": (8, 8 + 3 * LAYER, "H", {2: "layer_order", 3: "ok", 65535: "ok"}),
    "layer group": (8, 10 + 3 * LAYER, "H", {4: "bad_reference", 2: "bad_reference"}),
    "layer codec": (8, 12 + 3 * LAYER, "H", {4: "bad_reference", 2: "bad_reference"}),
    "layer source": (8, 14, "H", {0: "ok", 4: "ok", 5: "bad_coding"}),
    "key_scale": (
        8,
        16,
        "f",
        {0.0: "bad_scale", 1e-45: "ok", 3.4e38: "ok", float("inf"): "bad_scale", -1.0: "bad_scale"},
    ),
    "value_scale": (
        8,
        20,
        "I",
        {0x7FC00000: "bad_scale", 0x80000000: "bad_scale", 0x7F7FFFFF: "ok", 0x7F800000: "bad_scale", 1: "ok", 0: "bad_scale"},
    ),
    "key_scale of another coding": (8, 16 + 3 * LAYER, "I", {0x3F800000: "ok", 0x3F800001: "bad_scale", 0x3F7FFFFF: "bad_scale"}),
}


@pytest.mark.parametrize("name", FIELDS)
def test_field(name):
    section, offset, layout, expected = FIELDS[name]
    manifest = _manifest()
    payload, sealed = _payload(manifest), seal(manifest, KEY)
    at = {kind: start for kind, start, _ in sections(sealed[:-SEAL_BYTES])}[section]
    for value, verdict in expected.items():
        body = bytearray(sealed[:-SEAL_BYTES])
        struct.pack_into("<" + layout, body, at + offset, value)
        assert _both(assemble(reseal(bytes(body), KEY), KEY, payload)) == verdict, (name, value)


def _with_records(section: int, record: bytes, count: int) -> bytes:
    """The container with `count` equal records in a table."""
    body = seal(_manifest(), KEY)[:-SEAL_BYTES]
    out = bytearray(body[:24])
    for kind, at, size in sections(body):
        contents = struct.pack("<HHI", count, 0, 0) + record * count if kind == section else body[at : at + size]
        out += struct.pack("<HHI", kind, 0, len(contents)) + contents + bytes(-len(contents) % 8)
    struct.pack_into("<I", out, 12, len(out) + SEAL_BYTES)
    return assemble(reseal(bytes(out), KEY), KEY, b"")


@pytest.mark.parametrize(
    ("section", "limit", "size", "at_limit", "empty"),
    [
        (2, 16, 40, "bad_content", "bad_content"),
        (6, 64, 32, "bad_coding", "bad_group"),
        (7, 64, 80, "bad_coding", "bad_coding"),
        (8, 1024, 16, "layer_order", "layer_order"),
    ],
)
def test_counts(section, limit, size, at_limit, empty):
    body = seal(_manifest(), KEY)[:-SEAL_BYTES]
    at = {kind: start for kind, start, _ in sections(body)}[section] + 8
    record = body[at : at + size]
    assert _both(_with_records(section, record, limit)) == at_limit
    assert _both(_with_records(section, record, limit + 1)) == "too_large"
    assert _both(_with_records(section, record, 0)) == empty


def _with_id(name: bytes) -> str:
    body = seal(_manifest(), KEY)[:-SEAL_BYTES]
    out = bytearray(body[:24])
    for kind, at, size in sections(body):
        contents = body[at : at + 12] + struct.pack("<HH", len(name), 0) + name if kind == 3 else body[at : at + size]
        out += struct.pack("<HHI", kind, 0, len(contents)) + contents + bytes(-len(contents) % 8)
    struct.pack_into("<I", out, 12, len(out) + SEAL_BYTES)
    return _both(assemble(reseal(bytes(out), KEY), KEY, _payload(_manifest())))


def test_request_ids():
    for size, verdict in ((0, "bad_text"), (1, "ok"), (256, "ok"), (257, "bad_text"), (65535, "bad_text")):
        assert _with_id(b"x" * size) == verdict, size


def test_utf8():
    """Every first byte with continuations at their edges, whole, cut short and followed by more."""
    edges, accepted = (0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0), 0
    for first in (
        0x00,
        0x7F,
        0x80,
        0xBF,
        0xC0,
        0xC1,
        0xC2,
        0xDF,
        0xE0,
        0xE1,
        0xEC,
        0xED,
        0xEE,
        0xEF,
        0xF0,
        0xF1,
        0xF3,
        0xF4,
        0xF5,
        0xF8,
        0xFF,
    ):
        for second in edges:
            for tail in (b"", b"\x80", b"\x80\x80", b"\xbf\xbf", b"\x80\x80\x80", b"\xbfx"):
                accepted += _with_id(bytes([first, second]) + tail) == "ok"
    assert accepted > 50


def test_number_of_sections():
    sealed, payload = seal(_manifest(), KEY), _payload(_manifest())
    for i in range(57):
        sealed = add_section(sealed, KEY, 0x8000 + i, b"")
        verdict = _both(assemble(sealed, KEY, payload))
        assert verdict == ("ok" if 8 + i + 1 <= 64 else "too_large")


def test_size_of_a_manifest():
    sealed, payload = seal(_manifest(), KEY), _payload(_manifest())
    room = (1 << 20) - len(sealed) - 8
    assert _both(assemble(add_section(sealed, KEY, 0x8000, bytes(room)), KEY, payload)) == "ok"
    larger = add_section(sealed, KEY, 0x8000, bytes(room + 8))
    assert _both(assemble(larger, KEY, payload)) == "too_large"
    assert load().manifest_verdict(larger, KEY) == "too_large"


@pytest.mark.parametrize(("minor", "kind", "verdict"), [
    (0, 0x8000, "unknown_section"), (1, 0x8000, "unknown_section"), (1, 0xFFFF, "unknown_section"), (2, 0x7FFF, "unknown_section"),
    (2, 9, "unknown_section"), (2, 0x8000, "ok"), (2, 0xFFFF, "ok"), (65535, 0x8000, "ok"),
])  # fmt: skip
def test_optional_sections(minor, kind, verdict):
    sealed, payload = seal(_manifest(minor), KEY), _payload(_manifest())
    assert _both(assemble(sealed, KEY, payload)) == "ok"
    assert _both(assemble(add_section(sealed, KEY, kind, b"later"), KEY, payload)) == verdict


RESERVED = {1: (), 2: (2, 4, 7, 10, 12, 15), 3: (14, 15), 4: (), 5: (4, 7), 6: (2, 4, 7, 9, 18, 19), 7: (2, 4, 7), 8: (2, 4, 7)}


@pytest.mark.parametrize("section", RESERVED)
def test_reserved_bytes(section):
    sealed, payload = seal(_manifest(), KEY), _payload(_manifest())
    at, size = {kind: (start, size) for kind, start, size in sections(sealed[:-SEAL_BYTES])}[section]
    places = [at - 6, at - 5, *(at + offset for offset in RESERVED[section]), *range(at + size, at + size + -size % 8), *range(18, 24)]
    for place in places:
        body = bytearray(sealed[:-SEAL_BYTES])
        body[place] = 1
        assert _both(assemble(reseal(bytes(body), KEY), KEY, payload)) == "reserved_not_zero", place - at


def test_state():
    whole = opaque("example/state", 8)
    for first, end, value, verdict in (
        (32, 48, NONE, "ok"),
        (32, 48, opaque("example/more", 1), "ok"),
        (32, 48, FP8, "bad_coding"),
        (33, 49, NONE, "bad_token_range"),
        (32, 64, NONE, "bad_token_range"),
        (32, 47, NONE, "bad_token_range"),
    ):
        state = Group(1, 16, 32, 48, kind=GroupKind.STATE)
        fields = {"groups": (state,), "codecs": (SlotCodec(whole, NONE if value is FP8 else value),), "layers": (Layer(0, 0, 0),)}
        base = Manifest(**{**_manifest().__dict__, **fields})
        body = bytearray(seal(base, KEY)[:-SEAL_BYTES])
        at = {kind: start for kind, start, _ in sections(body)}
        struct.pack_into("<QQ", body, at[6] + 24, first, end)
        body[at[7] + 48 : at[7] + 88] = value.to_bytes()
        assert _both(assemble(reseal(bytes(body), KEY), KEY, _payload(base))) == verdict, (first, end, value)
