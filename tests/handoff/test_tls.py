"""The control channel's streams: what a message costs in memory, what arrives of it, who is connected and who is not."""

import asyncio
import contextlib
import socket
import ssl
import threading
import tracemalloc

import pytest

from bridge.handoff import PeerConfig, create_identity, tls
from bridge.handoff.identity import client_context, server_context
from bridge.handoff.loop import LoopThread
from tests.ports import silent_port
from tests.waiting import PATIENCE

MESSAGE = b"m" * 300
ROUNDS = 20


async def serving(accept, context):
    server = tls.Server(accept, context, PATIENCE, print)
    await server.open("127.0.0.1", 0)
    return server


async def most_memory_of_an_echo(context_of_server, context_of_client):
    """Bytes, over what was held before, while MESSAGE crosses ROUNDS times each way."""

    async def echo(address, reader, writer):
        while data := await reader.read(len(MESSAGE)):
            writer.write(data)
        writer.close()

    server = await serving(echo, context_of_server)
    reader, writer = await tls.connect("127.0.0.1", server.port, context_of_client, PATIENCE)

    async def cross():
        writer.write(MESSAGE)
        assert await reader.readexactly(len(MESSAGE)) == MESSAGE

    await cross()
    tracemalloc.start()
    try:
        await cross()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in range(ROUNDS):
            await cross()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
        writer.close()
        await writer.wait_closed()
        await server.close()


@pytest.fixture
def contexts(tmp_path):
    owner, reader = create_identity("owner", tmp_path), create_identity("reader", tmp_path)
    return server_context(owner, {"reader": PeerConfig(reader.certificate)}), client_context(reader, PeerConfig(owner.certificate))


def test_a_small_message_takes_little_memory(contexts):
    """asyncio's own streams take 256 KiB at each read, and leave glibc's heap in pieces."""
    # Other threads of this process, which are counted too, only add to it.
    assert min(asyncio.run(most_memory_of_an_echo(*contexts)) for _ in range(3)) < 32 << 10


def test_more_than_a_record_arrives_whole(contexts):
    async def cross():
        sent = bytes(range(256)) * 1000

        async def say(address, reader, writer):
            writer.write(sent)
            await writer.drain()
            writer.close()

        server = await serving(say, contexts[0])
        reader, writer = await tls.connect("127.0.0.1", server.port, contexts[1], PATIENCE)
        got = await reader.read()
        writer.close()
        await server.close()
        return got == sent

    assert asyncio.run(cross())


@pytest.mark.parametrize("goodbye", [True, False])
def test_what_was_sent_before_the_end_arrives_whole(contexts, goodbye):
    """Also from a peer that dies. asyncio reads but once at the end; what did not fit into one read was lost."""
    nbytes = 200_000

    def send(port):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as raw, contexts[1].wrap_socket(raw) as peer:
            peer.sendall(bytes(nbytes))
            if goodbye:
                peer.unwrap().close()
            else:
                peer.shutdown(socket.SHUT_WR)
                with contextlib.suppress(OSError):
                    while peer.recv(1 << 16):
                        pass

    async def receive():
        got = asyncio.get_running_loop().create_future()

        async def count(address, reader, writer):
            total = 0
            try:
                while data := await reader.read(1 << 16):
                    total += len(data)
            except (ConnectionError, ssl.SSLError):
                pass
            got.set_result(total)
            writer.close()

        server = await serving(count, contexts[0])
        await asyncio.to_thread(send, server.port)
        total = await asyncio.wait_for(got, PATIENCE)
        await server.close()
        return total

    assert [asyncio.run(receive()) for _ in range(10)] == [nbytes] * 10


def test_a_client_that_comes_while_the_port_closes_is_not_left_waiting(contexts):
    """It was accepted for a task that had been cancelled: asyncio logged an InvalidStateError, and its socket stayed open."""
    logged = []

    async def come():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: logged.append(context))
        server = await serving(print, contexts[0])
        for _ in range(3):
            await asyncio.sleep(0)  # it accepts now
        client = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
        await asyncio.sleep(0)  # the loop looks for connections behind what is to run now
        await server.close()
        client.settimeout(2)
        with client, contextlib.suppress(ConnectionError):
            assert not await asyncio.to_thread(client.recv, 1)

    asyncio.run(come())
    assert not logged


@pytest.fixture
def unanswered():
    with silent_port("127.0.0.2") as port:
        yield port


def test_a_name_whose_first_address_does_not_answer(contexts, monkeypatch, unanswered):
    """As of a host whose IPv6 is not routed. It could never be connected."""

    async def hold(address, reader, writer):
        await reader.read()
        writer.close()

    async def connect():
        server = await serving(hold, contexts[0])
        found = [
            socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0] for where in (("127.0.0.2", unanswered), ("127.0.0.1", server.port))
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        _, writer = await asyncio.wait_for(tls.connect("prefiller", server.port, contexts[1], PATIENCE), 10)
        connected = writer.get_extra_info("peername")
        writer.close()
        await server.close()
        return connected == ("127.0.0.1", server.port)

    assert asyncio.run(connect())


def test_names_that_are_looked_up_for_ever_hold_nobody_up(monkeypatch):
    """A host whose resolver is silent took all threads that asyncio has for what may wait: another's hand-off waited for half a minute."""
    real, silent, asked = socket.getaddrinfo, threading.Event(), []

    def resolver(host, *arguments, **named):
        if host != "silent.example":
            return real(host, *arguments, **named)
        asked.append(host)
        silent.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "the resolver does not answer")

    async def look(loop):
        for _ in range(60):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await loop.getaddrinfo("silent.example", 1)
        await asyncio.to_thread(lambda: None)
        found = await loop.getaddrinfo("localhost", 1, type=socket.SOCK_STREAM)
        loop.call_later(0.1, silent.set)
        with pytest.raises(socket.gaierror, match="does not answer"):
            await loop.getaddrinfo("silent.example", 1)
        return found

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    thread = LoopThread("test")
    try:
        assert thread.run(look(thread.loop), 10) == real("localhost", 1, type=socket.SOCK_STREAM)
    finally:
        silent.set()
        thread.close()
    assert len(asked) == 1, "one thread for a name"


def test_an_engine_may_have_another_loop(monkeypatch):
    """uvloop's create_connection knows no second address: each fetch of a process that had installed it failed."""
    monkeypatch.setattr(asyncio, "new_event_loop", lambda: pytest.fail("the engine's loop"))
    thread = LoopThread("test")
    assert isinstance(thread.loop, asyncio.SelectorEventLoop)
    thread.close()
