"""What can be said of devices without their hardware: names, refusals, and cards that are not there."""

from __future__ import annotations

import pytest
import torch

from backends.cuda import probe
from backends.cuda.device import CudaDevice
from backends.cuda.probe import Card, find_card, registers
from bridge.codecs import declared
from bridge.devices import DeviceError, UnknownDevice, open_device
from bridge.pages import PagedCache, PagesDoNotFit, SlotPages
from bridge.transfer.agent import takes
from tests.conformance.cases import Case, chunks, source


class HostAgent:
    kind = "host-only"


class CudaAgent:
    kind = "both"
    devices = ("cuda",)


@pytest.mark.parametrize("name", ["cpu:1", "cpu-reference:0", "cuda:x", "cuda:-1", "toaster", ""])
def test_names_that_are_no_device(name: str) -> None:
    with pytest.raises(UnknownDevice, match="no device named"):
        open_device(name)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match="built without CUDA"):
        find_card(0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no NVIDIA GPU is visible"):
        find_card(0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match="no cuda:1; 1 are visible"):
        find_card(1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.raises(DeviceError, match=r"capability 7\.5 has no bf16"):
        find_card(0)


def test_a_card_describes_itself() -> None:
    card = Card(1, "NVIDIA X", (9, 0), 13010, 140 << 30, 100 << 30)
    assert str(card) == "NVIDIA X (cuda:1), compute capability 9.0, CUDA 13.1 driver, 140 GiB, 100 free"


@pytest.mark.parametrize(("capability", "preset", "refused"), [
    ((8, 6), "turboquant_k8v4", True), ((8, 9), "turboquant_k8v4", False), ((9, 0), "turboquant_k8v4", False),
    ((8, 6), "turboquant_4bit_nc", False),
])  # fmt: skip
def test_slots_with_e4b15_keys_are_refused(capability: tuple[int, int], preset: str, refused: bool) -> None:
    """Nothing else is: the same check over float pages, and over slots without fp8 keys, passes."""
    device = CudaDevice.__new__(CudaDevice)
    device.card = Card(0, "a card", capability, 13000, 1, 1)
    case = Case(preset, first=0, end=16, layers=(0,), heads=1)
    floats = source(case)
    (share,) = chunks(case.manifest(), floats.cache)
    device._refuse(floats.cache, share.shares)
    size = share.shares[0].codec.slot_bytes(case.head_dim)
    slots = PagedCache({0: SlotPages.rows(torch.zeros(2, 16, 1, size, dtype=torch.uint8), declared(preset), case.head_dim)})
    if refused:
        with pytest.raises(PagesDoNotFit, match="E4B15"):
            device._refuse(slots, share.shares)
    else:
        device._refuse(slots, share.shares)


def test_agents_say_whose_memory_they_take() -> None:
    assert [takes(HostAgent(), kind) for kind in ("cpu", "cuda")] == [True, False]
    assert [takes(CudaAgent(), kind) for kind in ("cpu", "cuda", "xpu")] == [True, True, False]
    assert registers(HostAgent(), 0) == "the agent host-only takes host memory only"


@pytest.mark.parametrize(("value", "on"), [("", False), ("expandable_segments:False", False), ("a:1,expandable_segments: True", True)])
def test_expandable_segments_are_noticed(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
    assert probe.expandable_segments() is on
