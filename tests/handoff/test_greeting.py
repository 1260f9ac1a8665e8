"""What keeps two ends from greeting each other is said as what it is."""

import socket
import ssl
import threading
from dataclasses import replace

import pytest

from bridge.devices import DeviceError
from bridge.handoff import PeerConfig, Prefiller, errors, messages
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


def test_a_port_that_is_taken_leaves_no_socket(pair):
    with pytest.raises(errors.CannotListen, match="Address already in use"):
        pair.new_prefiller(port=pair.prefiller.port)


def test_every_address_of_a_host_has_one_port(pair):
    identity = pair.prefill_identity
    peers = {"decode-0": PeerConfig(pair.decode_identity.certificate)}
    opened = Prefiller(identity, peers, pair.prefiller.device, pair.agent, staging_bytes=1 << 20, host="localhost")
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
