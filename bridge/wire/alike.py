"""Which layers of a manifest are alike. A model's table of layers is the same for every request, so this is worked out once for each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from bridge.wire.manifest import Layer

T = TypeVar("T")
_TABLES = 64


class OfLayers(Generic[T]):
    """What `make` finds out about a table of layers, remembered for tables that are the same object; the oldest are forgotten.

    Comparing two tables would cost more than is saved, and tuples do not change; for other sequences `make` is called each time.
    Several threads may use one.
    """

    def __init__(self, make: Callable[[Sequence[Layer]], T]) -> None:
        self._make = make
        self._found: OrderedDict[int, tuple[Sequence[Layer], T]] = OrderedDict()

    def __call__(self, layers: Sequence[Layer]) -> T:
        known = self._found.get(id(layers))
        if known is not None and known[0] is layers:
            return known[1]
        made = self._make(layers)
        if type(layers) is tuple:
            self._found[id(layers)] = layers, made
            while len(self._found) > _TABLES:
                self._found.popitem(last=False)
        return made


@dataclass(frozen=True)
class LayerKinds:
    """kinds: the pairs (codec, group) that a table's layers have. kind_of: int64 [layers], each layer's among them.

    members: int64, the positions in the table of each kind's layers, ascending.
    """

    kinds: tuple[tuple[int, int], ...]
    kind_of: np.ndarray
    members: tuple[np.ndarray, ...]

    @cached_property
    def counts(self) -> tuple[tuple[tuple[int, int], int], ...]:
        """Each kind with the number of its layers."""
        return tuple((kind, len(members)) for kind, members in zip(self.kinds, self.members, strict=True))


def _sorted_out(layers: Sequence[Layer]) -> LayerKinds:
    numbers: dict[tuple[int, int], int] = {}
    kind_of = np.array([numbers.setdefault((layer.codec, layer.group), len(numbers)) for layer in layers], np.int64)
    return LayerKinds(tuple(numbers), kind_of, tuple(np.flatnonzero(kind_of == number) for number in range(len(numbers))))


kinds_of = OfLayers(_sorted_out)
"""LayerKinds of a manifest's layers."""
