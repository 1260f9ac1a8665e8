"""What a peer of the ucx agent can try through the agent's own messages. The transport below is for trusted networks only."""

from __future__ import annotations

import time

import numpy as np
import pytest

from bridge.transfer import described
from bridge.transfer.agent import ReadRange, RemoteMemory
from bridge.transfer.described import Region
from bridge.transfer.errors import PeerUnreachable, TransferFailed
from bridge.transfer.ucx import wire
from tests.transfer import agents
from tests.transfer.serving import KEPT, MIB, POISON, content, memory_of, poisoned, read_all, wait

pytestmark = pytest.mark.ucxx
SECRET = b"this was never registered"


@pytest.fixture
def pair():
    owner, reader = (agents.make("ucx", name, serves=name == "owner", files={}, connect_seconds=2.0) for name in ("owner", "reader"))
    theirs = content(MIB, 3)
    owner.register(memory_of(theirs))
    yield owner, RemoteMemory(theirs.ctypes.data, MIB), reader
    reader.close()
    owner.close()
    KEPT.clear()


@pytest.mark.parametrize("change", ["address", "size", "number"])
def test_edited_metadata_reads_nothing_else(pair, change):
    """The attack that works over NIXL (test_nixl_trust.py)."""
    owner, _, reader = pair
    secret = np.frombuffer(bytearray(SECRET.ljust(4096, b".")), np.uint8)
    about = described.decode(owner.metadata(), "ucx")
    region = about.regions[0]
    edited = {
        "address": Region(region.number, secret.ctypes.data, 4096),
        "size": Region(region.number, region.address, 1 << 40),
        "number": Region(region.number + 1, secret.ctypes.data, 4096),
    }[change]
    mine = poisoned(4096)
    target = reader.register(memory_of(mine))
    peer = reader.connect(described.encode(described.Described("ucx", about.name, about.instance, about.endpoint, [edited])))
    start = 2 * MIB if change == "size" else 0
    try:
        wait(peer.read(RemoteMemory(edited.address, edited.nbytes), target, [ReadRange(start, 0, 4096)]))
        assert np.array_equal(mine, content(4096, 3)), "bytes of the region that was named, not of the address"
    except TransferFailed:
        assert (mine == POISON).all()
    assert SECRET not in mine.tobytes()


def test_who_does_not_hold_the_metadata_is_not_answered(pair):
    owner, _, reader = pair
    about = described.decode(owner.metadata(), "ucx")
    with pytest.raises(PeerUnreachable, match="did not answer"):
        reader.connect(described.encode(described.Described("ucx", about.name, bytes(16), about.endpoint, about.regions)))


def test_messages_that_are_none_are_dropped_and_counted(pair):
    owner, memory, reader = pair
    peer = reader.connect(owner.metadata())
    link, worker = peer._link, reader._worker
    session, instance = link.session, described.decode(owner.metadata(), "ucx").instance

    def send(data: np.ndarray) -> None:
        worker.call(lambda: worker.send(link._endpoint, [(data, wire.CONTROL_TAG)], lambda status: None), 5)

    bad = [
        np.zeros(0, np.uint8),
        np.frombuffer(b"GET / HTTP/1.1\r\n\r\n", np.uint8),
        np.full(wire.CONTROL_BYTES + 1000, 7, np.uint8),
        wire.encode(wire.Read(bytes(16), 1, 1, bytes(16))),  # of no session
        wire.encode(wire.Read(session, 1, 1, bytes(7))),
        wire.encode(wire.Hello(session, wire.prove(instance, session, worker.address), worker.address)),  # a session that exists
        wire.encode(wire.Hello(bytes(range(16)), bytes(32), b"an address that would end UCX")),
        wire.encode(wire.Verdict(session, 1, "")),
    ]
    for data in bad:
        send(data)
    limit = time.monotonic() + 10
    while owner._worker.ignored < len(bad) - 1 and time.monotonic() < limit:  # the one that is too long is cut off by UCX
        time.sleep(0.01)
    assert owner._worker.ignored >= len(bad) - 1
    mine = poisoned(4096)
    read_all(peer, memory, reader.register(memory_of(mine)), 4096)
    assert np.array_equal(mine, content(4096, 3))
