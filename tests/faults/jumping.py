"""A prefiller and a decoder in a process whose wall clock jumps in mid-transfer. Driven by test_clock.py."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from bridge.errors import KVBridgeError
from bridge.handoff import Mode
from tests.handoff.pair import BOUNDS, TOKENS, Pair, block_table, manifest, paged_cache, tokens_of
from tests.waiting import PATIENCE


def main() -> None:
    jump, clock = sys.argv[1], Path(os.environ["WALL_CLOCK_OFFSET"])
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(Path(folder), bounds=replace(BOUNDS, heartbeat=0.3))
        source = paged_cache(16, 12, seed=1), block_table(16, 12, 2)
        target = paged_cache(64, 4, seed=None), block_table(64, 4, 3)
        offer = pair.prefiller.offer(manifest("r", TOKENS), *source, mode=Mode.STREAM)
        packing = threading.Thread(target=offer.advance, args=(TOKENS,))
        pair.agent.gate.clear()
        fetch = pair.decoder.start(offer.ticket, pair.target(*target))
        packing.start()
        while "decoder reading" not in pair.steps:
            time.sleep(0.002)
        before, steady = time.time(), time.monotonic()
        clock.write_text(jump)
        # Heartbeats go on, and no lease, chunk or silence runs out.
        time.sleep(0.8)
        moved, passed = time.time() - before, time.monotonic() - steady
        pair.agent.gate.set()
        fetch.result(PATIENCE)
        offer.wait(PATIENCE)
        packing.join(PATIENCE)
        same = np.array_equal(tokens_of(*source, TOKENS), tokens_of(*target, TOKENS))
        # A new connection asks the wall clock for one thing: whether the certificates are valid.
        pair.decoder.close()
        pair.decoder = pair.new_decoder()
        offer = pair.prefiller.offer(manifest("later", TOKENS), *source)
        offer.advance(TOKENS)
        try:
            pair.decoder.fetch(offer.ticket, pair.target(*target))
            later = "right"
        except KVBridgeError as error:
            later = error.clause
        failed = [name for counts in (pair.decoder, pair.prefiller) for name in counts.counters.snapshot() if name.startswith("failed")]
        print(json.dumps({"moved": moved, "passed": passed, "same": same, "later": later, "failed": failed}), flush=True)
        pair.close()


if __name__ == "__main__":
    main()
