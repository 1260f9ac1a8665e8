"""What a TurboQuant page is to `attend`: preset, layout, strides, and the code books that its key codes name."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

TILE = 16  # tokens of a wire block

#: preset -> (key bits, value bits); 8 key bits are OCP E4M3FN without rotation or norm
PRESETS = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}

# vLLM 0.32's code books (centroids.py: Lloyd-Max for N(0, 1/D) by its own coarse integration), float32 little-endian, bit for bit
_CENTROIDS = {
    (64, 3): "549f89be53ed2bbefc71c1bdfbdcfabcfbdcfa3cfc71c13d53ed2b3e549f893e",
    (64, 4): "6ec7aebe706184bec0164fbe0ccd20be4a44f1bd4829a8bdffb946bd8a8283bc"
    "8a82833cffb9463d4829a83d4a44f13d0ccd203ec0164f3e7061843e6ec7ae3e",
    (128, 3): "9fa042be3d24f3bd55c988bd1763b1bc1763b13c55c9883d3d24f33d9fa0423e",
    (128, 4): "c42c77bee7363bbe176f12be2b68e3bdf299aabde1d06dbd59850cbdaefb39bc"
    "aefb393c59850c3de1d06d3df299aa3d2b68e33d176f123ee7363b3ec42c773e",
    (256, 3): "549f09be53edabbdfc7141bdfbdc7abcfbdc7a3cfc71413d53edab3d549f093e",
    (256, 4): "6ec72ebe706104bec016cfbd0ccda0bd4a4471bd482928bdffb9c6bc8a8203bc"
    "8a82033cffb9c63c4829283d4a44713d0ccda03dc016cf3d7061043e6ec72e3e",
}


def centroids(head_dim: int, bits: int) -> tuple[float, ...]:
    """The 2**bits centroids of rotated unit keys, ascending (float32 values). KeyError for a pair that vLLM's presets do not have."""
    raw = bytes.fromhex(_CENTROIDS[head_dim, bits])
    return struct.unpack(f"<{1 << bits}f", raw)


@functools.cache
def table(head_dim: int, bits: int) -> tuple[tuple[float, ...], float]:
    """(centroids times a factor, factor): the factor, between sqrt(D) and 2 sqrt(D), that fp16 rounding of the products hurts least.
    Norm correction cancels it; folded norms do not."""
    book = np.array(centroids(head_dim, bits))
    factors = head_dim**0.5 * np.linspace(1, 2, 8193)
    exact = factors[:, None] * book
    worst = np.abs(exact.astype(np.float16).astype(np.float64) / exact - 1).max(1)
    best = float(factors[worst.argmin()])
    return tuple((book * best).astype(np.float16).astype(float)), best


def slot_bytes(preset: str, head_dim: int) -> int:
    """Bytes of one token of one kv head: key codes, key scalar, value codes, value scale and zero."""
    key, value = PRESETS[preset]
    return head_dim * key // 8 + (0 if key == 8 else 2) + head_dim * value // 8 + 4


def block_bytes(preset: str, head_dim: int) -> int:
    """Bytes of a wire block: 16 tokens of one kv head."""
    return TILE * slot_bytes(preset, head_dim)


def check_pages(preset: str, layout: str, head_dim: int, folded: bool = False) -> None:
    """Raises ValueError for pages that `attend` cannot read, whatever their size."""
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: use one of {', '.join(PRESETS)}")
    if layout not in ("planes", "slots"):
        raise ValueError(f"unknown layout {layout!r}: use 'planes' or 'slots'")
    if head_dim not in (64, 128, 256):
        raise ValueError(f"head dim {head_dim} is not supported: 64, 128 or 256")
    if folded and PRESETS[preset][0] == 8:
        raise ValueError("fp8 keys have no norm to fold: pass folded=False")


@dataclass(frozen=True)
class Pages:
    """One layer's cache.

    data    uint8. layout "planes": [pages, kv heads, page_tokens / 16 * block_bytes], each (page, kv head) one wire block or several in
            token order. layout "slots" (vLLM's): [pages, page_tokens, kv heads, slot_bytes], contiguous within a page.
            Page stride (and head stride, for planes) a multiple of 16 bytes, and so is the address.
    folded  the key scalar is norm / |centroids of the key| instead of norm: the norm correction done when the key is stored. A flavour
            of its own: vLLM's slots and the wire format are not folded
    """

    data: torch.Tensor
    preset: str
    layout: str
    head_dim: int
    page_tokens: int
    folded: bool = False

    def __post_init__(self) -> None:
        check_pages(self.preset, self.layout, self.head_dim, self.folded)
        blocks = self.page_tokens // TILE
        if self.page_tokens % TILE or blocks < 1 or blocks & (blocks - 1):
            raise ValueError(f"page of {self.page_tokens} tokens: a power of two times 16 is needed")
        slot = slot_bytes(self.preset, self.head_dim)
        shape = tuple(self.data.shape)
        want = (blocks * TILE * slot,) if self.layout == "planes" else (self.page_tokens, -1, slot)
        if str(self.data.dtype) != "torch.uint8" or len(shape) != (3 if self.layout == "planes" else 4):
            raise ValueError(f"{self.layout} pages must be a uint8 tensor of {3 if self.layout == 'planes' else 4} dimensions")
        stride = self.data.stride()
        if self.layout == "planes":
            good = shape[2:] == want and stride[2] == 1 and stride[1] % 16 == 0
        else:
            good = shape[1] == want[0] and shape[3] == slot and stride[1:] == (shape[2] * slot, slot, 1)
        if not good or stride[0] % 16 or self.data.data_ptr() % 16:
            raise ValueError(f"pages of shape {shape}, strides {stride} do not lie as {self.layout} of {self.preset}: see Pages")

    @property
    def kv_heads(self) -> int:
        return int(self.data.shape[1 if self.layout == "planes" else 2])
