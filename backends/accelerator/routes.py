"""Which way a layer's pages go: through a shared kernel, by moving rows of equal coding, or through the reference on the host.

kernels   float pages [page, token, head, dim] and vLLM slots, the codecs of TurboQuant, fp8 and raw: one launch for many layers;
          slots also from raw elements, which are coded on the way
rows      pages that hold what the wire carries (latents, states, opaque rows, tiles, any head dimension): torch moves rows, a kernel
          makes or checks the tags
host      everything else that the reference can convert: right, and slow
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from backends.kernels.plan import HEAD_DIMS
from bridge.devices import SpanShare
from bridge.pages import LayerDescription, LayerPages, PageSide, SlotPages
from bridge.wire import Coding, CodingKind, Element, SlotCodec

Way = Literal["pages", "slots", "recode", "rows", "host"]
_FLOATS = (Element.BF16, Element.FP16, Element.FP32)


@dataclass(frozen=True)
class Route:
    """How one layer's pages go.

    tensors: (K, V) for "pages", one tensor of whole slots for "slots" and "recode", none otherwise. codec, head_dim: as the kernel is
    told, which may be a view of the same bytes under another name, and the slots' for "recode", whose payload has raw elements.
    scales: of the wire's fp8 sides, page_scales: of fp8 pages; None: no multiplication.
    why: in a few words, where it is not a kernel. alike: equal for layers that may share a launch.
    """

    way: Way
    codec: SlotCodec
    head_dim: int
    tensors: tuple[torch.Tensor, ...] = ()
    scales: tuple[float, float] | None = None
    page_scales: tuple[float, float] | None = None
    why: str = ""

    @property
    def alike(self) -> tuple:
        layouts = tuple((tuple(t.shape), t.stride(), t.dtype) for t in self.tensors)
        return self.way, self.codec, self.head_dim, layouts, self.scales is None, self.page_scales is None


def route(layer: LayerDescription, share: SpanShare, landing: bool) -> Route:
    """The fastest way that gives the reference's bytes. Whether pages and share go together at all is checked elsewhere."""
    slots = _slots(layer, share) or (_recoded(layer, share) if landing else None)
    if slots is not None:
        return slots
    floats = _floats(layer, share, landing)
    if isinstance(floats, Route):
        return floats
    same = [_same(side, coding, scale) for side, coding, scale in _sides(layer, share)]
    if all(same):
        return _renamed(layer, share) or Route("rows", share.codec, share.head_dim, why=floats)
    return Route("host", share.codec, share.head_dim, why=floats)


def _sides(layer: LayerDescription, share: SpanShare) -> list[tuple[PageSide | None, Coding, float]]:
    return list(zip(layer.sides, (share.codec.key, share.codec.value), (share.key_scale, share.value_scale), strict=True))


def _same(side: PageSide | None, coding: Coding, scale: float) -> bool:
    """Whether the pages hold the wire's bytes."""
    if side is None:
        return coding.kind is CodingKind.NONE
    return side.coding == coding and not side.folded and (side.scale == scale or not coding.scaled)


def _slots(layer: LayerDescription, share: SpanShare) -> Route | None:
    """vLLM's slots in rows, of the wire's own preset: K codes, K scalars, V codes, V scalars one after another."""
    if not isinstance(layer, SlotPages) or share.head_dim not in HEAD_DIMS:
        return None
    codec = share.codec
    if codec.key.kind not in (CodingKind.FP8, CodingKind.CODEBOOK) or codec.value.kind is not CodingKind.AFFINE:
        return None
    if not all(_same(side, coding, scale) for side, coding, scale in _sides(layer, share)):
        return None
    whole = _whole_slots(layer, codec)
    return None if whole is None else Route("slots", codec, share.head_dim, (whole,))


def _recoded(layer: LayerDescription, share: SpanShare) -> Route | None:
    """Raw elements into vLLM's slots in rows: coded on the way."""
    wire = share.codec
    if not isinstance(layer, SlotPages) or share.head_dim not in HEAD_DIMS:
        return None
    if wire.key.kind is not CodingKind.RAW or wire.value != wire.key or wire.key.element not in _FLOATS:
        return None
    key, value = layer.sides
    if key.folded or key.coding.kind not in (CodingKind.FP8, CodingKind.CODEBOOK) or value.coding.kind is not CodingKind.AFFINE:
        return None
    if key.coding.scaled and (key.scale != 1.0 or key.coding.element is not Element.E4M3FN):
        return None
    codec = SlotCodec(key.coding, value.coding)
    whole = _whole_slots(layer, codec)
    return None if whole is None else Route("recode", codec, share.head_dim, (whole,))


def _whole_slots(layer: SlotPages, codec: SlotCodec) -> torch.Tensor | None:
    """u8 [page, token, head, bytes] where K codes, K scalars, V codes and V scalars follow one another, on even addresses."""
    key, value = layer.sides
    parts = [part for part in (key.codes, key.scalars, value.codes, value.scalars) if part is not None]
    at, start = key.codes.data_ptr(), key.codes.data_ptr()
    for part in parts:
        if part.data_ptr() != at or part.stride() != key.codes.stride() or part.stride(3) != 1:
            return None
        at += part.shape[3]
    if at - start != codec.slot_bytes(layer.head_dim) or (start | at - start | key.codes.stride(0)) % 2:
        return None
    if (key.codes.stride(1) | key.codes.stride(2)) % 2:
        return None
    return torch.as_strided(key.codes, (*key.codes.shape[:3], at - start), key.codes.stride(), key.codes.storage_offset())


def _floats(layer: LayerDescription, share: SpanShare, landing: bool) -> Route | str:
    """Float pages through the pack and land kernels, or why not."""
    codec = share.codec
    if not isinstance(layer, LayerPages):
        return "slots or opaque rows that are not the payload's own coding"
    if layer.value is None:
        return "one vector a token"
    if layer.key.dim() != 4 or layer.value.dim() != 4:
        return "tiles"
    if share.head_dim not in HEAD_DIMS:
        return f"head dimension {share.head_dim}"
    unfit = _unfit(layer.key, layer.value)
    if unfit:
        return unfit
    element = layer.sides[0].coding.element
    for side, allowed in (
        (codec.key, (CodingKind.RAW, CodingKind.FP8, CodingKind.CODEBOOK)),
        (codec.value, (CodingKind.RAW, CodingKind.FP8, CodingKind.AFFINE)),
    ):
        if side.kind not in allowed:
            return f"codec side {side.kind.name}"
        if side.kind is CodingKind.RAW and side.element is not element:
            return f"raw {side.element.name} and pages of {element.name}"
    wire = (share.key_scale if codec.key.scaled else 1.0, share.value_scale if codec.value.scaled else 1.0)
    scales = None if wire == (1.0, 1.0) else wire
    tensors = (layer.key, layer.value)
    if element in _FLOATS:
        return Route("pages", codec, share.head_dim, tensors, scales)
    if not landing:
        return "packing fp8 pages"
    held = (layer.key_scale, layer.value_scale)
    copied = [side.kind is CodingKind.FP8 and a == b for side, a, b in zip((codec.key, codec.value), wire, held, strict=True)]
    moved = [copy or (a == b == 1.0) for copy, a, b in zip(copied, wire, held, strict=True)]
    if all(moved):
        return Route("pages", codec, share.head_dim, tensors)
    if any(copied):
        return "fp8 pages of which only one side keeps its scale"
    return Route("pages", codec, share.head_dim, tensors, scales, None if held == (1.0, 1.0) else held)


def _unfit(key: torch.Tensor, value: torch.Tensor) -> str:
    size = key.element_size()
    if key.shape != value.shape or key.stride() != value.stride() or key.dtype != value.dtype:
        return "K and V pages of different layouts"
    if key.stride(3) != 1:
        return "vectors whose elements are apart"
    steps = [tensor.data_ptr() for tensor in (key, value)] + [stride * size for stride in key.stride()[:3]]
    if any(step % max(4, size) for step in steps):
        return "rows that do not begin on multiples of 4 bytes"
    return ""


def _renamed(layer: LayerDescription, share: SpanShare) -> Route | None:
    """Rows of equal coding as raw elements of a head dimension that the kernels have: the same bytes in the same planes."""
    if not isinstance(layer, LayerPages) or layer.value is None or layer.key.dim() != 4 or layer.value.dim() != 4:
        return None
    nbytes = share.head_dim * layer.key.element_size()
    named = {128: Element.BF16, 256: Element.BF16, 512: Element.BF16, 1024: Element.FP32}.get(nbytes)
    if named is None or _unfit(layer.key, layer.value):
        return None
    dtype = torch.bfloat16 if named is Element.BF16 else torch.float32
    try:
        tensors = (layer.key.view(dtype), layer.value.view(dtype))
    except RuntimeError:  # strides that are no whole number of the wider elements
        return None
    if _unfit(*tensors):
        return None
    raw = Coding(CodingKind.RAW, named.bits, named)
    return Route("pages", SlotCodec(raw, raw), 8 * nbytes // named.bits, tensors)
