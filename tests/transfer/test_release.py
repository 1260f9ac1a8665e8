"""Transfer.release and the quarantine: where it has returned, no byte of the read arrives any more."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from bridge.transfer.agent import ReadRange
from bridge.transfer.errors import BadRange, TransferFailed, TransferTimeout
from tests.transfer.serving import MIB, POISON, Serving, content, memory_of, poisoned, read_all, wait

SIZE = 64 * MIB


def start_and_suspend(agent, serving, mine):
    """A read of which bytes are certainly missing: the serving process is stopped before it can answer."""
    target = agent.register(memory_of(mine))
    peer = agent.connect(serving.metadata)
    read_all(peer, serving.memory, target, 4096)  # so that everything is wired up
    serving.suspend()
    return target, peer, peer.read(serving.memory, target, [ReadRange(0, 0, len(mine))])


def until_released(transfer, seconds: float = 30.0) -> None:
    limit = time.monotonic() + seconds
    while True:
        try:
            transfer.release()
            return
        except TransferTimeout:
            assert time.monotonic() < limit, f"a read did not settle within {seconds} s"
            time.sleep(0.001)


def test_no_byte_arrives_after_it_has_returned(make, kind):
    agent = make(in_flight_bytes=4 * MIB)
    with Serving(SIZE, kind=kind) as serving:
        mine = poisoned(SIZE)
        target, peer, transfer = start_and_suspend(agent, serving, mine)
        assert not transfer.done()
        try:
            transfer.release()
            quarantined = False
        except TransferTimeout:
            quarantined = True
        assert quarantined == (agent.counters().in_quarantine == 1) == (kind != "stream")
        with pytest.raises(TransferFailed, match="given up"):
            transfer.done()
        mine[:] = POISON  # as the next lease would write
        serving.resume()
        until_released(transfer)
        late = int((mine != POISON).sum())
        assert late <= 4 * MIB, "more came than was in flight"
        if kind == "stream":
            assert late == 0
        mine[:] = POISON
        time.sleep(0.3)
        agent.progress()
        assert (mine == POISON).all()
        read_all(peer, serving.memory, target, SIZE)
        assert np.array_equal(mine, content(SIZE, 0))
        target.release()
        counters = agent.counters()
        assert (counters.reads_given_up, counters.in_quarantine, counters.reads_finished) == (1, 0, 2)
        assert counters.reads_quarantined == quarantined


def test_of_a_finished_read(make, served):
    agent = make()
    target = agent.register(memory_of(poisoned(MIB)))
    transfer = agent.connect(served.metadata).read(served.memory, target, [ReadRange(0, 0, MIB)])
    wait(transfer)
    transfer.release()
    transfer.release()
    target.release()
    assert agent.counters().reads_quarantined == 0


def test_no_read_is_started_into_memory_that_is_being_released(make, served, kind, monkeypatch):
    """Another thread's, between the look at what is under way and the end of the registration: its bytes came after the release."""
    agent, mine, tried = make(), poisoned(4096), []
    peer, target = agent.connect(served.metadata), agent.register(memory_of(mine))

    def read():
        try:
            tried.append(peer.read(served.memory, target, [ReadRange(0, 0, 4096)]))
        except BadRange as error:
            tried.append(error)

    def meanwhile(*_, **__):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join(10)
        return True

    # What the release waits with, after it has looked.
    held, name = {
        "stream": lambda: (target, "_retire"),
        "ucx": lambda: (target, "unused"),
        "nixl": lambda: (agent._native, "deregister_memory"),
    }[kind]()
    monkeypatch.setattr(held, name, meanwhile)
    target.release()
    monkeypatch.undo()
    assert len(tried) == 1
    if not isinstance(tried[0], BadRange):
        with pytest.raises(TransferFailed, match="released"):
            wait(tried[0])
    time.sleep(0.05)
    assert (mine == POISON).all()
