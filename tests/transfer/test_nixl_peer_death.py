"""kill -9 of the serving process."""

from __future__ import annotations

import time

import pytest

from bridge.transfer.agent import ReadRange
from bridge.transfer.errors import PeerUnreachable, TransferFailed
from tests.transfer.nixl_serving import MIB, POISON, TCP, Serving, memory_of, poisoned, read_all, wait
from tests.transfer.test_nixl_quarantine import SIZE, start_and_suspend

BOUND_S = 5.0  # measured on one host: 0.02 to 0.1 s


def test_in_mid_read(make_agent):
    agent = make_agent()
    with Serving(SIZE, transports=TCP) as serving:
        mine = poisoned(SIZE)
        target, peer, transfer = start_and_suspend(agent, serving, mine)
        assert not transfer.done()
        serving.kill()
        started = time.monotonic()
        with pytest.raises(TransferFailed, match="prefiller"):
            wait(transfer, BOUND_S)
        assert time.monotonic() - started < BOUND_S
        while not transfer.settled:
            agent._advance(transfer)
            assert time.monotonic() - started < BOUND_S
        transfer.release()
        with pytest.raises(TransferFailed):
            transfer.done()
        mine[:] = POISON
        time.sleep(0.2)
        assert (mine == POISON).all()
        with pytest.raises(TransferFailed, match="connect again"):
            read_all(peer, serving.memory, target, 4096)
        peer.disconnect()
        target.release()
        counters = agent.counters()
        assert (counters.reads_failed, counters.in_quarantine, agent.registered_bytes()) == (1, 0, 0)


@pytest.mark.parametrize("transports", [None, TCP], ids=["default", "tcp"])
def test_between_two_reads(make_agent, transports):
    agent = make_agent(transports=transports)
    with Serving(MIB, transports=transports) as serving:
        mine = poisoned(MIB)
        target = agent.register(memory_of(mine))
        peer = agent.connect(serving.metadata)
        read_all(peer, serving.memory, target, MIB)
        serving.kill()
        started = time.monotonic()
        with pytest.raises(TransferFailed):
            wait(peer.read(serving.memory, target, [ReadRange(0, 0, MIB)]), BOUND_S)
        assert time.monotonic() - started < BOUND_S
        target.release()
        peer.disconnect()


def test_before_the_first_read(make_agent):
    agent = make_agent()
    with Serving(MIB, transports=TCP) as serving:
        serving.kill()
        target = agent.register(memory_of(poisoned(MIB)))
        started = time.monotonic()
        with pytest.raises((PeerUnreachable, TransferFailed)):  # which of them depends on the transport
            wait(agent.connect(serving.metadata).read(serving.memory, target, [ReadRange(0, 0, MIB)]), BOUND_S)
        assert time.monotonic() - started < BOUND_S


def test_of_a_reader_leaves_the_serving_process_alone(make_agent):
    """The other direction: this process closes its agent in mid-read, and a second one reads on."""
    first, second = make_agent("first"), make_agent("second")
    with Serving(SIZE, transports=TCP) as serving:
        gone = first.register(memory_of(poisoned(SIZE)))
        first.connect(serving.metadata).read(serving.memory, gone, [ReadRange(0, 0, SIZE)]).done()
        first.close()
        mine = poisoned(SIZE)
        read_all(second.connect(serving.metadata), serving.memory, second.register(memory_of(mine)), SIZE)
        assert not (mine == POISON).any()
