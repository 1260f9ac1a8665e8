"""How an engine's paged cache is described: strided views on its own memory, and what the bytes of each side mean.

Every layout is one description: NHD and HND, K and V apart or in one tensor, tiles, TurboQuant slots with their fields in one row or in
regions of a page. A device sees, for each side of a layer, a coding, a view of its codes and a view of its scalars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bridge.codecs.declared import DeclaredCodec
from bridge.errors import KVBridgeError
from bridge.wire import Coding, CodingKind, Element, SlotCodec
from bridge.wire.coding import opaque

if TYPE_CHECKING:
    import torch


class PagesDoNotFit(KVBridgeError):
    """The described pages cannot hold, or do not contain, what was asked for."""

    clause = "pages_do_not_fit"
    remedy = "check the block table, the block size and the layers that were described"


_ELEMENTS = {
    "torch.bfloat16": Element.BF16,
    "torch.float16": Element.FP16,
    "torch.float32": Element.FP32,
    "torch.float8_e4m3fn": Element.E4M3FN,
}


@dataclass(frozen=True)
class PageSide:
    """K or V of one layer.

    coding: what the pages hold. codes: elements [num_pages, block_size, kv_heads, head_dim] (RAW, FP8), bytes
    [num_pages, block_size, kv_heads, code bytes] (all others), or tiles of elements, six-dimensional:
    [num_pages, block_size / t, t, kv_heads, head_dim / d, d]. scalars: bytes [num_pages, block_size, kv_heads, scalar bytes], or None.
    scale: what a decoded fp8 element is multiplied with. folded: the norm was divided by the code book vector's when it was stored.
    """

    coding: Coding
    codes: torch.Tensor
    scalars: torch.Tensor | None = None
    scale: float = 1.0
    folded: bool = False

    @cached_property
    def tiled(self) -> bool:
        return self.codes.dim() == 6

    @cached_property
    def num_pages(self) -> int:
        return self.codes.shape[0]

    @cached_property
    def block_size(self) -> int:
        """Tokens of a page."""
        return self.codes.shape[1] * self.codes.shape[2] if self.tiled else self.codes.shape[1]

    @cached_property
    def heads(self) -> int:
        return self.codes.shape[3 if self.tiled else 2]

    def narrow(self, first: int, count: int) -> PageSide:
        """The same pages with only `count` kv heads from `first` on: views."""
        scalars = self.scalars.narrow(2, first, count) if self.scalars is not None else None
        return replace(self, codes=_narrow(self.codes, first, count), scalars=scalars)


def _narrow(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    return tensor.narrow(3 if tensor.dim() == 6 else 2, first, count)


class LayerDescription(Protocol):
    """One layer's pages, of any kind."""

    @property
    def sides(self) -> tuple[PageSide, PageSide | None]:
        """K, and V or None where there is one vector a token."""
        ...

    @property
    def head_dim(self) -> int: ...


def element_of(tensor: torch.Tensor) -> Element:
    """The element type of float pages. Raises PagesDoNotFit."""
    element = _ELEMENTS.get(str(tensor.dtype))
    if element is None:
        raise PagesDoNotFit(f"pages of type {tensor.dtype} are not bfloat16, float16, float32 or float8_e4m3fn")
    return element


def _plain(element: Element) -> Coding:
    return Coding(CodingKind.FP8 if element is Element.E4M3FN else CodingKind.RAW, element.bits, element)


@dataclass(frozen=True)
class LayerPages:
    """K and V of one layer as floats.

    key, value: tensors of one dtype with any strides, [num_pages, block_size, kv_heads, head_dim], or tiles (see PageSide). value is
    None for latents. key_scale, value_scale: of float8_e4m3fn pages, as the engine keeps them.
    """

    key: torch.Tensor
    value: torch.Tensor | None
    key_scale: float = 1.0
    value_scale: float = 1.0

    def __post_init__(self) -> None:
        for side in (self.key, self.value):
            if side is not None and side.dim() not in (4, 6):
                raise PagesDoNotFit(f"pages of shape {tuple(side.shape)} have neither four dimensions nor, as tiles, six")
        key, value = self.sides
        same = value is None or (
            (key.num_pages, key.block_size, key.heads) == (value.num_pages, value.block_size, value.heads)
            and key.coding == value.coding
            and _vector_length(key.codes) == _vector_length(value.codes)
        )
        if not same:
            shapes = f"{tuple(self.key.shape)} {self.key.dtype} and value pages {tuple(self.value.shape)} {self.value.dtype}"  # type: ignore[union-attr]
            raise PagesDoNotFit(f"key pages {shapes} are not alike")

    @classmethod
    def nhd(cls, key: torch.Tensor, value: torch.Tensor, key_scale: float = 1.0, value_scale: float = 1.0) -> LayerPages:
        """From tensors [num_pages, block_size, kv_heads, head_dim]: tokens outside heads."""
        return cls(key, value, key_scale, value_scale)

    @classmethod
    def hnd(cls, key: torch.Tensor, value: torch.Tensor, key_scale: float = 1.0, value_scale: float = 1.0) -> LayerPages:
        """From tensors [num_pages, kv_heads, block_size, head_dim]: heads outside tokens."""
        return cls(key.transpose(1, 2), value.transpose(1, 2), key_scale, value_scale)

    @cached_property
    def sides(self) -> tuple[PageSide, PageSide | None]:
        coding = _plain(element_of(self.key))
        key = PageSide(coding, self.key, scale=self.key_scale)
        if self.value is None:
            return key, None
        return key, PageSide(_plain(element_of(self.value)), self.value, scale=self.value_scale)

    @property
    def block_size(self) -> int:
        """Tokens of a page."""
        return self.sides[0].block_size

    @property
    def heads(self) -> int:
        return self.sides[0].heads

    @cached_property
    def head_dim(self) -> int:
        return _vector_length(self.key)

    def narrow(self, first: int, count: int) -> LayerPages:
        """The same pages with only `count` kv heads from `first` on: views."""
        value = _narrow(self.value, first, count) if self.value is not None else None
        return replace(self, key=_narrow(self.key, first, count), value=value)


def _vector_length(tensor: torch.Tensor) -> int:
    return tensor.shape[4] * tensor.shape[5] if tensor.dim() == 6 else tensor.shape[3]


@dataclass(frozen=True)
class SlotPages:
    """Coded slots, as vLLM keeps TurboQuant caches.

    sides: K and V. Make them with `rows` (each slot contiguous: K codes, K scalars, V codes, V scalars) or `regions`.
    """

    sides: tuple[PageSide, PageSide]
    head_dim: int

    @classmethod
    def rows(cls, slots: torch.Tensor, codec: DeclaredCodec, head_dim: int) -> SlotPages:
        """From uint8 [num_pages, block_size, kv_heads, slot bytes], any strides: vLLM's slots on CUDA and XPU. Raises PagesDoNotFit."""
        layer = codec.for_layer(head_dim, Element.BF16)
        if slots.dim() != 4 or slots.shape[3] < layer.slot_bytes(head_dim):
            raise PagesDoNotFit(f"slots of shape {tuple(slots.shape)} do not hold {layer.slot_bytes(head_dim)} bytes of {codec.name}")
        made, offset = [], 0
        for side in (layer.key, layer.value):
            codes, scalars = side.code_bytes(head_dim), side.scalar_bytes()
            cut = slots[..., offset : offset + codes], slots[..., offset + codes : offset + codes + scalars]
            made.append(PageSide(side, cut[0], cut[1] if scalars else None))
            offset += codes + scalars
        return cls((made[0], made[1]), head_dim)

    @classmethod
    def regions(cls, pages: torch.Tensor, codec: DeclaredCodec, head_dim: int, block_size: int, heads: int) -> SlotPages:
        """From uint8 [num_pages, bytes of a page]: vLLM's structure-of-arrays flavour, whose norms are folded.

        A page is [block_size, heads, K codes and V codes], then fp16 [heads, fields, block_size] with the fields K norm (of rotated keys
        only), V scale, V zero. Raises PagesDoNotFit.
        """
        layer = codec.for_layer(head_dim, Element.BF16)
        row = layer.key.code_bytes(head_dim) + layer.value.code_bytes(head_dim)
        fields = (layer.key.scalar_bytes() + layer.value.scalar_bytes()) // 2
        data = block_size * heads * row
        if pages.dim() != 2 or pages.shape[1] < data + 2 * heads * fields * block_size:
            raise PagesDoNotFit(f"pages of shape {tuple(pages.shape)} do not hold {block_size} tokens of {heads} heads of {codec.name}")
        codes = pages[:, :data].unflatten(1, (block_size, heads, row))
        # [pages, heads, fields, tokens, bytes of one fp16] -> [pages, tokens, heads, fields, bytes]
        meta = pages[:, data : data + 2 * heads * fields * block_size].unflatten(1, (heads, fields, block_size, 2)).permute(0, 3, 1, 2, 4)
        split, norms = layer.key.code_bytes(head_dim), layer.key.scalar_bytes() // 2
        key = PageSide(layer.key, codes[..., :split], meta[..., :norms, :] if norms else None, folded=norms > 0)
        value = PageSide(layer.value, codes[..., split:], meta[..., norms:, :])
        return cls((key, value), head_dim)

    def narrow(self, first: int, count: int) -> SlotPages:
        """The same pages with only `count` kv heads from `first` on: views."""
        return SlotPages((self.sides[0].narrow(first, count), self.sides[1].narrow(first, count)), self.head_dim)


@dataclass(frozen=True)
class OpaquePages:
    """Bytes of a declared meaning: uint8 [num_pages, block_size, kv_heads, bytes a token], any strides.

    A state (Mamba and the like) is pages of sixteen rows, one page a request: [states, heads, bytes] seen as
    [states, 16, heads, bytes / 16].
    head_dim: as the manifest's group says; it does not matter to the bytes.
    """

    tensor: torch.Tensor
    meaning: str
    head_dim: int = 16

    @cached_property
    def sides(self) -> tuple[PageSide, None]:
        return PageSide(opaque(self.meaning, self.tensor.shape[3]), self.tensor), None

    def narrow(self, first: int, count: int) -> OpaquePages:
        """The same pages with only `count` kv heads from `first` on: views."""
        return replace(self, tensor=_narrow(self.tensor, first, count))


@dataclass(frozen=True)
class PagedCache:
    """An engine's paged cache, or one rank's share of it.

    layers: the pages by layer index of the model. first_head: the model's kv head that is head 0 of these pages.
    """

    layers: Mapping[int, LayerPages | SlotPages | OpaquePages]
    first_head: int = 0

    def element(self) -> Element:
        """The element type of all pages, where all are floats. Raises PagesDoNotFit."""
        found = {pages.sides[0].coding.element for pages in self.layers.values()}
        if len(found) != 1 or Element.NONE in found:
            raise PagesDoNotFit(f"pages of {', '.join(sorted(e.name for e in found))} are not all of one float type")
        return found.pop()

    def part(self, layers: Sequence[int], first_head: int, head_count: int) -> PagedCache:
        """Some layers and some of the model's kv heads: what a rank takes from one of several payloads. Views, no copy.

        Raises PagesDoNotFit where these pages lack a layer or a head of it.
        """
        first, found = first_head - self.first_head, {}
        for index in layers:
            pages = self.layers.get(index)
            heads = pages.sides[0].heads if pages is not None else 0
            if pages is None or first < 0 or head_count < 1 or first + head_count > heads:
                raise PagesDoNotFit(f"layer {index} has no kv heads {first_head} to {first_head + head_count - 1} here")
            found[index] = pages if head_count == heads else pages.narrow(first, head_count)
        return PagedCache(found, first_head)


@dataclass(frozen=True)
class BlockTable:
    """Where a request's tokens lie: token t is in page `pages[t // block_size]`, at position t % block_size.

    pages: page ids from token 0 on; entries of tokens that are never touched may be anything. Raises PagesDoNotFit for what is no list of
    numbers.
    """

    pages: Sequence[int]
    block_size: int
    _array: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        array = np.asarray(self.pages, dtype=np.int64)
        if array.ndim != 1 or self.block_size < 1:
            raise PagesDoNotFit(f"a block table is one list of page ids, not {array.ndim} deep, with blocks of {self.block_size} tokens")
        object.__setattr__(self, "_array", array)

    @property
    def array(self) -> np.ndarray:
        """int64: the page ids."""
        return self._array

    @classmethod
    def of_state(cls, page: int, end_token: int) -> BlockTable:
        """The table of a state that has seen tokens [0, end_token): it lies in page `page` of its OpaquePages."""
        return cls([page] * (-(-end_token // 16)), 16)

    def check(self, first: int, end: int, num_pages: int) -> None:
        """Raises PagesDoNotFit where the table is too short for tokens [first, end), or names a page outside 0..num_pages - 1 for them."""
        if first < 0:
            raise PagesDoNotFit(f"there is no token {first}")
        if end > self._array.size * self.block_size:
            raise PagesDoNotFit(f"a block table of {self._array.size} pages of {self.block_size} tokens does not reach token {end - 1}")
        used = self._array[first // self.block_size : -(-end // self.block_size)]
        if first < end and (used.min() < 0 or used.max() >= num_pages):
            raise PagesDoNotFit(f"a block table names pages {used.min()} to {used.max()}, the cache has {num_pages}")

    def locate(self, first: int, end: int, num_pages: int) -> tuple[np.ndarray, np.ndarray]:
        """(page ids, positions), int64 [end - first] each, of tokens [first, end). Raises PagesDoNotFit, see `check`."""
        self.check(first, end, num_pages)
        tokens = np.arange(first, end, dtype=np.int64)
        return self._array[tokens // self.block_size], tokens % self.block_size


@dataclass(frozen=True)
class CacheGroup:
    """One KV group of an engine: the layers that share a block table."""

    cache: PagedCache
    table: BlockTable


def coded_as(pages: LayerPages | SlotPages | OpaquePages) -> SlotCodec:
    """The codec that carries these pages without loss: what `raw` means for them."""
    key, value = pages.sides
    return SlotCodec(key.coding, value.coding if value is not None else Coding(CodingKind.NONE))
