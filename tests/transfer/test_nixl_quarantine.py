"""A read that was given up goes on writing; its target is quarantined until nothing can arrive any more."""

from __future__ import annotations

import time

import numpy as np
import pytest

from bridge.transfer.agent import ReadRange
from bridge.transfer.errors import TransferFailed, TransferTimeout
from bridge.transfer.nixl import NixlAgent
from bridge.transfer.nixl.frame import parse_metadata
from tests.transfer.nixl_serving import MIB, POISON, TCP, Serving, memory_of, poisoned, read_all
from tests.transfer.test_release import until_released

SIZE = 64 * MIB


def start_and_suspend(agent: NixlAgent, serving: Serving, mine: np.ndarray):
    """A read of which bytes are certainly in flight: the serving process is stopped before it can answer."""
    target = agent.register(memory_of(mine))
    peer = agent.connect(serving.metadata)
    read_all(peer, serving.memory, target, 4096)  # so that the endpoints are wired up
    serving.suspend()
    return target, peer, peer.read(serving.memory, target, [ReadRange(0, 0, len(mine))])


def drain(agent: NixlAgent, seconds: float = 20.0) -> None:
    limit = time.monotonic() + seconds
    while agent.progress():
        assert time.monotonic() < limit, f"the quarantine did not empty within {seconds} s"


def test_late_bytes_arrive_while_in_quarantine_and_none_afterwards(make_agent):
    agent = make_agent(in_flight_bytes=4 * MIB)
    with Serving(SIZE, transports=TCP) as serving:
        mine = poisoned(SIZE)
        target, _, transfer = start_and_suspend(agent, serving, mine)
        assert not transfer.done()
        with pytest.raises(TransferTimeout):
            transfer.release()
        assert not transfer.settled
        with pytest.raises(TransferFailed, match="given up"):
            transfer.done()
        with pytest.raises(TransferTimeout):
            target.release()
        assert agent.registered_bytes() == SIZE
        assert (agent.counters().reads_quarantined, agent.counters().in_quarantine) == (1, 1)

        mine[:] = POISON  # as the next lease would write
        serving.resume()
        drain(agent)
        late = int((mine != POISON).sum())
        assert 0 < late <= 4 * MIB, "the danger that the quarantine is for did not show, or more came than was in flight"
        assert transfer.settled
        transfer.release()
        mine[:] = POISON
        time.sleep(0.3)
        agent.progress()
        assert (mine == POISON).all()
        target.release()
        counters = agent.counters()
        assert (counters.reads_given_up, counters.in_quarantine, counters.reads_finished) == (1, 0, 1)


def test_polling_release_ends_the_quarantine(make_agent):
    agent = make_agent(in_flight_bytes=4 * MIB)
    with Serving(SIZE, transports=TCP) as serving:
        _, _, transfer = start_and_suspend(agent, serving, poisoned(SIZE))
        with pytest.raises(TransferTimeout):
            transfer.release()
        serving.resume()
        until_released(transfer, 20)
        assert agent.counters().in_quarantine == 0


@pytest.mark.parametrize("how", ["release_xfer_handle", "remove_remote_agent"])
def test_the_library_alone_lets_late_bytes_in(make_agent, how):
    """What NIXL itself does, so that a release of it that behaves better is noticed here."""
    agent = make_agent()
    with Serving(SIZE, transports=TCP) as serving:
        mine = poisoned(SIZE)
        target, _, first = start_and_suspend(agent, serving, mine)
        native, handle = agent._native, first._in_flight[0]
        argument = handle if how == "release_xfer_handle" else parse_metadata(serving.metadata)[1]
        getattr(native, how)(argument)
        mine[:] = POISON
        serving.resume()
        limit = time.monotonic() + 10
        while (mine[: 16 * MIB] == POISON).all() and time.monotonic() < limit:
            native.get_new_notifs()  # lets UCX progress
        assert (mine[: 16 * MIB] != POISON).any()
        if how == "release_xfer_handle":
            first._in_flight.pop(0)
        del target
