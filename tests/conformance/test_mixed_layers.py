"""Layers of unlike groups, codecs, scales and heads that take turns: columns whose shares lie between one another in every buffer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from backends.accelerator import known
from backends.accelerator.routes import route
from bridge.codecs import declared
from bridge.devices import Device
from bridge.pages import PagedCache, PagesDoNotFit
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


def test_pages_that_an_engine_replaced_are_those_that_are_written(device: Device) -> None:
    case, place = replace(CASE, layers=(0, 1, 2), end=20), place_of(device)
    manifest, keys = case.manifest(), case.keys()
    held, landed, expected = source(case), target(case, place), target(case)
    (share,) = chunks(manifest, held.cache)
    good = reference_pack(held, share, keys)
    (before,) = chunks(manifest, landed.cache)
    device.land(landed.cache, landed.table, before.shares, keys, good, 0, case.end)
    other = target(case, place)
    landed.cache.layers[1] = other.cache.layers[1]  # type: ignore[index]
    (again,) = chunks(manifest, landed.cache)
    device.land(landed.cache, landed.table, again.shares, keys, good, 0, case.end)
    reference_land(expected, share, keys, good, 0, case.end)
    compare_memory(device, replace(other, backing=other.backing[2:4]), replace(expected, backing=expected.backing[2:4]))


def test_blocks_of_another_size_are_refused_of_every_share(accelerator: Device) -> None:
    case, place = replace(CASE, layers=(0, 1), end=20), place_of(accelerator)
    mine = source(case, place)
    (share,) = chunks(case.manifest(), mine.cache)
    first, second = share.shares
    odd = second._replace(span=second.span._replace(block_bytes=second.span.block_bytes - 16))
    _, out = staged(accelerator, share.nbytes)
    with pytest.raises(PagesDoNotFit, match="codec and head dimension"):
        accelerator.pack(mine.cache, mine.table, [first, odd], case.keys(), out)
    assert (out == POISON).all()


def test_caches_that_are_made_for_each_request_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_REMEMBERED_COLUMNS", 8)
    looked_up = []
    monkeypatch.setattr(known, "route", lambda *arguments: looked_up.append(arguments) or route(*arguments))
    routes, memory = known.Routes(torch.device("cpu")), source(CASE)
    for _ in range(20):
        cache = memory.cache.part(CASE.layers, 0, CASE.heads)
        for column in chunks(CASE.manifest(), cache)[0].columns:
            for _ in range(2):
                (alike,) = routes.of_column(cache, column, landing=True)
            assert len(alike.known) == len(CASE.layers)
    assert 0 < len(routes._columns) <= 8
    assert len(looked_up) == len(CASE.layers), "what was known of the pages was forgotten with the caches"
