"""A page's bytes as planes, and back to vLLM's slots. Plain torch: it runs anywhere."""

from __future__ import annotations

import torch

from backends.kernels.attend.pages import PRESETS, TILE


def planes_of(cache: torch.Tensor) -> torch.Tensor:
    """The view [pages, kv heads, page tokens * slot bytes] of a cache [pages, page tokens, kv heads, slot bytes] whose pages hold planes.

    ValueError where a page is not contiguous.
    """
    pages, tokens, heads, slot = cache.shape
    if cache.stride()[1:] != (heads * slot, slot, 1):
        raise ValueError(f"a cache of strides {cache.stride()} is not contiguous within a page")
    return cache.as_strided((pages, heads, tokens * slot), (cache.stride(0), tokens * slot, 1))


def slots_of(cache: torch.Tensor, row: torch.Tensor, preset: str, head_dim: int) -> torch.Tensor:
    """The pages `row` (integers [n]) of a cache of planes as slots in order: uint8 [n, page tokens, kv heads, slot bytes], a copy."""
    key, value = PRESETS[preset]
    tokens, heads, slot = cache.shape[1:]
    codes, norm, values = head_dim * key // 8, 0 if key == 8 else 2, head_dim * value // 8
    blocks = planes_of(cache)[row.long()].view(row.shape[0], heads, tokens // TILE, TILE * slot)
    k, v, n, pair = blocks.split((TILE * codes, TILE * values, TILE * norm, TILE * 4), -1)
    sides = [x.reshape(*x.shape[:3], TILE, x.shape[3] // TILE) for x in (k, n, v, pair)]
    return torch.cat(sides, -1).permute(0, 2, 3, 1, 4).reshape(row.shape[0], tokens, heads, slot)
