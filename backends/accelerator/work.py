"""What one call of pack or land comes to: shares checked, sorted by the way they go, and gathered into launches. All on the host."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from backends.accelerator.arguments import Arguments
from backends.accelerator.routes import Route, route
from backends.accelerator.rows import Place
from backends.accelerator.tags import RECORD
from backends.cpu.pages import check_share, check_table
from backends.kernels.plan import NO_ORDINAL
from bridge.devices import SpanShare
from bridge.pages import BlockTable, LayerDescription, PagedCache, PagesDoNotFit
from bridge.wire import BLOCK_TOKENS, SlotCodec, TagKeys
from bridge.wire.payload import tag_plane_bytes

WHOLE_SEQUENCE = 1 << 30
"""Chunk size of every launch: it has one chunk, and the kernels are compiled for fewer cases."""


@dataclass(slots=True)
class Move:
    """One share on its way.

    group: moves of one group may share a launch. local: the pages' head that is the share's first. base: the byte of the buffer at hand at
    which its first run begins. mask: its first mask's number.
    """

    share: SpanShare
    layer: LayerDescription
    way: Route
    group: int
    local: int
    run_bytes: int
    mask: int = 0
    base: int = 0

    @property
    def nbytes(self) -> int:
        return self.share.head_count * self.run_bytes


@dataclass
class Launch:
    """Moves that one kernel launch takes. Places are words of the arguments."""

    moves: list[Move]
    runs: int = 0
    scales: int = -1
    page_scales: int = -1


@dataclass
class Piece:
    """Moves whose bytes are in one buffer at a time, and where the arguments hold what their launches need.

    records, run_count, most_blocks: of the launch over tags, which verifies all of them, or makes those of the moved ones.
    """

    moves: list[Move]
    nbytes: int = 0
    launches: list[Launch] = field(default_factory=list)
    moved: list[Move] = field(default_factory=list)
    records: int = 0
    run_count: int = 0
    most_blocks: int = 0


@dataclass
class Work:
    """One call's work. table, masks, keys (by block size), result: places in the arguments.

    stream: where masks are made on the device, what launch_masks takes after the words.
    """

    moves: list[Move]
    on_host: list[Move]
    pieces: list[Piece] = field(default_factory=list)
    arguments: Arguments = field(default_factory=Arguments)
    table: tuple[int, int] = (0, 0)
    masks: int = 0
    stream: tuple[int, int, int, int] | None = None
    keys: dict[int, tuple[int, int]] = field(default_factory=dict)
    result: int = 0
    places: dict[tuple[int, int, int], Place] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """What is asked about a layer for every share of every chunk. layer, codec: kept, so that their ids stay theirs."""

    layer: LayerDescription
    codec: SlotCodec
    way: Route
    group: int
    heads: int
    head_dim: int
    block_size: int
    num_pages: int


class Routes:
    """Remembers the route of each layer with each codec, because every chunk of every request asks for the same ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[tuple, Known] = {}
        self._codecs: dict[SlotCodec, SlotCodec] = {}
        self._alike: dict[tuple, int] = {}
        self._learning = threading.Lock()

    def of(self, layer: LayerDescription, share: SpanShare, codec: SlotCodec, landing: bool) -> Known:
        """codec: the share's, `canonical`. Raises PagesDoNotFit for pages of another device."""
        key = (id(layer), id(codec), share.head_dim, share.key_scale, share.value_scale, landing)
        found = self._found.get(key)
        if found is None:
            with self._learning:
                found = self._learned(key, layer, share, codec, landing)
        return found

    def _learned(self, key: tuple, layer: LayerDescription, share: SpanShare, codec: SlotCodec, landing: bool) -> Known:
        """Looks a route up. One thread at a time: two must not give unlike kinds of layers one number."""
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= 1 << 12:
                self.forget()
            side = layer.sides[0]
            if side.codes.device != self._device:
                raise PagesDoNotFit(f"the pages are on {side.codes.device}, this device reads {self._device}")
            way = route(layer, share, landing)
            group = self._alike.setdefault(way.alike, len(self._alike))
            found = Known(layer, codec, way, group, side.heads, layer.head_dim, side.block_size, side.num_pages)
            self._found[key] = found
        return found

    def forget(self) -> None:
        self._found.clear()
        self._codecs.clear()

    def canonical(self, codec: SlotCodec) -> SlotCodec:
        """One object for all equal codecs."""
        return self._codecs.setdefault(codec, codec)


def gather(
    cache: PagedCache, table: BlockTable, shares: Sequence[SpanShare], routes: Routes, size: int, write: tuple[int, int] | None
) -> Work:
    """Checks every share before anything is written and says which way it goes. write: landing's range of tokens, None for packing.

    size: of the buffer, in bytes. Raises PagesDoNotFit.
    """
    moves: list[Move] = []
    on_host: list[Move] = []
    checked: set[tuple[int, int, int]] = set()
    codec: SlotCodec | None = None
    given: SlotCodec | None = None
    for share in shares:
        layer, span, heads = cache.layers[share.model_layer], share.span, share.head_count
        if codec is None or share.codec is not given:
            given, codec = share.codec, routes.canonical(share.codec)
        known = routes.of(layer, share, codec, write is not None)
        local = share.model_head - cache.first_head
        if local < 0 or local + heads > known.heads or known.head_dim != share.head_dim:
            check_share(layer, share, cache.first_head)
        if known.block_size != table.block_size:
            check_table(layer, table)
        run_bytes = span.blocks * span.block_bytes + tag_plane_bytes(span.blocks)
        if share.offset < 0 or share.offset + heads * run_bytes > size:
            raise PagesDoNotFit(f"a share of {heads * run_bytes} bytes at offset {share.offset} does not lie in a buffer of {size} bytes")
        first, end = span.first_token, span.end_token
        if write is not None:
            first, end = max(first, write[0]), min(end, write[1])
        if first < end and (first, end, known.num_pages) not in checked:
            if codec.block_bytes(share.head_dim) != span.block_bytes:
                raise PagesDoNotFit(f"blocks of {span.block_bytes} bytes are not those of the share's codec and head dimension")
            table.check(first, end, known.num_pages)
            checked.add((first, end, known.num_pages))
        (on_host if known.way.way == "host" else moves).append(Move(share, layer, known.way, known.group, local, run_bytes))
    return Work(moves, on_host)


def written(share: SpanShare, write_first: int, write_end: int) -> tuple[int, int]:
    """The tokens of the share within [write_first, write_end)."""
    return max(share.span.first_token, write_first), min(share.span.end_token, write_end)


def arrange(work: Work, table: BlockTable, keys: TagKeys, landing: bool, piece_bytes: int | None, offsets: bool, host_masks: int) -> None:
    """Cuts the moves into pieces and their launches, and gathers everything that these need in work.arguments.

    piece_bytes: at most so many bytes a piece, unless one share has more; None: one piece. offsets: whether the buffer is the caller's, at
    the shares' own offsets. host_masks: as many masks are made here; more are left to the device.
    """
    _add_masks_and_keys(work, keys, host_masks)
    arguments = work.arguments
    end = max([move.share.span.end_token for move in work.moves], default=0)
    work.table = arguments.add(_entries(table, end))
    if landing:
        work.result = arguments.add(np.array([0, NO_ORDINAL, 0, 0, 0, NO_ORDINAL, 0, 0], np.int64))[0]
    for moves in _cut(work.moves, piece_bytes):
        piece = Piece(moves)
        work.pieces.append(piece)
        for move in moves:
            move.base = move.share.offset if offsets else piece.nbytes
            piece.nbytes += move.nbytes
        found: dict[tuple, Launch] = {}
        for move in moves:
            if move.way.way == "rows":
                piece.moved.append(move)
                continue
            span = move.share.span
            alike = (move.group, span.first_token, span.end_token, span.blocks, move.local, move.share.head_count)
            found.setdefault(alike, Launch([])).moves.append(move)
        piece.launches = list(found.values())
        for launch in piece.launches:
            launch.runs = arguments.add(np.array([(move.base, move.mask) for move in launch.moves], np.int64))[0]
            for name in ("scales", "page_scales"):
                if getattr(launch.moves[0].way, name) is not None:
                    values = [getattr(move.way, name) for move in launch.moves]
                    setattr(launch, name, arguments.add(np.array(values, np.float32))[0])
        tagged = moves if landing else piece.moved
        if tagged:
            records = _records(tagged, work)
            piece.records, piece.run_count = arguments.add(records)[0], len(records)
            piece.most_blocks = int(records[:, 1].max())


def _cut(moves: list[Move], piece_bytes: int | None) -> list[list[Move]]:
    if piece_bytes is None:
        return [moves] if moves else []
    pieces: list[list[Move]] = []
    room = 0
    for move in moves:
        if not pieces or move.nbytes > room:
            pieces.append([])
            room = piece_bytes
        pieces[-1].append(move)
        room -= move.nbytes
    return pieces


def _add_masks_and_keys(work: Work, keys: TagKeys, host_masks: int) -> None:
    """Begins work.arguments anew."""
    stretches: list[list[int]] = []  # ordinal of the first mask, how many, number of the first one
    total = 0
    for move in work.moves:
        share, span = move.share, move.share.span
        ordinal, count = span.first_ordinal + share.head_first * span.blocks, share.head_count * span.blocks
        if stretches and stretches[-1][0] + stretches[-1][1] == ordinal:
            stretches[-1][1] += count
        else:
            stretches.append([ordinal, count, total])
        move.mask = total
        total += count
    on_device = total > host_masks
    work.arguments = Arguments(total if on_device else 0)
    for block_bytes in dict.fromkeys(move.share.span.block_bytes for move in work.moves):
        # The key of a block's first word is to lie on a multiple of 16 bytes, see backends.kernels.tags.
        hash_keys = np.concatenate([np.zeros(1, np.uint64), keys.hash_keys(block_bytes)])
        work.keys[block_bytes] = work.arguments.add(hash_keys)
    if on_device:
        state, records = work.arguments.add(keys.state())[0], work.arguments.add(np.array(stretches, np.int64))[0]
        work.stream = state, records, len(stretches), max(count for _, count, _ in stretches)
    elif stretches:
        masks = [keys.masks(ordinal, count) for ordinal, count, _ in stretches]
        work.masks = work.arguments.add(masks[0] if len(masks) == 1 else np.concatenate(masks))[0]


def _entries(table: BlockTable, end: int) -> np.ndarray:
    """int32, page ids from token 0 to `end`; entries that no checked token needs are never followed, and may be missing."""
    made = np.zeros(-(-end // table.block_size), np.int32)
    held = table.array[: made.size]
    made[: held.size] = np.clip(held, 0, 2**31 - 1)
    return made


def _records(moves: list[Move], work: Work) -> np.ndarray:
    """int64 [runs, RECORD] for tags.launch_tags."""
    made, heads, steps = [], [], []
    for move in moves:
        span = move.share.span
        first, end = span.first_token % BLOCK_TOKENS, (span.end_token - 1) % BLOCK_TOKENS + 1
        place, mask = work.keys[span.block_bytes][0], work.masks + move.mask
        made.append((move.base // 16, span.blocks, span.block_bytes // 16, mask, place, first, end, 0))
        heads.append(move.share.head_count)
        steps.append(move.run_bytes // 16)
    rows = np.repeat(np.array(made, np.int64).reshape(-1, RECORD), heads, axis=0)
    head = np.arange(len(rows)) - np.repeat(np.cumsum(heads) - heads, heads)
    rows[:, 0] += head * np.repeat(steps, heads)
    rows[:, 3] += head * rows[:, 1]
    return rows
