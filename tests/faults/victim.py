"""A process that plays one end of a hand-off over NIXL and kills itself at a given step. Driven by test_kill.py."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from backends.cpu.device import CpuReferenceDevice
from bridge.handoff import Bounds, Decoder, Identity, Mode, PeerConfig, Prefiller, Ticket
from bridge.transfer.nixl import NixlAgent
from tests.handoff.pair import MODEL, TOKENS, block_table, manifest, paged_cache


def main() -> None:
    plan: dict[str, Any] = json.loads(sys.argv[1])
    folder = Path(plan["folder"])
    bounds = Bounds(**plan["bounds"])

    def observe(step: str, details: dict[str, Any]) -> None:
        if step == plan["die_at"]:
            print(json.dumps({"died_at": step}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    agent = NixlAgent(f"victim-{os.getpid()}")
    names = ("prefill-0", "decode-0")
    own, other = names if plan["role"] == "prefiller" else names[::-1]
    identity = Identity(own, folder / f"{own}.crt", folder / f"{own}.key")
    peer = PeerConfig(folder / f"{other}.crt", "127.0.0.1", plan.get("port", 0))
    if plan["role"] == "prefiller":
        prefiller = Prefiller(
            identity, {other: peer}, CpuReferenceDevice(), agent, staging_bytes=1 << 22, bounds=bounds, stream_depth=1, observe=observe
        )
        offer = prefiller.offer(manifest("r", TOKENS), paged_cache(16, 12, 1), block_table(16, 12, 2), mode=Mode.STREAM)
        print(json.dumps({"port": prefiller.port, "ticket": offer.ticket.to_dict()}), flush=True)
        offer.wait_claimed()
        offer.advance(TOKENS)
        offer.wait(60)
        sys.stdin.read()
    else:
        decoder = Decoder(identity, {other: peer}, CpuReferenceDevice(), agent, staging_bytes=1 << 22, bounds=bounds, observe=observe)
        decoder.fetch(Ticket.from_dict(plan["ticket"]), _target())
        sys.stdin.read()


def _target() -> Any:
    from bridge.handoff import Target

    return Target(paged_cache(64, 4, None), block_table(64, 4, 3), MODEL)


if __name__ == "__main__":
    main()
