"""W02: major versions that are not ours."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import UnsupportedVersion
from tests.attacks.attack import Attack, both

ERROR = UnsupportedVersion


def attacks() -> Iterator[Attack]:
    for major in (1, 2, 256, 0xFFFF):
        yield from both(f"major {major}", lambda raw, m=major: setattr(raw, "major", m), UnsupportedVersion, left=UnsupportedVersion)
