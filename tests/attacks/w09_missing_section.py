"""W09: a required section is absent."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import MissingSection
from tests.attacks.attack import Attack, both
from tests.attacks.build import NAMES

ERROR = MissingSection


def attacks() -> Iterator[Attack]:
    for kind in range(1, 9):
        yield from both(f"no {NAMES[kind]}", lambda raw, k=kind: raw.sections.remove(raw.section(k)), MissingSection)
    yield from both("no section", lambda raw: raw.sections.clear(), MissingSection)
