"""Pack and land of whole payloads: bytes equal to the reference's, and not one byte outside touched."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from bridge.codecs import CODECS
from bridge.devices import Device
from bridge.wire import Element, verify_tags
from tests.conformance.cases import (
    BLOCK_SIZES,
    ELEMENTS,
    HEAD_DIMS,
    LAYOUTS,
    Case,
    carried,
    chunks,
    compare_memory,
    compare_payload,
    fill,
    guards_hold,
    place_of,
    random_vectors,
    reference_land,
    reference_pack,
    source,
    staged,
    target,
    untouched_outside,
)

FULL = os.environ.get("KVBRIDGE_FULL") == "1"
RANGES = ((0, 16), (0, 150), (5, 37), (16, 17), (33, 180), (250, 257), (7, 64), (48, 130))


def matrix() -> list[Case]:
    """Every codec, element type and head dimension that go together; layouts, page sizes and token ranges drawn by seed.

    The default run takes the head dimensions 64 and 128 whole and a sample of the others; KVBRIDGE_FULL=1 takes all, several times.
    """
    random, cases = np.random.default_rng(20), []
    for seed, (name, element, head_dim) in enumerate(product(CODECS, ELEMENTS, HEAD_DIMS)):
        if not carried(name, element, head_dim):
            continue
        for again in range(4 if FULL else 1):
            first, end = RANGES[random.integers(len(RANGES))]
            layout, target_layout = random.choice(LAYOUTS, 2)
            block_size, target_block_size = random.choice(BLOCK_SIZES, 2, replace=False)
            case = Case(
                codec=name,
                element=element,
                head_dim=head_dim,
                heads=int(random.integers(1, 4)),
                first=first,
                end=end,
                chunk_tokens=int(random.choice([16, 48, 64, 256])),
                layout=str(layout),
                block_size=int(block_size),
                target_layout=str(target_layout),
                target_block_size=int(target_block_size),
                key_scale=float(random.choice([1.0, 0.37])),
                value_scale=float(random.choice([1.0, 2.5])),
                seed=100 * seed + again,
            )
            if FULL or head_dim in (64, 128) or random.random() < 0.2:
                cases.append(case)
    return cases


def layouts() -> list[Case]:
    """Every layout against every page size, the target's always another than the source's."""
    cases = []
    for number, (layout, block_size) in enumerate(product(LAYOUTS, BLOCK_SIZES)):
        other = (number * 7 + 3) % len(LAYOUTS), (number + 1 + number // 6) % len(BLOCK_SIZES)
        size = BLOCK_SIZES[other[1]] if BLOCK_SIZES[other[1]] != block_size else BLOCK_SIZES[(other[1] + 1) % 6]
        name = ("raw", "turboquant_4bit_nc", "turboquant_3bit_nc")[number % 3]
        first, end = RANGES[number % len(RANGES)]
        cases.append(
            Case(name, first=first, end=end, layout=layout, block_size=block_size, target_layout=LAYOUTS[other[0]], target_block_size=size)
        )
    return cases


def round_trip(device: Device, case: Case) -> None:
    manifest, keys = case.manifest(), case.keys()
    vectors = random_vectors(case)
    mine, oracle = source(case, place_of(device), vectors), source(case, vectors=vectors)
    landed, expected = target(case, place_of(device)), target(case)
    before = mine.bytes()
    for share in chunks(manifest, mine.cache):
        whole, buffer = staged(device, share.nbytes)
        device.pack(mine.cache, mine.table, share.shares, keys, buffer)
        assert guards_hold(whole, share.nbytes)
        oracle_bytes = reference_pack(oracle, share, keys)
        compare_payload(device, share, keys, buffer, oracle_bytes)
        buffer[...] = oracle_bytes
        device.land(landed.cache, landed.table, share.shares, keys, buffer, case.first, case.end)
        np.testing.assert_array_equal(buffer, oracle_bytes)
        reference_land(expected, share, keys, oracle_bytes, case.first, case.end)
    for old, new in zip(before, mine.bytes(), strict=True):
        np.testing.assert_array_equal(old, new)
    untouched_outside(landed, case.first, case.end)
    compare_memory(device, landed, expected)
    if CODECS[case.codec].lossless:
        same = target(case)
        fill(case, same, vectors)
        for a, b in zip(landed.bytes(), same.bytes(), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("case", matrix(), ids=str)
def test_every_codec_element_and_head_dim(device: Device, case: Case) -> None:
    round_trip(device, case)


@pytest.mark.parametrize("case", layouts(), ids=str)
def test_every_layout_and_page_size(device: Device, case: Case) -> None:
    round_trip(device, case)


@pytest.mark.parametrize("name", CODECS)
def test_error_of_a_round_trip_is_the_codecs(device: Device, name: str) -> None:
    """The relative error of normal vectors, so that a suite that agrees with itself only does not pass."""
    bound = {
        "raw": 0.0,
        "fp8_e4m3": 0.0008,
        "int8_per_token_head": 0.0003,
        "turboquant_k8v4": 0.0142,
        "turboquant_4bit_nc": 0.0142,
        "turboquant_k3v4_nc": 0.036,
        "turboquant_3bit_nc": 0.06,
    }[name]
    case = Case(name, head_dim=128, first=0, end=320)
    generator = torch.Generator().manual_seed(3)
    vectors = {
        index: tuple(torch.randn(320, case.heads, 128, generator=generator).to(torch.bfloat16) for _ in range(2)) for index in case.layers
    }
    mine, landed = source(case, place_of(device), vectors), target(case, place_of(device))
    for share in chunks(case.manifest(), mine.cache):
        _, buffer = staged(device, share.nbytes)
        device.pack(mine.cache, mine.table, share.shares, case.keys(), buffer)
        device.land(landed.cache, landed.table, share.shares, case.keys(), buffer, 0, 320)
    for index, pages in landed.cache.layers.items():
        page, position = (torch.from_numpy(x) for x in landed.table.locate(0, 320, pages.key.shape[0]))
        for side, x in zip((pages.key, pages.value), vectors[index], strict=True):
            y = side[page, position].cpu().double()
            assert float((y - x.double()).square().sum() / x.double().square().sum()) <= bound


@pytest.mark.parametrize("name", ["raw", "fp8_e4m3", "turboquant_3bit_nc"])
@pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: element.name)
@pytest.mark.parametrize("other", ELEMENTS, ids=lambda element: element.name)
def test_pages_of_another_element_type(device: Device, name: str, element: Element, other: Element) -> None:
    case = Case(name, element)
    keys, oracle = case.keys(), source(case)
    landed, expected = target(case, place_of(device), element=other), target(case, element=other)
    for share in chunks(case.manifest(), oracle.cache):
        _, buffer = staged(device, share.nbytes)
        buffer[...] = reference_pack(oracle, share, keys)
        device.land(landed.cache, landed.table, share.shares, keys, buffer, case.first, case.end)
        reference_land(expected, share, keys, buffer, case.first, case.end)
    untouched_outside(landed, case.first, case.end)
    compare_memory(device, landed, expected)


@pytest.mark.parametrize("name", ["raw", "turboquant_4bit_nc"])
@pytest.mark.parametrize(("first", "end"), [(0, 37), (37, 80), (64, 65), (100, 1000), (0, 5), (150, 160), (5, 150)])
def test_only_tokens_of_the_write_range_are_written(device: Device, name: str, first: int, end: int) -> None:
    case = Case(name)
    keys, oracle = case.keys(), source(case)
    landed, expected = target(case, place_of(device)), target(case)
    for share in chunks(case.manifest(), oracle.cache):
        _, buffer = staged(device, share.nbytes)
        buffer[...] = reference_pack(oracle, share, keys)
        device.land(landed.cache, landed.table, share.shares, keys, buffer, first, end)
        reference_land(expected, share, keys, buffer, first, end)
    low, high = max(first, case.first), min(end, case.end)
    untouched_outside(landed, low, max(low, high))
    compare_memory(device, landed, expected)


@pytest.mark.parametrize("name", ["raw", "turboquant_3bit_nc", "int8_per_token_head"])
@pytest.mark.parametrize(("first_head", "heads"), [(0, 2), (2, 2), (3, 5), (7, 1), (0, 8)])
def test_a_rank_packs_and_lands_its_heads(device: Device, name: str, first_head: int, heads: int) -> None:
    """The ranks' bytes are ranges of the whole payload's, and a rank lands from them alone."""
    case = Case(name, heads=8)
    manifest, keys, vectors = case.manifest(), case.keys(), random_vectors(case)
    whole = source(case, vectors=vectors)
    rank_case = replace(case, heads=heads)
    rank = source(
        rank_case, place_of(device), {i: (k[:, first_head:][:, :heads], v[:, first_head:][:, :heads]) for i, (k, v) in vectors.items()}
    )
    rank.cache = replace(rank.cache, first_head=first_head)
    landed = target(case, place_of(device), first_head=first_head, heads=heads)
    expected = target(case, first_head=first_head, heads=heads)
    for share, part in zip(chunks(manifest, whole.cache), chunks(manifest, rank.cache), strict=True):
        payload = reference_pack(whole, share, keys)
        origin = share.ranges[0][0]
        cut = np.concatenate([payload[remote - origin : remote - origin + size] for remote, _, size in part.ranges])
        guarded, buffer = staged(device, part.nbytes)
        device.pack(rank.cache, rank.table, part.shares, keys, buffer)
        assert guards_hold(guarded, part.nbytes)
        compare_payload(device, part, keys, buffer, cut)
        buffer[...] = cut
        device.land(landed.cache, landed.table, part.shares, keys, buffer, case.first, case.end)
        reference_land(expected, part, keys, cut, case.first, case.end)
    untouched_outside(landed, case.first, case.end)
    compare_memory(device, landed, expected)


def special_vectors(case: Case, finite: bool = False) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Corner inputs: zeros of both signs, denormals, infinities, NaN of both signs, overflowing sums, ties of fp8 and bf16.

    finite: only what a device must code as the reference does whose codes of other vectors are unspecified.
    """
    odd = [
        0.0,
        -0.0,
        1e-40,
        -1e-45,
        3e38,
        -3e38,
        float("inf"),
        -float("inf"),
        float("nan"),
        448,
        464,
        -480,
        2**-9,
        2**-10,
        1.0625,
        65504,
        1e-8,
    ]
    if finite:
        odd = [x for x in odd if abs(x) <= 1000 and not -1e-20 < x < 0 and str(x) != "-0.0"]
    vectors = random_vectors(case)
    random = np.random.default_rng(case.seed)
    for sides in vectors.values():
        for side, x in enumerate(sides):
            tokens, heads, dim = x.shape
            for token in range(tokens):
                for head in range(heads):
                    kind = (token * heads + head) % 8
                    if finite and (kind in (3, 5, 6) or (kind == 4 and side == 0)):
                        continue
                    value = odd[random.integers(len(odd))]
                    if kind == 0:
                        x[token, head] = value
                    elif kind == 1:
                        x[token, head, random.integers(dim)] = value
                    elif kind == 2:
                        x[token, head] = torch.tensor(random.choice(odd, dim)).to(x.dtype)
                    elif kind == 3:
                        x[token, head] = torch.tensor(random.choice([0.0, -0.0], dim)).to(x.dtype)
                    elif kind == 4:
                        tiny = x[token, head].float() * 1e-38
                        x[token, head] = (tiny.abs() if finite else tiny).to(x.dtype)
                    elif kind == 5:
                        x[token, head, random.integers(dim)] = -float("nan")
                    elif kind == 6:
                        x[token, head] = (x[token, head].float().sign() * 1e20).to(x.dtype)
    return vectors


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: element.name)
def test_corner_inputs(device: Device, name: str, element: Element) -> None:
    case = Case(name, element, first=3, end=230, chunk_tokens=128, key_scale=0.5, layers=(2,))
    keys, vectors = case.keys(), special_vectors(case)
    if getattr(device, "finite_only", False):
        mine = source(case, place_of(device), vectors)
        for share in chunks(case.manifest(), mine.cache):
            _, buffer = staged(device, share.nbytes)
            device.pack(mine.cache, mine.table, share.shares, keys, buffer)
            for one in share.shares:  # whatever the codes are, they are whole
                verify_tags(buffer[one.offset : one.offset + one.nbytes], one.as_span(), keys)
        vectors = special_vectors(case, finite=True)
    mine, oracle = source(case, place_of(device), vectors), source(case, vectors=vectors)
    landed, expected = target(case, place_of(device)), target(case)
    for share in chunks(case.manifest(), mine.cache):
        _, buffer = staged(device, share.nbytes)
        device.pack(mine.cache, mine.table, share.shares, keys, buffer)
        oracle_bytes = reference_pack(oracle, share, keys)
        compare_payload(device, share, keys, buffer, oracle_bytes)
        buffer[...] = oracle_bytes
        device.land(landed.cache, landed.table, share.shares, keys, buffer, case.first, case.end)
        reference_land(expected, share, keys, oracle_bytes, case.first, case.end)
    untouched_outside(landed, case.first, case.end)
    compare_memory(device, landed, expected)


@pytest.mark.parametrize("shift", [0, 1, 4, 8])
def test_buffers_lie_anywhere_and_may_be_read_only(device: Device, shift: int) -> None:
    case = Case("turboquant_3bit_nc", first=0, end=40)
    keys, oracle = case.keys(), source(case)
    mine, landed, expected = source(case, place_of(device)), target(case, place_of(device)), target(case)
    (share,) = chunks(case.manifest(), mine.cache)
    good = reference_pack(oracle, share, keys)
    whole, _ = staged(device, share.nbytes)
    device.pack(mine.cache, mine.table, share.shares, keys, whole[shift : shift + share.nbytes])
    compare_payload(device, share, keys, whole[shift : shift + share.nbytes], good)
    assert (whole[:shift] == 0xCD).all()
    assert (whole[shift + share.nbytes :] == 0xCD).all()
    data = np.frombuffer(bytes(shift) + good.tobytes(), np.uint8)[shift:]
    assert not data.flags.writeable
    device.land(landed.cache, landed.table, share.shares, keys, data, 0, 40)
    reference_land(expected, share, keys, good, 0, 40)
    compare_memory(device, landed, expected)


def test_any_thread_may_pack_and_land(device: Device) -> None:
    count, end = (3, 60) if getattr(device, "slow", False) else (8, 180)
    cases = [Case("turboquant_4bit_nc", seed=seed, head_dim=(64, 128)[seed % 2], first=seed, end=end) for seed in range(count)]
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(round_trip, device, case) for case in cases]:
            done.result()
