"""What keeps two ends from greeting each other is said as what it is."""

import logging
import os
import socket
import ssl
import struct
import threading
from dataclasses import replace

import pytest

from bridge.devices import DeviceError
from bridge.handoff import Decoder, PeerConfig, Prefiller, errors, identity, messages, tls
from bridge.handoff.bounds import Bounds
from bridge.handoff.identity import client_context, server_context
from bridge.transfer.errors import RegistrationFailed
from tests.handoff.pair import BOUNDS, Pair, block_table, manifest, paged_cache
from tests.waiting import PATIENCE, eventually

BRIEF = replace(BOUNDS, connect=2.0)
"""The same bound holds for the handshake before, which a free machine makes in a hundredth of a second."""


def ticket(pair):
    offer = pair.prefiller.offer(manifest("r", 150), paged_cache(16, 12, seed=1), block_table(16, 12, 2))
    return offer.ticket


def target(pair):
    return pair.target(paged_cache(64, 4, seed=None), block_table(64, 4, 3))


def test_a_prefiller_that_accepts_and_says_nothing(tmp_path):
    """It hangs: nothing is wrong with certificates."""
    pair = Pair(tmp_path, bounds=BRIEF)
    context = server_context(pair.prefill_identity, {"decode-0": PeerConfig(pair.decode_identity.certificate)})
    with socket.create_server(("127.0.0.1", 0)) as listening:
        held = []

        def accept():
            held.append(context.wrap_socket(listening.accept()[0], server_side=True))

        thread = threading.Thread(target=accept)
        thread.start()
        pair.decoder._peers["prefill-0"] = PeerConfig(pair.prefill_identity.certificate, "127.0.0.1", listening.getsockname()[1])
        with pytest.raises(errors.CannotConnect, match=r"does not greet: prefill-0 was silent for 2\.0 s") as refused:
            pair.decoder.fetch(ticket(pair), target(pair))
        assert "certificate" not in str(refused.value)
        thread.join()
        for one in held:
            one.close()
    pair.close()


def test_an_agent_that_cannot_describe_itself(pair, monkeypatch):
    def metadata():
        raise RegistrationFailed("the agent's metadata is too large", remedy="register fewer memories")

    monkeypatch.setattr(pair.agent, "metadata", metadata)
    with pytest.raises(errors.ProtocolError, match="metadata is too large; register fewer memories"):
        pair.decoder.fetch(ticket(pair), target(pair))
    assert pair.prefiller.counters.snapshot()["refused{registration}"] == 1
    assert pair.refusals == ["the agent's metadata is too large"]


def test_a_stream_needs_room_for_a_chunk(pair):
    with pytest.raises(errors.BadBounds, match="take at least one"):
        Prefiller(pair.prefill_identity, {}, pair.prefiller.device, pair.agent, staging_bytes=1 << 20, stream_depth=0)


def test_a_place_to_stage_in_that_there_is_not(pair):
    with pytest.raises(errors.BadBounds, match="'gpu'; choose one of auto, host, device"):
        Prefiller(pair.prefill_identity, {}, pair.prefiller.device, pair.agent, staging_bytes=1 << 20, staging="gpu")
    with pytest.raises(errors.BadBounds, match="'Device'; choose one of"):
        Decoder(pair.decode_identity, {}, pair.decoder.device, pair.agent, staging_bytes=1 << 20, staging="Device")


def test_a_port_that_is_taken_leaves_no_socket(pair):
    with pytest.raises(errors.CannotListen, match="Address already in use"):
        pair.new_prefiller(port=pair.prefiller.port)


def test_every_address_of_a_host_has_one_port(pair):
    peers = {"decode-0": PeerConfig(pair.decode_identity.certificate)}
    opened = Prefiller(pair.prefill_identity, peers, pair.prefiller.device, pair.agent, staging_bytes=1 << 20, host="localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for address in {info[4][0] for info in socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM)}:
        with socket.create_connection((address, opened.port), timeout=10) as raw, context.wrap_socket(raw):
            pass
    opened.close()


def test_a_certificate_file_of_something_else_is_one_sentence(pair, tmp_path):
    """PEM, but no certificate."""
    other = tmp_path / "other.crt"
    other.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(errors.BadIdentity, match=r"other\.crt is in PEM form, and no certificate"):
        server_context(pair.prefill_identity, {"decode-0": PeerConfig(other)})


def test_a_certificate_file_holds_one_certificate(pair, tmp_path):
    """One of two was taken, and never matched what the peer showed."""
    both = tmp_path / "both.crt"
    both.write_bytes(pair.decode_identity.certificate.read_bytes() + pair.prefill_identity.certificate.read_bytes())
    with pytest.raises(errors.BadIdentity, match=r"both\.crt holds 2 certificates or keys; leave the host's own certificate in it"):
        server_context(pair.prefill_identity, {"decode-0": PeerConfig(both)})


@pytest.mark.parametrize("which", ["certificate", "private_key", "peer"])
def test_a_file_that_is_far_too_large_is_not_read_whole(pair, tmp_path, which, monkeypatch):
    large = tmp_path / "large.crt"
    with large.open("wb") as file:
        file.truncate(2 << 20)
    own, peer = pair.prefill_identity, PeerConfig(pair.decode_identity.certificate)
    if which == "peer":
        peer = PeerConfig(large)
    else:
        own = replace(own, **{which: large})
    with pytest.raises(errors.BadIdentity, match=r"large\.crt is longer than 1048576 bytes"):
        server_context(own, {"decode-0": peer})
    # A whole certificate may be as long as that, and no longer.
    size = pair.decode_identity.certificate.stat().st_size
    monkeypatch.setattr(identity, "_MAX_PEM_BYTES", size)
    assert identity.certificate_der(pair.decode_identity.certificate)
    monkeypatch.setattr(identity, "_MAX_PEM_BYTES", size - 1)
    with pytest.raises(errors.BadIdentity, match="is longer than"):
        identity.certificate_der(pair.decode_identity.certificate)


def test_a_name_that_is_not_resolved_in_time(pair, monkeypatch):
    """The reason was empty."""
    go_on, there = threading.Event(), socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda *which, **more: go_on.wait(PATIENCE) and there(*which, **more))
    with pytest.raises(errors.CannotListen, match="control port localhost:0 cannot be opened: its name was not resolved in time;"):
        Prefiller(
            pair.prefill_identity,
            {},
            pair.prefiller.device,
            pair.agent,
            staging_bytes=1 << 20,
            host="localhost",
            bounds=replace(BOUNDS, connect=0.2),
        )
    go_on.set()


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 70])
def test_more_staging_than_the_host_has_is_one_sentence(pair, nbytes):
    with pytest.raises(DeviceError, match="lower staging_bytes"):
        Prefiller(pair.prefill_identity, {}, pair.prefiller.device, pair.agent, staging_bytes=nbytes)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e-9, 1e10, 1e300])
def test_bounds_that_no_timer_keeps(seconds):
    with pytest.raises(errors.BadBounds, match=r"give seconds between 0\.001 and"):
        Bounds(connect=seconds)


def test_a_port_that_is_no_control_port_is_named(tmp_path):
    """As the stream agent's data port is, which has the same certificates."""
    pair = Pair(tmp_path)
    context = server_context(pair.prefill_identity, {"decode-0": PeerConfig(pair.decode_identity.certificate)})
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def answer():
            with context.wrap_socket(listening.accept()[0], server_side=True) as sock:
                sock.sendall(b"\x03\0\0\0\x01\x02\x03")
                sock.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        pair.decoder._peers["prefill-0"] = PeerConfig(pair.prefill_identity.certificate, "127.0.0.1", port)
        with pytest.raises(errors.ProtocolError, match=f"'prefill-0' at 127.0.0.1:{port} does not answer as a control port") as refused:
            pair.decoder.fetch(ticket(pair), target(pair))
        assert "not the data port" in refused.value.advice
        thread.join()
    pair.close()


@pytest.mark.parametrize(
    ("device", "kind", "said"),
    [
        ("x\x1b[2J\nok\u202e", errors.StagingDiffers, "stages in x\\x1b[2J\\nok\\u202e memory"),
        ("x" * 33, errors.ProtocolError, "does not answer as a control port"),
    ],
    ids=["escapes", "long"],
)
def test_what_a_prefiller_says_of_its_memory_moves_no_cursor(tmp_path, device, kind, said):
    pair = Pair(tmp_path)
    context = server_context(pair.prefill_identity, {"decode-0": PeerConfig(pair.decode_identity.certificate)})
    hello = messages.Welcome(messages.PROTOCOL_MAJOR, messages.PROTOCOL_MINOR, "local", b"x", bytes(8), 1 << 20, device, 0)
    body = messages.encode(hello)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            with context.wrap_socket(listening.accept()[0], server_side=True) as sock:
                sock.sendall(len(body).to_bytes(4, "little") + body)
                while sock.recv(1 << 16):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        pair.decoder._peers["prefill-0"] = PeerConfig(pair.prefill_identity.certificate, "127.0.0.1", listening.getsockname()[1])
        with pytest.raises(kind) as refused:
            pair.decoder.fetch(ticket(pair), target(pair))
        thread.join()
    pair.close()
    assert said in refused.value.detail
    assert str(refused.value).isprintable()


def test_a_peers_words_move_no_cursor():
    refused = errors.Refused("unknown_lease", "no\x1b[2J\nok: all is well", "ask \u202eagain", "prefill-0")
    assert str(refused) == "prefill-0 refused: no\\x1b[2J\\nok: all is well; ask \\u202eagain"
    assert str(refused.anew()) == str(refused)


def test_a_family_that_the_host_lacks_is_left_out(pair, monkeypatch):
    """As "localhost" where IPv6 is switched off: its name still has ::1."""
    there = socket.getaddrinfo

    def with_another(host, port, **more):
        found = there("127.0.0.1", port, **more)
        return [(socket.AF_INET6, *found[0][1:4], ("2001:db8::1", port, 0, 0)), *found]

    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, *rest, **more: with_another(host, port, type=socket.SOCK_STREAM))
    opened = Prefiller(pair.prefill_identity, {}, pair.prefiller.device, pair.agent, staging_bytes=1 << 20, host="localhost")
    monkeypatch.undo()
    socket.create_connection(("127.0.0.1", opened.port), timeout=10).close()
    opened.close()
    with pytest.raises(errors.CannotListen, match=r"2001:db8::1:0 cannot be opened"):
        Prefiller(pair.prefill_identity, {}, pair.prefiller.device, pair.agent, staging_bytes=1 << 20, host="2001:db8::1")


def test_nonsense_after_the_greeting_is_counted(pair):
    """Also from a decoder that holds nothing, whose going would cost nobody anything."""
    context = client_context(pair.decode_identity, PeerConfig(pair.prefill_identity.certificate))
    hello = messages.encode(messages.Hello(messages.PROTOCOL_MAJOR, 0, "local"))
    with socket.create_connection(("127.0.0.1", pair.prefiller.port), timeout=PATIENCE) as raw, context.wrap_socket(raw) as sock:
        sock.sendall(len(hello).to_bytes(4, "little") + hello + b"\x02\0\0\0\xc1\xc1")
        while sock.recv(1 << 16):
            pass
    assert eventually(lambda: pair.prefiller.counters.snapshot().get("refused{protocol}") == 1)


def goes_away_reset(raw, context):
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    context.wrap_socket(raw).close()


def goes_away_in_its_last_flight(raw, context):
    """Its handshake ends in a record that nobody can read."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing)
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            raw.sendall(outgoing.read())
            incoming.write(raw.recv(1 << 16))
    raw.sendall(outgoing.read() + b"\x17\x03\x03\x00\x20" + os.urandom(32))
    while raw.recv(1 << 16):
        pass


@pytest.mark.parametrize("go_away", [goes_away_reset, goes_away_in_its_last_flight])
def test_a_decoder_that_goes_away_before_its_hello_is_counted(pair, go_away, caplog):
    """Each was a traceback in asyncio's log, and counted nowhere."""
    context = client_context(pair.decode_identity, PeerConfig(pair.prefill_identity.certificate))
    with caplog.at_level(logging.ERROR, "asyncio"):
        for count in range(1, 4):
            with socket.create_connection(("127.0.0.1", pair.prefiller.port), timeout=PATIENCE) as raw:
                go_away(raw, context)
            assert eventually(lambda: len(pair.refusals) == count, 10)  # noqa: B023
    assert pair.prefiller.counters.snapshot()["refused{peer_lost}"] == 3
    assert not caplog.records


def test_a_prefiller_that_spoils_the_handshakes_end_cannot_be_connected(pair, monkeypatch):
    """Then the TLS object has no certificate to show. It was an error without a type."""
    real = tls.connect

    class Spoilt:
        def __init__(self, writer):
            self._writer = writer

        def __getattr__(self, name):
            return getattr(self._writer, name)

        def get_extra_info(self, name):
            return self if name == "ssl_object" else self._writer.get_extra_info(name)

        def getpeercert(self, binary_form):
            raise ValueError("handshake not done yet")

    async def connect(*arguments):
        reader, writer = await real(*arguments)
        return reader, Spoilt(writer)

    monkeypatch.setattr(tls, "connect", connect)
    with pytest.raises(errors.CannotConnect, match="ended the handshake"):
        pair.decoder.fetch(ticket(pair), target(pair))
