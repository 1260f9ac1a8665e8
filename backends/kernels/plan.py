"""What the kernels are given: pages as pointers and strides, runs, keys, constants of a codec, and launch parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from bridge.codecs import tables
from bridge.pages import PagesDoNotFit
from bridge.wire import BLOCK_TOKENS, Coding, CodingKind, Element, SlotCodec

_ELEMENT_OF = {torch.bfloat16: Element.BF16, torch.float16: Element.FP16, torch.float32: Element.FP32}
HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True)
class Pages:
    """Pages of several layers, K and V each [num_pages, block_size, kv_heads, head_dim] with the last axis contiguous.

    anchor: the first layer's K, as integers of the element's size. offsets: int64 [layers, 2] on the device, elements from the anchor to
    each layer's K and V: engines allocate layers apart, and a distance from a pointer argument, unlike an address, lets the compiler
    know the alignment. Strides in elements. align: a power of two, in bytes, that divides every row's address.
    element: E4M3FN pages are uint8. held: the layers' tensors, kept alive.
    """

    anchor: torch.Tensor
    offsets: torch.Tensor
    page_stride: int
    token_stride: int
    head_stride: int
    num_pages: int
    block_size: int
    heads: int
    head_dim: int
    element: Element
    align: int = 16
    held: tuple[torch.Tensor, ...] = ()

    @property
    def layers(self) -> int:
        return self.offsets.shape[0]

    @property
    def align_elements(self) -> int:
        return self.align // self.anchor.element_size()


@dataclass(frozen=True)
class Slots:
    """Pages of vLLM TurboQuant slots of several layers: uint8 [num_pages, block_size, kv_heads, slot_bytes], one preset.

    anchor: the first layer's pages as int16. offsets: int64 [layers] on the device, int16 words from the anchor to each layer.
    Strides in int16 words. held: the layers' tensors, kept alive. aligned: tokens, pages and layers lie multiples of 4 bytes apart, so
    that all slots that a program writes begin alike, on such a multiple or 2 bytes past it. words: every page begins
    on a multiple of 4 bytes.
    """

    anchor: torch.Tensor
    offsets: torch.Tensor
    page_stride: int
    token_stride: int
    head_stride: int
    num_pages: int
    block_size: int
    heads: int
    head_dim: int
    held: tuple[torch.Tensor, ...] = ()
    aligned: bool = False
    words: bool = False

    @property
    def layers(self) -> int:
        return self.offsets.shape[0]


@dataclass(frozen=True)
class Span:
    """Tokens [first, end) of a sequence in chunks of chunk_tokens (a multiple of 16) on the absolute grid; all layers alike."""

    first: int
    end: int
    chunk_tokens: int

    @property
    def first_chunk(self) -> int:
        return self.first // self.chunk_tokens

    @property
    def chunks(self) -> int:
        return (self.end - 1) // self.chunk_tokens - self.first_chunk + 1

    def blocks(self, chunk: int) -> int:
        """Wire blocks of a run of the chunk number `chunk` (from 0)."""
        start = (self.first_chunk + chunk) * self.chunk_tokens
        first, end = max(self.first, start), min(self.end, start + self.chunk_tokens)
        return (end + BLOCK_TOKENS - 1) // BLOCK_TOKENS - first // BLOCK_TOKENS

    @property
    def most_blocks(self) -> int:
        """Blocks of the longest run."""
        return max(self.blocks(0), self.blocks(self.chunks - 1), self.blocks(min(1, self.chunks - 1)))


@dataclass(frozen=True)
class Tuning:
    """Launch parameters, chosen per device. Any value gives a correct result.

    blocks: wire blocks of one program, a power of two. warps: of one program.
    matrix: rotate bf16 and fp16 keys on the matrix units and bucketise by a polynomial (codes may differ from the reference at ties
    within rounding); otherwise every operation is the reference's. fused: tl.fma rounds once, so quotients may be corrected with it
    instead of divided by IEEE rules. ties_up: see pack.affine_groups. canonical_nan: see fp8.encode_e4m3.
    wide: matrix products of fp32 operands, for the interpreter. soft_roots: see rotation.root and quotient; needs `fused`.
    integer_cast: round to bf16 by integer arithmetic. registers: at most so many a thread, 0: the compiler's
    choice (CUDA only). steps: kv heads that a program of pack takes one after another, fewer where the launch would have under `fill`
    programs; stages: how many of them are read ahead, and the one at work. part: order of pack's +-1 matrix, 0: see pack_part.
    together: warps for each kv head where payload -> slots can take all kv heads of a block in one program, see page_order; 0: it takes
    one head a program.
    lanes: threads of a warp, 0: the compiler's choice; large_registers: twice the registers for half the threads (both Intel only).
    """

    blocks: int = 4
    warps: int = 4
    stages: int = 1
    matrix: bool = True
    fused: bool = True
    ties_up: bool = False
    canonical_nan: bool = True
    wide: bool = False
    soft_roots: bool = False
    integer_cast: bool = False
    registers: int = 0
    steps: int = 1
    part: int = 0
    fill: int = 1024
    together: int = 0
    lanes: int = 0
    large_registers: bool = False

    def steps_of(self, pairs: int, others: int) -> int:
        """How many of `pairs` pairs of a layer and a kv head a program of pack takes, where `others` programs share a pair.

        A divisor of `pairs`, at most `steps`, and less where the launch would have fewer than `fill` programs.
        """
        steps = math.gcd(pairs, self.steps)
        while steps > 1 and pairs // steps * others < self.fill:
            steps = math.gcd(steps, steps // 2)
        return steps

    def options(self) -> dict[str, int | bool | str]:
        """Triton's launch options."""
        made: dict[str, int | bool | str] = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": self.fused}
        if self.registers:
            made["maxnreg"] = self.registers
        if self.lanes:
            made["threads_per_warp"] = self.lanes
        if self.large_registers:
            made["grf_mode"] = "large"
        return made


def _distances(addresses: list[int], size: int, device: torch.device) -> torch.Tensor:
    """int64 on the device: how far each address lies from the first, in units of `size` bytes. Raises PagesDoNotFit."""
    distances = [address - addresses[0] for address in addresses]
    if any(distance % size for distance in distances):
        raise PagesDoNotFit(f"the layers of one launch must lie a multiple of {size} bytes apart")
    return torch.tensor([distance // size for distance in distances], dtype=torch.int64).to(device)


def pages_of(layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Pages:
    """Pages from (K, V) of each layer, all alike in shape, strides and type. Raises PagesDoNotFit."""
    key = layers[0][0]
    element = Element.E4M3FN if key.element_size() == 1 else _ELEMENT_OF.get(key.dtype)
    if element is None:
        raise PagesDoNotFit(f"pages of type {key.dtype} are not bfloat16, float16, float32 or uint8 holding e4m3")
    pointers, align = [], 16
    size = key.element_size()
    for pair in layers:
        for side in pair:
            if side.shape != key.shape or side.stride() != key.stride() or side.dtype != key.dtype or side.dim() != 4:
                raise PagesDoNotFit("the layers of one launch must be alike in shape, strides and type, K and V both")
            pointers.append(side.data_ptr())
    page_stride, token_stride, head_stride, last = key.stride()
    if last != 1:
        raise PagesDoNotFit(f"the elements of a vector must be contiguous, they are {last} apart")
    for step in (*pointers, page_stride * size, token_stride * size, head_stride * size):
        while step % align:
            align //= 2
    if align < max(4, size):
        raise PagesDoNotFit("rows of pages must begin on multiples of 4 bytes")
    words = key.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size])
    num_pages, block_size, heads, head_dim = key.shape
    return Pages(
        anchor=words,
        offsets=_distances(pointers, size, key.device).reshape(-1, 2),
        page_stride=page_stride,
        token_stride=token_stride,
        head_stride=head_stride,
        num_pages=num_pages,
        block_size=block_size,
        heads=heads,
        head_dim=head_dim,
        element=element,
        align=align,
        held=tuple(side for pair in layers for side in pair),
    )


def slots_of(layers: Sequence[torch.Tensor], codec: SlotCodec, head_dim: int) -> Slots:
    """Slots from each layer's uint8 pages [num_pages, block_size, kv_heads, slot_bytes], all alike. Raises PagesDoNotFit."""
    first, wanted = layers[0], codec.slot_bytes(head_dim)
    for layer in layers:
        if layer.shape != first.shape or layer.stride() != first.stride() or layer.dtype != torch.uint8 or layer.dim() != 4:
            raise PagesDoNotFit("the slot pages of one launch must be alike in shape and strides, and of type uint8")
    page_stride, token_stride, head_stride, last = first.stride()
    if last != 1 or first.shape[3] < wanted or (page_stride | token_stride | head_stride | first.data_ptr() | wanted) % 2:
        raise PagesDoNotFit(f"slots of {wanted} contiguous bytes on even addresses are wanted, the pages are {tuple(first.shape)}")
    words = first[..., :wanted].view(torch.int16)
    offsets = _distances([layer.data_ptr() for layer in layers], 2, first.device)
    num_pages, block_size, heads, _ = first.shape
    even_slots = wanted % 4 == 0 and head_stride % 4 == 0
    aligned = not any(step % 4 for step in (page_stride, token_stride, *(layer.data_ptr() for layer in layers)))
    return Slots(
        anchor=words,
        offsets=offsets,
        page_stride=page_stride // 2,
        token_stride=token_stride // 2,
        head_stride=head_stride // 2,
        num_pages=num_pages,
        block_size=block_size,
        heads=heads,
        head_dim=head_dim,
        held=tuple(layers),
        aligned=aligned and (even_slots or wanted % 4 == 2),
        words=not any(step % 4 for step in (page_stride, *(layer.data_ptr() for layer in layers))),
    )


def run_table(spans: Sequence[Sequence[tuple[int, int]]], device: torch.device | str) -> torch.Tensor:
    """int64 [chunks, layers, 2] on the device from (offset of the first head's run, ordinal of its first block) per chunk and layer."""
    return torch.tensor(np.asarray(spans, dtype=np.int64)).to(device)


def device_words(values: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """u64 [n] -> int64 [n] on the device: masks."""
    return torch.from_numpy(np.ascontiguousarray(values).view(np.int64).copy()).to(device)


def device_keys(keys: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """Hash keys u64 [1 + n] -> int64 [2 + n] on the device, one place further on, so that word 0's key is on a multiple of 16 bytes."""
    return device_words(np.concatenate([np.zeros(1, np.uint64), keys]), device)


NO_ORDINAL = 2**63 - 1


def new_result(device: torch.device | str) -> torch.Tensor:
    """int64 [3] for a landing kernel: no wrong tag, no ordinal, no dirty padding."""
    return torch.tensor([0, NO_ORDINAL, 0], dtype=torch.int64).to(device)


def sylvester(order: int) -> np.ndarray:
    """fp32 [order, order] of +-1, Sylvester's construction."""
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def pack_part(head_dim: int, wanted: int = 0) -> int:
    """Order of pack's +-1 matrix on the matrix units; longer vectors are cut into 2 or 4 parts, which a butterfly joins."""
    return min(max(wanted or 64, head_dim // 4), head_dim // 2)


def land_part(head_dim: int) -> int:
    """The same for land, where smaller is better: less of the matrix to bring to each program, and the first cache is its limit."""
    return max(32, head_dim // 4)


def encode_columns(order: int) -> np.ndarray:
    """Which column of the product stands where, so that the matrix units leave order / 4 neighbouring codes in one thread.

    Their result layout gives the four threads of a row the columns 8 n + 2 q + b (q: thread). Position (n, q, b) gets column
    (order / 4) q + 2 n + b.
    """
    n, q, b = np.meshgrid(np.arange(order // 8), np.arange(4), np.arange(2), indexing="ij")
    return (order // 4 * q + 2 * n + b).reshape(-1)


@lru_cache(maxsize=64)
def rotation_matrix(order: int, element: Element, device: str, permuted: bool) -> torch.Tensor:
    """[order, order] of +-1 in the pages' type, its columns permuted for pack or in order for land."""
    matrix = sylvester(order)
    if permuted:
        matrix = matrix[:, encode_columns(order)]
    dtype = {Element.BF16: torch.bfloat16, Element.FP16: torch.float16, Element.FP32: torch.float32}[element]
    return torch.from_numpy(np.ascontiguousarray(matrix)).to(dtype).to(device)


@lru_cache(maxsize=64)
def midpoint_tensor(head_dim: int, bits: int, device: str) -> torch.Tensor:
    """fp32 midpoints of the code book on the device."""
    return torch.from_numpy(tables.midpoints(head_dim, bits).copy()).to(device)


@lru_cache(maxsize=64)
def centroid_tensor(head_dim: int, bits: int, device: str) -> torch.Tensor:
    """fp32 entries of the code book on the device."""
    return torch.from_numpy(tables.centroids(head_dim, bits).copy()).to(device)


SPLIT_SCALE = 2.0**12
"""What sigma-unit centroids are multiplied with before they are split into two fp16 numbers, so that the lower one is no subnormal."""


@lru_cache(maxsize=64)
def split_centroids(head_dim: int, bits: int, device: str) -> torch.Tensor:
    """int32 [2**bits]: centroid * sqrt(head_dim) * SPLIT_SCALE as fp16 high (low half word) plus fp16 low (high half word)."""
    scaled = tables.centroids(head_dim, bits).astype(np.float64) * np.sqrt(head_dim) * SPLIT_SCALE
    high = scaled.astype(np.float16)
    low = (scaled - high.astype(np.float64)).astype(np.float16)
    words = high.view(np.uint16).astype(np.uint32) | (low.view(np.uint16).astype(np.uint32) << np.uint32(16))
    return torch.from_numpy(words.view(np.int32).copy()).to(device)


@lru_cache(maxsize=64)
def bucket_polynomial(head_dim: int, bits: int) -> tuple[tuple[float, ...], float]:
    """Coefficients of u, u**3, u**5 ... (seven, zeros at the end) of the odd f with f(m_i) = i at the positive midpoints in units of
    sigma, and the limit to which |u| is clamped: f grows up to there and stays below 2**(bits - 1) - 1/4.
    """
    mids = tables.midpoints(head_dim, bits).astype(np.float64) * np.sqrt(head_dim)
    positive = mids[mids > 0]
    powers = positive[:, None] ** (2 * np.arange(len(positive)) + 1)
    coefficients = np.linalg.solve(powers, np.arange(1, len(positive) + 1))
    return (*(float(c) for c in coefficients), *[0.0] * (7 - len(positive))), float(np.round(positive[-1] + 0.5, 3))


def side_kind(coding: Coding, element: Element) -> int:
    """A side's kind as the kernels number it: CodingKind. Raises PagesDoNotFit where raw elements would have to be converted."""
    if coding.kind is CodingKind.RAW and coding.element is not element:
        raise PagesDoNotFit(
            f"raw {coding.element.name} elements and {element.name} pages: these kernels move raw elements without conversion",
            remedy="choose another codec for this pair, or pages of the payload's type",
        )
    return int(coding.kind)


def inverse_root(head_dim: int) -> float:
    """1 / sqrt(head_dim) as fp32."""
    return float(np.float32(1 / np.sqrt(head_dim)))


def check_launch(
    pages: Pages | Slots, span: Span, block_table: torch.Tensor, heads: int, runs: torch.Tensor, payload: torch.Tensor
) -> None:
    """Raises PagesDoNotFit where the launch would read or write outside what was described."""
    if pages.head_dim not in HEAD_DIMS:
        raise PagesDoNotFit(f"head dimension {pages.head_dim}: the kernels take {', '.join(map(str, HEAD_DIMS))}")
    if span.chunk_tokens % BLOCK_TOKENS or not 0 <= span.first < span.end:
        raise PagesDoNotFit(f"tokens {span.first} to {span.end} in chunks of {span.chunk_tokens}")
    if block_table.dtype != torch.int32 or block_table.numel() * pages.block_size < span.end:
        raise PagesDoNotFit(f"a block table of {block_table.numel()} {block_table.dtype} entries does not reach token {span.end - 1}")
    if tuple(runs.shape) != (span.chunks, pages.layers, 2) or runs.dtype != torch.int64:
        raise PagesDoNotFit(f"a run table of shape {tuple(runs.shape)} for {span.chunks} chunks and {pages.layers} layers")
    if payload.dtype != torch.uint8 or payload.data_ptr() % 16 or not payload.is_contiguous():
        raise PagesDoNotFit("a payload is contiguous uint8 and begins on a multiple of 16 bytes")
    if not 0 < heads <= pages.heads:
        raise PagesDoNotFit(f"{heads} kv heads asked for, the pages have {pages.heads}")
