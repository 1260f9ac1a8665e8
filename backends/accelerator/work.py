"""What one call of pack or land comes to: shares checked, sorted by the way they go, and gathered into launches. All on the host.

Layers are mostly alike, so nothing here is done layer by layer that can be done for a column of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from backends.accelerator.arguments import Arguments
from backends.accelerator.known import Known, Routes
from backends.accelerator.rows import Place
from backends.accelerator.tags import RECORD
from backends.cpu.pages import check_share, check_table
from backends.kernels.plan import NO_ORDINAL
from bridge.devices import HeldLayers, ShareColumn, Shares, SpanShare
from bridge.pages import BlockTable, PagedCache, PagesDoNotFit
from bridge.wire import BLOCK_TOKENS, TagKeys

WHOLE_SEQUENCE = 1 << 30
"""Chunk size of every launch: it has one chunk, and the kernels are compiled for fewer cases."""


@dataclass
class Move:
    """Shares of one column that go one way; all arrays are int64 [n].

    like: the column's first share, which they are like. places: theirs in the column. known: what is known of each layer. local: the
    pages' head that is a share's first. offsets: bytes of the caller's buffer at which they begin.
    ordinals: of their first blocks. masks: the numbers of their first masks. bases: the bytes of the buffer at hand at which they begin.
    """

    like: SpanShare
    column: ShareColumn
    places: np.ndarray | None
    known: tuple[Known, ...]
    local: int
    offsets: np.ndarray
    ordinals: np.ndarray
    masks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    bases: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def nbytes(self) -> int:
        """Of each share."""
        return self.like.nbytes

    @property
    def way(self) -> str:
        return self.known[0].way.way

    def each(self) -> Iterator[tuple[SpanShare, Known]]:
        """One by one, for ways that go layer by layer."""
        shares = list(self.column)
        if self.places is not None:
            shares = [shares[place] for place in self.places.tolist()]
        return zip(shares, self.known, strict=True)

    def part(self, places: np.ndarray) -> Move:
        """Some of them."""
        if len(places) == len(self.known):
            return self
        return Move(
            like=self.like,
            column=self.column,
            places=places if self.places is None else self.places[places],
            known=tuple(self.known[place] for place in places.tolist()),
            local=self.local,
            offsets=self.offsets[places],
            ordinals=self.ordinals[places],
            masks=self.masks[places],
        )


@dataclass
class Launch:
    """Moves that one kernel launch takes. known: of all of them. Places are words of the arguments."""

    moves: list[Move]
    known: tuple[Known, ...] = ()
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


def _columns(shares: Sequence[SpanShare]) -> Sequence[ShareColumn]:
    """Shares that come one by one are columns of one each."""
    if isinstance(shares, Shares):
        return shares.columns
    return [_alone(share) for share in shares]


def _alone(share: SpanShare) -> ShareColumn:
    """Its layer is said to have no heads: Routes need not remember what was made for this call."""
    span = share.span
    held = HeldLayers(0, 0, None, np.array([span.layer]), (share.model_layer,), (share.key_scale,), (share.value_scale,), 0, 0)
    return ShareColumn(share, held, np.array([span.offset]), np.array([span.first_ordinal]), np.array([share.offset]))


def gather(
    cache: PagedCache, table: BlockTable, shares: Sequence[SpanShare], routes: Routes, size: int, write: tuple[int, int] | None
) -> Work:
    """Checks every share before anything is written and says which way it goes. write: landing's range of tokens, None for packing.

    size: of the buffer, in bytes. Raises PagesDoNotFit.
    """
    moves: list[Move] = []
    on_host: list[Move] = []
    checked: set[tuple[int, int, int]] = set()
    for column in _columns(shares):
        like, span, heads = column.like, column.like.span, column.like.head_count
        if like.codec.block_bytes(like.head_dim) != span.block_bytes:
            raise PagesDoNotFit(f"blocks of {span.block_bytes} bytes are not those of the share's codec and head dimension")
        first_byte, end_byte = int(column.offsets.min()), int(column.offsets.max()) + like.nbytes
        if first_byte < 0 or end_byte > size:
            raise PagesDoNotFit(f"shares of {like.nbytes} bytes in bytes {first_byte} to {end_byte} of a buffer of {size} bytes")
        first, end = span.first_token, span.end_token
        if write is not None:
            first, end = max(first, write[0]), min(end, write[1])
        local, ordinals = like.model_head - cache.first_head, column.ordinals + like.head_first * span.blocks
        for places, known in routes.of_column(cache, column, write is not None):
            one = known[0]
            if local < 0 or local + heads > one.heads or one.head_dim != like.head_dim:
                check_share(one.layer, like, cache.first_head)
            if one.block_size != table.block_size:
                check_table(one.layer, table)
            if first < end and (first, end, one.num_pages) not in checked:
                table.check(first, end, one.num_pages)
                checked.add((first, end, one.num_pages))
            at = (column.offsets, ordinals) if places is None else (column.offsets[places], ordinals[places])
            (on_host if one.way.way == "host" else moves).append(Move(like, column, places, known, local, *at))
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
    end = max([move.like.span.end_token for move in work.moves], default=0)
    work.table = arguments.add(_entries(table, end))
    if landing:
        work.result = arguments.add(np.array([0, NO_ORDINAL, 0, 0, 0, NO_ORDINAL, 0, 0], np.int64))[0]
    for moves in _cut(work.moves, piece_bytes):
        piece = Piece(moves, sum(len(move.known) * move.nbytes for move in moves))
        work.pieces.append(piece)
        _lay_out(moves, offsets)
        found: dict[tuple, Launch] = {}
        for move in moves:
            if move.way == "rows":
                piece.moved.append(move)
                continue
            span = move.like.span
            alike = (move.known[0].group, span.first_token, span.end_token, span.blocks, move.local, move.like.head_count)
            found.setdefault(alike, Launch([])).moves.append(move)
        piece.launches = list(found.values())
        for launch in piece.launches:
            _add_launch(launch, arguments)
        tagged = moves if landing else piece.moved
        if tagged:
            records = np.concatenate([_records(move, work) for move in tagged])
            piece.records, piece.run_count = arguments.add(records)[0], len(records)
            piece.most_blocks = max(move.like.span.blocks for move in tagged)


def _add_launch(launch: Launch, arguments: Arguments) -> None:
    moves = launch.moves
    launch.known = moves[0].known if len(moves) == 1 else tuple(known for move in moves for known in move.known)
    runs = np.empty((len(launch.known), 2), np.int64)
    np.concatenate([move.bases for move in moves], out=runs[:, 0])
    np.concatenate([move.masks for move in moves], out=runs[:, 1])
    launch.runs = arguments.add(runs)[0]
    for name in ("scales", "page_scales"):
        if getattr(launch.known[0].way, name) is not None:
            values = [getattr(known.way, name) for known in launch.known]
            setattr(launch, name, arguments.add(np.array(values, np.float32))[0])


def _in_order(moves: Sequence[Move], key: str) -> tuple[np.ndarray, np.ndarray]:
    """How to bring the shares of all moves into the order of one of their arrays, and that array in this order."""
    values = getattr(moves[0], key) if len(moves) == 1 else np.concatenate([getattr(move, key) for move in moves])
    order = np.argsort(values, kind="stable")
    return order, values[order]


def _handed_back(moves: Sequence[Move], order: np.ndarray, values: np.ndarray, key: str) -> None:
    """Gives each move its part of `values`, which are in the order that `_in_order` found."""
    given = np.empty_like(values)
    given[order] = values
    done = 0
    for move in moves:
        setattr(move, key, given[done : done + len(move.known)])
        done += len(move.known)


def _each(moves: Sequence[Move], values: Sequence[int]) -> np.ndarray:
    """int64: one value for each share, from one for each move."""
    return np.repeat(np.array(values, np.int64), [len(move.known) for move in moves])


def _cut(moves: list[Move], piece_bytes: int | None) -> list[list[Move]]:
    if piece_bytes is None:
        return [moves] if moves else []
    order, _ = _in_order(moves, "offsets")
    numbers, number, room = [], -1, 0
    for nbytes in _each(moves, [move.nbytes for move in moves])[order].tolist():
        if number < 0 or nbytes > room:
            number, room = number + 1, piece_bytes
        numbers.append(number)
        room -= nbytes
    pieces: list[list[Move]] = [[] for _ in range(number + 1)]
    piece_of = np.empty(len(order), np.int64)
    piece_of[order] = numbers
    done = 0
    for move in moves:
        mine = piece_of[done : done + len(move.known)]
        done += len(move.known)
        for piece in np.unique(mine).tolist():
            pieces[piece].append(move.part(np.flatnonzero(mine == piece)))
    return pieces


def _lay_out(moves: Sequence[Move], offsets: bool) -> None:
    """Where the shares of a piece lie in its buffer: where they lie in the caller's, or one after another in the same order."""
    if offsets:
        for move in moves:
            move.bases = move.offsets
        return
    order, _ = _in_order(moves, "offsets")
    sizes = _each(moves, [move.nbytes for move in moves])[order]
    _handed_back(moves, order, sizes.cumsum() - sizes, "bases")


def _add_masks_and_keys(work: Work, keys: TagKeys, host_masks: int) -> None:
    """Begins work.arguments anew."""
    moves = work.moves
    # Stretches of masks that follow one another in the key stream: ordinal of the first one, how many, and the number of the first one.
    order, ordinals = _in_order(moves, "ordinals")
    counts = _each(moves, [move.like.head_count * move.like.span.blocks for move in moves])[order]
    numbers = counts.cumsum() - counts
    _handed_back(moves, order, numbers, "masks")
    begins, total = _begins(ordinals - numbers), int(counts.sum())
    starts = numbers[begins].tolist()
    stretches = list(zip(ordinals[begins].tolist(), _sizes(starts, total), starts, strict=True))
    on_device = total > host_masks
    work.arguments = Arguments(total if on_device else 0)
    for block_bytes in dict.fromkeys(move.like.span.block_bytes for move in moves):
        # The key of a block's first word is to lie on a multiple of 16 bytes, see backends.kernels.tags.
        hash_keys = np.concatenate([np.zeros(1, np.uint64), keys.hash_keys(block_bytes)])
        work.keys[block_bytes] = work.arguments.add(hash_keys)
    if on_device:
        state, records = work.arguments.add(keys.state())[0], work.arguments.add(np.array(stretches, np.int64))[0]
        work.stream = state, records, len(stretches), max(count for _, count, _ in stretches)
    elif total:
        masks = [keys.masks(ordinal, count) for ordinal, count, _ in stretches]
        work.masks = work.arguments.add(masks[0] if len(masks) == 1 else np.concatenate(masks))[0]


def _begins(values: np.ndarray) -> np.ndarray:
    """int64: where a value stands that is not the one before it, the first included."""
    if not len(values):
        return np.zeros(0, np.int64)
    return np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1))


def _sizes(starts: list[int], end: int) -> list[int]:
    """How far it is from each start to the next, and from the last one to the end."""
    return [after - start for start, after in zip(starts, [*starts[1:], end], strict=True)]


def _entries(table: BlockTable, end: int) -> np.ndarray:
    """int32, page ids from token 0 to `end`; entries that no checked token needs are never followed, and may be missing."""
    made = np.zeros(-(-end // table.block_size), np.int32)
    held = table.array[: made.size]
    made[: held.size] = np.minimum(np.maximum(held, 0), 2**31 - 1)
    return made


def _records(move: Move, work: Work) -> np.ndarray:
    """int64 [runs, RECORD] for tags.launch_tags."""
    span, heads = move.like.span, np.arange(move.like.head_count)
    made = np.empty((len(move.known), len(heads), RECORD), np.int64)
    first, end = span.first_token % BLOCK_TOKENS, (span.end_token - 1) % BLOCK_TOKENS + 1
    made[:] = (0, span.blocks, span.block_bytes // 16, 0, work.keys[span.block_bytes][0], first, end, 0)
    made[:, :, 0] = (move.bases // 16)[:, None] + heads * (span.run_bytes // 16)
    made[:, :, 3] = (work.masks + move.masks)[:, None] + heads * span.blocks
    return made.reshape(-1, RECORD)


def stretches(piece: Piece) -> list[tuple[int, int, int]]:
    """(byte of the piece, byte of the caller's buffer, bytes) of what can be copied at once."""
    order, bases = _in_order(piece.moves, "bases")
    offsets = np.concatenate([move.offsets for move in piece.moves])[order]
    sizes = _each(piece.moves, [move.nbytes for move in piece.moves])[order]
    begins = _begins(offsets - bases)
    starts = bases[begins].tolist()
    return list(zip(starts, offsets[begins].tolist(), _sizes(starts, int(bases[-1] + sizes[-1])), strict=True))
