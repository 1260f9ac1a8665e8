"""W15: chunk sizes that are zero, over their limit, or no multiple of 16."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import BadChunking
from tests.attacks.attack import Attack, both
from tests.attacks.build import PAYLOAD

ERROR = BadChunking


def attacks() -> Iterator[Attack]:
    for tokens in (0, 1, 8, 15, 17, 40, 65537, 65552, 2**31, 2**32 - 16, 2**32 - 1):
        yield from both(f"chunks of {tokens}", lambda raw, t=tokens: raw.section(PAYLOAD).head.update(chunk_tokens=t), BadChunking)
