"""The masks of tags, made on the device: the key stream of ChaCha20 (RFC 8439, section 2.3), where a call has many blocks.

A payload of 8,192 tokens and 48 layers has 98,304 masks: 0.3 ms of a host's time, and 0.8 MB to copy.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

RECORD = 3
"""Words of a record: ordinal of the first mask, how many there are, and the word where the first one is to stand."""
_STATES = 64
_MASKS_OF_STATE = 8
OPTIONS = {"num_warps": 2}
"""Triton's launch options, unless an architecture has its own."""


@triton.jit
def _quarter(a, b, c, d):
    """RFC 8439, section 2.1."""
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _store(out, place, count, low, high):
    mask = low.to(tl.int64) | (high.to(tl.int64) << 32)
    tl.store(out + place, mask, mask=(place >= 0) & (place < count))


@triton.jit(do_not_specialize=["state", "records"])
def masks_kernel(words, state, records, B: tl.constexpr, RECORD_WORDS: tl.constexpr):
    record = words + records + tl.program_id(1) * RECORD_WORDS
    first, count = tl.load(record), tl.load(record + 1)
    out = words + tl.load(record + 2)
    number = first // 8 + tl.program_id(0) * B
    if number * 8 >= first + count:
        return
    counter = number + tl.arange(0, B)
    place = counter * 8 - first
    given = (words + state).to(tl.pointer_type(tl.uint32))
    zeros = tl.zeros([B], tl.uint32)
    s0, s1, s2, s3 = tl.load(given), tl.load(given + 1), tl.load(given + 2), tl.load(given + 3)
    s4, s5, s6, s7 = tl.load(given + 4), tl.load(given + 5), tl.load(given + 6), tl.load(given + 7)
    s8, s9, s10, s11 = tl.load(given + 8), tl.load(given + 9), tl.load(given + 10), tl.load(given + 11)
    s12, s13, s14, s15 = counter.to(tl.uint32), tl.load(given + 13), tl.load(given + 14), tl.load(given + 15)
    x0, x1, x2, x3 = s0 + zeros, s1 + zeros, s2 + zeros, s3 + zeros
    x4, x5, x6, x7 = s4 + zeros, s5 + zeros, s6 + zeros, s7 + zeros
    x8, x9, x10, x11 = s8 + zeros, s9 + zeros, s10 + zeros, s11 + zeros
    x12, x13, x14, x15 = s12 + zeros, s13 + zeros, s14 + zeros, s15 + zeros
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    _store(out, place, count, x0 + s0, x1 + s1)
    _store(out, place + 1, count, x2 + s2, x3 + s3)
    _store(out, place + 2, count, x4 + s4, x5 + s5)
    _store(out, place + 3, count, x6 + s6, x7 + s7)
    _store(out, place + 4, count, x8 + s8, x9 + s9)
    _store(out, place + 5, count, x10 + s10, x11 + s11)
    _store(out, place + 6, count, x12 + s12, x13 + s13)
    _store(out, place + 7, count, x14 + s14, x15 + s15)


def launch_masks(words: torch.Tensor, state: int, records: int, count: int, most: int, options: Mapping[str, int] = OPTIONS) -> None:
    """Queues one launch that writes `count` stretches of masks into `words`, int64 on the device.

    state: the word where bridge.wire.TagKeys.state stands. records: the word of the first of `count` records. most: the masks of the
    longest stretch. options: Triton's, for the launch.
    """
    states = most // _MASKS_OF_STATE + 2  # a stretch may begin and end in the middle of one
    masks_kernel[((states + _STATES - 1) // _STATES, count)](words, state, records, B=_STATES, RECORD_WORDS=RECORD, **options)
