"""The Device protocol: what a backend must offer, and the registry that finds backends.

A backend is one folder under `backends/` (or an installed package) that names itself in the entry point group `kvbridge.devices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, overload, runtime_checkable

import numpy as np

from bridge.errors import KVBridgeError
from bridge.pages import BlockTable, PagedCache
from bridge.wire import LayerSpan, SlotCodec, TagKeys

if TYPE_CHECKING:
    import torch

Buffer: TypeAlias = "np.ndarray | torch.Tensor"
"""A payload's bytes: u8 [n] of host memory as a NumPy array, or uint8 [n] of a device's own memory as a torch tensor."""


class DeviceError(KVBridgeError):
    """A device cannot do what it was asked for."""

    clause = "device"


class UnknownDevice(DeviceError):
    """No backend of that name is installed."""

    clause = "unknown_device"


class SpanShare(NamedTuple):
    """The part of one span that a device packs or lands: some of its heads, and where their runs lie in a buffer.

    head_first, head_count: heads of the span (0 is the payload's first). offset: byte of the buffer at which the first run begins.
    model_layer, model_head: the layer's number in the model, and the model's kv head that `head_first` is.
    """

    span: LayerSpan
    codec: SlotCodec
    model_layer: int
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
        return self.span._replace(heads=self.head_count, offset=self.offset, first_ordinal=self.span.first_ordinal + skipped)


@dataclass(frozen=True, eq=False)
class HeldLayers:
    """Layers of one codec and group that one of a rank's caches holds with equally many kv heads. The same object for every request.

    holder: the cache's number. kind: theirs among the LayerKinds of the manifest's layers. within: int64 [n], their places among the
    layers of that kind; None: all of them. layers: int64 [n], their positions in the manifest's table. model_layers: their numbers in the
    model. key_scales, value_scales: theirs. first_head, end_head: the model's kv heads that the cache has of them.
    """

    holder: int
    kind: int
    within: np.ndarray | None
    layers: np.ndarray
    model_layers: tuple[int, ...]
    key_scales: tuple[float, ...]
    value_scales: tuple[float, ...]
    first_head: int
    end_head: int


@dataclass(frozen=True, eq=False)
class ShareColumn:
    """Shares of one chunk that are alike but for their layer and where they lie.

    like: the first of them. held: their layers. payload_offsets, ordinals, offsets: int64 [n], their spans' `offset` and `first_ordinal`,
    and their own `offset`.
    """

    like: SpanShare
    held: HeldLayers
    payload_offsets: np.ndarray
    ordinals: np.ndarray
    offsets: np.ndarray

    def __iter__(self) -> Iterator[SpanShare]:
        like, span, held = self.like, self.like.span, self.held
        rows = zip(held.layers.tolist(), self.payload_offsets.tolist(), self.ordinals.tolist(), self.offsets.tolist(), strict=True)
        for place, (layer, payload_offset, ordinal, offset) in enumerate(rows):
            yield like._replace(
                span=span._replace(layer=layer, offset=payload_offset, first_ordinal=ordinal),
                model_layer=held.model_layers[place],
                offset=offset,
                key_scale=held.key_scales[place],
                value_scale=held.value_scales[place],
            )


class Shares(Sequence[SpanShare]):
    """Shares in the order of their offsets. Devices that know `columns` need not look at them one by one."""

    def __init__(self, columns: Sequence[ShareColumn]) -> None:
        self.columns = tuple(columns)

    @cached_property
    def _each(self) -> list[SpanShare]:
        found = [share for column in self.columns for share in column]
        return found if len(self.columns) == 1 else sorted(found, key=lambda share: share.offset)

    def __len__(self) -> int:
        return sum(len(column.offsets) for column in self.columns)

    @overload
    def __getitem__(self, place: int) -> SpanShare: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[SpanShare]: ...
    def __getitem__(self, place: int | slice) -> SpanShare | Sequence[SpanShare]:
        return self._each[place]


class StagingMemory(Protocol):
    """Memory that transfers and copies read and write: the host's, pinned where the device has a notion of it, or a device's own.

    device, index: where it is, as bridge.transfer.agent.Memory says it: "cpu", or a device type and the ordinal.
    """

    @property
    def device(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def bytes(self) -> Buffer:
        """u8 [nbytes], a view."""
        ...


@runtime_checkable
class Device(Protocol):
    """What a backend offers. All methods may be called from any thread; `pack` and `land` return when their bytes are final."""

    name: str

    def probe(self) -> str:
        """One sentence: what this device is. Raises DeviceError, with what is missing, where it cannot work."""
        ...

    def allocate_staging(self, nbytes: int) -> StagingMemory:
        """Host memory."""
        ...

    def pack(self, cache: PagedCache, table: BlockTable, shares: Sequence[SpanShare], keys: TagKeys, out: Any) -> None:
        """Writes the runs of `shares`, tags included, into `out` (a Buffer): every byte of every run, and none outside.

        Every device takes host memory; a DeviceWithMemory takes its own as well.

        Raises PagesDoNotFit.
        """
        ...

    def land(
        self,
        cache: PagedCache,
        table: BlockTable,
        shares: Sequence[SpanShare],
        keys: TagKeys,
        data: Any,
        write_first: int,
        write_end: int,
    ) -> None:
        """Verifies whole blocks of `data` (a Buffer), then writes their tokens within [write_first, write_end) into the pages.

        Raises BadTag or DirtyPadding (nothing of the failing share is written) and PagesDoNotFit.
        """
        ...


@runtime_checkable
class DeviceWithMemory(Device, Protocol):
    """A device whose pages are in memory of its own, and whose work is queued: what it offers beside.

    memory: its type as transfer agents name it, such as "cuda". `pack` and `land` also take after=, a mark of the engine's.
    """

    memory: str
    index: int

    def allocate_memory(self, nbytes: int) -> StagingMemory:
        """Staging in the device's own memory. Raises DeviceError where there is not enough."""
        ...

    def attach(self) -> None:
        """Makes the device the calling thread's, for transfer libraries that ask for that."""
        ...

    def mark(self) -> object:
        """The point that the engine's work has reached on the calling thread's queue."""
        ...


@runtime_checkable
class PlansLandings(Protocol):
    """A device that can work out a landing before its bytes are there. Not a part of DeviceWithMemory: a device may be that without it."""

    def landing(
        self,
        cache: PagedCache,
        table: BlockTable,
        shares: Sequence[SpanShare],
        keys: TagKeys,
        nbytes: int,
        memory: str,
        write_first: int,
        write_end: int,
        after: Any = None,
    ) -> Callable[[Any], None]:
        """`land` in two steps: everything that can be checked and worked out before the bytes are there; the returned call does the rest.

        nbytes, memory: of the Buffer that the call will be given: its size, and where it lies, as StagingMemory.device says. Pages are
        neither read nor written before that call: a plan may still be at work when its hand-off has failed. Raises PagesDoNotFit at once,
        or in the call for another buffer than was announced; BadTag and DirtyPadding in the call.

        Planned on the decoder's event loop, so this must not wait for other threads or for the engine's work. The call is made on another
        thread, unless it has a method `short` that, asked just before, says that it will neither wait, nor compile, nor convert on the
        host.
        """
        ...


def engine_order(device: Device) -> dict[str, Any]:
    """What to give `pack` or `land` from another thread, so that they begin after what the calling thread's engine has queued by now."""
    return {"after": device.mark()} if isinstance(device, DeviceWithMemory) else {}


ENTRY_POINTS = "kvbridge.devices"


def device_names() -> list[str]:
    """Names of the registered backends."""
    return sorted(point.name for point in entry_points(group=ENTRY_POINTS))


def is_device_name(name: str) -> bool:
    """Whether this may be the name of a registered backend's device: whether the device is there is not looked at."""
    kind, _, ordinal = name.partition(":")
    return kind in device_names() and (not ordinal or ordinal.isdecimal())


def open_device(name: str) -> Device:
    """The registered backend of this name, such as "cpu" or "cuda"; with ":1" behind it, the second device of that kind.

    Raises UnknownDevice, or the backend's own DeviceError where its packages or the device are missing.
    """
    kind, _, ordinal = name.partition(":")
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == kind and is_device_name(name):
            made = point.load()
            if not ordinal:
                return made()
            if "index" in signature(made).parameters:
                return made(int(ordinal))
    raise UnknownDevice(f"no device named {name!r} is installed", remedy=f"the installed ones are {', '.join(device_names())}")
