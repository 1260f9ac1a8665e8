"""A block that is not the one that was packed is refused by its tag: by verify_tags, and by landing on every registered CPU device.

For damage: one flipped bit anywhere. For replacement: a block of another layer, kv head, token, request, generation or lease; blocks or
tags exchanged; a block moved with its tag; another valid range. Nothing is written into the pages in any of these cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from bridge.codecs import CODECS, declared
from bridge.devices import Device, device_names, open_device
from bridge.pages import BlockTable, LayerPages, PagedCache
from bridge.shares import chunk_share
from bridge.wire import ContentKind, Element, Group, Layer, LayerSpan, Manifest, PayloadMap, TagKeys, verify_tags
from bridge.wire.errors import BadTag, DirtyPadding, WireError
from tests.attacks import build

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
HEADS, FIRST, END, PAGE = 2, 3, 40, 16
DEVICES = [name for name in device_names() if name.startswith("cpu")]


@dataclass
class Packed:
    """A payload of one chunk, two layers, two kv heads and three blocks a run, whose first and last block are part full."""

    manifest: Manifest
    data: np.ndarray
    keys: TagKeys
    spans: tuple[LayerSpan, ...]

    def block(self, layer: int, head: int, block: int) -> slice:
        span = self.spans[layer]
        start = span.offset + head * span.run_bytes + block * span.block_bytes
        return slice(start, start + span.block_bytes)

    def tag(self, layer: int, head: int, block: int) -> slice:
        span = self.spans[layer]
        start = span.offset + head * span.run_bytes + span.blocks * span.block_bytes + 8 * block
        return slice(start, start + 8)

    def run(self, layer: int, head: int) -> slice:
        span = self.spans[layer]
        start = span.offset + head * span.run_bytes
        return slice(start, start + span.run_bytes)


def _cache(head_dim: int, seed: int | None, heads: int = HEADS, layers: int = 2) -> PagedCache:
    generator = torch.Generator().manual_seed(seed or 0)

    def pages() -> torch.Tensor:
        shape = (4, PAGE, heads, head_dim)
        return (torch.full(shape, float("nan")) if seed is None else torch.randn(shape, generator=generator)).to(torch.bfloat16)

    return PagedCache({index: LayerPages.nhd(pages(), pages()) for index in range(layers)})


TABLE = BlockTable([2, 0, 3, 1], PAGE)


def packed(
    codec: str,
    head_dim: int,
    *,
    key: bytes = KEY,
    lease: int = 5,
    generation: int = 2,
    seed: int = 1,
    end: int = END,
    heads: int = HEADS,
    layers: int = 2,
) -> Packed:
    group = Group(heads, head_dim, FIRST, end)
    content = ((ContentKind.TOKENS, bytes(32)),)
    codecs = (declared(codec).for_layer(head_dim, Element.BF16),)
    described = tuple(Layer(index, 0, 0) for index in range(layers))
    manifest = Manifest(bytes(32), content, "r", lease, generation, 48, (group,), codecs, described)
    layout, keys = PayloadMap(manifest), TagKeys(key, lease, generation)
    cache, data = _cache(head_dim, seed, heads, layers), np.full(layout.payload_bytes, 0xCD, np.uint8)
    shares = chunk_share(manifest, layout.chunk(0), cache).shares
    open_device("cpu-reference").pack(cache, TABLE, shares, keys, data)
    return Packed(manifest, data, keys, layout.chunk(0).spans)


def head_dim_of(codec: str) -> int:
    return 64 if declared(codec).key.kind.name == "CODEBOOK" else 16


@pytest.fixture(scope="module", params=list(CODECS))
def payload(request: pytest.FixtureRequest) -> Packed:
    return packed(request.param, head_dim_of(request.param))


def verify(payload: Packed) -> None:
    for span in payload.spans:
        verify_tags(payload.data[span.offset : span.offset + span.nbytes], span, payload.keys)


def untouched(cache: PagedCache) -> bool:
    return all(bool(torch.isnan(pages).all()) for layer in cache.layers.values() for pages in (layer.key, layer.value))


class Landing:
    """Lands one share (layer and kv head) of a payload into pages of NaN."""

    def __init__(self, device: str, payload: Packed) -> None:
        self.device: Device = open_device(device)
        self.cache = _cache(payload.manifest.groups[0].head_dim, None)
        shares = chunk_share(payload.manifest, PayloadMap(payload.manifest).chunk(0), self.cache).shares
        self.device.land(self.cache, TABLE, shares, payload.keys, payload.data, FIRST, END)
        assert not untouched(self.cache), "the whole payload lands, or nothing that follows means anything"
        for layer in self.cache.layers.values():
            layer.key.fill_(float("nan"))
            layer.value.fill_(float("nan"))
        self.payload, self.shares = payload, shares

    def refused(self, layer: int) -> WireError | None:
        """The refusal of this layer's share as it lies in the payload; fails if it was written in part."""
        try:
            self.device.land(self.cache, TABLE, self.shares[layer : layer + 1], self.payload.keys, self.payload.data, FIRST, END)
        except WireError as error:
            assert untouched(self.cache)
            return error
        return None


# One bit. -------------------------------------------------------------------------------------------------------------------------


def _padding(payload: Packed) -> np.ndarray:
    """bool [nbytes]: whether a byte is padding of a tag plane."""
    mask = np.zeros(payload.data.size, bool)
    for span in payload.spans:
        for head in range(span.heads):
            end = span.offset + (head + 1) * span.run_bytes
            mask[payload.tag(span.layer, head, span.blocks - 1).stop : end] = True
    return mask


@pytest.mark.parametrize("codec", CODECS)
def test_every_single_bit_is_refused_by_verify_tags(codec):
    """Every bit of a payload of one layer, one kv head and one block that is part full: blocks, tag and padding."""
    payload = packed(codec, head_dim_of(codec), end=14, heads=1, layers=1)
    verify(payload)
    padding, span, data = _padding(payload), payload.spans[0], payload.data
    assert padding.sum() == 8
    found = {BadTag: 0, DirtyPadding: 0}
    for bit in range(8 * data.size):
        data[bit // 8] ^= 1 << bit % 8
        refusal = None
        try:
            verify_tags(data, span, payload.keys)
        except (BadTag, DirtyPadding) as error:
            refusal = type(error)
        assert refusal is (DirtyPadding if padding[bit // 8] else BadTag), bit
        found[refusal] += 1
        data[bit // 8] ^= 1 << bit % 8
    assert found == {BadTag: 8 * (data.size - 8), DirtyPadding: 64}


@pytest.mark.parametrize("device", DEVICES)
def test_single_bits_are_refused_by_landing(payload, device):
    landing = Landing(device, payload)
    padding = _padding(payload)
    generator = np.random.default_rng(3)
    # Every plane's first and last byte, every tag and every padding byte, then a sample of all bits.
    edges = {0, payload.data.size - 1, *np.flatnonzero(padding).tolist()}
    for layer, span in enumerate(payload.spans):
        for head in range(span.heads):
            for block in range(span.blocks):
                where = payload.block(layer, head, block)
                edges |= {where.start, where.stop - 1, *range(payload.tag(layer, head, block).start, payload.tag(layer, head, block).stop)}
    bits = [8 * byte + int(generator.integers(8)) for byte in sorted(edges)] + generator.integers(8 * payload.data.size, size=150).tolist()
    for bit in bits:
        payload.data[bit // 8] ^= 1 << bit % 8
        layer = 0 if bit // 8 < payload.spans[1].offset else 1
        assert type(landing.refused(layer)) is (DirtyPadding if padding[bit // 8] else BadTag), bit
        payload.data[bit // 8] ^= 1 << bit % 8
    assert landing.refused(0) is None


# Replacements. --------------------------------------------------------------------------------------------------------------------

Change = Callable[[Packed, Packed], None]


def _copy(source: slice, target: slice) -> Change:
    def change(payload: Packed, other: Packed) -> None:
        payload.data[target] = other.data[source]

    return change


def _swap(payload: Packed, a: slice, b: slice) -> None:
    first = payload.data[a].copy()
    payload.data[a] = payload.data[b]
    payload.data[b] = first


def _replacements(payload: Packed) -> dict[str, Callable[[], None]]:
    """What is done to `payload.data`, by name. `block(l, h, b)`: layer, kv head, block."""
    block, tag, run, data = payload.block, payload.tag, payload.run, payload.data
    codec, dim = (
        next(n for n in CODECS if declared(n).for_layer(head_dim_of(n), Element.BF16) == payload.manifest.codecs[0]),
        payload.manifest.groups[0].head_dim,
    )

    def put(target: slice, source: slice, origin: np.ndarray | None = None) -> Callable[[], None]:
        origin = data.copy() if origin is None else origin
        return lambda: data.__setitem__(target, origin[source])

    def both(a: tuple[int, int, int], b: tuple[int, int, int], origin: np.ndarray | None = None) -> Callable[[], None]:
        """Block and tag of b in place of a's."""
        return lambda: (put(block(*a), block(*b), origin)(), put(tag(*a), tag(*b), origin)())  # type: ignore[func-returns-value]

    a = (0, 0, 1)
    places = {"layer": (1, 0, 1), "kv head": (0, 1, 1), "token": (0, 0, 2)}
    changes = {f"a block of another {name}": put(block(*a), block(*b)) for name, b in places.items()}
    changes |= {f"a block of another {name} with its tag": both(a, b) for name, b in places.items()}
    changes |= {f"a tag of another {name}": put(tag(*a), tag(*b)) for name, b in places.items()}
    # The same tokens packed for somebody else, or before: the blocks' bytes are the same, so only the tags can tell.
    others = {
        "another generation": packed(codec, dim, generation=1),
        "an older lease": packed(codec, dim, lease=4),
        "another request's key": packed(codec, dim, key=OTHER_KEY),
    }
    for name, other in others.items():
        assert np.array_equal(other.data[block(*a)], data[block(*a)])
        changes[f"block and tag of {name}"] = both(a, a, other.data)
        changes[f"a run of {name}"] = put(run(0, 0), run(0, 0), other.data)
        changes[f"everything of {name}"] = put(slice(0, data.size), slice(0, data.size), other.data)
    request = packed(codec, dim, seed=9)  # other tokens under the same key: what a faulty prefiller could send
    changes["a block of another request"] = put(block(*a), block(*a), request.data)
    changes["a tag of another request"] = put(tag(*a), tag(*a), request.data)
    changes["swapped blocks"] = lambda: _swap(payload, block(*a), block(0, 0, 0))
    changes["swapped tags"] = lambda: _swap(payload, tag(*a), tag(0, 0, 0))
    changes["swapped runs"] = lambda: _swap(payload, run(0, 0), run(0, 1))
    changes["swapped layers"] = lambda: (_swap(payload, run(0, 0), run(1, 0)), _swap(payload, run(0, 1), run(1, 1)))  # type: ignore[func-returns-value]
    changes["zeros"] = lambda: data.__setitem__(block(*a), 0)
    changes["zeros with a tag of zeros"] = lambda: (data.__setitem__(block(*a), 0), data.__setitem__(tag(*a), 0))  # type: ignore[func-returns-value]
    changes["poison never overwritten"] = lambda: data.__setitem__(run(0, 0), 0xCD)
    return changes


@pytest.mark.parametrize("device", DEVICES)
def test_replaced_blocks_are_refused(payload, device):
    landing = Landing(device, payload)
    before = payload.data.copy()
    changes = _replacements(payload)
    assert len(changes) >= 25
    for name, change in changes.items():
        try:
            change()
            assert not np.array_equal(payload.data, before), name
            with pytest.raises((BadTag, DirtyPadding)):
                verify(payload)
            assert landing.refused(0) is not None, name
        finally:
            payload.data[...] = before
    verify(payload)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("first", "end"), [(FIRST - 1, END), (FIRST + 1, END), (FIRST, END - 1), (FIRST, END + 1), (0, 48), (FIRST - 1, END + 1)]
)
def test_another_valid_range_is_refused(payload, device, first, end):
    """The same bytes, said to hold other tokens: as a manifest sealed anew would have it."""
    landing = Landing(device, payload)
    spans = payload.spans
    shares = landing.shares
    try:
        payload.spans = tuple(span._replace(first_token=first, end_token=end) for span in spans)
        landing.shares = tuple(share._replace(span=share.span._replace(first_token=first, end_token=end)) for share in shares)
        with pytest.raises(BadTag):
            verify(payload)
        assert type(landing.refused(0)) is BadTag
    finally:
        payload.spans = spans


def test_other_leases_generations_and_keys_give_other_tags(payload):
    """The reading side's own number counts: the payload is whole, but the decoder expects it under another name."""
    for keys in (TagKeys(KEY, 6, 2), TagKeys(KEY, 5, 3), TagKeys(OTHER_KEY, 5, 2), TagKeys(KEY, 5 << 32, 2), TagKeys(KEY, 2, 5)):
        for span in payload.spans:
            with pytest.raises(BadTag):
                verify_tags(payload.data[span.offset : span.offset + span.nbytes], span, keys)


def test_tags_equal_those_of_the_naive_reading(payload):
    """The attacks' own arithmetic, Python's integers, gives what the product's does: so tampering with both would be noticed."""
    for layer, span in enumerate(payload.spans):
        for head in range(span.heads):
            for block in range(span.blocks):
                ordinal = span.first_ordinal + head * span.blocks + block
                data = payload.data[payload.block(layer, head, block)].tobytes()
                expected = build.tag(data, *span.valid_range(block), ordinal, KEY, 5, 2)
                assert int.from_bytes(payload.data[payload.tag(layer, head, block)].tobytes(), "little") == expected


def test_both_cpu_devices_are_registered():
    assert DEVICES == ["cpu", "cpu-reference"]
