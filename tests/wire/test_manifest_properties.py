"""Properties of manifests, payload maps, control messages and tickets, over random ones; and what a writer is told of a manifest that
cannot be written."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import asdict, replace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bridge.codecs import CODECS, NotCarried, declared, reference
from bridge.codecs.tables import head_dims
from bridge.handoff import messages
from bridge.handoff.errors import BadTicket, ProtocolError
from bridge.handoff.ticket import Ticket
from bridge.wire import (
    BLOCK_TOKENS,
    Coding,
    CodingKind,
    ContentKind,
    Element,
    Group,
    GroupKind,
    Layer,
    Manifest,
    PayloadMap,
    Shard,
    SlotCodec,
    TagKeys,
    open_sealed,
    seal,
    verify_tags,
    write_tags,
)
from bridge.wire.coding import opaque
from bridge.wire.errors import BadCoding, BadContent, BadScale, BadShard, BadTag, BadText, UnsupportedVersion
from bridge.wire.payload import tag_plane_bytes
from tests.attacks import build

KEY = bytes(range(32))
PROFILE = settings(
    max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)

# Valid manifests. -----------------------------------------------------------------------------------------------------------------

digests = st.binary(min_size=32, max_size=32)
fp32_scales = st.floats(2.0**-126, 2.0**100, width=32)
NOTHING = Coding(CodingKind.NONE)


def _opaque(row_bytes: int) -> Coding:
    return opaque(f"tests/{row_bytes}", row_bytes)


@st.composite
def groups_and_layers(draw: st.DrawFn, tokens: int) -> tuple[list[Group], list[SlotCodec], list[tuple[int, int]]]:
    """Groups, codecs, and (group, codec) of each layer; every group and codec is used."""
    groups, codecs, pairs = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(list(GroupKind)))
        first = draw(st.integers(0, tokens - 1))
        end = draw(st.integers(first + 1, tokens))
        if kind is GroupKind.STATE:
            first = first // BLOCK_TOKENS * BLOCK_TOKENS
            end = first + BLOCK_TOKENS
        heads = draw(st.integers(1, 4))
        head_first = draw(st.integers(0, heads - 1))
        dim = draw(st.sampled_from((16, 48, 64, 128)))
        window = draw(st.integers(1, 4096)) if kind is GroupKind.SLIDING_WINDOW else 0
        groups.append(Group(heads, dim, first, end, head_first, draw(st.integers(1, heads - head_first)), kind, window))
        for _ in range(draw(st.integers(1, 2))):
            name = draw(st.sampled_from([n for n in CODECS if dim in head_dims() or declared(n).key.kind is not CodingKind.CODEBOOK]))
            codec = declared(name).for_layer(dim, draw(st.sampled_from((Element.BF16, Element.FP16, Element.FP32))))
            if kind is GroupKind.LATENT:
                codec = SlotCodec(codec.key, NOTHING)
            elif kind is GroupKind.STATE:
                codec = SlotCodec(_opaque(draw(st.integers(1, 99))), draw(st.sampled_from((NOTHING, _opaque(7)))))
            elif draw(st.integers(0, 4)) == 0:
                codec = SlotCodec(_opaque(draw(st.integers(1, 99))), _opaque(draw(st.integers(1, 99))))
            codecs.append(codec)
            pairs.append((len(groups) - 1, len(codecs) - 1))
    return groups, codecs, draw(st.permutations(pairs + draw(st.lists(st.sampled_from(pairs), max_size=3))))


@st.composite
def manifests(draw: st.DrawFn, tokens: int = 200) -> Manifest:
    groups, codecs, pairs = draw(groups_and_layers(tokens))
    indices = sorted(draw(st.sets(st.integers(0, 65535), min_size=len(pairs), max_size=len(pairs))))

    def scale(side: Coding) -> float:
        return draw(fp32_scales) if side.kind is CodingKind.FP8 else 1.0

    layers = tuple(
        Layer(index, group, codec, scale(codecs[codec].key), scale(codecs[codec].value), draw(st.sampled_from(list(Element))))
        for index, (group, codec) in zip(indices, pairs, strict=True)
    )
    kinds = [ContentKind.TOKENS, *sorted(draw(st.sets(st.sampled_from([k for k in ContentKind if k is not ContentKind.TOKENS]))))]
    ranks = [draw(st.integers(1, 4096)) for _ in range(2)]
    request_id = draw(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=64))
    return Manifest(
        model_digest=draw(digests),
        content=tuple((kind, draw(digests)) for kind in kinds),
        request_id=request_id,
        lease=draw(st.integers(0, 2**64 - 1)),
        generation=draw(st.integers(0, 2**32 - 1)),
        chunk_tokens=BLOCK_TOKENS * draw(st.sampled_from((1, 2, 3, 5, 16, 4096))),
        groups=tuple(groups),
        codecs=tuple(codecs),
        layers=layers,
        shard=Shard(draw(st.integers(0, ranks[0] - 1)), ranks[0], draw(st.integers(0, ranks[1] - 1)), ranks[1]),
        minor=draw(st.sampled_from((0, 1, 2, 65535))),
    )


def as_rows(m: Manifest) -> tuple[list[dict], list[dict], list[dict]]:
    """Groups, codecs and layers as the naive walk takes them."""
    groups = [asdict(g) for g in m.groups]
    codecs = [build.codec(asdict(c.key), asdict(c.value)) for c in m.codecs]
    return groups, codecs, [asdict(layer) for layer in m.layers]


@PROFILE
@given(manifests())
def test_seal_and_open_round_trip(m):
    sealed = seal(m, KEY)
    assert open_sealed(sealed, KEY) == m
    assert seal(open_sealed(sealed, KEY), KEY) == sealed
    assert len(sealed) % 8 == 0


@PROFILE
@given(manifests(), manifests())
def test_different_manifests_have_different_bytes(a, b):
    assert (seal(a, KEY) == seal(b, KEY)) == (a == b)


@PROFILE
@given(manifests())
def test_blocks_lie_where_the_naive_walk_says(m):
    layout = PayloadMap(m)
    expected = list(build.walk(m.chunk_tokens, *as_rows(m)))
    found, at, ordinal = [], 0, 0
    for index in range(layout.chunk_count):
        chunk = layout.chunk(index)
        assert (chunk.index, chunk.offset, chunk.first_ordinal) == (index, at, ordinal)
        for span in chunk.spans:
            assert (span.offset, span.first_ordinal) == (at, ordinal)
            for head in range(span.heads):
                run = span.offset + head * span.run_bytes
                for block in range(span.blocks):
                    offset = run + block * span.block_bytes
                    tag = run + span.blocks * span.block_bytes + 8 * block
                    end = run + span.run_bytes
                    found.append(
                        (ordinal, span.layer, head, span.first_block + block, offset, span.block_bytes, tag, end, *span.valid_range(block))
                    )
                    ordinal += 1
                at = run + span.run_bytes
        assert at == chunk.offset + chunk.nbytes
        assert chunk.blocks == ordinal - chunk.first_ordinal
        assert chunk.nbytes <= layout.chunk_bytes_bound
    # Contiguous, exhaustive and without overlap: the walk counts every byte once.
    assert found == [block[:10] for block in expected]
    assert (at, ordinal) == (layout.payload_bytes, layout.blocks)
    assert layout.payload_bytes % 16 == 0


@PROFILE
@given(manifests())
def test_every_valid_token_of_every_group_is_in_exactly_one_row(m):
    rows: dict[tuple[int, int, int], int] = {}
    layout = PayloadMap(m)
    for index in range(layout.chunk_count):
        for span in layout.chunk(index).spans:
            assert span.first_token // m.chunk_tokens == (span.end_token - 1) // m.chunk_tokens == layout.first_chunk + index
            for head in range(span.heads):
                for block in range(span.blocks):
                    first, end = span.valid_range(block)
                    assert 0 <= first < end <= BLOCK_TOKENS
                    # Only a span's first and last block may be part full.
                    assert first == 0 or block == 0
                    assert end == BLOCK_TOKENS or block == span.blocks - 1
                    for row in range(first, end):
                        place = (span.layer, head, (span.first_block + block) * BLOCK_TOKENS + row)
                        rows[place] = rows.get(place, 0) + 1
    expected = {
        (position, head, token)
        for position, layer in enumerate(m.layers)
        for head in range(m.groups[layer.group].head_count)
        for token in range(m.groups[layer.group].first_token, m.groups[layer.group].end_token)
    }
    assert set(rows) == expected
    assert set(rows.values()) == {1}


@PROFILE
@given(manifests(), st.data())
def test_ranges_of_heads_are_contiguous(m, data):
    layout = PayloadMap(m)
    span = data.draw(st.sampled_from(layout.chunk(data.draw(st.integers(0, layout.chunk_count - 1))).spans or (None,)))
    assume(span is not None)
    first = data.draw(st.integers(0, span.heads - 1))
    count = data.draw(st.integers(1, span.heads - first))
    offset, size = span.head_range(first, count)
    assert size == count * span.run_bytes
    assert span.offset <= offset
    assert offset + size <= span.offset + span.nbytes
    assert span.run_bytes == span.blocks * span.block_bytes + tag_plane_bytes(span.blocks)
    # Neighbouring ranges meet: whatever TP the other side has, its share is one piece.
    assert span.head_range(0, first)[1] + span.offset == offset


@PROFILE
@given(manifests(), st.integers(1, 2**40))
def test_the_chunk_grid_is_absolute(m, other):
    """A token's chunk depends on its number and the chunk size only, so that chunked prefill and prefix hits give the same places."""
    layout = PayloadMap(m)
    assert layout.first_chunk == min(g.first_token for g in m.groups) // m.chunk_tokens
    last = (max(g.end_token for g in m.groups) - 1) // m.chunk_tokens
    assert layout.chunk_count == last - layout.first_chunk + 1
    for index in (-1, layout.chunk_count, layout.chunk_count + other):
        with pytest.raises(IndexError):
            layout.chunk(index)


@settings(PROFILE, max_examples=25)
@given(manifests(tokens=60), st.data())
def test_tags_equal_the_naive_ones_and_damage_is_refused(m, data):
    layout, keys = PayloadMap(m), TagKeys(KEY, m.lease, m.generation)
    assume(layout.payload_bytes <= 1 << 16)
    payload = np.random.default_rng(1).integers(0, 256, layout.payload_bytes, dtype=np.uint8)
    parts = [(span, payload[span.offset : span.offset + span.nbytes]) for i in range(layout.chunk_count) for span in layout.chunk(i).spans]
    for span, part in parts:
        write_tags(part, span, keys)
    for block in build.walk(m.chunk_tokens, *as_rows(m)):
        bytes_of = payload[block.offset : block.offset + block.nbytes].tobytes()
        expected = build.tag(bytes_of, block.first, block.end, block.ordinal, KEY, m.lease, m.generation)
        assert payload[block.tag : block.tag + 8].tobytes() == struct.pack("<Q", expected)
    span, part = data.draw(st.sampled_from(parts))
    verify_tags(part, span, keys)
    bit = data.draw(st.integers(0, 8 * span.blocks * span.block_bytes - 1))
    part[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadTag):
        verify_tags(part, span, keys)


# What a writer is told. -----------------------------------------------------------------------------------------------------------


def valid() -> Manifest:
    codec = declared("fp8_e4m3").for_layer(64, Element.BF16)
    return Manifest(bytes(32), ((ContentKind.TOKENS, bytes(32)),), "r", 1, 1, 16, (Group(2, 64, 0, 16),), (codec,), (Layer(0, 0, 0),))


FP8 = valid().codecs[0].key
UNWRITABLE = {
    "lone surrogate": ({"request_id": "\ud800"}, BadText),
    "short content digest": ({"content": ((ContentKind.TOKENS, b"short"),)}, BadContent),
    "long content digest": ({"content": ((ContentKind.TOKENS, bytes(33)),)}, BadContent),
    "minor of 17 bits": ({"minor": 1 << 16}, UnsupportedVersion),
    "negative first head": ({"groups": (Group(2, 64, 0, 16, -1, 2),)}, BadShard),
    "a scale over fp32": ({"layers": (Layer(0, 0, 0, 1e300),)}, BadScale),
    "a scale that fp32 rounds to zero": ({"layers": (Layer(0, 0, 0, 1.0, 1e-60),)}, BadScale),
    "no number as a scale": ({"layers": (Layer(0, 0, 0, math.nan),)}, BadScale),
    "contradictory coding": ({"codecs": (SlotCodec(replace(FP8, bits=4), FP8),)}, BadCoding),
    "300 bits": ({"codecs": (SlotCodec(FP8, replace(FP8, bits=300)),)}, BadCoding),
    "short opaque digest": ({"codecs": (SlotCodec(Coding(CodingKind.OPAQUE, row_bytes=1, digest=b"x"), FP8),)}, BadCoding),
    "no key side": ({"codecs": (SlotCodec(NOTHING, FP8),)}, BadCoding),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_what_cannot_be_written_is_refused_by_its_clause(name):
    """Before anything is sealed: silently padded or cut, the receiver would read another manifest than the writer meant."""
    change, error = UNWRITABLE[name]
    assert open_sealed(seal(valid(), KEY), KEY) == valid()
    with pytest.raises(error) as raised:
        seal(replace(valid(), **change), KEY)
    assert type(raised.value) is error


@pytest.mark.parametrize("side", [_opaque(16), NOTHING], ids=lambda side: side.kind.name)
def test_sides_without_coded_vectors_are_refused_by_type(side):
    """A sealed manifest may describe them; a device that tries to code them must not fail with a KeyError."""
    codes, scalars = np.zeros((1, side.code_bytes(16)), np.uint8), np.zeros((1, 0), np.uint8)
    with pytest.raises(NotCarried):
        reference.decode(codes, scalars, side, 16)
    with pytest.raises(NotCarried):
        reference.encode(np.zeros((1, 16), np.float32), side)


# Control messages. ----------------------------------------------------------------------------------------------------------------

u32s, offsets, u64s = st.integers(0, 2**32 - 1), st.integers(0, 2**62 - 1), st.binary(min_size=8, max_size=8)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
names = texts.filter(bool)
slots = st.builds(messages.Slot, st.integers(0, messages.MAX_CHUNKS - 1), offsets)
MESSAGES = st.one_of(
    st.builds(messages.Hello, u32s, u32s, names),
    st.builds(
        messages.Welcome,
        major=u32s,
        minor=u32s,
        agent=names,
        agent_metadata=st.binary(min_size=1, max_size=99),
        address=u64s,
        nbytes=offsets,
        device=names,
        index=u32s,
    ),
    st.builds(
        messages.Claim,
        sequence=u32s,
        request_id=names,
        lease=u64s,
        generation=u32s,
        reader=st.integers(0, 4095),
        readers=st.integers(1, 4096),
        model=digests,
    ),
    st.builds(messages.Grant, u32s, st.binary(max_size=99), digests, st.lists(slots, max_size=5)),
    st.builds(messages.Refusal, u32s, names, texts, texts),
    st.builds(messages.Ready, u64s, u32s, slots),
    st.builds(messages.Taken, u64s, u32s, st.integers(0, messages.MAX_CHUNKS - 1)),
    *(st.builds(kind, u64s, u32s) for kind in (messages.Commit, messages.Released)),
    st.builds(messages.Abandon, u64s, u32s, names, texts),
    st.builds(messages.Revoked, u64s, u32s, names, texts, texts),
    st.just(messages.Ping()),
)


def same(a: object, b: object) -> bool:
    return type(a) is type(b) and msgspec.to_builtins(a) == msgspec.to_builtins(b)


@PROFILE
@given(MESSAGES)
def test_messages_round_trip(message):
    assert same(messages.decode(messages.encode(message)), message)


@PROFILE
@given(
    MESSAGES, st.text(min_size=1, max_size=9), st.recursive(st.none() | st.integers(-9, 9) | st.binary(max_size=9), st.lists, max_leaves=5)
)
def test_unknown_fields_of_later_minors_are_ignored(message, name, value):
    fields = msgspec.msgpack.decode(messages.encode(message))
    assume(name not in fields)
    assert same(messages.decode(msgspec.msgpack.encode({**fields, name: value})), message)


@PROFILE
@given(MESSAGES, st.data())
def test_cut_extended_and_damaged_messages_are_refused_or_read_within_bounds(message, data):
    whole = messages.encode(message)
    for broken in (whole[: data.draw(st.integers(0, len(whole) - 1))], whole + data.draw(st.binary(min_size=1, max_size=9))):
        with pytest.raises(ProtocolError):
            messages.decode(broken)
    damaged = bytearray(whole)
    damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = messages.decode(bytes(damaged))
    except ProtocolError:
        return
    # What was read is within bounds: it can be sent and read again.
    assert same(messages.decode(messages.encode(read)), read)


OUTSIDE = {
    "sequence": (-1, 2**32, 1.5, "1", None, True),
    "generation": (-1, 2**32, 2**64 - 1, b"1"),
    "reader": (-1, 4096),
    "readers": (0, -1, 4097),
    "chunk": (-1, messages.MAX_CHUNKS),
    "lease": (b"", bytes(7), bytes(9), "12345678", 7),
    "key": (b"", bytes(31), bytes(33), [0] * 32),
    "model": (bytes(31), "x" * 32),
    "request_id": ("", "x" * 257, b"x", 7),
    "clause": ("", "x" * 257),
    "detail": ("x" * 1025, None),
    "heartbeat": (0, -1, 3601, math.nan, math.inf),
    "address": (bytes(7), 0),
    "nbytes": (-1, 2**62),
    "instance": (bytes(15), bytes(17)),
    "device": ("", "x" * 33, 7),
    "agent_metadata": (b"", bytes((1 << 20) + 1)),
    "manifest": (bytes((1 << 20) + 1), "x"),
    "ready": ([[0]], [[0, -1]], [[0, 2**62]], [[messages.MAX_CHUNKS, 0]], [0], {}, [[0, 0]] * (messages.MAX_CHUNKS + 1)),
    "slot": ([], [0], [-1, 0], {"chunk": 0, "offset": 0}),
    "type": ("", "nothing", 7, None),
}


@settings(PROFILE, max_examples=60)
@given(MESSAGES)
def test_fields_out_of_bounds_are_refused(message):
    fields = msgspec.msgpack.decode(messages.encode(message))
    for name in fields:
        for value in OUTSIDE.get(name, ()):
            with pytest.raises(ProtocolError):
                messages.decode(msgspec.msgpack.encode({**fields, name: value}))
        with pytest.raises(ProtocolError):
            messages.decode(msgspec.msgpack.encode({n: v for n, v in fields.items() if n != name}))


def test_every_field_has_a_bound_that_was_tried():
    # Names and minors share the types of those above.
    shared = {"major", "minor", "agent", "index", "remedy"}
    fields = {field for kind in messages.Message.__args__ for field in kind.__struct_fields__} | {"type"}
    assert fields <= set(OUTSIDE) | shared


BOMBS = {
    "array of 2**32 - 1 in ready": b"\x82\xa4type\xa5grant\xa5ready\xdd\xff\xff\xff\xff",
    "array of 2**32 - 1 in an unknown field": b"\x82\xa4type\xa4ping\xa1x\xdd\xff\xff\xff\xff",
    "map of 2**32 - 1": b"\xdf\xff\xff\xff\xff",
    "text of 4 GiB": b"\x82\xa4type\xdb\xff\xff\xff\xff",
    "bytes of 4 GiB": b"\x82\xa4type\xa5grant\xa8manifest\xc6\xff\xff\xff\xff",
    "deep arrays": b"\x82\xa4type\xa4ping\xa1x" + b"\x91" * 1_000_000,
    "deep maps": b"\x82\xa4type\xa4ping\xa1x" + b"\x81\xa1x" * 300_000,
    "deep arrays in a slot": b"\x82\xa4type\xa5ready\xa4slot" + b"\x91" * 1_000_000,
    "text that is not UTF-8": b"\x84\xa4type\xa5hello\xa5major\x00\xa5minor\x00\xa5agent\xa1\xff",
    "an extension type": b"\xd6\xff\0\0\0\0",
    "a number as the message": b"\x07",
    "nothing": b"",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_on_the_control_channel_cost_nothing(name):
    import tracemalloc

    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            messages.decode(BOMBS[name])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# Tickets. -------------------------------------------------------------------------------------------------------------------------

tickets = st.builds(Ticket, names.map(lambda t: t[:100]), names, st.integers(0, 2**64 - 1), u32s)


@PROFILE
@given(tickets)
def test_tickets_round_trip_through_json(ticket):
    assert Ticket.from_dict(json.loads(json.dumps(ticket.to_dict()))) == ticket
    assert Ticket.from_dict({**ticket.to_dict(), "unknown": [1]}) == ticket


_PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
JSON_VALUES = _PLAIN | st.lists(_PLAIN) | st.dictionaries(st.text(), _PLAIN)


@settings(PROFILE, max_examples=200)
@given(tickets, st.sampled_from(("peer", "request_id", "lease", "generation")), JSON_VALUES)
def test_hostile_tickets_are_refused_or_usable(ticket, name, value):
    """Whatever a router passes on: a refusal by type, or a ticket that can be claimed with and compared to a manifest."""
    data = json.loads(json.dumps({**ticket.to_dict(), name: value}))
    try:
        read = Ticket.from_dict(data)
    except BadTicket:
        return
    commit = messages.Commit(messages.u64(read.lease), read.generation)
    assert same(messages.decode(messages.encode(commit)), commit)
    refusal = messages.Refusal(0, read.request_id, read.peer, "")
    assert same(messages.decode(messages.encode(refusal)), refusal)
    assert Ticket.from_dict(read.to_dict()) == read


HOSTILE_TICKETS = [
    None,
    [],
    "ticket",
    7,
    {},
    {"peer": ""},
    {"peer": "p" * 129},
    {"peer": ["p"]},
    {"request_id": ""},
    {"request_id": "x" * 257},
    {"request_id": "é" * 129},
    {"request_id": "\ud800"},
    {"request_id": "a\udfff"},
    {"request_id": b"x"},
    {"lease": 7},
    {"lease": "7"},
    {"lease": "0" * 17},
    {"lease": "0" * 15 + "G"},
    {"lease": "0" * 15 + "A"},
    {"lease": "0x" + "0" * 14},
    {"lease": "-" + "0" * 15},
    {"lease": "\u0660" * 16},
    {"lease": "0" * 15 + "\n"},
    {"generation": -1},
    {"generation": 2**32},
    {"generation": True},
    {"generation": 1.0},
    {"generation": "1"},
    {"generation": None},
]


@pytest.mark.parametrize("change", HOSTILE_TICKETS, ids=repr)
def test_hostile_ticket(change):
    good = Ticket("prefill-0", "r", 1, 1).to_dict()
    with pytest.raises(BadTicket):
        Ticket.from_dict({**good, **change} if isinstance(change, dict) and change else change)
