"""Thousands of ranges are cut into pieces of bounded size."""

from __future__ import annotations

import numpy as np

from bridge.transfer.ranges import RANGES_PER_PIECE, pieces_of


def test_pieces_cover_every_byte_once():
    random = np.random.default_rng(0)
    sizes = np.concatenate([random.integers(1, 50_000, 5000), [1_000_001, 8192, 8193]])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    pieces = pieces_of(np.stack([starts, starts, sizes], axis=1), 8192)
    assert max(len(p) for p in pieces) <= RANGES_PER_PIECE
    assert max(int(p[:, 2].sum()) for p in pieces) <= 8192
    rows = np.concatenate(pieces)
    assert (rows[1:, 0] == (rows[:, 0] + rows[:, 2])[:-1]).all()
    assert rows[0, 0] == 0
    assert rows[:, 2].sum() == sizes.sum()
