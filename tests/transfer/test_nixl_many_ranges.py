"""Thousands of ranges in one read."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.transfer.agent import ReadRange
from bridge.transfer.nixl.ranges import RANGES_PER_PIECE, pieces_of
from tests.transfer.nixl_serving import MIB, POISON, TCP, Serving, content, memory_of, poisoned, wait


@pytest.fixture(scope="module", params=[None, TCP], ids=["default", "tcp"])
def serving(request):
    with Serving(4 * MIB, seed=5, transports=request.param) as process:
        yield process


@pytest.mark.parametrize("count", [2, 64, 3000])
def test_scattered_ranges_land_where_they_belong(make_agent, serving, count):
    agent = make_agent(transports=serving.transports)
    random = np.random.default_rng(count)
    step = 4 * MIB // count
    sizes = random.integers(1, step + 1, count)
    from_, to = random.permutation(count) * step, random.permutation(count) * step
    mine = poisoned(4 * MIB)
    target = agent.register(memory_of(mine))
    ranges = [ReadRange(int(r), int(t), int(n)) for r, t, n in zip(from_, to, sizes, strict=True)]
    transfer = agent.connect(serving.metadata).read(serving.memory, target, ranges)
    assert transfer.nbytes == sizes.sum()
    wait(transfer)
    transfer.release()
    theirs, expected = content(4 * MIB, 5), np.full(4 * MIB, POISON, np.uint8)
    for r in ranges:
        expected[r.local : r.local + r.nbytes] = theirs[r.remote : r.remote + r.nbytes]
    assert np.array_equal(mine, expected)


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
