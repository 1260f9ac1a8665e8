"""A process that plays one end of hand-offs over NIXL, one order a line, until it is killed. Driven by test_restart.py."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from backends.cpu.device import CpuReferenceDevice
from bridge.errors import KVBridgeError
from bridge.handoff import Bounds, Decoder, Identity, PeerConfig, Prefiller, Target, Ticket
from bridge.transfer.nixl import NixlAgent
from tests.handoff.pair import MODEL, block_table, manifest, paged_cache

TOKENS = 150


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    plan: dict[str, Any] = json.loads(sys.argv[1])
    folder, bounds = Path(plan["folder"]), Bounds(**plan["bounds"])
    agent = NixlAgent(f"served-{os.getpid()}")
    own, other = ("prefill-0", "decode-0") if plan["role"] == "prefiller" else ("decode-0", "prefill-0")
    identity = Identity(own, folder / f"{own}.crt", folder / f"{own}.key")
    peers = {other: PeerConfig(folder / f"{other}.crt", "127.0.0.1", plan["port"])}
    if plan["role"] == "prefiller":
        prefiller = Prefiller(identity, peers, CpuReferenceDevice(), agent, staging_bytes=1 << 22, port=plan["port"], bounds=bounds)
        say(port=prefiller.port)
    else:
        decoder = Decoder(identity, peers, CpuReferenceDevice(), agent, staging_bytes=1 << 22, bounds=bounds)
        say(port=0)
    for line in sys.stdin:
        order = json.loads(line)
        if plan["role"] == "prefiller":
            offer = prefiller.offer(manifest(order["name"], TOKENS), paged_cache(16, 12, order["seed"]), block_table(16, 12, 2))
            offer.advance(TOKENS)
            say(ticket=offer.ticket.to_dict())
            continue
        start = time.monotonic()
        try:
            decoder.fetch(Ticket.from_dict(order["ticket"]), Target(paged_cache(64, 4, None), block_table(64, 4, 3), MODEL))
            say(seconds=time.monotonic() - start)
        except KVBridgeError as error:
            say(failed=error.clause, seconds=time.monotonic() - start)


if __name__ == "__main__":
    main()
