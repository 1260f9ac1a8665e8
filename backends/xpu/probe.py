"""What an Intel card is, and what of it the hand-off can use."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass

import torch

from bridge.devices import DeviceError

_ARCHITECTURES = (("max", "pvc"), ("arc a", "dg2"), ("arc(tm) a", "dg2"), ("flex", "dg2"), ("arc b", "bmg"), ("arc(tm) b", "bmg"))
"""Part of a card's name, and its architecture as Intel's compilers call it."""


@dataclass(frozen=True)
class Card:
    """One Intel card. extension: the version of Intel's extension for PyTorch, "" where it is absent. memory: bytes."""

    index: int
    name: str
    architecture: str
    memory: int
    driver: str
    extension: str

    def __str__(self) -> str:
        known = self.architecture or "an architecture that is not known here, so Ponte Vecchio's launch parameters"
        extension = f", Intel's extension for PyTorch {self.extension}" if self.extension else ""
        return f"{self.name} (xpu:{self.index}), {known}, driver {self.driver}, {self.memory / 2**30:.0f} GiB{extension}"


def extension_version() -> str:
    """The version of Intel's extension for PyTorch, which is archived and not needed, or "". It is not imported."""
    try:
        return importlib.metadata.version("intel_extension_for_pytorch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def architecture_of(name: str) -> str:
    """ "pvc", "dg2", "bmg", or "" for a card that is not known."""
    lowered = name.lower().replace("(r)", "")
    return next((architecture for part, architecture in _ARCHITECTURES if part in lowered), "")


def find_card(index: int) -> Card:
    """The card of this number. Raises DeviceError, with what is missing, where it cannot be used."""
    if not hasattr(torch, "xpu") or getattr(torch.version, "xpu", None) is None:
        raise DeviceError(
            "the device xpu needs a torch that was built for Intel GPUs, this one was not",
            remedy="install torch for XPU, or use the device xpu-emulated (make xpu-env) or cpu",
        )
    if not torch.xpu.is_available():
        raise DeviceError(
            "no Intel GPU is visible here", remedy="check Intel's driver (Level Zero) and ZE_AFFINITY_MASK, or use the device cpu"
        )
    if not 0 <= index < torch.xpu.device_count():
        raise DeviceError(f"there is no xpu:{index}; {torch.xpu.device_count()} are visible", remedy="check ZE_AFFINITY_MASK")
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("triton.backends.intel") is None:
        raise DeviceError(
            "the device xpu needs Intel's Triton, and the installed one, if any, has no Intel back end",
            remedy="install the triton that comes with torch for XPU (triton-xpu), or use the device cpu",
        )
    found = torch.xpu.get_device_properties(index)
    return Card(
        index, found.name, architecture_of(found.name), found.total_memory, getattr(found, "driver_version", "unknown"), extension_version()
    )
