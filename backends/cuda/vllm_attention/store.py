"""New keys and values of a step -> TurboQuant bytes in a paged cache, in vLLM's slots or in planes. One launch, nothing allocated.

One program codes `ROWS` (token, kv head) rows with the reference encoder's own operations (docs/wire-format.md, section 4), so the
bytes are those of a packed payload. A block of planes is 16 tokens of one kv head, see backends/kernels/attend/pages.py.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from backends.kernels.attend.pages import PRESETS, TILE, centroids, slot_bytes
from backends.kernels.elements import BF16, FP16, to_float
from backends.kernels.fp8 import encode_e4m3
from backends.kernels.pack import affine_groups
from backends.kernels.rotation import bucketise, butterfly, sum_of_squares
from backends.kernels.streams import group_codes, words_of_bytes, words_of_groups

SMALL = 2048
"""Rows up to which a program takes one: a decode step is bound by latency, a prefill by work."""
MANY = 4
"""Rows of a program beyond that."""


@triton.jit
def store_words(at, words, valid, ROWS: tl.constexpr, W: tl.constexpr, GAPS: tl.constexpr):
    """int32 words [ROWS, W] -> int16 halves at the pointers `at` [ROWS]. GAPS: 3 bit words in the columns of streams.word_columns."""
    halves = tl.reshape(tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF), [ROWS, 2 * W]).to(tl.int16)
    column = tl.arange(0, 2 * W)
    if GAPS:
        place = column // 8 * 6 + column % 8
        tl.store(at[:, None] + place[None, :], halves, mask=valid[:, None] & (column % 8 < 6)[None, :])
    else:
        tl.store(at[:, None] + column[None, :], halves, mask=valid[:, None])


@triton.jit
def store_kernel(
    key, value, places, cache, midpoints, rows, heads,
    key_token, key_head, value_token, value_head, page_halves,
    D: tl.constexpr, PAGE_TOKENS: tl.constexpr, ELEMENT: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    PLANES: tl.constexpr, ROOT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    KEY: tl.constexpr = D * KEY_BITS // 16  # sizes in halves, of 16 bits
    NORM: tl.constexpr = 0 if KEY_BITS == 8 else 1
    VALUE: tl.constexpr = D * VALUE_BITS // 16
    SLOT: tl.constexpr = KEY + NORM + VALUE + 2

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = row // heads
    head = row % heads
    place = tl.load(places + token, mask=row < rows, other=-1).to(tl.int64)
    valid = place >= 0
    column = tl.arange(0, D)[None, :]
    k = tl.load(key + (token.to(tl.int64) * key_token + head * key_head)[:, None] + column, mask=valid[:, None], other=0)
    v = tl.load(value + (token.to(tl.int64) * value_token + head * value_head)[:, None] + column, mask=valid[:, None], other=0)

    page = cache.to(tl.pointer_type(tl.int16)) + place // PAGE_TOKENS * page_halves
    within = (place % PAGE_TOKENS).to(tl.int32)
    if PLANES:
        r = within % 16
        block = page + (head * (PAGE_TOKENS // 16) + within // 16) * (16 * SLOT)
        key_at = block + r * KEY
        value_at = block + 16 * KEY + r * VALUE
        norm_at = block + 16 * (KEY + VALUE) + r
        pair_at = block + 16 * (KEY + VALUE + NORM) + 2 * r
    else:
        key_at = page + (within * heads + head) * SLOT
        norm_at = key_at + KEY
        value_at = norm_at + NORM
        pair_at = value_at + VALUE

    y = to_float(v, ELEMENT)
    zero = tl.min(y, 1)
    levels = tl.full([ROWS], (1 << VALUE_BITS) - 1, tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(y, 1) - zero, levels), 1e-8)
    groups = affine_groups(y, zero, scale, scale, ROWS, D, VALUE_BITS, False, False)
    store_words(value_at, words_of_groups(groups, ROWS, D // 8, VALUE_BITS), valid, ROWS, D // 8, VALUE_BITS == 3)
    tl.store(pair_at, scale.to(tl.float16).to(tl.int16, bitcast=True), mask=valid)
    tl.store(pair_at + 1, zero.to(tl.float16).to(tl.int16, bitcast=True), mask=valid)

    x = to_float(k, ELEMENT)
    if KEY_BITS == 8:
        store_words(key_at, words_of_bytes(encode_e4m3(x, False), ROWS, D), valid, ROWS, D // 4, False)
    else:
        norm = tl.sqrt_rn(sum_of_squares(x, ROWS, D))
        inverse = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), norm + 1e-8)
        unit = butterfly(x, ROWS, D) * inverse[:, None]
        codes = group_codes(bucketise(unit * ROOT, midpoints, KEY_BITS), ROWS, D, KEY_BITS)
        store_words(key_at, words_of_groups(codes, ROWS, D // 8, KEY_BITS), valid, ROWS, D // 8, KEY_BITS == 3)
        tl.store(norm_at, norm.to(tl.float16).to(tl.int16, bitcast=True), mask=valid)


@functools.cache
def midpoint_tensor(head_dim: int, bits: int, device: torch.device) -> torch.Tensor:
    """fp32 [2**bits - 1] on the device: the means of neighbouring centroids."""
    book = torch.tensor(centroids(head_dim, bits), dtype=torch.float32)
    return ((book[:-1] + book[1:]) / 2).to(device)


def store(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, places: torch.Tensor, preset: str, layout: str, rows_of_program: int = 0
) -> None:
    """Codes keys and values and writes each token to its place.

    key, value  [N, kv heads, D] fp16 or bf16, last dimension contiguous, keys not rotated
    cache       uint8 [pages, page tokens, kv heads, slot bytes] as vLLM has it, contiguous within a page. layout "planes": the same bytes
                of a page hold [kv heads, page tokens / 16] blocks
    places      [N] integers: page * page tokens + token within the page; negative: the token is not stored
    rows_of_program  for measurements; 0: chosen by N
    Raises ValueError for tensors that do not fit.
    """
    tokens, heads, dim = key.shape
    bits, value_bits = PRESETS[preset]
    page_tokens, size = cache.shape[1], slot_bytes(preset, dim)
    fits = cache.dtype == torch.uint8 and cache.shape[2:] == (heads, size) and cache.stride()[1:] == (heads * size, size, 1)
    if not fits or cache.stride(0) % 2 or cache.data_ptr() % 2 or page_tokens % TILE:
        raise ValueError(
            f"a cache of shape {tuple(cache.shape)}, strides {cache.stride()} does not hold {preset} of {heads} heads of {dim}"
        )
    if value.shape != key.shape or key.stride(2) != 1 or value.stride(2) != 1 or key.dtype != value.dtype:
        raise ValueError("keys and values must have one shape and dtype, and a contiguous last dimension")
    elements = {torch.bfloat16: BF16.value, torch.float16: FP16.value}
    if key.dtype not in elements:
        raise ValueError(f"keys and values are {key.dtype}: float16 or bfloat16 is needed")
    if places.shape != (tokens,) or not places.is_contiguous() or places.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"places must be {tokens} contiguous integers")
    rows = tokens * heads
    if not rows:
        return
    per = rows_of_program or (1 if rows <= SMALL else MANY)
    midpoints = places if bits == 8 else midpoint_tensor(dim, bits, key.device)
    store_kernel[(triton.cdiv(rows, per),)](
        key.view(torch.int16), value.view(torch.int16), places, cache, midpoints, rows, heads,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), cache.stride(0) // 2,
        D=dim, PAGE_TOKENS=page_tokens, ELEMENT=elements[key.dtype], KEY_BITS=bits, VALUE_BITS=value_bits,
        PLANES=layout == "planes", ROOT=dim**-0.5, ROWS=per, num_warps=1, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
