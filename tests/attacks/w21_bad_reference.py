"""W21: layers that name what is not there, and groups and codecs that no layer names (a place to hide bytes in)."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import BadReference
from tests.attacks.attack import Attack, both
from tests.attacks.build import FP8, INT8, codec, group

ERROR = BadReference


def attacks() -> Iterator[Attack]:
    for field in ("group", "codec"):
        for value in (1, 64, 65535):
            yield from both(f"{field} {value} of 1", lambda raw, f=field, v=value: raw.layers[0].update({f: v}), BadReference)
    yield from both("a group of no layer", lambda raw: raw.groups.append(group(1, 16, 0, 16)), BadReference)
    yield from both("63 codecs of no layer", lambda raw: raw.codecs.extend([codec(FP8, INT8)] * 63), BadReference)
