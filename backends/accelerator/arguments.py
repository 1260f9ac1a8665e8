"""Everything small that the launches of a call need, in one array of 64-bit words, so that it takes one copy to the device."""

from __future__ import annotations

import numpy as np
import torch


class Arguments:
    """Arrays one after another, each from a multiple of 16 bytes on.

    reserved: words before the first array, which are not copied: a launch on the device fills them.
    """

    def __init__(self, reserved: int = 0) -> None:
        self._parts: list[np.ndarray] = []
        self.reserved = self.words = reserved + reserved % 2

    def add(self, values: np.ndarray) -> tuple[int, int]:
        """Appends an array. Returns (its first word, how many words it has)."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        place, used = self.words, -(-data.size // 8)
        if data.size % 16:
            padded = np.zeros(8 * (used + used % 2), np.uint8)
            padded[: data.size] = data
            data = padded
        self._parts.append(data.view(np.int64))
        self.words += used + used % 2
        return place, used

    def write(self, out: torch.Tensor) -> None:
        """Fills `out`, int64 [self.words - self.reserved] in host memory, with what follows the reserved words."""
        np.concatenate(self._parts, out=out.numpy())
