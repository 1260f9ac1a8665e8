"""Pages and shares as messages, and back: tensors are copied into shared memory with the layout and alignment that they have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from backends.xpu.frames import ALIGNMENT, Layer, Share, Side, Tensor
from bridge.devices import SpanShare
from bridge.pages import LayerPages, OpaquePages, PagedCache, PagesDoNotFit, PageSide, SlotPages
from bridge.wire import Coding, LayerSpan, SlotCodec


def storage_bytes(tensor: torch.Tensor) -> np.ndarray:
    """All bytes of the memory that a tensor is a view of, u8, without a copy. Raises PagesDoNotFit for memory that is not the host's."""
    if tensor.device.type != "cpu":
        raise PagesDoNotFit(f"the pages are on {tensor.device}, the emulated XPU reads host memory")
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return whole.numpy()


class Places:
    """Where the storages of a call lie in shared memory: each once, at its own address modulo ALIGNMENT."""

    def __init__(self, first: int) -> None:
        self.end = first
        self.storages: dict[int, tuple[np.ndarray, int]] = {}

    def of(self, tensor: torch.Tensor) -> Tensor:
        held = storage_bytes(tensor)
        address = tensor.untyped_storage().data_ptr()
        if address not in self.storages:
            self.end += (address - self.end) % ALIGNMENT
            self.storages[address] = (held, self.end)
            self.end += held.size
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Tensor(self.storages[address][1], held.size, dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _side(side: PageSide, places: Places) -> Side:
    scalars = places.of(side.scalars) if side.scalars is not None else None
    return Side(side.coding.to_bytes(), places.of(side.codes), scalars, side.scale, side.folded)


def layers_as_messages(cache: PagedCache, indices: Iterable[int], places: Places) -> tuple[Layer, ...]:
    """The layers of these indices, their storages placed."""
    made = []
    for index in sorted(set(indices)):
        layer = cache.layers[index]
        kind = {LayerPages: "layer", SlotPages: "slots", OpaquePages: "opaque"}[type(layer)]
        sides = tuple(_side(side, places) for side in layer.sides if side is not None)
        made.append(Layer(index, kind, sides, layer.head_dim, layer.meaning if isinstance(layer, OpaquePages) else ""))
    return tuple(made)


def shares_as_messages(shares: Sequence[SpanShare]) -> tuple[Share, ...]:
    return tuple(
        Share(
            tuple(share.span),
            share.codec.key.to_bytes(),
            share.codec.value.to_bytes(),
            share.model_layer,
            share.head_dim,
            share.head_first,
            share.head_count,
            share.model_head,
            share.offset,
            share.key_scale,
            share.value_scale,
        )
        for share in shares
    )


# In the worker.


def _tensor(described: Tensor, memory: np.ndarray) -> torch.Tensor:
    """The view on shared memory."""
    dtype: torch.dtype = getattr(torch, described.dtype)
    end = described.place + described.nbytes
    if described.place < 0 or described.nbytes < 0 or end > memory.size:
        raise PagesDoNotFit("a tensor does not lie in the shared memory")
    # A view of the whole storage first, so that offset and strides are the engine's; torch checks them against its size.
    whole = torch.from_numpy(memory[described.place : end - described.nbytes % dtype.itemsize]).view(dtype)
    return torch.as_strided(whole, described.shape, described.strides, described.offset)


def cache_of(layers: Sequence[Layer], first_head: int, memory: np.ndarray) -> PagedCache:
    """The engine's description again, on shared memory."""
    found: dict[int, LayerPages | SlotPages | OpaquePages] = {}
    for layer in layers:
        sides = [
            PageSide(
                Coding.from_bytes(side.coding),
                _tensor(side.codes, memory),
                _tensor(side.scalars, memory) if side.scalars is not None else None,
                side.scale,
                side.folded,
            )
            for side in layer.sides
        ]
        key, value = sides[0], sides[1] if len(sides) > 1 else None
        if layer.kind == "layer":
            found[layer.index] = LayerPages(key.codes, value.codes if value else None, key.scale, value.scale if value else 1.0)
        elif layer.kind == "slots" and value is not None:
            found[layer.index] = SlotPages((key, value), layer.head_dim)
        else:
            found[layer.index] = OpaquePages(key.codes, layer.meaning, layer.head_dim)
    return PagedCache(found, first_head)


def shares_of(messages: Sequence[Share]) -> list[SpanShare]:
    return [
        SpanShare(
            LayerSpan(*message.span),
            SlotCodec(Coding.from_bytes(message.key), Coding.from_bytes(message.value)),
            message.index,
            message.head_dim,
            message.head_first,
            message.head_count,
            message.model_head,
            message.offset,
            message.key_scale,
            message.value_scale,
        )
        for message in messages
    ]
