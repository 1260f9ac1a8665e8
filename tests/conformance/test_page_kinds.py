"""Pages of every kind to the wire and back: fp8 with scales, tiles, TurboQuant slots in both flavours, latents, opaque rows, states."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bridge.codecs import declared, reference
from bridge.pages import BlockTable, LayerPages, OpaquePages, PagedCache, PagesDoNotFit, SlotPages
from bridge.shares import chunk_share
from bridge.wire import (
    Coding,
    CodingKind,
    ContentKind,
    Element,
    Group,
    GroupKind,
    Layer,
    Manifest,
    PayloadMap,
    SlotCodec,
    TagKeys,
    new_key,
    token_digest,
)
from bridge.wire.coding import opaque
from tests.conformance.cases import place_of

PRESETS = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
PAGES, BLOCK, HEADS, DIM, FIRST, END = 6, 16, 2, 64, 5, 83
VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vllm_turboquant_slots.json").read_text())


def describe(codec, kind=GroupKind.FULL_ATTENTION, first=FIRST, end=END, scales=(1.0, 1.0), dim=DIM):
    return Manifest(
        model_digest=bytes(32),
        content=((ContentKind.TOKENS, token_digest([1])),),
        request_id="r",
        lease=1,
        generation=1,
        chunk_tokens=32,
        groups=(Group(HEADS, dim, first, end, kind=kind),),
        codecs=(codec,),
        layers=(Layer(0, 0, 0, *scales),),
    )


class Moved:
    """Pages described on host memory, with the same strides in a device's memory; `back` copies what is there now to the host."""

    def __init__(self, pages, place):
        self._held = {}
        self.pages = pages if place == "cpu" else self._pages(pages, place)

    def _tensor(self, tensor, place):
        if tensor is None:
            return None
        storage = tensor.untyped_storage()
        host = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))
        there = self._held.setdefault(storage.data_ptr(), (host, host.to(place)))[1]
        return there.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _pages(self, pages, place):
        if isinstance(pages, LayerPages):
            return replace(pages, key=self._tensor(pages.key, place), value=self._tensor(pages.value, place))
        if isinstance(pages, OpaquePages):
            return replace(pages, tensor=self._tensor(pages.tensor, place))
        sides = [replace(s, codes=self._tensor(s.codes, place), scalars=self._tensor(s.scalars, place)) for s in pages.sides]
        return SlotPages((sides[0], sides[1]), pages.head_dim)

    def back(self):
        for host, there in self._held.values():
            host.copy_(there)


def cross(device, manifest, source, target, tables):
    """Packs from source and lands in target; returns the payload."""
    moved = [Moved(pages, place_of(device)) for pages in (source, target)]
    source, target = (m.pages for m in moved)
    keys, payload = TagKeys(new_key(), 1, 1), []
    group = manifest.groups[0]
    layout = PayloadMap(manifest)
    for index in range(layout.chunk_count):
        share = chunk_share(manifest, layout.chunk(index), PagedCache({0: source}))
        data = np.full(share.nbytes, 0xCD, np.uint8)
        device.pack(PagedCache({0: source}), tables[0], share.shares, keys, data)
        device.land(PagedCache({0: target}), tables[1], share.shares, keys, data, group.first_token, group.end_token)
        payload.append(data)
    moved[1].back()
    return payload


def table(pages, block, seed):
    return BlockTable(np.random.default_rng(seed).permutation(pages).tolist(), block)


def rows(tensor, block_table, first=FIRST, end=END):
    page, position = block_table.locate(first, end, tensor.shape[0])
    return tensor[page, position]


def random_slots(codec, shape, seed=0, dim=DIM):
    """Slots that the reference encoded from random vectors: uint8 [*shape, slot bytes]."""
    x = np.random.default_rng(seed).standard_normal((*shape, dim)).astype(np.float32)
    layer = codec.for_layer(dim, Element.FP32)
    parts = [part for side in (layer.key, layer.value) for part in reference.encode(x, side)]
    return torch.from_numpy(np.concatenate(parts, axis=-1))


@pytest.mark.parametrize("preset", PRESETS)
def test_slots_cross_byte_for_byte(device, preset):
    codec = declared(preset)
    slots = random_slots(codec, (PAGES, BLOCK, HEADS))
    target = torch.full((4, 32, HEADS, slots.shape[3]), 0xCD, dtype=torch.uint8)
    tables = table(PAGES, BLOCK, 1), table(4, 32, 2)
    pages = [SlotPages.rows(tensor, codec, DIM) for tensor in (slots, target)]
    cross(device, describe(codec.for_layer(DIM, Element.BF16)), *pages, tables)
    assert torch.equal(rows(slots, tables[0]), rows(target, tables[1]))
    written = torch.zeros(4, 32, dtype=torch.bool)
    page, position = tables[1].locate(FIRST, END, 4)
    written[page, position] = True
    assert (target[~written] == 0xCD).all()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_slots_that_vllm_wrote_decode_like_their_source(device, preset, dim):
    codec, case = declared(preset), VECTORS[f"D{dim}"]
    written = [bytes.fromhex(case["slots"][preset][f"token{token}_hex"]) for token in (0, 1)]
    slots = torch.tensor([list(slot) for slot in written], dtype=torch.uint8).reshape(1, 2, 1, -1)
    slots = slots.repeat(1, 8, HEADS, 1)
    out = [torch.full((1, 16, HEADS, dim), float("nan"), dtype=torch.float32) for _ in range(2)]
    one = BlockTable([0], 16)
    manifest = describe(codec.for_layer(dim, Element.BF16), first=0, end=16, dim=dim)
    cross(device, manifest, SlotPages.rows(slots, codec, dim), LayerPages.nhd(*out), (one, one))
    for name, tensor, limit in (("key_bf16le_hex", out[0], 0.05), ("value_bf16le_hex", out[1], 0.07)):
        raw = np.frombuffer(bytes.fromhex(case[name]), np.uint8).reshape(-1, 2 * dim)
        plain = torch.from_numpy(reference.to_float(raw, Element.BF16).copy())[:2]
        error = ((tensor[0, :2, 0] - plain) ** 2).sum() / (plain**2).sum()
        assert error < limit


@pytest.mark.parametrize("preset", PRESETS)
def test_regions_and_rows_become_each_other(device, preset):
    """AoS -> SoA -> AoS: codes and value scalars are the same bytes, norms within one unit of fp16."""
    codec = declared(preset)
    layer = codec.for_layer(DIM, Element.BF16)
    slots = random_slots(codec, (PAGES, BLOCK, HEADS))
    regions = torch.full((PAGES, BLOCK * HEADS * layer.slot_bytes(DIM)), 0xCD, dtype=torch.uint8)
    back = torch.full_like(slots, 0xCD)
    tables = table(PAGES, BLOCK, 1), table(PAGES, BLOCK, 2), table(PAGES, BLOCK, 3)
    soa = SlotPages.regions(regions, codec, DIM, BLOCK, HEADS)
    manifest = describe(layer)
    cross(device, manifest, SlotPages.rows(slots, codec, DIM), soa, tables[:2])
    cross(device, manifest, soa, SlotPages.rows(back, codec, DIM), tables[1:])
    before, after = rows(slots, tables[0]), rows(back, tables[2])
    codes, norm = layer.key.code_bytes(DIM), layer.key.scalar_bytes()
    assert torch.equal(before[..., :codes], after[..., :codes])
    assert torch.equal(before[..., codes + norm :], after[..., codes + norm :])
    if norm:
        units = [t[..., codes : codes + 2].contiguous().view(torch.int16).int() for t in (before, after)]
        assert (units[0] - units[1]).abs().max() <= 1
        # What stands in the regions is the folded norm, not the raw one.
        stored = regions[:, BLOCK * HEADS * (layer.slot_bytes(DIM) - norm - 4) :].contiguous()
        assert not torch.equal(stored.flatten()[: norm * 8], before[..., codes : codes + norm].flatten()[: norm * 8])


def test_a_page_of_regions_is_laid_out_as_vllm_does(device):
    codec = declared("turboquant_4bit_nc")
    slots = random_slots(codec, (1, BLOCK, HEADS))
    regions = torch.full((1, BLOCK * HEADS * slots.shape[3]), 0xCD, dtype=torch.uint8)
    one = BlockTable([0], BLOCK)
    manifest = describe(codec.for_layer(DIM, Element.BF16), first=0, end=16)
    cross(device, manifest, SlotPages.rows(slots, codec, DIM), SlotPages.regions(regions, codec, DIM, BLOCK, HEADS), (one, one))
    data = regions[0, : BLOCK * HEADS * 64].reshape(BLOCK, HEADS, 64)
    assert torch.equal(data[..., :32], slots[0, ..., :32])
    assert torch.equal(data[..., 32:], slots[0, ..., 34:66])
    meta = regions[0, BLOCK * HEADS * 64 :].view(torch.float16).reshape(HEADS, 3, BLOCK)
    assert torch.equal(meta[:, 1].T, slots[0, ..., 66:68].contiguous().view(torch.float16)[..., 0])
    assert torch.equal(meta[:, 2].T, slots[0, ..., 68:70].contiguous().view(torch.float16)[..., 0])


def test_slots_of_one_preset_land_in_slots_of_another(device):
    source, target = declared("turboquant_k8v4"), declared("turboquant_3bit_nc")
    slots = random_slots(source, (PAGES, BLOCK, HEADS))
    layer = target.for_layer(DIM, Element.BF16)
    out = torch.full((PAGES, BLOCK, HEADS, layer.slot_bytes(DIM)), 0xCD, dtype=torch.uint8)
    same = table(PAGES, BLOCK, 1)
    cross(device, describe(layer), SlotPages.rows(slots, source, DIM), SlotPages.rows(out, target, DIM), (same, same))
    before = source.for_layer(DIM, Element.BF16)
    plain = reference.decode(rows(slots, same)[..., :64].numpy(), np.zeros((END - FIRST, HEADS, 0), np.uint8), before.key, DIM)
    codes, scalars = reference.encode(plain, layer.key)
    got = rows(out, same).numpy()
    assert np.array_equal(got[..., : codes.shape[-1]], codes)
    assert np.array_equal(got[..., codes.shape[-1] : codes.shape[-1] + 2], scalars)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 2.0)])
def test_fp8_pages_cross_byte_for_byte_with_their_scales(device, scales):
    codec = declared("raw").for_layer(DIM, Element.E4M3FN)
    assert codec == declared("fp8_e4m3").for_layer(DIM, Element.E4M3FN)
    source = [torch.randn(PAGES, BLOCK, HEADS, DIM).to(torch.float8_e4m3fn) for _ in range(2)]
    target = [torch.full((4, HEADS, 32, DIM), 2.0).to(torch.float8_e4m3fn) for _ in range(2)]
    tables = table(PAGES, BLOCK, 1), table(4, 32, 2)
    pages = LayerPages.nhd(*source, *scales), LayerPages.hnd(*target, *scales)
    cross(device, describe(codec, scales=scales), *pages, tables)
    for a, b in zip(source, target, strict=True):
        assert torch.equal(rows(a.view(torch.uint8), tables[0]), rows(b.view(torch.uint8).transpose(1, 2), tables[1]))


def test_fp8_pages_of_other_scales_are_requantised(device):
    codec = declared("fp8_e4m3").for_layer(DIM, Element.BF16)
    source = [torch.randn(PAGES, BLOCK, HEADS, DIM).to(torch.bfloat16) for _ in range(2)]
    target = [torch.zeros(PAGES, BLOCK, HEADS, DIM).to(torch.float8_e4m3fn) for _ in range(2)]
    same = table(PAGES, BLOCK, 1)
    cross(device, describe(codec, scales=(0.5, 0.5)), LayerPages.nhd(*source), LayerPages.nhd(*target, 0.125, 0.125), (same, same))
    for a, b in zip(source, target, strict=True):
        x = rows(a, same).float().numpy()
        wire, none = reference.encode(x, codec.key, 0.5)
        expected, _ = reference.encode(reference.decode(wire, none, codec.key, DIM, 0.5), codec.key, 0.125)
        assert np.array_equal(rows(b.view(torch.uint8), same).numpy(), expected)


def amx_tiles(block):
    """vLLM's CPU attention with AMX, bf16: K [tok/16][dim/2][tok%16][dim%2], V [dim/16][tok/2][dim%16][tok%2], a page and head."""
    memory = torch.full((PAGES, HEADS, 2, block * DIM), float("nan"), dtype=torch.bfloat16)
    key = memory[:, :, 0].unflatten(2, (block // 16, DIM // 2, 16, 2)).permute(0, 2, 4, 1, 3, 5)
    value = memory[:, :, 1].unflatten(2, (DIM // 16, block // 2, 16, 2)).permute(0, 3, 5, 1, 2, 4)
    return memory, LayerPages(key, value)


def test_tiles(device):
    block = 32
    source = [torch.randn(PAGES, BLOCK, HEADS, DIM).to(torch.bfloat16) for _ in range(2)]
    memory, tiles = amx_tiles(block)
    assert (tiles.block_size, tiles.heads, tiles.head_dim) == (block, HEADS, DIM)
    back = [torch.full((PAGES, BLOCK, HEADS, DIM), float("nan"), dtype=torch.bfloat16) for _ in range(2)]
    tables = table(PAGES, BLOCK, 1), table(PAGES, block, 2), table(PAGES, BLOCK, 3)
    manifest = describe(declared("raw").for_layer(DIM, Element.BF16))
    cross(device, manifest, LayerPages.nhd(*source), tiles, tables[:2])
    cross(device, manifest, tiles, LayerPages.nhd(*back), tables[1:])
    for a, b in zip(source, back, strict=True):
        assert torch.equal(rows(a, tables[0]), rows(b, tables[2]))
    page, position = tables[1].locate(FIRST, END, PAGES)
    token, head, dim = 40, 1, 37
    at = page[token - FIRST], position[token - FIRST]
    flat = memory[at[0], head]
    expected = rows(source[0], tables[0])[token - FIRST, head, dim], rows(source[1], tables[0])[token - FIRST, head, dim]
    assert flat[0, ((at[1] // 16) * (DIM // 2) + dim // 2) * 32 + (at[1] % 16) * 2 + dim % 2] == expected[0]
    assert flat[1, ((dim // 16) * (block // 2) + at[1] // 2) * 32 + (dim % 16) * 2 + at[1] % 2] == expected[1]


def test_latents(device):
    codec = SlotCodec(Coding(CodingKind.RAW, 16, Element.BF16), Coding(CodingKind.NONE))
    source = torch.randn(PAGES, BLOCK, HEADS, 576).to(torch.bfloat16)
    target = torch.full((3, 32, HEADS, 576), float("nan"), dtype=torch.bfloat16)
    tables = table(PAGES, BLOCK, 1), table(3, 32, 2)
    manifest = describe(codec, GroupKind.LATENT, dim=576)
    cross(device, manifest, LayerPages(source, None), LayerPages(target, None), tables)
    assert torch.equal(rows(source, tables[0]), rows(target, tables[1]))


def test_opaque_rows_and_states(device):
    meaning = "test/state"
    codec = SlotCodec(opaque(meaning, 24), Coding(CodingKind.NONE))
    source = torch.randint(0, 256, (4, HEADS, 16 * 24), dtype=torch.uint8)
    target = torch.full((3, HEADS, 16 * 24), 0xCD, dtype=torch.uint8)
    pages = [OpaquePages(t.unflatten(2, (16, 24)).transpose(1, 2), meaning) for t in (source, target)]
    # The payload's last token is 40, so the state's block covers tokens 32 to 47; page 2 of the table is the request's state.
    manifest = describe(codec, GroupKind.STATE, first=32, end=48, dim=16)
    cross(device, manifest, *pages, (BlockTable([0, 0, 3], 16), BlockTable([0, 0, 1], 16)))
    assert torch.equal(source[3], target[1])
    assert (target[[0, 2]] == 0xCD).all()


def test_what_cannot_become_the_other_is_refused(device):
    same = table(PAGES, BLOCK, 1)
    opaque_pages = OpaquePages(torch.zeros(PAGES, BLOCK, HEADS, 24, dtype=torch.uint8), "a", DIM)
    floats = LayerPages.nhd(*(torch.zeros(PAGES, BLOCK, HEADS, DIM) for _ in range(2)))
    raw = declared("raw").for_layer(DIM, Element.FP32)
    other = SlotCodec(opaque("b", 24), Coding(CodingKind.NONE))
    for manifest, source, target in (
        (describe(raw), opaque_pages, floats),
        (describe(other), opaque_pages, opaque_pages),
        (describe(raw), floats, opaque_pages),
    ):
        with pytest.raises(PagesDoNotFit):
            cross(device, manifest, source, target, (same, same))


@pytest.mark.parametrize("key", ["raw", "fp8_e4m3", "int8_per_token_head", "turboquant_4bit_nc", "turboquant_3bit_nc"])
@pytest.mark.parametrize("value", ["raw", "fp8_e4m3", "int8_per_token_head", "turboquant_4bit_nc", "turboquant_3bit_nc"])
def test_any_key_side_with_any_value_side(device, key, value):
    """K and V of different widths are a codec like any other."""
    codec = SlotCodec(declared(key).for_layer(DIM, Element.BF16).key, declared(value).for_layer(DIM, Element.BF16).value)
    source = [torch.randn(PAGES, BLOCK, HEADS, DIM).to(torch.bfloat16) for _ in range(2)]
    target = [torch.full((PAGES, BLOCK, HEADS, DIM), float("nan"), dtype=torch.bfloat16) for _ in range(2)]
    same = table(PAGES, BLOCK, 1)
    cross(device, describe(codec), LayerPages.nhd(*source), LayerPages.nhd(*target), (same, same))
    for a, b, side in zip(source, target, (codec.key, codec.value), strict=True):
        vectors = rows(a, same).float().numpy()
        codes, scalars = reference.encode(vectors, side)
        expected = reference.from_float(reference.decode(codes, scalars, side, DIM), Element.BF16)
        got = rows(b, same).view(torch.int16).numpy().view(np.uint8)
        assert np.array_equal(got, expected) or not getattr(device, "exact", False)
        assert ((rows(a, same).float() - rows(b, same).float()) ** 2).mean() < 0.06
