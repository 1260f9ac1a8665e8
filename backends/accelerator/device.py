"""A torch accelerator as a device of the hand-off: the shared kernels where they apply, rows and the reference where they do not."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from backends.accelerator import masks, tags
from backends.accelerator.known import Known, Routes
from backends.accelerator.lanes import Lane, Lanes, new_stream
from backends.accelerator.rows import Place, land_on_host, pack_on_host, payload_to_rows, rows_to_payload
from backends.accelerator.work import WHOLE_SEQUENCE, Launch, Move, Piece, Work, arrange, gather, stretches, written
from backends.kernels import plan
from backends.kernels.land import land_pages
from backends.kernels.pack import pack_pages
from backends.kernels.plan import Pages, Slots, Span, Tuning
from backends.kernels.recode import recode_slots
from backends.kernels.slots import land_slots, pack_slots
from bridge.counters import Counters
from bridge.devices import Buffer, DeviceError, SpanShare
from bridge.pages import BlockTable, PagedCache, PagesDoNotFit
from bridge.wire import SlotCodec, TagKeys, verify_tags
from bridge.wire.errors import BadTag

_REMEMBERED_PAGES = 256
_MASKS, _TAGS = ("masks",), ("tags",)
"""Kernels that have been launched, and are so compiled."""
_LAUNCH_SECONDS = 0.001
"""Longer than any launch of another thread, and nothing to a compiler."""


@dataclass(frozen=True)
class Staging:
    """Staging memory in host memory or in the device's own. device, index: as bridge.transfer.agent.Memory names it."""

    tensor: torch.Tensor
    device: str = "cpu"
    index: int = 0

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.tensor.numel()

    def bytes(self) -> Buffer:
        return self.tensor.numpy() if self.device == "cpu" else self.tensor


@dataclass(frozen=True, eq=False)
class Planned:
    """A landing that waits for its bytes. short: whether calling it now will take no longer than its launches, see PlansLandings."""

    land: Callable[[Buffer], None]
    short: Callable[[], bool]

    def __call__(self, data: Buffer) -> None:
        self.land(data)


class Accelerator:
    """Packs and lands pages in the memory of one torch device; subclasses name the vendor.

    device: as torch names it. tuning: the launch parameters of a kernel ("pack", "land", "pack_slots", "land_slots") for a codec
    and a head dimension.
    piece_bytes, depth, lanes: a call whose buffer is host memory passes it through `depth` pieces of device memory of about `piece_bytes`,
    and at most `lanes` calls run at a time: together, the scratch that this device takes, unless one layer of a chunk has more.
    Buffers in the device's own memory need no scratch.

    Nothing blocks the engine's stream. A call waits, on streams of its own, for what the engine had queued at `after` (see `mark`) or,
    where none is given, on the calling thread's current stream; when it returns, its bytes are final.
    """

    exact = False
    finite_only = True
    """Codes are unspecified of vectors with infinities or NaN, of values whose least and greatest elements are zeros of both signs, and of
    rotated keys so short that their norm is 0."""
    name = "accelerator"
    tag_options: Mapping[str, int] = tags.OPTIONS
    mask_options: Mapping[str, int] = masks.OPTIONS
    host_masks = 1 << 12
    """So many masks of tags a call are made on the host; from there on a launch on the device is cheaper."""

    def __init__(
        self,
        device: torch.device | str,
        tuning: Callable[[str, SlotCodec, int], Tuning],
        *,
        piece_bytes: int = 32 << 20,
        depth: int = 2,
        lanes: int = 4,
    ) -> None:
        made = torch.device(device)
        self._module = torch.get_device_module(made)
        self.index = 0 if made.index is None else made.index
        self._device = made if made.type == "cpu" else torch.device(made.type, self.index)
        self.torch_device, self.memory = str(self._device), made.type
        self.counters = Counters()
        self._tuning = tuning
        self._piece_bytes = piece_bytes
        self.scratch_bytes = piece_bytes * depth * lanes
        self._lanes = Lanes(self._device, lanes, depth)
        self._planning = new_stream(self._device)
        self._routes = Routes(self._device)
        self._launching = threading.RLock()
        self._launched: set[tuple] = set()
        self._pages: OrderedDict[tuple, tuple[tuple, Pages | Slots]] = OrderedDict()

    # What the hand-off calls.

    def probe(self) -> str:
        return f"{self.torch_device} through torch, up to {self.scratch_bytes >> 20} MiB of scratch; {self.report()}"

    def report(self) -> str:
        """One sentence: which shares did not go through a kernel so far, and why."""
        counts = self.counters.snapshot()
        slow = [f"{counts[name]} by {name}" for name in sorted(counts) if name.startswith(("rows{", "host{"))]
        return f"not through a pack or land kernel so far: {', '.join(slow)}" if slow else "every share so far went through a kernel"

    def forget(self) -> None:
        """Lets go of pages that it remembers from earlier calls: before an engine gives its cache's memory back."""
        with self._launching:
            self._routes.forget()
            self._pages.clear()

    def attach(self) -> None:
        """Makes this device the calling thread's, which transfer libraries want of a thread that hands them device memory."""
        if self.memory != "cpu":
            self._module.set_device(self._device)
            self._module.current_stream(self._device)

    def mark(self) -> Any:
        """The point that the engine's work has reached on the calling thread's current stream: give it to pack or land as `after`.

        Raises DeviceError while that stream captures a graph.
        """
        capturing = getattr(self._module, "is_current_stream_capturing", None)
        if capturing is not None and self.memory != "cpu" and capturing():
            raise DeviceError(
                "a hand-off cannot be captured in a graph: the host decides in the middle of it whether tags are right",
                remedy="offer, advance and fetch outside the capture; replayed graphs may compute the pages",
            )
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def allocate_staging(self, nbytes: int) -> Staging:
        """Pinned host memory, zeros. torch may round the allocation up to a power of two. Raises DeviceError where there is not enough."""
        try:
            return Staging(torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self.memory != "cpu"))
        except RuntimeError as error:
            raise DeviceError(
                f"this host pins no {nbytes} bytes of memory for staging: {str(error)[:200]}",
                remedy="lower staging_bytes, or raise the limit on locked memory (ulimit -l)",
            ) from None

    def allocate_memory(self, nbytes: int) -> Staging:
        """The device's own memory. Raises DeviceError where there is not enough."""
        try:
            tensor = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            raise DeviceError(f"{self.torch_device} has no {nbytes} bytes for staging", remedy="lower staging_bytes") from None
        self.mark().synchronize()
        return Staging(tensor, self.memory, self.index)

    def pack(
        self, cache: PagedCache, table: BlockTable, shares: Sequence[SpanShare], keys: TagKeys, out: Buffer, after: Any = None
    ) -> None:
        """See bridge.devices.Device. out: host memory (NumPy) or this device's (torch). Raises PagesDoNotFit."""
        self._refuse(cache, shares)
        point = self.mark() if after is None else after
        buffer = self._buffer(out, writable=True)
        work = gather(cache, table, shares, self._routes, buffer.numel(), write=None)
        direct = _is_own(out, buffer) and _aligned(work)
        with self._lanes.taken() as lane, self._module.stream(lane.compute):
            lane.begin(point)
            for move in work.on_host:
                self._count(move)
                for share, known in move.each():
                    made = pack_on_host(known.layer, share, self._place(work, table, share, known, None), move.local, keys)
                    buffer[share.offset : share.offset + made.size].copy_(torch.from_numpy(made))
            if not work.moves:
                return
            arrange(work, table, keys, False, None if direct else self._piece_bytes, direct, self.host_masks)
            words = lane.upload(work.arguments)
            self._queue_masks(work, words)
            for number, piece in enumerate(work.pieces):
                payload = buffer
                if not direct:
                    payload = lane.slot(number, piece.nbytes)
                    lane.await_free(number, lane.compute)
                self._queue_pack(lane, work, piece, table, words, payload)
                if not direct:
                    lane.copies.wait_event(lane.event(lane.compute))
                    with self._module.stream(lane.copies):
                        for base, offset, nbytes in stretches(piece):
                            buffer[offset : offset + nbytes].copy_(payload[base : base + nbytes], non_blocking=True)
                    lane.free(number, lane.copies)

    def land(
        self,
        cache: PagedCache,
        table: BlockTable,
        shares: Sequence[SpanShare],
        keys: TagKeys,
        data: Buffer,
        write_first: int,
        write_end: int,
        after: Any = None,
    ) -> None:
        """See bridge.devices.Device. data: host memory (NumPy) or this device's (torch).

        All tags of a piece are verified by a launch of their own before the one that writes its pages is queued.
        """
        buffer = self._buffer(data, writable=False)
        self._landing(cache, table, shares, keys, buffer.numel(), _is_own(data, buffer), (write_first, write_end), after)(data)

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
    ) -> Planned:
        """See bridge.devices.PlansLandings. Waits for no other thread and compiles nothing."""
        own = memory == self.memory != "cpu"
        return self._landing(cache, table, shares, keys, nbytes, own, (write_first, write_end), after)

    def _landing(
        self,
        cache: PagedCache,
        table: BlockTable,
        shares: Sequence[SpanShare],
        keys: TagKeys,
        nbytes: int,
        own: bool,
        write: tuple[int, int],
        after: Any,
    ) -> Planned:
        """own: whether the buffer will be this device's memory, from a multiple of 16 bytes on."""
        self._refuse(cache, shares)
        point = self.mark() if after is None else after
        work = gather(cache, table, shares, self._routes, nbytes, write=write)
        direct = own and _aligned(work)
        if work.moves:
            arrange(work, table, keys, True, None if direct else self._piece_bytes, direct, self.host_masks)
        words, ready = self._words_of(work)
        land = partial(self._land, work, words, ready, table, keys, nbytes, write, point, direct)
        return Planned(land, partial(self._is_short, work, write, point))

    def _is_short(self, work: Work, write: tuple[int, int], point: Any) -> bool:
        """Whether a landing would wait for nothing: the engine, a lane, another thread's compiler or its own, a conversion on the host."""
        if work.on_host or work.stream is not None or not self._lanes.any_idle() or not point.query():
            return False
        for launch in [launch for piece in work.pieces for launch in piece.launches]:
            first, end = written(launch.moves[0].like, *write)
            if first < end and self._kind(launch, write) not in self._launched:
                return False
        if work.moves and _TAGS not in self._launched:
            return False
        if not self._launching.acquire(timeout=_LAUNCH_SECONDS):
            return False
        self._launching.release()
        return True

    def _words_of(self, work: Work) -> tuple[torch.Tensor, Any]:
        """A landing's arguments on the device, in memory of their own because plans may wait long, and the event when they are there."""
        arguments = work.arguments
        with self._module.stream(self._planning):
            words = torch.empty(arguments.words, dtype=torch.int64, device=self._device)
            if work.moves:
                # torch gives pinned memory out again only when the copies that were queued from it are done.
                held = torch.empty(arguments.words - arguments.reserved, dtype=torch.int64, pin_memory=self.memory != "cpu")
                arguments.write(held)
                words[arguments.reserved :].copy_(held, non_blocking=True)
                # Otherwise when it lands: the kernel may have to be compiled, or another thread compiles one.
                if work.stream is not None and _MASKS in self._launched and self._launching.acquire(timeout=_LAUNCH_SECONDS):
                    try:
                        self._queue_masks(work, words)
                    finally:
                        self._launching.release()
            ready = self._module.Event()
            ready.record(self._planning)
        return words, ready

    def _land(
        self,
        work: Work,
        words: torch.Tensor,
        ready: Any,
        table: BlockTable,
        keys: TagKeys,
        nbytes: int,
        write: tuple[int, int],
        point: Any,
        direct: bool,
        data: Buffer,
    ) -> None:
        buffer = self._buffer(data, writable=False)
        if buffer.numel() != nbytes or (direct and not _is_own(data, buffer)):
            raise PagesDoNotFit(f"the landing was planned for another buffer than one of {buffer.numel()} bytes on {buffer.device}")
        with self._lanes.taken() as lane, self._module.stream(lane.compute):
            lane.begin(point)
            for move in work.on_host:
                self._count(move)
                for share, known in move.each():
                    place = self._place(work, table, share, known, write)
                    held = buffer[share.offset : share.offset + move.nbytes].cpu().numpy()
                    land_on_host(known.layer, share, place, move.local, keys, held)
            if not work.moves:
                return
            lane.compute.wait_event(ready)
            self._queue_masks(work, words)
            pieces = work.pieces
            arriving: list[tuple[torch.Tensor, Any]] = []
            for number, piece in enumerate(pieces):
                while not direct and len(arriving) < min(len(pieces), number + lane.depth):
                    arriving.append(self._fetch(lane, len(arriving), pieces[len(arriving)], buffer))
                payload = buffer
                if not direct:
                    payload, arrived = arriving[number]
                    lane.compute.wait_event(arrived)
                result = words[work.result : work.result + 8]
                self._queue_tags(lane, piece, words, payload, result, store=False)
                found = lane.read(result)
                if found[0] or found[2]:
                    self._blame(piece, payload, keys)
                self._queue_land(lane, work, piece, table, words, payload, write, result[4:7])
                lane.free(number, lane.compute)
            found = lane.read(words[work.result : work.result + 8])
            if found[4] or found[6]:
                raise BadTag("the payload changed while it was landed, after its tags had been found right")

    def _refuse(self, cache: PagedCache, shares: Sequence[SpanShare]) -> None:
        """Raises PagesDoNotFit for pages that a vendor's card holds in another form than they are described; none here."""

    # Buffers.

    def _buffer(self, data: Buffer, writable: bool) -> torch.Tensor:
        """uint8 [n]. Raises PagesDoNotFit for memory that is neither the host's nor this device's."""
        if isinstance(data, torch.Tensor):
            if data.device != self._device or data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
                raise PagesDoNotFit(f"a buffer of {data.dtype} on {data.device} is not contiguous uint8 on {self.torch_device}")
            return data
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise PagesDoNotFit("a buffer is one-dimensional, contiguous and of u8")
        if writable and not data.flags.writeable:
            raise PagesDoNotFit("a payload cannot be packed into memory that is read-only")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no read-only tensors; this one is only read
            return torch.from_numpy(data)

    def _fetch(self, lane: Lane, number: int, piece: Piece, buffer: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Queues the copy of a piece to the device."""
        payload = lane.slot(number, piece.nbytes)
        lane.await_free(number, lane.copies)
        with self._module.stream(lane.copies):
            for base, offset, nbytes in stretches(piece):
                payload[base : base + nbytes].copy_(buffer[offset : offset + nbytes], non_blocking=True)
        return payload, lane.event(lane.copies)

    # Pages.

    def _place(self, work: Work, table: BlockTable, share: SpanShare, known: Known, write: tuple[int, int] | None) -> Place:
        first, end = (share.span.first_token, share.span.end_token) if write is None else written(share, *write)
        key = first, max(first, end), known.num_pages
        if key not in work.places:
            work.places[key] = Place.of(table, *key, self._device)
        return work.places[key]

    def _described(self, lane: Lane, launch: Launch) -> Pages | Slots:
        """The pages of a launch as the kernels take them; engines' caches live long, so they are remembered."""
        ways, key = [known.way for known in launch.known], tuple(map(id, launch.known))
        found = self._pages.get(key)
        if found is None:
            if ways[0].way in ("slots", "recode"):
                made: Pages | Slots = plan.slots_of([way.tensors[0] for way in ways], ways[0].codec, ways[0].head_dim)
            else:
                made = plan.pages_of([(way.tensors[0], way.tensors[1]) for way in ways])
            lane.event(lane.compute).synchronize()
            found = self._pages[key] = launch.known, made  # kept, so that their ids stay theirs
            while len(self._pages) > _REMEMBERED_PAGES:
                self._pages.popitem(last=False)
        else:
            self._pages.move_to_end(key)
        return found[1]

    # Launches; the lane's stream is the current one.

    def _queue_masks(self, work: Work, words: torch.Tensor) -> None:
        """Where they are made on the device, and have not been queued yet."""
        if work.stream is not None:
            with self._launching:
                masks.launch_masks(words, *work.stream, self.mask_options)
                self._launched.add(_MASKS)
            work.stream = None

    def _queue_pack(self, lane: Lane, work: Work, piece: Piece, table: BlockTable, words: torch.Tensor, payload: torch.Tensor) -> None:
        for launch in piece.launches:
            self._launch(lane, work, launch, words, payload, None, None)
        for move in piece.moved:
            self._count(move)
            for (share, known), base in zip(move.each(), move.bases.tolist(), strict=True):
                part = payload[base : base + move.nbytes]
                rows_to_payload(known.layer, share, self._place(work, table, share, known, None), move.local, part)
        if piece.moved:
            self._queue_tags(lane, piece, words, payload, words, store=True)

    def _queue_tags(self, lane: Lane, piece: Piece, words: torch.Tensor, payload: torch.Tensor, result: torch.Tensor, store: bool) -> None:
        with self._launching:
            tags.launch_tags(payload, words, result, piece.records, piece.run_count, piece.most_blocks, store, self.tag_options)
            if not store:
                self._launched.add(_TAGS)

    def _queue_land(
        self,
        lane: Lane,
        work: Work,
        piece: Piece,
        table: BlockTable,
        words: torch.Tensor,
        payload: torch.Tensor,
        write: tuple[int, int],
        result: torch.Tensor,
    ) -> None:
        for launch in piece.launches:
            first, end = written(launch.moves[0].like, *write)
            if first < end:
                self._launch(lane, work, launch, words, payload, write, result)
        for move in piece.moved:
            self._count(move)
            for (share, known), base in zip(move.each(), move.bases.tolist(), strict=True):
                place = self._place(work, table, share, known, write)
                if place.first < place.end:
                    payload_to_rows(known.layer, share, place, move.local, payload[base : base + move.nbytes])

    def _kind(self, launch: Launch, write: tuple[int, int] | None) -> tuple[str, int, int, bool, bool]:
        """(operation as `tuning` names it, ...): equal for launches for which nothing new is compiled, as far as it can be told."""
        first, known = launch.moves[0].like, launch.known[0]
        operation = ("pack" if write is None else "land") + ("_slots" if known.way.way == "slots" else "")
        if known.way.way == "recode":
            operation = "pack"  # whose arithmetic it is
        span = first.span
        parts = (False, False) if write is None else (write[0] > span.first_token, write[1] < span.end_token)
        return operation, known.group, first.head_count, *parts

    def _launch(
        self,
        lane: Lane,
        work: Work,
        launch: Launch,
        words: torch.Tensor,
        payload: torch.Tensor,
        write: tuple[int, int] | None,
        result: torch.Tensor | None,
    ) -> None:
        """One launch of a shared kernel."""
        first, known = launch.moves[0], launch.known[0]
        way, like, span, count = known.way, first.like, first.like.span, len(launch.known)
        kind = self._kind(launch, write)
        operation = kind[0]
        place, used = work.keys[span.block_bytes]
        arguments = (
            words[work.table[0] : work.table[0] + work.table[1]].view(torch.int32),
            Span(span.first_token, span.end_token, WHOLE_SEQUENCE),
            way.codec,
            like.head_count,
            words[launch.runs : launch.runs + 2 * count].view(1, count, 2),
            payload,
            words[place : place + used],
            words[work.masks :],
        )
        tuning = self._tuning(operation, way.codec, like.head_dim)
        more: dict[str, Any] = {"first_head": first.local}
        if launch.scales >= 0:
            more["scales"] = words[launch.scales : launch.scales + count].view(torch.float32).view(count, 2)
        if launch.page_scales >= 0:
            more["page_scales"] = words[launch.page_scales : launch.page_scales + count].view(torch.float32).view(count, 2)
        if write is not None:
            # The same numbers whenever everything is written: fewer variants to compile.
            more["write_first"] = write[0] if write[0] > span.first_token else 0
            more["write_end"] = write[1] if write[1] < span.end_token else WHOLE_SEQUENCE
        with self._launching:
            pages = self._described(lane, launch)
            if way.way == "recode":
                element = like.codec.key.element
                recode_slots(pages, *arguments[:3], element, *arguments[3:], result, tuning, **more)  # type: ignore[arg-type]
            elif isinstance(pages, Slots):
                if result is None:
                    pack_slots(pages, *arguments, tuning, **more)
                else:
                    land_slots(pages, *arguments, result, tuning, **more)
            elif result is None:
                pack_pages(pages, *arguments, tuning, **more)
            else:
                land_pages(pages, *arguments, result, tuning, **more)
            if kind not in self._launched:
                # The kernels keep tables on the device, made on the stream of whoever comes first: the next may use another stream.
                lane.event(lane.compute).synchronize()
                self._launched.add(kind)
        self.counters.add("kernel_shares", amount=count)

    # Outcomes.

    def _count(self, move: Move) -> None:
        self.counters.add(move.way, move.known[0].way.why, len(move.known))

    def _blame(self, piece: Piece, payload: torch.Tensor, keys: TagKeys) -> None:
        """Raises what the reference raises for the first bad share of a piece that the device found bad."""
        shares = [
            (base, move.nbytes, share) for move in piece.moves for base, (share, _) in zip(move.bases.tolist(), move.each(), strict=True)
        ]
        for base, nbytes, share in sorted(shares, key=lambda row: row[0]):
            verify_tags(payload[base : base + nbytes].cpu().numpy(), share.as_span(), keys)
        raise BadTag("the device found a wrong tag, and the host found none: the payload changed in between")


def _is_own(given: Buffer, buffer: torch.Tensor) -> bool:
    """Whether kernels can use a caller's buffer as it is, if its shares are aligned too: this device's, given as a tensor, and aligned."""
    return isinstance(given, torch.Tensor) and buffer.data_ptr() % 16 == 0


def _aligned(work: Work) -> bool:
    return not any((move.offsets % 16).any() for move in work.moves)
