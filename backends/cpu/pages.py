"""Torch pages as NumPy views, without a copy."""

from __future__ import annotations

import numpy as np
import torch

from bridge.devices import BlockTable, LayerPages, PagesDoNotFit, SpanShare
from bridge.wire import Element

_WORDS = {Element.BF16: torch.int16, Element.FP16: torch.int16, Element.FP32: torch.int32}


def check_host(pages: torch.Tensor) -> None:
    """Raises PagesDoNotFit unless the pages lie in host memory."""
    if pages.device.type != "cpu":
        raise PagesDoNotFit(f"the pages are on {pages.device}, this device reads host memory")


def check_table(layer: LayerPages, table: BlockTable) -> None:
    """Raises PagesDoNotFit where the block table counts in pages of another size than the layer's."""
    if table.block_size != layer.block_size:
        raise PagesDoNotFit(f"the block table is in pages of {table.block_size} tokens, the cache has pages of {layer.block_size}")


def element_view(pages: torch.Tensor, element: Element) -> np.ndarray:
    """Unsigned words [num_pages, block_size, kv_heads, head_dim] on the tensor's own memory. Raises PagesDoNotFit off the CPU."""
    check_host(pages)
    words = pages.view(_WORDS[element]).numpy()
    return words.view(np.uint32 if element is Element.FP32 else np.uint16)


def check_share(layer: LayerPages, share: SpanShare, first_head: int) -> int:
    """The local kv head of the share's first. Raises PagesDoNotFit where the pages hold other heads or vectors of another length."""
    local = share.model_head - first_head
    if local < 0 or local + share.head_count > layer.heads:
        raise PagesDoNotFit(
            f"layer {share.index} has kv heads {first_head} to {first_head + layer.heads - 1} here, "
            f"the payload's share is {share.model_head} to {share.model_head + share.head_count - 1}"
        )
    if layer.head_dim != share.head_dim:
        raise PagesDoNotFit(f"layer {share.index} has head dimension {layer.head_dim} here, {share.head_dim} in the payload")
    return local
