"""W24: payload sizes that are not what the manifest's fields give."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import PayloadSize
from tests.attacks.attack import Attack, both
from tests.attacks.build import PAYLOAD, RawContainer, honest_mixed, honest_small

ERROR = PayloadSize


def _stated(raw: RawContainer, size: int) -> None:
    raw.section(PAYLOAD).head["payload_bytes"] = size % 2**64


def _cut(raw: RawContainer, count: int) -> None:
    raw.payload = raw.payload[:-count]


def attacks() -> Iterator[Attack]:
    size = len(honest_small().payload)
    for value in (0, size - 1, size + 1, size + 16, 2 * size, size + 2**32, -1):
        yield from both(f"{value} stated", lambda raw, v=value: _stated(raw, v), PayloadSize)
    yield from both("a token more", lambda raw: raw.groups[0].update(end_token=raw.groups[0]["end_token"] + 16), PayloadSize)
    yield from both("a head more", lambda raw: raw.groups[0].update(heads=2, head_count=2), PayloadSize)
    # The file's own size is not sealed: both containers are refused by the same clause.
    for count in (1, 16, 3000):
        yield from both(f"file without its last {count} bytes", lambda raw, c=count: _cut(raw, c), PayloadSize, left=PayloadSize)
    yield from both(
        "file with a block more", lambda raw: setattr(raw, "payload", raw.payload * 2), PayloadSize, left=PayloadSize, base=honest_mixed
    )
