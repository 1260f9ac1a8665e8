"""What the ucx agent does while its one thread is busy, for it closes endpoints of silent peers for seconds each; and once it has ended."""

from __future__ import annotations

import logging
import threading
import time
import types

import numpy as np
import pytest

from bridge.transfer.agent import ReadRange, RemoteMemory
from bridge.transfer.errors import AgentUnavailable, PeerUnreachable, TransferFailed, TransferTimeout
from bridge.transfer.ucx import agent as ucx_agent
from bridge.transfer.ucx import worker as ucx_worker
from tests.transfer import agents
from tests.transfer.serving import MIB, closing, content, memory_of, poisoned, read_all
from tests.transfer.test_release import until_released
from tests.waiting import eventually

pytestmark = pytest.mark.ucxx


@pytest.fixture
def make():
    with closing(lambda name, **settings: agents.make("ucx", name, serves=name == "owner", files={}, **settings)) as made:
        yield made


@pytest.fixture
def pair(make):
    """(owner, what it serves, reader)"""
    owner, reader, theirs = make("owner"), make("reader"), content(MIB, 3)
    owner.register(memory_of(theirs))
    return owner, RemoteMemory(theirs.ctypes.data, MIB), reader


@pytest.fixture
def busy():
    """Keeps an agent's thread busy until the test ends, or until the event that it returns is set."""
    events = []

    def keep(agent):
        begun, free = threading.Event(), threading.Event()
        events.append(free)
        agent._worker.post(lambda: (begun.set(), free.wait(60)))
        assert begun.wait(10)
        return free

    yield keep
    for event in events:
        event.set()


@pytest.fixture
def unanswered(pair, busy):
    """(reader, its reads, to be set at the end) of an owner that does not answer now."""
    owner, memory, reader = pair
    target = reader.register(memory_of(poisoned(MIB)))
    peer = reader.connect(owner.metadata())
    read_all(peer, memory, target, MIB)
    free = busy(owner)
    return reader, [peer.read(memory, target, [ReadRange(i * 4096, i * 4096, 4096)]) for i in range(12)], free


def test_many_releases_wait_no_longer_than_one(unanswered, busy):
    """A staging pool asks about all of them again and again, on the decoder's event loop: each once waited for a tenth of a second."""
    reader, reads, owner_is_free = unanswered
    free = busy(reader)
    started = time.monotonic()
    for _ in range(20):
        for read in reads:
            with pytest.raises(TransferTimeout):
                read.release()
    assert time.monotonic() - started < 6  # it was 24 s
    free.set()
    owner_is_free.set()
    for read in reads:
        until_released(read)
    assert reader.counters().reads_given_up == 12


def test_a_prompt_thread_is_waited_for_again(pair, monkeypatch):
    """A read that nobody has answered yet, and of which nothing was asked for, settles in the first release."""
    owner, memory, reader = pair
    target, peer = reader.register(memory_of(poisoned(MIB))), reader.connect(owner.metadata())
    monkeypatch.setattr(ucx_agent, "_RELEASE_SECONDS", 30.0)
    monkeypatch.setattr(peer._link, "start", lambda reading: None)  # it gets no further
    reader._worker._behind = threading.Event()
    reader._worker._behind.set()  # an earlier wait was in vain, and the thread has come to it since
    for _ in range(20):
        read = peer.read(memory, target, [ReadRange(0, 0, MIB)])
        read.release()
        assert read.settled


def test_transports_are_told_without_waiting(pair, busy):
    """A warning of a slow link tells them, on the decoder's event loop. It once waited for up to ten seconds."""
    owner, memory, reader = pair
    peer = reader.connect(owner.metadata())
    read_all(peer, memory, reader.register(memory_of(poisoned(MIB))), MIB)
    busy(reader)
    started = time.monotonic()
    said = {reader.transports() for _ in range(20)}
    assert time.monotonic() - started < 2
    assert len(said) == 1
    assert "reads go by owner: tcp/" in said.pop()


def test_a_connect_that_has_not_begun_in_time_never_begins(pair, make, busy):
    owner, hasty = pair[0], make("hasty", connect_seconds=0.2)
    free = busy(hasty)
    with pytest.raises(PeerUnreachable, match=r"time is up after 0\.2 s, UCX was busy"):
        hasty.connect(owner.metadata())
    dialled = []
    hasty._worker.connect = lambda address: dialled.append(address)
    free.set()
    hasty._worker.call(lambda: None, 10)
    assert not dialled
    assert not hasty._all_links


def test_a_connect_that_begins_too_late_leaves_nothing(pair, make, monkeypatch):
    """It held one of the owner's 256 sessions for ever."""
    owner, hasty, go_on = pair[0], make("hasty", connect_seconds=0.2), threading.Event()
    begun = []

    class Slow(ucx_agent.Link):
        def __init__(self, *arguments):
            go_on.wait(60)
            super().__init__(*arguments)
            begun.append(self)

    monkeypatch.setattr(ucx_agent, "Link", Slow)
    with pytest.raises(PeerUnreachable, match="time is up"):
        hasty.connect(owner.metadata())
    go_on.set()
    assert eventually(lambda: begun)
    assert eventually(lambda: not hasty._all_links and not owner._owner.sessions())


def test_a_thread_that_ended_by_itself_is_told_of_with_its_cause(pair, caplog):
    """Every call once said that the agent was closed, and the cause went to the standard error alone."""
    owner, memory, reader = pair
    target, peer = reader.register(memory_of(poisoned(MIB))), reader.connect(owner.metadata())
    read_all(peer, memory, target, MIB)

    def fault():
        raise OSError(5, "the card is gone")

    with caplog.at_level(logging.ERROR, "kvbridge.transfer"):
        reader._worker.post(fault)
        reader._worker._thread.join(30)
    assert "nothing is read or served any more" in caplog.text
    assert "the card is gone" in peer.failure
    for call in (
        reader.metadata,
        lambda: reader.connect(owner.metadata()),
        lambda: reader.register(memory_of(poisoned(4096))),
        lambda: peer.read(memory, target, [ReadRange(0, 0, 8)]),
    ):
        with pytest.raises((AgentUnavailable, TransferFailed), match="the card is gone"):
            call()
    assert "the card is gone" in reader.transports()
    target.release()
    reader.close()


def test_a_receive_that_ucx_refuses_to_start_does_not_stay_in_quarantine(pair, monkeypatch):
    owner, memory, reader = pair
    target, peer = reader.register(memory_of(poisoned(MIB))), reader.connect(owner.metadata())
    read_all(peer, memory, target, MIB)
    real, calls = reader._worker._array, []

    def refuses(data):
        calls.append(data)
        if len(calls) == 3:  # two of the ranges have been posted
            raise RuntimeError("no such endpoint")
        return real(data)

    monkeypatch.setattr(reader._worker, "_array", refuses)
    read = peer.read(memory, target, [ReadRange(i * 4096, i * 4096, 4096) for i in range(5)])
    assert eventually(lambda: read._reading.failure is not None)
    assert eventually(lambda: read.settled)
    with pytest.raises(TransferFailed, match="no such endpoint"):
        read.done()
    monkeypatch.undo()
    read.release()
    again = reader.connect(owner.metadata())
    read_all(again, memory, target, MIB)
    assert reader._worker.failure is None


def test_an_owner_that_cannot_answer_a_reader_goes_on_serving_others(pair, make, monkeypatch):
    """What the bindings raised there ended the owner's one thread."""
    owner, memory, reader = pair
    target, peer = reader.register(memory_of(poisoned(MIB))), reader.connect(owner.metadata())
    read_all(peer, memory, target, MIB)
    real, fails = owner._worker.send, [True]

    def send(*arguments):
        if fails:
            fails.pop()
            raise RuntimeError("endpoint error")
        real(*arguments)

    monkeypatch.setattr(owner._worker, "send", send)
    read = peer.read(memory, target, [ReadRange(0, 0, MIB)])
    assert eventually(lambda: not fails and not owner._owner.sessions())
    peer.disconnect()
    until_released(read)
    assert owner._worker.failure is None
    other, mine = make("other"), poisoned(MIB)
    read_all(other.connect(owner.metadata()), memory, other.register(memory_of(mine)), MIB)
    assert np.array_equal(mine, content(MIB, 3))
    owner._registrations[1].release()  # what could not be sent has left it
    assert owner.registered_bytes() == 0


def test_a_message_that_nobody_expected_does_not_end_the_thread(pair, caplog, monkeypatch):
    owner, memory, reader = pair
    target, peer = reader.register(memory_of(poisoned(MIB))), reader.connect(owner.metadata())
    monkeypatch.setattr(owner._worker, "_handle", lambda message: {}["a fault"])
    with caplog.at_level(logging.ERROR, "kvbridge.transfer"):
        reads = [peer.read(memory, target, [ReadRange(0, 0, 8)]) for _ in range(3)]
        assert eventually(lambda: owner._worker.ignored == 3)
    assert caplog.text.count("could not be handled") == 1
    monkeypatch.undo()
    read_all(peer, memory, target, MIB)
    peer.disconnect()
    for read in reads:
        until_released(read)


def test_close_keeps_the_memory_where_ucx_does_not_come_to_an_end(unanswered, caplog, monkeypatch):
    """Its reads were declared settled and their targets' owners let go, while bytes might still arrive."""
    reader, reads, _ = unanswered
    real = reader._worker.close
    monkeypatch.setattr(reader._worker, "close", lambda: real() and False)
    monkeypatch.setattr(ucx_agent, "_KEPT", kept := [])
    for read in reads:
        read._peer._link.give_up = lambda reading: None
    with caplog.at_level(logging.ERROR, "kvbridge.transfer"):
        reader.close()
    assert kept == [reader]
    assert reader.registered_bytes() == MIB
    assert "stays allocated until this process ends" in caplog.text


def test_a_close_does_not_wait_for_a_connect_that_nobody_answers(pair, make, monkeypatch):
    owner, hasty, said = pair[0], make("hasty", connect_seconds=60.0), []
    monkeypatch.setattr(owner._owner, "handle", lambda message: None)

    def connect():
        try:
            hasty.connect(owner.metadata())
        except PeerUnreachable as error:
            said.append(str(error))

    connecting = threading.Thread(target=connect)
    connecting.start()
    assert eventually(lambda: hasty._all_links)
    hasty.close()
    connecting.join(10)
    assert "this agent was closed" in said[0]


def test_without_a_registration_cache_ucx_is_used_with_a_warning(caplog):
    """UCX 1.21 without one crashes when a peer dies in the middle of a message."""
    asked = []

    class Bindings:
        Feature = types.SimpleNamespace(TAG=1, WAKEUP=2)

        def UCXContext(self, options, feature_flags):
            asked.append(options)
            if options.get("RCACHE_ENABLE") == "y":
                raise RuntimeError("Unsupported operation")
            return "context"

    with caplog.at_level(logging.WARNING, "kvbridge.transfer"):
        assert ucx_worker._context(Bindings(), {"TLS": "tcp"}) == "context"
    assert asked == [{"TLS": "tcp", "RCACHE_ENABLE": "y"}, {"TLS": "tcp"}]
    assert "no registration cache (Unsupported operation)" in caplog.text
