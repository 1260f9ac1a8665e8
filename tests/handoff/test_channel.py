"""The control channel refuses strangers, garbage, giants and sleepers, and survives them."""

import asyncio
import contextlib
import os
import socket
import ssl
import struct
import threading
import time
from dataclasses import replace

import pytest

from backends.cpu.device import CpuReferenceDevice
from bridge.handoff import Decoder, PeerConfig, Prefiller, create_identity, errors, messages, tls
from bridge.handoff.identity import PinnedPeers, client_context
from tests.handoff.pair import Pair, block_table, manifest, paged_cache
from tests.waiting import PATIENCE, eventually


def connect(pair, identity):
    raw = socket.create_connection(("127.0.0.1", pair.prefiller.port), timeout=PATIENCE)
    return client_context(identity, PeerConfig(pair.prefill_identity.certificate)).wrap_socket(raw)


def read_until_closed(sock):
    data = b""
    try:
        while part := sock.recv(65536):
            data += part
    except (ssl.SSLError, ConnectionError):
        pass
    return data


def still_serves(pair):
    source = paged_cache(16, 12, seed=1), block_table(16, 12, 2)
    target = paged_cache(64, 4, seed=None), block_table(64, 4, 3)
    offer = pair.prefiller.offer(manifest("after", 150), *source)
    offer.advance(150)
    pair.decoder.fetch(offer.ticket, pair.target(*target))
    offer.wait(PATIENCE)
    return True


def test_a_certificate_that_is_not_configured(pair, tmp_path):
    stranger = create_identity("stranger", tmp_path)

    def greeting():
        # TLS 1.3 lets a client finish before the server has judged its certificate.
        sock = connect(pair, stranger)
        body = messages.encode(messages.Hello(messages.PROTOCOL_MAJOR, 0, "local"))
        sock.sendall(struct.pack("<I", len(body)) + body)
        if sock.recv(1) == b"":
            raise ConnectionError("closed")

    with pytest.raises((ssl.SSLError, ConnectionError)):
        greeting()
    assert still_serves(pair)
    assert pair.prefiller.counters.snapshot()["refused{handshake}"] == 1
    assert "self-signed certificate" in pair.refusals[0]


def test_who_shows_no_certificate_or_speaks_no_tls_is_counted(pair):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", pair.prefiller.port), timeout=PATIENCE) as raw, context.wrap_socket(raw) as bare:
        read_until_closed(bare)
    with socket.create_connection(("127.0.0.1", pair.prefiller.port), timeout=PATIENCE) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        read_until_closed(plain)
    socket.create_connection(("127.0.0.1", pair.prefiller.port), timeout=PATIENCE).close()
    assert still_serves(pair)
    assert pair.refusals == ["peer did not return a certificate", "http request", tls.ENDED]
    assert pair.prefiller.counters.snapshot()["refused{handshake}"] == 3


def test_connections_without_a_handshake_are_bounded(tmp_path):
    """Before anybody is authenticated, a stranger could otherwise take every descriptor of the engine's process."""
    pair = Pair(tmp_path)
    before = open_descriptors()
    idle = [socket.create_connection(("127.0.0.1", pair.prefiller.port), timeout=PATIENCE) for _ in range(tls.MAX_HANDSHAKES + 40)]
    few = 9  # descriptors that an earlier test may still be closing
    assert eventually(lambda: open_descriptors() >= before + len(idle) + tls.MAX_HANDSHAKES - few)
    assert not eventually(lambda: open_descriptors() > before + len(idle) + tls.MAX_HANDSHAKES, 0.3), "the others wait"
    assert pair.refusals == []
    for one in idle:
        one.close()
    assert eventually(lambda: pair.refusals == [tls.ENDED] * len(idle))
    assert still_serves(pair)
    pair.close()


def test_more_decoders_than_handshakes_at_a_time_all_connect(pair):
    """After a restart everybody comes back at once."""
    opened = []

    def come():
        opened.append(connect(pair, pair.decode_identity))

    threads = [threading.Thread(target=come) for _ in range(tls.MAX_HANDSHAKES + 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(opened) == len(threads)
    for one in opened:
        one.close()
    assert pair.refusals == []


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_decoder_notices_a_prefiller_with_another_certificate(pair, tmp_path):
    other = create_identity("other", tmp_path)
    pair.decoder._peers["prefill-0"] = PeerConfig(other.certificate, "127.0.0.1", pair.prefiller.port)
    with pytest.raises(errors.CannotConnect, match="another certificate than the one configured") as refused:
        pair.decoder.fetch(_ticket(), pair.target(paged_cache(64, 4, None), block_table(64, 4, 1)))
    assert "copy its current .crt file" in refused.value.advice


BAD_HOSTS = ("a..b", "x" * 64, "\ud800", "nul\0l")


@pytest.mark.parametrize("host", ["", *BAD_HOSTS])
def test_a_prefiller_with_a_host_that_is_none(pair, host):
    """Nothing of it stays, and an empty one does not mean every interface."""
    agent, before = pair.prefiller.agent, set(threading.enumerate())
    registered = agent.registered_bytes()
    with pytest.raises(errors.CannotListen):
        Prefiller(pair.prefill_identity, {}, CpuReferenceDevice(), agent, staging_bytes=1 << 20, host=host)
    assert agent.registered_bytes() == registered
    assert eventually(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_a_decoder_whose_peer_has_a_host_that_is_none(pair, host):
    pair.decoder._peers["prefill-0"] = PeerConfig(pair.prefill_identity.certificate, host, pair.prefiller.port)
    with pytest.raises(errors.CannotConnect):
        pair.decoder.fetch(_ticket(), pair.target(paged_cache(64, 4, None), block_table(64, 4, 1)))


def test_two_peers_with_one_certificate(pair):
    one = PeerConfig(pair.prefill_identity.certificate)
    with pytest.raises(errors.BadIdentity, match="'a' and 'b' have the same certificate"):
        PinnedPeers({"a": one, "b": one})


def test_a_decoder_that_the_prefiller_does_not_know_is_told_why(pair, tmp_path):
    stranger = create_identity("stranger", tmp_path)
    at = {"prefill-0": PeerConfig(pair.prefill_identity.certificate, "127.0.0.1", pair.prefiller.port)}
    decoder = Decoder(stranger, at, CpuReferenceDevice(), pair.decoder.agent, staging_bytes=1 << 20)
    try:
        with pytest.raises(errors.CannotConnect) as refused:
            decoder.fetch(_ticket(), pair.target(paged_cache(64, 4, None), block_table(64, 4, 1)))
        assert "ended the connection before its greeting" in refused.value.detail
        assert "not among its peers" in refused.value.advice
    finally:
        decoder.close()


def _ticket():
    from bridge.handoff import Ticket

    return Ticket("prefill-0", "r", 1, 1)


def test_plain_text_is_not_spoken(pair):
    sock = socket.create_connection(("127.0.0.1", pair.prefiller.port), timeout=PATIENCE)
    sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert b"HTTP" not in read_until_closed(sock)
    assert still_serves(pair)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", messages.MAX_MESSAGE_BYTES + 1),
        struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
        struct.pack("<I", 1) + b"\x00",
        struct.pack("<I", 0),
        struct.pack("<I", 5) + b"\xdd\xff\xff\xff\xff",
        struct.pack("<I", 2000) + b"\x91" * 2000,
    ],
)
def test_garbage_ends_the_connection(pair, frame):
    sock = connect(pair, pair.decode_identity)
    sock.sendall(frame)
    assert read_until_closed(sock) == b""
    assert still_serves(pair)


@contextlib.contextmanager
def impatient(pair, **bounds):
    """The prefiller serves who connects now with these bounds; its handshakes are not hurried."""
    listener = pair.prefiller._listener
    before, listener._bounds = listener._bounds, replace(listener._bounds, **bounds)
    yield
    listener._bounds = before


def test_a_silent_peer_is_dropped(pair):
    with impatient(pair, connect=0.5):
        sock = connect(pair, pair.decode_identity)
        assert read_until_closed(sock) == b"", "long before this end's own patience is over"
    assert still_serves(pair)


def test_a_peer_that_sends_one_byte_now_and_then_is_dropped(pair):
    with impatient(pair, silence=1.0):
        dribble_until_dropped(pair)
    assert still_serves(pair)


def dribble_until_dropped(pair):
    sock = connect(pair, pair.decode_identity)
    body = messages.encode(messages.Hello(messages.PROTOCOL_MAJOR, 0, "local"))
    sock.sendall(struct.pack("<I", len(body)) + body)
    assert sock.recv(65536)

    def dribble():
        for byte in struct.pack("<I", 600) + bytes(600):  # a minute, were it heard to the end
            sock.send(bytes([byte]))
            time.sleep(0.1)

    with pytest.raises(OSError):  # noqa: PT011  (whatever a closed connection gives)
        dribble()


def test_another_protocol_or_agent_is_refused_in_words(pair):
    for hello in (messages.Hello(messages.PROTOCOL_MAJOR + 1, 0, "local"), messages.Hello(messages.PROTOCOL_MAJOR, 0, "ucx")):
        sock = connect(pair, pair.decode_identity)
        body = messages.encode(hello)
        sock.sendall(struct.pack("<I", len(body)) + body)
        answer = messages.decode(read_until_closed(sock)[4:])
        assert isinstance(answer, messages.Refusal)
        assert answer.clause == errors.ProtocolError.clause
        assert answer.remedy


def test_a_higher_minor_is_accepted(pair):
    sock = connect(pair, pair.decode_identity)
    body = messages.encode(messages.Hello(messages.PROTOCOL_MAJOR, messages.PROTOCOL_MINOR + 7, "local"))
    sock.sendall(struct.pack("<I", len(body)) + body)
    assert isinstance(messages.decode(sock.recv(65536)[4:]), messages.Welcome)


def test_messages_of_the_wrong_direction_end_the_connection(pair):
    sock = connect(pair, pair.decode_identity)
    for message in (
        messages.Hello(messages.PROTOCOL_MAJOR, 0, "local"),
        messages.Released(bytes(8), 1),
    ):
        body = messages.encode(message)
        sock.sendall(struct.pack("<I", len(body)) + body)
    read_until_closed(sock)
    assert still_serves(pair)


def test_hundred_connections_at_once_leave_nothing(pair):
    async def strangers():
        async def one():
            _, writer = await asyncio.open_connection("127.0.0.1", pair.prefiller.port)
            writer.write(b"\x16\x03\x01")
            await writer.drain()
            writer.close()

        await asyncio.gather(*(one() for _ in range(100)))

    asyncio.run(strangers())
    assert still_serves(pair)


def test_sending_on_a_closed_channel_is_a_lost_peer(pair):
    from bridge.handoff.channel import Channel

    async def send_after_close():
        context = client_context(pair.decode_identity, PeerConfig(pair.prefill_identity.certificate))
        reader, writer = await asyncio.open_connection("127.0.0.1", pair.prefiller.port, ssl=context)
        channel = Channel(reader, writer, "prefill-0", PATIENCE)
        await channel.close()
        await channel.send(messages.Ping())

    with pytest.raises(errors.PeerLost):
        asyncio.run(send_after_close())
