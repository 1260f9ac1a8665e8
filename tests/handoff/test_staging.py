"""The staging budget: never over, never lost, merged when freed."""

import random
import threading
import time

import pytest

from bridge.handoff.errors import StagingFull
from bridge.handoff.staging import ALIGNMENT, StagingPool
from tests.waiting import PATIENCE


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
    assert time.monotonic() - start > 0.15
    threading.Timer(0.1, pool.give_back, [extent]).start()
    assert pool.take(1, PATIENCE).offset == 0


def test_quarantine_counts_until_it_settles():
    pool = StagingPool(4 * ALIGNMENT)
    settled = []
    pool.quarantine(pool.take(3 * ALIGNMENT, 0), lambda: bool(settled))
    assert pool.quarantined == 3 * ALIGNMENT
    assert pool.try_take(2 * ALIGNMENT) is None
    settled.append(True)
    assert pool.try_take(2 * ALIGNMENT) is not None
    assert pool.quarantined == 0


def test_what_has_settled_is_freed_by_whoever_sees_to_it():
    pool = StagingPool(1 << 16)
    extent, over = pool.try_take(5000), []
    pool.quarantine(extent, lambda: bool(over))
    assert not pool.settle()
    assert pool.used == 8192
    over.append(True)
    assert pool.settle()
    assert (pool.used, pool.quarantined) == (0, 0)
    assert not pool.settle()


def test_looking_at_a_pool_asks_no_transfer():
    """An agent may be busy for seconds, and those who look are event loops and engines' threads."""
    pool = StagingPool(1 << 16)

    def asked():
        raise AssertionError("a transfer was asked")

    pool.quarantine(pool.try_take(5000), asked)
    assert (pool.used, pool.quarantined) == (8192, 8192)
    assert pool.try_take(5000) is not None, "there is room without it"


def test_two_that_settle_at_once_free_it_once():
    pool = StagingPool(1 << 16)
    extent, both = pool.try_take(5000), threading.Barrier(2)

    def settled():
        both.wait(PATIENCE)
        return True

    pool.quarantine(extent, settled)
    found = []
    threads = [threading.Thread(target=lambda: found.append(pool.settle())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(found) == [False, True]
    assert pool.used == 0
    assert pool.try_take(1 << 16) is not None, "it is free once, and merged"
