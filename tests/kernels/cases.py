"""Pages, spans and payloads for the kernel tests, and what the reference device makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from backends.cpu import reference
from backends.kernels import plan
from backends.kernels.plan import Span, Tuning
from bridge.codecs import declared
from bridge.devices import SpanShare
from bridge.pages import BlockTable, LayerPages, PagedCache
from bridge.wire import Element, LayerSpan, SlotCodec, TagKeys
from bridge.wire.payload import tag_plane_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = Tuning(blocks=2, matrix=False, fused=False, canonical_nan=False, integer_cast=True)
"""The reference's own arithmetic."""
_GPU = DEVICE == "cuda"
FAST = Tuning(blocks=4, warps=4, matrix=True, fused=_GPU, canonical_nan=_GPU, wide=not _GPU, integer_cast=not _GPU)
"""What a card runs, where the interpreter can."""
SINGLE = replace(FAST, blocks=1, warps=1)
"""One block to a program, which has ways of its own."""
AHEAD = replace(SINGLE, steps=2, stages=2, part=32, fill=1)
"""Two kv heads to a program, one after another."""
DTYPES = {Element.BF16: torch.bfloat16, Element.FP16: torch.float16, Element.FP32: torch.float32}
TURBOQUANT = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
CODECS = ("raw", "fp8_e4m3", *TURBOQUANT)
KEYS = TagKeys(bytes(range(32)), lease=7, generation=3)


@dataclass
class Case:
    """Random pages on the host and everything a launch needs."""

    layers: list[LayerPages]
    table: list[int]
    block_size: int
    span: Span
    codec: SlotCodec
    element: Element
    heads: int
    scales: tuple[float, float] = (1.0, 1.0)

    @property
    def head_dim(self) -> int:
        return self.layers[0].head_dim

    @property
    def num_pages(self) -> int:
        return self.layers[0].key.shape[0]

    def spans(self) -> list[list[LayerSpan]]:
        """[chunk][layer], payload order."""
        offset = ordinal = 0
        table = []
        for chunk in range(self.span.chunks):
            start = (self.span.first_chunk + chunk) * self.span.chunk_tokens
            first, end = max(self.span.first, start), min(self.span.end, start + self.span.chunk_tokens)
            blocks, block_bytes = self.span.blocks(chunk), self.codec.block_bytes(self.head_dim)
            row = []
            for layer in range(len(self.layers)):
                made = LayerSpan(chunk, layer, offset, self.heads, blocks, block_bytes, first // 16, ordinal, first, end)
                offset += self.heads * (blocks * block_bytes + tag_plane_bytes(blocks))
                ordinal += self.heads * blocks
                row.append(made)
            table.append(row)
        return table

    @property
    def nbytes(self) -> int:
        last = self.spans()[-1][-1]
        return last.offset + last.nbytes

    @property
    def total_blocks(self) -> int:
        last = self.spans()[-1][-1]
        return last.first_ordinal + last.heads * last.blocks

    def cache(self) -> PagedCache:
        return PagedCache(dict(enumerate(self.layers)))

    def share(self, span: LayerSpan) -> SpanShare:
        return SpanShare(span, self.codec, span.layer, self.head_dim, 0, self.heads, 0, span.offset, *self.scales)

    def reference_payload(self) -> np.ndarray:
        out = np.full(self.nbytes, 0xCD, np.uint8)
        for row in self.spans():
            for span in row:
                reference.pack_share(self.cache(), BlockTable(self.table, self.block_size), self.share(span), KEYS, out)
        return out

    def runs(self) -> torch.Tensor:
        return plan.run_table([[(s.offset, s.first_ordinal) for s in row] for row in self.spans()], DEVICE)

    def keys(self) -> torch.Tensor:
        return plan.device_keys(KEYS.hash_keys(self.codec.block_bytes(self.head_dim)), DEVICE)

    def masks(self) -> torch.Tensor:
        return plan.device_words(KEYS.masks(0, self.total_blocks), DEVICE)

    def device_table(self) -> torch.Tensor:
        return torch.tensor(self.table, dtype=torch.int32, device=DEVICE)

    def device_scales(self) -> torch.Tensor | None:
        if self.scales == (1.0, 1.0):
            return None
        return torch.tensor([self.scales] * len(self.layers), dtype=torch.float32, device=DEVICE)


def on_device(layers: list[LayerPages]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same pages with the same strides on the device."""

    def move(side: torch.Tensor) -> torch.Tensor:
        copy = torch.empty_strided(side.shape, side.stride(), dtype=side.dtype, device=DEVICE)
        copy.copy_(side)
        return copy

    return [(move(layer.key), move(layer.value)) for layer in layers]


def make_case(
    codec: str = "turboquant_4bit_nc",
    head_dim: int = 128,
    element: Element = Element.BF16,
    *,
    layers: int = 2,
    heads: int = 2,
    first: int = 0,
    end: int = 64,
    chunk_tokens: int = 64,
    block_size: int = 16,
    layout: str = "nhd",
    seed: int = 0,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Case:
    rng = np.random.default_rng(seed)
    needed = -(-end // block_size)
    num_pages = needed + 3
    table = rng.permutation(num_pages)[:needed].tolist()
    made = []
    for _ in range(layers):
        sides = []
        for _ in range(2):
            shape = (num_pages, block_size, heads, head_dim) if layout == "nhd" else (num_pages, heads, block_size, head_dim)
            values = rng.standard_normal(shape, dtype=np.float32) * np.exp(rng.standard_normal((*shape[:-1], 1), dtype=np.float32))
            values.reshape(-1, head_dim)[::13] = 0  # vectors of zeros, which engines' padding holds
            sides.append(torch.from_numpy(values).to(DTYPES[element]))
        made.append(LayerPages.nhd(*sides) if layout == "nhd" else LayerPages.hnd(*sides))
    slot_codec = declared(codec).for_layer(head_dim, element)
    return Case(made, table, block_size, Span(first, end, chunk_tokens), slot_codec, element, heads, scales)


def differing_codes(a: np.ndarray, b: np.ndarray, case: Case) -> tuple[int, int]:
    """(bytes that differ in code planes, bytes that differ in scalar planes) of two payloads; tags are left out."""
    codes = scalars = 0
    planes = case.codec.planes(case.head_dim)
    for row in case.spans():
        for span in row:
            for head in range(span.heads):
                at = span.offset + head * span.run_bytes
                x = a[at : at + span.blocks * span.block_bytes].reshape(span.blocks, -1)
                y = b[at : at + span.blocks * span.block_bytes].reshape(span.blocks, -1)
                split = planes[2].offset
                codes += int((x[:, :split] != y[:, :split]).sum())
                scalars += int((x[:, split:] != y[:, split:]).sum())
    return codes, scalars
