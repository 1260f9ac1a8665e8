"""W07: sections that repeat (which of the two counts?) or do not ascend."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from bridge.wire.errors import SectionOrder
from tests.attacks.attack import Attack, both
from tests.attacks.build import NAMES, RawContainer, RawSection, honest_newer

ERROR = SectionOrder


def _twice(raw: RawContainer, kind: int) -> None:
    position = raw.sections.index(raw.section(kind))
    raw.sections.insert(position, raw.copy().section(kind))


def _swap(raw: RawContainer, i: int) -> None:
    raw.sections[i], raw.sections[i + 1] = raw.sections[i + 1], raw.sections[i]


def attacks() -> Iterator[Attack]:
    for kind in range(1, 9):
        yield from both(f"{NAMES[kind]} twice", lambda raw, k=kind: _twice(raw, k), SectionOrder)
    for i, j in itertools.pairwise(range(8)):
        yield from both(f"sections {j} and {i} swapped", lambda raw, i=i: _swap(raw, i), SectionOrder)
    yield from both("reversed", lambda raw: raw.sections.reverse(), SectionOrder)
    yield from both("a skipped section twice", lambda raw: raw.sections.append(RawSection(0x8001)), SectionOrder, base=honest_newer)
