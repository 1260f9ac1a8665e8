"""What a device refuses, and that it has written nothing then."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bridge.codecs import CODECS
from bridge.devices import Device
from bridge.pages import BlockTable, PagesDoNotFit
from bridge.wire.errors import BadTag, DirtyPadding
from tests.conformance.cases import (
    POISON,
    Case,
    Memory,
    allocate,
    chunks,
    place_of,
    plane_places,
    reference_pack,
    source,
    staged,
    target,
)


def refused(device: Device, case: Case, landed: Memory, data: np.ndarray, keys, error: type[Exception]) -> None:
    (share,) = chunks(case.manifest(), landed.cache)
    _, buffer = staged(device, share.nbytes)
    buffer[...] = data
    with pytest.raises(error):
        device.land(landed.cache, landed.table, share.shares, keys, buffer, case.first, case.end)
    for tensor in landed.bytes():
        assert (tensor == POISON).all()


@pytest.mark.parametrize("name", ["raw", "fp8_e4m3", "turboquant_4bit_nc", "int8_per_token_head"])
@pytest.mark.parametrize("heads", [1, 4])
def test_a_flipped_bit_anywhere(device: Device, name: str, heads: int) -> None:
    """In every plane of first, middle and last block, in tags, in the range of rows that are not valid, and in the padding."""
    case = Case(name, first=5, end=40, layers=(1,), heads=heads)
    (share,) = chunks(case.manifest(), source(case).cache)
    good = reference_pack(source(case), share, case.keys())
    span, codec = share.shares[0].span, share.shares[0].codec
    assert span.blocks == 3
    tags = span.blocks * span.block_bytes
    places = [(f"{plane} of block {block}", block * span.block_bytes + at) for block in range(3) for plane, at in plane_places(codec, 64)]
    places += [("a row that is not valid", 0), ("the first tag", tags), ("the last tag", tags + 23)]
    for head in {0, heads - 1}:
        for bit, (what, place) in enumerate(places):
            data = good.copy()
            data[head * span.run_bytes + place] ^= 1 << bit % 8
            assert (data != good).sum() == 1, what
            refused(device, case, target(case, place_of(device)), data, case.keys(), BadTag)
        data = good.copy()
        data[head * span.run_bytes + tags + 24 + head] ^= 0x10
        refused(device, case, target(case, place_of(device)), data, case.keys(), DirtyPadding)


@pytest.mark.parametrize("name", ["raw", "turboquant_k8v4"])
def test_blocks_of_another_place_or_time(device: Device, name: str) -> None:
    case = Case(name, first=0, end=64, layers=(1,), heads=2)
    (share,) = chunks(case.manifest(), source(case).cache)
    good = reference_pack(source(case), share, case.keys())
    size, run = share.shares[0].span.block_bytes, share.shares[0].span.run_bytes
    swapped = good.copy()
    swapped[:size], swapped[size : 2 * size] = good[size : 2 * size], good[:size]
    swapped[4 * size : 4 * size + 8], swapped[4 * size + 8 : 4 * size + 16] = (
        good[4 * size + 8 : 4 * size + 16],
        good[4 * size : 4 * size + 8],
    )
    refused(device, case, target(case, place_of(device)), swapped, case.keys(), BadTag)
    other_head = np.concatenate([good[run : 2 * run], good[:run]])
    refused(device, case, target(case, place_of(device)), other_head, case.keys(), BadTag)
    refused(device, case, target(case, place_of(device)), good, case.keys(generation=3), BadTag)
    refused(device, case, target(case, place_of(device)), np.zeros_like(good), case.keys(), BadTag)


def test_another_valid_range(device: Device) -> None:
    """The same bytes, said to hold another number of tokens."""
    case = Case("raw", first=0, end=40, layers=(1,), heads=1)
    (share,) = chunks(case.manifest(), source(case).cache)
    good = reference_pack(source(case), share, case.keys())
    longer = replace(case, end=41)
    refused(device, longer, target(longer, place_of(device)), good, case.keys(), BadTag)


def test_a_bad_share_among_good_ones_is_not_written(device: Device) -> None:
    case = Case("turboquant_4bit_nc", first=0, end=64, layers=(0, 1, 2, 3))
    (share,) = chunks(case.manifest(), source(case).cache)
    data = reference_pack(source(case), share, case.keys())
    for bad in range(4):
        _, buffer = staged(device, share.nbytes)
        buffer[...] = data
        buffer[share.shares[bad].offset + 17] ^= 1
        landed = target(case, place_of(device))
        with pytest.raises(BadTag):
            device.land(landed.cache, landed.table, share.shares, case.keys(), buffer, 0, 64)
        for tensor in landed.bytes()[2 * bad : 2 * bad + 2]:
            assert (tensor == POISON).all()


@pytest.mark.parametrize("what", ["beyond", "negative", "short", "other block size", "smaller block size"])
@pytest.mark.parametrize("name", ["raw", "turboquant_4bit_nc"])
def test_block_tables_that_do_not_fit(device: Device, name: str, what: str) -> None:
    case = Case(name, first=0, end=64, layers=(1,), target_block_size=16)
    mine, landed = source(case, place_of(device)), target(case, place_of(device))
    (share,) = chunks(case.manifest(), mine.cache)
    good = reference_pack(source(case), share, case.keys())

    def spoiled(memory: Memory) -> BlockTable:
        pages = list(memory.table.pages[:4])
        size = memory.table.block_size
        return {
            "beyond": BlockTable([*pages[:3], 7], size),
            "negative": BlockTable([*pages[:3], -1], size),
            "short": BlockTable(pages[:3], size),
            "other block size": BlockTable(pages, 2 * size),
            "smaller block size": BlockTable(pages * 2, size // 2),
        }[what]

    whole, buffer = staged(device, share.nbytes)
    with pytest.raises(PagesDoNotFit):
        device.pack(mine.cache, spoiled(mine), share.shares, case.keys(), buffer)
    assert (whole == POISON).all()
    buffer[...] = good
    with pytest.raises(PagesDoNotFit):
        device.land(landed.cache, spoiled(landed), share.shares, case.keys(), buffer, 0, 64)
    for tensor in landed.bytes():
        assert (tensor == POISON).all()


@pytest.mark.parametrize("what", ["fewer heads", "other heads", "other head dim"])
def test_pages_that_do_not_hold_the_share(device: Device, what: str) -> None:
    case = Case("fp8_e4m3", first=0, end=64, layers=(1,), heads=4)
    (share,) = chunks(case.manifest(), source(case).cache)
    good = reference_pack(source(case), share, case.keys())
    other = {"fewer heads": {"heads": 3}, "other heads": {"first_head": 1}, "other head dim": {}}[what]
    odd = replace(case, head_dim=80) if what == "other head dim" else case
    memory = allocate(odd, "nhd", 16, 5, place_of(device), **other)
    whole, buffer = staged(device, share.nbytes)
    with pytest.raises(PagesDoNotFit):
        device.pack(memory.cache, memory.table, share.shares, case.keys(), buffer)
    assert (whole == POISON).all()
    buffer[...] = good
    with pytest.raises(PagesDoNotFit):
        device.land(memory.cache, memory.table, share.shares, case.keys(), buffer, 0, 64)
    for tensor in memory.bytes():
        assert (tensor == POISON).all()


def test_every_codec_has_a_conformance_bound() -> None:
    """A codec that is declared anew has to be named in the suite's table of errors."""
    from tests.conformance import test_roundtrip

    names = test_roundtrip.test_error_of_a_round_trip_is_the_codecs.pytestmark[0].args[1]
    assert set(names) == set(CODECS)
