"""W17: token ranges that are empty, backward, over the limit, or not the one whole block of a state."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import BadTokenRange
from tests.attacks.attack import Attack, both
from tests.attacks.build import honest_mixed

ERROR = BadTokenRange


def attacks() -> Iterator[Attack]:
    for first, end in (
        (0, 0),
        (5, 5),
        (36, 3),
        (0, (1 << 24) + 1),
        (2**64 - 1, 2**64 - 1),
        (2**63, 2**63 + 1),
        (0, 2**64 - 1),
        (2**64 - 1, 1),
    ):
        tokens = {"first_token": first, "end_token": end}
        yield from both(f"tokens {first} to {end}", lambda raw, t=tokens: raw.groups[0].update(t), BadTokenRange)
    for first, end in ((32, 47), (33, 48), (32, 64), (40, 56)):
        tokens = {"first_token": first, "end_token": end}
        yield from both(f"state of {first} to {end}", lambda raw, t=tokens: raw.groups[3].update(t), BadTokenRange, base=honest_mixed)
