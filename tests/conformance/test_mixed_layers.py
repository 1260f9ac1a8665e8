"""Layers of unlike groups, codecs, scales and heads that take turns: columns whose shares lie between one another in every buffer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bridge.codecs import declared
from bridge.devices import Device
from bridge.pages import PagedCache
from bridge.wire import Element, Group, GroupKind, Layer, Manifest
from tests.conformance.cases import (
    POISON,
    Case,
    Memory,
    chunks,
    compare_memory,
    compare_payload,
    guards_hold,
    place_of,
    reference_land,
    reference_pack,
    source,
    staged,
    target,
)

CASE = Case(first=0, end=60, heads=2, layers=tuple(range(9)), chunk_tokens=48)
NAMES = ("raw", "turboquant_4bit_nc", "fp8_e4m3", "int8_per_token_head")
WINDOW_FIRST = 37


def mixed() -> Manifest:
    """Full layers and windows take turns; four codecs; fp8 with three scales."""
    window = Group(2, CASE.head_dim, WINDOW_FIRST, CASE.end, kind=GroupKind.SLIDING_WINDOW, window=CASE.end - WINDOW_FIRST)
    codecs = tuple(declared(name).for_layer(CASE.head_dim, Element.BF16) for name in NAMES)
    scales = {2: (0.5, 1.0), 4: (2.0, 0.25)}
    of = (0, 1, 2, 1, 2, 0, 1, 2, 3)
    layers = tuple(Layer(index, index % 2, codec, *scales.get(index, (1.0, 1.0))) for index, codec in enumerate(of))
    groups = (Group(2, CASE.head_dim, 0, CASE.end), window)
    return replace(Case(first=0, end=60).manifest(), groups=groups, codecs=codecs, layers=layers, chunk_tokens=48)


def narrowed(memory: Memory) -> Memory:
    """Two of the layers are here with their second head only, and one is not here at all."""
    layers = {index: pages for index, pages in memory.cache.layers.items() if index in (2, 5)}
    one_head = {index: pages.narrow(1, 1) for index, pages in layers.items()}
    return replace(memory, cache=PagedCache(one_head, 1))


@pytest.mark.parametrize("part", ["whole", "narrowed"])
def test_shares_between_one_another(device: Device, part: str) -> None:
    manifest, keys, place = mixed(), CASE.keys(), place_of(device)
    manifest.check()
    cut = narrowed if part == "narrowed" else lambda memory: memory
    oracle, mine, landed, expected = (cut(memory) for memory in (source(CASE), source(CASE, place), target(CASE, place), target(CASE)))
    for share in chunks(manifest, mine.cache):
        good = reference_pack(oracle, share, keys)
        assert not (good == POISON).all()
        whole, out = staged(device, share.nbytes)
        device.pack(mine.cache, mine.table, share.shares, keys, out)
        assert guards_hold(whole, share.nbytes)
        compare_payload(device, share, keys, out, good)
        _, singly = staged(device, share.nbytes)
        device.pack(mine.cache, mine.table, list(share.shares), keys, singly)
        np.testing.assert_array_equal(out, singly)
        out[:] = good
        device.land(landed.cache, landed.table, share.shares, keys, out, 3, CASE.end)
        reference_land(expected, share, keys, good, 3, CASE.end)
    compare_memory(device, landed, expected)


def test_in_the_devices_own_memory(accelerator: Device) -> None:
    manifest, keys, place = mixed(), CASE.keys(), place_of(accelerator)
    oracle, mine, landed, expected = source(CASE), source(CASE, place), target(CASE, place), target(CASE)
    for share in chunks(manifest, mine.cache):
        good = reference_pack(oracle, share, keys)
        out = torch.full((share.nbytes,), POISON, dtype=torch.uint8, device=place)
        accelerator.pack(mine.cache, mine.table, share.shares, keys, out)
        compare_payload(accelerator, share, keys, out.cpu().numpy(), good)
        out.copy_(torch.from_numpy(good))
        accelerator.land(landed.cache, landed.table, share.shares, keys, out, 3, CASE.end)
        reference_land(expected, share, keys, good, 3, CASE.end)
    compare_memory(accelerator, landed, expected)
