"""The suite runs over every registered device; a backend brings no test code of its own.

A device may say `exact = True`: its bytes equal the reference's. Another's may differ where a value lies on the border of two codes,
which is counted and bounded. `torch_device` says where its pages lie, "cpu" where it says nothing.

Devices of hardware carry its marker: absent hardware is deselected. The others must work wherever the tests run. Without an NVIDIA GPU
Triton's interpreter, which must be chosen before triton is imported, stands in for the card: a sample of the tests, since it takes a
second for what a card does in a microsecond.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator

import pytest
import torch

from bridge.devices import Device, DeviceError, device_names, open_device

HARDWARE = {"cuda": pytest.mark.cuda, "xpu": pytest.mark.xpu, "xpu-emulated": pytest.mark.xpu_emulated}
INTERPRETED = "interpreted"
MUST_BE = {"cpu", "cpu-reference", "cuda"}
"""Devices that are tested, or fail, also where this package was not installed and so nothing is registered."""
SLOW_DEVICES = (INTERPRETED, "xpu-emulated")
FULL = os.environ.get("KVBRIDGE_FULL") == "1"
ON_CARD = torch.cuda.is_available()

if not ON_CARD:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Torch's own threads cost more than they give on tensors this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.lru_cache
def _opened(name: str) -> Device | str:
    try:
        if name == INTERPRETED:
            from tests.conformance.interpreted import InterpretedDevice

            return InterpretedDevice()
        device = open_device(name)
        device.probe()
    except DeviceError as error:
        return str(error)
    return device


def _devices() -> list:
    names = [pytest.param(name, marks=HARDWARE[name]) if name in HARDWARE else name for name in sorted(MUST_BE | set(device_names()))]
    return names if ON_CARD else [*names, pytest.param(INTERPRETED, marks=pytest.mark.slow)]


@pytest.fixture(params=_devices())
def device(request: pytest.FixtureRequest) -> Device:
    opened = _opened(request.param)
    if isinstance(opened, str):
        pytest.fail(f"device {request.param} cannot work here: {opened}")
    return opened


ACCELERATORS = [pytest.param("cuda", marks=pytest.mark.cuda), pytest.param("xpu", marks=pytest.mark.xpu)]
if not ON_CARD:
    ACCELERATORS.append(pytest.param(INTERPRETED, marks=pytest.mark.slow))


@pytest.fixture(params=ACCELERATORS)
def accelerator(request: pytest.FixtureRequest) -> Device:
    """Devices of backends/accelerator, which also take buffers of their own memory."""
    opened = _opened(request.param)
    if isinstance(opened, str):
        pytest.fail(f"device {request.param} cannot work here: {opened}")
    return opened


def _share_of_sample(item: pytest.Item) -> float:
    """Which part of a test function's cases the interpreter takes."""
    return SAMPLES.get(item.name.partition("[")[0], 1.0)


SAMPLES = {
    "test_every_codec_element_and_head_dim": 0.08,
    "test_every_layout_and_page_size": 0.1,
    "test_error_of_a_round_trip_is_the_codecs": 0.1,
    "test_pages_of_another_element_type": 0.08,
    "test_only_tokens_of_the_write_range_are_written": 0.2,
    "test_a_rank_packs_and_lands_its_heads": 0.1,
    "test_corner_inputs": 0.1,
    "test_buffers_lie_anywhere_and_may_be_read_only": 0.4,
    "test_a_flipped_bit_anywhere": 0.2,
    "test_blocks_of_another_place_or_time": 0.5,
    "test_block_tables_that_do_not_fit": 0.3,
    "test_slots_that_vllm_wrote_decode_like_their_source": 0.2,
    "test_regions_and_rows_become_each_other": 0.4,
    "test_any_key_side_with_any_value_side": 0.15,
    "test_matrix": 0.0,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the interpreter a sample, drawn by the names of the tests: the same in every run."""
    out = []
    for item in items:
        name = getattr(item, "callspec", None) and item.callspec.params.get("device")
        if name not in SLOW_DEVICES or FULL or "tests/conformance" not in str(item.path):
            continue
        drawn = int.from_bytes(hashlib.sha256(item.name.encode()).digest()[:4], "little") / 2**32
        if drawn >= _share_of_sample(item):
            out.append(item)
    if out:
        dropped = set(out)
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=out)
