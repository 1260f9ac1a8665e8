"""Over the stream agent a decoder reads what its own leases hold, while they hold it, and nothing else of the staging memory."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from backends.cpu.device import CpuReferenceDevice
from bridge.handoff import Decoder, PeerConfig, Prefiller, Target, create_identity
from bridge.handoff.errors import Refused
from bridge.handoff.grants import Grants
from bridge.handoff.staging import StagingPool
from bridge.transfer.agent import ReadRange, RemoteMemory
from bridge.transfer.errors import TransferFailed
from bridge.transfer.speed import WatchedAgent
from bridge.transfer.stream import StreamAgent
from tests.handoff.pair import BOUNDS, MODEL, block_table, manifest, paged_cache, tokens_of
from tests.transfer.serving import MIB, POISON, content, memory_of, poisoned, wait
from tests.waiting import PATIENCE, eventually

TOKENS = 150
NAMES = ("owner", "reader", "another")


@pytest.fixture
def hosts(tmp_path):
    """An owner's and two readers' identities, and agents made for them."""
    identities = {name: create_identity(name, tmp_path) for name in NAMES}
    made = []

    def agent(name, **settings):
        others = {other: PeerConfig(identities[other].certificate, "127.0.0.1") for other in NAMES if other != name}
        made.append(StreamAgent(f"agent-of-{name}", identities[name], others, serves=name == "owner", **settings))
        return made[-1]

    yield identities, agent
    for one in made:
        one.close()


class Guarding:
    """Lets one reader in, for as long as it is told to."""

    def __init__(self, reader, frames=1 << 30):
        self.reader, self.frames, self.inside, self.asked = reader, frames, 0, set()

    def enter(self, reader, ranges):
        self.asked.add(reader)
        self.frames -= 1
        if reader != self.reader or self.frames < 0:
            return None
        self.inside += 1
        return "entered"

    def leave(self, entered):
        assert entered == "entered"
        self.inside -= 1


def read_into(peer, target, nbytes):
    transfer = peer.read(RemoteMemory(peer.address, nbytes), target, [ReadRange(0, 0, nbytes)])
    try:
        wait(transfer)
    finally:
        transfer.release()


def test_the_guard_is_asked_by_name_and_a_reader_that_it_refuses_gets_no_byte(hosts):
    _, agent = hosts
    serving, data, guard = agent("owner"), content(MIB, 3), Guarding("reader")
    serving.register(memory_of(data)).guard = guard
    for name in ("reader", "another"):
        reading, mine = agent(name), poisoned(MIB)
        target, peer = reading.register(memory_of(mine)), reading.connect(serving.metadata())
        peer.address = data.ctypes.data
        if name == "reader":
            read_into(peer, target, MIB)
            assert np.array_equal(mine, data)
        else:
            with pytest.raises(TransferFailed, match="not this reader's"):
                read_into(peer, target, MIB)
            assert (mine == POISON).all()
    assert guard.asked == {"reader", "another"}
    assert guard.inside == 0


def test_a_grant_that_ends_in_the_middle_ends_the_read_but_not_the_connection(hosts):
    _, agent = hosts
    serving, data, guard = agent("owner"), content(4 * MIB, 3), Guarding("reader", frames=3)
    serving.register(memory_of(data)).guard = guard
    reading, mine = agent("reader"), poisoned(4 * MIB)
    target, peer = reading.register(memory_of(mine)), reading.connect(serving.metadata())
    peer.address = data.ctypes.data
    with pytest.raises(TransferFailed, match="not this reader's"):
        read_into(peer, target, 4 * MIB)
    assert 0 < (mine != POISON).sum() < 4 * MIB
    guard.frames = 1 << 30
    read_into(peer, target, 4 * MIB)
    assert np.array_equal(mine, data)
    assert guard.inside == 0


class Ends:
    """A prefiller and two decoders over stream agents, watched as vLLM's are."""

    def __init__(self, hosts, **settings):
        identities, agent = hosts
        self.serving = agent("owner")
        readers = {name: PeerConfig(identities[name].certificate) for name in NAMES[1:]}
        self.prefiller = Prefiller(
            identities["owner"], readers, CpuReferenceDevice(), WatchedAgent(self.serving, 0.001), staging_bytes=1 << 22, bounds=BOUNDS
        )
        owner = {"owner": PeerConfig(identities["owner"].certificate, "127.0.0.1", self.prefiller.port)}
        self.agents = {name: agent(name) for name in NAMES[1:]}
        self.decoders = {
            name: Decoder(
                identities[name], owner, CpuReferenceDevice(), self.agents[name], staging_bytes=1 << 22, bounds=BOUNDS, **settings
            )
            for name in NAMES[1:]
        }

    def close(self):
        for decoder in self.decoders.values():
            decoder.close()
        self.prefiller.close()


@pytest.fixture
def ends(hosts):
    made = Ends(hosts)
    yield made
    made.close()


def staging_read(ends, reader):
    """How many bytes of the prefiller's staging memory this reader's own agent gets."""
    memory, agent = ends.prefiller._memory, ends.agents[reader]
    mine = poisoned(4096)
    target, peer = agent.register(memory_of(mine)), agent.connect(ends.serving.metadata())
    peer.address = memory.address
    try:
        read_into(peer, target, 4096)
    except TransferFailed:
        pass
    finally:
        peer.disconnect()
        target.release()
    return int((mine != POISON).sum())


def test_a_parked_payload_is_nobodys_before_its_claim_and_nobodys_after(ends):
    offer = ends.prefiller.offer(manifest("r", TOKENS), paged_cache(16, 12, seed=1), block_table(16, 12, 2))
    offer.advance(TOKENS)
    assert ends.prefiller.staging()[0] > 0
    assert [staging_read(ends, name) for name in NAMES[1:]] == [0, 0]
    target, table = paged_cache(64, 4, seed=None), block_table(64, 4, 3)
    ends.decoders["reader"].fetch(offer.ticket, Target(target, table, MODEL))
    offer.wait(5)
    source = paged_cache(16, 12, seed=1), block_table(16, 12, 2)
    assert np.array_equal(tokens_of(*source, TOKENS), tokens_of(target, table, TOKENS))
    assert ends.prefiller.staging()[0] == 0
    assert [staging_read(ends, name) for name in NAMES[1:]] == [0, 0]


def test_what_one_decoder_has_claimed_another_cannot_read(hosts):
    """Looked at while the claim holds, before its first read."""
    seen = {}

    def look(event, about):
        if event == "reading" and not seen:
            seen.update({name: staging_read(ends, name) for name in ("another", "reader")})

    ends = Ends(hosts, observe=look)
    try:
        offer = ends.prefiller.offer(manifest("r", TOKENS), paged_cache(16, 12, seed=1), block_table(16, 12, 2))
        offer.advance(TOKENS)
        ends.decoders["reader"].fetch(offer.ticket, Target(paged_cache(64, 4, seed=None), block_table(64, 4, 3), MODEL))
        assert seen["another"] == 0
        assert seen["reader"] > 4000  # some bytes of a payload look like the poison
    finally:
        ends.close()


def test_a_lease_that_ends_in_mid_read_fails_by_its_own_reason_and_its_memory_comes_back(hosts):
    """The reads are refused at once; that a moment later the prefiller says why is what the engine is told."""
    reading, cancelled = threading.Event(), threading.Event()

    def slow(event, about):
        if event == "reading":
            reading.set()
            cancelled.wait(PATIENCE)

    ends = Ends(hosts, observe=slow)
    try:
        offer = ends.prefiller.offer(manifest("r", TOKENS), paged_cache(16, 12, seed=1), block_table(16, 12, 2))
        offer.advance(TOKENS)
        fetch = ends.decoders["reader"].start(offer.ticket, Target(paged_cache(64, 4, seed=None), block_table(64, 4, 3), MODEL))
        assert reading.wait(PATIENCE)
        offer.cancel()
        cancelled.set()
        with pytest.raises(Refused, match="gave the request up"):
            fetch.result(PATIENCE)
        assert eventually(lambda: not ends.prefiller.staging()[0] and not ends.decoders["reader"].staging()[0])
    finally:
        ends.close()


def test_an_extent_goes_back_when_its_last_frame_has_been_sent():
    pool = StagingPool(1 << 16)
    grants = Grants(threading.Condition(), pool)
    lease, extent, after = SimpleNamespace(sessions={0: SimpleNamespace(peer="reader")}), pool.try_take(10_000), pool.try_take(500)
    grants.add(extent, lease)
    grants.add(after, SimpleNamespace(sessions={}))
    inside = (extent.offset, 10_000)
    for reader, ranges in (
        ("another", [inside]),
        ("reader", [(extent.offset, 10_001)]),
        ("reader", [inside, (after.offset, 1)]),
        ("reader", [(after.offset + 4096, 1)]),
    ):
        assert grants.enter(reader, ranges) is None
    entered = grants.enter("reader", [inside, (extent.offset + 9_999, 1)])
    grants.end(extent)
    assert grants.enter("reader", [inside]) is None
    assert pool.used == 12_288 + 4096
    grants.leave(entered)
    assert pool.used == 4096
    grants.end(after)
    assert pool.used == 0
