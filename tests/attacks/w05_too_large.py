"""W05: sizes over their limits. test_size_bombs.py runs the ones that would cost memory under a limit of address space."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import TooLarge
from tests.attacks.attack import Attack, both
from tests.attacks.build import BF16, CODECS, CONTENT, GROUPS, LAYERS, NAMES, PAYLOAD, RawContainer, codec, group, layer

ERROR = TooLarge


def _blocks(raw: RawContainer) -> None:
    """1,024 layers of 1,024 heads of 2**20 blocks: 2**40 of them, which no reader may so much as count one by one."""
    raw.section(GROUPS).rows = [group(1024, 1024, 0, 1 << 24)]
    raw.section(CODECS).rows = [codec(BF16, BF16)]
    raw.section(LAYERS).rows = [layer(index) for index in range(1024)]
    raw.section(PAYLOAD).head.update(chunk_tokens=16, payload_bytes=2**64 - 1)


def attacks() -> Iterator[Attack]:
    for name, value in (("one over", (1 << 20) + 1), ("4 GiB", 0xFFFFFFFF)):
        yield from both(f"total of {name}", lambda raw, v=value: setattr(raw, "total", v), TooLarge, left=TooLarge)
        yield from both(f"file's manifest of {name}", lambda raw, v=value: setattr(raw, "manifest_bytes", v), TooLarge, left=TooLarge)
    for count in (65, 0xFFFF):
        yield from both(f"{count} sections", lambda raw, c=count: setattr(raw, "count", c), TooLarge, left=TooLarge)
    for kind, limit in ((CONTENT, 16), (GROUPS, 64), (CODECS, 64), (LAYERS, 1024)):
        for count in (limit + 1, 0xFFFF):
            yield from both(f"{count} rows of {NAMES[kind]}", lambda raw, k=kind, c=count: raw.section(k).head.update(count=c), TooLarge)
    yield from both("2**40 blocks", _blocks, TooLarge)
