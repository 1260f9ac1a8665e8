"""W26: bytes that nobody reads, in rows outside the valid range and behind the last tag of a plane: a place to hide something in."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import BadTag, DirtyPadding, WireError
from tests.attacks.attack import Attack, Change, both
from tests.attacks.build import PAYLOAD, Block, RawContainer, honest_small, walk

ERROR = DirtyPadding


def blocks_of(raw: RawContainer) -> list[Block]:
    return list(walk(raw.section(PAYLOAD).head["chunk_tokens"], raw.groups, raw.codecs, raw.layers))


def _set(raw: RawContainer, offset: int) -> None:
    payload = bytearray(raw.payload)
    payload[offset] = 1
    raw.payload = bytes(payload)


def attacks() -> Iterator[Attack]:
    blocks = blocks_of(honest_small())
    for offset in range(blocks[-1].tag + 8, blocks[-1].plane_end):
        yield from both(f"byte {offset} behind the tags", lambda raw, o=offset: _set(raw, o), DirtyPadding, left=DirtyPadding)
    first, last = blocks[0], blocks[-1]
    rows = {
        "first row of K": first.offset,
        "third row of V": first.offset + 16 * 32 + 2 * 32 + 31,
        "last row": last.offset + last.nbytes - 1,
    }
    for name, offset in rows.items():

        def left_as_it_is(raw: RawContainer, o: int = offset) -> None:
            _set(raw, o)

        def tagged_anew(raw: RawContainer, o: int = offset) -> None:
            _set(raw, o)
            raw.tagged()

        yield from _one(name, left_as_it_is, BadTag)
        yield from _one(f"{name}, tagged", tagged_anew, DirtyPadding)


def _one(name: str, change: Change, error: type[WireError]) -> Iterator[Attack]:
    return both(name, change, error, left=error)
