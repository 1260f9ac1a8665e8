"""kill -9 of either process at each step of the hand-off: the other gets a typed error within its bound, and nothing leaks."""

import json
import subprocess
import sys
import threading

import psutil
import pytest

from backends.cpu.device import CpuReferenceDevice
from bridge.errors import KVBridgeError
from bridge.handoff import Bounds, Decoder, Mode, PeerConfig, Prefiller, Target, Ticket, create_identity
from bridge.transfer.nixl import NixlAgent
from tests.handoff.pair import MODEL, TOKENS, block_table, manifest, paged_cache
from tests.waiting import PATIENCE, eventually

pytestmark = pytest.mark.slow

BOUNDS = dict(connect=60, claim=60, chunk=60, transfer=60, staging=60, lease=300, heartbeat=0.3, silence=60)
"""The survivor knows of the death by its connection, at once: every bound is far longer than these tests wait."""
UNCLAIMED = BOUNDS | {"chunk": 3}
"""But where there was no claim, a prefiller waits for a decoder for so long."""

PREFILLER_STEPS = ("listening", "offered", "hello", "claimed", "packed", "taken", "committed")
BEFORE_THE_CLAIM = ("connecting", "connected", "claiming")
DECODER_STEPS = (*BEFORE_THE_CLAIM, "granted", "reading", "arrived", "landed", "commit_sent")


@pytest.fixture
def ends(tmp_path):
    return create_identity("prefill-0", tmp_path), create_identity("decode-0", tmp_path)


def start_victim(tmp_path, **plan):
    plan = {"folder": str(tmp_path), "bounds": BOUNDS, **plan}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faults.victim", json.dumps(plan)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def outcome(work):
    """What `work` raised, of this package's own errors."""
    try:
        work()
    except KVBridgeError as error:
        return error
    return None


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
        fetch = decoder.start(ticket, target)
        error = outcome(lambda: fetch.result(PATIENCE))
        assert fetch.done(), "it hangs"
        assert victim.wait(PATIENCE) == -9
        if step != "committed":
            assert error is not None
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
        bounds=Bounds(**(UNCLAIMED if step in BEFORE_THE_CLAIM else BOUNDS)),
        stream_depth=1,
    )
    port = prefiller.port
    try:
        offer = prefiller.offer(manifest("r", TOKENS), paged_cache(16, 12, 1), block_table(16, 12, 2), mode=Mode.STREAM)
        victim = start_victim(tmp_path, role="decoder", die_at=step, port=port, ticket=offer.ticket.to_dict())
        results = []

        def serve():
            if step not in BEFORE_THE_CLAIM:
                offer.wait_claimed()  # the wait of `advance` for a decoder is bounded, and the victim takes long to start
            offer.advance(TOKENS)
            offer.wait(10 * PATIENCE)

        packing = threading.Thread(target=lambda: results.append(outcome(serve)), daemon=True)
        if step not in BEFORE_THE_CLAIM:
            packing.start()
        assert json.loads(victim.stdout.readline()) == {"died_at": step}
        assert victim.wait(PATIENCE) == -9
        if step in BEFORE_THE_CLAIM:
            packing.start()
        packing.join(PATIENCE)
        assert results, "it hangs"
        if step != "commit_sent":
            assert results[0] is not None
        assert eventually(lambda: prefiller.staging()[0] == 0 and prefiller.live_leases() == 0)
    finally:
        prefiller.close()
        registered = agent.registered_bytes()
        agent.close()
    assert registered == 0
    assert port not in listening_ports() - before
