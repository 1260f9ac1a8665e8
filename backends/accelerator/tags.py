"""Tags of whole runs, for any codec: verified before anything of a payload is written to pages, or made where rows were only moved.

One launch for all runs of a call, whatever their block sizes: a run is a record of 8 integers, and everything else that the kernel
needs stands in the same array of 64-bit words (see arguments.py).
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from backends.kernels.tags import tag_products

RECORD = 8
"""Words of a record: offset of the run / 16, blocks, words of a block / 4, place of its first mask, place of its hash keys, first valid
row of the first block, end of the valid rows of the last block, nothing."""
_BLOCKS, _WORDS = 4, 256
OPTIONS = {"num_warps": 4}
"""Triton's launch options, unless an architecture has its own."""


@triton.jit
def tags_kernel(
    payload, arguments, result, records,
    TB: tl.constexpr, W: tl.constexpr, STORE: tl.constexpr, RECORD_WORDS: tl.constexpr,
):  # fmt: skip
    record = arguments + records + tl.program_id(1).to(tl.int64) * RECORD_WORDS
    nb = tl.load(record + 1).to(tl.int32)
    block = tl.program_id(0) * TB
    if block >= nb:
        return
    word = tl.load(record) * 4
    words = tl.load(record + 2).to(tl.int32) * 4
    masks = arguments + tl.load(record + 3)
    keys = arguments + tl.load(record + 4)
    b = block + tl.arange(0, TB)
    exists = b < nb
    data = payload.to(tl.pointer_type(tl.int32)) + (word + b.to(tl.int64) * words)[:, None]
    products = tl.zeros([TB, W], tl.int64)
    for start in range(0, words, W):
        c = start + tl.arange(0, W)
        w = tl.load(data + c[None, :], mask=exists[:, None] & (c < words)[None, :], other=0)
        products += tag_products(w, tl.load(keys + 2 + c, mask=c < words, other=0)[None, :])
    first = tl.where(b == 0, tl.load(record + 5).to(tl.int32), 0)
    end = tl.where(b == nb - 1, tl.load(record + 6).to(tl.int32), 16)
    tag = tl.sum(products, 1) + tl.load(masks + b, mask=exists, other=0)
    tag += tl.load(keys + 1) * (first | (end << 8)).to(tl.int64)
    tags = payload.to(tl.pointer_type(tl.int64)) + (word + nb.to(tl.int64) * words) // 2
    last = (nb % 2 == 1) & (block + TB >= nb)
    if STORE:
        tl.store(tags + b, tag, mask=exists)
        if last:
            tl.store(tags + nb, tl.zeros([], tl.int64))
    else:
        wrong = tl.sum((exists & (tl.load(tags + b, mask=exists, other=0) != tag)).to(tl.int32), 0)
        if wrong > 0:
            tl.atomic_add(result, wrong.to(tl.int64))
        if last:  # noqa: SIM102 (the load must not happen otherwise)
            if tl.load(tags + nb) != 0:
                tl.atomic_add(result + 2, tl.full([], 1, tl.int64))


def launch_tags(
    payload: torch.Tensor,
    arguments: torch.Tensor,
    result: torch.Tensor,
    records: int,
    runs: int,
    most_blocks: int,
    store: bool,
    options: Mapping[str, int] = OPTIONS,
) -> None:
    """Queues one launch over `runs` runs, whose records begin at word `records` of `arguments` (int64 on the device).

    payload: uint8 on the device, from a multiple of 16 bytes on. most_blocks: of the longest run. result: int64 [3], to which wrong tags
    (word 0) and padding that is not zero (word 2) are added. store: tags and their padding are written instead of compared. options:
    Triton's, for the launch.
    """
    tiles = (most_blocks + _BLOCKS - 1) // _BLOCKS
    tags_kernel[(tiles, runs)](
        payload, arguments, result, records, TB=_BLOCKS, W=_WORDS, STORE=store, RECORD_WORDS=RECORD, **options
    )  # fmt: skip
