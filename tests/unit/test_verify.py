"""Checking many spans together finds what checking them one by one finds, in a file too, in bounded memory and time."""

import hashlib
import io
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from bridge.wire import (
    Coding,
    CodingKind,
    ContentKind,
    Group,
    GroupKind,
    Layer,
    Manifest,
    PayloadMap,
    SlotCodec,
    TagKeys,
    errors,
    open_sealed,
    seal,
    token_digest,
    verify,
    verify_tags,
    write_container,
    write_tags,
)
from bridge.wire.coding import opaque
from bridge.wire.verify import spans_in_order, verify_payload, verify_rows

KEY = bytes(range(32))
NONE = Coding(CodingKind.NONE)


def described(groups: tuple[Group, ...], codecs: tuple[SlotCodec, ...], layers: tuple[Layer, ...], chunk_tokens: int) -> Manifest:
    return Manifest(bytes(32), ((ContentKind.TOKENS, bytes(32)),), "r", 3, 4, chunk_tokens, groups, codecs, layers)


def small(rows: int = 1) -> SlotCodec:
    return SlotCodec(opaque("example/byte", rows), NONE)


def payload_of(m: Manifest, seed: int = 1) -> np.ndarray:
    """u8: random valid rows, zeros elsewhere, tags."""
    layout, keys, rng = PayloadMap(m), TagKeys(KEY, m.lease, m.generation), np.random.default_rng(seed)
    data = np.zeros(layout.payload_bytes, np.uint8)
    for span in spans_in_order(layout):
        part, row = data[span.offset : span.offset + span.nbytes], span.block_bytes // 16
        for head in range(span.heads):
            for block in range(span.blocks):
                first, end = span.valid_range(block)
                start = head * span.run_bytes + block * span.block_bytes
                part[start + first * row : start + end * row] = rng.integers(0, 256, (end - first) * row)
        write_tags(part, span, keys)
    return data


def mixed() -> Manifest:
    """Alternating sizes, three head counts, ranges that begin and end inside of blocks; runs of one block and of several."""
    groups = (
        Group(2, 16, 5, 150, kind=GroupKind.LATENT),
        Group(1, 16, 0, 160, kind=GroupKind.LATENT),
        Group(3, 16, 37, 61, kind=GroupKind.LATENT),
    )
    return described(groups, (small(1), small(2)), tuple(Layer(i, i % 3, i // 2 % 2) for i in range(12)), 32)


def one_by_one(m: Manifest, data: np.ndarray) -> errors.WireError | None:
    keys = TagKeys(KEY, m.lease, m.generation)
    for span in spans_in_order(PayloadMap(m)):
        part, layer = data[span.offset : span.offset + span.nbytes], m.layers[span.layer]
        try:
            verify_tags(part, span, keys)
            verify_rows(part, span, m.codecs[layer.codec], m.groups[layer.group].head_dim)
        except errors.WireError as error:
            return error
    return None


@pytest.mark.parametrize("piece_bytes", [1 << 20, 1000, 1])
def test_the_first_fault_is_named_as_if_spans_were_checked_one_by_one(monkeypatch, piece_bytes):
    m = mixed()
    data = payload_of(m)
    assert one_by_one(m, data) is None
    monkeypatch.setattr(verify, "PIECE_BYTES", piece_bytes)
    verify_payload(m, KEY, data)
    verify_payload(m, KEY, io.BytesIO(data.tobytes()))
    rng, keys, clauses = np.random.default_rng(2), TagKeys(KEY, m.lease, m.generation), set()
    spans = list(spans_in_order(PayloadMap(m)))
    for case in range(60):
        bad = data.copy()
        for _ in range(int(rng.integers(1, 3))):
            bad[rng.integers(bad.size)] ^= 1 << rng.integers(8)
        if case % 3 == 0:
            # Right tags over rows that may be invalid ones.
            for span in spans:
                write_tags(bad[span.offset : span.offset + span.nbytes], span, keys)
        expected = one_by_one(m, bad)
        clauses.add(expected and expected.clause)
        for payload in (bad, io.BytesIO(bad.tobytes())):
            if expected is None:
                verify_payload(m, KEY, payload)
                continue
            with pytest.raises(type(expected)) as caught:
                verify_payload(m, KEY, payload)
            # How many were checked together depends on the pieces.
            assert caught.value.detail.split("failed;")[-1] == expected.detail.split("failed;")[-1]
    assert clauses == {None, "bad_tag", "dirty_padding"}


def test_a_block_in_anothers_place_is_found_among_spans_that_are_checked_together():
    m = described((Group(2, 16, 0, 160, kind=GroupKind.LATENT),), (small(),), (Layer(0, 0, 0), Layer(1, 0, 0)), 16)
    data = payload_of(m)
    first, second = list(spans_in_order(PayloadMap(m)))[3:5]
    bad = data.copy()
    bad[first.offset : first.offset + first.nbytes] = data[second.offset : second.offset + second.nbytes]
    with pytest.raises(errors.BadTag, match="layer 1, kv head 0, tokens from 16 on"):
        verify_payload(m, KEY, bad)


def test_a_file_is_read_no_further_than_its_first_fault():
    m = described((Group(8, 16, 0, 1 << 16, kind=GroupKind.LATENT),), (small(16),), tuple(Layer(i, 0, 0) for i in range(8)), 1 << 16)
    file = io.BytesIO(bytes(PayloadMap(m).payload_bytes))
    with pytest.raises(errors.BadTag, match="layer 0, kv head 0, tokens from 0 on"):
        verify_payload(m, KEY, file)
    assert file.tell() < len(file.getvalue()) // 32
    with pytest.raises(errors.Truncated):
        verify_payload(m, KEY, io.BytesIO(b"1"))


def test_the_memory_of_a_check_does_not_grow_with_the_span():
    """One span of 12 MiB whose blocks have 16 bytes; the payload itself is the caller's."""
    m = described((Group(512, 16, 0, 1 << 14, kind=GroupKind.LATENT),), (small(),), (Layer(0, 0, 0),), 1 << 14)
    data = np.zeros(PayloadMap(m).payload_bytes, np.uint8)
    (span,) = spans_in_order(PayloadMap(m))
    write_tags(data, span, TagKeys(KEY, m.lease, m.generation))
    assert data.size == 12 << 20
    tracemalloc.start()
    try:
        verify_payload(m, KEY, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_the_memory_of_hash_keys_is_that_of_the_largest_block():
    keys = TagKeys(KEY, 1, 1)
    before = keys.hash_keys(64).copy()
    longest = keys.hash_keys(1 << 20)
    assert np.array_equal(longest[:17], before)
    assert np.array_equal(longest, TagKeys(KEY, 1, 1).hash_keys(1 << 20))
    for size in (64, 1 << 12, 1 << 20):
        assert np.shares_memory(keys.hash_keys(size), longest)
        assert len(keys.hash_keys(size)) == 1 + size // 4
    assert not longest.flags.writeable


def test_hash_keys_are_the_same_for_threads_that_ask_at_once():
    expected, found = TagKeys(KEY, 1, 1).hash_keys(1 << 18), []
    keys, together = TagKeys(KEY, 1, 1), threading.Barrier(8)

    def ask(size: int) -> None:
        together.wait()
        found.append((size, keys.hash_keys(size)))

    threads = [threading.Thread(target=ask, args=(1 << 11 + i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    for size, got in found:
        assert np.array_equal(got, expected[: 1 + size // 4])


def test_many_spans_take_little_time():
    """4,096 spans of two sizes in turn, in 164 KB; nothing is wrong, or the last byte of the last tag."""
    m = described((Group(1, 16, 0, 16 * 2048, kind=GroupKind.LATENT),), (small(1), small(2)), (Layer(0, 0, 0), Layer(1, 0, 1)), 16)
    layout = PayloadMap(m)
    data, keys = np.zeros(layout.payload_bytes, np.uint8), TagKeys(KEY, m.lease, m.generation)
    for span in spans_in_order(layout):
        write_tags(data[span.offset : span.offset + span.nbytes], span, keys)

    def seconds(work: Callable[[], object], times: int) -> float:
        """The least of several: what else the machine does may be counted in some, but not in all."""
        marks = [time.thread_time()]
        for _ in range(times):
            work()
            marks.append(time.thread_time())
        return min(after - before for before, after in pairwise(marks))

    def refused() -> None:
        with pytest.raises(errors.BadTag, match="layer 1, kv head 0, tokens from 32752 on"):
            verify_payload(m, KEY, data)

    slow = seconds(lambda: one_by_one(m, data), 2)
    assert one_by_one(m, data) is None
    assert seconds(lambda: verify_payload(m, KEY, data), 7) < slow / 3
    data[-9] ^= 1
    assert seconds(refused, 7) < slow / 2


# What is not even bytes yet. --------------------------------------------------------------------------------------------------------


def test_arguments_that_no_bytes_stand_for_have_typed_errors():
    m = described((Group(1, 16, 0, 16, kind=GroupKind.LATENT),), (small(),), (Layer(0, 0, 0),), 16)
    with pytest.raises(errors.BadCoding):
        opaque("\ud800", 1)
    for tokens in ([-1], [2**32], [1.5]):
        with pytest.raises(errors.BadContent):
            token_digest(tokens)
    assert token_digest([0, 2**32 - 1]) == hashlib.sha256(struct.pack("<2I", 0, 2**32 - 1)).digest()
    for key in (b"", KEY[:31], KEY + b"\0"):
        with pytest.raises(errors.BadSeal, match="32 bytes"):
            TagKeys(key, 1, 1)
        with pytest.raises(errors.BadSeal, match="32 bytes"):
            seal(m, key)
        file = io.BytesIO()
        with pytest.raises(errors.BadSeal, match="32 bytes"):
            write_container(file, m, key, bytes(32))
        assert file.getvalue() == b""
    for field in ({"lease": 1.5}, {"generation": 1.0}, {"lease": 2**64}, {"generation": -1}):
        with pytest.raises(errors.TooLarge):
            seal(replace(m, **field), KEY)
        with pytest.raises(errors.TooLarge):
            TagKeys(KEY, **{"lease": 1, "generation": 1, **field})
    with pytest.raises(errors.BadChunking):
        seal(replace(m, chunk_tokens=16.0), KEY)
    assert open_sealed(seal(m, KEY), KEY) == m
