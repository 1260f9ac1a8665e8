"""W03: fewer bytes than are announced: by the file, the header, the number of sections, a section's size."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import Truncated
from tests.attacks.attack import Attack, both
from tests.attacks.build import LAYERS, RawContainer, honest_small

ERROR = Truncated


def _longer(raw: RawContainer) -> None:
    raw.section(LAYERS).size = 36


def _endless(raw: RawContainer) -> None:
    raw.section(LAYERS).size = 0xFFFFFFF8


def _no_manifest() -> bytes:
    raw = honest_small()
    raw.manifest_bytes, raw.stated_payload = 0, len(raw.pack()) - 64
    return raw.pack()


def attacks() -> Iterator[Attack]:
    whole = honest_small().pack()
    for size in (0, 1, 63, 64, 100, len(whole) - 3104, len(whole) - 1):
        yield Attack(f"the first {size} bytes", whole[:size], Truncated, False)
    total = len(honest_small().manifest())
    for name, value in (("one more", total + 1), ("the most", 1 << 20), ("less than a header", 55), ("none", 0)):
        yield from both(f"total of {name}", lambda raw, v=value: setattr(raw, "total", v), Truncated, left=Truncated)
    yield Attack("a file without a manifest", _no_manifest(), Truncated, False)
    yield from both("payload of 2**64 - 1", lambda raw: setattr(raw, "stated_payload", 2**64 - 1), Truncated, left=Truncated)
    yield from both("one section more", lambda raw: setattr(raw, "count", 9), Truncated)
    yield from both("last section longer", _longer, Truncated)
    yield from both("last section of 4 GiB", _endless, Truncated)
