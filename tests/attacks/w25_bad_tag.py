"""W25: blocks that are not what their tags say. test_tags.py goes through every bit and every kind of replacement."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import BadTag
from tests.attacks.attack import Attack, both
from tests.attacks.build import HONEST, KEY, RawContainer, honest_rotated, honest_small

ERROR = BadTag


def _flip(raw: RawContainer, offset: int) -> None:
    payload = bytearray(raw.payload)
    payload[offset] ^= 0x10
    raw.payload = bytes(payload)


def _stale(raw: RawContainer, field: str) -> None:
    raw.request[field] += 1


def _earlier_end(raw: RawContainer) -> None:
    raw.groups[0]["end_token"] -= 1


def attacks() -> Iterator[Attack]:
    for name, base in HONEST.items():
        for offset in (0, len(base().payload) // 2, len(base().payload) - 17):
            yield from both(f"bit of byte {offset} of {name}", lambda raw, o=offset: _flip(raw, o), BadTag, base=base, left=BadTag)
    # With the key, an attacker can seal another lease or range; the old payload's tags do not follow.
    for field in ("lease", "generation"):
        yield from both(f"payload of the {field} before", lambda raw, f=field: _stale(raw, f), BadTag)
    yield from both("one token fewer", _earlier_end, BadTag)
    yield from both("payload of another key", lambda raw: setattr(raw, "payload", honest_small(key=KEY[::-1]).payload), BadTag, left=BadTag)
    yield from both("zeros", lambda raw: setattr(raw, "payload", bytes(len(raw.payload))), BadTag, base=honest_rotated, left=BadTag)
