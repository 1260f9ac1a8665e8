"""The vectors are what the script makes, the Python reader finds in them what their descriptions say, and the document quotes them."""

from __future__ import annotations

import json
import re
import struct
import time

import numpy as np
import pytest

from bridge.codecs import CODECS
from bridge.errors import all_error_types
from bridge.wire import (
    BLOCK_TOKENS,
    CodingKind,
    Element,
    Group,
    GroupKind,
    Layer,
    PayloadMap,
    SlotCodec,
    TagKeys,
    errors,
    write_container,
    write_tags,
)
from bridge.wire import manifest as limits
from bridge.wire.coding import MAX_OPAQUE_BYTES, opaque
from bridge.wire.container import read_container, verify_container
from bridge.wire.sealing import MAX_MANIFEST_BYTES, MAX_SECTIONS
from bridge.wire.tags import split_runs
from bridge.wire.verify import occupied_chunks, spans_in_order, verify_payload
from tests.vectors import make_vectors
from tests.wire.random_payloads import python_dump, python_rows, random_manifest

NAMES = sorted(vector.name for vector in make_vectors.vectors())


@pytest.fixture(scope="module")
def made():
    return dict(make_vectors.files())


def test_the_folder_holds_what_the_script_makes(made):
    folder = make_vectors.FOLDER
    found = {path.name: path.read_bytes() for pattern in ("*.kvb", "*.json") for path in folder.glob(pattern)}
    assert found.keys() == made.keys()
    assert [name for name in made if made[name] != found[name]] == []
    assert sum(map(len, found.values())) < 300_000


@pytest.mark.parametrize("name", NAMES)
def test_the_python_reader_accepts(name):
    path = make_vectors.FOLDER / f"{name}.kvb"
    expected = json.loads(path.with_suffix(".json").read_text())
    manifest = verify_container(path)
    assert python_dump(manifest).splitlines() == expected["manifest"]
    _, key, payload = read_container(path)
    assert key.hex() == expected["key"]
    for side in expected["decoded"]:
        rows = python_rows(manifest, payload, side["layer"], "KV".index(side["side"]))[side["head"]]
        assert rows.shape == (side["rows"], side["row_bytes"])


@pytest.mark.parametrize("name", ["small", "sliding_window", "state", "tp_rank1", "distant"])
def test_every_byte_of_a_payload_is_verified(name):
    """Each byte changed in turn is refused, and each that must be zero is refused under a valid tag too."""
    manifest, key, payload = read_container(make_vectors.FOLDER / f"{name}.kvb")
    step = max(1, len(payload) // 400)
    for at in range(0, len(payload), step):
        damaged = bytearray(payload)
        damaged[at] ^= 1 << at % 8
        with pytest.raises((errors.BadTag, errors.DirtyPadding)):
            verify_payload(manifest, key, bytes(damaged))
    for size in (0, len(payload) - 1, len(payload) + 1):
        with pytest.raises(errors.PayloadSize):
            verify_payload(manifest, key, (payload + b"\0")[:size])


@pytest.mark.parametrize("name", ["small", "raw_bf16", "turboquant_4bit_nc", "tp_rank0"])
def test_invalid_rows_are_refused_under_valid_tags(name):
    manifest, key, payload = read_container(make_vectors.FOLDER / f"{name}.kvb")
    keys, refused, accepted = TagKeys(key, manifest.lease, manifest.generation), 0, 0
    for span in spans_in_order(PayloadMap(manifest)):
        layer = manifest.layers[span.layer]
        codec, head_dim = manifest.codecs[layer.codec], manifest.groups[layer.group].head_dim
        for block in range(span.blocks):
            first, end = span.valid_range(block)
            for plane in codec.planes(head_dim):
                for row in range(BLOCK_TOKENS) if plane.row_bytes else ():
                    data = np.frombuffer(payload, np.uint8).copy()
                    part = data[span.offset : span.offset + span.nbytes]
                    split_runs(part, span)[0][-1, block, plane.offset + (row + 1) * plane.row_bytes - 1] ^= 1
                    write_tags(part, span, keys)
                    if first <= row < end:
                        verify_payload(manifest, key, data)
                        accepted += 1
                        continue
                    with pytest.raises(errors.DirtyPadding):
                        verify_payload(manifest, key, data)
                    refused += 1
    assert refused
    assert accepted


def test_a_wrong_tag_is_reported_before_dirty_rows():
    manifest, key, payload = read_container(make_vectors.FOLDER / "small.kvb")
    damaged = bytearray(payload)
    damaged[0] = 1
    with pytest.raises(errors.BadTag):
        verify_payload(manifest, key, bytes(damaged))
    padding = bytearray(payload)
    padding[-1] = 1
    with pytest.raises(errors.DirtyPadding):
        verify_payload(manifest, key, bytes(padding))


def test_chunks_between_distant_groups_cost_nothing():
    manifest, _, _ = read_container(make_vectors.FOLDER / "distant.kvb")
    layout = PayloadMap(manifest)
    occupied = list(occupied_chunks(layout))
    assert layout.chunk_count == 1 << 20
    assert occupied == [i for i in (0, (1 << 20) - 2, (1 << 20) - 1) if layout.chunk(i).nbytes]
    assert len(occupied) == 3


def test_spans_in_order_are_those_of_the_chunks():
    compared = 0
    for seed in range(200):
        layout = PayloadMap(random_manifest(np.random.default_rng(seed)))
        expected = [span for index in occupied_chunks(layout) for span in layout.chunk(index).spans]
        assert list(spans_in_order(layout)) == expected, f"seed {seed}"
        assert sum(span.nbytes for span in expected) == layout.payload_bytes
        compared += len(expected)
    assert compared > 500


def test_many_chunks_with_few_layers_take_time_for_their_bytes_only():
    """1,023 layers in the first chunk, one in each of 20,000: the cost is that of 21,023 spans, not of 20,000 x 1,024."""
    groups, codec = (Group(1, 16, 0, 16), Group(1, 16, 0, 16 * 20_000)), SlotCodec(opaque("example/byte", 1), opaque("example/byte", 1))
    layers = tuple(Layer(i, int(i == 500), 0) for i in range(1024))
    layout = PayloadMap(make_vectors.manifest_of("many", groups, (codec,), layers))
    start = time.thread_time()
    found = sum(1 for _ in spans_in_order(layout))
    seconds = time.thread_time() - start
    assert found == 21_023
    assert seconds < 5


def test_verify_container_refuses_foreign_code_books(tmp_path):
    of_128 = CODECS["turboquant_4bit_nc"].for_layer(128, Element.BF16)
    manifest = make_vectors.manifest_of("foreign", (Group(1, 64, 0, 16),), (of_128,), (Layer(0, 0, 0),))
    with (tmp_path / "foreign.kvb").open("wb") as file:
        write_container(file, manifest, bytes(32), bytes(PayloadMap(manifest).payload_bytes))
    with pytest.raises(errors.BadCodebook):
        verify_container(tmp_path / "foreign.kvb")


def test_the_value_side_of_a_state_is_opaque_or_none():
    state, key = Group(1, 16, 32, 48, kind=GroupKind.STATE), opaque("example/ssm", 24)
    for value, accepted in ((make_vectors.NONE, True), (make_vectors.INT4, True), (make_vectors.BF16, False), (make_vectors.FP8, False)):
        manifest = make_vectors.manifest_of("state", (state,), (SlotCodec(key, value),), (Layer(0, 0, 0),))
        if accepted:
            manifest.check()
        else:
            with pytest.raises(errors.BadCoding):
                manifest.check()


# --- the document


@pytest.fixture(scope="module")
def text():
    return make_vectors.DOCUMENT.read_text(encoding="utf-8")


def test_derived_parts_of_the_document(text):
    assert make_vectors.document(text) == text


def test_the_hex_dump_is_the_file(text):
    """Read back independently of the script that writes it."""
    dump = text[text.index("<!-- begin: small.kvb") :].split("```")[1]
    data = bytearray()
    for line in dump.strip().splitlines():
        assert int(line[:4], 16) == len(data)
        shown = line[6:54].strip()
        zeros = re.fullmatch(r"00 \(x (\d+)\)", shown)
        data += bytes(int(zeros[1])) if zeros else bytes.fromhex(shown)
    assert bytes(data) == (make_vectors.FOLDER / "small.kvb").read_bytes()


def test_tags_of_the_document_by_integers(text):
    """The formula of section 6.4 in plain integers, from the numbers that stand in the document."""
    part = text[text.index("<!-- begin: tags") : text.index("<!-- end: tags")]
    masks = {int(i): int(x, 16) for i, x in re.findall(r"mask\[(\d+)\] +(\w+)", part)}
    k = [int(x, 16) for x in re.findall(r"^k\[\d+\] +(\w+)", part, re.MULTILINE)]
    rows = re.findall(r"\| (\d+) \| (\d+), (\d+) \| `(\w+)` \| `(\w+)` \|", part)
    assert len(rows) == 3
    for ordinal, first, end, block, tag in rows:
        words = struct.unpack("<8I", bytes.fromhex(block))
        total = masks[int(ordinal)] + k[0] * (int(first) + 256 * int(end)) + sum(x * w for x, w in zip(k[1:], words, strict=True))
        assert total % 2**64 == int(tag, 16)


def test_the_error_table_is_the_code(text):
    rows = re.findall(r"^\| (W\d\d) \| (\w+) \| (\w+) \| (.+) \| (\S+) \|$", text, re.MULTILINE)
    types = all_error_types(errors.WireError)
    types.pop(errors.WireError.clause)
    assert {row[1] for row in rows} == types.keys()
    assert [row[0] for row in rows] == [f"W{i:02}" for i in range(1, len(rows) + 1)]
    for number, clause, name, rule, test in rows:
        assert types[clause].__name__ == name
        assert types[clause].__doc__ == f"{number}: {rule}."
        assert (make_vectors.FOLDER.parent.parent / test).is_file(), test


def test_the_limits_are_the_code(text):
    rows = dict(re.findall(r"^\| ([^|]+?) \| [\d,]* ?\| ([\d,]+) \|$", text, re.MULTILINE))
    assert {name: int(number.replace(",", "")) for name, number in rows.items()} == {
        "bytes of a manifest, seal included": MAX_MANIFEST_BYTES,
        "sections": MAX_SECTIONS,
        "bytes of a request id": limits.MAX_REQUEST_ID_BYTES,
        "content digests": limits.MAX_CONTENT_DIGESTS,
        "groups": limits.MAX_GROUPS,
        "codecs": limits.MAX_CODECS,
        "layers": limits.MAX_LAYERS,
        "index of a layer": 2**16 - 1,
        "kv heads of a group": limits.MAX_HEADS,
        "head dimension (a multiple of 16)": limits.MAX_HEAD_DIM,
        "end of a token range": limits.MAX_TOKENS,
        "window": limits.MAX_TOKENS,
        "tokens of a chunk (a multiple of 16)": limits.MAX_CHUNK_TOKENS,
        "TP and PP size": limits.MAX_RANKS,
        "bytes of an opaque row": MAX_OPAQUE_BYTES,
        "blocks of a payload": limits.MAX_BLOCKS,
    }
    assert f"Version {limits.MAJOR}.{limits.MINOR}." in text


def test_numbers_of_enumerations(text):
    for enum in (limits.ContentKind, GroupKind, CodingKind):
        for member in enum:
            assert f"{member:d} {member.name}" in text
