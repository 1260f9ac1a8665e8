"""W06: reserved and padding bytes that carry something, wherever there are any."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import ReservedNotZero
from tests.attacks.attack import Attack, both
from tests.attacks.build import CODECS, CONTENT, GROUPS, LAYERS, NAMES, PAYLOAD, REQUEST, RawContainer, honest_small

ERROR = ReservedNotZero


def _padding(raw: RawContainer) -> None:
    """The request id of the honest container has 9 bytes: 7 bytes of padding follow its section."""
    raw.section(REQUEST).padding = b"\0" * 6 + b"\1"


def attacks() -> Iterator[Attack]:
    def in_front(name: str, field: str, value: object) -> Iterator[Attack]:
        return both(name, lambda raw: setattr(raw, field, value), ReservedNotZero, left=ReservedNotZero)

    yield from in_front("flags", "flags", 1)
    yield from in_front("header", "reserved", 1 << 31)
    yield from in_front("prelude", "file_reserved", 1)
    yield from in_front("end of the prelude", "file_end", bytes(7) + b"\x80")
    gap = -len(honest_small().manifest()) % 64
    yield from in_front("padding behind the manifest", "padding", bytes(gap - 1) + b"\1")
    yield from both("padding of a section", _padding, ReservedNotZero)
    for kind in range(1, 9):
        yield from both(f"header of section {NAMES[kind]}", lambda raw, k=kind: setattr(raw.section(k), "reserved", 1), ReservedNotZero)
    for kind in (CONTENT, GROUPS, CODECS, LAYERS):
        for field in ("reserved_a", "reserved_b"):
            name = f"{field} behind the count of {NAMES[kind]}"
            yield from both(name, lambda raw, k=kind, f=field: raw.section(k).head.update({f: 1}), ReservedNotZero)
    for kind in (CONTENT, GROUPS):
        for field in ("reserved_a", "reserved_b"):
            name = f"{field} in a row of {NAMES[kind]}"
            yield from both(name, lambda raw, k=kind, f=field: raw.section(k).rows[0].update({f: 1}), ReservedNotZero)
    for kind in (REQUEST, PAYLOAD):
        yield from both(f"reserved of {NAMES[kind]}", lambda raw, k=kind: raw.section(k).head.update(reserved=1), ReservedNotZero)
