"""W14: ranks that are not below their world size, and head ranges outside the group."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import BadShard
from tests.attacks.attack import Attack, both
from tests.attacks.build import SHARD, honest_rotated

ERROR = BadShard


def attacks() -> Iterator[Attack]:
    for axis in ("tp", "pp"):
        for rank, size in ((1, 1), (0, 0), (65535, 1), (4096, 4096), (0, 4097), (0, 65535)):
            ranks = {f"{axis}_rank": rank, f"{axis}_size": size}
            yield from both(f"{axis} rank {rank} of {size}", lambda raw, r=ranks: raw.section(SHARD).head.update(r), BadShard)
    for first, count in ((0, 5), (4, 1), (3, 2), (0, 0), (0xFFFF, 1), (0xFFFF, 0xFFFF), (1, 0xFFFF)):
        heads = {"head_first": first, "head_count": count}
        yield from both(f"{count} heads from {first} of 4", lambda raw, h=heads: raw.groups[0].update(h), BadShard, base=honest_rotated)
