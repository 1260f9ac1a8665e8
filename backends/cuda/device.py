"""An NVIDIA card as a device: the host code of every accelerator, the shared kernels, and what is the card's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from backends.cuda.probe import expandable_segments, find_card
from bridge.devices import DeviceError, SpanShare
from bridge.pages import PagedCache, PagesDoNotFit, SlotPages
from bridge.wire import CodingKind

try:
    from backends.accelerator.device import Accelerator, Staging
    from backends.cuda.tuning import tuning_for
except ImportError as error:
    raise DeviceError(
        f"the device cuda needs Triton, which cannot be imported ({error})", remedy='pip install "kvbridge[kernels]", or use the device cpu'
    ) from None


class CudaDevice(Accelerator):
    """The card number `index`. Raises DeviceError where it cannot be used."""

    name = "cuda"

    def __init__(self, index: int = 0, **options: Any) -> None:
        self.card = find_card(index)
        super().__init__(torch.device("cuda", index), lambda operation, codec, head_dim: tuning_for(operation, codec), **options)

    def probe(self) -> str:
        return f"{self.card}; {super().probe()}"

    def allocate_memory(self, nbytes: int) -> Staging:
        """Memory that other processes can read. Raises DeviceError."""
        if expandable_segments():
            raise DeviceError(
                "torch's allocator has expandable_segments on, and other processes cannot read such memory",
                remedy='leave expandable_segments out of PYTORCH_ALLOC_CONF, or choose staging="host"',
            )
        return super().allocate_memory(nbytes)

    def _refuse(self, cache: PagedCache, shares: Sequence[SpanShare]) -> None:
        """vLLM's slots with fp8 keys are not E4M3FN on cards before 8.9. Pages of floats, and fp8 pages, are unaffected: the kernels cast
        by integer arithmetic. Raises PagesDoNotFit.
        """
        if self.card.slots_hold_e4m3:
            return
        for share in shares:
            layer = cache.layers[share.model_layer]
            if isinstance(layer, SlotPages) and layer.sides[0].coding.kind is CodingKind.FP8:
                raise PagesDoNotFit(
                    f"layer {share.model_layer} holds vLLM slots with fp8 keys: E4B15 on compute capability {self.card.capability}",
                    remedy="use a preset with rotated keys here, or convert the slots (bridge.codecs.dialects.e4b15_as_e4m3)",
                )
