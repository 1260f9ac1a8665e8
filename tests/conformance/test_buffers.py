"""What accelerators take besides host memory: payloads in their own, the engine's order, graphs, and the report of what was slow."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from bridge.devices import Device, DeviceWithMemory, engine_order
from bridge.pages import LayerPages, PagedCache, PagesDoNotFit
from bridge.wire.errors import BadTag, DirtyPadding
from tests.conformance.cases import (
    POISON,
    Case,
    chunks,
    compare_memory,
    compare_payload,
    place_of,
    reference_land,
    reference_pack,
    source,
    staged,
    target,
    untouched_outside,
)

GUARD = 64


def own_memory(device: Device, nbytes: int) -> torch.Tensor:
    """Poisoned memory of the device."""
    return torch.full((nbytes,), POISON, dtype=torch.uint8, device=place_of(device))


@pytest.mark.parametrize("name", ["raw", "turboquant_4bit_nc", "int8_per_token_head"])
@pytest.mark.parametrize("shift", [0, 4])
def test_payloads_in_the_devices_own_memory(accelerator: Device, name: str, shift: int) -> None:
    """Aligned, where the kernels use the buffer itself, and not, where they cannot."""
    case = Case(name, first=5, end=40, heads=2)
    keys, oracle = case.keys(), source(case)
    mine, landed, expected = source(case, place_of(accelerator)), target(case, place_of(accelerator)), target(case)
    for share in chunks(case.manifest(), mine.cache):
        whole = own_memory(accelerator, share.nbytes + 2 * GUARD)
        buffer = whole[GUARD + shift : GUARD + shift + share.nbytes]
        accelerator.pack(mine.cache, mine.table, share.shares, keys, buffer)
        good = reference_pack(oracle, share, keys)
        compare_payload(accelerator, share, keys, buffer.cpu().numpy(), good)
        assert bool((whole[: GUARD + shift] == POISON).all())
        assert bool((whole[GUARD + shift + share.nbytes :] == POISON).all())
        buffer.copy_(torch.from_numpy(good))
        accelerator.land(landed.cache, landed.table, share.shares, keys, buffer, case.first, case.end)
        assert np.array_equal(buffer.cpu().numpy(), good)
        reference_land(expected, share, keys, good, case.first, case.end)
    untouched_outside(landed, case.first, case.end)
    compare_memory(accelerator, landed, expected)


@pytest.mark.parametrize(("place", "error"), [("block", BadTag), ("tag", BadTag), ("padding", DirtyPadding)])
def test_nothing_of_a_bad_payload_is_written(accelerator: Device, place: str, error: type[Exception]) -> None:
    case = Case("turboquant_4bit_nc", first=0, end=40, layers=(0, 1), heads=2)
    (share,) = chunks(case.manifest(), source(case).cache)
    data = reference_pack(source(case), share, case.keys())
    span = share.shares[1].span
    at = share.shares[1].offset + {"block": 3, "tag": 3 * span.block_bytes + 9, "padding": span.run_bytes - 2}[place]
    data[at] ^= 0x20
    for buffer in (data, torch.from_numpy(data).to(place_of(accelerator))):
        landed = target(case, place_of(accelerator))
        with pytest.raises(error) as said:
            accelerator.land(landed.cache, landed.table, share.shares, case.keys(), buffer, 0, 40)
        assert error is DirtyPadding or "1 of 6 blocks" in str(said.value)
        for tensor in landed.bytes() if isinstance(buffer, torch.Tensor) else landed.bytes()[2:]:
            assert (tensor == POISON).all()


def test_a_buffer_that_changes_while_it_lands_is_noticed(accelerator: Device) -> None:
    case = Case("raw", first=0, end=40, layers=(0,), heads=1)
    (share,) = chunks(case.manifest(), source(case).cache)
    buffer = torch.from_numpy(reference_pack(source(case), share, case.keys())).to(place_of(accelerator))
    landed, queue_land = target(case, place_of(accelerator)), accelerator._queue_land

    def late_write(lane, *arguments) -> None:
        with accelerator._module.stream(lane.compute):
            buffer[5] ^= 1
        queue_land(lane, *arguments)

    accelerator._queue_land = late_write
    try:
        with pytest.raises(BadTag, match="changed"):
            accelerator.land(landed.cache, landed.table, share.shares, case.keys(), buffer, 0, 40)
    finally:
        del accelerator._queue_land


@pytest.mark.parametrize("buffer", [torch.zeros(4096, dtype=torch.int8), torch.zeros((64, 64), dtype=torch.uint8), np.zeros(64, np.int8)])
def test_other_buffers_are_refused(accelerator: Device, buffer) -> None:
    case = Case("raw", first=0, end=16, layers=(0,), heads=1)
    mine = source(case, place_of(accelerator))
    (share,) = chunks(case.manifest(), mine.cache)
    with pytest.raises(PagesDoNotFit):
        accelerator.pack(mine.cache, mine.table, share.shares, case.keys(), buffer)


def test_pages_of_another_device_are_refused(accelerator: Device) -> None:
    case = Case("raw", first=0, end=16, layers=(0,), heads=1)
    mine = source(case)
    elsewhere = {i: LayerPages(pages.key.to("meta"), pages.value.to("meta")) for i, pages in mine.cache.layers.items()}
    (share,) = chunks(case.manifest(), mine.cache)
    _, out = staged(accelerator, share.nbytes)
    with pytest.raises(PagesDoNotFit, match="meta"):
        accelerator.pack(PagedCache(elsewhere), mine.table, share.shares, case.keys(), out)
    assert (out == POISON).all()


def test_what_no_kernel_takes_is_counted_and_said(accelerator: Device) -> None:
    before = accelerator.counters.snapshot()
    for name, expected in (("raw", "rows{head dimension 80}"), ("int8_per_token_head", "host{head dimension 80}")):
        case = Case(name, head_dim=80, first=0, end=16, layers=(0, 3), heads=1)
        mine = source(case, place_of(accelerator))
        (share,) = chunks(case.manifest(), mine.cache)
        _, out = staged(accelerator, share.nbytes)
        accelerator.pack(mine.cache, mine.table, share.shares, case.keys(), out)
        assert accelerator.counters.snapshot()[expected] == before.get(expected, 0) + 2
        assert expected in accelerator.report()
        assert expected in accelerator.probe()


def test_an_alike_models_layers_share_one_launch(accelerator: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small requests are bound by launches: one to pack, two to land."""
    case = replace(Case("turboquant_4bit_nc", first=0, end=16, heads=2), layers=(0, 1, 2, 3))
    mine, landed = source(case, place_of(accelerator)), target(case, place_of(accelerator))
    (share,) = chunks(case.manifest(), mine.cache)
    launches: list[str] = []
    for name in ("_launch", "_queue_tags"):
        whole = getattr(accelerator, name)
        monkeypatch.setattr(accelerator, name, lambda *a, _name=name, _whole=whole, **k: (launches.append(_name), _whole(*a, **k))[1])
    buffer = own_memory(accelerator, share.nbytes)
    accelerator.pack(mine.cache, mine.table, share.shares, case.keys(), buffer)
    assert launches == ["_launch"]
    accelerator.land(landed.cache, landed.table, share.shares, case.keys(), buffer, 0, 16)
    assert launches == ["_launch", "_queue_tags", "_launch"]


def test_it_offers_what_the_hand_off_asks_for(accelerator: Device) -> None:
    assert isinstance(accelerator, DeviceWithMemory)
    assert set(engine_order(accelerator)) == {"after"}
    host, own = accelerator.allocate_staging(5000), accelerator.allocate_memory(5000)
    assert (host.device, host.nbytes, host.bytes().nbytes) == ("cpu", 5000, 5000)
    assert (own.device, own.index, own.nbytes) == (accelerator.memory, accelerator.index, 5000)
    assert own.address % 16 == 0
    accelerator.attach()


def test_what_it_remembers_can_be_forgotten(accelerator: Device) -> None:
    case = Case("raw", first=0, end=16, layers=(0,), heads=1)
    mine = source(case, place_of(accelerator))
    (share,) = chunks(case.manifest(), mine.cache)
    buffer = own_memory(accelerator, share.nbytes)
    accelerator.pack(mine.cache, mine.table, share.shares, case.keys(), buffer)
    held = weakref.ref(mine.cache.layers[0])
    accelerator.forget()
    del mine
    gc.collect()
    assert held() is None
