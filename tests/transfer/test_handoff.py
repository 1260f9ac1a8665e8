"""A whole hand-off over each agent, watched for speed: every mode, and every failure stays typed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backends.cpu.device import CpuReferenceDevice
from bridge.handoff import Decoder, Identity, Mode, PeerConfig, Prefiller
from bridge.transfer.speed import WatchedAgent
from tests.handoff.pair import BOUNDS, MODEL, Target, block_table, manifest, paged_cache, tokens_of
from tests.transfer import agents

TOKENS = 150


def identity(name: str) -> Identity:
    files = agents.identities()
    return Identity(name, Path(files[name] + ".crt"), Path(files[name] + ".key"))


@pytest.mark.parametrize("mode", list(Mode))
def test_raw_arrives_bit_for_bit(make, kind, mode):
    serving, reading = WatchedAgent(make("owner", serves=True), 0.001), WatchedAgent(make("reader"), 0.001)
    owner, reader = identity("owner"), identity("reader")
    prefiller = Prefiller(
        owner, {"reader": PeerConfig(reader.certificate)}, CpuReferenceDevice(), serving, staging_bytes=1 << 22, bounds=BOUNDS
    )
    peers = {"owner": PeerConfig(owner.certificate, "127.0.0.1", prefiller.port)}
    decoder = Decoder(reader, peers, CpuReferenceDevice(), reading, staging_bytes=1 << 22, bounds=BOUNDS)
    try:
        source, source_table = paged_cache(16, 12, seed=1), block_table(16, 12, 2)
        for number in range(3):
            target, target_table = paged_cache(64, 4, seed=None), block_table(64, 4, 3)
            offer = prefiller.offer(manifest(f"r{number}", TOKENS), source, source_table, mode=mode)
            fetch = decoder.start(offer.ticket, Target(target, target_table, MODEL))
            for computed in (10, 64, 149, TOKENS):
                offer.advance(computed)
            received = fetch.result(30)
            offer.wait(10)
            assert received.nbytes == offer.payload_bytes
            assert np.array_equal(tokens_of(source, source_table, TOKENS), tokens_of(target, target_table, TOKENS))
        assert prefiller.staging()[0] == decoder.staging()[0] == 0
        assert reading.agent.counters().reads_failed == 0
        assert reading.agent.counters().reads_finished >= 3
    finally:
        decoder.close()
        prefiller.close()
    assert reading.registered_bytes() == serving.registered_bytes() == 0
