"""What the nixl agent does while another thread is inside NIXL: connecting to a host that is silent takes 7 s there (measured)."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from bridge.transfer.agent import Memory, ReadRange, RemoteMemory
from bridge.transfer.errors import TransferFailed, TransferTimeout
from bridge.transfer.nixl.reads import Reads
from tests.transfer.nixl_serving import MIB, Serving, content, memory_of, poisoned, read_all, wait
from tests.transfer.test_nixl_pieces import Native
from tests.transfer.test_release import until_released


@pytest.fixture
def serving():
    with Serving(MIB, seed=3, transports=["tcp"]) as made:
        yield made


@pytest.fixture
def connecting(make_agent, monkeypatch):
    """An agent, and what makes it connect to a peer until the event that is returned is set."""
    agent, threads = make_agent(), []
    other = make_agent("other", serves=True)
    go_on = threading.Event()

    def start():
        begun, real = threading.Event(), agent._native.add_remote_agent

        def slow(blob):
            begun.set()
            go_on.wait(60)
            return real(blob)

        monkeypatch.setattr(agent._native, "add_remote_agent", slow)
        threads.append(threading.Thread(target=agent.connect, args=(other.metadata(),), daemon=True))
        threads[-1].start()
        assert begun.wait(10)
        return go_on

    yield agent, start
    go_on.set()
    for thread in threads:
        thread.join(30)


def test_reads_from_others_start_and_arrive_when_it_can(connecting, serving):
    """They waited for it, on the decoder's event loop, for longer than its prefillers are patient."""
    agent, start = connecting
    mine = poisoned(MIB)
    target, peer = agent.register(memory_of(mine)), agent.connect(serving.metadata)
    read_all(peer, serving.memory, target, 4096)
    described = agent.metadata()
    go_on = start()
    started = time.monotonic()
    assert agent.metadata() == described
    read = peer.read(serving.memory, target, [ReadRange(0, 0, MIB)])
    given_up = peer.read(serving.memory, target, [ReadRange(0, 0, MIB)])
    unknown = peer.read(RemoteMemory(serving.memory.address + (1 << 40), 4096), target, [ReadRange(0, 0, 8)])
    for _ in range(100):
        assert not read.done()
        with pytest.raises(TransferTimeout):
            given_up.release()
    assert "tcp" in agent.transports()
    assert time.monotonic() - started < 20  # with 5 ms each at most
    mine[:] = 0xCD
    go_on.set()
    wait(read)
    read.release()
    assert np.array_equal(mine, content(MIB, 3))
    until_released(given_up)
    with pytest.raises(TransferFailed, match="has not registered these bytes"):
        wait(unknown)
    target.release()
    assert agent.metadata() != described, "it tells of memory that is not registered any more"
    counters = agent.counters()
    assert (counters.reads_started, counters.reads_finished, counters.reads_given_up, counters.reads_failed) == (4, 2, 1, 1)


def test_many_releases_wait_no_longer_than_one():
    """A staging pool asks about all of them again and again, on the decoder's event loop."""
    reads, peer, target = _reads(Native())
    transfers = [reads.start(peer, RemoteMemory(0, 1 << 20), target, np.array([[0, 0, 8192]])) for _ in range(100)]
    with _held(reads._lock):
        started = time.monotonic()
        for _ in range(20):
            for transfer in transfers:
                with pytest.raises(TransferTimeout):
                    transfer.release()
        assert time.monotonic() - started < 6  # it waited without a bound; with 5 ms each time it were 10 s
    with pytest.raises(TransferTimeout):
        transfers[0].release()
    assert reads.counters().reads_given_up == 1


def test_a_finished_read_is_released_at_once():
    native = Native()
    reads, peer, target = _reads(native)
    native.state = "DONE"
    transfer = reads.start(peer, RemoteMemory(0, 1 << 20), target, np.array([[0, 0, 8192]]))
    assert transfer.done()
    with _held(reads._lock):
        transfer.release()


@pytest.mark.parametrize("what", ["target", "peer"])
def test_nothing_is_asked_for_once_its_target_or_its_peer_has_gone(what):
    native = Native()
    reads, peer, target = _reads(native)
    native.initialize_xfer = lambda *_: pytest.fail("bytes were asked for")
    with _held(reads._lock):
        transfer = reads.start(peer, RemoteMemory(0, 1 << 20), target, np.array([[0, 0, 8192]]))
    assert reads.into(target), "it may still write there"
    target.released, peer._closed = what == "target", what == "peer"
    with pytest.raises(TransferFailed, match="released"):
        transfer.done()
    assert not reads.into(target)
    assert reads.counters().reads_failed == 1


def _reads(native):
    errors = SimpleNamespace(nixlNotFoundError=KeyError)
    reads = Reads(native, errors, threading.RLock(), 4096, lambda name: None, lambda name: None)
    return reads, SimpleNamespace(name="peer", _native="peer", _closed=False), SimpleNamespace(memory=Memory(0, 1 << 20), released=False)


class _held:
    """A lock in another thread's hands."""

    def __init__(self, lock):
        self._lock, self._taken, self._free = lock, threading.Event(), threading.Event()

    def _hold(self):
        with self._lock:
            self._taken.set()
            self._free.wait(60)

    def __enter__(self):
        self._thread = threading.Thread(target=self._hold, daemon=True)
        self._thread.start()
        assert self._taken.wait(10)

    def __exit__(self, *_):
        self._free.set()
        self._thread.join(10)
