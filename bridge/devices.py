"""The Device protocol: what a backend must offer, how an engine's pages are described, and the registry that finds backends.

A backend is one folder under `backends/` (or an installed package) that names itself in the entry point group `kvbridge.devices`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from bridge.errors import KVBridgeError
from bridge.wire import Element, LayerSpan, SlotCodec, TagKeys

if TYPE_CHECKING:
    import torch


class DeviceError(KVBridgeError):
    """A device cannot do what it was asked for."""

    clause = "device"


class UnknownDevice(DeviceError):
    """No backend of that name is installed."""

    clause = "unknown_device"


class PagesDoNotFit(DeviceError):
    """The described pages cannot hold, or do not contain, what was asked for."""

    clause = "pages_do_not_fit"
    remedy = "check the block table, the block size and the layers that were described"


@dataclass(frozen=True)
class LayerPages:
    """K and V of one layer of a paged cache, as views on the engine's own memory.

    key, value: tensors [num_pages, block_size, kv_heads, head_dim] of the same dtype (bfloat16, float16 or float32) with any strides,
    so NHD, HND, and K and V apart or packed are all the same description: views by `nhd`, `hnd` or the engine's own means.
    """

    key: torch.Tensor
    value: torch.Tensor

    def __post_init__(self) -> None:
        if self.key.shape != self.value.shape or self.key.dtype != self.value.dtype or self.key.dim() != 4:
            raise PagesDoNotFit(
                f"key pages {tuple(self.key.shape)} {self.key.dtype} and value pages {tuple(self.value.shape)} {self.value.dtype} "
                "must be alike and have four dimensions"
            )

    @classmethod
    def nhd(cls, key: torch.Tensor, value: torch.Tensor) -> LayerPages:
        """From tensors [num_pages, block_size, kv_heads, head_dim]: tokens outside heads."""
        return cls(key, value)

    @classmethod
    def hnd(cls, key: torch.Tensor, value: torch.Tensor) -> LayerPages:
        """From tensors [num_pages, kv_heads, block_size, head_dim]: heads outside tokens."""
        return cls(key.transpose(1, 2), value.transpose(1, 2))

    @property
    def block_size(self) -> int:
        """Tokens of a page."""
        return self.key.shape[1]

    @property
    def heads(self) -> int:
        return self.key.shape[2]

    @property
    def head_dim(self) -> int:
        return self.key.shape[3]


@dataclass(frozen=True)
class PagedCache:
    """An engine's paged cache, or one rank's share of it.

    layers: the pages by layer index of the model. first_head: the model's kv head that is head 0 of these pages.
    """

    layers: Mapping[int, LayerPages]
    first_head: int = 0

    def element(self) -> Element:
        """The element type of all pages. Raises PagesDoNotFit if they differ or are of no type that can be read."""
        names = {str(layer.key.dtype) for layer in self.layers.values()}
        known = {"torch.bfloat16": Element.BF16, "torch.float16": Element.FP16, "torch.float32": Element.FP32}
        if len(names) != 1 or not names <= known.keys():
            raise PagesDoNotFit(f"pages of types {', '.join(sorted(names))} are not all bfloat16, float16 or float32")
        return known[names.pop()]


@dataclass(frozen=True)
class BlockTable:
    """Where a request's tokens lie: token t is in page `pages[t // block_size]`, at position t % block_size.

    pages: page ids from token 0 on; entries of tokens that are never touched may be anything.
    """

    pages: Sequence[int]
    block_size: int

    def locate(self, first: int, end: int, num_pages: int) -> tuple[np.ndarray, np.ndarray]:
        """(page ids, positions), int64 [end - first] each, of tokens [first, end).

        Raises PagesDoNotFit where the table is too short or names a page outside 0..num_pages - 1.
        """
        tokens = np.arange(first, end, dtype=np.int64)
        if end > len(self.pages) * self.block_size:
            raise PagesDoNotFit(f"a block table of {len(self.pages)} pages of {self.block_size} tokens does not reach token {end - 1}")
        table = np.asarray(self.pages, dtype=np.int64)
        pages = table[tokens // self.block_size]
        if pages.size and (pages.min() < 0 or pages.max() >= num_pages):
            raise PagesDoNotFit(f"a block table names pages {pages.min()} to {pages.max()}, the cache has {num_pages}")
        return pages, tokens % self.block_size


@dataclass(frozen=True)
class SpanShare:
    """The part of one span that a device packs or lands: some of its heads, and where their runs lie in a buffer.

    head_first, head_count: heads of the span (0 is the payload's first). offset: byte of the buffer at which the first run begins.
    model_head: the model's kv head that `head_first` is. index: the layer's number in the model.
    """

    span: LayerSpan
    codec: SlotCodec
    index: int
    head_dim: int
    head_first: int
    head_count: int
    model_head: int
    offset: int
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def nbytes(self) -> int:
        return self.head_count * self.span.run_bytes

    def as_span(self) -> LayerSpan:
        """The share as a span of its own, at its place in the buffer: the same blocks and masks, fewer heads."""
        skipped = self.head_first * self.span.blocks
        return replace(self.span, heads=self.head_count, offset=self.offset, first_ordinal=self.span.first_ordinal + skipped)


class StagingMemory(Protocol):
    """Host memory that transfers and copies read and write: pinned where the device has a notion of it."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def bytes(self) -> np.ndarray:
        """u8 [nbytes], a view."""
        ...


@runtime_checkable
class Device(Protocol):
    """What a backend offers. All methods may be called from any thread; `pack` and `land` return when their bytes are final."""

    name: str

    def probe(self) -> str:
        """One sentence: what this device is. Raises DeviceError, with what is missing, where it cannot work."""
        ...

    def allocate_staging(self, nbytes: int) -> StagingMemory: ...

    def pack(self, cache: PagedCache, table: BlockTable, shares: Sequence[SpanShare], keys: TagKeys, out: np.ndarray) -> None:
        """Writes the runs of `shares`, tags included, into `out` (u8): every byte of every run, and none outside.

        Raises PagesDoNotFit.
        """
        ...

    def land(
        self,
        cache: PagedCache,
        table: BlockTable,
        shares: Sequence[SpanShare],
        keys: TagKeys,
        data: np.ndarray,
        write_first: int,
        write_end: int,
    ) -> None:
        """Verifies whole blocks of `data` (u8), then writes their tokens within [write_first, write_end) into the pages.

        Raises BadTag or DirtyPadding (nothing of the failing share is written) and PagesDoNotFit.
        """
        ...


ENTRY_POINTS = "kvbridge.devices"


def device_names() -> list[str]:
    """Names of the registered backends."""
    return sorted(point.name for point in entry_points(group=ENTRY_POINTS))


def open_device(name: str) -> Device:
    """The registered backend of this name. Raises UnknownDevice, or the backend's own DeviceError where its packages are missing."""
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            return point.load()()
    raise UnknownDevice(f"no device named {name!r} is installed", remedy=f"the installed ones are {', '.join(device_names())}")
