"""kill -9 of either process at each step of the hand-off: the other gets a typed error within its bound, and nothing leaks."""

import json
import subprocess
import sys
import threading
import time

import psutil
import pytest

from backends.cpu.device import CpuReferenceDevice
from bridge.errors import KVBridgeError
from bridge.handoff import Bounds, Decoder, Mode, PeerConfig, Prefiller, Target, Ticket, create_identity
from bridge.transfer.nixl import NixlAgent
from tests.handoff.pair import MODEL, block_table, manifest, paged_cache

pytestmark = pytest.mark.slow

TOKENS = 150
BOUNDS = dict(connect=3, claim=3, chunk=3, transfer=3, staging=2, lease=10, heartbeat=0.3, silence=2)
BOUND_SECONDS = 3 + 2 + 1.5
"""The longest of the bounds that a survivor can be waiting for, the silence after which a peer is lost, and a margin for a busy machine."""

PREFILLER_STEPS = ("listening", "offered", "hello", "claimed", "packed", "taken", "committed")
DECODER_STEPS = ("connecting", "connected", "claiming", "granted", "reading", "arrived", "landed", "commit_sent")


@pytest.fixture
def ends(tmp_path):
    return create_identity("prefill-0", tmp_path), create_identity("decode-0", tmp_path)


def start_victim(tmp_path, **plan):
    plan = {"folder": str(tmp_path), "bounds": BOUNDS, **plan}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faults.victim", json.dumps(plan)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def outcome(work):
    """(what `work` raised, seconds that it took)."""
    start = time.monotonic()
    try:
        work()
    except KVBridgeError as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def eventually(condition, seconds=BOUND_SECONDS):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def listening_ports():
    return {c.laddr.port for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("step", PREFILLER_STEPS)
def test_the_prefiller_dies(tmp_path, ends, step):
    victim = start_victim(tmp_path, role="prefiller", die_at=step)
    first = json.loads(victim.stdout.readline())
    agent = NixlAgent("survivor")
    decoder = Decoder(
        ends[1],
        {"prefill-0": PeerConfig(ends[0].certificate, "127.0.0.1", first.get("port", 1))},
        CpuReferenceDevice(),
        agent,
        staging_bytes=1 << 22,
        bounds=Bounds(**BOUNDS),
    )
    try:
        ticket = Ticket.from_dict(first["ticket"]) if "ticket" in first else Ticket("prefill-0", "r", 1, 1)
        target = Target(paged_cache(64, 4, None), block_table(64, 4, 3), MODEL)
        error, seconds = outcome(lambda: decoder.fetch(ticket, target))
        assert victim.wait(10) == -9
        if step != "committed":
            assert error is not None
        assert seconds < BOUND_SECONDS
        if error is not None:
            assert decoder.counters.snapshot()[f"failed{{{error.clause}}}"] == 1
        assert eventually(lambda: decoder.staging()[0] == 0), "staging is given back, quarantine included"
    finally:
        victim.kill()
        decoder.close()
        registered = agent.registered_bytes()
        agent.close()
    assert registered == 0


@pytest.mark.parametrize("step", DECODER_STEPS)
def test_the_decoder_dies(tmp_path, ends, step):
    before = listening_ports()
    agent = NixlAgent("survivor")
    prefiller = Prefiller(
        ends[0],
        {"decode-0": PeerConfig(ends[1].certificate)},
        CpuReferenceDevice(),
        agent,
        staging_bytes=1 << 22,
        bounds=Bounds(**BOUNDS),
        stream_depth=1,
    )
    port = prefiller.port
    try:
        offer = prefiller.offer(manifest("r", TOKENS), paged_cache(16, 12, 1), block_table(16, 12, 2), mode=Mode.STREAM)
        victim = start_victim(tmp_path, role="decoder", die_at=step, port=port, ticket=offer.ticket.to_dict())
        results = []
        packing = threading.Thread(target=lambda: results.append(outcome(lambda: (offer.advance(TOKENS), offer.wait(10)))))
        # The wait for a decoder is bounded too; it begins when the victim has come far enough to die.
        said = victim.stdout.readline()
        died = time.monotonic()
        packing.start() if not said else None
        if said:
            packing.start()
        assert victim.wait(10) == -9 or not said
        packing.join(BOUND_SECONDS + 12)
        error, _ = results[0]
        if step != "commit_sent":
            assert error is not None
        assert time.monotonic() - died < BOUND_SECONDS
        assert eventually(lambda: prefiller.staging()[0] == 0 and prefiller.live_leases() == 0)
    finally:
        prefiller.close()
        registered = agent.registered_bytes()
        agent.close()
    assert registered == 0
    assert port not in listening_ports() - before
