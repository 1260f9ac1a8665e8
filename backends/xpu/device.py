"""An Intel card as a device: the host code of every accelerator, the shared kernels, and what is the card's own."""

from __future__ import annotations

from typing import Any

import torch

from backends.xpu.probe import find_card, level_zero_in_ucx
from bridge.devices import DeviceError

try:
    from backends.accelerator.device import Accelerator, Staging
    from backends.xpu.tuning import tuning_for
except ImportError as error:
    raise DeviceError(
        f"the device xpu needs Triton, which cannot be imported ({error})",
        remedy="install torch for XPU with the triton that comes with it, or use the device cpu",
    ) from None


class XpuDevice(Accelerator):
    """The card number `index`. Raises DeviceError where it cannot be used."""

    name = "xpu"

    def __init__(self, index: int = 0, **options: Any) -> None:
        self.card = find_card(index)
        super().__init__(torch.device("xpu", index), tuning_for(self.card.architecture), **options)

    def probe(self) -> str:
        staged = "its own" if level_zero_in_ucx() else "pinned host"
        return f"{self.card}; payloads are staged in {staged} memory; {super().probe()}"

    def allocate_memory(self, nbytes: int) -> Staging:
        """Memory that transfers can read. Raises DeviceError where no UCX with Level Zero was found."""
        if level_zero_in_ucx() is None:
            raise DeviceError(
                "no UCX with Level Zero was found, and without it no transfer can read XPU memory",
                remedy='choose staging="host", or build UCX and NIXL as docs/xpu.md says and set UCX_MODULE_DIR',
            )
        return super().allocate_memory(nbytes)
