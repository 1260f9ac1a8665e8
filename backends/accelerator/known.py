"""Routes that are remembered: every chunk of every request asks for the same layers."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from backends.accelerator.routes import Route, route
from bridge.devices import ShareColumn, SpanShare
from bridge.pages import LayerDescription, PagedCache, PagesDoNotFit
from bridge.wire import SlotCodec

_REMEMBERED = 1 << 12
_REMEMBERED_COLUMNS = 1 << 11
"""Each keeps a cache, of which some engines make one for each request."""


@dataclass(frozen=True, eq=False)
class Known:
    """What is asked about a layer for every share of every chunk. group: those of one group may share a launch."""

    layer: LayerDescription
    way: Route
    group: int
    heads: int
    head_dim: int
    block_size: int
    num_pages: int


class Alike(NamedTuple):
    """Layers of a column that go one way, in pages of one size. places: int64, theirs in the column; None: all of them."""

    places: np.ndarray | None
    known: tuple[Known, ...]


class Routes:
    """The route of each layer with each codec, and of whole columns of layers. Keeps the layers, and so their pages, until `forget`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[tuple, tuple[SlotCodec, Known]] = {}
        self._columns: dict[tuple, tuple[object, list[Alike]]] = {}
        self._codecs: dict[SlotCodec, SlotCodec] = {}
        self._groups: dict[tuple, int] = {}
        self._learning = threading.RLock()

    def of_column(self, cache: PagedCache, column: ShareColumn, landing: bool) -> list[Alike]:
        """The column's layers by the way that they go. Raises PagesDoNotFit for pages of another device."""
        like, held = column.like, column.held
        codec = self._codecs.setdefault(like.codec, like.codec)  # one object for all equal ones
        key = id(held), id(cache), id(codec), like.head_dim, landing
        found = self._columns.get(key)
        if found is None:
            with self._learning:
                made = list(self._sorted_out(cache, column, codec, landing))
                if held.first_head == held.end_head:
                    return made  # a column that was made for this call alone
                if len(self._columns) >= _REMEMBERED_COLUMNS:
                    self._columns.clear()
                # What the key names by its id is kept, so that the id stays its own.
                found = self._columns[key] = (held, cache, codec), made
        return found[1]

    def _sorted_out(self, cache: PagedCache, column: ShareColumn, codec: SlotCodec, landing: bool) -> list[Alike]:
        alike: dict[tuple, list[tuple[int, Known]]] = {}
        for place, share in enumerate(column):
            known = self._of_layer(cache.layers[share.model_layer], share, codec, landing)
            sizes = known.group, known.heads, known.head_dim, known.block_size, known.num_pages
            alike.setdefault(sizes, []).append((place, known))
        return [
            Alike(None if len(alike) == 1 else np.array([place for place, _ in rows], np.int64), tuple(known for _, known in rows))
            for rows in alike.values()
        ]

    def _of_layer(self, layer: LayerDescription, share: SpanShare, codec: SlotCodec, landing: bool) -> Known:
        """One thread at a time: two must not give unlike kinds of layers one number."""
        key = id(layer), id(codec), share.head_dim, share.key_scale, share.value_scale, landing
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _REMEMBERED:
                self.forget()
                self._codecs[codec] = codec
            side = layer.sides[0]
            if side.codes.device != self._device:
                raise PagesDoNotFit(f"the pages are on {side.codes.device}, this device reads {self._device}")
            way = route(layer, share, landing)
            group = self._groups.setdefault(way.alike, len(self._groups))
            known = Known(layer, way, group, side.heads, layer.head_dim, side.block_size, side.num_pages)
            found = self._found[key] = codec, known
        return found[1]

    def forget(self) -> None:
        self._columns.clear()
        self._found.clear()
        self._codecs.clear()
