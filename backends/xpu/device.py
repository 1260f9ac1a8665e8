"""An Intel card as a device: the host code of every accelerator, the shared kernels, and what is the card's own."""

from __future__ import annotations

from typing import Any

import torch

from backends.xpu.probe import find_card
from bridge.devices import DeviceError
from bridge.transfer.level_zero import level_zero_in_ucx

try:
    from backends.accelerator.device import Accelerator
    from backends.xpu.tuning import MASK_OPTIONS, TAG_OPTIONS, tuning_for
except ImportError as error:
    raise DeviceError(
        f"the device xpu needs Triton, which cannot be imported ({error})",
        remedy="install torch for XPU with the triton that comes with it, or use the device cpu",
    ) from None


class XpuDevice(Accelerator):
    """The card number `index`. Raises DeviceError where it cannot be used."""

    name = "xpu"
    tag_options = TAG_OPTIONS
    mask_options = MASK_OPTIONS

    def __init__(self, index: int = 0, **options: Any) -> None:
        self.card = find_card(index)
        super().__init__(torch.device("xpu", index), tuning_for(self.card.architecture), **options)

    def probe(self) -> str:
        module = level_zero_in_ucx()
        staged = f"its own memory, which NIXL can read with {module}" if module else "pinned host memory"
        return f"{self.card}; payloads are staged in {staged}; {super().probe()}"
