"""What keeps two ends from greeting each other is said as what it is."""

import socket
import ssl
import threading

import pytest

from bridge.handoff import PeerConfig, Prefiller, errors
from bridge.handoff.bounds import Bounds
from bridge.handoff.identity import server_context
from bridge.transfer.errors import RegistrationFailed
from tests.handoff.pair import Pair, block_table, manifest, paged_cache

BRIEF = Bounds(connect=0.5, heartbeat=0.2, silence=1)


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
        with pytest.raises(errors.CannotConnect, match=r"was silent for 0\.5 s before its greeting") as refused:
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
