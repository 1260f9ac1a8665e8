"""Who gives up waiting, and who gives up the hand-off, are two; both engines' threads and loops are let go in time."""

import asyncio
import gc
import threading

import pytest

from bridge.handoff import Bounds, Mode, errors
from tests.handoff.pair import Pair, block_table, manifest, paged_cache, tokens_of
from tests.waiting import PATIENCE, eventually

TOKENS = 150


@pytest.fixture
def source():
    return paged_cache(16, 12, seed=1), block_table(16, 12, 2)


@pytest.fixture
def target():
    return paged_cache(64, 4, seed=None), block_table(64, 4, 3)


@pytest.fixture
def offer(pair, source):
    made = pair.prefiller.offer(manifest("r", TOKENS), *source)
    made.advance(TOKENS)
    return made


def test_who_waits_no_more_leaves_the_hand_off_alone(pair, offer, source, target):
    async def impatient():
        fetch = pair.decoder.start(offer.ticket, pair.target(*target))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fetch.result_async(), 0.05)
        assert not fetch.done(), "the pages are being written still"
        pair.agent.gate.set()
        return await fetch.result_async()

    pair.agent.gate.clear()
    received = asyncio.run(impatient())
    assert received.nbytes == offer.payload_bytes
    assert (tokens_of(*target, TOKENS) == tokens_of(*source, TOKENS)).all()


def test_a_cancelled_fetch_ends_when_nothing_is_written_any_more(pair, offer, target, caplog):
    async def cancelled():
        task = asyncio.create_task(pair.decoder.fetch_async(offer.ticket, pair.target(*target)))
        while "decoder reading" not in pair.steps:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()

    pair.agent.gate.clear()
    asyncio.run(asyncio.wait_for(cancelled(), PATIENCE))
    gc.collect()
    assert not caplog.records, "the engine's loop reported a failure as overlooked"
    assert pair.decoder.counters.snapshot()["failed{cancelled}"] == 1
    assert "committed" not in pair.decoder.counters.snapshot()
    with pytest.raises(errors.Refused):
        offer.wait(PATIENCE)
    pair.agent.gate.set()
    assert eventually(lambda: pair.decoder.staging()[0] == 0)


def test_who_waits_for_room_for_a_stream_hears_of_its_end(tmp_path, source):
    """Not only when the bound of `staging` seconds is over."""
    pair = Pair(tmp_path, staging_bytes=1 << 17, bounds=Bounds(staging=10 * PATIENCE, heartbeat=0.5, silence=4))
    taken = pair.prefiller.offer(manifest("all of it", 64), *source)
    waiting = pair.prefiller.offer(manifest("r", TOKENS), *source, mode=Mode.STREAM)
    ends: list[BaseException] = []

    def advance():
        try:
            waiting.advance(TOKENS)
        except errors.HandoffError as error:
            ends.append(error)

    thread = threading.Thread(target=advance)
    thread.start()
    assert not eventually(lambda: ends, 0.2), "there is no room"
    waiting.cancel()
    thread.join(PATIENCE)
    assert [type(error) for error in ends] == [errors.Cancelled]
    taken.cancel()
    pair.close()
