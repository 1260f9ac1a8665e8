"""A process that plays one end of hand-offs over any agent, one order a line, until it is killed or its input ends.

Each order is answered with one line. A fetch with `tell` says before that when it first comes to the step of that name.
Driven by test_restart.py on one host, and by tests/netns between two.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from backends.cpu.device import CpuReferenceDevice
from bridge.errors import KVBridgeError
from bridge.handoff import Bounds, Decoder, Identity, PeerConfig, Prefiller, Target, Ticket
from bridge.transfer.choose import open_agent
from tests.handoff.pair import MODEL, block_table, manifest, paged_cache, tokens_of

TOKENS = 150


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    plan: dict[str, Any] = json.loads(sys.argv[1])
    folder, bounds = Path(plan["folder"]), Bounds(**plan["bounds"])
    own, other = ("prefill-0", "decode-0") if plan["role"] == "prefiller" else ("decode-0", "prefill-0")
    identity = Identity(own, folder / f"{own}.crt", folder / f"{own}.key")
    host = plan.get("host", "127.0.0.1")
    peers = {other: PeerConfig(folder / f"{other}.crt", host, plan["port"])}
    serves = plan["role"] == "prefiller"
    telling = ""

    def observe(step: str, details: dict[str, Any]) -> None:
        nonlocal telling
        if step == telling:
            telling = ""
            say(step=step)

    agent = open_agent(
        plan.get("agent", "nixl"),
        f"served-{os.getpid()}",
        identity=identity,
        peers=peers,
        serves=serves,
        host=host,
        transports=["tcp", "self"],
    )
    tokens, staging = plan.get("tokens", TOKENS), plan.get("staging", 1 << 22)
    small, large = -(-tokens // 16) + 2, -(-tokens // 64) + 1  # pages: some are left over
    if serves:
        prefiller = Prefiller(
            identity, peers, CpuReferenceDevice(), agent, staging_bytes=staging, host=host, port=plan["port"], bounds=bounds
        )
        say(port=prefiller.port)
    else:
        decoder = Decoder(identity, peers, CpuReferenceDevice(), agent, staging_bytes=staging, bounds=bounds, observe=observe)
        say(port=0)
    for line in sys.stdin:
        order = json.loads(line)
        telling = order.get("tell", "")
        if order.get("state"):
            say(staging=(prefiller if serves else decoder).staging()[0], counters=(prefiller if serves else decoder).counters.snapshot())
            continue
        if serves:
            offer = prefiller.offer(
                manifest(order["name"], tokens, chunk_tokens=plan.get("chunk", 32)),
                paged_cache(16, small, order["seed"]),
                block_table(16, small, 2),
            )
            offer.advance(tokens)
            say(ticket=offer.ticket.to_dict())
            continue
        cache, table = paged_cache(64, large, None), block_table(64, large, 3)
        start = time.monotonic()
        try:
            decoder.fetch(Ticket.from_dict(order["ticket"]), Target(cache, table, MODEL))
        except KVBridgeError as error:
            say(failed=error.clause, said=str(error), seconds=time.monotonic() - start)
            continue
        seconds = time.monotonic() - start
        expected = tokens_of(paged_cache(16, small, order["seed"]), block_table(16, small, 2), tokens) if "seed" in order else None
        right = None if expected is None else np.array_equal(expected, tokens_of(cache, table, tokens))
        say(seconds=seconds, right=right)
    (prefiller if serves else decoder).close()
    agent.close()


if __name__ == "__main__":
    main()
