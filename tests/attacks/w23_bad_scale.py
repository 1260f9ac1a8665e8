"""W23: scales that are no positive finite number, or that a codec without scales would have to ignore."""

from __future__ import annotations

import math
from collections.abc import Iterator

from bridge.wire.errors import BadScale
from tests.attacks.attack import Attack, both
from tests.attacks.build import honest_mixed

ERROR = BadScale


def attacks() -> Iterator[Attack]:
    for side in ("key_scale", "value_scale"):
        for scale in (0.0, -0.0, -1.0, -1e-45, 0.5, 1e-45, 1.0000001, math.inf, -math.inf, math.nan):
            yield from both(f"{side} {scale!r} of raw", lambda raw, s=side, v=scale: raw.layers[0].update({s: v}), BadScale)
    for scale in (0.0, -0.0, -1.0, -1e-45, math.inf, -math.inf, math.nan):
        yield from both(f"key_scale {scale!r} of fp8", lambda raw, v=scale: raw.layers[0].update(key_scale=v), BadScale, base=honest_mixed)
