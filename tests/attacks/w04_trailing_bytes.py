"""W04: more bytes than are announced: hidden behind the file, the manifest, the last section."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import TrailingBytes
from tests.attacks.attack import Attack, both
from tests.attacks.build import honest_small

ERROR = TrailingBytes


def attacks() -> Iterator[Attack]:
    total = len(honest_small().manifest())
    yield from both("a byte behind the payload", lambda raw: setattr(raw, "behind", b"\0"), TrailingBytes, left=TrailingBytes)
    yield from both("a second file", lambda raw: setattr(raw, "behind", raw.pack()), TrailingBytes, left=TrailingBytes)
    yield from both("a smaller total", lambda raw: setattr(raw, "total", total - 8), TrailingBytes, left=TrailingBytes)
    yield from both("no payload stated", lambda raw: setattr(raw, "stated_payload", 0), TrailingBytes, left=TrailingBytes)
    yield from both("one section fewer", lambda raw: setattr(raw, "count", 7), TrailingBytes)
    yield from both("bytes of no section", lambda raw: setattr(raw, "behind_sections", bytes(8)), TrailingBytes)
    yield from both("one byte of no section", lambda raw: setattr(raw, "behind_sections", b"x"), TrailingBytes)
