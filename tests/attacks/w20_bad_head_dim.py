"""W20: head dimensions that the layer's codec cannot carry."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import BadHeadDim
from tests.attacks.attack import Attack, both
from tests.attacks.build import honest_rotated

ERROR = BadHeadDim


def attacks() -> Iterator[Attack]:
    for head_dim in (48, 80, 96, 112, 192, 576, 1008):
        yield from both(f"{head_dim} rotated", lambda raw, d=head_dim: raw.groups[0].update(head_dim=d), BadHeadDim, base=honest_rotated)
