"""Layers that are alike travel as columns; looked at one by one they are what the format says of each layer."""

import gc
import random
import weakref
from dataclasses import replace

import pytest
import torch

from bridge.codecs import declared
from bridge.devices import SpanShare
from bridge.pages import CacheGroup, LayerPages, PagedCache, PagesDoNotFit
from bridge.shares import batches, check_held, chunk_share, held_layers, written_range
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
    errors,
    token_digest,
)
from bridge.wire.alike import OfLayers, kinds_of

HEAD_DIM, MOST_HEADS = 16, 4


def pages(heads: int) -> LayerPages:
    side = torch.zeros(2, 16, heads, HEAD_DIM, dtype=torch.bfloat16)
    return LayerPages.nhd(side, side)


def random_manifest(rng: random.Random) -> Manifest:
    groups = []
    for _ in range(rng.randint(1, 3)):
        first = rng.randrange(100)
        head_first = rng.randrange(MOST_HEADS)
        count = rng.randint(1, MOST_HEADS - head_first)
        groups.append(Group(MOST_HEADS, HEAD_DIM, first, first + rng.randint(1, 150), head_first, count))
    codecs = [
        declared(name).for_layer(HEAD_DIM, Element.BF16)
        for name in rng.sample(["raw", "fp8_e4m3", "int8_per_token_head"], rng.randint(1, 3))
    ]
    layers, index = [], 0
    for place in range(rng.randint(max(len(groups), len(codecs)), 12)):
        index += rng.randint(1, 3)
        group = place if place < len(groups) else rng.randrange(len(groups))
        codec = place if place < len(codecs) else rng.randrange(len(codecs))
        scales = (rng.choice([1.0, 0.5]), 2.0) if codecs[codec].key.scaled else (1.0, 1.0)
        layers.append(Layer(index, group, codec, *scales))
    return Manifest(
        model_digest=bytes(32), content=((ContentKind.TOKENS, token_digest([1])),), request_id="r", lease=1, generation=0,
        chunk_tokens=rng.choice([16, 48, 64]), groups=tuple(groups), codecs=tuple(codecs), layers=tuple(layers),
    )  # fmt: skip


def random_caches(rng: random.Random, manifest: Manifest) -> list[PagedCache]:
    """One to three that share the manifest's layers out, without some of them and with others."""
    count = rng.randint(1, 3)
    held: list[dict[int, LayerPages]] = [{} for _ in range(count)]
    for index in [layer.index for layer in manifest.layers] + [500, 501]:
        if rng.random() < 0.85:
            held[rng.randrange(count)][index] = pages(rng.choice([1, 2, MOST_HEADS]))
    return [PagedCache(layers, rng.randrange(2)) for layers in held]


def spans_by_definition(manifest: Manifest, chunk: int) -> list[LayerSpan]:
    """docs/wire-format.md, section 4, layer by layer, from the payload's first byte on."""
    offset = ordinal = 0
    for index in range(chunk + 1):
        found = []
        start = (manifest.first_token // manifest.chunk_tokens + index) * manifest.chunk_tokens
        for position, layer in enumerate(manifest.layers):
            group = manifest.groups[layer.group]
            first, end = max(group.first_token, start), min(group.end_token, start + manifest.chunk_tokens)
            if first >= end:
                continue
            blocks = -(-end // BLOCK_TOKENS) - first // BLOCK_TOKENS
            block_bytes = manifest.codecs[layer.codec].block_bytes(group.head_dim)
            span = LayerSpan(index, position, offset, group.head_count, blocks, block_bytes, first // BLOCK_TOKENS, ordinal, first, end)
            found.append(span)
            offset += span.nbytes
            ordinal += span.heads * span.blocks
    return found


def shares_by_definition(
    manifest: Manifest, spans: list[LayerSpan], caches: list[PagedCache]
) -> list[tuple[int, SpanShare, tuple[int, int]]]:
    """(holder, share, bytes of the payload) of each layer that a cache holds, in the payload's order."""
    offset, found = 0, []
    for span in spans:
        layer = manifest.layers[span.layer]
        group = manifest.groups[layer.group]
        for holder, cache in enumerate(caches):
            if layer.index not in cache.layers:
                continue
            heads = cache.layers[layer.index].key.shape[2]
            first = max(cache.first_head, group.head_first)
            end = min(cache.first_head + heads, group.head_first + group.head_count)
            if first < end:
                share = SpanShare(
                    span, manifest.codecs[layer.codec], layer.index, group.head_dim, first - group.head_first, end - first, first, offset,
                    layer.key_scale, layer.value_scale,
                )  # fmt: skip
                found.append((holder, share, span.head_range(first - group.head_first, end - first)))
                offset += share.nbytes
    return found


@pytest.mark.parametrize("seed", range(150))
def test_columns_are_their_layers(seed):
    rng = random.Random(seed)
    manifest = random_manifest(rng)
    manifest.check()
    caches, payload = random_caches(rng, manifest), PayloadMap(manifest)
    for index in range(payload.chunk_count):
        chunk = payload.chunk(index)
        spans = spans_by_definition(manifest, index)
        assert list(chunk.spans) == spans
        assert (chunk.nbytes, chunk.blocks) == (sum(s.nbytes for s in spans), sum(s.heads * s.blocks for s in spans))
        wanted, share = shares_by_definition(manifest, spans, caches), chunk_share(manifest, chunk, caches)
        assert list(share.shares) == [one for _, one, _ in wanted]
        assert len(share.shares) == len(wanted)
        assert all(type(value) is int for one in share.shares for value in (*one.span, one.offset, one.model_layer))
        assert share.nbytes == sum(one.nbytes for _, one, _ in wanted)
        # Every byte once, from where it lies to where its share is, and no two ranges that could have been one.
        moved = [(remote + i, local + i) for remote, local, size in share.ranges for i in range(0, size, 8)]
        assert moved == [(remote + i, one.offset + i) for _, one, (remote, size) in wanted for i in range(0, size, 8)]
        assert all(a[0] + a[2] != b[0] for a, b in zip(share.ranges, share.ranges[1:], strict=False))
        first, end = sorted(rng.sample(range(260), 2))
        called = [(holder, one, rows) for holder, shares, rows in batches(manifest, share, first, end) for one in shares]
        asked = {}
        for holder, one, _ in wanted:
            low, high = written_range(manifest.groups[manifest.layers[one.span.layer].group], first, end)
            if max(low, one.span.first_token) < min(high, one.span.end_token):
                asked[one.span.layer] = holder, one, (low, high)
        assert {one.span.layer: (holder, one) for holder, one, _ in called} == {layer: row[:2] for layer, row in asked.items()}
        for _, one, (low, high) in called:
            mine = asked[one.span.layer][2]
            assert low <= mine[0]
            assert mine[1] <= high
            assert (max(low, one.span.first_token), min(high, one.span.end_token)) == (
                max(mine[0], one.span.first_token), min(mine[1], one.span.end_token),
            )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_what_a_cache_lacks_is_named(seed):
    rng = random.Random(seed)
    manifest = random_manifest(rng)
    groups = [CacheGroup(cache, None) for cache in random_caches(rng, manifest)]  # type: ignore[arg-type]

    def whole(layer: Layer) -> bool:
        group = manifest.groups[layer.group]
        return any(
            layer.index in one.cache.layers
            and one.cache.first_head <= group.head_first
            and group.head_first + group.head_count <= one.cache.first_head + one.cache.layers[layer.index].key.shape[2]
            for one in groups
        )

    lacking = [layer.index for layer in manifest.layers if not whole(layer)]
    if not lacking:
        check_held(manifest, groups)
        return
    with pytest.raises(PagesDoNotFit, match=f"layer {lacking[0]} for one"):
        check_held(manifest, groups)


def test_what_was_found_out_is_remembered_for_the_same_objects_only():
    manifest = random_manifest(random.Random(1))
    cache = PagedCache({layer.index: pages(4) for layer in manifest.layers})
    found = held_layers(manifest.layers, [cache])
    assert held_layers(manifest.layers, [cache]) is found
    other = PagedCache({manifest.layers[0].index: pages(4)})
    assert sum(len(held.model_layers) for held in held_layers(manifest.layers, [other])) == 1
    equal = tuple(list(manifest.layers))
    assert equal is not manifest.layers
    assert held_layers(equal, [cache]) is not found
    changing = list(manifest.layers)
    before = len(kinds_of(changing).kind_of)
    changing.pop()
    assert len(kinds_of(changing).kind_of) == before - 1, "a list that changed was taken for what it had been"


def test_what_an_engine_puts_into_a_cache_later_is_seen():
    manifest = random_manifest(random.Random(1))
    first, second, *_ = (layer.index for layer in manifest.layers)
    engines = {layer.index: pages(4) for layer in manifest.layers}
    cache = PagedCache(engines)

    def heads() -> dict[int, int]:
        return {index: held.end_head for held in held_layers(manifest.layers, [cache]) for index in held.model_layers}

    assert set(heads().values()) == {4}
    before = held_layers(manifest.layers, [cache])
    engines[first] = pages(2)
    assert heads()[first] == 2
    engines[first] = pages(4)
    assert held_layers(manifest.layers, [cache]) is not before, "the same number of heads, but other pages"
    engines[500] = engines.pop(second)
    assert second not in heads()


def test_pages_that_nothing_can_refer_to_weakly_are_looked_at_each_time():
    class Slotted:
        __slots__ = ("head_dim", "sides")

    layers = (Layer(0, 0, 0),)
    one = Slotted()
    one.sides, one.head_dim = pages(4).sides, HEAD_DIM
    cache = PagedCache({0: one})  # type: ignore[dict-item]
    for _ in range(2):
        (held,) = held_layers(layers, [cache])
        assert (held.first_head, held.end_head) == (0, 4)


def test_caches_are_not_kept_alive():
    manifest = random_manifest(random.Random(2))
    cache = PagedCache({layer.index: pages(4) for layer in manifest.layers})
    key = weakref.ref(cache.layers[manifest.layers[0].index].key)
    held_layers(manifest.layers, [cache])
    del cache
    gc.collect()
    assert key() is None


def test_a_table_is_found_right_for_the_codecs_and_groups_at_hand_only():
    layers = (Layer(0, 0, 0),)
    raw, turbo = (declared(name).for_layer(64, Element.BF16) for name in ("raw", "turboquant_4bit_nc"))

    def with_(codec, group) -> Manifest:
        return Manifest(bytes(32), ((ContentKind.TOKENS, bytes(32)),), "r", 1, 0, 16, (group,), (codec,), layers)

    with_(raw, Group(4, 48, 0, 16)).check()
    with_(turbo, Group(4, 64, 0, 16)).check()
    for _ in range(2):
        with pytest.raises(errors.BadHeadDim):
            with_(turbo, Group(4, 48, 0, 16)).check()
        with pytest.raises(errors.BadCoding):
            with_(raw, Group(1, 64, 0, 16, 0, 1, GroupKind.LATENT)).check()


def test_plain_numbers_for_names_spoil_no_answer_that_is_remembered():
    """3 == CodingKind.CODEBOOK, and both have one hash: what a program gets wrong must not be what others are told."""
    digest = bytes(range(32))
    for odd in (
        Coding(3, 4, digest=digest),  # type: ignore[arg-type]
        Coding(CodingKind.INT8, 8, rotation=0),  # type: ignore[arg-type]
        Coding(CodingKind.RAW, 16, 1),  # type: ignore[arg-type]
        Coding(CodingKind.OPAQUE, row_bytes=4, digest=bytearray(digest)),  # type: ignore[arg-type]
    ):
        with pytest.raises(errors.BadCoding, match="another type"):
            odd.check()
    Coding(CodingKind.INT8, 8).check()
    with pytest.raises(errors.BadCoding, match="rotation NONE"):
        Coding(CodingKind.CODEBOOK, 4, digest=digest).check()
    manifest = random_manifest(random.Random(1))
    manifest.check()
    group = replace(manifest.groups[0], kind=1)  # type: ignore[arg-type]
    with pytest.raises(errors.BadGroup, match="no GroupKind"):
        replace(manifest, groups=(group, *manifest.groups[1:])).check()


def test_the_oldest_tables_are_forgotten():
    calls = []
    of = OfLayers(lambda layers: calls.append(layers))
    tables = [(Layer(index, 0, 0),) for index in range(70)]
    for table in tables:
        of(table)
    of(tables[69])
    assert len(calls) == 70
    of(tables[0])
    assert len(calls) == 71
    assert len(of._found) == 64
