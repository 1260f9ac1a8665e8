"""What a hostile peer of the stream agent's data port can try, one test each."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from bridge.handoff.identity import Identity, PeerConfig, client_context, create_identity, server_context
from bridge.transfer import described
from bridge.transfer.agent import ReadRange, RemoteMemory
from bridge.transfer.described import Region
from bridge.transfer.errors import PeerUnreachable, TransferError, TransferFailed
from bridge.transfer.stream import StreamAgent, owner, wire
from bridge.transfer.stream.wire import Kind
from tests.transfer import agents
from tests.transfer.serving import MIB, POISON, content, memory_of, poisoned, read_all, wait
from tests.waiting import eventually

SECRET = b"this was never registered"


def identity(name: str) -> Identity:
    files = agents.identities()
    return Identity(name, Path(files[name] + ".crt"), Path(files[name] + ".key"))


@pytest.fixture
def pair(request):
    """(owner agent, its registered content as RemoteMemory, reader agent). A parameter: the owner's bounds, where time is the subject."""
    files, bounds = agents.identities(), getattr(request, "param", {"silence": 10.0})
    serving = agents.make("stream", "prefiller", serves=True, files=files, **bounds)
    theirs = content(MIB, 3)
    serving.register(memory_of(theirs))
    reading = agents.make("stream", "decoder", serves=False, files=files)
    yield serving, RemoteMemory(theirs.ctypes.data, MIB), reading
    reading.close()
    serving.close()


SILENT = pytest.mark.parametrize("pair", [{"silence": 2.0}], indirect=True, ids=["silence 2 s"])
HASTY = pytest.mark.parametrize("pair", [{"connect_seconds": 3.0}], indirect=True, ids=["connect 3 s"])


def attack(serving: StreamAgent, who: str = "reader") -> ssl.SSLSocket:
    """A TLS connection of a peer that then says what it likes."""
    context = client_context(identity(who), PeerConfig(identity("owner").certificate))
    return context.wrap_socket(socket.create_connection(("127.0.0.1", serving._listener.port), timeout=30))


def hello(serving: StreamAgent) -> ssl.SSLSocket:
    sock = attack(serving)
    sock.sendall(wire.greeting(Kind.HELLO, serving._instance))
    assert sock.recv(1000)[0] == Kind.WELCOME
    return sock


def answer(sock: ssl.SSLSocket, seconds: float = 30.0) -> bytes:
    """All that comes until the connection ends."""
    sock.settimeout(seconds)
    data = b""
    with contextlib.suppress(OSError):
        while part := sock.recv(65536):
            data += part
    return data


def still_serves(serving: StreamAgent, memory: RemoteMemory, reading: StreamAgent) -> None:
    mine = poisoned(4096)
    target = reading.register(memory_of(mine))
    peer = reading.connect(serving.metadata())
    read_all(peer, memory, target, 4096)
    assert np.array_equal(mine, content(4096, 3))
    peer.disconnect()
    target.release()


def test_a_stranger_with_a_certificate_of_its_own(pair):
    serving = pair[0]
    with contextlib.suppress(OSError), attack(serving, "stranger") as sock:
        sock.sendall(wire.greeting(Kind.HELLO, serving._instance))
        assert answer(sock) == b""
    assert serving._listener.connections() == 0
    still_serves(*pair)


def test_no_certificate_at_all(pair):
    serving = pair[0]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(OSError), context.wrap_socket(socket.create_connection(("127.0.0.1", serving._listener.port), 5)) as sock:
        sock.sendall(wire.greeting(Kind.HELLO, serving._instance))
        assert answer(sock) == b""
    assert serving._listener.connections() == 0
    still_serves(*pair)


def test_an_older_tls(pair):
    serving = pair[0]
    context = client_context(identity("reader"), PeerConfig(identity("owner").certificate))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(OSError, match=r"(?i)version|alert|reset|eof"):
        context.wrap_socket(socket.create_connection(("127.0.0.1", serving._listener.port), 5))
    still_serves(*pair)


def test_a_peer_that_takes_the_owners_place(pair, tmp_path):
    """An impostor on the port that the metadata names: the reader wants the configured certificate."""
    serving, _, reading = pair
    fake = create_identity("owner", tmp_path)
    context = server_context(fake, {"reader": PeerConfig(identity("reader").certificate)})
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with contextlib.suppress(OSError):
                sock, _ = listening.accept()
                context.wrap_socket(sock, server_side=True)

        threading.Thread(target=accept, daemon=True).start()
        about = described.decode(serving.metadata(), "stream")
        endpoint = listening.getsockname()[1].to_bytes(2, "little") + about.endpoint[2:]
        with pytest.raises(PeerUnreachable):
            reading.connect(described.encode(described.Described("stream", "prefiller", about.instance, endpoint, about.regions)))


def test_a_certificate_that_is_not_configured_is_never_dialled(pair):
    """The address comes from the configuration, by the certificate: metadata cannot send a reader anywhere else."""
    serving, _, reading = pair
    about = described.decode(serving.metadata(), "stream")
    with pytest.raises(PeerUnreachable, match="not in the configuration"):
        reading.connect(described.encode(described.Described("stream", "prefiller", about.instance, about.endpoint[:2] + bytes(32), [])))


@pytest.mark.parametrize(
    "data",
    [
        wire.HEADER.pack(Kind.READ, 0, 0, (1 << 32) - 1, 1),
        wire.HEADER.pack(Kind.READ, 0, 0, 7, 1),
        wire.HEADER.pack(99, 0, 0, 8, 1),
        wire.frame(Kind.DATA, 1, b"x" * 100),
        wire.frame(Kind.READ, 0, wire.read_body(1, np.array([0]), np.array([8]))),
        wire.greeting(Kind.HELLO, bytes(16)),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["huge", "short", "unknown", "out of turn", "request 0", "second hello", "http"],
)
def test_frames_that_cannot_be(pair, data):
    serving = pair[0]
    with hello(serving) as sock:
        sock.sendall(data)
        said = answer(sock)
    assert said == b"" or said[0] == Kind.FAILED
    assert len(said) < 1100
    still_serves(*pair)


def test_a_read_before_the_greeting(pair):
    serving = pair[0]
    with attack(serving) as sock:
        sock.sendall(wire.frame(Kind.READ, 1, wire.read_body(1, np.array([0]), np.array([8]))))
        assert answer(sock)[:1] in (b"", bytes([Kind.FAILED]))
    still_serves(*pair)


@pytest.mark.parametrize("where", [(2, 0, 8), (0, 0, 8), (1, MIB, 1), (1, MIB - 7, 8), (1, (1 << 63) - 1, 8), (1, 0, MIB + 1)], ids=str)
def test_memory_outside_what_is_registered(pair, where):
    serving, region = pair[0], where[0]
    with hello(serving) as sock:
        sock.sendall(wire.frame(Kind.READ, 1, wire.read_body(region, np.array([where[1]], np.uint64), np.array([where[2]], np.uint64))))
        sock.settimeout(5)
        said = sock.recv(4096)
        assert said[0] == Kind.FAILED
        assert len(said) < 200
        sock.sendall(wire.frame(Kind.READ, 2, wire.read_body(1, np.array([0]), np.array([8]))))
        data = b""
        while len(data) < wire.HEADER.size + 8:
            data += sock.recv(4096)
        assert data[wire.HEADER.size :] == content(8, 3).tobytes()


@pytest.mark.parametrize("change", ["address", "size", "number"])
def test_edited_metadata_reads_nothing_else(pair, change):
    """The attack that works over NIXL (test_nixl_trust.py)."""
    serving, _, reading = pair
    secret = np.frombuffer(bytearray(SECRET.ljust(4096, b".")), np.uint8)
    about = described.decode(serving.metadata(), "stream")
    region = about.regions[0]
    edited = {
        "address": Region(region.number, secret.ctypes.data, 4096),
        "size": Region(region.number, region.address, 1 << 40),
        "number": Region(region.number + 1, secret.ctypes.data, 4096),
    }[change]
    source = RemoteMemory(edited.address, min(edited.nbytes, 1 << 40))
    mine = poisoned(4096)
    target = reading.register(memory_of(mine))
    peer = reading.connect(described.encode(described.Described("stream", about.name, about.instance, about.endpoint, [edited])))
    start = 2 * MIB if change == "size" else 0
    try:
        read = peer.read(source, target, [ReadRange(start, 0, 4096)])
        wait(read)
        assert np.array_equal(mine, content(4096, 3)), "bytes of the region that was named, not of the address"
    except TransferFailed:
        assert (mine == POISON).all()
    assert SECRET not in mine.tobytes()
    still_serves(*pair)


@SILENT
def test_one_byte_a_second(pair):
    """A frame that does not become whole ends its connection, and only that."""
    serving = pair[0]
    with hello(serving) as sock:
        started = time.monotonic()
        frame = wire.frame(Kind.READ, 1, wire.read_body(1, np.array([0]), np.array([8])))
        with contextlib.suppress(OSError):
            for byte in frame:
                sock.sendall(bytes([byte]))
                if select.select([sock], [], [], 0.25)[0]:
                    break
        assert answer(sock)[:1] in (b"", bytes([Kind.FAILED]))
        assert time.monotonic() - started < 30
    still_serves(*pair)


@HASTY
def test_connections_that_never_shake_hands(pair):
    """They hold at most MAX_HANDSHAKES threads, for connect_seconds each."""
    serving = pair[0]
    before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", serving._listener.port), 5) for _ in range(owner.MAX_HANDSHAKES + 20)]
    assert eventually(lambda: serving._listener.refused >= 20)
    assert threading.active_count() - before <= owner.MAX_HANDSHAKES
    assert eventually(lambda: not serving._listener._shaking)
    for sock in idle:
        sock.close()
    still_serves(*pair)


@SILENT
def test_too_many_requests(pair):
    """A peer that asks and never reads: what is held for it is bounded, and it is let go."""
    serving = pair[0]
    with hello(serving) as sock:
        ask = b"".join(wire.frame(Kind.READ, i, wire.read_body(1, np.array([0]), np.array([MIB]))) for i in range(1, 200))
        with contextlib.suppress(OSError):
            sock.sendall(ask)
        assert eventually(lambda: serving._listener.connections() == 0)
    still_serves(*pair)


def test_without_a_thread_a_peer_is_turned_away_and_the_next_is_served(pair, no_threads):
    """The thread that accepts ended, and the port answered nobody any more."""
    serving = pair[0]
    no_threads.add("kvbridge-stream-serve")
    with socket.create_connection(("127.0.0.1", serving._listener.port), 30) as sock:
        assert sock.recv(1) == b""
    no_threads.clear()
    assert eventually(lambda: (serving._listener.refused, serving._listener._shaking) == (1, {}))
    still_serves(*pair)


def test_one_peer_may_not_take_every_connection(pair):
    serving = pair[0]
    held = [hello(serving) for _ in range(owner.MAX_OF_ONE)]
    assert answer(attack(serving)) == b""
    assert serving._listener.connections() == owner.MAX_OF_ONE
    assert eventually(lambda: serving.turned_away()["connections"] == 1)
    for sock in held:
        sock.close()
    assert eventually(lambda: serving._listener.connections() == 0)
    still_serves(*pair)


def test_reads_that_are_refused_are_counted(pair):
    serving = pair[0]
    with hello(serving) as sock:
        for number in (1, 2, 3):
            sock.sendall(wire.frame(Kind.READ, number, wire.read_body(99, np.array([0]), np.array([8]))))
        assert eventually(lambda: serving.turned_away()["reads"] == 3)
    assert eventually(lambda: serving._listener.connections() == 0)
    assert serving.turned_away()["reads"] == 3, "also when the connection has ended"


def test_close_ends_handshakes_too():
    files = agents.identities()
    serving = agents.make("stream", "prefiller", serves=True, files=files, connect_seconds=300.0)
    idle = [socket.create_connection(("127.0.0.1", serving._listener.port), 30) for _ in range(9)]
    assert eventually(lambda: len(serving._listener._shaking) == len(idle))
    serving.close()
    assert not any(thread.name == "kvbridge-stream-serve" for thread in threading.enumerate())
    for sock in idle:
        sock.close()


def test_many_ranges_cost_the_owner_what_they_have_on_the_wire():
    """As Python's numbers they took twenty times as much, and one peer could make an owner hold gigabytes."""
    offsets = np.arange(4096) * 64
    bodies = [wire.read_body(1, offsets, np.full(len(offsets), 64)) for _ in range(64)]
    tracemalloc.start()
    try:
        sending = [owner._Sending(1, None, wire.parse_read(body)[1]) for body in bodies]
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()
    pieces = [piece for _ in range(27) for piece in sending[0].pieces(10_000)]
    assert sum(size for _, size in pieces) == 64 * len(offsets)
    assert sorted({offset // 64 for offset, _ in pieces}) == list(range(4096))
    assert sending[0].left == 0


def test_an_owner_that_sends_what_was_not_asked_for(tmp_path):
    """The reader takes no byte of it, and says so."""
    files = agents.identities()
    context = server_context(identity("owner"), {"reader": PeerConfig(identity("reader").certificate)})
    instance = bytes(range(16))
    reading = agents.make("stream", "decoder", serves=False, files=files)
    mine = poisoned(8192)
    target = reading.register(memory_of(mine))
    real = agents.make("stream", "prefiller", serves=True, files=files)
    about = described.decode(real.metadata(), "stream")
    real.close()
    for evil in (
        wire.frame(Kind.DATA, 1, b"e" * 4097),  # more than was asked for
        wire.frame(Kind.DATA, 9, b"e" * 16),  # of another request
        wire.frame(Kind.HELLO, 1, b"e" * 24),
        wire.HEADER.pack(Kind.DATA, 0, 0, 1 << 30, 1),
    ):
        with socket.create_server(("127.0.0.1", 0)) as listening:

            def serve(evil: bytes = evil, listening: socket.socket = listening) -> None:
                with contextlib.suppress(OSError):
                    sock = context.wrap_socket(listening.accept()[0], server_side=True)
                    sock.recv(4096)
                    sock.sendall(wire.greeting(Kind.WELCOME, instance))
                    sock.recv(4096)
                    sock.sendall(evil)
                    time.sleep(0.5)

            threading.Thread(target=serve, daemon=True).start()
            endpoint = listening.getsockname()[1].to_bytes(2, "little") + about.endpoint[2:]
            metadata = described.encode(described.Described("stream", "prefiller", instance, endpoint, [Region(1, 4096, 4096)]))
            peer = reading.connect(metadata)
            with pytest.raises(TransferFailed):
                wait(peer.read(RemoteMemory(4096, 4096), target, [ReadRange(0, 0, 4096)]))
            peer.disconnect()
            assert (mine == POISON).all()
    reading.close()


class Tap:
    """A proxy that keeps all bytes of one connection."""

    def __init__(self, port: int) -> None:
        self.seen = {"to owner": b"", "to reader": b""}
        self._to = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            near = self._listening.accept()[0]
            far = socket.create_connection(("127.0.0.1", self._to))
            while True:
                for sock in select.select([near, far], [], [])[0]:
                    data = sock.recv(65536)
                    if not data:
                        near.close()
                        far.close()
                        return
                    self.seen["to owner" if sock is near else "to reader"] += data
                    (far if sock is near else near).sendall(data)

    def close(self) -> None:
        self._listening.close()


def test_a_wiretap_sees_nothing_and_a_replay_gets_nothing(pair):
    serving, _, reading = pair
    text = np.frombuffer(bytearray(b"the patient's name is " * 200), np.uint8)
    serving.register(memory_of(text))
    tap = Tap(serving._listener.port)
    about = described.decode(serving.metadata(), "stream")
    endpoint = tap.port.to_bytes(2, "little") + about.endpoint[2:]
    peer = reading.connect(described.encode(described.Described("stream", about.name, about.instance, endpoint, about.regions)))
    mine = poisoned(len(text))
    read_all(peer, RemoteMemory(text.ctypes.data, len(text)), reading.register(memory_of(mine)), len(text))
    assert mine.tobytes() == text.tobytes()
    peer.disconnect()
    tap.close()
    assert len(tap.seen["to reader"]) > len(text)
    assert b"patient" not in tap.seen["to reader"]
    assert wire.MAGIC not in tap.seen["to owner"] + tap.seen["to reader"]
    with socket.create_connection(("127.0.0.1", serving._listener.port), 5) as sock:
        sock.sendall(tap.seen["to owner"])
        sock.settimeout(3)
        data = b""
        with contextlib.suppress(OSError):
            while part := sock.recv(65536):
                data += part
    assert len(data) < len(text), "a handshake, and no bytes of ours"
    still_serves(*pair)


def test_a_flipped_bit_on_the_wire(pair):
    """TLS notices; the read fails with a type."""
    serving, memory, reading = pair
    listening = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with contextlib.suppress(OSError):
            near = listening.accept()[0]
            far = socket.create_connection(("127.0.0.1", serving._listener.port))
            passed = 0
            while True:
                for sock in select.select([near, far], [], [])[0]:
                    data = bytearray(sock.recv(65536))
                    if not data:
                        near.close()
                        far.close()
                        return
                    if sock is far:
                        passed += len(data)
                        if passed > 100_000:
                            data[len(data) // 2] ^= 1
                    (far if sock is near else near).sendall(data)

    threading.Thread(target=run, daemon=True).start()
    about = described.decode(serving.metadata(), "stream")
    endpoint = listening.getsockname()[1].to_bytes(2, "little") + about.endpoint[2:]
    peer = reading.connect(described.encode(described.Described("stream", about.name, about.instance, endpoint, about.regions)))
    mine = poisoned(MIB)
    with pytest.raises(TransferError):
        read_all(peer, memory, reading.register(memory_of(mine)), MIB)
    listening.close()
    right = content(MIB, 3)
    assert ((mine == right) | (mine == POISON)).all(), "what arrived before is right; nothing else arrived"
