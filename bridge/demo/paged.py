"""A KV cache as an engine keeps it: pages of block_size tokens, scattered over a pool, found through a block table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bridge.codecs import declared, reference
from bridge.pages import BlockTable, LayerPages, PagedCache, PagesDoNotFit
from bridge.wire import Element, SlotCodec

if TYPE_CHECKING:
    import torch

LayerKV = tuple["torch.Tensor", "torch.Tensor"]
LAYOUTS = ("NHD", "HND")


def _dtype(element: Element) -> torch.dtype:
    import torch

    types = {Element.BF16: torch.bfloat16, Element.FP16: torch.float16, Element.FP32: torch.float32}
    if element not in types:
        raise PagesDoNotFit(f"pages are of bf16, fp16 or fp32, not {element.name}")
    return types[element]


def empty_pages(
    shape: tuple[int, int, int],
    tokens: int,
    *,
    block_size: int,
    element: Element = Element.BF16,
    layout: str = "NHD",
    seed: int = 0,
    spare_pages: int = 3,
) -> tuple[PagedCache, BlockTable]:
    """Pages for `tokens` tokens in random order among `spare_pages` that belong to nobody, all filled with NaN.

    shape: (layers, kv_heads, head_dim). layout: "NHD" stores [pages, block_size, heads, dim], "HND" [pages, heads, block_size, dim].
    NaN, so that a token which nobody wrote, or a page read by mistake, cannot go unnoticed. Raises PagesDoNotFit.
    """
    import torch

    if layout not in LAYOUTS:
        raise PagesDoNotFit(f"the layout {layout!r} is neither NHD nor HND")
    if block_size < 1 or tokens < 1:
        raise PagesDoNotFit(f"pages of {block_size} tokens for {tokens} tokens")
    layers, heads, dim = shape
    needed = -(-tokens // block_size)
    pool = needed + spare_pages
    order = np.random.default_rng(seed).permutation(pool)[:needed]
    size = (pool, block_size, heads, dim) if layout == "NHD" else (pool, heads, block_size, dim)
    view = LayerPages.nhd if layout == "NHD" else LayerPages.hnd

    def side() -> torch.Tensor:
        return torch.full(size, float("nan"), dtype=_dtype(element))

    return PagedCache({index: view(side(), side()) for index in range(layers)}), BlockTable(order.tolist(), block_size)


def to_pages(
    layers: Sequence[LayerKV],
    *,
    block_size: int,
    element: Element = Element.BF16,
    layout: str = "NHD",
    seed: int = 0,
    spare_pages: int = 3,
) -> tuple[PagedCache, BlockTable]:
    """Contiguous K and V by layer, fp32 [kv_heads, tokens, head_dim], in scattered pages of type `element`; see `empty_pages`.

    Values are rounded to nearest even. Raises PagesDoNotFit.
    """
    heads, tokens, dim = layers[0][0].shape
    cache, table = empty_pages(
        (len(layers), heads, dim), tokens, block_size=block_size, element=element, layout=layout, seed=seed, spare_pages=spare_pages
    )
    for index, (key, value) in enumerate(layers):
        into_key, into_value = _floats(cache, index)
        page, position = _places(into_key, table, 0, tokens)
        into_key[page, position] = key.transpose(0, 1).to(into_key.dtype)
        into_value[page, position] = value.transpose(0, 1).to(into_value.dtype)
    return cache, table


def from_pages(cache: PagedCache, table: BlockTable, tokens: int, first_token: int = 0) -> list[LayerKV]:
    """Tokens [first_token, tokens) of every layer in ascending order: contiguous fp32 [kv_heads, tokens - first_token, head_dim].

    Raises PagesDoNotFit.
    """
    contiguous = []
    for index in sorted(cache.layers):
        sides = _floats(cache, index)
        page, position = _places(sides[0], table, first_token, tokens)
        key, value = (side[page, position].transpose(0, 1).float().contiguous() for side in sides)
        contiguous.append((key, value))
    return contiguous


def _floats(cache: PagedCache, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's K and V pages, [pages, block_size, heads, dim]. Raises PagesDoNotFit where they are not both floats of this shape."""
    pages = cache.layers[index]
    if not isinstance(pages, LayerPages) or pages.value is None or pages.key.dim() != 4:
        raise PagesDoNotFit(f"layer {index} is not pages of floats")
    return pages.key, pages.value


def _places(pages: torch.Tensor, table: BlockTable, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    if table.block_size != pages.shape[1]:
        raise PagesDoNotFit(f"a block table of {table.block_size} tokens a page for pages of {pages.shape[1]}")
    page, position = table.locate(first, end, pages.shape[0])
    return torch.from_numpy(page), torch.from_numpy(position)


def through_vectors(vectors: torch.Tensor, codec: SlotCodec, side: str, element: Element) -> torch.Tensor:
    """What the reference's encoder and decoder leave of vectors, fp32 [..., head_dim]: rounded to `element` before and after.

    side: "key" or "value". Independent of pages, blocks and tags.
    """
    import torch

    coding = codec.key if side == "key" else codec.value
    plain = reference.to_float(reference.from_float(vectors.float().contiguous().numpy(), element), element)
    codes, scalars = reference.encode(plain, coding, 1.0)
    decoded = reference.decode(codes, scalars, coding, plain.shape[-1], 1.0)
    return torch.from_numpy(reference.to_float(reference.from_float(decoded, element), element).copy())


def through_codec(
    cache: PagedCache,
    table: BlockTable,
    tokens: int,
    codec: str,
    *,
    per_layer: Mapping[int, str] | None = None,
) -> list[LayerKV]:
    """What a hand-off of this cache has to give, computed without wire and pages: the reference's encode and decode of each vector.

    codec, per_layer: as for `model.manifest_for`. Returns contiguous fp32 [kv_heads, tokens, head_dim] by layer, whose values
    are those of the pages' type. Raises UnknownCodec, NotCarried, PagesDoNotFit.
    """
    element, per_layer = cache.element(), per_layer or {}
    out = []
    for index, (key, value) in zip(sorted(cache.layers), from_pages(cache, table, tokens), strict=True):
        slots = declared(per_layer.get(index, codec)).for_layer(key.shape[-1], element)
        out.append((through_vectors(key, slots, "key", element), through_vectors(value, slots, "value", element)))
    return out
