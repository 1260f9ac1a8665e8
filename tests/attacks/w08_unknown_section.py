"""W08: sections that this reader does not know and may not skip."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import UnknownSection
from tests.attacks.attack import Attack, both
from tests.attacks.build import RawContainer, RawSection

ERROR = UnknownSection


def _add(raw: RawContainer, kind: int, minor: int) -> None:
    raw.minor = minor
    raw.sections.append(RawSection(kind, tail=b"something"))
    raw.sections.sort(key=lambda section: section.kind)


def attacks() -> Iterator[Attack]:
    for kind, minor in ((0, 1), (9, 1), (0x7FFF, 1), (0x7FFF, 9), (0x8000, 1), (0xFFFF, 1), (0xFFFF, 0), (0, 0xFFFF)):
        yield from both(f"section {kind:#x} in minor {minor}", lambda raw, k=kind, m=minor: _add(raw, k, m), UnknownSection)
