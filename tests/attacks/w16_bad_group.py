"""W16: KV groups of unknown kind, or with dimensions that cannot be."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import BadGroup
from tests.attacks.attack import Attack, both
from tests.attacks.build import GROUPS

ERROR = BadGroup

ROWS = [
    {"kind": 0},
    {"kind": 5},
    {"kind": 255},
    {"heads": 0},
    {"heads": 1025},
    {"heads": 65535},
    {"head_dim": 0},
    {"head_dim": 8},
    {"head_dim": 24},
    {"head_dim": 1040},
    {"head_dim": 65535},
    {"window": 1},
    {"window": 0xFFFFFFFF},
    {"kind": 2, "window": 0},
    {"kind": 2, "window": (1 << 24) + 1},
    {"kind": 3, "window": 5},
]


def attacks() -> Iterator[Attack]:
    for row in ROWS:
        name = ", ".join(f"{field} {value}" for field, value in row.items())
        yield from both(name, lambda raw, r=row: raw.groups[0].update(r), BadGroup)
    yield from both("no group", lambda raw: setattr(raw.section(GROUPS), "rows", []), BadGroup)
