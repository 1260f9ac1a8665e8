"""The Device protocol: what a backend must offer, and the registry that finds backends.

A backend is one folder under `backends/` (or an installed package) that names itself in the entry point group `kvbridge.devices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

import numpy as np

from bridge.errors import KVBridgeError
from bridge.pages import BlockTable, PagedCache
from bridge.wire import LayerSpan, SlotCodec, TagKeys


class DeviceError(KVBridgeError):
    """A device cannot do what it was asked for."""

    clause = "device"


class UnknownDevice(DeviceError):
    """No backend of that name is installed."""

    clause = "unknown_device"


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
