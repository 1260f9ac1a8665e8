"""Agent.close ends everything: no byte arrives afterwards, no thread stays."""

from __future__ import annotations

import threading
import time

import pytest

from bridge.transfer.errors import TransferFailed, TransferTimeout
from bridge.transfer.stream import agent as stream_agent
from tests.transfer.serving import POISON, Serving, memory_of, poisoned, read_all
from tests.transfer.test_release import SIZE, start_and_suspend


def test_ends_an_unfinished_read(make, kind):
    agent = make()
    with Serving(SIZE, kind=kind) as serving:
        mine = poisoned(SIZE)
        _, _, transfer = start_and_suspend(agent, serving, mine)
        started = time.monotonic()
        agent.close()
        assert time.monotonic() - started < 10
        assert transfer.settled
        transfer.release()
        with pytest.raises(TransferFailed):
            transfer.done()
        mine[:] = POISON
        serving.resume()
        time.sleep(0.5)
        assert (mine == POISON).all()
        assert agent.counters().in_quarantine == 0


@pytest.mark.parametrize("kind", ["stream"])
def test_memory_that_is_still_being_sent_stays_registered(make, kind, monkeypatch):
    """Its release once returned at once, as if nobody touched it any more."""
    monkeypatch.setattr(stream_agent, "_RETIRE_SECONDS", 0.05)
    owner = make("owner", serves=True)
    registration = owner.register(memory_of(poisoned(4096)))
    assert registration.enter() is not None  # a frame is being encrypted
    owner.close()
    assert owner.registered_bytes() == 4096
    with pytest.raises(TransferTimeout):
        registration.release()
    registration.leave()
    registration.release()
    assert owner.registered_bytes() == 0


def test_leaves_no_thread(make, served):
    before = set(threading.enumerate())
    agent, owner = make(), make("owner", serves=True)
    read_all(agent.connect(served.metadata), served.memory, agent.register(memory_of(poisoned(4096))), 4096)
    for one in (agent, owner):
        one.close()
    limit = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < limit:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before


def test_of_an_owner_ends_its_readers(make, kind):
    owner, agent = make("owner", serves=True), make()
    theirs, mine = poisoned(4096), poisoned(4096)
    theirs[:] = 7
    owner.register(memory_of(theirs))
    peer = agent.connect(owner.metadata())
    target = agent.register(memory_of(mine))
    from bridge.transfer.agent import RemoteMemory

    source = RemoteMemory(theirs.ctypes.data, 4096)
    read_all(peer, source, target, 4096)
    assert (mine == 7).all()
    owner.close()
    mine[:] = POISON
    with pytest.raises(TransferFailed):
        read_all(peer, source, target, 4096)
    assert (mine == POISON).all()
