"""W13: content digests that repeat, do not ascend, are of unknown kind, or lack the tokens' digest."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import BadContent
from tests.attacks.attack import Attack, both
from tests.attacks.build import CONTENT, content

ERROR = BadContent

KINDS = {
    "none": (),
    "no tokens": (2,),
    "tokens twice": (1, 1),
    "descending": (1, 3, 2),
    "tokens last": (2, 1),
    "kind 0": (0,),
    "kind 6": (1, 6),
}


def attacks() -> Iterator[Attack]:
    for name, kinds in {**KINDS, "kind 65535": (1, 65535), "sixteen of one kind": (1,) * 16}.items():
        rows = [content(kind) for kind in kinds]
        yield from both(name, lambda raw, r=rows: setattr(raw.section(CONTENT), "rows", r), BadContent)
