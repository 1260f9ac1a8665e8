"""W22: layer indices that repeat (which of the two counts?) or do not ascend."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import LayerOrder
from tests.attacks.attack import Attack, both
from tests.attacks.build import LAYERS, layer

ERROR = LayerOrder


def attacks() -> Iterator[Attack]:
    for indices in ((0, 0), (1, 0), (0, 2, 1), (65535, 65535), (5, 6, 5), ()):
        rows = [layer(index) for index in indices]
        yield from both(f"layers {indices}", lambda raw, r=rows: setattr(raw.section(LAYERS), "rows", r), LayerOrder)
    yield from both("1,024 layers of one index", lambda raw: setattr(raw.section(LAYERS), "rows", [layer(0)] * 1024), LayerOrder)
