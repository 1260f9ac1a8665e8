"""The suite runs over every registered device; a backend brings no test code of its own.

A device may say `exact = True`: its bytes equal the reference's. Another's may differ where a value lies on the border of two codes,
which is counted and bounded. `torch_device` says where its pages lie, "cpu" where it says nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from bridge.devices import Device, DeviceError, device_names, open_device


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
        device = open_device(name)
        device.probe()
    except DeviceError as error:
        return str(error)
    return device


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    opened = _opened(request.param)
    if isinstance(opened, str):
        pytest.skip(f"device {request.param} cannot work here: {opened}")
    return opened
