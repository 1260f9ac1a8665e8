"""Torch pages as NumPy views, without a copy, and the rows of a request's tokens in them."""

from __future__ import annotations

import numpy as np
import torch

from bridge.devices import SpanShare
from bridge.pages import BlockTable, LayerDescription, PagesDoNotFit

_WORDS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}


def check_host(pages: torch.Tensor) -> None:
    """Raises PagesDoNotFit unless the pages lie in host memory."""
    if pages.device.type != "cpu":
        raise PagesDoNotFit(f"the pages are on {pages.device}, this device reads host memory")


def check_table(layer: LayerDescription, table: BlockTable) -> None:
    """Raises PagesDoNotFit where the block table counts in pages of another size than the layer's."""
    block_size = layer.sides[0].block_size
    if table.block_size != block_size:
        raise PagesDoNotFit(f"the block table is in pages of {table.block_size} tokens, the cache has pages of {block_size}")


def word_view(pages: torch.Tensor) -> np.ndarray:
    """The tensor's own memory as unsigned words of its element size. Raises PagesDoNotFit off the CPU."""
    check_host(pages)
    as_torch, as_numpy = _WORDS[pages.element_size()]
    return pages.view(as_torch).numpy().view(as_numpy)


def _index(view: np.ndarray, page: np.ndarray, position: np.ndarray, heads: slice, tiled: bool) -> tuple:
    if tiled:
        return page, position // view.shape[2], position % view.shape[2], heads
    return page, position, heads


def read_rows(pages: torch.Tensor | None, tiled: bool, page: np.ndarray, position: np.ndarray, heads: slice) -> np.ndarray:
    """u8 [heads, tokens, bytes]: the rows of these tokens and heads, copied. Without a tensor, rows of no bytes."""
    if pages is None:
        return np.zeros((heads.stop - heads.start, page.size, 0), np.uint8)
    view = word_view(pages)
    rows = view[_index(view, page, position, heads, tiled)]
    rows = rows.reshape(*rows.shape[:2], -1).swapaxes(0, 1)
    return np.ascontiguousarray(rows).view(np.uint8)


def write_rows(pages: torch.Tensor | None, tiled: bool, page: np.ndarray, position: np.ndarray, heads: slice, rows: np.ndarray) -> None:
    """The inverse of read_rows."""
    if pages is None:
        return
    view = word_view(pages)
    words = np.ascontiguousarray(rows).view(view.dtype).swapaxes(0, 1)
    view[_index(view, page, position, heads, tiled)] = words.reshape(*words.shape[:2], *view.shape[4 if tiled else 3 :])


def check_share(layer: LayerDescription, share: SpanShare, first_head: int) -> int:
    """The local kv head of the share's first. Raises PagesDoNotFit where the pages hold other heads or vectors of another length."""
    local, heads = share.model_head - first_head, layer.sides[0].heads
    if local < 0 or local + share.head_count > heads:
        raise PagesDoNotFit(
            f"layer {share.model_layer} has kv heads {first_head} to {first_head + heads - 1} here, "
            f"the payload's share is {share.model_head} to {share.model_head + share.head_count - 1}"
        )
    if layer.head_dim != share.head_dim:
        raise PagesDoNotFit(f"layer {share.model_layer} has head dimension {layer.head_dim} here, {share.head_dim} in the payload")
    return local
