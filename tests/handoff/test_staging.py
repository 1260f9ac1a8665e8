"""The staging budget: never over, never lost, merged when freed."""

import random
import threading
import time

import pytest

from bridge.handoff.errors import StagingFull
from bridge.handoff.staging import ALIGNMENT, StagingPool


def test_extents_never_overlap_and_all_come_back():
    random.seed(7)
    pool, held = StagingPool(100 * ALIGNMENT + 17), []
    assert pool.capacity == 100 * ALIGNMENT
    for _ in range(5000):
        if held and random.random() < 0.5:
            pool.give_back(held.pop(random.randrange(len(held))))
        else:
            extent = pool.try_take(random.randrange(1, 9 * ALIGNMENT))
            if extent is not None:
                for other in held:
                    assert extent.offset + extent.nbytes <= other.offset or other.offset + other.nbytes <= extent.offset
                assert extent.offset + extent.nbytes <= pool.capacity
                held.append(extent)
        assert pool.used == sum(-(-e.nbytes // ALIGNMENT) * ALIGNMENT for e in held)
    for extent in held:
        pool.give_back(extent)
    assert pool.used == 0
    assert pool.take(pool.capacity, 0).offset == 0, "free extents were merged"


def test_what_can_never_fit_is_refused_at_once():
    with pytest.raises(StagingFull):
        StagingPool(ALIGNMENT).try_take(ALIGNMENT + 1)


def test_waiting_ends_in_time_or_in_an_extent():
    pool = StagingPool(2 * ALIGNMENT)
    extent = pool.take(2 * ALIGNMENT, 0)
    start = time.monotonic()
    with pytest.raises(StagingFull):
        pool.take(1, 0.2)
    assert 0.15 < time.monotonic() - start < 1
    threading.Timer(0.1, pool.give_back, [extent]).start()
    assert pool.take(1, 2.0).offset == 0


def test_quarantine_counts_until_it_settles():
    pool = StagingPool(4 * ALIGNMENT)
    settled = []
    pool.quarantine(pool.take(3 * ALIGNMENT, 0), lambda: bool(settled))
    assert pool.quarantined == 3 * ALIGNMENT
    assert pool.try_take(2 * ALIGNMENT) is None
    settled.append(True)
    assert pool.try_take(2 * ALIGNMENT) is not None
    assert pool.quarantined == 0


def test_what_has_settled_is_not_shown_as_used():
    """An idle decoder asks for no room, and its gauge is all that is looked at."""
    pool = StagingPool(1 << 16)
    extent, over = pool.try_take(5000), []
    pool.quarantine(extent, lambda: bool(over))
    assert pool.used == 8192
    over.append(True)
    assert pool.used == 0
