"""Rows of a request's tokens between pages and a payload by torch's own indexing: what no shared kernel takes.

Where pages hold the wire's coding, rows are moved on the device. Where they do not, the rows of the tokens, never whole pages, go to the
host, and the reference converts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from backends.cpu import reference
from bridge.devices import SpanShare
from bridge.pages import BlockTable, LayerDescription, OpaquePages, PagedCache, PageSide
from bridge.wire import BLOCK_TOKENS, TagKeys, verify_tags


@dataclass(frozen=True)
class Place:
    """Where tokens [first, end) lie: int64 [end - first] each, on the device."""

    page: torch.Tensor
    position: torch.Tensor
    first: int
    end: int

    @classmethod
    def of(cls, table: BlockTable, first: int, end: int, num_pages: int, device: torch.device) -> Place:
        """Raises PagesDoNotFit."""
        page, position = table.locate(first, end, num_pages)
        return cls(torch.from_numpy(page).to(device), torch.from_numpy(position).to(device), first, end)

    def index(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if tensor.dim() == 6:
            tile = tensor.shape[2]
            return self.page, torch.div(self.position, tile, rounding_mode="floor"), self.position % tile
        return self.page, self.position


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _narrow(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Some heads of pages, as integers of the element's size, which torch can index on every device."""
    return tensor.view(_WORDS[tensor.element_size()]).narrow(3 if tensor.dim() == 6 else 2, first, count)


def read_rows(tensor: torch.Tensor, place: Place, first_head: int, heads: int) -> torch.Tensor:
    """uint8 [tokens, heads, bytes of a row], on the device."""
    narrow = _narrow(tensor, first_head, heads)
    return narrow[place.index(narrow)].flatten(2).contiguous().view(torch.uint8)


def write_rows(tensor: torch.Tensor, place: Place, first_head: int, heads: int, rows: torch.Tensor) -> None:
    """The inverse of read_rows; `rows` is contiguous."""
    narrow = _narrow(tensor, first_head, heads)
    shape = (*rows.shape[:2], *narrow.shape[4 if narrow.dim() == 6 else 3 :])
    narrow[place.index(narrow)] = rows.view(narrow.dtype).reshape(shape)


def _planes(layer: LayerDescription, share: SpanShare, payload: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(pages, their plane in the payload as uint8 [heads, blocks, 16, bytes of a row]) of each plane that has bytes.

    payload: uint8 [share.nbytes], contiguous.
    """
    span, planes = share.span, share.codec.planes(share.head_dim)
    blocks = payload.view(share.head_count, span.run_bytes)[:, : span.blocks * span.block_bytes].unflatten(1, (span.blocks, -1))
    found = []
    for side, codes, scalars in zip(layer.sides, planes[:2], planes[2:], strict=True):
        for tensor, plane in ((side.codes, codes), (side.scalars, scalars)) if side is not None else ():
            if tensor is not None and plane.nbytes:
                view = blocks[..., plane.offset : plane.offset + plane.nbytes].unflatten(2, (BLOCK_TOKENS, plane.row_bytes))
                found.append((tensor, view))
    return found


def rows_to_payload(layer: LayerDescription, share: SpanShare, place: Place, local: int, payload: torch.Tensor) -> None:
    """Writes the blocks of a share, zeros in rows that are not valid; the tags are left as they are."""
    span = share.span
    start = span.first_token - span.first_block * BLOCK_TOKENS
    for tensor, view in _planes(layer, share, payload):
        rows = read_rows(tensor, place, local, share.head_count)
        padded = torch.zeros((span.blocks * BLOCK_TOKENS, *rows.shape[1:]), dtype=torch.uint8, device=payload.device)
        padded[start : start + rows.shape[0]] = rows
        view.copy_(padded.unflatten(0, (span.blocks, BLOCK_TOKENS)).permute(2, 0, 1, 3))


def payload_to_rows(layer: LayerDescription, share: SpanShare, place: Place, local: int, payload: torch.Tensor) -> None:
    """Writes the tokens of `place` into the pages, from a share that was verified."""
    span = share.span
    start = place.first - span.first_block * BLOCK_TOKENS
    for tensor, view in _planes(layer, share, payload):
        rows = view.permute(1, 2, 0, 3).reshape(span.blocks * BLOCK_TOKENS, share.head_count, -1)
        write_rows(tensor, place, local, share.head_count, rows[start : start + place.end - place.first].contiguous())


# Through the host.


@dataclass(frozen=True)
class _HostRows:
    """Rows of some tokens in host memory, described as pages of one token."""

    sides: tuple[PageSide, PageSide | None]
    head_dim: int


def _on_host(layer: LayerDescription, share: SpanShare, place: Place, local: int, filled: bool) -> _HostRows:
    def rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        narrow = _narrow(tensor, local, share.head_count)
        inner = (narrow.shape[4] * narrow.shape[5],) if narrow.dim() == 6 else narrow.shape[3:]
        shape = (place.end - place.first, 1, share.head_count, *inner)
        if filled:
            return narrow[place.index(narrow)].cpu().reshape(shape).view(tensor.dtype)
        return torch.zeros(shape, dtype=narrow.dtype).view(tensor.dtype)

    def side(one: PageSide) -> PageSide:
        codes = rows(one.codes)
        return replace(one, codes=codes if codes is not None else one.codes, scalars=rows(one.scalars))

    key, value = layer.sides
    return _HostRows((side(key), side(value) if value is not None else None), layer.head_dim)


def _described(rows: _HostRows, share: SpanShare, place: Place) -> tuple[PagedCache, BlockTable]:
    table = BlockTable(cast(Sequence[int], np.arange(place.end, dtype=np.int64) - place.first), 1)
    return PagedCache({share.model_layer: cast(OpaquePages, rows)}, share.model_head), table


def pack_on_host(layer: LayerDescription, share: SpanShare, place: Place, local: int, keys: TagKeys) -> np.ndarray:
    """u8 [share.nbytes]: the share's runs, converted and tagged by the reference. Raises PagesDoNotFit."""
    out = np.zeros(share.nbytes, np.uint8)
    rows = _on_host(layer, share, place, local, filled=True)
    reference.pack_share(*_described(rows, share, place), share._replace(offset=0), keys, out)
    return out


def land_on_host(layer: LayerDescription, share: SpanShare, place: Place, local: int, keys: TagKeys, data: np.ndarray) -> None:
    """Verifies a share's bytes (u8 [share.nbytes]) and writes the tokens of `place`. Raises BadTag, DirtyPadding and PagesDoNotFit."""
    verify_tags(data, share.as_span(), keys)
    if place.first >= place.end:
        return
    rows = _on_host(layer, share, place, local, filled=False)
    reference.write_share(*_described(rows, share, place), share._replace(offset=0), data, place.first, place.end)
    for source, target in zip(rows.sides, layer.sides, strict=True):
        if source is None or target is None:
            continue
        for host, tensor in ((source.codes, target.codes), (source.scalars, target.scalars)):
            if host is not None and tensor is not None and host.numel():
                narrow = _narrow(tensor, local, share.head_count)
                shape = (host.shape[0], *narrow.shape[3 if narrow.dim() == 6 else 2 :])
                narrow[place.index(narrow)] = host.view(narrow.dtype).reshape(shape).to(tensor.device)
