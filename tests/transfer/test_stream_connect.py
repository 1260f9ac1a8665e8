"""Connecting over the stream agent: what it costs in time is bounded, what fails leaves no socket, and nobody waits for another's files."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from bridge.transfer.errors import AgentUnavailable, PeerUnreachable
from bridge.transfer.stream import agent as stream_agent
from bridge.transfer.stream import reader
from tests.ports import silent_port
from tests.transfer import agents
from tests.transfer.serving import KEPT, MIB, memory_of, poisoned


@pytest.fixture
def pair():
    """Makes (owner, reader); settings are the reader's."""
    made = []

    def one(**settings):
        files = agents.identities()
        made.append(agents.make("stream", "owner", serves=True, files=files))
        made.append(agents.make("stream", "reader", serves=False, files=files, **settings))
        return made[-2:]

    yield one
    for agent in made:
        agent.close()
    KEPT.clear()


@pytest.fixture
def silent():
    with silent_port() as port:
        yield port


def test_a_name_with_many_silent_addresses_takes_no_longer_than_one(pair, silent, monkeypatch):
    """Each once had the whole bound."""
    owner, hasty = pair(connect_seconds=0.5)
    address = socket.getaddrinfo("127.0.0.1", silent, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: address * 16)
    started = time.monotonic()
    with pytest.raises(PeerUnreachable):
        hasty.connect(owner.metadata())
    assert time.monotonic() - started < 5  # it was 8 s


def test_a_later_address_has_time_left(silent, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        found = [socket.getaddrinfo("127.0.0.1", p, type=socket.SOCK_STREAM)[0] for p in (silent, listening.getsockname()[1])]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with reader._connect(("two", 1), time.monotonic() + 2.0) as sock:
            assert sock.getpeername() == listening.getsockname()


def test_a_name_that_is_not_resolved_in_time(pair, monkeypatch):
    owner, hasty = pair(connect_seconds=0.3)
    answered = threading.Event()

    def never(host, port, **settings):
        if settings.get("flags"):
            raise socket.gaierror(socket.EAI_NONAME, "a name")
        answered.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", never)
    started = time.monotonic()
    with pytest.raises(PeerUnreachable, match="was not resolved in time"):
        hasty.connect(owner.metadata())
    assert time.monotonic() - started < 20
    answered.set()


def test_a_socket_that_tls_refuses_is_closed(pair, monkeypatch):
    owner, reading = pair()
    seen = []

    def refuse(sock, *_, **__):
        seen.append(sock)
        raise OSError(22, "no such option")

    monkeypatch.setattr(reader, "TlsChannel", refuse)
    with pytest.raises(PeerUnreachable, match="no such option"):
        reading.connect(owner.metadata())
    assert [sock.fileno() for sock in seen] == [-1]


def test_reads_do_not_wait_while_files_are_read(pair, monkeypatch):
    """The agent's lock was held meanwhile, which every read takes, on the decoder's event loop."""
    owner, reading = pair()
    begun, go_on, real = threading.Event(), threading.Event(), stream_agent.client_context

    def slow(*arguments):
        begun.set()
        go_on.wait(60)
        return real(*arguments)

    monkeypatch.setattr(stream_agent, "client_context", slow)
    connecting = threading.Thread(target=reading.connect, args=(owner.metadata(),), daemon=True)
    connecting.start()
    assert begun.wait(10)
    other = threading.Thread(target=reading.register, args=(memory_of(poisoned(MIB)),), daemon=True)
    other.start()
    other.join(10)
    waited = other.is_alive()
    go_on.set()
    connecting.join(30)
    assert not waited
    assert not connecting.is_alive()


@pytest.mark.parametrize(
    ("thread", "kind", "serves"),
    [
        ("kvbridge-stream-accept", "stream", True),
        pytest.param("kvbridge-ucx", "ucx", True, marks=pytest.mark.ucxx),
    ],
)
def test_an_agent_that_gets_no_thread_says_so(no_threads, thread, kind, serves):
    no_threads.add(thread)
    with pytest.raises(AgentUnavailable, match=r"no thread can be had for .*ulimit"):
        agents.make(kind, "owner", serves=serves, files=agents.identities())
    no_threads.clear()
    agents.make(kind, "owner", serves=serves, files=agents.identities()).close()


def test_a_connection_that_gets_no_thread_says_so(pair, no_threads):
    owner, reading = pair()
    no_threads.add("kvbridge-stream-owner")
    with pytest.raises(AgentUnavailable, match=r"no thread can be had for .*ulimit"):
        reading.connect(owner.metadata())
    no_threads.clear()
    reading.connect(owner.metadata()).disconnect()


def test_a_peer_that_comes_while_the_port_closes_breaks_no_close(pair, monkeypatch):
    """Its thread was found before it had been started, and could not be joined."""
    owner, _ = pair()
    starting, real = threading.Event(), threading.Thread.start

    def slow(thread):
        if thread.name == "kvbridge-stream-serve":
            starting.set()
            time.sleep(0.3)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", slow)
    with socket.create_connection(("127.0.0.1", owner._listener.port)):
        assert starting.wait(10)
        owner.close()
    assert not any(thread.name == "kvbridge-stream-serve" for thread in threading.enumerate())
