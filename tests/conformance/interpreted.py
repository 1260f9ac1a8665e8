"""The accelerator's host code and the shared kernels on torch's CPU, under Triton's interpreter: what CI has in place of a card."""

from __future__ import annotations

from collections.abc import Callable

import torch

from backends.accelerator.device import Accelerator
from backends.kernels.plan import Tuning
from bridge.wire import SlotCodec

EXACT = Tuning(blocks=2, together=1, matrix=False, fused=False, canonical_nan=False, integer_cast=True)
"""The reference's own arithmetic."""


def exact_tuning(operation: str, codec: SlotCodec, head_dim: int) -> Tuning:
    return EXACT


class InterpretedDevice(Accelerator):
    """Exact by its settings. Its scratch is small, so that a payload of the tests passes through it in several pieces.

    tuning: such as one of more blocks to a program, which the interpreter takes faster where there is much to do.
    """

    name = "interpreted"
    exact = True
    slow = True
    host_masks = 8
    """Low, so that some cases have their masks made on the device."""

    def __init__(self, piece_bytes: int = 1 << 14, tuning: Callable[[str, SlotCodec, int], Tuning] = exact_tuning) -> None:
        super().__init__(torch.device("cpu"), tuning, piece_bytes=piece_bytes, lanes=2)
